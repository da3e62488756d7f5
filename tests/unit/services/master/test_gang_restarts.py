"""A rank of a gang without aggregators dies: all are started again, together, as one restart."""

from tests.unit.services.master.test_gpu_dispatch import GpuHarness, started
from tests.unit.services.master.test_master_core import facts, only, orders

from slackwater.common.base.effects import Answered, Effect, StartTimer, TimerFired
from slackwater.schemas.base import RUN_ATTEMPTS, JobId, NodeId, Ok
from slackwater.schemas.job_requests import CancelJob, PauseJob, ResumeJob
from slackwater.schemas.workers import StartWorkers, StopWorkers, WorkerExited
from slackwater.services.master.keys import OrderKey, RankDue, Verb


def exited(rank: int, attempt: int = 0) -> WorkerExited:
    node = NodeId("n1" if rank < 2 else "n2")
    return WorkerExited(job="a", rank=rank, node=node, code=-9, attempt=attempt)


def running(restarts: int) -> GpuHarness:
    harness = GpuHarness()
    harness.submit("a", 4, restarts=restarts)
    both(harness, "start")
    assert harness.job("a").state == "running"
    return harness


def both(harness: GpuHarness, verb: Verb) -> list[Effect]:
    """Let both nodes say that they did it."""
    job, effects = harness.core.state.jobs[JobId("a")], []
    for order in [job.order(verb, NodeId(node)) for node in ("n1", "n2")]:
        effects += harness.step(Answered(OrderKey(job.id, order), Ok()))
    return effects


def test_all_ranks_are_stopped_and_started_again_as_the_next_attempt() -> None:
    harness = running(restarts=2)
    effects = harness.ask(exited(1))
    assert [(stop.attempt, stop.grace_s) for stop in orders(effects)] == [(0, 30.0)] * 2
    assert facts(effects) == ["rank-restarted"]
    said = "rank 1 on n1 was killed by signal 9 (SIGKILL); all ranks are started again in 0.5 s"
    assert harness.job("a").reason == f"{said} (1 of 2 restarts)"
    for rank in (0, 2, 3):
        assert orders(harness.ask(exited(rank))) == [], "it ended because rank 1 did"
    assert started(both(harness, "stop")) == {}, "it rests"
    timer = only(effects, StartTimer)
    assert timer.at_s == harness.now_s + 0.5
    again = [m for m in orders(harness.step(TimerFired(timer.key))) if isinstance(m, StartWorkers)]
    first = RUN_ATTEMPTS
    wholes = [each.attempts for each in again if len(each.ranks) == 2]
    assert wholes == [(first, first + 1), (first, first)]
    assert all(each.rendezvous for each in again)
    both(harness, "start")
    record = harness.job("a")
    assert (record.state, record.attempt, record.reason) == ("running", 1, "")
    assert (record.restarts, record.preemptions) == ({"1": 1}, 0)


def test_the_restarts_of_a_gang_are_counted_and_wait_longer_each_time() -> None:
    harness, waits_s = running(restarts=3), []
    for attempt, rank in enumerate((1, 3, 1)):
        number = RUN_ATTEMPTS * attempt + harness.job("a").restarts.get(str(rank), 0)
        effects = harness.ask(exited(rank, number))
        timer = only(effects, StartTimer)
        waits_s.append(timer.at_s - harness.now_s)
        both(harness, "stop")
        harness.step(TimerFired(timer.key))
        both(harness, "start")
    assert waits_s == [0.5, 1.0, 2.0]
    harness.ask(exited(0, 3 * RUN_ATTEMPTS))
    record = harness.job("a")
    assert record.state == "failed"
    assert record.reason.endswith("SIGKILL) (after 3 of 3 restarts)")


def test_a_death_that_is_told_of_a_waiting_gang_restarts_nothing() -> None:
    """Red before: what nobody sends ended the master's step."""
    harness = GpuHarness()
    harness.submit("a", 8, restarts=2)
    assert harness.job("a").state == "pending"
    assert orders(harness.ask(exited(1))) == []
    assert (harness.job("a").state, harness.job("a").restarts) == ("pending", {})


def test_a_gang_whose_ranks_end_slowly_begins_once_they_have() -> None:
    harness = running(restarts=1)
    harness.ask(exited(1))
    harness.step(TimerFired(RankDue(JobId("a"), 1)))
    assert set(started(both(harness, "stop"))) == {"n1 a", "n2 a"}


def test_a_master_that_was_killed_meanwhile_starts_the_gang_once_it_has_left() -> None:
    harness = running(restarts=1)
    harness.ask(exited(1))
    stops = [m for m in orders(harness.restart()) if isinstance(m, StopWorkers)]
    assert len(stops) == 2
    harness.hear()
    assert set(started(both(harness, "stop"))) == {"n1 a", "n2 a"}
    assert harness.job("a").restarts == {"1": 1}


def test_a_gang_that_rests_can_be_paused_and_cancelled() -> None:
    harness = running(restarts=1)
    harness.ask(exited(1))
    harness.ask(PauseJob(job="a"))
    both(harness, "stop")
    assert harness.job("a").state == "paused"
    assert started(harness.step(TimerFired(RankDue(JobId("a"), 1)))) == {}
    assert set(started(list(harness.ask(ResumeJob(job="a"))))) == {"n1 a", "n2 a"}
    harness.ask(CancelJob(job="a"))
    assert harness.job("a").state == "cancelled"
