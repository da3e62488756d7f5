"""A test of device memory runs on the double, which needs nothing, and on a GPU where one is."""

import pytest

from slackwater.common.errors import ConfigRejected
from slackwater.common.transport.gpu import Device, device_named


def no_gpu() -> str:
    """Why there is no CUDA device here; empty: there is one."""
    try:
        device_named("cuda")
    except ConfigRejected as error:
        return str(error)
    return ""


@pytest.fixture(params=["double", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    name = str(request.param)
    if name == "cuda" and (why := no_gpu()):
        pytest.skip(f"no GPU here: {why}")
    return device_named(name)


@pytest.fixture
def gpu() -> Device:
    if why := no_gpu():
        pytest.skip(f"no GPU here: {why}")
    return device_named("cuda")
