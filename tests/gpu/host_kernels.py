"""The GPU kernel's own source, compiled for this CPU and run thread by thread: the evidence that
can be had without a GPU. Only for tests."""

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slackwater.common.domains.slots.gpu_source import KERNEL, source
from slackwater.common.domains.slots.kernels import KERNEL_DTYPES
from slackwater.schemas.tensors import DType

SHIM = Path(__file__).with_name("shim.hpp")
Pairs = list[tuple[Any, Any]]


class HostKernels:
    """Compiles each (rule, dtype) once into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, str], Any] = {}

    def fold(
        self,
        rule: str,
        dtype: DType,
        slots: np.ndarray,
        stride: int,
        workers: int,
        parameters: tuple[Any, Any],
        states: Pairs,
        k: np.ndarray,
        *,
        wide: bool = True,
        grid: tuple[int, int] = (3, 32),
    ) -> bool:
        """The whole of `parameters` in one launch; whether every new value is finite."""
        unclean = ctypes.c_uint(0)
        buffers = [array.ctypes.data for pair in (parameters, *states) for array in pair]
        self._compiled(rule, dtype)(
            *grid,
            ctypes.c_void_p(slots.ctypes.data),
            ctypes.c_longlong(stride),
            workers,
            ctypes.c_longlong(len(parameters[0])),
            int(wide),
            *map(ctypes.c_void_p, buffers),
            *(ctypes.c_float(float(value)) for value in k),
            ctypes.byref(unclean),
        )
        return not unclean.value

    def _compiled(self, rule: str, dtype: DType) -> Any:
        key = rule, dtype
        if key not in self._made:
            self._made[key] = self._compile(rule, dtype)
        return self._made[key]

    def _compile(self, rule: str, dtype: DType) -> Any:
        return compile_kernel(source(rule, dtype), self._folder)


def compile_kernel(code: str, folder: Path) -> Any:
    """`run(blocks, threads, ...)` with the kernel's own parameters. Skips the test where there is
    no C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++ or clang++) on this machine")
    name = hashlib.sha256(code.encode()).hexdigest()[:16]
    library = folder / f"{name}.so"
    if not library.exists():
        path = folder / f"{name}.cpp"
        path.write_text(f'#include "{SHIM}"\n{code}\n{_driver(code)}')
        command = [compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-fno-fast-math"]
        command += ["-Wall", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
        done = subprocess.run(
            [*command, "-o", str(library), str(path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    run = ctypes.CDLL(str(library)).run
    run.restype = None
    return run


def _driver(code: str) -> str:
    """A C function that runs the kernel over a grid."""
    parameters = code.split(f"void {KERNEL}(")[1].split(")")[0].split(",")
    types = [" ".join(one.split()[:-1]) for one in parameters]
    declared = ", ".join(f"{kind} a{index}" for index, kind in enumerate(types))
    passed = ", ".join(f"a{index}" for index in range(len(types)))
    return (
        f'extern "C" void run(unsigned blocks, unsigned threads, {declared})\n'
        f"{{ on_grid(blocks, threads, {KERNEL}, {passed}); }}\n"
    )


def slots_of(gradients: list[np.ndarray], dtype: DType, gap: int = 4) -> tuple[np.ndarray, int]:
    """All gradients in one array of the kernels' dtype, as in a region: (array, stride)."""
    size = len(gradients[0])
    stride = -(-size // 4) * 4 + gap
    slots = np.zeros(stride * len(gradients), KERNEL_DTYPES[dtype])
    for rank, gradient in enumerate(gradients):
        slots[rank * stride : rank * stride + size] = gradient.view(slots.dtype)
    return slots, stride
