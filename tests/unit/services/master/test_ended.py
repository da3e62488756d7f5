"""Jobs whose records are dropped: none of them runs a second time."""

import msgspec
import pytest
from tests.unit.services.master.test_master_core import Harness, spec, submitted

from slackwater.common.base.limits import RETRY_BUDGET_S
from slackwater.schemas.base import JobId, Message, Ok, Refused
from slackwater.schemas.job_requests import (
    CancelJob,
    DeleteJob,
    JobAccepted,
    RegisterJob,
    SubmitJob,
)
from slackwater.schemas.jobs import ENDED_TOGETHER_MAX, EndedJobs, JobRecord
from slackwater.services.master import ended
from slackwater.services.master.ended import KEPT_S, Ended, digest


def dropped(kept: int = 1, jobs: int = 3) -> Harness:
    """Let jobs j0, j1 and so on end, of which the last `kept` have their records."""
    harness = Harness(jobs_kept_max=kept)
    for number in range(jobs):
        harness.now_s += 1.0
        submitted(harness, f"j{number}")
        harness.ask(CancelJob(job=f"j{number}"))
    assert len(harness.stored["jobs"]) == kept
    return harness


def ids(harness: Harness) -> list[str]:
    found: list[str] = []
    for record in harness.stored["ended"].values():
        assert isinstance(record, EndedJobs)
        found += [job.id for job in record.jobs]
    return found


def reason(answer: Message) -> str:
    assert isinstance(answer, Refused)
    return answer.reason


def test_a_submission_that_comes_again_after_its_record_is_gone_does_not_run_again() -> None:
    harness = dropped()
    for _ in range(2):
        answer = harness.answer(SubmitJob(spec=spec("j0")))
        assert isinstance(answer, JobAccepted)
        assert answer.known is not None
        assert (answer.known.state, answer.known.spec.id) == ("cancelled", "j0")
        assert set(harness.stored["jobs"]) == {"j2"}
        harness.restart()


def test_a_cancel_that_comes_again_after_its_record_is_gone_is_done() -> None:
    harness = dropped()
    assert isinstance(harness.answer(CancelJob(job="j0")), Ok)
    assert "there is no job never" in reason(harness.answer(CancelJob(job="never")))


def test_another_job_under_that_id_is_refused_until_no_client_can_still_try() -> None:
    harness = dropped()
    other = SubmitJob(spec=spec("j0", workers=5))
    said = reason(harness.answer(other))
    assert "job j0 ended a while ago" in said
    assert "jobs_kept_max" in said
    harness.tick(after_s=KEPT_S - 10.0)
    assert "or this one again 10 minutes after its end" in reason(harness.answer(other))
    harness.tick(after_s=10.0)
    assert harness.stored["ended"] == {}
    assert isinstance(harness.answer(other), JobAccepted)
    assert KEPT_S >= 10 * RETRY_BUDGET_S


def test_an_agent_that_registers_late_does_not_begin_its_job_anew() -> None:
    harness = dropped()
    by_hand = msgspec.structs.replace(spec("j1"), program=())
    answer = harness.answer(RegisterJob(job=JobId("j1"), rank=0, tensors=(), spec=by_hand))
    assert "job j1 ended a while ago" in reason(answer)
    assert "j1" not in harness.stored["jobs"]


def test_a_job_that_its_user_deleted_leaves_its_id() -> None:
    harness = Harness(jobs_kept_max=1)
    submitted(harness, "a")
    harness.ask(CancelJob(job="a"))
    harness.ask(DeleteJob(job="a"))
    submitted(harness, "b")
    harness.ask(CancelJob(job="b"))
    assert set(harness.stored["jobs"]) == {"b"}
    assert harness.stored["ended"] == {}


def test_a_master_that_was_killed_before_it_dropped_a_record_keeps_its_id_first() -> None:
    """The job is in its tenant's sums, and its id is not kept yet."""
    harness = Harness(jobs_kept_max=1)
    submitted(harness, "a")
    harness.ask(CancelJob(job="a"))
    record = harness.job("a")
    submitted(harness, "b")
    harness.ask(CancelJob(job="b"))
    harness.stored["jobs"]["a"] = record
    harness.stored["ended"].clear()
    harness.restart()
    assert set(harness.stored["jobs"]) == {"b"}
    assert ids(harness) == ["a"]


def test_no_more_ids_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "KEPT_MAX", 2)
    harness = dropped(jobs=3)
    answer = harness.answer(SubmitJob(spec=spec("new")))
    assert isinstance(answer, Refused)
    assert 0.0 < answer.retry_after_s <= KEPT_S
    assert "2 jobs ended within the last 10 minutes" in answer.reason
    harness.tick(after_s=answer.retry_after_s)
    assert isinstance(harness.answer(SubmitJob(spec=spec("new"))), JobAccepted)


def test_many_ids_are_kept_in_few_records_which_go_when_their_last_one_is_old() -> None:
    jobs, kept_s = 3 * ENDED_TOGETHER_MAX + 5, KEPT_S
    kept, stored = Ended(), dict[str, EndedJobs]()
    for number in range(jobs):
        record = JobRecord(spec=spec(f"j{number}"), state="completed", finished_s=float(number))
        found = kept.add(record, float(number))
        assert found is not None
        stored[found[0]] = found[1]
        assert kept.add(record, float(number)) is None  # Once is enough.
    assert (len(kept), len(stored)) == (jobs, 4)
    again = Ended()
    again.recover(dict(stored))
    assert len(again) == jobs
    assert again.known(spec("j0")) is not None
    assert again.expired(kept_s + ENDED_TOGETHER_MAX - 1.5) == []
    assert again.expired(kept_s + ENDED_TOGETHER_MAX - 1.0) == ["000000000001"]
    assert again.known(spec("j0")) is None
    record = JobRecord(spec=spec("new"), state="completed", finished_s=900.0)
    found = again.add(record, 900.0)
    assert found is not None
    assert (found[0], len(found[1].jobs)) == ("000000000004", 6)  # The last one has room.
    assert len(again.expired(2000.0)) == 3
    assert len(again) == 0


def test_specs_that_differ_have_different_digests() -> None:
    assert digest(spec("a")) == digest(spec("a")) != digest(spec("a", workers=5))
