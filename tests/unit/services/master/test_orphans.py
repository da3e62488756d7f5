"""Processes of jobs whose records are lost: a node that tells of them is told to end them."""

from tests.unit.services.master.test_master_core import Harness, spec

from slackwater.common.base.effects import Request
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.job_requests import SubmitJob
from slackwater.schemas.workers import StopWorkers
from slackwater.services.master.orphans import ORPHAN_S


def tell(harness: Harness, *jobs: str, node: str = "n1") -> list[StopWorkers]:
    """Let a second pass and the node tell what it runs; return what it is told to stop."""
    harness.now_s += 1.0
    beat = WorkerHeartbeat(
        service="worker", id=node, incarnation=0, at_s=harness.now_s, node=NodeId(node), slots=8,
        running=tuple((JobId(job), 0) for job in jobs),
    )  # fmt: skip
    effects = harness.see(beat)
    return [
        each.message
        for each in effects
        if isinstance(each, Request) and isinstance(each.message, StopWorkers)
    ]


def test_a_job_that_nobody_knows_is_stopped_after_a_while_and_again_until_it_is_gone() -> None:
    harness = Harness()
    told = [len(tell(harness, "lost")) for _ in range(12)]
    assert (sum(told[: int(ORPHAN_S)]), told.index(1)) == (0, int(ORPHAN_S))
    assert sum(told) == 2
    assert tell(harness) == []
    assert harness.core.state.orphans == {}


def test_all_its_runs_and_attempts_are_ended() -> None:
    harness = Harness()
    (stop,) = [each for _ in range(7) for each in tell(harness, "lost")]
    assert (stop.job, stop.ranks) == ("lost", ())
    assert stop.last_attempt >= StopWorkers(job="lost", attempt=3).last_attempt


def test_a_deletion_that_a_heartbeat_has_not_seen_stops_nothing() -> None:
    harness = Harness()
    for _ in range(20):
        assert tell(harness, "a") == tell(harness, "a") == []
        assert tell(harness) == []


def test_a_job_that_is_known_or_whose_record_is_damaged_goes_on() -> None:
    harness = Harness()
    tell(harness)
    harness.ask(SubmitJob(spec=spec("known")))
    harness.core.state.unreadable = frozenset({"damaged"})
    for _ in range(20):
        assert tell(harness, "known", "damaged") == []
