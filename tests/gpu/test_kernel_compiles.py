"""The kernels compile for real GPUs, and the machine's instructions are the ones that were meant.

Needs NVIDIA's run-time compiler, not a GPU."""

import re

import pytest
from tests.gpu.nvrtc import Nvrtc, all_found

from slackwater.common.domains.slots.gpu_source import KERNEL, OPTIONS, source
from slackwater.common.domains.slots.kernels import KERNEL_DTYPES
from slackwater.common.domains.slots.rules import RULES
from slackwater.schemas.tensors import DType

PAIRS: list[tuple[str, DType]] = [(rule, dtype) for rule in RULES for dtype in KERNEL_DTYPES]
H200 = 90


@pytest.fixture(scope="session")
def compilers() -> list[Nvrtc]:
    return all_found()


@pytest.mark.parametrize(("rule", "dtype"), PAIRS)
def test_every_kernel_compiles_for_the_h200_as_it_was_meant(
    compilers: list[Nvrtc], rule: str, dtype: DType
) -> None:
    """No fused multiply-add, IEEE division and root, subnormals kept, 16-byte accesses; also when
    the compiler is told to fuse, and to flush subnormals, as cupy tells it behind our options."""
    for compiler in compilers:
        for options in (OPTIONS, ("--fmad=true", *OPTIONS[1:]), (*OPTIONS, "-ftz=true")):
            ptx, code = compiler.compile(source(rule, dtype), H200, options)
            assert code.startswith(b"\x7fELF")
            assert KERNEL in ptx
            assert not re.search(r"\b(fma|mad)\.\w*\.?f32", ptx)
            assert not re.search(r"\.(ftz|approx)\b", ptx)
            assert ("sqrt.rn.f32" in ptx) == ("epsilon" in RULES[rule].uses)
            assert ("div.rn.f32" in ptx) == ("epsilon" in RULES[rule].uses)
            if rule != "sum" or dtype == "float32":  # A sum reads nothing but slots.
                assert re.search(r"ld\.global(\.nc)?\.v4\.(f|b|u)32", ptx)
            assert re.search(r"st\.global\.v4\.(f|b|u)32", ptx)


def test_the_kernels_compile_for_every_architecture_that_the_compilers_know(
    compilers: list[Nvrtc],
) -> None:
    for compiler in compilers:
        known = compiler.architectures()
        assert H200 in known
        for architecture in known:
            _, code = compiler.compile(source("adam", "float16"), architecture, OPTIONS)
            assert code.startswith(b"\x7fELF")
