"""A cupy whose device is this process's own heap: what gpu_cuda.py and gpu_kernels.py ask of cupy
and the driver, answered as CUDA's manual says, so that their every line runs where no GPU is.
Kernels go through the host's compiler. Only for tests; it shows nothing of a GPU."""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.gpu.host_kernels import compile_kernel

from slackwater.common.transport import gpu_cuda

_CTYPES = {
    np.dtype(np.uint64): ctypes.c_void_p,
    np.dtype(np.int64): ctypes.c_longlong,
    np.dtype(np.int32): ctypes.c_int,
    np.dtype(np.float32): ctypes.c_float,
}
MEMORY_BYTES = 1 << 28


class FakeError(RuntimeError):
    """An error like CUDARuntimeError: `status` is CUDA's number."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cuda error {status}")
        self.status = status


class FakeRuntime:
    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.imported: dict[int, bytes] = {}
        self.pooled: set[int] = set()
        """Allocations that have no IPC handle."""
        self.pinned: set[int] = set()
        self.synchronized: list[Any] = []

    def getDeviceCount(self) -> int:
        return 1

    def getDeviceProperties(self, ordinal: int) -> dict[str, Any]:
        return {"multiProcessorCount": 2}

    def memGetInfo(self) -> tuple[int, int]:
        return MEMORY_BYTES - sum(map(len, self.blocks.values())), MEMORY_BYTES

    def malloc(self, nbytes: int) -> int:
        if nbytes > self.memGetInfo()[0]:
            raise FakeError(2)
        block = ctypes.create_string_buffer(b"\xa5" * nbytes, nbytes + 256)
        address = -(-ctypes.addressof(block) // 256) * 256
        self.blocks[address] = memoryview(block)[:nbytes]
        return address

    def free(self, address: int) -> None:
        del self.blocks[address]

    def find(self, address: int) -> tuple[int, int]:
        for base, block in self.blocks.items():
            if base <= address < base + len(block):
                return base, len(block)
        raise FakeError(1)

    def memsetAsync(self, address: int, value: int, nbytes: int, stream: int) -> None:
        ctypes.memset(address, value, nbytes)

    def memcpyAsync(self, to: int, of: int, nbytes: int, kind: int, stream: int) -> None:
        for address, on_device in ((to, kind in (1, 3)), (of, kind in (2, 3))):
            if on_device:
                base, size = self.find(address)
                assert address + nbytes <= base + size, "a copy beyond its allocation"
        ctypes.memmove(to, of, nbytes)

    def streamSynchronize(self, stream: int) -> None:
        self.synchronized.append(stream)

    def deviceSynchronize(self) -> None:
        self.synchronized.append("device")

    def pointerGetAttributes(self, address: int) -> Any:
        self.find(address)
        return SimpleNamespace(device=0)

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        if address in self.pinned:
            raise FakeError(712)
        self.pinned.add(address)

    def hostUnregister(self, address: int) -> None:
        self.pinned.remove(address)

    def ipcGetMemHandle(self, address: int) -> bytes:
        if address in self.pooled or address not in self.blocks:
            raise FakeError(1)
        return address.to_bytes(8, "little").ljust(64, b"\0")

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        address = int.from_bytes(handle[:8], "little")
        if address not in self.blocks or handle in self.imported.values():
            raise FakeError(201)
        self.imported[address] = handle
        return address

    def ipcCloseMemHandle(self, address: int) -> None:
        del self.imported[address]


class FakeRawKernel:
    folder: Path

    def __init__(self, code: str, name: str, options: tuple[str, ...]) -> None:
        assert "--fmad=false" in options
        self._code, self._run = code, None

    def compile(self) -> None:
        if self._run is None:
            self._run = compile_kernel(self._code, self.folder)

    def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
        """cupy takes a numpy scalar by its dtype: so here, and the types must be the kernel's."""
        self.compile()
        assert self._run is not None
        self._run(grid[0], block[0], *(_CTYPES[np.dtype(type(a))](a.item()) for a in args))


class FakeArray:
    """An array that a program would have: cupy.ndarray's part in this."""

    def __init__(self, runtime: FakeRuntime, values: np.ndarray, stream: int | None = 1) -> None:
        self._runtime, self.values = runtime, values
        self.address = runtime.malloc(max(1, values.nbytes))
        ctypes.memmove(self.address, values.ctypes.data, values.nbytes)
        self.__cuda_array_interface__ = {
            "shape": values.shape,
            "typestr": values.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": stream,
        }


class FakeView:
    """cupy.ndarray over memory that is somebody else's."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, memory: tuple[int, int, object]):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.pointer, self._nbytes, self._owner = memory

    def get(self) -> np.ndarray:
        return np.frombuffer(ctypes.string_at(self.pointer, self._nbytes), self.dtype).reshape(
            self.shape
        )


class FakeStream:
    def __init__(self, non_blocking: bool) -> None:
        assert non_blocking
        self.ptr = 4711

    def synchronize(self) -> None:
        """Nothing runs behind our back."""

    def __enter__(self) -> "FakeStream":
        return self

    def __exit__(self, *_: object) -> None:
        """The stream before is current again."""


class FakeDriver:
    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = runtime

    def uuid(self, ordinal: int) -> bytes:
        return b"a fake device's!"

    def allocation(self, address: int) -> tuple[int, int]:
        return self._runtime.find(address)


@contextlib.contextmanager
def _current(ordinal: int) -> Iterator[None]:
    yield


def fake_cupy() -> tuple[Any, FakeRuntime]:
    runtime = FakeRuntime()
    cuda = SimpleNamespace(
        runtime=runtime,
        Device=_current,
        Stream=FakeStream,
        UnownedMemory=lambda address, nbytes, owner, ordinal: (address, nbytes, owner),
        MemoryPointer=lambda memory, offset: memory,
    )
    made = SimpleNamespace(
        cuda=cuda,
        RawKernel=FakeRawKernel,
        ndarray=FakeView,
        asarray=lambda values: FakeArray(runtime, values),
    )
    return made, runtime


def fake_device(monkeypatch: Any, folder: Path) -> Any:
    """A CudaDevice on it."""
    cupy, runtime = fake_cupy()
    monkeypatch.setattr(gpu_cuda, "_cupy", lambda: cupy)
    monkeypatch.setattr(gpu_cuda, "_Driver", lambda: FakeDriver(runtime))
    monkeypatch.setattr(FakeRawKernel, "folder", folder, raising=False)
    return gpu_cuda.CudaDevice(0)
