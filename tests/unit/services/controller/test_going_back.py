"""Jobs that go back to a mark, as their controller sees them: nothing of them is found or hosted
any more once a part is lost, and the master is told until they are placed anew."""

from typing import Any

import msgspec
import pytest
from tests.unit.services.controller.harness import Harness, Pool, last, placed

from slackwater.schemas.base import CONFLICT, AggregatorId, JobId, Message, Ok, Refused
from slackwater.schemas.checkpoints import CheckpointJob, CheckpointProgress, MarkJob
from slackwater.schemas.placement import HostBuckets, Located, LocateJob, PlaceJob, ReleaseJob

LOCATE = LocateJob(job="j", rank=0, attempt=0)
GOES_BACK: dict[str, Any] = {
    "consistency": "asynchronous", "recover": "rollback", "save_to": "/s", "program": ("p",),
}  # fmt: skip


def message(**fields: Any) -> PlaceJob:
    known = placed("j", 2)
    spec = msgspec.structs.replace(known.spec, **{**GOES_BACK, **fields})
    return msgspec.structs.replace(known, spec=spec)


def trains(**fields: Any) -> Harness:
    harness = Harness(Pool(4))
    assert harness.ask(message(**fields)) == Ok()
    harness.profile("j", [0.02, 0.01])
    harness.migrated("j")
    assert isinstance(harness.ask(LOCATE), Located)
    return harness


def forgets(harness: Harness, aggregator: str) -> None:
    """It was started anew, without the memory that it had."""
    id = AggregatorId(aggregator)
    harness.pass_time(2)
    harness.pool.held[id].clear()
    harness.pool.incarnations[id] += 1
    harness.pass_time(3)


def is_lost(harness: Harness) -> str:
    lost = harness.report().lost.get(JobId("j"))
    return lost.what if lost is not None else ""


@pytest.mark.parametrize("stays_away", [False, True])
def test_what_was_lost_is_told_and_nothing_of_it_is_hosted(stays_away: bool) -> None:
    harness = trains()
    assert is_lost(harness) == ""
    home = harness.homes("j")[0]
    before = harness.homes("j")
    sent = len(harness.sent)
    if stays_away:
        harness.pass_time(int(harness.config.rehost_after_s) + 5, home)
    else:
        forgets(harness, home)
    assert is_lost(harness) == f"tables of it are lost with {home}"
    assert harness.homes("j") == before
    assert not [each for each in harness.sent[sent:] if isinstance(each, HostBuckets)]
    assert "rehosted" not in harness.said("j")
    refused = harness.ask(LOCATE)
    assert isinstance(refused, Refused)
    assert "it goes back to a mark" in refused.reason
    assert refused.retry_after_s > 0.0, "the master ends its processes"


def test_the_next_placement_is_a_job_like_any_other() -> None:
    harness = trains()
    home = harness.homes("j")[0]
    forgets(harness, home)
    assert is_lost(harness)
    assert harness.ask(ReleaseJob(job="j", run=0)) == Ok()
    harness.pass_time(3)
    again = message(start_from="/s/mark-1")
    assert harness.ask(msgspec.structs.replace(again, run=1)) == Ok()
    harness.pass_time(2)
    assert last(harness.sent, HostBuckets).restore == "/s/mark-1"
    assert is_lost(harness) == ""
    assert harness.core.state.jobs[JobId("j")].record.run == 1
    assert isinstance(harness.ask(LOCATE), Located)


def test_a_controller_that_comes_after_finds_the_loss_again() -> None:
    harness = trains()
    forgets(harness, harness.homes("j")[0])
    with pytest.MonkeyPatch.context() as patched:  # Hearts beat a little later.
        patched.setattr(harness, "beat", lambda: None)
        harness.restart()
    harness.pass_time(3)
    assert is_lost(harness)
    assert "rehosted" not in harness.said("j")


def test_any_other_job_begins_anew_where_it_lost_something() -> None:
    harness = trains(recover="partial")
    forgets(harness, harness.homes("j")[0])
    assert "rehosted" in harness.said("j")
    assert is_lost(harness) == ""
    assert isinstance(harness.ask(LOCATE), Located)


def test_its_program_says_when_it_is_saved_and_nobody_else_does() -> None:
    harness = trains(save_every_s=1.0)
    harness.pass_time(5)
    assert not [each for each in harness.sent if "checkpoint" in type(each).__module__]
    made = harness.ask(MarkJob(job="j", mark="mark-7"))
    assert isinstance(made, CheckpointProgress)
    assert (made.request, made.phase) == ("mark-7", "looking")
    job = harness.core.state.jobs[JobId("j")]
    assert job.checkpoint is not None
    assert job.checkpoint.folder == "/s/mark-7"
    assert harness.ask(MarkJob(job="j", mark="mark-7")) == made, "the same again asks how far it is"


@pytest.mark.parametrize("asked", [MarkJob(job="j", mark="m"), MarkJob(job="k", mark="m")])
def test_a_mark_of_a_job_that_does_not_go_back(asked: MarkJob) -> None:
    refused: Message = trains(recover="partial").ask(asked)
    assert isinstance(refused, Refused)
    assert ("does not go back" if asked.job == "j" else "has no job k") in refused.reason
    if asked.job == "j":
        assert refused.status == CONFLICT
    saved = trains(recover="partial").ask(CheckpointJob(job="j", request="m", folder="/f"))
    assert isinstance(saved, CheckpointProgress), "anybody else's order is taken"
