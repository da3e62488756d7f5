"""A job's mode in a replay: from the trace to its spec, and what can be proven of it."""

import msgspec
import pytest

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.replay.proof import mismatch
from slackwater.loadgen.replay.workload import Workload, emulated, from_trace
from slackwater.loadgen.traces.record import Scalar, TraceJob
from slackwater.schemas.jobs import JobRecord


def replayed(**extra: Scalar) -> Workload:
    row = TraceJob(id="a", submit_s=0.0, gpus=2, duration_s=60.0, model="alexnet", extra=extra)
    return from_trace([row], time_scale=1.0, compute_scale=1.0, bytes_scale=0.1, seed=0)


def test_a_trace_says_the_mode_of_its_jobs() -> None:
    (job,) = replayed().jobs
    assert (job.spec.consistency, job.spec.staleness) == ("synchronous", 0)
    (job,) = replayed(consistency="stale-synchronous", staleness="4").jobs
    assert (job.spec.consistency, job.spec.staleness) == ("stale-synchronous", 4)


def test_workers_ask_for_a_gpu_each_where_a_policy_gives_them() -> None:
    assert [job.spec.gpus for job in replayed().jobs] == [0]
    (job,) = replayed().with_gpus().jobs
    assert (job.spec.workers, job.spec.gpus) == (2, 2)


@pytest.mark.parametrize("extra", [{"consistency": "eventual"}, {"staleness": "many"}])
def test_a_mode_that_is_none_is_refused(extra: dict[str, str]) -> None:
    with pytest.raises(Rejected, match=r"job a of the trace: consistency .*staleness"):
        replayed(**extra)


def test_parameters_that_depend_on_who_comes_first_are_not_called_equal() -> None:
    spec = emulated(
        "j", "alexnet", workers=2, servers=1, iterations=3, compute_s=0.0, bytes_scale=0.01,
        seed=0, consistency="asynchronous",
    )  # fmt: skip
    results = {
        str(rank): msgspec.json.encode({"iterations": 3, "digest": str(rank)}).decode()
        for rank in range(2)
    }
    why = mismatch(JobRecord(spec=spec, results=results))
    assert why == "job j is asynchronous: its parameters depend on who comes first"
    short = mismatch(JobRecord(spec=spec, results={"0": '{"iterations": 2, "digest": ""}'}))
    assert short is not None
    assert "2 updates were applied" in short
