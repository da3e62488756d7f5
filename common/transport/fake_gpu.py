"""Host memory that plays a device's: the whole path of device memory, live, without a GPU.

What it keeps of a real device: memory that only explicit copies reach; allocations that another
process opens by a handle, which means nothing once the owner has freed it; a handle that its own
process cannot open; arrays that are not numpy arrays. An allocation is a memfd of its own, a handle
is the way to its descriptor (/proc/<pid>/fd/<n>), so only processes of our user can follow it.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from slackwater.common.base.errors import AccessRefused, Rejected
from slackwater.common.transport.gpu import (
    RAW_HANDLE_BYTES,
    Device,
    DeviceArray,
    DeviceMemory,
    own_exports,
)
from slackwater.common.transport.host import host_identity
from slackwater.common.transport.region import Region, check_foreign

_TOTAL_BYTES: Final = 64 * 1024**3


class DoubleMemory:
    def __init__(self, device: "FakeDevice", fd: int, nbytes: int, start: int = 0) -> None:
        self._device, self._fd, self._start, self.nbytes = device, fd, start, nbytes
        self._map = mmap.mmap(fd, start + nbytes)
        weakref.finalize(self, _unmap, self._map, fd)

    @property
    def device(self) -> Device:
        return self._device

    @property
    def address(self) -> int:
        raise TypeError("the fake GPU has no addresses: its kernels take `numbers`")

    def numbers(self, offset: int, count: int, dtype: DTypeLike) -> NDArray[Any]:
        """For the fake GPU's own kernels, which must let go of them."""
        return np.frombuffer(self._map, dtype, count, self._start + offset)

    def upload(self, offset: int, source: memoryview) -> None:
        self._check(offset, len(source))
        self._map[self._start + offset : self._start + offset + len(source)] = source

    def download(self, offset: int, target: memoryview) -> None:
        self._check(offset, len(target))
        with memoryview(self._map) as whole:
            target[:] = whole[self._start + offset : self._start + offset + len(target)]

    def copy_from(self, offset: int, source: DeviceMemory, start: int, nbytes: int) -> None:
        if source.device is not self._device:
            raise Rejected("a copy between two devices: go by way of the host")
        through = memoryview(bytearray(nbytes))
        source.download(start, through)
        self.upload(offset, through)

    def export(self) -> tuple[bytes, int]:
        raw = f"/proc/{os.getpid()}/fd/{self._fd}".encode().ljust(RAW_HANDLE_BYTES, b"\0")
        own_exports[self._device.name, raw] = self
        return raw, self._start

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or offset + nbytes > self.nbytes:
            raise Rejected(f"bytes [{offset}, {offset + nbytes}) of {self.nbytes} on the device")


def _unmap(mapping: mmap.mmap, fd: int) -> None:
    os.close(fd)
    mapping.close()


class FakeDevice:
    """`total_bytes` can be made small, to see what happens when it is full."""

    name = "fake"

    def __init__(self, total_bytes: int = _TOTAL_BYTES) -> None:
        self.total_bytes = total_bytes
        self._used: weakref.WeakKeyDictionary[DoubleMemory, int] = weakref.WeakKeyDictionary()
        self._counting = threading.Lock()
        """Ranks that are threads of one process allocate at the same time."""

    @property
    def identity(self) -> bytes:
        return b"double" + bytes.fromhex(host_identity().replace("-", ""))[:10]

    def allocate(self, nbytes: int) -> DoubleMemory:
        with self._counting:
            if sum(self._used.values()) + nbytes > self.total_bytes:
                raise MemoryError(f"{nbytes} bytes do not fit on a device of {self.total_bytes}")
            region = Region.create(nbytes, "device")
            memory = DoubleMemory(self, os.dup(region.fileno()), nbytes)
            region.close()
            self._used[memory] = nbytes
        return memory

    def open(self, raw: bytes, start: int, nbytes: int) -> DoubleMemory:
        path = raw.rstrip(b"\0")
        if not path.startswith(b"/proc/") or path.startswith(f"/proc/{os.getpid()}/".encode()):
            raise AccessRefused("no handle of another process's memory")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise AccessRefused(f"the peer's device memory is gone: {error}") from error
        try:
            if start + nbytes > check_foreign(fd):
                raise AccessRefused(f"{start + nbytes} bytes of a smaller allocation")
            return DoubleMemory(self, fd, nbytes, start)
        except (AccessRefused, OSError):
            os.close(fd)
            raise

    def array(self, values: NDArray[Any]) -> DeviceArray:
        """A program's array on the device, filled with these numbers."""
        made = DeviceArray(self.allocate(max(1, values.nbytes)), 0, values.shape, values.dtype)
        made.assign(values)
        return made

    def is_array(self, given: Any) -> bool:
        return isinstance(given, DeviceArray) and given.memory.device is self

    def wrap(self, given: Any) -> DeviceArray:
        if not self.is_array(given):
            raise Rejected(f"a {type(given).__name__} is not an array on device {self.name}")
        array: DeviceArray = given
        return array

    def present(self, array: DeviceArray) -> DeviceArray:
        return array

    def await_program(self) -> None:
        """The fake GPU's copies have ended when they return."""

    def pin(self, buffer: memoryview) -> Callable[[], None]:
        return lambda: None
