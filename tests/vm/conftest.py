"""Tests that need an RDMA device, hence mostly run in the guest of `make vm-test`; elsewhere they
are skipped with the reason. What other folders' tests are made of is borrowed, not repeated."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from slackwater.common.transport.verbs import device
from slackwater.common.transport.verbs.library import why_not

TESTS = Path(__file__).resolve().parent.parent


def borrow(path: str) -> ModuleType:
    """Another folder's conftest, under a name of its own."""
    name = "borrowed_" + path.replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, TESTS / path / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses look there.
    spec.loader.exec_module(module)
    return module


transports = borrow("unit/common/transport")
lab_of_aggregators = borrow("integration/aggregator")
lab = lab_of_aggregators.lab
training = lab_of_aggregators.training
check_result = lab_of_aggregators.check_result
party = transports.party
nothing_leaks = transports.nothing_leaks


@pytest.fixture(autouse=True)
def verbs_here() -> None:
    if why := why_not():
        pytest.skip(f"no verbs here: {why}")


@pytest.fixture(params=["verbs", "verbs-domains"])
def case(request: pytest.FixtureRequest) -> str:
    """Memory windows, and a protection domain per channel."""
    return str(request.param)


@pytest.fixture(autouse=True)
def devices_are_closed() -> Iterator[None]:
    yield
    assert not device._open, "a device is open that nobody uses"
