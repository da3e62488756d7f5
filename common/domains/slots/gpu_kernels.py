"""Choose the kernels that fold a region: this CPU's, or those of the device that holds its slots.

A kernel set is what `folding.fold` asks, whatever the memory: fold a span of elements, say whether
every new value is finite. On a device a bucket is one launch: the grain of execution is for caches
and for turns between jobs on a CPU, and a launch costs as much as megabytes of folding.
"""

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

from slackwater.common.domains.slots.gpu_source import KERNEL, OPTIONS, THREADS, source
from slackwater.common.domains.slots.rules import Floats
from slackwater.common.transport.gpu import Device, DeviceArray
from slackwater.schemas.tensors import DType

_WHOLE: Final = 2**62
_BLOCKS_PER_MULTIPROCESSOR: Final = 8
_ALIGNED: Final = 16
DTYPES: Final[dict[np.dtype[Any], DType]] = {
    np.dtype(np.float32): "float32",
    np.dtype(np.uint16): "float16",
    np.dtype(np.int16): "bfloat16",
}
"""The meaning of kernels.py's KERNEL_DTYPES: numba takes a second to load, and is not needed
here."""
Pair = tuple[DeviceArray, DeviceArray]
_made: Final["weakref.WeakKeyDictionary[Device, FoldKernels]"] = weakref.WeakKeyDictionary()


class FoldKernels(Protocol):
    """`fold_chunk` and `warm` are as in kernels.py, on arrays of the device."""

    @property
    def chunk_elements(self) -> int: ...

    def fold_chunk(
        self,
        rule: str,
        slots: DeviceArray,
        stride: int,
        workers: int,
        span: tuple[int, int],
        parameters: Pair,
        states: Sequence[Pair],
        k: Floats,
    ) -> bool: ...

    def warm(self, rule: str, dtype: DType, workers: int = 1) -> None: ...

    def now_s(self) -> float:
        """Return the clock by which a fold is charged: the difference of two readings."""
        ...


def kernels_of(device: Device) -> FoldKernels:
    """One set a device: compiled kernels are its."""
    made = _made.get(device)
    if made is None:
        made = FakeKernels() if device.name == "fake" else CudaKernels(device)
        _made[device] = made
    return made


class CudaKernels:
    """Compiled by NVRTC at first use and kept on disk by cupy."""

    chunk_elements = _WHOLE

    def __init__(self, device: Any) -> None:
        self._device = device
        self._compiled: dict[tuple[str, DType], Any] = {}
        self._local = threading.local()
        properties = device.cupy.cuda.runtime.getDeviceProperties(device.ordinal)
        self._blocks_max = _BLOCKS_PER_MULTIPROCESSOR * int(properties["multiProcessorCount"])

    def now_s(self) -> float:
        """The device's time is the caller's waiting."""
        return time.perf_counter()

    def warm(self, rule: str, dtype: DType, workers: int = 1) -> None:
        with self._device.current():
            self._kernel(rule, dtype).compile()

    def _kernel(self, rule: str, dtype: DType) -> Any:
        key = rule, dtype
        if key not in self._compiled:
            self._compiled[key] = self._device.cupy.RawKernel(
                source(rule, dtype), KERNEL, options=OPTIONS
            )
        return self._compiled[key]

    def fold_chunk(
        self,
        rule: str,
        slots: DeviceArray,
        stride: int,
        workers: int,
        span: tuple[int, int],
        parameters: Pair,
        states: Sequence[Pair],
        k: Floats,
    ) -> bool:
        lo, hi = span
        arrays = [slots[lo:], *(a[lo:hi] for pair in (parameters, *states) for a in pair)]
        wide = stride % 4 == 0 and all(
            array.address % (4 * array.dtype.itemsize) == 0 for array in arrays
        )
        flag = self._flag()
        arguments = (
            np.uint64(arrays[0].address),
            np.int64(stride),
            np.int32(workers),
            np.int64(hi - lo),
            np.int32(wide),
            *(np.uint64(array.address) for array in arrays[1:]),
            *(np.float32(value) for value in k),
            np.uint64(flag.address),
        )
        blocks = min(self._blocks_max, -(-(hi - lo) // (4 * THREADS)))
        kernel = self._kernel(rule, DTYPES[slots.dtype])
        return not self._device.launch(kernel, blocks, THREADS, arguments, flag.address)

    def _flag(self) -> DeviceArray:
        """A thread's own."""
        flag: DeviceArray | None = getattr(self._local, "flag", None)
        if flag is None:
            flag = DeviceArray(self._device.allocate(_ALIGNED), 0, (1,), np.uint32)
            self._local.flag = flag
        return flag


class FakeKernels:
    """This CPU's kernels, on the memory that plays a device's."""

    chunk_elements = _WHOLE

    def now_s(self) -> float:
        return time.thread_time()

    def warm(self, rule: str, dtype: DType, workers: int = 1) -> None:
        from slackwater.common.domains.slots import kernels

        kernels.warm(rule, dtype, workers)

    def fold_chunk(
        self,
        rule: str,
        slots: DeviceArray,
        stride: int,
        workers: int,
        span: tuple[int, int],
        parameters: Pair,
        states: Sequence[Pair],
        k: Floats,
    ) -> bool:
        from slackwater.common.domains.slots import kernels

        return kernels.fold_chunk(
            rule,
            _numbers(slots),
            stride,
            workers,
            span,
            (_numbers(parameters[0]), _numbers(parameters[1])),
            [(_numbers(old), _numbers(new)) for old, new in states],
            k,
        )


def _numbers(array: DeviceArray) -> Any:
    memory: Any = array.memory
    return memory.numbers(array.offset, array.size, array.dtype)
