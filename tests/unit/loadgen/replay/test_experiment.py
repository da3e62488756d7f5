"""Comparisons of the sharing experiment, and all that it asks for to be conclusive."""

import pytest

from slackwater.common.domains.facts.timeline import Iteration, JobTrack, Timeline
from slackwater.common.embedded import ClusterOptions
from slackwater.loadgen.replay import experiment, measures, report
from slackwater.loadgen.replay.experiment import Outcome
from slackwater.loadgen.replay.measures import JobFigures
from slackwater.loadgen.replay.workload import shared_aggregation
from slackwater.schemas.base import AggregatorId, ClusterId, JobId
from slackwater.schemas.cluster import AggregatorHeartbeat, AllocationEvent
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import MigrationEvent, TensorCopyDone

WORK = shared_aggregation(time_scale=1.0, bytes_scale=0.1, seed=1)


def test_twins_have_servers_of_their_own_and_an_equal_share_of_the_machine() -> None:
    twins = experiment.twins(WORK)
    assert {spec.model for spec in twins} == {"alexnet", "vgg19"}
    assert all(spec.aggregation == "static" and spec.iterations > 10_000 for spec in twins)
    ours, apart = experiment.side_by_side(ClusterOptions(aggregators=10, cpu_share=0.1), WORK)
    assert ours.aggregators == 10
    assert apart.aggregators == sum(spec.servers for spec in twins)
    assert ours.cpu_share == apart.cpu_share <= 0.1


def iterations(durations_s: list[float], begun_s: float, first: int = 1) -> list[Iteration]:
    found, at_s = [], begun_s
    for number, duration_s in enumerate(durations_s, first):
        at_s += duration_s
        found.append(Iteration(number, at_s, duration_s))
    return found


def test_a_twin_is_measured_in_the_seconds_of_the_job_alone() -> None:
    """It was twice as slow before, when the machine did something else."""
    twin = JobTrack(spec=JobSpec(id="twin"), submitted_s=0.0)
    twin.iterations = iterations([2.0] * 10 + [1.0] * 10, 0.0)
    kept = iterations([1.1] * 6, 22.0, first=30)
    assert measures.iteration_during(twin, kept) == pytest.approx(1.0)
    assert measures.iteration_during(twin, []) is None
    assert measures.iteration_during(twin, iterations([1.0] * 3, 500.0)) is None


def conclusive() -> Outcome:
    """Everything that the experiment asks for."""
    timeline = Timeline(started_s=0.0)
    job, a1 = JobId("vgg19-1"), AggregatorId("a1")
    timeline.expect(JobSpec(id="vgg19-1", model="vgg19", servers=2, iterations=50), 0.0)
    timeline.observe(JobEvent(job=job, fact="located", at_s=0.0, cluster=ClusterId("c1")), 0.0)
    for fact, in_use, at_s in (("allocated", 1, 0.0), ("released", 0, 100.0)):
        event = AllocationEvent(
            aggregator=a1, fact=fact, cluster=ClusterId("c1"), in_use=in_use, at_s=at_s,  # type: ignore[arg-type]
        )  # fmt: skip
        timeline.observe(event, at_s)
    for fact, at_s in (("started", 10.0), ("finished", 11.0)):
        moved = MigrationEvent(
            migration="m1", job=job, fact=fact, cause="expanded", buckets=(0,), sources=(a1,),  # type: ignore[arg-type]
            targets=(a1,), at_s=at_s,
        )  # fmt: skip
        timeline.observe(moved, at_s)
    copied = TensorCopyDone(
        migration="m1", job=job, bucket=0, location_epoch=2, version=9, source=a1, target=a1,
        nbytes=1, copy_s=0.1,
    )  # fmt: skip
    timeline.observe(copied, 10.5)
    row = JobFigures(
        job="vgg19-1", model="vgg19", cluster="c1", state="completed", iterations=50,
        standalone_s=1.0, shared_s=1.02, static_s=1.0, steady_iterations=40, loss=0.02,
        loss_whole_life=0.05, loss_against_standalone=0.02, duty=0.327, cpu_s=1.0, migrations=1,
        reverts=1, reason="",
    )  # fmt: skip
    outcome = Outcome(timeline, 100.0, [row], 0.07)
    outcome.control_loss, outcome.verified = 0.4, 1
    return outcome


def test_an_experiment_that_shows_all_is_conclusive() -> None:
    assert report.doubts_about(conclusive()) == []


def change(outcome: Outcome, **fields: object) -> None:
    outcome.figures = [JobFigures(**{**vars(outcome.figures[0]), **fields})]


def slow_machine(outcome: Outcome) -> None:
    beat = AggregatorHeartbeat(
        service="aggregator", id="a1", incarnation=1, at_s=0.0, node="m1",  # type: ignore[arg-type]
        cpu_share=0.07, addresses=(), buckets=1, jobs=1, held_bytes=1, busy_s=1.0, bytes_in=0,
        bytes_out=0, executions=100, undercharged=40,
    )  # fmt: skip
    outcome.timeline.observe(beat, 1.0)


def little_saved(outcome: Outcome) -> None:
    outcome.timeline.aggregators = [(0.0, 2), (90.0, 0)]


LACKS = {
    "left where it lost 14.0%": lambda outcome: change(outcome, loss=0.14),
    "of the servers' time, not 25%": little_saved,
    "the control, one aggregator for all": lambda o: setattr(o, "control_loss", 0.05),
    "parameters equal": lambda outcome: setattr(outcome, "verified", 0),
    "ended as failed": lambda outcome: change(outcome, state="failed"),
    "no assignment was undone": lambda outcome: change(outcome, reverts=0),
    "no aggregator was released": lambda outcome: outcome.timeline.allocations.clear(),
    "no bucket migrated": lambda outcome: outcome.timeline.migrations.clear(),
    "kept 0.80 of a server busy": lambda outcome: change(outcome, duty=0.8),
    "iterations in steady windows": lambda o: change(o, shared_s=None, loss=None),
    "too slow for the charge": slow_machine,
}


@pytest.mark.parametrize("lack", LACKS)
def test_each_thing_that_is_missing_makes_it_inconclusive(lack: str) -> None:
    outcome = conclusive()
    LACKS[lack](outcome)
    assert any(lack in doubt for doubt in report.doubts_about(outcome)), lack
