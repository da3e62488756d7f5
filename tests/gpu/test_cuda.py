"""On a real GPU alone: programs' own arrays, the fused kernel at size, a NIC's dma-buf."""

import os
from typing import Any

import numpy as np
import pytest

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.gpu_kernels import kernels_of
from slackwater.common.domains.slots.kernels import KERNEL_DTYPES, fold_chunk
from slackwater.common.domains.slots.rules import RULES, Hyper, scalars
from slackwater.common.transport import gpu_cuda
from slackwater.common.transport.gpu import Device, DeviceArray, DeviceRegion, copy_into
from slackwater.common.transport.negotiate import probe
from slackwater.schemas.tensors import DType

pytestmark = pytest.mark.gpu
PAIRS: list[tuple[str, DType]] = [(rule, dtype) for rule in RULES for dtype in KERNEL_DTYPES]
ELEMENTS = 1_000_003


def raw(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Convert values to the kernels' dtype."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(all="ignore"):
            return values.astype(np.float16).view(KERNEL_DTYPES[dtype])
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(KERNEL_DTYPES[dtype])


def on(device: Any, values: np.ndarray) -> DeviceArray:
    made = DeviceArray(device.allocate(values.nbytes), 0, values.shape, values.dtype)
    made.assign(values)
    return made


def hard_floats(rng: np.random.Generator, size: int) -> np.ndarray:
    """Every exponent up to 2^60, so that squares stay finite; subnormals among them."""
    drawn = rng.integers(0, 2**32, size, np.uint64).astype(np.uint32)
    drawn[(drawn & 0x7F800000) >= (187 << 23)] &= 0xBFFFFFFF
    return drawn.view(np.float32)


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
@pytest.mark.parametrize(("rule", "dtype"), PAIRS)
def test_the_gpus_bits_are_the_cpus(gpu: Device, rule: str, dtype: DType, workers: int) -> None:
    """A million elements over all exponents; where the CPU says that a value is not finite, the GPU
    says so, too, and where it does not, all bits agree. A sum may be NaN, whose bits are free."""
    rng = np.random.default_rng(workers)
    stride = -(-ELEMENTS // 4) * 4
    k = scalars(Hyper(0.01, weight_decay=1e-3), 7, workers)
    span, size = (0, ELEMENTS), workers * stride
    for drawn in (rng.standard_normal(size, np.float32), hard_floats(rng, size)):
        slots = raw(drawn, dtype)
        olds = [rng.standard_normal(ELEMENTS, np.float32)]
        count = RULES[rule].states
        olds += [np.abs(rng.standard_normal(ELEMENTS, np.float32)) for _ in range(count)]
        here = [(old, np.empty_like(old)) for old in olds]
        there = [(on(gpu, old), on(gpu, np.empty_like(old))) for old in olds]
        clean = fold_chunk(rule, slots, stride, workers, span, here[0], here[1:], k)
        fold_there = kernels_of(gpu).fold_chunk
        got = fold_there(rule, on(gpu, slots), stride, workers, span, there[0], there[1:], k)
        assert got == clean
        if clean:
            for (_, expected), (_, new) in zip(here, there, strict=True):
                found = new.to_host()
                same = found.view(np.uint32) == expected.view(np.uint32)
                assert (same | (np.isnan(found) & np.isnan(expected))).all()


def test_float64_agrees_within_a_few_roundings(gpu: Device) -> None:
    rng = np.random.default_rng(7)
    hyper, t = Hyper(0.05, weight_decay=0.01), 5
    lr, _, b1, b2, eps, wd, _ = hyper
    slots = rng.standard_normal(2 * 400_000, np.float32)
    p, m = (rng.standard_normal(400_000, np.float32) for _ in range(2))
    v = np.abs(rng.standard_normal(400_000, np.float32))
    new, new_m, new_v = (on(gpu, np.empty_like(p)) for _ in range(3))
    assert kernels_of(gpu).fold_chunk(
        "adam", on(gpu, slots), 400_000, 2, (0, 400_000), (on(gpu, p), new),
        [(on(gpu, m), new_m), (on(gpu, v), new_v)], scalars(hyper, t, 2),
    )  # fmt: skip
    wide = slots.astype(np.float64).reshape(2, -1)
    g = wide.mean(0) + wd * p.astype(np.float64)
    size = np.abs(wide).sum(0) + wd * np.abs(p)
    m1, v1 = b1 * m.astype(np.float64) + (1 - b1) * g, b2 * v.astype(np.float64) + (1 - b2) * g * g
    root, rate = np.sqrt(v1) / np.sqrt(1 - b2**t) + eps, lr / (1 - b1**t)
    scale = np.abs(p) + 4 * rate * (np.abs(m1) + size) / root
    error = np.abs(new.to_host() - (p - rate * m1 / root))
    assert (error <= 8 * np.finfo(np.float32).eps * scale).all()


def test_a_cupy_array_is_a_region_where_it_is(gpu: Any) -> None:
    """From cupy's own pool; what is written through the region is in the array."""
    array = gpu.cupy.arange(100_000, dtype=np.float32)
    region = DeviceRegion.over(gpu.wrap(array[50_000:]), "cupy's")
    region.buffer[:4] = np.float32(-5).tobytes()
    region.arrived(0, 4)
    assert float(array[50_000]) == -5.0
    region.close()
    assert float(array[50_000]) == -5.0


def test_a_cupy_array_of_a_stream_ordered_pool_is_staged_or_exported(gpu: Any) -> None:
    cupy = gpu.cupy
    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        array = cupy.zeros(100_000, np.float32)
    region = DeviceRegion.over(gpu.wrap(array), "pooled")
    region.buffer[:4] = np.float32(3).tobytes()
    region.arrived(0, 4)
    assert float(array[0]) == 3.0
    region.close()


def test_what_an_agent_gives_is_an_array_of_the_programs_library(gpu: Any) -> None:
    array = on(gpu, np.arange(6, dtype=np.float32)).reshape((2, 3))
    shown = gpu.present(array)
    assert shown.sum() == 15
    shown *= 2
    gpu.await_program()
    assert array.to_host().sum() == 30


def test_a_tensor_of_pytorch_is_taken_as_it_is(gpu: Any) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    tensor = torch.arange(12, dtype=torch.float32, device="cuda", requires_grad=True)
    assert gpu.is_array(tensor)
    target = np.zeros(12, np.float32)
    copy_into(target, gpu.wrap(tensor))
    assert (target == np.arange(12)).all()
    with pytest.raises(Rejected, match="gaps"):
        gpu.wrap(tensor.detach().reshape(3, 4).T)


def test_the_doctor_finds_the_gpu(gpu: Device) -> None:
    found = {each.kind: each for each in probe()}["gpu"]
    assert found.usable, found.why
    assert "CUDA device" in found.why


def test_a_dma_buf_is_exported_or_refused_with_the_reason(gpu: Any) -> None:
    memory = gpu.allocate(gpu_cuda.GRANULE_BYTES)
    try:
        fd, offset = gpu.dmabuf(memory, 4096, 8192)
    except Rejected as error:
        pytest.skip(f"no dma-buf export here: {error}")
    assert offset == 0
    assert os.fstat(fd)
    os.close(fd)
