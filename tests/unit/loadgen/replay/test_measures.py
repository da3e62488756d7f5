"""Figures from timelines: golden cases worked out by hand."""

import json
import math
from pathlib import Path

import pytest

from slackwater.common.domains.facts.timeline import Timeline, integral
from slackwater.loadgen.replay import measures
from slackwater.loadgen.replay.report import write_events
from slackwater.schemas.base import AggregatorId, ClusterId, JobId
from slackwater.schemas.cluster import AllocationEvent
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import MigrationEvent, Profile
from slackwater.schemas.telemetry import IterationsObserved, JobProfiled

CLUSTER = ClusterId("c0")


def fact(job: str, fact: str, at_s: float, timeline: Timeline, reason: str = "") -> None:
    event = JobEvent(job=JobId(job), fact=fact, at_s=at_s, cluster=CLUSTER, reason=reason)
    timeline.observe(event, at_s)


def allocated(count: int, at_s: float, timeline: Timeline) -> None:
    event = AllocationEvent(
        aggregator=AggregatorId("a1"), fact="allocated", cluster=CLUSTER, in_use=count, at_s=at_s
    )
    timeline.observe(event, at_s)


def migrated(job: str, id: str, cause: str, from_s: float, to_s: float, timeline: Timeline) -> None:
    for what, at_s in (("started", from_s), ("finished", to_s)):
        event = MigrationEvent(
            migration=id, job=JobId(job), fact=what, cause=cause, buckets=(0,),
            sources=(AggregatorId("a1"),), targets=(AggregatorId("a2"),), at_s=at_s,
        )  # fmt: skip
        timeline.observe(event, at_s)


def iterated(job: str, first: int, durations: list[float], at_s: float, timeline: Timeline) -> None:
    event = IterationsObserved(
        job=JobId(job), rank=0, first_iteration=first, durations_s=tuple(durations),
        location_epoch=0, bytes_pushed=0, bytes_pulled=0,
    )  # fmt: skip
    timeline.observe(event, at_s)


@pytest.fixture
def timeline() -> Timeline:
    timeline = Timeline(started_s=0.0)
    for id in ("a", "b"):
        timeline.expect(JobSpec(id=id, model="vgg19", workers=2, servers=2, iterations=50), 0.0)
        fact(id, "located", 0.0, timeline)
    return timeline


def test_a_report_holds_every_fact_by_its_second(timeline: Timeline, tmp_path: Path) -> None:
    allocated(2, 1.25, timeline)
    iterated("a", 1, [0.5], 2.0, timeline)  # Telemetry.
    migrated("a", "a-m1", "profiled", 3.0, 3.5, timeline)
    write_events(tmp_path / "events.jsonl", timeline)
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(each["replay_s"], each["fact"]) for each in told[-3:]] == [
        (1.25, "allocated"),
        (3.0, "started"),
        (3.5, "finished"),
    ]
    assert told[-1]["migration"] == "a-m1"


def test_integral_of_steps_is_server_seconds() -> None:
    assert integral([(0.0, 2), (10.0, 4), (15.0, 0)], 100.0) == 2 * 10 + 4 * 5
    assert integral([(0.0, 2)], 7.0) == 14
    assert integral([], 7.0) == 0


def test_reduction_is_one_minus_aggregators_over_required(timeline: Timeline) -> None:
    """Two 2-server jobs for 10 s on 2 aggregators, then one of them for 10 s on 2: 1 - 40/60."""
    allocated(2, 0.0, timeline)
    fact("a", "completed", 10.0, timeline)
    fact("b", "completed", 20.0, timeline)
    allocated(0, 20.0, timeline)
    assert measures.cpu_reduction_ratio(timeline, 30.0) == pytest.approx(1 - 40 / 60)


def test_repeated_telemetry_counts_once(timeline: Timeline) -> None:
    iterated("a", 1, [1.0, 1.0], 2.0, timeline)
    iterated("a", 1, [1.0, 1.0], 2.0, timeline)
    iterated("a", 2, [1.0, 2.0], 4.0, timeline)
    assert [(i.number, i.duration_s) for i in timeline.tracks["a"].iterations] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]


@pytest.mark.parametrize("cause", ["reverted", "expanded", "protected"])
def test_loss_leaves_out_what_the_controller_undid(timeline: Timeline, cause: str) -> None:
    """b's assignment at 10 s slowed both to half; reverted at 30 s. Steady: before and after."""
    fact("a", "steady", 0.0, timeline)
    fact("b", "assigned", 10.0, timeline)
    iterated("a", 1, [1.0] * 10, 10.0, timeline)
    migrated("b", "m1", "profiled", 10.0, 11.0, timeline)
    iterated("a", 11, [2.0] * 10, 30.0, timeline)
    migrated("b", "m2", cause, 30.0, 31.0, timeline)
    iterated("a", 21, [1.05] * 10, 42.0, timeline)
    rows = measures.job_figures(timeline, {"a": 1.0, "b": 1.0}, {}, 0.1, 5)
    (a, b) = rows
    assert a.loss == pytest.approx(1 - 1 / (18.5 / 18))  # Eight 1.0 and ten 1.05.
    assert a.loss_whole_life is not None
    assert a.loss_whole_life > 0.25
    assert (a.reverts, b.reverts) == (0, 1)
    assert b.loss is None, "b reported no iteration"


def test_a_loss_is_that_of_samples_per_second(timeline: Timeline) -> None:
    """The median iteration of a job that stalls in every seventh one loses nothing."""
    fact("a", "steady", 0.0, timeline)
    iterated("a", 1, ([0.134] * 6 + [0.334]) * 20, 30.0, timeline)
    (a, _) = measures.job_figures(timeline, {"a": 0.134}, {}, 0.1, 5)
    assert a.loss == pytest.approx(1 - 0.134 / 0.163, abs=0.01)
    mean_s = measures.mean_iteration_s(timeline.tracks["a"])
    assert mean_s == pytest.approx(0.163, abs=0.001)


def test_too_few_steady_iterations_are_no_figure(timeline: Timeline) -> None:
    fact("a", "steady", 0.0, timeline)
    iterated("a", 1, [1.0] * 6, 6.0, timeline)
    (a, _) = measures.job_figures(timeline, {"a": 1.0}, {}, 0.1, 5)
    assert a.shared_s is None
    assert a.steady_iterations == 4


def test_duty_is_profiled_slot_time_over_iteration(timeline: Timeline) -> None:
    profile = Profile(iteration_s=1.0, task_cpu_s=(0.02, 0.012))
    timeline.observe(JobProfiled(job=JobId("a"), location_epoch=0, profile=profile), 5.0)
    assert measures.duty(timeline.tracks["a"], 0.1) == pytest.approx(0.32)
    assert measures.duty(timeline.tracks["b"], 0.1) is None


def test_loss_of_a_faster_job_is_negative() -> None:
    assert measures.loss(1.0, 0.9) == pytest.approx(-1 / 9)
    assert measures.loss(None, 1.0) is None
    assert math.isclose(measures.loss(1.0, 1.25) or 0, 0.2)
