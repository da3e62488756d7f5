"""The fake cupy asks and answers as the real one: names and parameters, where cupy is installed.
Needs no GPU."""

import importlib
import inspect
import re
from typing import Any

import pytest
from tests.gpu.fake_cupy import FakeRuntime

from slackwater.common.transport import gpu_cuda


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="cupy is not installed")


def test_the_fake_runtime_has_cupys_functions_with_cupys_parameters(cupy: Any) -> None:
    functions = [
        name
        for name, member in inspect.getmembers(FakeRuntime, inspect.isfunction)
        if not name.startswith("_") and name != "find"
    ]
    assert len(functions) > 12
    for name in functions:
        real = getattr(cupy.cuda.runtime, name)
        given = re.match(rf"{name}\((.*?)\)", real.__doc__.replace("\n", " "))
        assert given is not None, real.__doc__
        required = [one for one in given[1].split(",") if one.strip() and "=" not in one]
        ours = list(inspect.signature(getattr(FakeRuntime, name)).parameters)[1:]
        assert len(required) == len(ours), (name, given[1])


def test_everything_else_that_is_asked_of_cupy_is_there(cupy: Any) -> None:
    for path in [
        "cuda.Device",
        "cuda.Stream",
        "cuda.UnownedMemory",
        "cuda.MemoryPointer",
        "cuda.MemoryAsyncPool",
        "cuda.using_allocator",
        "RawKernel",
        "ndarray",
        "asarray",
    ]:
        found: Any = cupy
        for name in path.split("."):
            found = getattr(found, name)
    assert callable(cupy.RawKernel.compile)
    runtime = cupy.cuda.runtime
    assert (
        runtime.memcpyHostToDevice,
        runtime.memcpyDeviceToHost,
        runtime.memcpyDeviceToDevice,
    ) == (gpu_cuda._TO_DEVICE, gpu_cuda._TO_HOST, gpu_cuda._ON_DEVICE)


def test_cupys_errors_carry_cudas_number(cupy: Any) -> None:
    """`_cuda` maps errors by this number."""
    error = cupy.cuda.runtime.CUDARuntimeError(2)
    assert isinstance(error, RuntimeError)
    assert error.status == 2
    assert "cudaErrorMemoryAllocation" in str(error)
    driver = importlib.import_module("cupy_backends.cuda.api.driver")
    assert issubclass(driver.CUDADriverError, RuntimeError)
