"""The master keeps the times of an asynchronous job's iterations, out of its Agents' turns."""

from typing import Any

import pytest
from tests.unit.services.master.test_master_core import Harness, submitted

from slackwater.schemas.base import AggregatorId, JobId
from slackwater.schemas.steps import TurnTimes
from slackwater.schemas.telemetry import IterationsObserved, LinkTimes
from slackwater.services.master.turn_sums import TURNS_MIN


def report(rank: int, turns: int, workers: int, **fields: Any) -> IterationsObserved:
    """Each turn computes for .25 s, and is .1, .01 and .1 s on its way."""
    return IterationsObserved(
        job=JobId("j"), rank=rank, first_iteration=1, durations_s=(), location_epoch=0,
        bytes_pushed=0, bytes_pulled=0, workers=workers,
        turns=TurnTimes(
            turns=turns, worker_s=0.25 * turns, uplink_s=0.1 * turns, server_s=0.01 * turns,
            downlink_s=0.1 * turns,
        ),
        **fields,
    )  # fmt: skip


def running(**fields: Any) -> Harness:
    harness = Harness()
    harness.node()
    submitted(harness, "j", **{"workers": 1, "consistency": "asynchronous"} | fields)
    return harness


def test_times_are_kept_after_enough_turns_and_stored_again_when_they_have_doubled() -> None:
    harness = running()
    stored = []
    for _ in range(9 * TURNS_MIN // 10):
        harness.see(report(0, 10, 1))
        steps = harness.job("j").steps
        if steps is not None and (not stored or stored[-1] != steps):
            stored.append(steps)
    assert [steps.turns for steps in stored] == [TURNS_MIN, 2 * TURNS_MIN, 4 * TURNS_MIN,
                                                 8 * TURNS_MIN]  # fmt: skip
    assert stored[-1].worker_s == pytest.approx(0.25)
    assert stored[-1].uplink_s == pytest.approx(0.1)


def test_times_of_two_workers_are_stored_without_their_waiting() -> None:
    harness = running(workers=2)
    for rank in (0, 1):
        harness.see(report(rank, TURNS_MIN // 2, 2))
    steps = harness.job("j").steps
    assert steps is not None
    assert steps.workers == 2
    assert steps.worker_s == pytest.approx(0.25)
    assert steps.uplink_s < 0.1


def test_times_of_more_workers_do_not_replace_those_of_fewer() -> None:
    harness = running(workers=2)
    harness.see(report(0, TURNS_MIN, 1))
    known = harness.job("j").steps
    harness.see(report(0, 4 * TURNS_MIN, 2))
    assert harness.job("j").steps == known


def test_the_parts_of_the_bytes_at_each_server_are_kept() -> None:
    harness = running()
    links = tuple(
        LinkTimes(aggregator=AggregatorId(id), pushed_bytes=nbytes)
        for id, nbytes in (("a1", 100), ("a2", 300))
    )
    harness.see(report(0, TURNS_MIN, 1, links=links))
    steps = harness.job("j").steps
    assert steps is not None
    assert steps.shares == (0.75, 0.25)


@pytest.mark.parametrize("workers", [0, 10**6])
def test_reports_of_an_impossible_number_of_workers_change_nothing(workers: int) -> None:
    harness = running()
    harness.see(report(0, TURNS_MIN, workers))
    assert harness.job("j").steps is None


def test_a_synchronous_job_has_no_such_times() -> None:
    harness = running(consistency="synchronous")
    harness.see(report(0, TURNS_MIN, 1))
    assert harness.job("j").steps is None


def test_times_that_cannot_be_are_logged_and_not_stored() -> None:
    harness = running(workers=2)
    harness.see(
        IterationsObserved(
            job=JobId("j"), rank=0, first_iteration=1, durations_s=(), location_epoch=0,
            bytes_pushed=0, bytes_pulled=0, workers=2,
            turns=TurnTimes(turns=TURNS_MIN, worker_s=1e-12, uplink_s=1e-12),
        )
    )  # fmt: skip
    assert harness.job("j").steps is None
