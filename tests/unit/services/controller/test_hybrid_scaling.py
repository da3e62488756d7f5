"""Hybrid scaling: what a period's end does, and what waits for it."""

from random import Random

import pytest
from tests.unit.services.controller.harness import Harness, Pool
from tests.unit.services.controller.harness import placed as asked_for

from slackwater.schemas.base import AggregatorId, ClusterId, JobId, Ok
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import BucketPlace, JobPlacement, JobPlan, ReleaseJob
from slackwater.services.controller import scaling
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.state import Job, PendingAssignment, State
from slackwater.services.controller.usage import Usage
from slackwater.services.master.clusters import ClusterRoom, Clusters


def state(scaling_s: float, on_demand_min: int = 1) -> State:
    config = ControllerConfig(scaling_s=scaling_s, on_demand_min=on_demand_min)
    made = State(config, Random(0))
    for name in ("a0", "a1"):
        entry = made.aggregator(AggregatorId(name), 0.0)
        entry.ours = True
        entry.become("alive", "it is heard")
        entry.request = "r1"
    return made


def job(made: State, home: str) -> Job:
    spec = JobSpec(id="j")
    plan = JobPlan(
        job=JobId("j"), workers=1, gradient_dtype="float32", update=spec.update, layout_epoch=1,
        token="",
    )  # fmt: skip
    place = BucketPlace(aggregator=AggregatorId(home))
    record = JobPlacement(spec=spec, tensors=(), plan=plan, buckets=(), places=(place,))
    made.know(Job(record))
    return made.jobs[JobId("j")]


def test_without_a_period_everything_is_given_back_and_nothing_idles() -> None:
    made = state(0.0)
    scaling.begin(made, 100.0)
    assert made.releasing
    assert scaling.idle(made) == []


def test_a_period_releases_at_its_end_until_nothing_is_unused() -> None:
    made = state(600.0)
    job(made, "a0")
    assert not made.releasing
    assert scaling.idle(made) == ["a1"], "it serves the next job that needs a new one"
    scaling.begin(made, 599.0)
    assert not made.releasing
    made.job_ended = True
    scaling.begin(made, 601.0)
    assert made.releasing
    assert made.recycle_due, "a job ended: little used ones are emptied too"
    made.recycle_due = False
    scaling.end(made)
    assert made.releasing, "a1 is still there"
    made.aggregators[AggregatorId("a1")].ours = False
    scaling.end(made)
    assert not made.releasing
    scaling.begin(made, 700.0)
    assert not made.releasing, "not twice in a period"


def test_what_is_reserved_temporary_or_being_given_back_is_not_idle() -> None:
    made = state(600.0)
    first, second = (made.aggregators[AggregatorId(name)] for name in ("a0", "a1"))
    first.reserved_for, second.temporary = JobId("k"), True
    assert scaling.idle(made) == []
    first.reserved_for, second.temporary = None, False
    assert scaling.idle(made) == ["a0", "a1"]


def test_a_small_demand_waits_for_the_periods_end_and_a_large_one_does_not() -> None:
    made = state(600.0, on_demand_min=3)
    waiting = job(made, "a0")
    waiting.pending = PendingAssignment("profiled", since_s=100.0, next_s=100.0, wait_s=5.0)
    assert scaling.postponed(made, waiting, 2, 110.0)
    assert scaling.period_end_s(made, 110.0) == 600.0
    assert not scaling.postponed(made, waiting, 3, 110.0)
    assert not scaling.postponed(made, waiting, 2, 601.0)
    assert not scaling.postponed(made, waiting, 0, 110.0)


def room(name: str, free_cpu: float) -> ClusterRoom:
    return ClusterRoom(ClusterId(name), free_cpu)


def placed(**demands_cpu: float) -> list[tuple[ClusterId, JobId, float]]:
    return [(ClusterId(c), JobId(f"j-{c}"), cpu) for c, cpu in demands_cpu.items()]


def test_as_many_clusters_are_open_as_the_demand_needs_and_one_more_on_demand() -> None:
    clusters = Clusters(scaling_s=3600.0)
    clusters.scale(placed(c0=1.0, c1=5.0, c2=0.0), most_cpu=10.0, now_s=0.0)
    assert clusters.open == {"c1"}, "6 of the 8 that one may hold: the fullest stays open"
    rooms = [room("c0", 9.0), room("c1", 2.0), room("c2", 8.0)]
    assert clusters.choose(rooms, 1.5) == "c1"
    assert clusters.choose(rooms, 4.0) == "c0", "opened on demand, the lowest that suffices"
    assert clusters.open == {"c0", "c1"}
    clusters.scale(placed(c0=4.0, c1=9.0, c2=0.0), most_cpu=10.0, now_s=3000.0)
    assert clusters.open == {"c0", "c1"}, "the same period"
    clusters.scale(placed(c0=4.0, c1=9.0, c2=7.0), most_cpu=10.0, now_s=3700.0)
    assert clusters.open == {"c0", "c1", "c2"}
    clusters.scale(placed(c0=0.0, c1=3.0, c2=1.0), most_cpu=10.0, now_s=7300.0)
    assert clusters.open == {"c1"}, "the others empty as their jobs end"
    assert clusters.choose([room("c1", 1.0)], 4.0) == "c1", "none suffices: the open one"


def test_demand_is_the_mean_of_what_was_in_use_and_a_period_long() -> None:
    usage = Usage()
    usage.note(2, 100.0)
    usage.note(6, 400.0)
    usage.note(0, 500.0)
    assert usage.end(1.0, 700.0) == pytest.approx((2 * 300 + 6 * 100) / 600)
    assert usage.keep == 2
    assert usage.end(0.5, 1000.0) == 0.0
    assert usage.keep == 0


def test_a_part_of_the_measured_demand_stays_for_the_next_burst() -> None:
    harness = Harness(Pool(9), scaling_s=60.0, keep_demand=0.5)
    harness.now_s = 1200.0
    harness.place("a", [0.09, 0.09])
    harness.place("b", [0.09, 0.09])  # No room is left next to a: two more.
    harness.pass_time(177)
    assert len(harness.pool.records) == 4
    for id in ("a", "b"):
        harness.ask(ReleaseJob(job=id))
    harness.pass_time(20)
    assert len(harness.pool.records) == 2, "half of the four that were in use"
    assert harness.ask(asked_for("next", 2)) == Ok()
    assert harness.stored["next"].phase == "profiling"
    assert len(harness.pool.records) == 2, "it found them"
    harness.ask(ReleaseJob(job="next"))
    harness.pass_time(190)
    assert harness.pool.records == {}, "a period needed none"


def test_what_is_idle_after_a_period_s_end_waits_for_the_next_one() -> None:
    """All that was unused has gone back by then: giving back is over."""
    harness = Harness(Pool(6), scaling_s=100.0, on_demand_min=1, keep_demand=0.0)
    harness.place("j", [0.02, 0.01])
    harness.pass_time(110)
    assert set(harness.pool.records) == {"a0", "a1"}
    assert harness.ask(ReleaseJob(job="j")) == Ok()
    harness.pass_time(40)
    assert set(harness.pool.records) == {"a0", "a1"}, "they are there for the next job"
    harness.pass_time(70)
    assert set(harness.pool.records) == set()
