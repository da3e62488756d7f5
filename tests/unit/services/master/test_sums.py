"""Jobs whose aggregators only add gradients up: each attempt begins with regions of its own."""

from tests.unit.services.master.test_master_core import Harness, orders, spec, submitted

from slackwater.common.base.effects import Answered, Effect, Request, StartTimer, TimerFired
from slackwater.schemas.base import RUNS_MAX, JobId, NodeId, Ok, Refused
from slackwater.schemas.job_requests import JobRegistered, PauseJob, RegisterJob, ResumeJob
from slackwater.schemas.placement import PlaceJob, ReleaseJob
from slackwater.schemas.tensors import TensorSpec, UpdateRule
from slackwater.schemas.workers import StartWorkers, WorkerExited
from slackwater.services.master.keys import Order, OrderKey

SUM = UpdateRule(name="sum")
TENSORS = (TensorSpec(name="w", shape=(4,)),)


def confirm(harness: Harness, what: Order) -> list[Effect]:
    return harness.step(Answered(OrderKey(JobId("a"), what), Ok()))


def register(harness: Harness, rank: int, update: UpdateRule = SUM) -> list[Effect]:
    return harness.ask(RegisterJob(job="a", rank=rank, tensors=TENSORS, update=update))


def asked(effects: list[Effect], of: type) -> list[Request]:
    return [e for e in effects if isinstance(e, Request) and isinstance(e.message, of)]


def running(**fields: object) -> Harness:
    harness = Harness()
    submitted(harness, "a", **fields)
    harness.node()
    harness.report("c0", 4.0)
    confirm(harness, Order("start"))
    return harness


def placed(harness: Harness, update: UpdateRule = SUM) -> PlaceJob:
    (request,) = asked(register(harness, 0, update), PlaceJob)
    harness.step(Answered(request.key, Ok()))
    assert isinstance(request.message, PlaceJob)
    return request.message


def test_each_attempt_of_a_job_that_sums_is_placed_anew() -> None:
    """A push of the attempt before must be part of no sum of this one."""
    harness = running()
    first = placed(harness)
    assert (first.run, first.spec.update.name) == (0, "sum")
    assert harness.job("a").sums
    harness.ask(PauseJob(job="a"))
    effects = confirm(harness, Order("stop"))
    (release,) = asked(effects, ReleaseJob)
    assert release.message == ReleaseJob(job="a", run=0)
    assert (harness.job("a").state, harness.job("a").placement) == ("paused", 1)
    harness.ask(ResumeJob(job="a"))
    confirm(harness, Order("start", "-1"))
    second = placed(harness)
    assert second.run == 1
    harness.restart()
    harness.report("c0", 4.0)
    assert placed(harness).run == 1, "a master that was restarted places it where it is"


def test_other_jobs_keep_their_regions_from_attempt_to_attempt() -> None:
    harness = running()
    placed(harness, UpdateRule(name="adam"))
    harness.ask(PauseJob(job="a"))
    assert asked(confirm(harness, Order("stop")), ReleaseJob) == []
    harness.ask(ResumeJob(job="a"))
    assert not harness.job("a").sums
    assert harness.job("a").placement == 0
    assert isinstance(harness.answer(RegisterJob(job="a", rank=0, tensors=TENSORS)), JobRegistered)


def test_the_answer_to_an_attempt_before_places_nothing() -> None:
    harness = running()
    (late,) = asked(register(harness, 0), PlaceJob)
    harness.ask(PauseJob(job="a"))
    confirm(harness, Order("stop"))
    harness.ask(ResumeJob(job="a"))
    confirm(harness, Order("start", "-1"))
    (second,) = asked(register(harness, 0), PlaceJob)
    assert second.key != late.key
    harness.step(Answered(late.key, Ok()))
    assert not harness.core.state.jobs[JobId("a")].placed
    harness.step(Answered(second.key, Ok()))
    assert harness.core.state.jobs[JobId("a")].placed


def test_one_death_has_all_ranks_of_a_job_that_sums_started_again() -> None:
    harness = running(restarts=1)
    placed(harness)
    died = WorkerExited(job="a", rank=1, node=NodeId("n1"), code=-9)
    effects = harness.ask(died)
    assert harness.job("a").state == "stopping"
    (timer,) = [e for e in effects if isinstance(e, StartTimer)]
    confirm(harness, Order("stop"))
    (start, *_) = [
        m for m in orders(harness.step(TimerFired(timer.key))) if isinstance(m, StartWorkers)
    ]
    assert (start.ranks, start.attempt) == ((0, 1), 1)
    assert harness.job("a").placement == 1


def test_the_end_of_a_job_releases_its_last_placement() -> None:
    harness = running()
    placed(harness)
    harness.ask(PauseJob(job="a"))
    confirm(harness, Order("stop"))
    harness.ask(ResumeJob(job="a"))
    confirm(harness, Order("start", "-1"))
    placed(harness)
    for rank in (0, 1):
        effects = harness.ask(
            WorkerExited(job="a", rank=rank, node=NodeId("n1"), code=0, result="{}", attempt=1024)
        )
    assert harness.job("a").state == "completed"
    (release,) = asked(effects, ReleaseJob)
    assert release.message == ReleaseJob(job="a", run=1)


def test_after_the_last_placement_number_nothing_is_added_up_any_more() -> None:
    harness = running()
    placed(harness)
    job = harness.core.state.jobs[JobId("a")]
    harness.core.state.change(job, harness.now_s, placement=RUNS_MAX)
    refused = harness.answer(RegisterJob(job="a", rank=0, tensors=TENSORS, update=SUM))
    assert isinstance(refused, Refused)
    assert refused.reason == "job a began 4000 attempts; submit it under another id"


def test_its_spec_is_placed_with_the_workers_that_it_has_now() -> None:
    """A job whose number of workers changes begins anew then: none joins or leaves meanwhile."""
    harness = running(workers_min=1, workers_max=3)
    message = placed(harness)
    assert message.spec == spec("a", update=SUM)
    assert not message.spec.elastic
