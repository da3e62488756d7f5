"""The skew of a model: learned of the tensors that Agents register, kept, and used by Tiresias."""

import pytest
from tests.unit.services.master.test_gpu_dispatch import GpuHarness
from tests.unit.services.master.test_master_core import spec

from slackwater.loadgen import models
from slackwater.loadgen.simulator.gpu.workload import SKEWS
from slackwater.schemas.base import JobId
from slackwater.schemas.gpus import NodeAllocation
from slackwater.schemas.job_requests import CancelJob, RegisterJob, SubmitJob
from slackwater.schemas.tensors import largest_share
from slackwater.services.master.scheduling.view import JobView

SPREAD = (("n1", 1), ("n2", 1))


@pytest.mark.parametrize("model", sorted(SKEWS))
def test_registered_tensors_have_the_skew_that_the_simulator_assumes(model: str) -> None:
    """Table 3.3 of Tiresias has three digits."""
    assert largest_share(models.tensors(model, 1.0)) == pytest.approx(SKEWS[model], abs=5e-4)
    assert largest_share(()) == 0.0


def submit(harness: GpuHarness, id: str, model: str, gpus: int) -> None:
    harness.now_s += 1.0
    harness.ask(SubmitJob(spec=spec(id, model=model, workers=gpus, gpus=gpus)))


def register(harness: GpuHarness, id: str, model: str) -> None:
    tensors = models.tensors(model, 0.01)
    harness.ask(RegisterJob(job=JobId(id), rank=0, tensors=tensors))


def seen(harness: GpuHarness, id: str) -> JobView:
    return harness.core.state.gpus.snapshot.jobs[JobId(id)]


def test_a_model_is_known_by_the_first_job_that_trains_it_also_after_a_restart() -> None:
    harness = GpuHarness(gpus=1)
    submit(harness, "first", "vgg16", 2)
    submit(harness, "waits", "vgg16", 2)
    submit(harness, "other", "resnet50", 2)
    assert seen(harness, "waits").skew == 0.0
    register(harness, "first", "vgg16")
    skew = largest_share(models.tensors("vgg16", 0.01))
    for _ in range(2):
        assert [seen(harness, id).skew for id in ("first", "waits", "other")] == [skew, skew, 0.0]
        harness.restart()
    harness.ask(CancelJob(job="first"))
    submit(harness, "later", "vgg16", 2)
    assert seen(harness, "later").skew == skew


def placed(model: str, **config: object) -> NodeAllocation:
    """Where a job of two GPUs of the model lies beside one that holds a GPU of two nodes' four."""
    harness = GpuHarness(gpu_policy="tiresias-las", **config)
    submit(harness, "first", model, 1)
    register(harness, "first", model)
    submit(harness, "second", model, 2)
    return harness.job("second").allocation


def test_tiresias_keeps_skewed_models_together_on_a_running_cluster() -> None:
    """Others take what is left over; with a limit above every skew, so do skewed ones."""
    assert placed("vgg16") == (("n2", 2),)
    assert placed("resnet50") == SPREAD
    assert placed("vgg16", gpu_policy_settings={"pack_limit": "0.9"}) == SPREAD


def test_nobody_learns_from_a_speed_that_is_not_known() -> None:
    """Regression: live jobs counted as running at full speed wherever they lay, so that PACKLIMIT
    rose until skewed models were spread, too."""
    harness = GpuHarness(gpu_policy="tiresias-las")
    submit(harness, "a", "vgg16", 1)
    assert seen(harness, "a").speed == 0.0
