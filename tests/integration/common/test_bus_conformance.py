"""One suite for every `Bus`: what services may build on, over real NATS and in memory, and what
programs of jobs may, over a worker service's relay.

A program asks and tells. These parts of the suite are not for a relay:

- subscriptions, services and NATS micro: a program has neither. `subscribe` and `serve` refuse
  (tests/integration/services/worker/test_relay.py).
- JSON: the relay reads each message before it passes it on, and people do not type there.
- published commands, and several instances: a program may tell telemetry alone, and cannot see who
  answers.
- the largest request: the relay passes messages of Agents alone, none of which is that large.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import nats.micro.service
import pytest
from tests.waiting import soon

from slackwater.common.base import codec, limits
from slackwater.common.base.errors import (
    DeadlineExceeded,
    NobodyThere,
    Rejected,
    Unavailable,
)
from slackwater.common.bus.base import Answer, Bus, Delivery, Endpoint, ServiceInfo
from slackwater.common.bus.dispatch import failure
from slackwater.common.bus.memory import MemoryBroker
from slackwater.common.bus.nats import NatsBus
from slackwater.common.bus.relay import RelayBus, Ticket
from slackwater.schemas import subjects
from slackwater.schemas.base import JobId, Message, Ok, Refused
from slackwater.schemas.job_requests import FinishJob
from slackwater.schemas.placement import LocateJob
from slackwater.schemas.relay import RelayHello
from slackwater.schemas.telemetry import IterationsObserved
from slackwater.services.worker.memory_shares import MemoryShares
from slackwater.services.worker.permit_server import PermitServer
from slackwater.services.worker.permits import Permits
from slackwater.services.worker.relay import Relay

Connect = Callable[[str], Awaitable[Bus]]
Respond = Callable[[Delivery], Answer | Awaitable[Answer]]
INFO = ServiceInfo("toy", "1.2.3", "a service for tests", {"role": "test"})


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.live)])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Makes clients of one bus; all are closed in the end."""
    buses: list[Bus] = []
    broker = MemoryBroker(seed=1)
    url = request.getfixturevalue("nats_url") if request.param == "nats" else ""

    async def make(name: str) -> Bus:
        bus: Bus = await NatsBus.connect(url, name) if url else broker.connect(name)
        buses.append(bus)
        return bus

    yield make
    for bus in buses:
        await bus.close()


@dataclass
class Ends:
    """Both ends of a bus: a service, and `client`, which only asks and tells."""

    server: Bus
    client: Bus
    job: str
    acts: str
    """The subject at which `answering` serves."""

    async def answering(self, respond: Respond, concurrency: int = 8) -> None:
        await self.server.serve(INFO, [endpoint(self.acts, respond, concurrency)])

    async def ask(self, number: int = 0) -> Message:
        """Ask with a number that comes back in the answer of `echo_number`."""
        answer = await self.client.request(self.acts, self.question(number), timeout_s=5.0)
        decoded: Message = codec.decode(answer, Ok | Refused)
        return decoded

    def question(self, number: int = 0) -> bytes:
        return codec.encode(FinishJob(job=self.job, rank=0, result=str(number)))


def number_in(delivery: Delivery) -> int:
    return int(codec.decode(delivery.payload, FinishJob).result)


def echo_number(delivery: Delivery) -> bytes:
    return codec.encode(Ok(epoch=number_in(delivery)))


async def echo_later(delivery: Delivery) -> bytes:
    return echo_number(delivery)


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.live), "relay"])
async def ends(request: pytest.FixtureRequest, unique: str, tmp_path: Path) -> AsyncIterator[Ends]:
    """A program's end of each kind of bus; all are closed in the end."""
    broker, acts = MemoryBroker(seed=1), subjects.command("master", subjects.MASTER, "finish")
    if request.param == "nats":
        url, acts = request.getfixturevalue("nats_url"), f"{unique}.act"
        server: Bus = await NatsBus.connect(url, "server")
        client: Bus = await NatsBus.connect(url, "client")
    else:
        server, client = broker.connect("server"), broker.connect("client")
    async with AsyncExitStack() as stack:
        for bus in (server, client):
            stack.push_async_callback(bus.close)
        if request.param == "relay":
            hello = RelayHello(job=unique, rank=0, attempt=0, token=bytes(32))
            permits = PermitServer(Permits(), None, MemoryShares())
            relay = Relay(tmp_path / "r", client, lambda *_: True, lambda _: None, permits)
            await relay.start()
            stack.push_async_callback(relay.stop)
            client = await RelayBus.connect(Ticket(path=str(tmp_path / "r"), hello=hello))
            stack.push_async_callback(client.close)
        yield Ends(server, client, unique, acts)


def endpoint(subject: str, respond: Respond, concurrency: int = 8) -> Endpoint:
    return Endpoint("act", subject, respond, {"request_schema": "ok"}, concurrency)


async def echo(delivery: Delivery) -> bytes:
    return delivery.payload


async def ask(bus: Bus, subject: str, message: Message, *, json: bool = False) -> Message:
    payload = codec.encode(message, json=json)
    answer = await bus.request(subject, payload, timeout_s=5.0, json=json)
    decoded: Message = codec.decode(answer, Ok | Refused, json=json)
    return decoded


class Inbox:
    """Collects what a subscription delivers."""

    def __init__(self) -> None:
        self.got: list[Delivery] = []
        self._changed = asyncio.Event()

    async def __call__(self, delivery: Delivery) -> None:
        self.got.append(delivery)
        self._changed.set()

    async def wait(self, count: int) -> list[Delivery]:
        async with asyncio.timeout(5.0):
            while len(self.got) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.got


# Facts -------------------------------------------------------------------------------------------


async def test_facts_arrive_in_order(connect: Connect, unique: str) -> None:
    one, other = await connect("one"), await connect("other")
    inbox = Inbox()
    await other.subscribe(f"{unique}.evt.*.done", inbox)
    await other.flush()
    for number in range(200):
        await one.publish(f"{unique}.evt.j{number % 7}.done", b"%d" % number)
        await one.publish(f"{unique}.evt.j1.begun", b"not asked for")
    got = await inbox.wait(200)
    assert [int(delivery.payload) for delivery in got] == list(range(200))
    assert got[8].subject == f"{unique}.evt.j1.done"


@pytest.mark.parametrize(
    ("pattern", "subject", "matches"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*.c", "a.b.c", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a.b", True),
        ("*.b", "a.b", True),
    ],
)
async def test_patterns(
    connect: Connect, unique: str, pattern: str, subject: str, matches: bool
) -> None:
    bus = await connect("one")
    inbox = Inbox()
    await bus.subscribe(f"{unique}.{pattern}", inbox)
    await bus.publish(f"{unique}.{subject}", b"x")
    await bus.flush()
    await bus.subscribe(f"{unique}.end", inbox)
    await bus.publish(f"{unique}.end", b"end")
    await inbox.wait(1 + matches)
    subjects = {delivery.subject for delivery in inbox.got}
    assert (f"{unique}.{subject}" in subjects) is matches


async def test_every_subscriber_gets_a_fact(connect: Connect, unique: str) -> None:
    sender = await connect("sender")
    inboxes = [Inbox() for _ in range(5)]
    for number, inbox in enumerate(inboxes):
        bus = await connect(f"c{number}")
        await bus.subscribe(f"{unique}.fact", inbox)
        await bus.flush()
    await sender.publish(f"{unique}.fact", b"x")
    for inbox in inboxes:
        assert len(await inbox.wait(1)) == 1


async def test_unsubscribed_means_silent(connect: Connect, unique: str) -> None:
    bus = await connect("one")
    inbox, other = Inbox(), Inbox()
    subscription = await bus.subscribe(f"{unique}.a", inbox)
    await bus.subscribe(f"{unique}.a", other)
    await bus.publish(f"{unique}.a", b"1")
    await inbox.wait(1)
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    await bus.publish(f"{unique}.a", b"2")
    await other.wait(2)
    assert len(inbox.got) == 1


async def test_one_at_a_time_and_a_failing_handler_is_not_the_end(
    connect: Connect, unique: str
) -> None:
    bus = await connect("one")
    working = most = 0
    done = Inbox()

    async def handle(delivery: Delivery) -> None:
        nonlocal working, most
        working += 1
        most = max(most, working)
        await asyncio.sleep(0.001)
        working -= 1
        await done(delivery)
        if delivery.payload == b"3":
            raise ValueError("a bug in a handler")

    await bus.subscribe(f"{unique}.a", handle)
    for number in range(10):
        await bus.publish(f"{unique}.a", b"%d" % number)
    got = await done.wait(10)
    assert [delivery.payload for delivery in got] == [b"%d" % number for number in range(10)]
    assert most == 1
    assert bus.counters.failed == 1  # type: ignore[attr-defined]


async def test_a_slow_subscriber_loses_the_oldest(
    connect: Connect, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded: the newest SUBSCRIPTION_PENDING_MAX are kept, the loss is counted."""
    monkeypatch.setattr(limits, "SUBSCRIPTION_PENDING_MAX", 10)
    bus = await connect("one")
    gate, inbox = asyncio.Event(), Inbox()

    async def handle(delivery: Delivery) -> None:
        await inbox(delivery)
        await gate.wait()

    await bus.subscribe(f"{unique}.a", handle)
    await bus.publish(f"{unique}.a", b"first")
    await inbox.wait(1)
    for number in range(50):
        await bus.publish(f"{unique}.a", b"%d" % number)
    await bus.flush()
    await soon(lambda: bus.counters.received == 51)  # type: ignore[attr-defined]
    gate.set()
    got = await inbox.wait(11)
    assert [delivery.payload for delivery in got[1:]] == [b"%d" % n for n in range(40, 50)]
    assert bus.counters.dropped == 40  # type: ignore[attr-defined]


async def test_what_a_program_tells_arrives_in_order(ends: Ends) -> None:
    inbox = Inbox()
    await ends.server.subscribe(subjects.telemetries("job", ends.job, "iterations"), inbox)
    await ends.server.flush()
    told = IterationsObserved(
        job=JobId(ends.job), rank=0, first_iteration=1, durations_s=(1.0,), location_epoch=0,
        bytes_pushed=0, bytes_pulled=0,
    )  # fmt: skip
    subject = subjects.telemetry("job", ends.job, "iterations")
    for number in range(1, 201):
        await ends.client.publish(
            subject, codec.encode(msgspec.structs.replace(told, first_iteration=number))
        )
    await ends.client.flush()
    got = [codec.decode(each.payload, IterationsObserved) for each in await inbox.wait(200)]
    assert [each.first_iteration for each in got] == list(range(1, 201))
    assert ends.client.counters.published == 200


# Requests ----------------------------------------------------------------------------------------


async def test_a_request_is_answered(ends: Ends) -> None:
    await ends.answering(echo_number)
    assert ends.client.connected
    assert await ends.ask(5) == Ok(epoch=5)
    assert ends.client.counters.requested == 1


async def test_nobody_there_is_unavailable_at_once(ends: Ends) -> None:
    subject = subjects.command("controller", f"{ends.job}nobody", "locate")
    with pytest.raises(NobodyThere, match=subject):
        async with asyncio.timeout(2.0):
            await ends.client.request(
                subject, codec.encode(LocateJob(job=ends.job)), timeout_s=30.0
            )


async def test_no_answer_is_a_deadline(ends: Ends) -> None:
    gate = asyncio.Event()

    async def late(_: Delivery) -> bytes:
        await gate.wait()
        return b""

    await ends.answering(late)
    with pytest.raises(DeadlineExceeded, match="may still have been acted on"):
        await ends.client.request(ends.acts, ends.question(), timeout_s=0.1)
    gate.set()  # The answer comes too late for anybody, and harms nobody.


@pytest.fixture
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that nobody has answered are sent again after 50 ms."""
    monkeypatch.setattr(limits, "REQUEST_ATTEMPT_S", 0.05)
    monkeypatch.setattr(limits, "REQUEST_SOON_S", 0.05)


@pytest.mark.usefixtures("soon_again")
async def test_a_request_that_went_with_a_killed_service_is_sent_again(ends: Ends) -> None:
    asked: list[int] = []

    async def respond(delivery: Delivery) -> Answer:
        asked.append(number_in(delivery))
        if len(asked) == 1:
            await asyncio.get_running_loop().create_future()  # Killed: this one is never answered.
        return echo_number(delivery)

    await ends.answering(respond)
    answer = await ends.ask(7)
    assert isinstance(answer, Ok)
    assert (answer.epoch, asked) == (7, [7, 7])
    await asyncio.sleep(0.2)
    assert asked == [7, 7]  # And not once more after the answer.


@pytest.mark.usefixtures("soon_again")
async def test_a_copy_that_is_refused_for_now_does_not_end_a_request_in_progress(
    ends: Ends,
) -> None:
    copies = 0

    async def respond(delivery: Delivery) -> Answer:
        nonlocal copies
        copies += 1
        if copies > 1:
            return failure(Refused(reason="busy", retry_after_s=1.0), json=False)
        await asyncio.sleep(0.3)
        return echo_number(delivery)

    await ends.answering(respond)
    answer = await ends.ask(3)
    assert isinstance(answer, Ok)
    assert answer.epoch == 3
    assert copies >= 3


@pytest.mark.usefixtures("soon_again")
async def test_a_copy_that_is_refused_for_good_is_the_answer(ends: Ends) -> None:
    copies = 0

    async def respond(_: Delivery) -> Answer:
        nonlocal copies
        copies += 1
        if copies == 1:
            await asyncio.get_running_loop().create_future()
        return failure(Refused(reason="no such job"), json=False)

    await ends.answering(respond)
    answer = await ends.ask()
    assert isinstance(answer, Refused)
    assert answer.reason == "no such job"


@pytest.mark.usefixtures("soon_again")
async def test_a_service_that_ends_still_answers_what_it_had_begun(ends: Ends) -> None:
    """Copies find nobody there meanwhile."""
    begun = asyncio.Event()

    async def respond(delivery: Delivery) -> Answer:
        begun.set()
        await asyncio.sleep(0.4)
        return echo_number(delivery)

    await ends.answering(respond)
    asking = asyncio.ensure_future(ends.ask(5))
    await begun.wait()
    await ends.server.stop_serving()
    answer = await asking
    assert isinstance(answer, Ok)
    assert answer.epoch == 5


@pytest.mark.usefixtures("soon_again")
async def test_an_answer_that_takes_long_on_purpose_is_asked_for_once(
    connect: Connect, unique: str
) -> None:
    copies = 0

    async def respond(_: Delivery) -> Answer:
        nonlocal copies
        copies += 1
        await asyncio.sleep(0.3)
        return b"late"

    server, client = await connect("server"), await connect("client")
    await server.serve(INFO, [endpoint(f"{unique}.act", respond)])
    answer = await client.request(f"{unique}.act", b"x", timeout_s=5.0, again=False)
    assert (answer, copies) == (b"late", 1)


async def test_who_is_cancelled_ends_whatever_has_been_answered(ends: Ends) -> None:
    """At any moment, that of the answer, or of the news that nobody is there, among them."""
    await ends.answering(echo_later)
    nobody = subjects.command("controller", f"{ends.job}nobody", "locate")
    for turns in range(300):
        subject, sent = ends.acts, ends.question()
        if turns % 3 == 0:
            subject, sent = nobody, codec.encode(LocateJob(job=ends.job))
        asking = asyncio.ensure_future(ends.client.request(subject, sent, timeout_s=5.0))
        for _ in range(turns % 20):
            await asyncio.sleep(0)
        while turns >= 100 and not _answered(asking):  # noqa: ASYNC110
            await asyncio.sleep(0)
        if asking.cancel():
            with pytest.raises(asyncio.CancelledError):
                await asking
        else:
            await asyncio.gather(asking, return_exceptions=True)
    assert await ends.ask(7) == Ok(epoch=7)


def _answered(asking: "asyncio.Task[bytes]") -> bool:
    """It is done, or what it waits for is."""
    waits: Any = asking.get_coro()
    while waits is not None and not isinstance(waits, asyncio.Future):
        waits = getattr(waits, "cr_await", None)
    return asking.done() or (waits is not None and waits.done())


async def test_json_gets_json(connect: Connect, unique: str) -> None:
    """By the header, and by hand without one; errors too."""
    server, client = await connect("server"), await connect("client")
    seen: list[bool] = []

    async def respond(delivery: Delivery) -> bytes:
        seen.append(delivery.json)
        message = codec.decode(delivery.payload, Ok, json=delivery.json)
        if message.epoch == 13:
            raise Rejected("unlucky")
        return codec.encode(message, json=delivery.json)

    await server.serve(INFO, [endpoint(f"{unique}.act", respond)])
    assert await ask(client, f"{unique}.act", Ok(epoch=2), json=True) == Ok(epoch=2)
    assert await client.request(f"{unique}.act", b'{"t":"ok","epoch":4}', timeout_s=5.0) == (
        b'{"t":"ok","epoch":4}'
    )
    assert await ask(client, f"{unique}.act", Ok(epoch=2)) == Ok(epoch=2)
    refused = await ask(client, f"{unique}.act", Ok(epoch=13), json=True)
    assert refused == Refused(reason="unlucky")
    assert seen == [True, True, False, True]


async def test_errors_are_answers(ends: Ends) -> None:
    errors = [Rejected("not so"), Unavailable("later", 3.0), ValueError("a bug")]

    async def respond(delivery: Delivery) -> bytes:
        raise errors[number_in(delivery)]

    await ends.answering(respond)
    assert await ends.ask(0) == Refused(reason="not so")
    assert await ends.ask(1) == Refused(reason="later", retry_after_s=3.0)
    bug = Refused(reason="internal error: ValueError: a bug", code=500)
    assert await ends.ask(2) == bug
    assert ends.server.counters.failed == 1


async def test_slow_requests_run_side_by_side_up_to_the_bound(ends: Ends) -> None:
    """All of the endpoint's slots work at once; one more is refused and told when to retry."""
    gate, working = asyncio.Event(), 0

    async def respond(_: Delivery) -> bytes:
        nonlocal working
        working += 1
        await gate.wait()
        return codec.encode(Ok())

    await ends.answering(respond, concurrency=4)
    asked = [asyncio.create_task(ends.ask()) for _ in range(4)]
    await soon(lambda: working == 4)
    refused = await ends.ask()
    assert isinstance(refused, Refused)
    assert refused.retry_after_s > 0
    assert "busy with 4 requests" in refused.reason
    again = await ends.ask()
    assert isinstance(again, Refused)
    assert again.retry_after_s >= refused.retry_after_s  # Its turn is after the first one's.
    gate.set()
    assert await asyncio.gather(*asked) == [Ok()] * 4
    assert await ends.ask() == Ok()
    assert ends.server.counters.overloaded == 2


async def test_answers_that_wait_for_nothing_take_no_slot(connect: Connect, unique: str) -> None:
    """However many come at once: the bound is on what is under way."""
    server, client = await connect("server"), await connect("client")

    def respond(delivery: Delivery) -> Answer:
        assert len(asyncio.all_tasks()) < 500
        return delivery.payload

    await server.serve(INFO, [Endpoint("act", f"{unique}.act", respond, {}, 1)])
    asked = [ask(client, f"{unique}.act", Ok(epoch=number)) for number in range(200)]
    assert await asyncio.gather(*asked) == [Ok(epoch=number) for number in range(200)]
    assert server.counters.overloaded == 0


async def test_a_request_that_is_cut_short_before_it_began_leaves_nothing(unique: str) -> None:
    """No coroutine that nobody awaited, which would be a warning, and so an error here."""
    broker = MemoryBroker(seed=1)
    server, client = broker.connect("server"), broker.connect("client")
    await server.serve(INFO, [endpoint(f"{unique}.act", echo)])
    await client.publish(f"{unique}.act", b"x")
    (worker,) = server._workers.values()
    delivery = Delivery(f"{unique}.act", b"x")
    assert worker.begin(delivery, "") is None
    await server.abort()
    gc.collect()


async def test_one_of_several_instances_answers(connect: Connect, unique: str) -> None:
    calls = 0

    async def respond(_: Delivery) -> bytes:
        nonlocal calls
        calls += 1
        return codec.encode(Ok())

    for number in range(3):
        server = await connect(f"server{number}")
        await server.serve(INFO, [endpoint(f"{unique}.act", respond)])
    client = await connect("client")
    for _ in range(30):
        await ask(client, f"{unique}.act", Ok())
    assert calls == 30


async def test_many_at_once(ends: Ends) -> None:
    """Ask so often at once as a program may (RELAY_BURST)."""
    await ends.answering(echo_later, concurrency=limits.RELAY_BURST)
    numbers = range(limits.RELAY_BURST)
    answers = await asyncio.gather(*(ends.ask(number) for number in numbers))
    assert answers == [Ok(epoch=number) for number in numbers]


async def test_a_published_command_is_done_without_an_answer(connect: Connect, unique: str) -> None:
    """`nats pub` on a command's subject: nobody asks, nothing breaks."""
    server = await connect("server")
    inbox = Inbox()

    async def respond(delivery: Delivery) -> bytes:
        await inbox(delivery)
        return b""

    await server.serve(INFO, [endpoint(f"{unique}.act", respond)])
    await server.publish(f"{unique}.act", b"x")
    await inbox.wait(1)


async def test_too_large_is_rejected_before_it_is_sent(ends: Ends) -> None:
    large = bytes(limits.MESSAGE_BYTES_MAX + 1)
    subject = subjects.telemetry("job", ends.job, "iterations")
    with pytest.raises(Rejected, match="over a message's 524288"):
        await ends.client.publish(subject, large)
    with pytest.raises(Rejected):
        await ends.client.request(ends.acts, large, timeout_s=1.0)
    await ends.answering(echo_number)
    assert await ends.ask(3) == Ok(epoch=3)


async def test_the_largest_answer_passes(ends: Ends) -> None:
    answer = bytes(limits.MESSAGE_BYTES_MAX)
    await ends.answering(lambda _: answer)
    assert await ends.client.request(ends.acts, ends.question(), timeout_s=5.0) == answer


async def test_the_largest_message_passes(connect: Connect, unique: str) -> None:
    bus = await connect("one")
    await bus.serve(INFO, [endpoint(f"{unique}.act", echo)])
    payload = bytes(limits.MESSAGE_BYTES_MAX)
    assert await bus.request(f"{unique}.act", payload, timeout_s=5.0) == payload


# NATS micro --------------------------------------------------------------------------------------


async def test_services_show_themselves_as_micro_services(connect: Connect, unique: str) -> None:
    """PING, INFO and STATS are what the NATS tools expect: read here by the library's own types."""
    server, client = await connect("server"), await connect("client")
    info = ServiceInfo(unique, "1.2.3", "a service for tests", {"role": "test"})

    async def respond(_: Delivery) -> bytes:
        raise Rejected("never")

    await server.serve(info, [endpoint(f"{unique}.good", echo), endpoint(f"{unique}.bad", respond)])
    for _ in range(3):
        await ask(client, f"{unique}.good", Ok())
    await ask(client, f"{unique}.bad", Ok())

    async def show(subject: str) -> dict[str, object]:
        found: dict[str, object] = msgspec.json.decode(
            await client.request(subject, b"", timeout_s=5.0)
        )
        return found

    ping = nats.micro.service.ServicePing.from_dict(await show(f"$SRV.PING.{unique}"))
    assert (ping.name, ping.version, ping.metadata) == (unique, "1.2.3", {"role": "test"})
    shown = nats.micro.service.ServiceInfo.from_dict(await show(f"$SRV.INFO.{unique}.{ping.id}"))
    assert shown.description == "a service for tests"
    assert [one.subject for one in shown.endpoints] == [f"{unique}.good", f"{unique}.bad"]
    assert shown.endpoints[0].metadata == {"request_schema": "ok"}
    stats = nats.micro.service.ServiceStats.from_dict(await show(f"$SRV.STATS.{unique}"))
    good, bad = stats.endpoints
    assert (good.num_requests, good.num_errors, bad.num_requests, bad.num_errors) == (3, 0, 1, 1)
    assert bad.last_error == "400:never"
    assert good.processing_time > 0
    assert good.average_processing_time == good.processing_time // 3
    assert (await show("$SRV.PING"))["type"] == "io.nats.micro.v1.ping_response"


async def test_refusals_are_counted_and_told_by_their_code(connect: Connect, unique: str) -> None:
    """An answer that needs no waiting and one that does; what was answered well counts as such."""
    server, client = await connect("server"), await connect("client")
    info = ServiceInfo(unique, "1.2.3", "a service for tests", {})
    refusals = [
        Refused(reason="not so"),
        Refused(reason="later", retry_after_s=2.0),
        Refused(reason="there is none", code=404),
    ]

    def at_once(delivery: Delivery) -> Answer:
        wanted = codec.decode(delivery.payload, Ok).epoch
        return failure(refusals[wanted], False) if wanted < 3 else codec.encode(Ok())

    async def in_time(delivery: Delivery) -> Answer:
        await asyncio.sleep(0.002)
        return at_once(delivery)

    subjects = [f"{unique}.now", f"{unique}.later"]
    await server.serve(
        info,
        [Endpoint(name[-3:], name, respond, {}, 8)
         for name, respond in zip(subjects, (at_once, in_time), strict=True)],
    )  # fmt: skip
    for subject in subjects:
        for wanted, refused in enumerate(refusals):
            assert await ask(client, subject, Ok(epoch=wanted)) == refused
            if isinstance(client, NatsBus):
                answer = await client.call(subject, codec.encode(Ok(epoch=wanted)), timeout_s=5.0)
                assert answer.headers == {
                    "Nats-Service-Error": refused.reason,
                    "Nats-Service-Error-Code": str(refused.status),
                }
        assert await ask(client, subject, Ok(epoch=3)) == Ok()
        if isinstance(client, NatsBus):
            answer = await client.call(subject, codec.encode(Ok(epoch=3)), timeout_s=5.0)
            assert answer.headers is None
    times = 2 if isinstance(client, NatsBus) else 1
    raw = await client.request(f"$SRV.STATS.{unique}", b"", timeout_s=5.0)
    stats = nats.micro.service.ServiceStats.from_dict(msgspec.json.decode(raw))
    for one in stats.endpoints:
        assert (one.num_requests, one.num_errors) == (4 * times, 3 * times)
        assert one.last_error == "404:there is none"
    waited = stats.endpoints[1]
    assert waited.average_processing_time > 2_000_000  # Nanoseconds.
    assert waited.processing_time % 1_000_000  # Its grain is not a millisecond.


# The end -----------------------------------------------------------------------------------------


async def test_close_finishes_what_is_begun(connect: Connect, unique: str) -> None:
    """A request in progress is answered, a message that waits is handled; then silence."""
    server, client = await connect("server"), await connect("client")
    gate, begun, handled = asyncio.Event(), asyncio.Event(), Inbox()

    async def respond(delivery: Delivery) -> bytes:
        begun.set()
        await gate.wait()
        return delivery.payload

    async def handle(delivery: Delivery) -> None:
        await gate.wait()
        await handled(delivery)

    await server.serve(INFO, [endpoint(f"{unique}.act", respond)])
    await server.subscribe(f"{unique}.fact", handle)
    await server.flush()
    for _ in range(3):
        await client.publish(f"{unique}.fact", b"x")
    asked = asyncio.create_task(ask(client, f"{unique}.act", Ok()))
    await begun.wait()
    await soon(lambda: server.counters.received == 3)  # type: ignore[attr-defined]
    closing = asyncio.create_task(server.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    gate.set()
    await closing
    assert await asked == Ok()
    assert len(handled.got) == 3
    assert not server.connected
    with pytest.raises(Unavailable):
        await server.publish(f"{unique}.fact", b"x")
    with pytest.raises(Unavailable):
        await ask(client, f"{unique}.act", Ok())
    await server.close()


async def test_a_client_that_was_closed_says_so(ends: Ends) -> None:
    """Closing ends calls under way, too; closing twice is closing once."""
    gate, begun = asyncio.Event(), asyncio.Event()

    async def late(_: Delivery) -> bytes:
        begun.set()
        await gate.wait()
        return b""

    await ends.answering(late)
    asked = asyncio.create_task(ends.ask())
    await begun.wait()
    await ends.client.close()
    assert not ends.client.connected
    for call in (
        ends.ask(),
        ends.client.publish(subjects.telemetry("job", ends.job, "iterations"), b"x"),
        ends.client.flush(),
    ):
        with pytest.raises(Unavailable):
            await call
    gate.set()
    with pytest.raises(DeadlineExceeded, match="may still have been acted on"):
        await asked
    await ends.client.close()
