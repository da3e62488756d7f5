"""Jobs that go back to a mark, as the master sees them: what ends, what is dropped and told."""

from typing import Any

import pytest
from tests.unit.services.master.test_master_core import Harness, facts, orders, spec, submitted
from tests.unit.services.master.test_sums import TENSORS, asked, confirm

from slackwater.common.base.effects import Answered, Effect
from slackwater.schemas.base import RUN_ATTEMPTS, RUNS_MAX, ClusterId, JobId, NodeId, Ok, Refused
from slackwater.schemas.cluster import ClusterReport, LostTables
from slackwater.schemas.job_requests import (
    KeepMark,
    PauseJob,
    RegisterJob,
    RerunJob,
    ResumeJob,
    SubmitJob,
)
from slackwater.schemas.placement import PlaceJob, ReleaseJob
from slackwater.schemas.workers import StartWorkers, StopWorkers, WorkerExited
from slackwater.services.master.keys import Order, OrderKey

LOST = "tables of it are lost with a1"
FIELDS: dict[str, Any] = {
    "consistency": "asynchronous", "recover": "rollback", "save_to": "/s", "start_from": "/begun",
    "workers": 1, "restarts": 3,
}  # fmt: skip


def running() -> Harness:
    harness = Harness()
    submitted(harness, "a", **FIELDS)
    harness.node()
    harness.report("c0", 4.0)
    confirm(harness, Order("start"))
    assert place(harness).spec.start_from == "/begun"
    return harness


def place(harness: Harness) -> PlaceJob:
    effects = harness.ask(RegisterJob(job="a", rank=0, tensors=TENSORS))
    (request,) = asked(effects, PlaceJob)
    harness.step(Answered(request.key, Ok()))
    assert isinstance(request.message, PlaceJob)
    return request.message


def told(harness: Harness, run: int = 0, lost: str = LOST) -> list[Effect]:
    """The controller's next report."""
    tables = {JobId("a"): LostTables(run=run, what=lost)} if lost else {}
    report = ClusterReport(
        cluster=ClusterId("c0"), free_cpu=4.0, aggregators=(), jobs=(JobId("a"),),
        lost=tables, at_s=harness.now_s,
    )  # fmt: skip
    return harness.see(report)


def keep(harness: Harness, mark: str, attempt: int = 0) -> object:
    return harness.answer(KeepMark(job="a", attempt=attempt, mark=mark))


def test_it_begins_anew_with_its_newest_mark_under_the_next_placement() -> None:
    harness = running()
    assert keep(harness, "mark-1") == keep(harness, "mark-2") == Ok()
    harness.restart()
    effects = told(harness)
    assert facts(effects) == ["rolled-back"]
    (stop,) = (order for order in orders(effects) if isinstance(order, StopWorkers))
    assert 0.0 < stop.grace_s < 1.0, "nothing that it could save counts"
    assert not told(harness), "it is on its way"
    exited = WorkerExited(job="a", rank=0, node=NodeId("n1"), code=-9)
    harness.ask(exited)
    effects = confirm(harness, Order("stop"))
    (release,) = asked(effects, ReleaseJob)
    assert release.message == ReleaseJob(job="a", run=0)
    (start,) = (order for order in orders(effects) if isinstance(order, StartWorkers))
    assert start.env["SLACKWATER_FROM"] == "/s/mark-2"
    assert start.env["SLACKWATER_SAVE_TO"] == "/s"
    assert float(start.env["SLACKWATER_SAVE_EVERY_S"]) == 60.0
    record = harness.job("a")
    assert (record.state, record.placement, record.rolls_back) == ("starting", 1, False)
    assert record.restarts == {}, "it is not its own doing"
    confirm(harness, Order("start", "-1"))
    assert not told(harness), "a report of the placement before"
    again = place(harness)
    assert (again.run, again.spec.start_from) == (1, "/s/mark-2")


def test_lost_before_its_first_mark_it_begins_where_it_began() -> None:
    harness = running()
    assert facts(told(harness)) == ["rolled-back"]
    assert harness.job("a").reason == f"{LOST}: it goes back to where it began"
    effects = confirm(harness, Order("stop"))
    (start,) = (order for order in orders(effects) if isinstance(order, StartWorkers))
    assert start.env["SLACKWATER_FROM"] == "/begun"


def test_a_mark_of_a_process_that_is_not_its_rank_0_any_more_does_not_count() -> None:
    harness = running()
    assert keep(harness, "mark-1") == Ok()
    told(harness)
    for attempt in (0, RUN_ATTEMPTS):
        late = keep(harness, "mark-9", attempt)
        assert isinstance(late, Refused)
        assert "not its rank 0 any more" in late.reason
    confirm(harness, Order("stop"))
    assert isinstance(keep(harness, "mark-9"), Refused)
    assert keep(harness, "mark-3", RUN_ATTEMPTS) == Ok()
    assert harness.job("a").mark == "/s/mark-3"
    missing = harness.answer(KeepMark(job="b", attempt=0, mark="mark-1"))
    assert isinstance(missing, Refused)
    assert "there is no job b" in missing.reason


def test_a_paused_job_goes_back_without_being_started() -> None:
    harness = running()
    keep(harness, "mark-1")
    harness.ask(PauseJob(job="a"))
    confirm(harness, Order("stop"))
    assert facts(told(harness)) == ["rolled-back"]
    record = harness.job("a")
    assert (record.state, record.placement, record.begins_with) == ("paused", 1, "/s/mark-1")
    harness.ask(ResumeJob(job="a"))
    confirm(harness, Order("start", "-1"))
    assert place(harness).spec.start_from == "/s/mark-1"


def test_a_job_that_pauses_while_its_tables_are_lost_stays_paused() -> None:
    harness = running()
    keep(harness, "mark-1")
    harness.ask(PauseJob(job="a"))
    told(harness)
    confirm(harness, Order("stop"))
    record = harness.job("a")
    assert (record.state, record.begins_with) == ("paused", "/s/mark-1")


@pytest.mark.parametrize("lost", ["", LOST])
def test_a_job_that_has_its_result_or_lost_nothing_goes_on(lost: str) -> None:
    harness = running()
    if lost:
        harness.ask(WorkerExited(job="a", rank=0, node=NodeId("n1"), code=0, result="1"))
    assert not facts(told(harness, lost=lost))


def test_its_next_run_begins_where_the_first_one_did() -> None:
    harness = running()
    keep(harness, "mark-1")
    told(harness)
    confirm(harness, Order("stop"))
    confirm(harness, Order("start", "-1"))
    assert place(harness).spec.start_from == "/s/mark-1"
    exited = WorkerExited(job="a", rank=0, node=NodeId("n1"), code=78, attempt=RUN_ATTEMPTS)
    harness.ask(exited)
    assert harness.job("a").state == "failed"
    for verb in ("stop", "release"):
        for named in [k for k in harness.core.state.jobs[JobId("a")].asked if k.verb == verb]:
            harness.step(Answered(OrderKey(JobId("a"), named), Ok()))
    harness.answer(RerunJob(job="a", run=1))
    record = harness.job("a")
    assert (record.run, record.mark, record.begins_with) == (1, "", "")


def test_as_often_as_a_job_may_be_placed() -> None:
    harness = running()
    job = harness.core.state.jobs[JobId("a")]
    harness.core.state.change(job, harness.now_s, placement=RUNS_MAX)
    told(harness, run=RUNS_MAX)
    assert harness.job("a").state == "failed"
    assert f"which it did {RUNS_MAX} times" in harness.job("a").reason


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"save_to": ""}, "recover: rollback without a folder to go back to; give save_to"),
        ({"save_every_s": 0.0}, "recover: rollback beside save_every_s 0; give seconds"),
        ({"save_fraction": 0.5}, "recover: rollback beside save_fraction 0.5; leave that out"),
        ({"consistency": "synchronous"}, "recover: rollback of a job that is not an elastic"),
    ],
)
def test_a_job_that_cannot_go_back(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        SubmitJob(spec=spec("a", **{**FIELDS, **fields}))


def test_a_mark_whose_folder_would_have_too_long_a_name_is_refused() -> None:
    """It broke the master's core: its record could not be stored."""
    harness = Harness()
    submitted(harness, "a", **(FIELDS | {"save_to": "/" + "s" * 4090}))
    harness.node()
    harness.report("c0", 4.0)
    confirm(harness, Order("start"))
    place(harness)
    refused = keep(harness, "mark-1")
    assert isinstance(refused, Refused)
    assert "save_to" in refused.reason
    assert harness.job("a").mark == ""
