"""A test of device memory runs on the fake GPU, which needs nothing, and on a GPU where one is."""

from pathlib import Path

import pytest
from tests.gpu.fake_cupy import fake_device

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.transport.devices import device_named
from slackwater.common.transport.gpu import Device


def no_gpu() -> str:
    """Why there is no CUDA device here; empty: there is one."""
    try:
        device_named("cuda")
    except ConfigRejected as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=["fake", "fake-cuda", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernel_folder: Path
) -> Device:
    """`fake-cuda`: our code for CUDA, on a cupy whose device is the heap."""
    name = str(request.param)
    if name == "fake-cuda":
        made: Device = fake_device(monkeypatch, kernel_folder)
        return made
    if name == "cuda" and (why := no_gpu()):
        pytest.skip(f"no GPU here: {why}")
    return device_named(name)


@pytest.fixture
def gpu() -> Device:
    if why := no_gpu():
        pytest.skip(f"no GPU here: {why}")
    return device_named("cuda")
