"""How far and how fast a job is, by its ranks' reports alone."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base import codec
from slackwater.schemas.base import COUNT_MAX, AggregatorId, ClusterId, JobId
from slackwater.schemas.cluster import PlacedJob
from slackwater.schemas.job_requests import JobInfo
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.progress import JobProgress
from slackwater.schemas.telemetry import IterationsObserved
from slackwater.services.master.progress import SMOOTHED_S, Progress

SPEC = JobSpec(id="j", workers=2, iterations=300, program=("x",))


def report(rank: int, first: int, *durations_s: float) -> IterationsObserved:
    return IterationsObserved(
        job=JobId("j"), rank=rank, first_iteration=first, durations_s=durations_s,
        location_epoch=0, bytes_pushed=0, bytes_pulled=0,
    )  # fmt: skip


def reported(seconds: int = 20, iteration_s: float = 0.1) -> Progress:
    """Both ranks report once a second, from second 1 to `seconds`."""
    progress, each = Progress(), round(1.0 / iteration_s)
    for second in range(seconds):
        for rank in range(2):
            first = second * each + 1
            progress.reported(report(rank, first, *[iteration_s] * each), second + 1.0)
    return progress


def seen(progress: Progress, now_s: float, spec: JobSpec = SPEC) -> JobProgress:
    found = progress.shown(spec, "running", now_s, by_rank=True)
    assert found is not None
    return found


def test_a_steady_job_has_its_speed_and_its_time_left() -> None:
    found = seen(reported(), 20.0)
    assert (found.iteration, found.iterations) == (200, 300)
    assert found.speed == pytest.approx(10.0)
    assert found.eta_s == pytest.approx(10.0)
    assert [(rank.rank, rank.iteration) for rank in found.ranks] == [(0, 200), (1, 200)]


def test_a_job_is_as_far_and_as_fast_as_its_slowest_rank() -> None:
    progress = reported()
    for second in range(40):
        progress.reported(report(1, 201 + second, 1.0), 21.0 + second)
        progress.reported(report(0, 201 + 10 * second, *[0.1] * 10), 21.0 + second)
    found = seen(progress, 60.0)
    assert found.iteration == 240
    assert found.speed == pytest.approx(1.0, rel=0.15)


def test_an_asynchronous_job_that_is_scaled_is_as_far_as_all_its_updates() -> None:
    """A rank that joins begins with its first iteration: the slowest would throw the job back."""
    spec = msgspec.structs.replace(SPEC, consistency="asynchronous", workers_min=1, workers_max=4)
    progress = reported()
    progress.reported(report(2, 1, *[0.1] * 10), 20.0)
    found = progress.shown(spec, "running", 20.0, by_rank=False, workers=3)
    assert found is not None
    assert found.iteration == 205
    assert found.speed == pytest.approx(15.0)


def test_a_job_that_hangs_becomes_slower_and_slower() -> None:
    progress = reported()
    speeds = [seen(progress, 20.0 + silent_s).speed for silent_s in (0, 1, 5, 10, 30, 90)]
    assert speeds[0] == speeds[1]  # The next report is not overdue.
    assert speeds[1:] == sorted(speeds[1:], reverse=True)
    assert speeds[-1] < 0.1


def test_slow_iterations_are_not_taken_for_a_hang() -> None:
    """An iteration of 8 s: a report every 8 s, and the same speed between two."""
    progress = Progress()
    for number in range(1, 5):
        for rank in range(2):
            progress.reported(report(rank, number, 8.0), 8.0 * number)
    assert seen(progress, 39.0).speed == pytest.approx(0.125)


def test_a_job_of_which_a_rank_has_not_reported_has_no_speed_yet() -> None:
    progress = Progress()
    progress.reported(report(0, 1, 0.1), 1.0)
    found = seen(progress, 1.0)
    assert (found.iteration, found.speed, found.eta_s) == (0, 0.0, None)
    assert [rank.rank for rank in found.ranks] == [0]


def test_a_program_that_counts_for_itself_has_no_total() -> None:
    spec = msgspec.structs.replace(SPEC, iterations=1)
    found = seen(reported(), 20.0, spec)
    assert (found.iteration, found.iterations, found.eta_s) == (200, 0, None)


def test_a_job_that_ended_keeps_how_far_it_came() -> None:
    progress = reported()
    progress.take_report(
        PlacedJob(at=(0,), phase="steady", moves=2, loss=0.1), (AggregatorId("a1"),)
    )
    found = progress.shown(SPEC, "completed", 25.0, by_rank=False)
    assert found is not None
    assert (found.iteration, found.speed, found.aggregators, found.moves) == (200, 0.0, (), 2)
    assert not found.ranks


def test_a_paused_job_has_no_speed_and_keeps_its_aggregators() -> None:
    progress = reported()
    progress.take_report(PlacedJob(at=(0,), phase="steady"), (AggregatorId("a1"),))
    found = progress.shown(SPEC, "paused", 25.0, by_rank=True)
    assert found is not None
    assert (found.iteration, found.speed, found.eta_s) == (200, 0.0, None)
    assert found.aggregators == ("a1",)
    assert {rank.speed for rank in found.ranks} == {0.0}


def test_where_it_is_comes_from_its_controller() -> None:
    progress = Progress()
    assert progress.shown(SPEC, "running", 0.0, by_rank=True) is None
    ours = (AggregatorId("a1"), AggregatorId("a2"), AggregatorId("a10"))
    progress.take_report(PlacedJob(at=(1, 2, 9), phase="moving", loss=-0.02), ours)
    found = seen(progress, 0.0)
    assert found.aggregators == ("a2", "a10")
    assert (found.phase, found.loss) == ("moving", -0.02)


def test_an_agent_that_said_nothing_new_still_tells_where_it_is() -> None:
    """Send what a quiet Agent repeats to a master that has just begun to lead."""
    progress = Progress()
    for rank in range(2):
        progress.reported(report(rank, 42), 1.0)
    assert seen(progress, 1.0).iteration == 41


reports = st.builds(
    lambda rank, first, durations_s: report(rank, first, *durations_s),
    st.integers(0, 1),
    st.integers(0, COUNT_MAX),
    st.lists(st.floats(0.0, 1e10), max_size=4),
)


@given(st.lists(st.tuples(reports, st.floats(0.0, 1e4)), max_size=12), st.floats(0.0, 1e9))
def test_whatever_is_reported_can_be_told(
    steps: list[tuple[IterationsObserved, float]], later_s: float
) -> None:
    progress, now_s = Progress(), 0.0
    for message, after_s in steps:
        now_s += after_s
        progress.reported(message, now_s)
    found = progress.shown(SPEC, "running", now_s + later_s, by_rank=True)
    info = JobInfo(job=JobRecord(spec=SPEC, cluster=ClusterId("c0")), progress=found)
    assert codec.decode(codec.encode(info), JobInfo) == info


def test_old_iterations_count_less() -> None:
    """Twice as fast for three times SMOOTHED_S: the old speed is forgotten."""
    progress = reported(seconds=60)
    for second in range(int(3 * SMOOTHED_S)):
        for rank in range(2):
            progress.reported(report(rank, 601 + 20 * second, *[0.05] * 20), 61.0 + second)
    assert seen(progress, 90.0).speed == pytest.approx(20.0, rel=0.06)
