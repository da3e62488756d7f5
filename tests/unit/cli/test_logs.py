"""Following logs, over the bus in memory and in virtual time: who is asked, what comes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.cli.logs import printer, show_printed
from slackwater.client import logs as logs_of
from slackwater.common.base import codec, limits
from slackwater.common.base.errors import Rejected, SlackwaterError, Unavailable
from slackwater.common.bus.base import Delivery, Endpoint, ServiceInfo
from slackwater.common.shell.client import Client
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld, World
from slackwater.schemas import subjects
from slackwater.schemas.base import Message, NodeId, Refused
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.job_requests import JobInfo
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.logs import LogPiece, ReadLog
from slackwater.services.worker.ranklog import RankLog

INFO = ServiceInfo("x", "1.0.0", "answers in a test", {})
SPEC = JobSpec(id="j1", program=("train",), workers=1)
RUNNING = JobRecord(spec=SPEC, state="running", node=NodeId("n1"))
ENDED = JobRecord(spec=SPEC, state="completed", node=NodeId("n1"))


class Site:
    """A master that knows one job, and a worker service with the log of its rank."""

    def __init__(self, record: JobRecord, log: RankLog, piece_bytes: Sequence[int] = (1000,)):
        self.sim = SimWorld(1)
        self.record, self.log, self.piece_bytes = record, log, piece_bytes
        self.asked: list[ReadLog] = []
        self.client = self._client(self.sim.client("cli"))

    @staticmethod
    def _client(world: World) -> Client:
        return Client(world.bus, world.clock, rng=world.rng, history=world.history)

    async def master(self) -> None:
        await self._serve("master", subjects.command("master", "main", "get"), self._job)

    async def worker(self, id: str = "n1") -> None:
        await self._serve(f"worker-{id}", subjects.command("worker", id, "log"), self._log)

    async def beat(self, id: str, node: str) -> None:
        bus = self.sim.client(f"beat-{id}").bus
        subject = subjects.telemetry("worker", id, "heartbeat")
        beat = WorkerHeartbeat(
            service="worker", id=id, incarnation=0, at_s=1.0, node=NodeId(node), slots=4
        )
        while True:
            await bus.publish(subject, codec.encode(beat))
            await asyncio.sleep(limits.HEARTBEAT_S)

    async def read(self, *, follow: bool = False, by_line: bool = False, tail: int = -1) -> bytes:
        reading = logs_of.read(self.client, self.record, 0, tail, follow, by_line)
        async with aclosing(reading) as pieces:
            found = [said.data async for said in pieces]
        return b"\n".join(found) if by_line else b"".join(found)

    async def _serve(self, name: str, subject: str, answer: Callable[[Delivery], Message]) -> None:
        async def respond(delivery: Delivery) -> bytes:
            return codec.encode(answer(delivery))

        await self.sim.client(name).bus.serve(INFO, [Endpoint("x", subject, respond, {}, 8)])

    def _job(self, delivery: Delivery) -> Message:
        return JobInfo(job=self.record)

    def _log(self, delivery: Delivery) -> Message:
        asked = codec.decode(delivery.payload, ReadLog)
        size = self.piece_bytes[len(self.asked) % len(self.piece_bytes)]
        self.asked.append(asked)
        if asked.job != "j1":
            return Refused(reason="n1 has no log of it")
        place = self.log.tail(asked.tail) if asked.offset is None else asked.offset
        piece = self.log.read(place, size)
        ended = piece.start + len(piece.data) >= piece.end
        return LogPiece(
            job="j1", rank=asked.rank, start=piece.start, data=piece.data, begin=piece.begin,
            end=piece.end, ended=ended,
        )  # fmt: skip


AnySite = TypeVar("AnySite", bound=Site)


def simulated(site: Callable[[], AnySite], program: Callable[[AnySite], Awaitable[None]]) -> None:
    async def run() -> None:
        await program(site())

    run_simulated(run())


def written(folder: Path, payload: bytes) -> RankLog:
    path = folder / "rank0.log"
    path.write_bytes(payload)
    return RankLog(path)


@settings(max_examples=80, deadline=None)
@given(
    payload=st.binary(max_size=300),
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    by_line=st.booleans(),
    follow=st.booleans(),
)
def test_pieces_of_any_size_give_what_was_printed(
    tmp_path_factory: pytest.TempPathFactory,
    payload: bytes,
    sizes: list[int],
    by_line: bool,
    follow: bool,
) -> None:
    log = written(tmp_path_factory.getbasetemp(), payload)

    async def program(site: Site) -> None:
        await site.master()
        await site.worker()
        found = await site.read(by_line=by_line, follow=follow)
        assert found == (payload.removesuffix(b"\n") if by_line else payload)

    simulated(lambda: Site(ENDED, log, sizes), program)


def test_a_worker_service_of_another_name_is_found_by_its_heartbeat(tmp_path: Path) -> None:
    log = written(tmp_path, b"one\ntwo\n")

    async def program(site: Site) -> None:
        await site.worker("gpu-7")
        beating = [
            asyncio.ensure_future(site.beat(*each)) for each in (("w9", "n9"), ("gpu-7", "n1"))
        ]
        assert await site.read(tail=1) == b"two\n"
        for each in beating:
            each.cancel()

    simulated(lambda: Site(ENDED, log), program)


def test_a_machine_that_is_away_is_named_with_where_its_log_is(tmp_path: Path) -> None:
    log = written(tmp_path, b"")

    async def program(site: Site) -> None:
        with pytest.raises(Unavailable, match=r"node n1 does not answer.*jobs/j1 of its state_dir"):
            await site.read()

    simulated(lambda: Site(ENDED, log), program)


def test_a_follower_waits_for_a_machine_that_comes_back(tmp_path: Path) -> None:
    log = written(tmp_path, b"back\n")

    async def program(site: Site) -> None:
        await site.master()
        reading = asyncio.ensure_future(site.read(follow=True))
        await asyncio.sleep(30.0)
        assert not reading.done()
        await site.worker()
        assert await reading == b"back\n"

    simulated(lambda: Site(ENDED, log), program)


def test_a_rank_that_starts_and_ends_between_two_questions_is_shown(tmp_path: Path) -> None:
    """Regression: its node knew no such rank, and then the job had ended: nothing was printed."""
    log = written(tmp_path, b"short\n")

    class Late(Site):
        def _log(self, delivery: Delivery) -> Message:
            if self.record is RUNNING:
                self.record = ENDED
                return Refused(reason="n1 has no log of job j1, rank 0")
            return super()._log(delivery)

    async def program(site: Late) -> None:
        await site.master()
        await site.worker()
        assert await site.read(follow=True) == b"short\n"

    simulated(lambda: Late(RUNNING, log), program)


def test_a_rank_that_died_is_followed_until_the_job_has_ended(tmp_path: Path) -> None:
    """It is started again, and goes on in the same log."""
    log = written(tmp_path, b"first life\n")

    async def program(site: Site) -> None:
        await site.master()
        await site.worker()
        reading = asyncio.ensure_future(site.read(follow=True))
        await asyncio.sleep(5.0)
        assert not reading.done()
        written(tmp_path, b"first life\nsecond life\n")
        site.record = ENDED
        assert await reading == b"first life\nsecond life\n"

    simulated(lambda: Site(RUNNING, log), program)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (JobRecord(spec=JobSpec(id="j1")), "has no program: its user started it by hand"),
        (JobRecord(spec=SPEC, reason="waits for a slot"), "not started yet: waits for a slot"),
        (JobRecord(spec=SPEC, state="cancelled"), "cancelled before it was started"),
    ],
    ids=["by hand", "waits", "cancelled"],
)
def test_a_job_without_a_log_says_why(tmp_path: Path, record: JobRecord, why: str) -> None:
    async def program(site: Site) -> None:
        await site.master()
        with pytest.raises(Rejected, match=why):
            await logs_of.started(site.client, "j1", patient=False)

    simulated(lambda: Site(record, written(tmp_path, b"")), program)


def test_a_log_that_was_removed_is_said_to_be(tmp_path: Path) -> None:
    gone = JobRecord(
        spec=JobSpec(id="j0", program=("train",)), state="completed", node=NodeId("n1")
    )

    async def program(site: Site) -> None:
        await site.worker()
        with pytest.raises(SlackwaterError, match="n1 has no log of it"):
            await site.read()
        assert await logs_of.last_lines(site.client, gone, 0, 3) == []

    simulated(lambda: Site(gone, written(tmp_path, b"")), program)


GANG = JobSpec(id="j1", program=("train",), workers=3, gpus=6)
SPREAD = JobRecord(
    spec=GANG, state="running", node=NodeId("n1"),
    allocation=((NodeId("n1"), 2), (NodeId("n2"), 4)),
)  # fmt: skip


class Nodes(Site):
    """Several machines, each with a log for any rank that it was given."""

    def __init__(self, record: JobRecord, logs: dict[tuple[str, int], RankLog]) -> None:
        super().__init__(record, next(iter(logs.values())))
        self.logs = logs
        self.shown: list[logs_of.Said] = []

    async def node(self, id: str) -> None:
        def answer(delivery: Delivery) -> Message:
            asked = codec.decode(delivery.payload, ReadLog)
            if (id, asked.rank) not in self.logs:
                return Refused(reason=f"{id} has no log of job j1, rank {asked.rank}")
            self.log = self.logs[id, asked.rank]
            return self._log(delivery)

        await self._serve(f"worker-{id}", subjects.command("worker", id, "log"), answer)


def gang(folder: Path, *places: tuple[str, int]) -> dict[tuple[str, int], RankLog]:
    made = {}
    for node, rank in places:
        path = folder / node
        path.mkdir(exist_ok=True)
        (path / f"rank{rank}.log").write_text(f"{rank} was on {node}\n")
        made[node, rank] = RankLog(path / f"rank{rank}.log")
    return made


def test_each_rank_of_a_gang_is_asked_for_on_its_own_node(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Two GPUs for each process: the first on n1, the others on n2."""
    record = msgspec.structs.replace(SPREAD, state="completed")

    async def program(site: Nodes) -> None:
        await site.master()
        for node in ("n1", "n2"):
            await site.node(node)
        ranks = logs_of.ranks_of(record)
        assert list(ranks) == [0, 1, 2]
        for follow in (False, True):
            for json in (False, True):
                show = printer(record, ranks, json)
                await show_printed(site.client, record, ranks, -1, follow, show)
        alone = printer(record, [2], False)
        await show_printed(site.client, record, [2], -1, False, alone)

    simulated(lambda: Nodes(record, gang(tmp_path, ("n1", 0), ("n2", 1), ("n2", 2))), program)
    shown = capsysbinary.readouterr().out.decode().splitlines()
    places = [(0, "n1"), (1, "n2"), (2, "n2")]
    plain = [f"rank {rank} on {node} | {rank} was on {node}" for rank, node in places]
    documents = [
        f'{{"rank":{rank},"node":"{node}","line":"{rank} was on {node}"}}' for rank, node in places
    ]
    assert shown[:6] == [*plain, *documents]
    assert sorted(shown[6:-1]) == sorted([*plain, *documents])
    assert shown[-1] == "2 was on n2"


def test_the_ranks_of_a_paused_gang_are_asked_for_where_they_ran(tmp_path: Path) -> None:
    """Ranks of its first node alone were shown: the record of a paused job names that one."""
    paused = msgspec.structs.replace(
        SPREAD, state="paused", allocation=(), ran_on=SPREAD.allocation
    )

    async def program(site: Nodes) -> None:
        await site.master()
        for node in ("n1", "n2"):
            await site.node(node)
        record = await logs_of.started(site.client, "j1", False)
        ranks = logs_of.ranks_of(record)
        await show_printed(site.client, record, ranks, -1, False, site.shown.append)
        assert [(said.rank, said.node) for said in site.shown] == [(0, "n1"), (1, "n2"), (2, "n2")]

    simulated(lambda: Nodes(paused, gang(tmp_path, ("n1", 0), ("n2", 1), ("n2", 2))), program)


def test_a_machine_that_is_away_does_not_hide_the_other_ranks(tmp_path: Path) -> None:
    async def program(site: Nodes) -> None:
        await site.node("n2")
        with pytest.raises(Unavailable, match="worker service of node n1 does not answer"):
            await show_printed(site.client, SPREAD, range(3), -1, False, site.shown.append)
        assert [(said.rank, said.node) for said in site.shown] == [(1, "n2"), (2, "n2")]

    simulated(lambda: Nodes(SPREAD, gang(tmp_path, ("n2", 1), ("n2", 2))), program)


def test_a_follower_goes_with_a_rank_to_another_node(tmp_path: Path) -> None:
    """A policy moves the job: what the rank prints there comes after what it printed before."""
    first = msgspec.structs.replace(SPREAD, allocation=((NodeId("n1"), 6),))
    moved = msgspec.structs.replace(SPREAD, state="starting", attempt=1)

    async def program(site: Nodes) -> None:
        await site.master()
        for node in ("n1", "n2"):
            await site.node(node)

        async def follow() -> None:
            async with aclosing(logs_of.read(site.client, first, 1, -1, True, True)) as pieces:
                site.shown = [said async for said in pieces]

        following = asyncio.ensure_future(follow())
        await asyncio.sleep(5.0)
        site.record = moved
        await asyncio.sleep(5.0)
        assert not following.done(), "n2 has not started it yet"
        site.logs |= gang(tmp_path, ("n2", 1))
        await asyncio.sleep(5.0)
        site.record = msgspec.structs.replace(moved, state="completed")
        await following
        assert site.shown == [(1, "n1", b"1 was on n1"), (1, "n2", b"1 was on n2")]

    simulated(lambda: Nodes(first, gang(tmp_path, ("n1", 1))), program)
