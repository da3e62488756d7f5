"""Profiles and windows from reports that are lost, repeated, late, and from two placements."""

from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base.effects import Effect, Observed, Publish
from slackwater.common.domains.models.iterations import quietest_s
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.schemas.telemetry import (
    IterationsObserved,
    JobCpu,
    JobProfiled,
    TaskCost,
    TasksObserved,
    WindowMeasured,
)
from slackwater.services.profiler.config import ProfilerConfig
from slackwater.services.profiler.core import Profiler
from slackwater.services.profiler.windows import Iterations

JOB = JobId("j")
T = TypeVar("T")


def profiler() -> Profiler:
    config = ProfilerConfig(warm_up_iterations=2, profile_iterations=5, window_iterations=20)
    return Profiler(config)


def report(
    rank: int,
    first: int,
    durations_s: list[float],
    epoch: int = 2,
    workers: int = 2,
    buckets: int = 2,
) -> Observed:
    message = IterationsObserved(
        job=JOB,
        rank=rank,
        first_iteration=first,
        durations_s=tuple(durations_s),
        location_epoch=epoch,
        bytes_pushed=0,
        bytes_pulled=0,
        workers=workers,
        buckets=buckets,
    )
    return Observed("", message)


def costs(*buckets: int) -> Observed:
    tasks = tuple(
        TaskCost(job=JOB, bucket=b, executions=3, cpu_s=0.01 * (b + 1), nbytes=8) for b in buckets
    )
    message = TasksObserved(aggregator=AggregatorId("a"), period_s=1.0, tasks=tasks)
    return Observed("", message)


def said(effects: list[Effect], kind: type[T]) -> list[T]:
    return [e.message for e in effects if isinstance(e, Publish) and isinstance(e.message, kind)]


def test_a_profile_needs_all_ranks_all_costs_and_leaves_the_warm_up_out() -> None:
    core = profiler()
    core.step(costs(0), 0.0)
    slow_start = [9.0, 9.0, 1.0, 1.01, 1.02, 1.03, 1.04]
    assert core.step(report(0, 1, slow_start), 0.0) == []
    assert core.step(report(1, 1, [9.0, 9.0, 2.0, 2.01, 2.02, 2.03, 2.04]), 0.0) == []
    (fact,) = said(core.step(costs(1), 0.0), JobProfiled)
    assert fact.location_epoch == 2
    assert fact.profile.iteration_s == pytest.approx(2.01)  # The slowest rank's quietest three.
    assert fact.profile.task_cpu_s == (0.01, 0.02)


def test_a_profile_is_extended_until_both_its_halves_say_the_same() -> None:
    """A core is taken for the first 8 iterations that count: 10 are not enough."""
    core = Profiler(ProfilerConfig(warm_up_iterations=2, profile_iterations=10))
    core.step(costs(0, 1), 0.0)
    profiles: list[JobProfiled] = []
    for iteration in range(1, 60):
        lasted_s = 0.17 if iteration <= 10 else 0.134
        effects = core.step(report(0, iteration, [lasted_s], workers=1), 0.0)
        profiles += said(effects, JobProfiled)
    first = profiles[0].profile
    assert first.iteration_s == pytest.approx(0.134)
    assert 10 < first.iterations <= 30
    assert profiles[-1].profile.iteration_s == pytest.approx(0.134)


@pytest.mark.parametrize(("limits", "count"), [({}, 100), ({"profile_s_max": 40.0}, 25)])
def test_a_profile_that_never_agrees_is_said_all_the_same(
    limits: dict[str, float], count: int
) -> None:
    """Ever slower: 1 s, 1.05 s, 1.1 s, ..."""
    core = Profiler(ProfilerConfig(warm_up_iterations=0, **{"profile_s_max": 1e6, **limits}))
    core.step(costs(0, 1), 0.0)
    profiles: list[JobProfiled] = []
    for iteration in range(1, 101):
        lasted_s = 1.0 + 0.05 * (iteration - 1)
        effects = core.step(report(0, iteration, [lasted_s], workers=1), 0.0)
        profiles += said(effects, JobProfiled)
    assert profiles[0].profile.iterations == count


def test_a_profile_that_may_be_lost_is_said_again_at_twice_the_iterations() -> None:
    core = profiler()
    core.step(costs(0, 1), 0.0)
    counts = []
    for iteration in range(1, 60):
        effects = core.step(report(0, iteration, [1.0], workers=1), 0.0)
        counts += [fact.profile.iterations for fact in said(effects, JobProfiled)]
    assert counts == [5, 10, 20, 40]


def test_windows_follow_each_other_and_a_migration_begins_a_new_one() -> None:
    core = profiler()
    core.step(costs(0, 1), 0.0)
    windows: list[WindowMeasured] = []
    for iteration in range(1, 34):  # 2 warm up, 20 are a window, 11 are left over
        windows += said(core.step(report(0, iteration, [1.0], workers=1), 0.0), WindowMeasured)
    for iteration in range(34, 80):
        effects = core.step(report(0, iteration, [2.0], epoch=3, workers=1), 0.0)
        windows += said(effects, WindowMeasured)
    assert [(w.location_epoch, w.last_iteration, w.iteration_s) for w in windows] == [
        (2, 22, 1.0),
        (3, 56, 2.0),
        (3, 76, 2.0),
    ]


def test_a_window_says_what_a_stall_in_every_seventh_iteration_costs() -> None:
    core = profiler()
    core.step(costs(0, 1), 0.0)
    windows: list[WindowMeasured] = []
    for first in range(1, 702, 7):
        effects = core.step(report(0, first, [0.134] * 6 + [0.334], workers=1), 0.0)
        windows += said(effects, WindowMeasured)
    lost = [1.0 - 0.134 / window.iteration_s for window in windows]
    assert len(lost) == 35
    assert sum(lost) / len(lost) == pytest.approx(1.0 - 0.134 / 0.163, abs=0.01)
    assert min(lost) > 0.1, "any one of them is seen"


def test_a_window_spans_all_that_passed_since_its_first_iteration_began() -> None:
    """One iteration of 20 paused for 9 s, and a fast report holds 5 iterations of the next one."""
    core = profiler()
    core.step(report(0, 1, [1.0, 1.0], workers=1), 0.0)
    effects = core.step(report(0, 3, [1.0] * 19 + [9.0] + [1.0] * 5, workers=1), 0.0)
    (window,) = said(effects, WindowMeasured)
    assert (window.iteration_s, window.spanned_s) == (1.0, 33.0)


def test_a_restarted_profiler_learns_again_from_what_is_reported_next() -> None:
    core = profiler()
    core.step(costs(0, 1), 0.0)
    for rank in (0, 1):
        core.step(report(rank, 1, [1.0] * 7), 0.0)
    core = profiler()
    core.step(costs(0, 1), 1.0)
    for first in (8, 12):  # The first report may be of two placements.
        core.step(report(0, first, [1.0] * 4), 1.0)
        core.step(report(1, first, [1.0] * 4), 1.0)
    core.step(report(0, 16, [1.0] * 4), 1.0)
    assert len(said(core.step(report(1, 16, [1.0] * 4), 1.0), JobProfiled)) == 1


def test_without_a_bucket_count_the_costs_must_be_gapless_and_stand_still() -> None:
    core = profiler()
    core.step(report(0, 1, [1.0] * 9, workers=1, buckets=0), 0.0)
    assert core.step(costs(1), 0.0) == []
    assert core.step(costs(0, 1), 0.0) == []  # Another aggregator may still report.
    assert len(said(core.step(costs(0, 1), 0.0), JobProfiled)) == 1


@settings(max_examples=100)
@given(
    st.lists(st.floats(0.1, 9.0), min_size=30, max_size=60),
    st.lists(st.tuples(st.integers(0, 59), st.integers(1, 9)), max_size=40),
)
def test_repeated_and_lost_reports_never_count_an_iteration_twice(
    durations_s: list[float], slices: list[tuple[int, int]]
) -> None:
    iterations = Iterations(warm_up=0)
    counted: list[float] = []
    highest = 0
    iterations.add(0, 1, [], 1, 1)
    for start, length in slices:
        part = durations_s[start : start + length]
        iterations.add(0, start + 1, part, 1, 1)
        for index in range(start, start + len(part)):
            if index >= highest:
                counted.append(durations_s[index])
                highest = index + 1
    assert iterations.profiled == len(counted)
    assert iterations.iteration_s() == (quietest_s(counted) if counted else 0.0)


def test_a_window_says_what_the_job_used_of_all_aggregators_since_the_last() -> None:
    core = profiler()
    core.step(report(0, 1, [1.0, 1.0], workers=1), 100.0)
    windows: list[WindowMeasured] = []
    for second in range(1, 41):
        for name in ("a", "b"):
            used = JobCpu(job=JOB, cpu_s=0.01 if second <= 20 else 0.02, slot_s=0.1)
            told = TasksObserved(
                aggregator=AggregatorId(name), period_s=1.0, tasks=(), jobs=(used,)
            )
            core.step(Observed("", told), 100.0 + second)
        effects = core.step(report(0, 2 + second, [1.0], workers=1), 100.0 + second)
        windows += said(effects, WindowMeasured)
    assert [w.used_cpu for w in windows] == pytest.approx([0.02, 0.04])
    assert [w.used_slots for w in windows] == pytest.approx([0.2, 0.2])


def test_a_slow_jobs_window_ends_by_time_with_ten_iterations_at_least() -> None:
    """Congested, a hundred iterations could take an hour."""
    iterations = Iterations(warm_up=0)
    iterations.add(0, 1, [40.0] * 9, 1, 1)
    assert iterations.window(100, within_s=300.0) is None, "nine do not make a mean"
    iterations.add(0, 10, [40.0, 50.0, 40.0], 1, 1)
    window = iterations.window(100, within_s=300.0)
    assert window is not None
    assert (window.iterations, window.last_iteration) == (12, 12)
    assert window.iteration_s == pytest.approx(490.0 / 12)
    assert iterations.window(100, within_s=300.0) is None
    iterations.add(0, 13, [1.0] * 99, 1, 1)
    assert iterations.window(100, within_s=300.0) is None, "a quick one has all of its hundred"
