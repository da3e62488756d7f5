"""The time in which a job's processes run, apart from the time in which it holds GPUs."""

import msgspec
import pytest

from slackwater.schemas.base import NodeId
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.services.master.gangs import used
from slackwater.services.master.snapshot import Capacity, Snapshot

RECORD = JobRecord(
    spec=JobSpec(id="a", gpus=2, workers=2, program=("train",)),
    state="starting",
    submitted_s=100.0,
    started_s=110.0,
    since_s=110.0,
    allocation=((NodeId("n1"), 2),),
    run_s=8.0,
    worked_s=5.0,
)
RUNNING = msgspec.structs.replace(RECORD, state="running", begun_s=113.0)
ROOM = (Capacity(NodeId("n1"), 4, "fake"),)


def test_a_job_works_from_when_all_its_processes_run() -> None:
    found = used(RUNNING, 120.0)
    assert found["run_s"] == 18.0, "it held GPUs for 10 s"
    assert found["worked_s"] == 12.0, "and worked for 7"
    assert found["begun_s"] == 0.0


def test_a_job_that_is_stopped_before_it_begins_has_not_worked() -> None:
    found = used(RECORD, 120.0)
    assert (found["run_s"], found["worked_s"]) == (18.0, 5.0)


def test_a_policy_that_is_told_durations_sees_the_work_that_is_left() -> None:
    snapshot = Snapshot({"a": 50.0})
    snapshot.show(RECORD)
    snapshot.view(ROOM, 111.0)
    snapshot.show(RUNNING)
    view = snapshot.view(ROOM, 113.0)
    assert view.jobs["a"].remaining_s(120.0) == pytest.approx(38.0)
    assert not view.changed, "that a job began, as it had to, changes no plan"
