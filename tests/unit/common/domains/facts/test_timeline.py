"""The read model of facts: what it says follows from what was heard, and from nothing else."""

from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.domains.facts.timeline import Timeline, integral
from slackwater.schemas.base import AggregatorId, ClusterId, JobId, NodeId
from slackwater.schemas.cluster import AggregatorHeartbeat, AllocationEvent
from slackwater.schemas.gpus import NodeAllocation
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import MigrationEvent, TensorCopyDone
from slackwater.schemas.telemetry import IterationsObserved, JobCpu, TaskCost, TasksObserved

JOBS = ("vgg", "alexnet", "lstm")
CLUSTER = ClusterId("c0")


def timeline() -> Timeline:
    made = Timeline(started_s=0.0)
    for id in JOBS[:2]:
        made.expect(JobSpec(id=id, workers=2, servers=3, iterations=100), 0.0)
    return made


def job_event(job: str, fact: str, aggregators: str = "", reason: str = "") -> JobEvent:
    detail = {"aggregators": aggregators} if aggregators else {}
    return JobEvent(
        job=JobId(job), fact=fact, at_s=0.0, cluster=CLUSTER, reason=reason, detail=detail
    )


job_events = st.builds(
    job_event, st.sampled_from(JOBS),
    st.sampled_from(["pending", "running", "located", "steady", "assigned", *TERMINAL_STATES]),
    st.sampled_from(["a1", "a1,a2", "a3"]), st.sampled_from(["", "out of memory"]),
)  # fmt: skip


@given(st.lists(job_events, max_size=40))
def test_a_job_ends_once_and_for_good_and_is_required_while_it_is_placed(
    facts: list[JobEvent],
) -> None:
    """In any order of facts the first end is the end, and servers are required from a job's first
    place to its end."""
    model = timeline()
    ended: dict[str, tuple[str, float]] = {}
    for number, fact in enumerate(facts):
        model.observe(fact, float(number))
        if fact.fact in TERMINAL_STATES and fact.job in model.tracks:
            ended.setdefault(fact.job, (fact.fact, float(number)))
    for id, track in model.tracks.items():
        assert (track.state, track.ended_s) == ended.get(id, (track.state, None))
        assert track.ended_s is not None or track.state in ("pending", "running")
        assert track.ended_s is None or not track.allocation
    assert JOBS[2] not in model.tracks, "nobody announced it"
    placed = [t for t in model.tracks.values() if t.placed_s is not None and t.ended_s is None]
    assert model.required_now == 3 * len(placed)
    assert model.ended() == (ended.keys() == model.tracks.keys())
    assert [at_s for at_s, _ in model.events] == [float(n) for n in range(len(facts))]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=10), st.data())
def test_iterations_count_once_however_often_they_are_told(
    sizes: list[int], data: st.DataObject
) -> None:
    messages, first = [], 1
    for size in sizes:
        durations = tuple(data.draw(st.floats(0.01, 5.0)) for _ in range(size))
        messages.append(
            IterationsObserved(
                job=JobId("vgg"), rank=0, first_iteration=first, durations_s=durations,
                location_epoch=0, bytes_pushed=0, bytes_pulled=0,
            )
        )  # fmt: skip
        first += size
    model = timeline()
    for number, message in enumerate(messages):
        model.observe(message, 10.0 * number)
        for again in messages[: number + 1][:: data.draw(st.integers(1, 3))]:
            model.observe(again, 10.0 * number + 1.0)
    track = model.tracks["vgg"]
    assert [each.number for each in track.iterations] == list(range(1, first))
    told = [duration_s for message in messages for duration_s in message.durations_s]
    assert [each.duration_s for each in track.iterations] == told
    assert track.reported == first - 1


def test_aggregators_are_the_last_that_a_fact_named_and_stay_after_the_end() -> None:
    model = timeline()
    model.observe(job_event("vgg", "located", "a1,a2"), 1.0)
    model.observe(job_event("vgg", "reverted", "a2"), 2.0)  # It names those of the loss.
    assert model.tracks["vgg"].aggregators == ("a1", "a2")
    model.observe(job_event("vgg", "assigned", "a3"), 3.0)
    model.observe(job_event("vgg", "completed"), 4.0)
    assert model.tracks["vgg"].aggregators == ("a3",)
    assert model.tracks["alexnet"].aggregators == ()


def lived(model: Timeline, at_s: float, fact: str, attempt: int, *held: tuple[str, int]) -> None:
    allocation: NodeAllocation = tuple((NodeId(node), gpus) for node, gpus in held)
    event = JobEvent(job=JobId("vgg"), fact=fact, at_s=at_s, attempt=attempt, allocation=allocation)
    model.observe(event, at_s)


def test_what_a_job_holds_is_followed_through_its_attempts() -> None:
    """While it stops it keeps what it holds, and the fact names what comes next. What it starts
    with may still be another's, who saves."""
    model = timeline()
    track = model.tracks["vgg"]
    lived(model, 1.0, "starting", 0, ("n1", 4))
    lived(model, 2.0, "running", 0, ("n1", 4))
    lived(model, 5.0, "resized", 0, ("n1", 4), ("n2", 2))
    assert (track.state, track.allocation) == ("stopping", (("n1", 4),))
    lived(model, 6.0, "starting", 1, ("n1", 4), ("n2", 2))
    lived(model, 6.5, "running", 0, ("n1", 4))  # Repeated late, from the attempt before.
    assert (track.state, track.attempt) == ("starting", 1)
    lived(model, 7.0, "running", 1, ("n1", 4), ("n2", 2))
    lived(model, 9.0, "stopping", 1)
    lived(model, 10.0, "paused", 2)
    assert (track.state, track.allocation) == ("paused", ())
    lived(model, 12.0, "starting", 2, ("n3", 1))
    assert (track.state, track.allocation) == ("starting", ())
    lived(model, 12.5, "running", 2, ("n3", 1))
    lived(model, 13.0, "located", 0)  # A controller's fact says nothing about GPUs.
    assert (track.state, track.allocation) == ("running", (("n3", 1),))
    lived(model, 14.0, "completed", 2, ("n3", 1))
    assert track.allocation == ()
    assert track.sizes == [(2.0, 4), (7.0, 6), (10.0, 0), (12.5, 1), (14.0, 0)]
    assert integral(track.sizes, 20.0) == 4 * 5 + 6 * 3 + 1 * 1.5


def test_allocations_are_steps_over_time() -> None:
    model = timeline()
    for at_s, in_use in ((1.0, 1), (3.0, 2), (6.0, 0)):
        event = AllocationEvent(
            aggregator=AggregatorId("a1"), fact="allocated" if in_use else "released",
            cluster=CLUSTER, in_use=in_use, at_s=at_s,
        )  # fmt: skip
        model.observe(event, at_s)
    assert model.in_use == 0
    assert integral(model.aggregators, 10.0) == 1 * 2 + 2 * 3


def test_a_migration_is_followed_from_its_start_to_its_end() -> None:
    model = timeline()

    def moved(fact: str, at_s: float) -> None:
        event = MigrationEvent(
            migration="m1", job=JobId("vgg"), fact=fact, cause="recycled", buckets=(0, 1),
            sources=(AggregatorId("a2"), AggregatorId("a1")),
            targets=(AggregatorId("a3"), AggregatorId("a3")), at_s=at_s,
        )  # fmt: skip
        model.observe(event, at_s)

    moved("started", 1.0)
    copied = TensorCopyDone(
        migration="m1", job=JobId("vgg"), bucket=0, source=AggregatorId("a1"),
        target=AggregatorId("a3"), nbytes=4, copy_s=0.1, location_epoch=1, version=1,
    )  # fmt: skip
    model.observe(copied, 1.5)
    assert model.migrations["m1"].ended_s is None
    moved("finished", 2.0)
    found = model.migrations["m1"]
    assert (found.started_s, found.ended_s, found.copied) == (1.0, 2.0, 1)
    assert (found.sources, found.targets, found.buckets) == (("a1", "a2"), ("a3",), 2)


def test_an_aggregator_that_restarted_counts_its_bytes_anew() -> None:
    model = timeline()
    for incarnation, moved in ((1, 100), (1, 150), (2, 7), (2, 27)):
        beat = AggregatorHeartbeat(
            service="aggregator", at_s=1.0, id=AggregatorId("a1"), incarnation=incarnation,
            bytes_in=moved, bytes_out=0, node=NodeId("n1"), cpu_share=1.0, addresses=(),
            buckets=0, jobs=0, held_bytes=0, busy_s=0.0,
        )  # fmt: skip
        model.observe(beat, 1.0)
    assert model.bytes_moved == 50 + 20


def test_cpu_time_is_accounted_to_the_jobs_that_are_followed() -> None:
    model = timeline()
    spent = tuple(JobCpu(job=JobId(id), cpu_s=0.5, slot_s=1.0) for id in JOBS)
    cost = TaskCost(job=JobId("vgg"), bucket=0, executions=1, cpu_s=0.1, nbytes=4)
    for _ in range(2):
        model.observe(
            TasksObserved(aggregator=AggregatorId("a1"), period_s=1.0, tasks=(cost,), jobs=spent),
            1.0,
        )
    assert {id: track.cpu_s for id, track in model.tracks.items()} == {"vgg": 1.0, "alexnet": 1.0}


def test_telemetry_of_strangers_changes_nothing() -> None:
    model = timeline()
    before = deepcopy(model)
    stranger = IterationsObserved(
        job=JobId("lstm"), rank=0, first_iteration=1, durations_s=(1.0,), location_epoch=0,
        bytes_pushed=0, bytes_pulled=0,
    )  # fmt: skip
    model.observe(stranger, 1.0)
    assert model == before


def test_speed_is_of_the_last_seconds() -> None:
    model = timeline()
    assert model.tracks["vgg"].speed(0.0) == 0.0
    message = IterationsObserved(
        job=JobId("vgg"), rank=0, first_iteration=1, durations_s=(0.5,) * 20, location_epoch=0,
        bytes_pushed=0, bytes_pulled=0,
    )  # fmt: skip
    model.observe(message, 10.0)
    assert model.tracks["vgg"].speed(10.0) == pytest.approx(2.0)
    assert model.tracks["vgg"].speed(60.0) == 0.0
