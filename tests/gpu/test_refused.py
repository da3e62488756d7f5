"""A device that is not there is refused clearly, before anything is begun, with the remedy."""

from pathlib import Path
from typing import Any

import pytest

from slackwater.agent import Agent
from slackwater.agent.worker_bucket import check_gradient
from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.common.shell.config import load_config, write_config
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.common.transport import devices, gpu_cuda
from slackwater.common.transport.devices import device_named
from slackwater.schemas.tensors import TensorSpec
from slackwater.services.aggregator.config import AggregatorConfig
from slackwater.services.aggregator.shell import Aggregator


@pytest.fixture(autouse=True)
def without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ConfigRejected("a CUDA device needs cupy: pip install cupy-cuda13x, or cupy-cuda12x")

    monkeypatch.setattr(gpu_cuda, "_cupy", missing)
    monkeypatch.setattr(devices, "_devices", {})


async def begin(config: AggregatorConfig) -> None:
    Aggregator(config, SimWorld(1).client("a1"))


def test_an_aggregator_without_its_gpu_does_not_start(tmp_path: Path) -> None:
    config = AggregatorConfig(device="cuda:0", shm_path=str(tmp_path / "s"))
    with pytest.raises(ConfigRejected, match="pip install cupy-cuda13x"):
        run_simulated(begin(config))


def test_a_device_that_is_none_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    write_config(path, {"id": "a1", "device": "gpu0"})
    with pytest.raises(ConfigRejected, match="device"):
        load_config(path, AggregatorConfig)


def test_an_agent_without_its_gpu_does_not_start() -> None:
    with pytest.raises(ConfigRejected, match="pip install cupy-cuda13x"):
        Agent(job="j", tensors={"w": (3,)}, url="nats://127.0.0.1:1", device="cuda")


def test_a_gpu_array_given_to_an_agent_without_device_says_what_to_do() -> None:
    class OnGpu:
        __cuda_array_interface__ = {"version": 3}  # noqa: RUF012 (as programs have it)

    wrong = check_gradient(OnGpu(), TensorSpec(name="w", shape=(3,)), "float32")
    assert wrong == 'a OnGpu, not a numpy array; give the Agent device="cuda"'


def test_an_array_of_another_device_is_refused() -> None:
    with pytest.raises(Rejected, match="not an array on device fake"):
        device_named("fake").wrap([1.0])


def test_the_fake_gpus_former_name_still_means_it() -> None:
    assert device_named("double") is device_named("fake")
    assert AggregatorConfig(device="double").device == "double"
