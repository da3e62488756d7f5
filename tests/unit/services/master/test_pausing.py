"""Jobs that people pause or hold back: what is ordered, who takes their place, when they go on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.services.master.test_gpu_dispatch import GpuHarness, started
from tests.unit.services.master.test_master_core import Harness, facts, orders, spec, submitted
from tests.unit.services.master.test_repeating import exited, failed, refused

from slackwater.common.base.effects import Answered
from slackwater.schemas.base import RUN_ATTEMPTS, JobId, Message, NodeId, Ok, Refused
from slackwater.schemas.job_requests import CancelJob, JobInfo, PauseJob, ResumeJob, SubmitJob
from slackwater.schemas.job_states import HOLDING_STATES
from slackwater.schemas.workers import StartWorkers, StopWorkers, WorkerExited
from slackwater.services.master.keys import Order, OrderKey


def confirm(harness: Harness, id: str, what: Order) -> list[object]:
    return list(harness.step(Answered(OrderKey(JobId(id), what), Ok())))


def running(id: str = "a", slots: int = 8) -> Harness:
    """A job of two processes that run on n1."""
    harness = Harness()
    submitted(harness, id)
    harness.node(slots=slots)
    confirm(harness, id, Order("start"))
    assert harness.job(id).state == "running"
    harness.now_s += 5.0
    return harness


def paused(id: str = "a") -> Harness:
    harness = running(id)
    harness.ask(PauseJob(job=id))
    confirm(harness, id, Order("stop"))
    assert harness.job(id).state == "paused"
    return harness


def test_a_paused_job_ends_its_processes_and_is_not_started_by_any_policy() -> None:
    harness = running()
    effects = harness.ask(PauseJob(job="a"))
    assert [type(m) for m in orders(effects)] == [StopWorkers]
    assert facts(effects) == ["stopping"]
    assert (harness.job("a").state, harness.job("a").held) == ("stopping", True)
    assert "then it stays paused until `slackwater resume a`" in harness.why("a")
    for rank in (0, 1):
        late = WorkerExited(job="a", rank=rank, node=NodeId("n1"), code=-15)
        harness.ask(late)
    effects = list(confirm(harness, "a", Order("stop")))  # type: ignore[arg-type]
    assert facts(effects) == ["paused"]  # type: ignore[arg-type]
    harness.node()
    harness.tick()
    assert (harness.job("a").state, harness.job("a").allocation) == ("paused", ())
    assert harness.job("a").ran_on == ((NodeId("n1"), 2),)
    assert harness.why("a") == "it was paused; `slackwater resume a` lets it go on"


def test_a_resumed_job_is_started_as_the_next_attempt() -> None:
    harness = paused()
    effects = harness.ask(ResumeJob(job="a"))
    (start,) = orders(effects)
    assert isinstance(start, StartWorkers)
    assert start.attempts == (RUN_ATTEMPTS, RUN_ATTEMPTS)
    assert (harness.job("a").state, harness.job("a").attempt) == ("running", 1)
    assert harness.job("a").reallocations == 1
    assert harness.job("a").preemptions == 0


def test_a_job_that_is_held_back_starts_once_released_and_before_those_after_it() -> None:
    harness = Harness()
    harness.node(slots=2)
    for id in ("first", "held", "later"):
        harness.now_s += 1.0
        harness.ask(SubmitJob(spec=spec(id)))
    assert isinstance(harness.answer(PauseJob(job="held", waiting=True)), JobInfo)
    assert harness.why("held") == "it is held back; `slackwater release held` lets it start"
    harness.ask(ResumeJob(job="held"))
    for rank in (0, 1):
        harness.ask(exited("first", rank))
    assert harness.job("held").state == "running"
    assert harness.job("later").state == "pending"


def test_others_overtake_a_job_that_is_held_back() -> None:
    harness = Harness()
    harness.node(slots=2)
    for id in ("first", "held", "later"):
        harness.now_s += 1.0
        harness.ask(SubmitJob(spec=spec(id)))
    harness.ask(PauseJob(job="held"))
    for rank in (0, 1):
        harness.ask(exited("first", rank))
    assert (harness.job("held").state, harness.job("later").state) == ("pending", "running")


@pytest.mark.parametrize("message", [PauseJob(job="a"), ResumeJob(job="a")])
def test_what_is_asked_twice_changes_nothing_the_second_time(message: Message) -> None:
    harness = running() if isinstance(message, PauseJob) else paused()
    harness.ask(message)
    before = harness.job("a")
    effects = harness.ask(message)
    assert (orders(effects), facts(effects)) == ([], [])
    assert harness.job("a") == before


def test_what_cannot_be_paused_is_refused_with_the_remedy() -> None:
    harness = running()
    for message in (PauseJob(job="b"), ResumeJob(job="b")):
        refused(harness.answer(message), "there is no job b")
    refused(harness.answer(PauseJob(job="a", waiting=True)), "is running", "slackwater pause a")
    failed(harness, "c")
    for message in (PauseJob(job="c"), ResumeJob(job="c")):
        refused(harness.answer(message), "has failed", "slackwater rerun c")
    harness.report("c0", 1.0)
    harness.ask(SubmitJob(spec=spec("hand", program=())))
    refused(harness.answer(PauseJob(job="hand")), "started by its user")


def test_the_gpus_of_a_paused_job_go_to_the_next_one_once_it_has_left_them() -> None:
    harness = GpuHarness(gpus=1)
    harness.submit("a", 2)
    harness.submit("b", 1)
    harness.confirm("start@n1/a")
    harness.confirm("start@n2/a")
    effects = harness.ask(PauseJob(job="a"))
    assert harness.job("b").state == "starting"
    assert started(effects) == {}  # type: ignore[arg-type]
    harness.confirm("stop@n1/a")
    assert started(harness.confirm("stop@n2/a")) == {"n1 b": ("n1/0",)}
    harness.ask(ResumeJob(job="a"))
    assert harness.job("a").state == "paused", "b has one of its GPUs"
    assert "held by b (1)" in harness.why("a")


def test_a_pause_by_its_user_replaces_what_a_policy_had_planned() -> None:
    """It was to go on with other GPUs; it stays paused instead."""
    harness = GpuHarness(gpus=1, gpu_policy="sf")
    harness.submit("a", 2)
    harness.submit("b", 1)
    assert harness.job("a").state == "stopping"
    harness.ask(PauseJob(job="a"))
    for node in ("n1", "n2"):
        harness.confirm(f"stop@{node}/a")
    harness.confirm("start/b")
    end = WorkerExited(job="b", rank=0, node=NodeId("n1"), code=0, result="{}")
    harness.ask(end)
    assert harness.job("b").state == "completed"
    assert (harness.job("a").state, harness.job("a").held) == ("paused", True)


def test_a_master_that_is_killed_meanwhile_pauses_the_job_nevertheless() -> None:
    harness = running()
    harness.ask(PauseJob(job="a"))
    assert {type(m) for m in orders(harness.restart())} == {StopWorkers}
    harness.node()
    confirm(harness, "a", Order("stop"))
    harness.restart()
    harness.node()
    harness.tick()
    assert (harness.job("a").state, harness.job("a").held) == ("paused", True)
    harness.ask(ResumeJob(job="a"))
    assert harness.job("a").state == "running"


def test_a_job_that_ends_while_it_is_told_to_stop_has_ended() -> None:
    harness = running()
    harness.ask(PauseJob(job="a"))
    for rank in (0, 1):
        done = WorkerExited(job="a", rank=rank, node=NodeId("n1"), code=0, result="{}")
        harness.ask(done)
    assert harness.job("a").state == "completed"
    refused(harness.answer(ResumeJob(job="a")), "has completed")


def test_a_job_fails_when_its_time_is_over_and_pauses_do_not_count() -> None:
    harness = Harness()
    submitted(harness, "a", time_limit_s=60.0)
    harness.node()
    confirm(harness, "a", Order("start"))
    both = (("a", 0), ("a", 1))
    harness.now_s += 40.0
    harness.ask(PauseJob(job="a"))
    confirm(harness, "a", Order("stop"))
    harness.tick(500.0)
    harness.node()
    harness.ask(ResumeJob(job="a"))
    harness.now_s += 15.0
    harness.node(running=both)
    harness.tick()
    assert harness.job("a").state == "running"
    harness.now_s += 10.0
    harness.node(running=both)
    harness.tick()
    assert harness.job("a").state == "failed"
    assert harness.job("a").reason == "its time is over: it has run for 60 s (time_limit_s)"


def test_a_job_that_is_to_go_on_has_half_a_minute_to_save() -> None:
    """One that is cancelled has as long as its worker service says."""
    harness = running()
    (stop,) = orders(harness.ask(PauseJob(job="a")))
    assert isinstance(stop, StopWorkers)
    assert stop.grace_s == 30.0
    assert "for which it has 30 s" in harness.why("a")
    harness = running()
    (stop,) = [m for m in orders(harness.ask(CancelJob(job="a"))) if isinstance(m, StopWorkers)]
    assert stop.grace_s == 0.0


def test_a_program_is_started_with_the_variables_of_its_job() -> None:
    harness = Harness()
    submitted(harness, "a", env={"HTTP_PROXY": "http://proxy:3128"})
    (start,) = [m for m in orders(harness.node()) if isinstance(m, StartWorkers)]
    assert start.env == {"HTTP_PROXY": "http://proxy:3128"}
    with pytest.raises(ValueError, match="SLACKWATER_RANK is set by the worker service"):
        spec("b", env={"SLACKWATER_RANK": "3"})


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["submit", "pause", "hold", "resume", "stopped", "restart", "tick"]),
            st.sampled_from("ab"),
        ),
        max_size=40,
    )
)
def test_no_held_job_is_ever_started(steps: list[tuple[str, str]]) -> None:
    harness = Harness()
    harness.node(slots=64)
    for what, id in steps:
        known = harness.stored["jobs"].get(id)
        effects: list[object] = []
        match what:
            case "submit":
                effects = list(harness.ask(SubmitJob(spec=spec(id))))
            case "pause":
                effects = list(harness.ask(PauseJob(job=id)))
            case "hold":
                answer = harness.answer(PauseJob(job=id, waiting=True))
                runs = known is not None and known.state in ("starting", "running")  # type: ignore[attr-defined]
                assert not runs or isinstance(answer, Refused)
            case "resume":
                effects = list(harness.ask(ResumeJob(job=id)))
            case "stopped" if known is not None:
                job = harness.core.state.jobs[JobId(id)]
                effects = [
                    e for n in job.stopped_by for e in confirm(harness, id, job.order("stop", n))
                ]
            case "restart":
                effects = list(harness.restart())
                harness.node(slots=64)
            case "tick":
                effects = list(harness.tick())
        for message in orders(effects):  # type: ignore[arg-type]
            if isinstance(message, StartWorkers):
                assert not harness.job(message.job).held
        for record in map(harness.job, harness.stored["jobs"]):
            assert not (record.held and record.state in HOLDING_STATES - {"stopping"})
