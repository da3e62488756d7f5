"""Nodes that take no more jobs: what runs there goes on, or goes elsewhere."""

from tests.unit.services.master.test_gpu_dispatch import GpuHarness, started
from tests.unit.services.master.test_master_core import Harness, spec

from slackwater.schemas.base import NodeId
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.job_requests import SubmitJob


def tell(harness: Harness, node: str, cordoned: bool, gpus: int = 0) -> list[object]:
    told = tuple(Gpu(index=n, id=f"{node}/{n}", type="fake") for n in range(gpus))
    beat = WorkerHeartbeat(
        service="worker", id=node, incarnation=0, at_s=harness.now_s, node=NodeId(node), slots=8,
        gpus=told, cordoned=cordoned,
    )  # fmt: skip
    return list(harness.see(beat))


def test_a_job_without_gpus_runs_on_and_the_next_goes_elsewhere() -> None:
    harness = Harness()
    tell(harness, "n1", False)
    harness.ask(SubmitJob(spec=spec("a")))
    assert harness.job("a").node == "n1"
    tell(harness, "n1", True)
    assert harness.job("a").state in ("starting", "running")
    harness.ask(SubmitJob(spec=spec("b")))
    assert harness.job("b").state == "pending"
    tell(harness, "n1", False)
    assert harness.job("b").node == "n1"


def test_a_gang_moves_once_it_has_saved() -> None:
    harness = GpuHarness()
    harness.submit("a", 2)
    ((node, _),) = harness.job("a").allocation
    other = {"n1": "n2", "n2": "n1"}[node]
    harness.confirm("start/a")
    assert harness.job("a").state == "running"
    tell(harness, node, True, gpus=2)
    tell(harness, other, False, gpus=2)
    harness.tick()
    assert harness.job("a").state == "stopping"
    effects = harness.confirm("stop/a")
    assert started(effects) == {f"{other} a": (f"{other}/0", f"{other}/1")}


def test_a_gang_that_may_not_be_paused_stays() -> None:
    harness = GpuHarness()
    harness.submit("a", 2, preemptible=False)
    harness.confirm("start/a")
    tell(harness, "n1", True, gpus=2)
    harness.tick()
    assert harness.job("a").state == "running"
