"""Jobs that hang, the rank that holds the others up, and jobs that only take their time."""

from random import Random
from typing import Any

import msgspec
import pytest
from tests.unit.services.master.test_gpu_dispatch import GpuHarness

from slackwater.common.base.effects import Answered, Publish, Request
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.hangs import Hang, LookAtRank, RankLook, RankLooked
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_requests import AskMissing, GetJob, JobInfo
from slackwater.schemas.telemetry import IterationsObserved
from slackwater.services.master.keys import LookKey

ITERATION_S = 0.5
WAITS = RankLook(
    state="S",
    stack='Thread 0x1 (most recent call first):\n  File "/t/c10d.py", line 9 in all_reduce\n'
    '  File "train.py", line 3 in step\n',
)
SLEEPS = RankLook(
    state="S",
    stack='Thread 0x2 (most recent call first):\n  File "/l/threading.py", line 1 in wait\n\n'
    'Current thread 0x1 (most recent call first):\n  File "train.py", line 7 in load\n',
)


class Training(GpuHarness):
    """Job `a` with four ranks on two nodes, which ends an iteration each ITERATION_S."""

    def __init__(self, **fields: object) -> None:
        super().__init__()
        self.iterations = dict.fromkeys(range(4), 0)
        self.looks: dict[int, RankLook] = dict.fromkeys(range(4), WAITS)
        self.submit("a", 4, **fields)
        for node in ("n1", "n2"):
            self.confirm(f"start@{node}/a")
        self.facts: list[JobEvent] = []
        self.looked: list[int] = []

    def report(self, rank: int, *durations_s: float) -> None:
        first = self.iterations[rank] + 1
        self.iterations[rank] += len(durations_s)
        message = IterationsObserved(
            job=JobId("a"), rank=rank, first_iteration=first, durations_s=durations_s,
            location_epoch=1, bytes_pushed=0, bytes_pulled=0, workers=4,
        )  # fmt: skip
        self.see(message)

    def pass_s(self, seconds: float, *going: int, each: Any = None, reports: bool = True) -> None:
        """Let time pass while the ranks `going` end iterations, and all others only live."""
        for _ in range(round(seconds)):
            for rank in range(4 if reports else 0):
                self.report(rank, *(ITERATION_S,) * (2 if rank in going else 0))
            for node, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
                self.hear(node)
                beat = WorkerHeartbeat(
                    service="worker", id=node, incarnation=0, at_s=self.now_s, node=NodeId(node),
                    slots=8, running=tuple((JobId("a"), rank) for rank in ranks),
                    gpus=self.core.state.nodes._nodes[NodeId(node)].heartbeat.gpus,
                )  # fmt: skip
                self.see(beat)
            if each is not None:
                each()
            effects = self.tick(1.0)
            self.facts += [
                e.message
                for e in effects
                if isinstance(e, Publish) and isinstance(e.message, JobEvent)
            ]
            for ask in effects:
                if isinstance(ask, Request) and isinstance(ask.message, LookAtRank):
                    rank = ask.message.rank
                    self.looked.append(rank)
                    looked = RankLooked(job="a", rank=rank, look=self.looks[rank])
                    self.step(Answered(LookKey(JobId("a"), rank), looked))

    def print_s(self, seconds: int, rank: int = 0) -> None:
        """Let time pass while only this rank prints."""
        for _ in range(seconds):
            look = self.looks[rank]
            self.looks[rank] = msgspec.structs.replace(look, log_bytes=look.log_bytes + 1)
            self.pass_s(1)

    def hang(self) -> Hang | None:
        answer = self.answer(GetJob(job="a"))
        assert isinstance(answer, JobInfo)
        return answer.hang

    def told(self) -> list[str]:
        return [fact.reason for fact in self.facts if fact.fact == "hung"]


ALL = (0, 1, 2, 3)


def test_the_rank_that_is_behind_is_named_with_its_node_and_place() -> None:
    training = Training()
    training.pass_s(10, *ALL)
    training.pass_s(1, 0, 1, 3)
    training.looks[2] = SLEEPS
    training.pass_s(14)
    (reason,) = training.told()
    assert reason.startswith("rank 2 on n2 hangs, in train.py:7 load: no iteration has ended for 1")
    assert training.why("a") == reason
    hang = training.hang()
    assert hang is not None
    assert [(r.rank, r.node, r.look) for r in hang.ranks] == [(2, "n2", SLEEPS)]
    assert training.looked == [2], "nobody else was asked"
    training.pass_s(2, *ALL)
    assert training.hang() is None, "it goes on"


def test_with_equal_counts_it_is_the_one_that_waits_for_nobody() -> None:
    training = Training()
    training.pass_s(10, *ALL)
    training.looks[1] = SLEEPS
    training.pass_s(20)
    (reason,) = training.told()
    assert reason.startswith("rank 1 on n1 hangs, in train.py:7 load")
    assert sorted(training.looked) == [0, 1, 2, 3]


def test_those_are_named_whom_the_others_say_they_wait_for() -> None:
    training = Training()
    training.pass_s(10, *ALL)
    asks = AskMissing(job="a", rank=0, iteration=21, waited_s=9.0, behind=((3, 20),))
    training.looks[3] = RankLook(state="T", why="its process was stopped by a signal")
    training.pass_s(14, each=lambda: training.ask(asks))
    (reason,) = training.told()
    assert reason.startswith("rank 3 on n2 hangs, its process was stopped by a signal: ")


def test_one_long_iteration_is_not_a_hang() -> None:
    training = Training()
    for _ in range(20):
        training.pass_s(10, *ALL)
        training.pass_s(9)
    assert training.told() == []
    assert training.looked == []


def test_slow_iterations_have_ten_times_as_long() -> None:
    training = Training()
    for _ in range(6):
        training.pass_s(1)
        for rank in ALL:
            training.report(rank, 3.0)
    training.pass_s(27)
    assert training.told() == []
    training.pass_s(6)
    assert training.told()


def test_a_rank_that_computes_is_given_longer() -> None:
    """It evaluates or saves between two iterations."""
    training = Training()
    training.pass_s(10, *ALL)
    training.looks[0] = RankLook(state="R", cores=1.0, stack=SLEEPS.stack)
    training.pass_s(90)
    assert training.told() == []
    assert training.looked.count(0) > 2, "it is looked at again"
    training.pass_s(20)
    assert "rank 0 on n1 computes without an end, in train.py:7 load" in training.told()[0]


@pytest.mark.parametrize("before", [0, 1])
def test_a_job_that_has_told_little_is_not_judged(before: int) -> None:
    training = Training()
    training.pass_s(before, *ALL)
    training.pass_s(60)
    assert training.told() == []


def test_it_is_started_again_where_its_spec_says_so() -> None:
    training = Training(hang_timeout_s=30.0)
    training.pass_s(10, *ALL)
    training.looks[1] = SLEEPS
    training.pass_s(25)
    assert training.told()
    assert training.job("a").state == "running"
    training.pass_s(8)
    assert training.job("a").state == "stopping"
    for node in ("n1", "n2"):
        training.confirm(f"stop@{node}/a")
    assert (training.job("a").state, training.job("a").attempt) == ("starting", 1)
    assert training.hang() is None
    training.print_s(30)
    assert len(training.told()) == 1, "the new attempt has told nothing yet"


# Programs that count no iterations ----------------------------------------------------------------

QUIET: dict[str, Any] = {"hang_timeout_s": 40.0}


def spin(training: Training, rank: int, seconds: int, cores: float, lines: int = 1) -> None:
    """Let a rank compute for so long, at so many lines in turn."""
    for second in range(seconds):
        look = training.looks[rank]
        stack = look.stack.replace("line 9", f"line {9 + second % lines}")
        cpu_s = look.cpu_s + cores
        training.looks[rank] = msgspec.structs.replace(look, cpu_s=cpu_s, cores=cores, stack=stack)
        training.pass_s(1)
        training.looks[rank] = msgspec.structs.replace(training.looks[rank], stack=look.stack)


def test_a_job_that_neither_prints_nor_computes_hangs() -> None:
    training = Training(**QUIET)
    training.looks[2] = SLEEPS
    training.print_s(60)
    assert training.told() == []
    training.pass_s(19)
    assert training.told() == []
    training.pass_s(8)
    (reason,) = training.told()
    assert reason.startswith(
        "rank 2 on n2 hangs, in train.py:7 load: it has printed and computed nothing for 2"
    )
    hang = training.hang()
    assert hang is not None
    assert [one.rank for one in hang.ranks] == [2]
    assert training.job("a").state == "running"
    training.pass_s(22)
    assert training.job("a").state == "stopping"


def test_what_it_prints_ends_its_hang() -> None:
    training = Training(**QUIET)
    training.pass_s(32)
    assert training.hang() is not None
    training.print_s(8)
    assert training.hang() is None
    assert training.job("a").state == "running"


def test_a_rank_that_computes_goes_on() -> None:
    training = Training(**QUIET)
    training.looks[1] = SLEEPS
    spin(training, 1, 120, 1.0)
    assert training.told() == []


def test_a_rank_that_spins_in_a_collective_waits() -> None:
    """NCCL lets it spin so. One that is seen at several lines goes on."""
    training = Training(**QUIET)
    spin(training, 1, 120, 1.0, lines=7)
    assert training.told() == []
    spin(training, 1, 40, 1.0)
    assert training.told()


def test_without_a_timeout_nobody_is_asked() -> None:
    training = Training()
    training.pass_s(120)
    assert (training.looked, training.told()) == ([], [])


def test_one_whose_ranks_cannot_be_seen_is_not_judged() -> None:
    training = Training(**QUIET)
    training.looks[3] = RankLook(why="no process of it is left")
    training.pass_s(120)
    assert training.told() == []


def test_one_that_begins_to_iterate_is_watched_by_its_iterations() -> None:
    training = Training(**QUIET)
    training.pass_s(30)
    assert training.hang() is not None
    training.pass_s(20, *ALL)
    assert training.hang() is None
    training.looks[1] = SLEEPS
    training.pass_s(14)
    assert "no iteration has ended for 1" in training.told()[-1]


def train_an_hour(seed: int) -> tuple[Training, int]:
    """Iterate, each rank a little differently, for up to 2 s; one in fifty takes nine times as
    long. Returns how many were ended."""
    rng, training = Random(seed), Training(hang_timeout_s=60.0)
    usual_s = 10 ** rng.uniform(-1.7, 0.3)
    pending: list[list[float]] = [[] for _ in ALL]
    due_s = 0.0
    for second in range(3600):
        while due_s <= second:
            slowest_s = usual_s * (9.0 if rng.random() < 0.02 else rng.uniform(0.8, 1.2))
            for rank in ALL:
                pending[rank].append(slowest_s * rng.uniform(0.95, 1.0))
            due_s += slowest_s
        for rank in ALL:
            if (second + rank) % 2 == 0 or pending[rank]:  # Each second, or each two seconds.
                training.report(rank, *pending[rank])
                pending[rank].clear()
        training.pass_s(1, reports=False)
    return training, training.iterations[0]


def test_uneven_iterations_raise_no_alarm_in_an_hour() -> None:
    """3,600 steps of the master: some seconds."""
    training, ended = train_an_hour(0)
    assert ended > 1000
    assert training.told() == []


@pytest.mark.nightly
def test_uneven_iterations_raise_no_alarm_in_a_hundred_hours() -> None:
    for seed in range(1, 101):
        training, _ = train_an_hour(seed)
        assert training.told() == [], seed
