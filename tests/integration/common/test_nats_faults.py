"""A real server that is killed, stopped or absent: what clients see, and what is still there."""

import asyncio
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import nats
import psutil
import pytest
from tests.waiting import eventually, soon

from slackwater.common.base import codec, limits
from slackwater.common.base.clock import LiveClock
from slackwater.common.base.errors import (
    ConfigRejected,
    DeadlineExceeded,
    Rejected,
    Retryable,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.base.retry import retry
from slackwater.common.bus.base import Delivery, Endpoint, ServiceInfo
from slackwater.common.bus.nats import NatsBus
from slackwater.common.bus.server import NatsServer
from slackwater.common.shell.client import Client
from slackwater.common.shell.world import live_world
from slackwater.common.store.base import Bucket, Entry, SequenceConflict
from slackwater.common.store.history import Keeping, Kept, NothingKept
from slackwater.common.store.history_nats import NatsHistory
from slackwater.common.store.jetstream import ask
from slackwater.common.store.nats import NatsStore
from slackwater.schemas import subjects
from slackwater.schemas.base import Ok, Refused

pytestmark = pytest.mark.live

INFO = ServiceInfo("toy", "1.0.0", "a service for tests", {})
KILLS = 5


async def _echo(delivery: Delivery) -> bytes:
    return delivery.payload


class Writer:
    """Writes numbered values and keeps outside which were acknowledged."""

    def __init__(self, bucket: Bucket, rng: random.Random) -> None:
        self.bucket, self.rng = bucket, rng
        self.acknowledged: dict[str, bytes] = {}
        self.stopping = False

    async def run(self) -> None:
        last = 0
        for number in range(10**6):
            if self.stopping:
                return
            key, value = f"k{number % 50}", b"%d" % number
            put = partial(self._put, key, value, last)
            put = partial(self._put, key, value, last)
            last = await retry(put, budget_s=30.0, rng=self.rng)
            self.acknowledged[key] = value

    async def _put(self, key: str, value: bytes, last: int) -> int:
        """After a timeout the truth is read back: it may have been written."""
        try:
            return await self.bucket.put(key, value, expected_last=last)
        except SequenceConflict:
            found = await self.bucket.get(key)
            assert found == Entry(key, value, last + 1), "it was this very write, and no other"
            return last + 1


@pytest.mark.slow
async def test_killing_the_server_under_load_loses_nothing_acknowledged(
    own_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 and restart, several times, while one client writes, one asks, one watches: all come
    back by themselves; every acknowledged value is there; the watch saw the last values."""
    monkeypatch.setattr(limits, "STORE_TIMEOUT_S", 1.0)
    rng = random.Random(3)
    server_bus = await NatsBus.connect(own_nats_server.url, "server")
    client_bus = await NatsBus.connect(own_nats_server.url, "client")
    await server_bus.serve(INFO, [Endpoint("act", "t.act", _echo, {}, 64)])
    bucket = await NatsStore(client_bus).bucket("load")
    writer = Writer(bucket, rng)
    seen: dict[str, bytes | None] = {}
    answered = 0

    async def watch() -> None:
        async with aclosing((await NatsStore(server_bus).bucket("load")).watch()) as entries:  # type: ignore[type-var]
            async for entry in entries:
                seen[entry.key] = entry.value

    async def ask() -> None:
        nonlocal answered
        while not writer.stopping:
            try:
                payload = codec.encode(Ok(epoch=answered))
                answer = await client_bus.request("t.act", payload, timeout_s=0.5)
                assert answer == payload
                answered += 1
            except Retryable as error:
                await asyncio.sleep(error.retry_after_s)

    tasks = [asyncio.create_task(one) for one in (writer.run(), ask(), watch())]
    for _ in range(KILLS):
        wrote, had = len(writer.acknowledged), answered
        await soon(lambda had=had: len(writer.acknowledged) > 10 and answered > had + 20)
        own_nats_server.kill()
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        await own_nats_server.start_async()
        assert len(writer.acknowledged) >= wrote
    had, before = answered, dict(writer.acknowledged)
    await soon(lambda: answered > had + 20 and writer.acknowledged != before)
    writer.stopping = True
    await asyncio.gather(*tasks[:2])
    entries, last, *_ = await bucket.load()
    assert {key: entry.value for key, entry in entries.items()} == writer.acknowledged
    assert last >= max(entry.sequence for entry in entries.values())
    await soon(lambda: seen == writer.acknowledged)
    assert client_bus.counters.reconnects == KILLS
    tasks[2].cancel()
    await asyncio.gather(tasks[2], return_exceptions=True)
    await client_bus.close()
    await server_bus.close()


async def test_nothing_is_kept_for_later(own_nats_server: NatsServer) -> None:
    """A heartbeat of the time without a server must not arrive after it."""
    bus = await NatsBus.connect(own_nats_server.url, "one")
    got: list[bytes] = []

    async def handle(delivery: Delivery) -> None:
        got.append(delivery.payload)

    await bus.subscribe("t.>", handle)
    own_nats_server.kill()
    refused = 0
    # Into the gap before the client notices, and while it knows.
    for _ in range(200):
        try:
            await bus.publish("t.beat", b"stale")
        except Unavailable as error:
            refused += 1
            assert own_nats_server.url in str(error)  # noqa: PT017 (each of them)
        await asyncio.sleep(0.001)
    assert refused > 50
    with pytest.raises(Unavailable):
        await bus.request("t.ask", b"", timeout_s=1.0)
    with pytest.raises(Unavailable):
        await bus.flush()
    await own_nats_server.start_async()
    await soon(lambda: bus.connected)
    await bus.publish("t.beat", b"fresh")
    await soon(lambda: bool(got))
    assert got == [b"fresh"]
    await bus.close()


async def test_a_flush_under_way_ends_with_its_connection(own_nats_server: NatsServer) -> None:
    """It would wait for its whole deadline: no PONG comes from a server that is gone."""
    bus = await NatsBus.connect(own_nats_server.url, "one")
    _pause(own_nats_server)
    flushing = asyncio.create_task(bus.flush())
    await asyncio.sleep(0.05)  # Its PING is sent.
    own_nats_server.kill()
    with pytest.raises(DeadlineExceeded, match="was lost before the answer"):
        await flushing
    await own_nats_server.start_async()
    await Client(bus, LiveClock(), budget_s=10.0).flush()  # Succeeds once there is a connection.
    await bus.close()


async def test_nobody_there_is_said_with_url_and_remedy(
    own_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BUS_CONNECT_S", 0.5)
    own_nats_server.kill()
    with pytest.raises(Unavailable) as caught:
        await NatsBus.connect(own_nats_server.url, "one")
    assert own_nats_server.url in str(caught.value)
    assert "start one there (`slackwater up` starts one" in str(caught.value)


async def test_connecting_waits_for_a_server_that_is_about_to_start(
    own_nats_server: NatsServer,
) -> None:
    own_nats_server.kill()
    connecting = asyncio.create_task(NatsBus.connect(own_nats_server.url, "one"))
    await asyncio.sleep(0.2)
    await own_nats_server.start_async()
    bus = await connecting
    assert bus.connected
    await bus.close()


@pytest.mark.parametrize("url", ["not a url", "nats://host:port"])
async def test_a_bad_url_is_rejected(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUS_CONNECT_S", 0.5)
    with pytest.raises((ConfigRejected, Unavailable)) as caught:
        await NatsBus.connect(url, "one")
    assert url in str(caught.value)


async def test_a_connection_closed_for_good_is_told(nats_url: str) -> None:
    """The library gives up (the server refuses us): the daemon hears of it, and can end."""
    told: list[str] = []
    bus = await NatsBus.connect(nats_url, "one", on_closed=lambda: told.append("closed"))
    await bus.client.close()
    assert told == ["closed"]
    with pytest.raises(Unavailable, match="closed"):
        await bus.publish("t.a", b"")
    await bus.close()
    other = await NatsBus.connect(nats_url, "one", on_closed=lambda: told.append("closed"))
    await other.close()
    assert told == ["closed"], "our own close is not news"


async def test_a_repeated_request_is_answered_twice(nats_bus: NatsBus, unique: str) -> None:
    """The bus may repeat a request; it neither hides nor multiplies that. Idempotence is the
    service's."""
    calls = 0
    answers: list[bytes] = []

    async def respond(delivery: Delivery) -> bytes:
        nonlocal calls
        calls += 1
        return b"%d" % calls

    await nats_bus.serve(INFO, [Endpoint("act", f"{unique}.act", respond, {}, 4)])
    inbox = await nats_bus.open_inbox(lambda message: answers.append(message.data))
    for _ in range(2):
        await nats_bus.publish(f"{unique}.act", b"x", reply_to=f"{inbox.subject}.1")
    await soon(lambda: len(answers) == 2)
    assert sorted(answers) == [b"1", b"2"]
    await inbox.close()


async def test_refusals_carry_the_convention_headers(nats_bus: NatsBus, unique: str) -> None:
    """`nats req` and `nats micro` read Nats-Service-Error and its code."""
    gate = asyncio.Event()

    async def respond(delivery: Delivery) -> bytes:
        await gate.wait()
        raise Unavailable("line one\nline two")

    await nats_bus.serve(INFO, [Endpoint("act", f"{unique}.act", respond, {}, 1)])
    first = asyncio.create_task(nats_bus.call(f"{unique}.act", b"{}", timeout_s=5.0))
    await asyncio.sleep(0.05)
    full = await nats_bus.call(f"{unique}.act", b"x", timeout_s=5.0)
    assert full.headers is not None
    assert full.headers["Nats-Service-Error-Code"] == "503"
    assert full.headers["Nats-Service-Error"] == "act is busy with 1 requests"
    assert isinstance(codec.decode(full.data, Refused), Refused)
    gate.set()
    failed = await first
    assert failed.headers is not None
    assert failed.headers["Nats-Service-Error"] == "line one line two"
    assert failed.headers["Content-Type"] == "application/json"
    assert codec.decode(failed.data, Refused, json=True).reason == "line one\nline two"


# The store ---------------------------------------------------------------------------------------


async def test_a_stopped_server_is_a_deadline_and_the_truth_is_read_back(
    own_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP while a write is under way: the caller learns that it may have happened; it has."""
    monkeypatch.setattr(limits, "STORE_TIMEOUT_S", 0.3)
    bus = await NatsBus.connect(own_nats_server.url, "one")
    bucket = await NatsStore(bus).bucket("b")
    await bucket.put("a", b"1", expected_last=0)
    _pause(own_nats_server)
    try:
        with pytest.raises(DeadlineExceeded, match="it may have been written"):
            await bucket.put("a", b"2", expected_last=1)
    finally:
        os.kill(own_nats_server.pid, signal.SIGCONT)
    monkeypatch.setattr(limits, "STORE_TIMEOUT_S", 5.0)
    assert await bucket.last_sequence() == 2, "in the order of the writes, after the one in doubt"
    assert await bucket.get("a") == Entry("a", b"2", 2)
    with pytest.raises(SequenceConflict) as caught:
        await bucket.put("a", b"2", expected_last=1)
    assert caught.value.last == 2
    await bus.close()


async def test_tombstones_go_without_moving_the_sequence(
    nats_bus: NatsBus, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last message of the bucket disappears by itself: nobody sees a difference."""
    monkeypatch.setattr(limits, "TOMBSTONE_S", 1)
    bucket = await NatsStore(nats_bus).bucket(unique)
    await bucket.put("a", b"1", expected_last=0)
    await bucket.put("b", b"2", expected_last=1)
    await bucket.delete("b", expected_last=2)
    stream = nats_bus.client.jetstream()
    async with asyncio.timeout(10.0):
        while (await stream.stream_info(f"KV_{unique}")).state.messages > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await bucket.last_sequence() == 3
    assert (await bucket.load())[:2] == ({"a": Entry("a", b"1", 1)}, 3)
    assert await bucket.put("c", b"3", expected_last=3) == 4


async def test_operators_read_buckets_with_their_own_tools(nats_bus: NatsBus, unique: str) -> None:
    """The library's key-value face, which the NATS command line shares, sees the same."""
    store = NatsStore(nats_bus)
    bucket = await store.bucket(unique)
    await bucket.put("a", b"1", expected_last=0)
    await bucket.put("b", b"2", expected_last=1)
    await bucket.delete("b", expected_last=2)
    assert await store.lease(f"{unique}_leases", "master", "m1", 5.0) is not None
    stream = nats_bus.client.jetstream()
    shown = await stream.key_value(unique)
    assert await shown.keys() == ["a"]
    assert (await shown.get("a")).value == b"1"
    with pytest.raises(nats.js.errors.KeyNotFoundError):
        await shown.get("b")
    leases = await stream.key_value(f"{unique}_leases")
    value = (await leases.get("master")).value
    assert value is not None
    assert msgspec.msgpack.decode(value)["record"] == {"owner": "m1"}


async def test_a_lease_survives_the_servers_restart(own_nats_server: NatsServer) -> None:
    bus = await NatsBus.connect(own_nats_server.url, "one")
    store = NatsStore(bus)
    lease = await store.lease("leases", "master", "m1", 10.0)
    assert lease is not None
    own_nats_server.kill()
    await own_nats_server.start_async()
    await soon(lambda: bus.counters.reconnects == 1)
    assert await store.lease("leases", "master", "m2", 10.0) is None
    assert await lease.renew()
    await bus.close()


async def test_a_lost_acknowledgement_does_not_lose_the_lease(
    own_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal that was applied and not acknowledged moved the sequence; the owner is still us."""
    bus = await NatsBus.connect(own_nats_server.url, "one")
    lease = await NatsStore(bus).lease("leases", "master", "m1", 10.0)
    assert lease is not None
    monkeypatch.setattr(limits, "STORE_TIMEOUT_S", 0.3)
    _pause(own_nats_server)
    try:
        with pytest.raises(DeadlineExceeded):
            await lease.renew()
    finally:
        os.kill(own_nats_server.pid, signal.SIGCONT)
    monkeypatch.setattr(limits, "STORE_TIMEOUT_S", 5.0)
    assert await lease.renew()
    await bus.close()


async def test_a_live_world_holds_everything(nats_url: str, unique: str) -> None:
    async with live_world(nats_url, unique, seed=4) as world:
        bucket = await world.store.bucket(unique)
        await bucket.put("a", b"1", expected_last=0)
        assert world.bus.connected
        first = world.rng.random()
    assert not world.bus.connected
    async with live_world(nats_url, unique, seed=4) as world:
        assert world.rng.random() == first


def _pause(server: NatsServer) -> None:
    """SIGSTOP, and wait until every thread of it stands still."""
    os.kill(server.pid, signal.SIGSTOP)
    threads = [psutil.Process(one.id) for one in psutil.Process(server.pid).threads()]
    stopped = psutil.STATUS_STOPPED
    eventually(lambda: all(one.status() == stopped for one in threads), "every thread stands")


# Facts that are kept -----------------------------------------------------------------------------

KEEPING = Keeping(nbytes=1024**2, seconds=3600.0, per_subject=10_000)


async def test_a_follower_of_facts_goes_on_through_kills_of_the_server(
    own_nats_server: NatsServer,
) -> None:
    """Each fact that was kept comes once, in order. What is published while the server is away is
    refused, and what a kill takes before it is on disk was told to nobody as kept."""
    bus = await NatsBus.connect(own_nats_server.url, "publisher")
    reader = NatsHistory(await NatsBus.connect(own_nats_server.url, "reader"))
    await reader.keep(KEEPING)
    subject = subjects.event("job", "j1", "window")
    came: asyncio.Queue[Kept] = asyncio.Queue()
    found: list[Kept] = []

    async def follow() -> None:
        async with aclosing(reader.read([subjects.events("job", "j1")], follow=True)) as facts:
            async for fact in facts:
                await came.put(fact)

    following = asyncio.create_task(follow())
    try:
        for kill in range(3):
            for number in range(20):
                await retry(
                    partial(bus.publish, subject, b"%d" % (100 * kill + number)),
                    budget_s=20.0,
                    rng=random.Random(1),
                )
            last = b"%d" % (100 * kill + 19)
            async with asyncio.timeout(30):
                while not found or found[-1].payload != last:
                    found.append(await came.get())
            await asyncio.to_thread(own_nats_server.kill)
            await asyncio.to_thread(own_nats_server.start)
        told = [int(fact.payload) for fact in found]
        assert told == [100 * kill + number for kill in range(3) for number in range(20)]
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await bus.close()
        await reader._bus.close()


async def test_a_stream_of_facts_without_room_is_refused_and_facts_pass(
    own_nats_server: NatsServer,
) -> None:
    """The disk has less than is asked for: the reason names the stream, nothing else changes."""
    bus = await NatsBus.connect(own_nats_server.url, "test")
    history = NatsHistory(bus)
    with pytest.raises(SlackwaterError, match="stream facts: insufficient storage"):
        await history.keep(replace(KEEPING, nbytes=2**50))
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(delivery: Delivery) -> None:
        await got.put(delivery.payload)

    await bus.subscribe(subjects.facts(), take)
    await bus.publish(subjects.event("job", "j1", "running"), b"1")
    async with asyncio.timeout(10):
        assert await got.get() == b"1"
    assert await history.keep(KEEPING), "with room it is made"
    await bus.close()


async def test_another_stream_of_the_same_subjects_is_named(own_nats_server: NatsServer) -> None:
    """An operator's own capture of facts: what to do about it is said."""
    bus = await NatsBus.connect(own_nats_server.url, "test")
    config = {"name": "mine", "subjects": ["sw.v1.evt.job.>"], "storage": "memory"}
    await ask(bus, "STREAM.CREATE.mine", config, dict)
    with pytest.raises(Rejected, match="another stream captures facts"):
        await NatsHistory(bus).keep(KEEPING)
    await bus.close()


async def test_a_removed_stream_of_facts_is_made_anew(own_nats_server: NatsServer) -> None:
    bus = await NatsBus.connect(own_nats_server.url, "test")
    history = NatsHistory(bus)
    assert await history.keep(KEEPING)
    await ask(bus, "STREAM.DELETE.facts", None, dict)
    async with aclosing(history.read()) as facts:
        with pytest.raises(NothingKept):
            await anext(facts)
    assert await history.keep(KEEPING)
    await bus.close()


async def test_a_follower_goes_on_in_a_stream_that_was_made_anew(
    own_nats_server: NatsServer,
) -> None:
    """Its sequences begin at 1 again: a reader that kept its place would wait for a long time."""
    bus = await NatsBus.connect(own_nats_server.url, "test")
    history = NatsHistory(bus)
    await history.keep(KEEPING)
    subject = subjects.event("job", "j1", "running")
    for payload in (b"1", b"2", b"3"):
        await bus.publish(subject, payload)
    async with aclosing(history.read(follow=True)) as facts, asyncio.timeout(30):
        assert [(await anext(facts)).payload for _ in range(3)] == [b"1", b"2", b"3"]
        await ask(bus, "STREAM.DELETE.facts", None, dict)
        await history.keep(KEEPING)
        await bus.publish(subject, b"4")
        assert (await anext(facts)).payload == b"4"
    await bus.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """16 MiB of a file system of its own."""
    mounted = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mounted, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a file system that can be filled")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


async def test_a_stream_that_met_a_full_disk_is_made_anew_once_there_is_room(
    small_disk: Path,
) -> None:
    """nats-server counts what comes and keeps none of it, also when there is room again, until it
    is restarted. What the stream had kept is the price of a new one; records are untouched."""
    server = NatsServer(small_disk / "nats")
    server.start()
    bus = await NatsBus.connect(server.url, "test")
    history, bucket = NatsHistory(bus), await NatsStore(bus).bucket("jobs")
    await bucket.put("j1", b"a record", expected_last=0)
    await history.keep(KEEPING)
    subject = subjects.event("job", "j1", "running")

    async def last(payload: bytes) -> bytes:
        await bus.publish(subject, payload)
        await bus.flush()
        await asyncio.sleep(0.1)
        async with aclosing(history.read()) as facts:
            return [fact.payload async for fact in facts][-1]

    try:
        assert await last(b"before") == b"before"
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "fill").write_bytes(bytes(16 * 1024**2))
        for _ in range(1000):
            await bus.publish(subject, bytes(1000))
        assert await last(b"lost") != b"lost"
        (small_disk / "fill").unlink()
        assert await last(b"lost, too") != b"lost, too", "it is stuck"
        assert await history.keep(KEEPING), "it was repaired"
        assert await last(b"kept") == b"kept"
        assert not await history.keep(KEEPING)
        assert await bucket.get("j1") == Entry("j1", b"a record", 1)
    finally:
        await bus.close()
        await asyncio.to_thread(server.stop)
