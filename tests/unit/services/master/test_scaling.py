"""Jobs that get another number of workers: what is stored, ordered and told, and in which order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.services.master.test_master_core import Harness, facts, orders, spec, submitted

from slackwater.common.base.effects import Answered, Effect, Publish, Reply, Request
from slackwater.schemas.base import RUN_ATTEMPTS, Message, NodeId, Ok, Refused
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_requests import (
    AskSize,
    GetJob,
    JobInfo,
    JoinJob,
    Meet,
    Meeting,
    PauseJob,
    RegisterJob,
    ResumeJob,
    ScaleJob,
    SizeWanted,
    SubmitJob,
    UseHosts,
)
from slackwater.schemas.progress import ProgramProgress
from slackwater.schemas.tensors import TensorSpec
from slackwater.schemas.workers import StartWorkers, StopWorkers, WorkerExited
from slackwater.services.master.gangs import asked_spec
from slackwater.services.master.keys import OrderKey
from slackwater.services.master.scaling import JOINING_S, compatible, trimmed

N1, N2, N3 = map(NodeId, ("n1", "n2", "n3"))


class Obeyed(Harness):
    """Nodes that carry out what they were ordered, when asked to; what was told is kept."""

    def __init__(self, **config: object) -> None:
        self.told: list[JobEvent] = []
        self.pending: dict[OrderKey, Message] = {}
        super().__init__(**config)

    def step(self, event: object) -> list[Effect]:
        effects = super().step(event)
        for effect in effects:
            if isinstance(effect, Request) and isinstance(effect.key, OrderKey):
                self.pending[effect.key] = effect.message
            if isinstance(effect, Publish) and isinstance(effect.message, JobEvent):
                self.told.append(effect.message)
        return effects

    def confirm(self) -> list[Message]:
        """All nodes carry out what they were ordered; return what that was."""
        found = []
        while self.pending:
            key, message = self.pending.popitem()
            if key.what.verb != "place":
                found.append(message)
                self.step(Answered(key, Ok()))
        return found


class Elastic(Obeyed):
    """A job of two workers, of 1 to 4, that trains; orders are confirmed when asked."""

    def __init__(self, slots: int = 8, agents: bool = True, **fields: object) -> None:
        super().__init__()
        self.version = 10
        self.report("c1", 8.0)
        made = spec("a", **({"workers_min": 1, "workers_max": 4} | fields))
        self.ask(SubmitJob(spec=made))
        self.node(slots=slots)
        self.confirm()
        if agents:
            tensors = (TensorSpec(name="w", shape=(8,)),)
            self.ask(RegisterJob(job="a", rank=0, tensors=tensors))
        self.now_s += 5.0

    def scale(self, workers: int) -> list[Effect]:
        return self.ask(ScaleJob(job="a", workers=workers))

    def join(self, *ranks: int) -> None:
        for rank in ranks:
            assert self.answer(JoinJob(job="a", rank=rank)) == Ok()

    def rank_0(self, workers: int = 0) -> int:
        """Rank 0 asks how many are wanted; `workers`: so many have just begun to count."""
        self.version += bool(workers)
        ask = AskSize(job="a", workers=workers, since=self.version if workers else 0)
        wanted = self.answer(ask)
        assert isinstance(wanted, SizeWanted)
        return wanted.workers

    def settled(self) -> tuple[int, str]:
        record = self.job("a")
        assert not record.resizing
        return sum(number for _, number in record.allocation), record.state


def test_new_ranks_are_started_and_counted_only_once_all_are_ready() -> None:
    harness = Elastic()
    effects = harness.scale(4)
    starts = [each for each in orders(effects) if isinstance(each, StartWorkers)]
    assert [start.ranks for start in starts] == [(2,), (3,)]
    assert {start.workers for start in starts} == {4}
    assert facts(effects) == ["scaling", "joining"]
    assert harness.job("a").allocation == ((N1, 4),)
    harness.confirm()
    assert harness.rank_0() == 2, "nobody is ready"
    harness.join(2)
    assert harness.rank_0() == 2, "one is not ready"
    harness.join(3)
    assert harness.rank_0() == 4
    assert harness.rank_0(4) == 4
    assert harness.settled() == (4, "running")
    assert harness.job("a").size_since == 11


def test_hosts_learn_where_rank_0_of_their_program_listens() -> None:
    harness = Elastic()
    assert harness.answer(Meet(job="a", rank=1)) == Meeting()
    told = Meet(job="a", rank=0, address="h:1", secret="s", progress=ProgramProgress(iteration=7))
    assert harness.answer(told) == Meeting(address="h:1", secret="s")
    assert harness.answer(Meet(job="a", rank=1)) == Meeting(address="h:1", secret="s")
    stranger = Meet(job="a", rank=1, address="evil:1", secret="x")
    assert harness.answer(stranger) == Meeting(address="h:1", secret="s"), "rank 0 alone says it"
    info = harness.answer(GetJob(job="a"))
    assert isinstance(info, JobInfo)
    assert info.progress is not None
    assert (info.progress.iteration, info.progress.program) == (7, ProgramProgress(iteration=7))
    harness.ask(WorkerExited(job="a", rank=0, node=N1, code=0))
    found = harness.answer(Meet(job="a", rank=1))
    assert isinstance(found, Meeting)
    assert found.over
    assert isinstance(harness.answer(Meet(job="b", rank=1)), Refused)


def test_moves_of_executors_are_told_as_rank_0_counts_them() -> None:
    harness = Elastic()

    def met(moves: int, hosts: int) -> list[str]:
        progress = ProgramProgress(executors=16, hosts=hosts, moves=moves)
        effects = harness.ask(Meet(job="a", rank=0, address="h:1", secret="s", progress=progress))
        told = [each.message for each in effects if isinstance(each, Publish)]
        return [fact.reason for fact in told if isinstance(fact, JobEvent)]

    assert met(3, 2) == [], "a master that has just begun does not know since when"
    assert met(3, 4) == []
    assert met(11, 4) == ["8 executors moved, 16 are on 4 hosts"]
    assert met(12, 1) == ["1 executor moved, 16 are on 1 host, before on 4"]


def test_ranks_leave_once_they_do_not_count_and_free_their_slots_once_they_have_ended() -> None:
    harness = Elastic()
    effects = harness.scale(1)
    assert orders(effects) == [], "its rank 0 says from when on"
    assert harness.rank_0() == 1
    effects = harness.ask(AskSize(job="a", workers=1, since=11))
    (stop,) = orders(effects)
    assert isinstance(stop, StopWorkers)
    assert stop.ranks == (1,)
    assert harness.job("a").allocation == ((N1, 2),), "its process is still there"
    harness.confirm()
    assert harness.settled() == (1, "running")
    late = WorkerExited(job="a", rank=1, node=N1, code=-15)
    assert harness.answer(late) == Ok()
    assert harness.settled() == (1, "running"), "its end is told late, and was wanted"


def test_a_rank_that_joins_again_is_another_process() -> None:
    harness = Elastic()
    harness.scale(1)
    harness.rank_0(1)
    harness.confirm()
    (start,) = orders(harness.scale(2))
    assert isinstance(start, StartWorkers)
    assert (start.ranks, start.attempts) == ((1,), (1,))
    late = WorkerExited(job="a", rank=1, node=N1, code=-15)
    harness.ask(late)
    harness.join(1)
    assert harness.rank_0() == 2
    harness.rank_0(2)
    assert harness.settled() == (2, "running")
    died = WorkerExited(job="a", rank=1, node=N1, code=1, attempt=1)
    harness.ask(died)
    assert harness.job("a").state == "failed", "it counts"


def test_a_rank_that_ends_before_it_joined_changes_nothing_for_the_job() -> None:
    harness = Elastic()
    harness.scale(3)
    harness.confirm()
    harness.ask(WorkerExited(job="a", rank=2, node=N1, code=1, attempt=1, result="no module"))
    (stop,) = harness.confirm()
    assert isinstance(stop, StopWorkers)
    assert stop.ranks == (2,)
    assert harness.settled() == (2, "running")
    assert harness.rank_0() == 2


def test_ranks_that_are_never_ready_are_given_up() -> None:
    harness = Elastic()
    harness.scale(3)
    harness.confirm()
    harness.node(running=(("a", 0), ("a", 1), ("a", 2)))
    for _ in range(int(JOINING_S // 10) + 2):
        harness.tick(10.0)
        harness.node(running=(("a", 0), ("a", 1), ("a", 2)))
        harness.confirm()
    assert harness.settled() == (2, "running")


def test_a_rank_that_was_missed_before_it_left_is_not_missed_when_it_joins_again() -> None:
    """Red before: found by a run of 200 kills. It had died as it left, and seemed to be missing
    ever since."""
    harness = Elastic()
    harness.node(running=(("a", 0), ("a", 1)))
    harness.tick()
    harness.node(running=(("a", 0),))
    harness.tick()  # It is missing.
    harness.scale(1)
    harness.rank_0(1)
    harness.confirm()
    for _ in range(30):
        harness.node(running=(("a", 0),))
        harness.tick()
    assert harness.settled() == (1, "running")
    harness.scale(2)
    harness.confirm()
    harness.node(running=(("a", 0),))  # It was told before its process was there.
    harness.tick()
    assert harness.job("a").state == "running", harness.job("a").reason


def test_a_job_grows_as_far_as_there_is_room() -> None:
    harness = Elastic(slots=3)
    answer = harness.answer(ScaleJob(job="a", workers=4))
    assert isinstance(answer, JobInfo)
    assert (answer.job.workers, answer.job.allocation) == (4, ((N1, 3),))
    harness.confirm()
    harness.join(2)
    harness.rank_0(3)
    assert harness.settled() == (3, "running")
    assert "1 more free slot" in harness.why("a")
    harness.node(slots=4, running=(("a", 0), ("a", 1), ("a", 2)))
    harness.tick()
    assert harness.job("a").resizing == "joining"
    assert harness.job("a").allocation == ((N1, 4),)


def test_a_paused_job_starts_with_as_many_as_were_asked_for() -> None:
    harness = Elastic()
    harness.ask(PauseJob(job="a"))
    harness.confirm()
    harness.scale(4)
    (start,) = [each for each in orders(harness.ask(ResumeJob(job="a")))]
    assert isinstance(start, StartWorkers)
    assert (start.ranks, start.workers) == ((0, 1, 2, 3), 4)
    assert start.attempts == (RUN_ATTEMPTS,) * 4


def test_a_job_without_agents_saves_ends_and_starts_anew() -> None:
    harness = Elastic(agents=False)
    (stop,) = orders(harness.scale(3))
    assert isinstance(stop, StopWorkers)
    assert stop.ranks == ()
    starts = [each for each in harness.confirm() if isinstance(each, StartWorkers)]
    assert [start.ranks for start in starts] == [(0, 1, 2)]
    assert harness.settled() == (3, "running")


def test_a_pause_in_the_middle_ends_all_ranks() -> None:
    harness = Elastic()
    harness.scale(3)
    harness.confirm()
    (stop,) = orders(harness.ask(PauseJob(job="a")))
    assert isinstance(stop, StopWorkers)
    assert stop.ranks == ()
    harness.confirm()
    record = harness.job("a")
    assert (record.state, record.resizing, record.counted, record.joins) == ("paused", "", 0, {})


@pytest.mark.parametrize(
    ("fields", "workers", "why"),
    [
        ({}, 5, "5 workers: job a can have 1 to 4"),
        ({"workers_min": 0, "workers_max": 0}, 3, "job a has 2 workers for good"),
        (
            {"workers_min": 0, "workers_max": 0, "consistency": "stale-synchronous"},
            3,
            "job a is stale-synchronous: the slowest worker bounds all",
        ),
    ],
)
def test_a_refusal_says_why(fields: dict[str, object], workers: int, why: str) -> None:
    answer = Elastic(**fields).answer(ScaleJob(job="a", workers=workers))  # type: ignore[arg-type]
    assert isinstance(answer, Refused)
    assert answer.reason.startswith(why)
    assert answer.retry_after_s == 0.0


def test_another_change_waits_for_the_one_in_progress() -> None:
    harness = Elastic()
    harness.scale(3)
    answer = harness.answer(ScaleJob(job="a", workers=4))
    assert isinstance(answer, Refused)
    assert answer.retry_after_s > 0.0
    again = harness.answer(ScaleJob(job="a", workers=3))
    assert isinstance(again, JobInfo), "the same is told again"


STEPS = ["restart", "confirm", "join", "rank 0", "tick", "late"]


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.integers(1, 4), st.sampled_from(STEPS)), max_size=30),
)
def test_whoever_is_killed_whenever_the_job_gets_the_size_that_was_asked_for(
    steps: list[int | str],
) -> None:
    """The master dies between any two steps, and messages are repeated or come late."""
    harness = Elastic()
    counted = 2

    def act(step: int | str) -> None:
        nonlocal counted
        if isinstance(step, int):
            harness.scale(step)
        elif step == "restart":
            harness.pending.clear()
            harness.restart()
            harness.node()
        elif step == "confirm":
            harness.confirm()
        elif step == "join" and harness.job("a").resizing == "joining":
            harness.join(*range(harness.job("a").counted, 4))
        elif step == "rank 0":
            wanted = harness.rank_0()
            if wanted != counted:
                counted = wanted
                harness.rank_0(wanted)
        elif step == "late":
            harness.ask(AskSize(job="a", workers=2, since=3))
        ranks = sum(number for _, number in harness.job("a").allocation)
        harness.node(running=tuple(("a", rank) for rank in range(ranks)))
        if step == "tick":
            harness.tick()

    for step in steps:
        act(step)
        record = harness.job("a")
        assert record.state == "running"
        assert sum(number for _, number in record.allocation) >= counted
    for _ in range(4):
        for step in ("tick", "confirm", "join", "rank 0"):
            act(step)
    record = harness.job("a")
    assert harness.settled() == (record.workers or 2, "running")
    assert counted == (record.workers or 2)


def test_ranks_that_stay_keep_their_numbers() -> None:
    assert compatible(((N2, 2),), ((N1, 1), (N2, 2))) == ((N2, 2), (N1, 1))
    assert compatible(((N1, 1), (N2, 1)), ((N1, 2), (N2, 1))) is None
    assert compatible(((N1, 2), (N2, 2)), ((N1, 2), (N2, 1))) == ((N1, 2), (N2, 1))
    assert compatible(((N1, 2), (N2, 2)), ((N1, 1), (N2, 2))) is None
    assert compatible(((N1, 2),), ((N2, 3),)) is None
    assert trimmed(((N1, 2), (N2, 2), (N3, 1)), 3) == ((N1, 2), (N2, 1))


def test_a_program_says_itself_how_many_hosts_it_can_use() -> None:
    """Beyond its bounds it gets the nearest. A process that is not rank 0 any more has no say."""
    elastic = Elastic(consistency="asynchronous")
    for asked, has in ((1, 1), (1, 1), (9, 4)):
        assert elastic.answer(UseHosts(job="a", attempt=0, hosts=asked)) == Ok()
        assert elastic.job("a").workers == has
        if has == 1:
            assert elastic.rank_0() == 1
            elastic.rank_0(1)
            elastic.confirm()
    effects = elastic.ask(UseHosts(job="a", attempt=0, hosts=2))
    (refused,) = (effect.message for effect in effects if isinstance(effect, Reply))
    assert isinstance(refused, Refused)
    assert refused.retry_after_s > 0.0, "it is changing its size"
    other = elastic.answer(UseHosts(job="a", attempt=1, hosts=2))
    assert isinstance(other, Refused)
    assert "not its rank 0 any more" in other.reason
    missing = elastic.answer(UseHosts(job="b", attempt=0, hosts=2))
    assert isinstance(missing, Refused)
    assert "there is no job b" in missing.reason
    said = [fact.reason for fact in elastic.told if fact.fact == "scaling"]
    assert said == ["its program asks for 1 worker", "its program asks for 4 workers"]


def test_a_bound_that_is_not_said_stays_the_number_that_was_submitted() -> None:
    """Scaled to its least number, a job that chooses its hosts seemed to have no room to choose,
    and the master ended with that."""
    harness = Harness()
    submitted(harness, "a", workers=4, workers_min=1, choose_hosts=True)
    answer = harness.answer(ScaleJob(job="a", workers=1))
    assert isinstance(answer, JobInfo)
    assert answer.job.workers == 1
    assert asked_spec(answer.job).workers_bounds == (1, 4)
    harness.node(slots=8)
    harness.tick()
    assert harness.job("a").allocation == ((NodeId("n1"), 1),)
