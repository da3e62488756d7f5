"""The relay between programs and the bus, with real sockets and real processes at both ends."""

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec
import pytest
from tests.waiting import soon

from slackwater.common.base import codec, limits
from slackwater.common.base.errors import (
    AccessRefused,
    DeadlineExceeded,
    NobodyThere,
    Rejected,
    Retryable,
    Unavailable,
)
from slackwater.common.base.retry import retry
from slackwater.common.bus.base import Bus, Delivery, Endpoint, ServiceInfo
from slackwater.common.bus.memory import MemoryBroker
from slackwater.common.bus.nats import NatsBus
from slackwater.common.bus.relay import RelayBus, Ticket, find_ticket, write_ticket
from slackwater.common.bus.server import NatsServer
from slackwater.common.domains.models.fitting import Observation
from slackwater.common.domains.models.goodput import BatchLimits
from slackwater.common.domains.models.pollux_agent import PolluxAgent
from slackwater.common.transport.socket_files import within
from slackwater.schemas import subjects
from slackwater.schemas.base import RUN_ATTEMPTS, JobId, Ok
from slackwater.schemas.job_requests import FinishJob
from slackwater.schemas.placement import LocateJob
from slackwater.schemas.relay import RelayHello
from slackwater.schemas.telemetry import IterationsObserved
from slackwater.services.worker.containment import MARK, Containment
from slackwater.services.worker.memory_shares import MemoryShares
from slackwater.services.worker.permit_server import PermitServer
from slackwater.services.worker.permits import Permits
from slackwater.services.worker.processes import Intent, RankFiles
from slackwater.services.worker.relay import Relay
from slackwater.services.worker.tokens import is_token, make_token

FINISH = subjects.command("master", subjects.MASTER, "finish")
ITERATIONS = subjects.telemetry("job", "j", "iterations")
OBSERVED = IterationsObserved(
    job="j", rank=0, first_iteration=1, durations_s=(1.0,), location_epoch=0,  # type: ignore[arg-type]
    bytes_pushed=0, bytes_pulled=0,
)  # fmt: skip


@dataclass
class World:
    """A bus with a master on it, and a relay whose peers are this very process."""

    folder: Path
    bus: Bus
    asked: list[FinishJob] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    tokens: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    permits: PermitServer = field(
        default_factory=lambda: PermitServer(Permits(), None, MemoryShares(moving=False))
    )
    memory_bytes: int = 0
    """Bytes that each job has asked for."""
    hold: asyncio.Event | None = None
    look: threading.Barrier | None = None
    """Is passed twice by whoever looks at a greeting: when it begins, and before it says so."""

    def relay(self) -> Relay:
        def count(name: str) -> None:
            self.counts[name] += 1

        def known(hello: RelayHello, pid: int, uid: int) -> bool:
            mine = (pid, uid) == (os.getpid(), os.geteuid())
            found = self.tokens.get((hello.job, hello.rank, hello.attempt)) == hello.token
            if self.look is not None:
                self.look.wait(30)
                self.look.wait(30)
            return mine and found

        return Relay(
            self.folder / ("long" * 40) / "relay.sock", self.bus, known, count, self.permits,
            memory=lambda hello: self.memory_bytes,
        )  # fmt: skip

    def ticket(self, job: str = "j", rank: int = 0, attempt: int = 0) -> Ticket:
        token = self.tokens.setdefault((job, rank, attempt), secrets.token_bytes(32))
        hello = RelayHello(job=job, rank=rank, attempt=attempt, token=token)
        return Ticket(path=str(self.folder / ("long" * 40) / "relay.sock"), hello=hello)

    async def finish(self, delivery: Delivery) -> bytes:
        self.asked.append(codec.decode(delivery.payload, FinishJob))
        if self.hold is not None:
            await self.hold.wait()
        return codec.encode(Ok())


@contextlib.asynccontextmanager
async def world_of(folder: Path, bus: Bus, master: Bus) -> AsyncIterator[World]:
    (folder / ("long" * 40)).mkdir()
    found = World(folder, bus)
    await master.serve(
        ServiceInfo("master", "1.0.0", "a master", {}),
        [Endpoint("finish", FINISH, found.finish, {}, 64)],
    )
    yield found
    await bus.close()
    await master.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    broker = MemoryBroker(seed=1)
    async with world_of(tmp_path, broker.connect("w1"), broker.connect("m1")) as found:
        yield found


@pytest.fixture
async def live_world(tmp_path: Path, own_nats_server: NatsServer) -> AsyncIterator[World]:
    url = own_nats_server.url
    bus, master = await NatsBus.connect(url, "w1"), await NatsBus.connect(url, "m1")
    async with world_of(tmp_path, bus, master) as found:
        yield found


@contextlib.asynccontextmanager
async def open_relay(world: World) -> AsyncIterator[Relay]:
    relay = world.relay()
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()


@contextlib.asynccontextmanager
async def agent(ticket: Ticket) -> AsyncIterator[RelayBus]:
    bus = await RelayBus.connect(ticket)
    try:
        yield bus
    finally:
        await bus.close()


def finish(job: str = "j", rank: int = 0) -> bytes:
    return codec.encode(FinishJob(job=job, rank=rank, result="1", sender="master.m1", epoch=9))


async def test_what_is_allowed_goes_on_in_the_rank_s_own_name(world: World) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def hear(delivery: Delivery) -> None:
        heard.put_nowait(delivery.payload)

    await world.bus.subscribe(ITERATIONS, hear)
    async with open_relay(world), agent(world.ticket()) as bus:
        assert bus.connected
        assert codec.decode(await bus.request(FINISH, finish(), timeout_s=5.0), Ok) == Ok()
        await bus.publish(ITERATIONS, codec.encode(OBSERVED))
        async with asyncio.timeout(5.0):
            told = codec.decode(await heard.get(), IterationsObserved)
    (asked,) = world.asked
    assert (asked.sender, asked.epoch, asked.result) == ("agent.j.0", 0, "1")
    assert told.sender == "agent.j.0"
    assert world.counts == {"relay_passed": 2}


async def test_errors_arrive_as_the_bus_raises_them(world: World) -> None:
    locate = codec.encode(LocateJob(job="j", rank=0))
    async with open_relay(world), agent(world.ticket()) as bus:
        with pytest.raises(NobodyThere, match="nobody answers"):
            await bus.request("sw.v1.cmd.controller.c9.locate", locate, timeout_s=5.0)
        with pytest.raises(AccessRefused, match="speaks for itself"):
            await bus.request(FINISH, finish(job="i"), timeout_s=5.0)
        with pytest.raises(AccessRefused, match="no say at"):
            await bus.request("sw.v1.cmd.master.main.submit", b"{}", timeout_s=5.0)
        with pytest.raises(AccessRefused, match="no say at"):
            await bus.publish(subjects.telemetry("job", "i", "iterations"), b"{}")
        with pytest.raises(Rejected, match="are over a message's"):
            await bus.publish(ITERATIONS, bytes(limits.MESSAGE_BYTES_MAX + 1))
        world.hold = asyncio.Event()
        with pytest.raises(DeadlineExceeded, match="no answer within"):
            await bus.request(FINISH, finish(), timeout_s=0.2)
        world.hold.set()
    assert world.counts["relay_refused"] == 3
    assert len(world.asked) == 1


async def test_a_wrong_token_is_refused_and_told_so(world: World) -> None:
    ticket = world.ticket()
    async with open_relay(world):
        for other in ({"token": bytes(32)}, {"job": "i"}, {"rank": 1}, {"attempt": 1}):
            wrong = msgspec.structs.replace(ticket.hello, **other)
            with pytest.raises(AccessRefused, match="is not process"):
                await RelayBus.connect(Ticket(path=ticket.path, hello=wrong))
    assert world.counts == {"relay_refused": 4}


async def guess(world: World, tries: int) -> None:
    """Greet with tokens, jobs, ranks and attempts that do not belong together; ask about others."""
    ticket, rng = world.ticket(), Random(7)
    for other in (("i", 0, 0), ("j", 1, 0), ("j", 0, 1)):
        world.ticket(*other)
    async with open_relay(world), agent(ticket) as bus:
        for number in range(tries // 2):
            job, rank, attempt = rng.choice((("i", 0, 0), ("j", 1, 0), ("j", 0, 1), ("k", 0, 0)))
            wrong = RelayHello(job=job, rank=rank, attempt=attempt, token=ticket.hello.token)
            with pytest.raises(AccessRefused):
                await RelayBus.connect(Ticket(path=ticket.path, hello=wrong))
            sent = finish(rng.choice(("i", "k")), 0) if number % 2 else finish("j", 1)
            with pytest.raises((AccessRefused, Unavailable)):  # Unavailable: it asks too often.
                await bus.request(FINISH, sent, timeout_s=5.0)
    assert not world.asked
    assert world.counts["relay_refused"] == 2 * (tries // 2)


async def test_a_stranger_says_nothing_about_another_job(world: World) -> None:
    await guess(world, 400)


@pytest.mark.nightly
@pytest.mark.timeout(1700)
async def test_a_stranger_says_nothing_about_another_job_in_100_000_tries(world: World) -> None:
    """Each try is a connection or a request: some minutes."""
    await guess(world, 100_000)


async def test_an_agent_finds_a_relay_that_was_started_anew(world: World) -> None:
    async with agent_over_restart(world) as bus, open_relay(world):
        await soon(lambda: bus.connected)
        assert await bus.request(FINISH, finish(), timeout_s=5.0)
    assert bus.counters.reconnects


@pytest.mark.parametrize("number", [0, RUN_ATTEMPTS, 3 * RUN_ATTEMPTS + 2])
async def test_goodput_is_told_of_the_job_s_attempt(world: World, number: int) -> None:
    """Its number was taken for the process's: programs of Pollux failed once they were resized."""
    subject = subjects.telemetry("job", "j", "goodput")
    first = PolluxAgent(BatchLimits(initial=32, total_max=64, per_gpu_max=32))
    for gpus in (1, 2):
        first.saw_iteration(Observation(1, gpus, 16, 0, 0.1, 0.05))
    first.refit()
    async with open_relay(world), agent(world.ticket("j", 0, number)) as bus:
        attempt = number // RUN_ATTEMPTS
        await bus.publish(subject, codec.encode(first.report(JobId("j"), attempt)))
        with pytest.raises(AccessRefused, match="speaks for itself alone"):
            await bus.publish(subject, codec.encode(first.report(JobId("j"), attempt + 1)))


class Caller:
    """Asks and tells over a relay again and again, one call at a time, each with a deadline."""

    DEADLINE_S = 0.5

    def __init__(self, bus: RelayBus) -> None:
        self.bus, self.answered, self.told, self.failed = bus, 0, 0, 0
        self.stopping = False

    async def run(self) -> None:
        """Raises what is not retryable, and TimeoutError for a call far beyond its deadline."""
        while not self.stopping:
            try:
                async with asyncio.timeout(20 * self.DEADLINE_S):
                    await self.bus.request(FINISH, finish(), timeout_s=self.DEADLINE_S)
                    self.answered += 1
                    await self.bus.publish(ITERATIONS, codec.encode(OBSERVED))
                    self.told += 1
            except Retryable as error:
                self.failed += 1
                await asyncio.sleep(error.retry_after_s)
            await asyncio.sleep(0.1)  # Twenty of them stay below what a rank may send.


@pytest.mark.live
async def test_programs_go_on_when_the_bus_is_killed_and_comes_back(
    live_world: World, own_nats_server: NatsServer
) -> None:
    """kill -9, five times, while twenty programs' calls are under way: each call is answered or
    fails with something to try again, none outlives its deadline, and no program connects anew."""
    async with open_relay(live_world), contextlib.AsyncExitStack() as stack:
        callers = [
            Caller(await stack.enter_async_context(agent(live_world.ticket("j", 0, n % 4))))
            for n in range(20)
        ]
        running = [asyncio.create_task(caller.run()) for caller in callers]
        rng = Random(5)
        for _ in range(5):
            failed = sum(caller.failed for caller in callers)
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            own_nats_server.kill()
            await soon(lambda n=failed: sum(caller.failed for caller in callers) > n, "calls fail")
            await own_nats_server.start_async()
            had = [(caller.answered, caller.told) for caller in callers]
            await soon(
                lambda had=had: all(
                    caller.answered > answered and caller.told > told
                    for caller, (answered, told) in zip(callers, had, strict=True)
                ),
                "every program is answered and heard again",
            )
        for caller in callers:
            caller.stopping = True
        await asyncio.gather(*running)
        assert not any(caller.bus.counters.reconnects for caller in callers)


@pytest.mark.live
async def test_a_request_that_the_bus_took_with_it_may_be_asked_again(
    live_world: World, own_nats_server: NatsServer
) -> None:
    """Its answer is lost with the bus: it may have been acted on. Another that waited for room at
    the relay was not sent. Both end at once, not at their deadlines."""
    live_world.hold = asyncio.Event()
    async with open_relay(live_world), agent(live_world.ticket()) as bus:
        asked = [
            asyncio.create_task(bus.request(FINISH, finish(), timeout_s=60.0))
            for _ in range(2 * limits.RELAY_ASKS_MAX)  # Half of them wait for room at the relay.
        ]
        await soon(lambda: len(live_world.asked) == limits.RELAY_ASKS_MAX, "they are under way")
        own_nats_server.kill()
        async with asyncio.timeout(20.0):
            ended = await asyncio.gather(*asked, return_exceptions=True)
        kinds = [DeadlineExceeded] * limits.RELAY_ASKS_MAX + [Unavailable] * limits.RELAY_ASKS_MAX
        assert [type(each) for each in ended] == kinds
        assert all(isinstance(each, Retryable) and each.retry_after_s > 0.0 for each in ended)
        live_world.hold.set()
        await own_nats_server.start_async()
        await retry(
            lambda: bus.request(FINISH, finish(), timeout_s=1.0), budget_s=20.0, rng=Random(1)
        )


@contextlib.asynccontextmanager
async def agent_over_restart(world: World) -> AsyncIterator[RelayBus]:
    """An agent whose relay has just ended."""
    async with open_relay(world):
        bus = await RelayBus.connect(world.ticket())
    await soon(lambda: not bus.connected)
    with pytest.raises(Unavailable, match="is away; nothing was sent"):
        await bus.request(FINISH, finish(), timeout_s=5.0)
    yield bus
    await bus.close()


async def test_a_relay_waits_until_the_one_before_it_has_ended(world: World) -> None:
    """A cluster started again after a kill -9 of its `up` failed: a worker service of the first one
    still listened, and its successor gave up for good."""
    first, second = world.relay(), world.relay()
    await first.start()
    starting = asyncio.create_task(second.start())
    await asyncio.sleep(0.1)
    assert not starting.done()
    await first.stop()
    await starting
    assert second.path.is_socket()
    await second.stop()


async def test_a_program_waits_for_a_service_that_is_being_started_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: it gave up after 3 s, as at a bus. Beside busy cores a service takes longer to
    come back, and a kill of it failed the jobs that were beginning."""
    monkeypatch.setattr(limits, "BUS_CONNECT_S", 0.1)
    connecting = asyncio.create_task(RelayBus.connect(world.ticket()))
    await asyncio.sleep(0.5)
    assert not connecting.done()
    async with open_relay(world):
        bus = await connecting
        assert bus.connected
        await bus.close()


async def test_a_program_does_not_wait_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RELAY_CONNECT_S", 0.1)
    with pytest.raises(Unavailable, match=r"did not answer within 0\.1 s; `slackwater nodes` says"):
        await RelayBus.connect(world.ticket())


async def test_the_connections_of_a_process_that_ended_are_closed(world: World) -> None:
    async with open_relay(world) as relay, agent(world.ticket()) as bus:
        del world.tokens["j", 0, 0]
        relay.ended(("j", 0, 0))
        await soon(lambda: not bus.connected)
        with pytest.raises(AccessRefused, match="or that has ended"):
            await retry(
                lambda: bus.request(FINISH, finish(), timeout_s=1.0), budget_s=10.0, rng=Random()
            )
    assert not world.asked


async def test_a_greeting_is_not_let_in_when_its_rank_ends_while_it_is_looked_at(
    world: World,
) -> None:
    """Red before: its connection stayed open as long as the service, of a rank that was no more."""
    world.look = look = threading.Barrier(2)
    async with open_relay(world) as relay:
        connecting = asyncio.create_task(RelayBus.connect(world.ticket()))
        await asyncio.to_thread(look.wait, 30)
        del world.tokens["j", 0, 0]
        world.look = None
        relay.ended(("j", 0, 0))
        await asyncio.to_thread(look.wait, 30)
        with pytest.raises(AccessRefused, match="or that has ended"):
            await connecting
        assert not relay._peers


@contextlib.asynccontextmanager
async def silent(world: World, number: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """So many connections that say nothing."""
    with within(world.ticket().path) as path:
        both = [await asyncio.open_unix_connection(path) for _ in range(number)]
    yield [reader for reader, _ in both]
    for _, writer in both:
        writer.close()


async def test_silent_connections_keep_no_rank_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: those of one job kept the ranks of others out, for 5 s and again."""
    monkeypatch.setattr(limits, "RELAY_GREETINGS_MAX", 20)
    async with open_relay(world), silent(world, 20) as readers:
        async with agent(world.ticket()) as bus, asyncio.timeout(limits.RELAY_GREETING_S / 2):
            assert await bus.request(FINISH, finish(), timeout_s=5.0)
            assert await readers[0].read() == b"", "the oldest made room"
        assert not readers[-1].at_eof()
    assert world.counts["relay_refused"] == 1


async def test_a_program_that_floods_is_told_to_wait_and_another_is_heard(world: World) -> None:
    refused: list[BaseException] = []
    async with open_relay(world), agent(world.ticket()) as loud, agent(world.ticket("i")) as quiet:
        for _ in range(5):
            done = await asyncio.gather(
                *(loud.request(FINISH, finish(), timeout_s=5.0) for _ in range(200)),
                return_exceptions=True,
            )
            refused += [each for each in done if isinstance(each, BaseException)]
        assert await quiet.request(FINISH, finish("i"), timeout_s=5.0)
    assert refused
    assert all(isinstance(each, Unavailable) and each.retry_after_s > 0.0 for each in refused)
    assert len(world.asked) < 1000


async def test_hostile_bytes_end_their_own_connection_alone(world: World) -> None:
    async with open_relay(world), agent(world.ticket()) as honest:
        path = f"/proc/self/fd/{(folder := os.open(world.folder / ('long' * 40), os.O_PATH))}"
        for sent in (b"\xff" * 64, b"\0" * 6, secrets.token_bytes(4096), b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_unix_connection(f"{path}/relay.sock")
            writer.write(sent)
            writer.write_eof()
            async with asyncio.timeout(limits.RELAY_GREETING_S + 5.0):
                await reader.read()
            writer.close()
        os.close(folder)
        assert await honest.request(FINISH, finish(), timeout_s=5.0)


async def test_nothing_can_be_heard_or_served_there(world: World) -> None:
    async def hear(_: Delivery) -> None:
        raise AssertionError

    async with open_relay(world), agent(world.ticket()) as bus:
        with pytest.raises(AccessRefused):
            await bus.subscribe("sw.v1.>", hear)
        with pytest.raises(AccessRefused):
            await bus.serve(ServiceInfo("master", "1.0.0", "", {}), [])


# Tickets and tokens -------------------------------------------------------------------------------


SHOW = """
import os
from slackwater.common.bus.relay import find_ticket
print(find_ticket(os.environ))
"""


@pytest.mark.parametrize("launcher", [False, True])
def test_a_program_finds_its_ticket_also_behind_a_launcher(launcher: bool) -> None:
    """torchrun and its like start the training programs with all descriptors closed."""
    ticket = Ticket(path="/run/x", hello=RelayHello(job="j", rank=2, attempt=0, token=bytes(32)))
    fd = write_ticket(ticket)
    command = [sys.executable, "-c", SHOW]
    if launcher:
        command = [sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"]
    said = subprocess.run(
        command, pass_fds=[fd], env={**os.environ, "SLACKWATER_TOKEN_FD": str(fd)},
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    os.close(fd)
    assert said.strip() == "the worker service (/run/x)"
    assert repr(ticket) == "Ticket('/run/x', 'j', 2)"
    assert find_ticket({"SLACKWATER_TOKEN_FD": str(fd)}) is None
    assert find_ticket({}) is None


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[RankFiles, Containment]]:
    """Rank 0 of job j, which sleeps."""
    files, containment = RankFiles(tmp_path, "j", 0), Containment(tmp_path, None)
    intent = Intent(job="j", rank=0, workers=1, program=("/bin/sleep", "300"))
    child = files.launch(intent, containment.environment("j", 0, 0), 2**23)
    while not files.lives():
        assert child.poll() is None
    yield files, containment
    assert containment.end("j", 0, 0)
    child.wait()


def test_a_token_is_of_one_process_that_lives(running: tuple[RankFiles, Containment]) -> None:
    files, containment = running
    uid = os.geteuid()
    token = make_token(files, uid)
    assert token.hex() not in files.path("token").read_text()
    assert files.path("token").stat().st_mode & 0o077 == 0
    assert is_token(files, token, uid)
    assert not is_token(files, bytes(32), uid)
    assert not is_token(files, token, uid + 1)
    state_dir = files.folder.parents[1]
    assert not is_token(RankFiles(state_dir, "j", 1), token, uid)
    assert not is_token(RankFiles(state_dir, "j", 0, 1), token, uid)
    assert make_token(files, uid) != token
    assert not is_token(files, token, uid), "a later one takes its place"
    token = make_token(files, uid)
    assert containment.end("j", 0, 0)
    while files.lives():
        pass
    assert not is_token(files, token, uid)


def test_only_the_rank_s_own_processes_count(running: tuple[RankFiles, Containment]) -> None:
    files, containment = running
    identity = files.identity()
    assert identity is not None
    assert containment.holds(identity.pid, "j", 0, 0)
    assert not containment.holds(identity.pid, "j", 1, 0)
    assert not containment.holds(identity.pid, "j", 0, 1)
    assert not containment.holds(os.getpid(), "j", 0, 0)
    assert MARK in containment.environment("j", 0, 0)
