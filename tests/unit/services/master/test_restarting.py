"""Ranks that die: counted durably, started again after a while, each attempt once."""

import msgspec
import pytest
from tests.unit.services.master.test_gpu_dispatch import GpuHarness
from tests.unit.services.master.test_master_core import (
    Harness,
    facts,
    only,
    orders,
    submitted,
)

from slackwater.common.base.effects import Answered, Persist, Publish, Reply, StartTimer, TimerFired
from slackwater.schemas.base import JobId, NodeId, Ok
from slackwater.schemas.workers import (
    USELESS_TO_RESTART,
    StartWorkers,
    StopWorkers,
    WorkerExited,
)
from slackwater.services.master.keys import Order, OrderKey, RankDue
from slackwater.services.master.rank_restarts import WAIT_S_MAX, death


def exited(rank: int, code: int, result: str = "", attempt: int = 0) -> WorkerExited:
    return WorkerExited(
        job="a", rank=rank, node=NodeId("n1"), code=code, result=result, attempt=attempt
    )


def running(restarts: int) -> Harness:
    harness = Harness()
    submitted(harness, "a", restarts=restarts)
    harness.node()
    harness.step(Answered(OrderKey(JobId("a"), Order("start")), Ok()))
    return harness


def again(rank: int, attempt: int) -> StartWorkers:
    return StartWorkers(job="a", ranks=(rank,), workers=2, program=("train",), attempts=(attempt,))


def test_a_rank_that_dies_is_started_again_and_the_job_runs_on() -> None:
    harness = running(restarts=2)
    effects = harness.ask(exited(1, -9))
    assert only(effects, Persist).key == "a"  # Before it is acknowledged, and before the order.
    assert only(effects, Reply).message == Ok()
    assert orders(effects) == []
    assert facts(effects) == ["rank-restarted"]
    timer = only(effects, StartTimer)
    assert timer.at_s == harness.now_s + 0.5
    assert harness.job("a").restarts == {"1": 1}
    assert harness.answer(exited(1, -9)) == Ok(), "told again"
    assert harness.job("a").restarts == {"1": 1}
    assert orders(harness.step(TimerFired(timer.key))) == [again(1, 1)]
    assert orders(harness.tick()) == []  # It is on its way.
    harness.step(Answered(OrderKey(JobId("a"), Order("again", "-1-1")), Ok()))
    for rank, attempt in ((0, 0), (1, 1)):
        harness.ask(exited(rank, 0, "{}", attempt))
    assert harness.job("a").state == "completed"


def test_restarts_are_counted_over_all_ranks_and_the_last_death_fails_the_job() -> None:
    harness = running(restarts=2)
    harness.ask(exited(1, -9))
    harness.ask(exited(0, 1, "ValueError: bad"))
    effects = harness.ask(exited(1, 1, "ValueError: worse", attempt=1))
    assert orders(effects) == [StopWorkers(job="a")]
    reason = "rank 1 on n1 ended with exit code 1: ValueError: worse (after 2 of 2 restarts)"
    assert (harness.job("a").state, harness.job("a").reason) == ("failed", reason)
    assert harness.step(TimerFired(RankDue(JobId("a"), 0))) == [], "its timer comes late"


def test_a_program_that_says_that_a_restart_is_useless_is_not_started_again() -> None:
    harness = running(restarts=20)
    effects = harness.ask(exited(0, USELESS_TO_RESTART, "slackwater: row 11"))
    assert orders(effects) == [StopWorkers(job="a")]
    reason = "rank 0 on n1 ended with exit code 78: slackwater: row 11"
    assert (harness.job("a").state, harness.job("a").reason) == ("failed", reason)


def test_a_rank_that_dies_again_and_again_waits_longer_each_time() -> None:
    harness, waits_s = running(restarts=20), []
    for attempt in range(10):
        timer = only(harness.ask(exited(0, 1, attempt=attempt)), StartTimer)
        waits_s.append(timer.at_s - harness.now_s)
        harness.step(TimerFired(timer.key))
    assert waits_s[:3] == [0.5, 1.0, 2.0]
    assert waits_s[-1] == WAIT_S_MAX


def test_a_rank_that_lived_for_a_while_waits_as_at_first() -> None:
    harness, waits_s = running(restarts=20), []
    for attempt, lived_s in enumerate((0.0, 10.0, 59.0, 61.0, 3.0)):
        harness.now_s += lived_s
        timer = only(harness.ask(exited(0, -9, attempt=attempt)), StartTimer)
        waits_s.append(timer.at_s - harness.now_s)
        harness.now_s = timer.at_s
        harness.step(TimerFired(timer.key))
    assert waits_s == [0.5, 1.0, 2.0, 0.5, 1.0]


def test_a_master_that_was_killed_during_a_restart_orders_the_same_attempt() -> None:
    harness = running(restarts=2)
    harness.ask(exited(1, -9))
    effects = harness.restart()
    whole = StartWorkers(job="a", ranks=(0, 1), workers=2, program=("train",), attempts=(0, 1))
    assert orders(effects) == [whole, again(1, 1)]
    assert harness.answer(exited(1, -9)) == Ok(), "the node did not hear the answer"
    assert harness.job("a").restarts == {"1": 1}


def test_a_rank_that_is_about_to_start_again_has_not_vanished() -> None:
    harness = running(restarts=2)
    harness.now_s += 1
    harness.ask(exited(1, -9))
    for _ in range(20):
        harness.node(running=(("a", 0),))
        harness.tick()
    assert harness.job("a").state == "running"
    harness.step(TimerFired(RankDue(JobId("a"), 1)))
    harness.step(Answered(OrderKey(JobId("a"), Order("again", "-1-1")), Ok()))
    for _ in range(20):
        harness.node(running=(("a", 0),))
        harness.tick()
    assert harness.job("a").reason == "rank 1 vanished from n1 and reported no end"


def test_a_job_that_was_cancelled_restarts_nothing() -> None:
    harness = running(restarts=2)
    effects = harness.ask(exited(1, -9))
    timer = only(effects, StartTimer)
    harness.core._cancel(99, type("Cancel", (), {"job": "a"})(), harness.now_s)  # type: ignore[arg-type]
    assert orders(harness.step(TimerFired(timer.key))) == []
    harness.ask(exited(0, -15))
    assert harness.core.state.jobs[next(iter(harness.core.state.jobs))].record.state == "cancelled"


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (-9, "", "rank 1 on n1 was killed by signal 9 (SIGKILL)"),
        (-9, "Killed", "rank 1 on n1 was killed by signal 9 (SIGKILL)"),
        (-15, "Terminated", "rank 1 on n1 was killed by signal 15 (SIGTERM)"),
        (-11, "step 3", "rank 1 on n1 was killed by signal 11 (SIGSEGV): step 3"),
        (-99, "", "rank 1 on n1 was killed by signal 99 (unknown)"),
        (1, "", "rank 1 on n1 ended with exit code 1, and printed nothing"),
        (3, "ValueError: bad", "rank 1 on n1 ended with exit code 3: ValueError: bad"),
        (
            -9,
            "killed by the kernel for memory; its log ends with: epoch 3",
            "rank 1 on n1 was killed by signal 9 (SIGKILL): killed by the kernel for memory; its "
            "log ends with: epoch 3",
        ),
    ],
)
def test_how_a_rank_ended_is_said_in_words(code: int, said: str, words: str) -> None:
    assert death(exited(1, code, said)) == words


def test_an_exit_code_that_nobody_could_record_is_not_called_a_kill() -> None:
    """The node's disk was full, or the whole process group was killed: it may have completed."""
    unknown = msgspec.structs.replace(exited(1, -9, "saved"), code_known=False)
    assert death(unknown) == (
        "rank 1 on n1 ended, and its exit code is not known: it was killed with all its "
        "processes, or its node's disk is full; whether it had completed is for you to see; its "
        "log ends with: saved"
    )
    harness = running(restarts=1)
    harness.ask(unknown)
    assert harness.job("a").state == "running"
    assert harness.job("a").restarts == {"1": 1}


def test_a_job_of_one_process_on_a_gpu_is_no_gang() -> None:
    """Its process alone is started again, where it is, within the same allocation."""
    harness = GpuHarness()
    harness.submit("a", 1, restarts=2)
    job = harness.core.state.jobs[JobId("a")]
    (node,) = (node for node, _ in job.record.allocation)
    harness.step(Answered(OrderKey(job.id, job.order("start", node)), Ok()))
    effects = harness.ask(WorkerExited(job="a", rank=0, node=node, code=-9, attempt=0))
    assert orders(effects) == []
    assert "; it is started again in 0.5 s (1 of 2 restarts)" in str(only(effects, Publish).message)
    assert (harness.job("a").state, job.resting, job.rests) == ("running", {0}, False)
