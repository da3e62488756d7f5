"""A CUDA device behind the seam of gpu.py: cupy's runtime, and the driver for what cupy lacks.

- Allocations come from cudaMalloc in whole granules, not from cupy's pool: memory of a
  stream-ordered pool has no IPC handle, and a handle opens all of what it lies in, so nothing
  else may lie there.
- A program's own arrays may lie in any pool: `wrap` finds the allocation around them, and `export`
  refuses what CUDA has no handle for; such memory is staged.
- One process opens an allocation once and keeps it while anybody here uses it.
- Copies run on a stream of ours that waits for nobody: whoever calls has seen to it that what wrote
  the source has ended. `wrap` does so for a program's arrays (the stream that the array names; for
  PyTorch, which names none, its current one).
- `dmabuf` gives the descriptor by which a NIC registers device memory (GPUDirect).

What CUDA answers is mapped to our errors in `_cuda` and nowhere else. An error of the device itself
is Fatal: its context is lost with it, and only another process gets a new one.
"""

import contextlib
import ctypes
import importlib
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from slackwater.common.base.errors import AccessRefused, ConfigRejected, Fatal, Rejected
from slackwater.common.transport.gpu import (
    RAW_HANDLE_BYTES,
    Device,
    DeviceArray,
    DeviceMemory,
    own_exports,
)

GRANULE_BYTES: Final = 2 * 1024 * 1024
_OUT_OF_MEMORY: Final = 2
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3
_REGISTER_PORTABLE: Final = 1
_DMABUF_FD: Final = 1
_ATTRIBUTES: Final = {"gpudirect": 116, "dmabuf": 124}


def _cupy() -> Any:
    """Raises ConfigRejected."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise ConfigRejected(
            f"a CUDA device needs cupy ({error}): pip install cupy-cuda13x, or cupy-cuda12x"
        ) from error


@contextlib.contextmanager
def _cuda(what: str) -> Iterator[None]:
    """Map CUDA's errors to ours."""
    try:
        yield
    except RuntimeError as error:
        status = getattr(error, "status", None)
        if status is None:
            raise
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"{what}: {error}") from error
        raise Fatal(f"{what}: {error}") from error


class _Driver:
    """libcuda's few calls that cupy does not offer."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigRejected(f"no CUDA driver: {error}") from error
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises Rejected."""
        function = getattr(self._library, name, None)
        if function is None:
            raise Rejected(f"this driver has no {name}: a newer one is needed")
        result = function(*arguments)
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(text))
            raise Rejected(f"{name}: {(text.value or b'error').decode()} ({result})")

    def device(self, ordinal: int) -> int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device.value

    def uuid(self, ordinal: int) -> bytes:
        uuid = (ctypes.c_ubyte * 16)()
        # A MIG slice has one of its own.
        self.call("cuDeviceGetUuid_v2", ctypes.byref(uuid), self.device(ordinal))
        return bytes(uuid)

    def attribute(self, which: str, ordinal: int) -> bool:
        value = ctypes.c_int()
        device = self.device(ordinal)
        self.call("cuDeviceGetAttribute", ctypes.byref(value), _ATTRIBUTES[which], device)
        return bool(value.value)

    def allocation(self, address: int) -> tuple[int, int]:
        """(begin, bytes) of the allocation that an address lies in."""
        base, size = ctypes.c_ulonglong(), ctypes.c_size_t()
        self.call(
            "cuMemGetAddressRange_v2",
            ctypes.byref(base),
            ctypes.byref(size),
            ctypes.c_ulonglong(address),
        )
        return base.value, size.value

    def dmabuf(self, address: int, nbytes: int) -> int:
        fd = ctypes.c_int(-1)
        self.call(
            "cuMemGetHandleForAddressRange",
            ctypes.byref(fd),
            ctypes.c_ulonglong(address),
            ctypes.c_size_t(nbytes),
            _DMABUF_FD,
            ctypes.c_ulonglong(0),
        )
        return fd.value


class CudaMemory:
    """`owner` is what keeps the memory, where it is a program's."""

    def __init__(self, device: "CudaDevice", address: int, nbytes: int, owner: object) -> None:
        self._device, self.address, self.nbytes = device, address, nbytes
        self._owner = owner

    @property
    def device(self) -> Device:
        return self._device

    def upload(self, offset: int, source: memoryview) -> None:
        self._check(offset, len(source))
        if len(source):
            host = np.frombuffer(source, np.uint8).ctypes.data
            self._device.copy(self.address + offset, host, len(source), _TO_DEVICE)

    def download(self, offset: int, target: memoryview) -> None:
        self._check(offset, len(target))
        if len(target):
            host = np.frombuffer(target, np.uint8).ctypes.data
            self._device.copy(host, self.address + offset, len(target), _TO_HOST)

    def copy_from(self, offset: int, source: DeviceMemory, start: int, nbytes: int) -> None:
        if source.device is not self._device:
            raise Rejected("a copy between two devices: go by way of the host")
        self._check(offset, nbytes)
        if start < 0 or start + nbytes > source.nbytes:
            raise Rejected(f"bytes [{start}, {start + nbytes}) of {source.nbytes} on the device")
        if nbytes:
            self._device.copy(self.address + offset, source.address + start, nbytes, _ON_DEVICE)

    def export(self) -> tuple[bytes, int]:
        """CUDA exports allocations whole: of a program's array, what lies beside it goes along."""
        device = self._device
        with device.current():
            base, size = device.driver.allocation(self.address)
        raw = device.handle(base)
        whole = own_exports.get((device.name, raw))
        if whole is None:
            whole = self if base == self.address else CudaMemory(device, base, size, self._owner)
            own_exports[device.name, raw] = whole
        if whole is not self:
            self._whole = whole  # Kept, and so found, as long as we are.
        return raw, self.address - base

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or offset + nbytes > self.nbytes:
            raise Rejected(f"bytes [{offset}, {offset + nbytes}) of {self.nbytes} on the device")


@dataclass(slots=True)
class _Import:
    """Another process's allocation, open here."""

    address: int
    users: int = 0


class CudaDevice:
    """Raises ConfigRejected where there is no cupy, no driver or no such device."""

    def __init__(self, ordinal: int = 0) -> None:
        self.cupy = _cupy()
        self._runtime = self.cupy.cuda.runtime
        try:
            count = int(self._runtime.getDeviceCount())
        except RuntimeError as error:
            raise ConfigRejected(f"cupy finds no CUDA device: {error}") from error
        if ordinal >= count:
            raise ConfigRejected(f"device cuda:{ordinal}: this host has {count}")
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        self.driver = _Driver()
        self.identity = self.driver.uuid(ordinal)
        self._local = threading.local()
        self._imports: dict[bytes, _Import] = {}
        self._importing = threading.RLock()
        with self.current():
            self.total_bytes = int(self._runtime.memGetInfo()[1])

    @contextlib.contextmanager
    def current(self) -> Iterator[Any]:
        """The device and our stream are this thread's, for cupy too; gives the stream."""
        with self.cupy.cuda.Device(self.ordinal):
            stream = getattr(self._local, "stream", None)
            if stream is None:
                stream = self._local.stream = self.cupy.cuda.Stream(non_blocking=True)
            with stream:
                yield stream

    # Allocations ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> CudaMemory:
        whole = -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES
        with _cuda(f"{whole} bytes on {self.name}"), self.current() as stream:
            address = int(self._runtime.malloc(whole))
            memory = CudaMemory(self, address, nbytes, None)
            weakref.finalize(memory, self._free, address).atexit = False
            self._runtime.memsetAsync(address, 0, whole, stream.ptr)
            stream.synchronize()
        return memory

    def _free(self, address: int) -> None:
        with _cuda("free"), self.current():
            self._runtime.free(address)

    def copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        with _cuda(f"a copy of {nbytes} bytes"), self.current() as stream:
            self._runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)
            stream.synchronize()

    def launch(
        self, kernel: Any, blocks: int, threads: int, arguments: tuple[Any, ...], flag: int
    ) -> int:
        """Run a kernel that may raise the 32-bit word at address `flag`; what it holds after."""
        word = np.zeros(1, np.uint32)
        with _cuda("a kernel"), self.current() as stream:
            self._runtime.memsetAsync(flag, 0, word.nbytes, stream.ptr)
            kernel((blocks,), (threads,), arguments)
            host = int(word.ctypes.data)
            self._runtime.memcpyAsync(host, flag, word.nbytes, _TO_HOST, stream.ptr)
            stream.synchronize()
        return int(word[0])

    def pin(self, buffer: memoryview) -> Callable[[], None]:
        address = int(np.frombuffer(buffer, np.uint8).ctypes.data)
        with self.current():
            try:
                self._runtime.hostRegister(address, len(buffer), _REGISTER_PORTABLE)
            except RuntimeError as error:
                raise MemoryError(f"{len(buffer)} bytes cannot be pinned: {error}") from error

        def unpin() -> None:
            with _cuda("hostUnregister"), self.current():
                self._runtime.hostUnregister(address)

        return unpin

    # Between processes ----------------------------------------------------------------------------

    def handle(self, base: int) -> bytes:
        """Raises Rejected where CUDA has none: memory of a stream-ordered or virtual pool."""
        with self.current():
            try:
                raw = bytes(self._runtime.ipcGetMemHandle(base))
            except RuntimeError as error:
                raise Rejected(f"this device memory cannot be exported: {error}") from error
        assert len(raw) == RAW_HANDLE_BYTES
        return raw

    def open(self, raw: bytes, start: int, nbytes: int) -> CudaMemory:
        with self._importing, self.current():
            opened = self._imports.get(raw)
            if opened is None:
                try:
                    opened = _Import(int(self._runtime.ipcOpenMemHandle(raw)))
                except RuntimeError as error:
                    raise AccessRefused(
                        f"the peer's device memory cannot be opened here: {error}"
                    ) from error
                self._imports[raw] = opened
            memory = CudaMemory(self, opened.address + start, nbytes, None)
            opened.users += 1
            weakref.finalize(memory, self._unused, raw).atexit = False
        return memory

    def _unused(self, raw: bytes) -> None:
        with self._importing, _cuda("ipcCloseMemHandle"), self.current():
            opened = self._imports[raw]
            opened.users -= 1
            if not opened.users:
                del self._imports[raw]
                self._runtime.ipcCloseMemHandle(opened.address)

    def dmabuf(self, memory: CudaMemory, offset: int = 0, nbytes: int = -1) -> tuple[int, int]:
        """(descriptor, where in it the bytes begin): what a NIC registers (`ibv_reg_dmabuf_mr`).
        The caller closes the descriptor; the memory must outlive the registration. Raises Rejected
        where the driver has none (a proprietary kernel module, or an old one)."""
        length = memory.nbytes - offset if nbytes < 0 else nbytes
        address = memory.address + offset
        first = address // mmap.PAGESIZE * mmap.PAGESIZE
        last = -(-(address + length) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self.current():
            return self.driver.dmabuf(first, last - first), address - first

    # A program's arrays ---------------------------------------------------------------------------

    def is_array(self, given: Any) -> bool:
        return _interface(given) is not None

    def wrap(self, given: Any) -> DeviceArray:
        interface = _interface(given)
        if interface is None:
            raise Rejected(f"a {type(given).__name__} is not an array on device {self.name}")
        shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
        if dtype.kind == "V" and dtype.itemsize == 2:
            dtype = np.dtype(np.uint16)  # bfloat16, as its bits.
        strides = interface.get("strides")
        if strides is not None and tuple(strides) != _strides(shape, dtype.itemsize):
            raise Rejected("an array with gaps: make it contiguous first")
        address = int(interface["data"][0])
        with _cuda("a program's array"), self.current():
            where = self._runtime.pointerGetAttributes(address).device
            if where != self.ordinal:
                raise Rejected(f"an array on device cuda:{where}, this Agent has {self.name}")
            self._await(given, interface.get("stream"))
        nbytes = max(1, int(np.prod(shape, dtype=np.int64))) * dtype.itemsize
        return DeviceArray(CudaMemory(self, address, nbytes, given), 0, shape, dtype)

    def _await(self, given: Any, stream: int | None) -> None:
        """Wait until the program's work on the array has ended."""
        torch = sys.modules.get("torch")
        if stream is not None:
            self._runtime.streamSynchronize(stream)
        elif torch is not None and isinstance(given, torch.Tensor):
            torch.cuda.current_stream(given.device).synchronize()
        else:
            self._runtime.deviceSynchronize()

    def await_program(self) -> None:
        with _cuda("what the program does"), self.current():
            self._runtime.deviceSynchronize()

    def present(self, array: DeviceArray) -> Any:
        cuda = self.cupy.cuda
        memory = cuda.UnownedMemory(array.address, array.nbytes, array.memory, self.ordinal)
        pointer = cuda.MemoryPointer(memory, 0)
        return self.cupy.ndarray(array.shape, array.dtype, pointer)


def _interface(given: Any) -> dict[str, Any] | None:
    """PyTorch refuses it to a tensor that requires gradients: those have no part in this."""
    if hasattr(given, "detach"):
        given = given.detach()
    interface: dict[str, Any] | None = getattr(given, "__cuda_array_interface__", None)
    return interface


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


# The GPUs of this host ----------------------------------------------------------------------------


def probe() -> tuple[bool, str]:
    """(usable, what was found or is missing), for `slackwater doctor`."""
    try:
        device = CudaDevice()
        memory = device.allocate(GRANULE_BYTES)
        number = int(device.cupy.cuda.runtime.getDeviceCount())
    except (ConfigRejected, Fatal, MemoryError) as error:
        return False, str(error)
    except Exception as error:  # A library that is missing or does not fit: cupy raises many kinds.
        return False, f"cupy cannot use the device: {error!r}"
    has = [f"{number} CUDA device{'s' * (number > 1)}, {device.total_bytes // 2**30} GiB"]
    try:
        memory.export()
        has.append("CUDA IPC")
    except Rejected as error:
        has.append(f"no CUDA IPC ({error}): staged through host memory")
    try:
        fd, _ = device.dmabuf(memory)
        os.close(fd)
        has.append("dma-buf export")
    except Rejected as error:
        has.append(f"no dma-buf export ({error}): NICs are staged through host memory")
    return True, "; ".join(has)
