"""The words of a job: what it may ask for, how its states follow each other, and what older records
mean."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.schemas.base import RUN_ATTEMPTS, NodeId
from slackwater.schemas.gpus import described, held
from slackwater.schemas.job_states import (
    HOLDING_STATES,
    STATE_SAID,
    TERMINAL_STATES,
    TRANSITIONS,
    WAITING_STATES,
    JobState,
)
from slackwater.schemas.jobs import JobRecord, JobSpec, upgraded
from slackwater.schemas.workers import StartWorkers, StopWorkers, WorkerExited

REFUSED = [
    ({"gpus_min": 2}, "gpus_min: given with gpus 0; give `gpus`"),
    ({"gpu_types": {"V100": 1.0}}, "gpu_types: given with gpus 0; give `gpus`"),
    ({"gpus": 4, "gpus_min": 5}, "gpus_min: 5, more than gpus 4; give at most 4"),
    ({"gpus": 4, "gpus_max": 3}, "gpus_max: 3, fewer than gpus 4; give at least 4"),
    ({"gpus": 4, "workers": 3}, "workers: 3 processes cannot share 4 GPUs (gpus) equally"),
    ({"gpus": 2, "workers": 4}, "workers: 4 processes cannot share 2 GPUs (gpus) equally"),
    ({"batch_max": 8}, "batch_size: 0 beside bounds 0 to 8; give the batch"),
    ({"batch_size": 4, "batch_min": 5}, "batch_min: 5, more than batch_size 4; give at most 4"),
    ({"batch_size": 4, "batch_max": 3}, "batch_max: 3, less than batch_size 4; give at least 4"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
def test_a_spec_that_contradicts_itself_is_refused_with_the_remedy(
    fields: dict[str, object], said: str
) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"id": "a", **fields}, JobSpec)
    assert said in str(caught.value)


def test_a_spec_without_gpus_is_written_as_before() -> None:
    """Version 0.2.0 reads what this one writes for a job that asks for nothing new."""
    record = msgspec.to_builtins(JobRecord(spec=JobSpec(id="a")))
    assert record == {"spec": {"id": "a", "update": {}}}


@given(st.integers(1, 64), st.integers(1, 16))
def test_a_job_has_a_process_for_each_equal_part_of_its_gpus(workers: int, each: int) -> None:
    spec = JobSpec(id="a", workers=workers, gpus=workers * each, gpus_max=2 * workers * each)
    assert spec.processes(spec.gpus) == workers
    assert spec.processes(each) == 1
    assert spec.gpu_bounds == (workers * each, 2 * workers * each)
    assert JobSpec(id="a", workers=workers).processes(workers) == workers


def test_states_are_told_apart_and_none_is_left_out() -> None:
    states = set(TRANSITIONS)
    assert states == set(STATE_SAID) == HOLDING_STATES | WAITING_STATES | TERMINAL_STATES
    assert not (HOLDING_STATES & WAITING_STATES) | (TERMINAL_STATES & HOLDING_STATES)
    reached: set[JobState] = {"pending"}
    for _ in states:
        reached |= {after for state in reached for after in TRANSITIONS[state]}
    assert reached == states
    for state in HOLDING_STATES | WAITING_STATES:
        assert TRANSITIONS[state] >= TERMINAL_STATES, "every job can end"
    for state in TERMINAL_STATES:
        assert TRANSITIONS[state] == {"pending"}, "and then only begin anew"


def test_a_record_of_an_earlier_version_holds_its_node_and_counts_runs_as_attempts() -> None:
    spec, node = JobSpec(id="a", workers=3), NodeId("n1")
    running = upgraded(JobRecord(spec=spec, state="running", node=node, run=2))
    assert running.allocation == ((node, 3),)
    assert running.attempt == 2
    ended = upgraded(JobRecord(spec=spec, state="failed", node=node, run=1))
    assert (ended.allocation, ended.attempt) == ((), 1)
    assert upgraded(running) == running


def test_processes_are_numbered_on_from_attempt_to_attempt() -> None:
    number = RUN_ATTEMPTS * 7 + 2
    exited = WorkerExited(job="a", rank=0, node=NodeId("n1"), code=1, attempt=number)
    start = StartWorkers(job="a", ranks=(0,), workers=1, program=("x",), attempts=(number,))
    assert exited.job_attempt == start.job_attempt == 7
    assert StopWorkers(job="a", run=3).last_attempt == 3
    assert StopWorkers(job="a", run=1, attempt=7).last_attempt == 7


def test_ranks_of_a_node_share_its_gpus_in_their_order() -> None:
    ids = tuple(f"n1/{n}" for n in range(4))
    start = StartWorkers(job="a", ranks=(2, 3), workers=4, program=("x",), gpu_ids=ids)
    assert start.gpus_of(2) == ids[:2]
    assert start.gpus_of(3) == ids[2:]
    fields = msgspec.to_builtins(start)
    for wrong, said in ((ids[:3], "3 GPUs for 2 ranks"), ((ids[0], ids[0]), "named twice")):
        with pytest.raises(msgspec.ValidationError, match=said):
            msgspec.convert({**fields, "gpu_ids": wrong}, StartWorkers)


def test_an_allocation_is_summed_and_written_for_people() -> None:
    allocation = ((NodeId("n1"), 4), (NodeId("n2"), 2))
    assert held(allocation) == 6
    assert described(allocation) == "n1:4,n2:2"
