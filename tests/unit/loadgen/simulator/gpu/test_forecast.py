"""The end of a job that runs or waits, foretold from what it and jobs like it have done."""

from typing import Any

import pytest
from msgspec.structs import replace

from slackwater.loadgen.fidelity.foretold import Told, middle_error
from slackwater.loadgen.simulator.gpu.estimates import Estimates
from slackwater.loadgen.simulator.gpu.what_if import Forecast, forecast
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import NodeInfo, WorkerHeartbeat
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.progress import JobProgress
from slackwater.schemas.scheduling import PolicyInfo

NOW_S = 1_700_000_000.0


def job(
    id: str, *, on: int = 0, model: str = "vgg19", gpus: int = 1, within: Any = "", **fields: Any
) -> JobRecord:
    """`on`: GPUs of node n1 that it holds."""
    spec = JobSpec(
        id=id, model=model, gpus=gpus, workers=gpus, iterations=fields.pop("iterations", 100),
        within=within, time_limit_s=fields.pop("time_limit_s", 0.0), program=("train",),
    )  # fmt: skip
    held: dict[str, Any] = {"allocation": ((NodeId("n1"), on),), "state": "running"} if on else {}
    return JobRecord(spec=spec, submitted_s=NOW_S - 60.0, **held, **fields)


def told(iteration: int, ago_s: float = 0.0, **more: Any) -> JobProgress:
    return JobProgress(iteration=iteration, iterations=100, updated_s=NOW_S - ago_s, **more)


def remaining_s(of: JobRecord, *others: JobRecord, **progress: JobProgress) -> float | None:
    known = {JobId(id): each for id, each in progress.items()}
    return Estimates((of, *others), known, NOW_S).remaining_s(of)


def test_a_paused_job_has_its_own_speed() -> None:
    """Forty iterations took it twenty seconds; sixty are left."""
    assert remaining_s(job("a", run_s=20.0), a=told(40)) == pytest.approx(30.0)


def test_a_running_job_has_gone_on_since_it_told() -> None:
    """It told forty iterations after 20 s, and has worked 2 s since."""
    of = job("a", on=1, since_s=NOW_S - 22.0)
    assert remaining_s(of, a=told(40, ago_s=2.0)) == pytest.approx(28.0)


def test_a_job_that_never_ran_has_the_speed_of_its_model_on_the_next_number_of_gpus() -> None:
    small = job("b", run_s=20.0, gpus=1)
    large = job("c", run_s=60.0, gpus=8)
    other = job("d", run_s=1.0, model="alexnet")
    known = {"b": told(40), "c": told(40), "d": told(40)}
    assert remaining_s(job("a", gpus=4), small, large, other, **known) == pytest.approx(50.0)
    assert remaining_s(job("a", gpus=8), small, large, other, **known) == pytest.approx(150.0)
    assert remaining_s(job("a", model="bert"), small, **known) is None


def test_a_time_limit_is_better_than_nothing() -> None:
    assert remaining_s(job("a", run_s=20.0, time_limit_s=50.0)) == pytest.approx(30.0)
    assert remaining_s(job("a")) is None


def node(gpus: int, name: str = "n1") -> NodeInfo:
    beat = WorkerHeartbeat(
        service="worker", id=name, incarnation=1, at_s=NOW_S, node=NodeId(name), slots=8,
        gpus=tuple(Gpu(index=n, id=f"{name}/{n}", type="fake") for n in range(gpus)),
    )  # fmt: skip
    return NodeInfo(alive=True, heartbeat=beat)


def test_a_job_that_waits_ends_after_those_before_it() -> None:
    """The first ends in 12.5 s; the second has fifty seconds of work, as its model shows."""
    first = job("a", on=1, since_s=NOW_S - 37.5)
    progress = {JobId("a"): told(75, speed=2.0, eta_s=12.5)}
    foretold = forecast(
        [first, job("b")], progress, [node(1)], NOW_S, PolicyInfo(policy="fifo"), 0.0
    )  # fmt: skip
    assert foretold.ends_s == pytest.approx({"a": 12.5, "b": 62.5}, abs=0.01)


def test_nothing_is_foretold_of_jobs_that_cannot_be_played() -> None:
    held = job("a", held=True)
    assert forecast([held], {}, [node(1)], NOW_S, PolicyInfo(policy="fifo")) == Forecast()


def test_a_forecast_tells_whose_work_is_assumed() -> None:
    """It told an hour of work for a job that told nothing, where nothing had ended."""
    first, silent = job("a", on=1, iterations=1), job("b", iterations=1)
    ended = replace(job("c", iterations=1, run_s=7.0), state="completed")
    policy = PolicyInfo(policy="fifo")
    alone = forecast([first, silent], {}, [node(1)], NOW_S, policy)
    assert alone.assumed == {"a", "b"}
    assert not alone.compared
    beside = forecast([first, silent, ended], {}, [node(1)], NOW_S, policy)
    assert beside.assumed == {"a", "b"}
    assert beside.compared == 1
    assert beside.ends_s == pytest.approx({"a": 7.0, "b": 14.0}, abs=0.01)


def test_a_job_that_no_node_can_take_hides_no_other_end() -> None:
    """Three GPUs of one node are asked for, and each has two: `slackwater job` failed then, for
    every job with GPUs of the cluster."""
    records = [job("large", gpus=3, within="node"), job("a", on=1, since_s=NOW_S - 10.0)]
    progress = {JobId("a"): told(75, eta_s=12.5)}
    foretold = forecast(
        records, progress, [node(2), node(2, "n2")], NOW_S, PolicyInfo(policy="fifo")
    )  # fmt: skip
    assert foretold.ends_s == pytest.approx({"a": 12.5}, abs=0.01)


def test_the_error_is_the_median_of_what_was_left() -> None:
    told = {
        str(n): Told(left_s=10.0, foretold_s=10.0 + n, life_s=20.0) for n in (0, 1, 5)
    }  # fmt: skip
    assert middle_error(told) == pytest.approx(0.1)
    assert middle_error({}) is None
