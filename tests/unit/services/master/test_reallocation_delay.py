"""A job's re-allocation delay is measured, kept in its record and shown to policies."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.unit.services.master.test_gpu_dispatch import GpuHarness

from slackwater.common.base.effects import Answered
from slackwater.schemas.base import JobId, NodeId, Ok
from slackwater.schemas.job_requests import PauseJob, ResumeJob
from slackwater.schemas.telemetry import IterationsObserved
from slackwater.services.master.keys import OrderKey, Verb
from slackwater.services.master.scheduling.delays import reallocation_s

seconds = st.floats(0.0, 1e6)


@given(before_s=seconds, parts=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8))
def test_it_stays_within_what_was_measured(
    before_s: float, parts: list[tuple[float, float]]
) -> None:
    found_s = before_s
    for stopping_s, starting_s in parts:
        found_s = reallocation_s(found_s, stopping_s, starting_s)
    sums = [a + b for a, b in parts] + ([before_s] if before_s else [])
    assert min(sums) * (1 - 1e-9) <= found_s <= max(sums) * (1 + 1e-9)


def test_the_first_one_counts_whole_and_later_ones_half() -> None:
    assert reallocation_s(0.0, 2.0, 1.0) == 3.0
    assert reallocation_s(3.0, 0.5, 0.5) == 2.0


def confirm(harness: GpuHarness, verb: Verb) -> None:
    """Answer the order of the attempt that `a` is in."""
    order = harness.core.state.jobs[JobId("a")].order(verb, NodeId("n1"))
    harness.step(Answered(OrderKey(JobId("a"), order), Ok()))


def turn(harness: GpuHarness, waits_s: float, trains_s: float = 0.0) -> None:
    """Pause `a`, which takes 2 s to leave, hold it for a while, and start it again in .5 s."""
    harness.ask(PauseJob(job="a"))
    assert harness.job("a").state == "stopping"
    harness.now_s += 2.0
    confirm(harness, "stop")
    harness.now_s += waits_s
    harness.ask(ResumeJob(job="a"))
    assert harness.job("a").state == "starting"
    harness.now_s += 0.5
    confirm(harness, "start")
    if trains_s:
        harness.now_s += trains_s + 0.4
        harness.see(
            IterationsObserved(
                job=JobId("a"),
                rank=0,
                first_iteration=1,
                durations_s=(0.1, 0.3),
                location_epoch=0,
                bytes_pushed=0,
                bytes_pulled=0,
            )
        )


def test_waiting_is_not_a_part_of_it() -> None:
    harness = begun()
    for waits_s in (0.0, 500.0):
        turn(harness, waits_s)
    assert harness.job("a").reallocation_s == 2.5
    view = harness.core.state.gpus.snapshot.jobs[JobId("a")]
    assert view.restart_s == 2.5


def begun() -> GpuHarness:
    harness = GpuHarness(node_silent_s=1e6)
    harness.submit("a", 2)
    harness.now_s += 0.5
    confirm(harness, "start")
    assert harness.job("a").reallocation_s == 0.0
    assert harness.core.state.gpus.snapshot.jobs[JobId("a")].restart_s is None
    return harness


def test_a_program_that_loads_for_long_begins_with_its_first_iteration() -> None:
    harness = begun()
    turn(harness, 0.0, trains_s=7.5)
    turn(harness, 0.0)
    # 2 s to leave and .5 s to start; then 2 s to leave after .5 + 7.5 s to the first iteration.
    assert harness.job("a").reallocation_s == (2.5 + 10.0) / 2


def test_a_master_that_is_killed_keeps_it_and_measures_only_what_it_saw_whole() -> None:
    harness = begun()
    turn(harness, 0.0)
    assert harness.job("a").reallocation_s == 2.5
    harness.ask(PauseJob(job="a"))
    harness.now_s += 60.0
    harness.restart()
    harness.hear()
    confirm(harness, "stop")
    record = harness.job("a")
    assert (record.state, record.reallocation_s) == ("paused", 2.5)


def test_a_new_measurement_wakes_no_policy() -> None:
    """Nothing else changes for a policy while a job keeps its allocation."""
    harness = begun()
    turn(harness, 0.0)
    schedule = harness.core.state.gpus
    decisions, record = schedule.decisions, harness.job("a")
    harness.core.state.change(
        harness.core.state.jobs[JobId("a")], harness.now_s, reallocation_s=9.0
    )
    harness.tick()
    assert schedule.decisions == decisions
    assert schedule.snapshot.jobs[JobId("a")] == replace(
        schedule.snapshot.jobs[JobId("a")], restart_s=9.0
    )
    assert record.reallocation_s == 2.5
