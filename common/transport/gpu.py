"""Memory on a device: the seam behind which a GPU's memory is a memory kind of every transport.

A `DeviceRegion` is a region whose body lies in a device's memory. Its memfd has the same size and
the same offsets; what is not body (the words of the slot protocol) is in it for good, and for the
body it is the staging area: whoever cannot reach the device moves bytes to and from the memfd, and
the owner copies them on (`arrived`) or there beforehand (`fetch`). Pages of it that nobody stages
through are never taken. A peer on the same host with the same device opens the allocation itself
instead (CUDA IPC) and copies on the device.

Lifetime. An allocation is freed with its last user here, like a mapping, and not before each peer
that opened it has given it back or its process has ended: CUDA leaves undefined what an importer
sees of freed memory. A process cannot open an allocation of its own by its handle: it gets the
allocation.

Two devices implement the seam: gpu_cuda.py, and fake_gpu.py, host memory that plays a device's,
which ships for tests and for whole systems without a GPU. Arrays of either are `DeviceArray`s:
nothing but explicit copies gets at their numbers.
"""

import os
import select
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from slackwater.common.base.errors import AccessRefused, Rejected
from slackwater.common.transport.region import Region

RAW_HANDLE_BYTES: Final = 64
_HANDLE: Final = struct.Struct(f"<16sQQQ{RAW_HANDLE_BYTES}s")
"""The device's identity, the owner's process, where in the allocation, how much, the raw handle."""
_OPENED: Final = struct.Struct("<QQ")
"""Begin and end of the body; a handle follows where there is one."""


class DeviceMemory(Protocol):
    """One allocation, or a part of one. Copies have ended when they return. It is freed, or closed
    where it is another process's, with the last reference."""

    @property
    def device(self) -> "Device": ...

    @property
    def nbytes(self) -> int: ...

    @property
    def address(self) -> int:
        """Return the address that kernels are given."""
        ...

    def upload(self, offset: int, source: memoryview) -> None: ...

    def download(self, offset: int, target: memoryview) -> None: ...

    def copy_from(self, offset: int, source: "DeviceMemory", start: int, nbytes: int) -> None:
        """From memory of the same device, on the device."""
        ...

    def export(self) -> tuple[bytes, int]:
        """(raw handle, where in what the handle opens this memory begins). Raises Rejected when
        other processes cannot open it."""
        ...


class Device(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> bytes:
        """16 bytes: which device this is, the same in every process of the host."""
        ...

    @property
    def total_bytes(self) -> int: ...

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Zeroed, and such that it can be exported. Raises MemoryError."""
        ...

    def open(self, raw: bytes, start: int, nbytes: int) -> DeviceMemory:
        """Open another process's memory. Raises AccessRefused when that memory does not exist (any
        more)."""
        ...

    def is_array(self, given: Any) -> bool:
        """Say whether a program's object is an array on this device."""
        ...

    def wrap(self, given: Any) -> "DeviceArray":
        """The program's array, where it is; what writes it has ended. Raises Rejected."""
        ...

    def present(self, array: "DeviceArray") -> Any:
        """The array as the program's library has it, where it is."""
        ...

    def await_program(self) -> None:
        """Wait until all work of this process on the device has ended."""
        ...

    def pin(self, buffer: memoryview) -> Callable[[], None]:
        """Make host memory fast to copy from and to; the result undoes it. Raises MemoryError."""
        ...


# Arrays -------------------------------------------------------------------------------------------


class DeviceArray:
    """Numbers in device memory, contiguous."""

    __slots__ = ("dtype", "memory", "offset", "shape")

    def __init__(
        self, memory: DeviceMemory, offset: int, shape: tuple[int, ...], dtype: DTypeLike
    ) -> None:
        self.memory, self.offset, self.shape = memory, offset, shape
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        if offset < 0 or offset + self.nbytes > memory.nbytes:
            raise Rejected(f"{self.nbytes} bytes at {offset} of {memory.nbytes} on the device")

    @property
    def size(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def address(self) -> int:
        return self.memory.address + self.offset

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> "DeviceArray":
        """A part of a flat array, without a step."""
        assert len(self.shape) == 1
        assert part.step in (None, 1)
        first, last, _ = part.indices(self.shape[0])
        offset = self.offset + first * self.dtype.itemsize
        return DeviceArray(self.memory, offset, (max(0, last - first),), self.dtype)

    def reshape(self, shape: tuple[int, ...] | int) -> "DeviceArray":
        if shape == -1:
            shape = (self.size,)
        assert isinstance(shape, tuple)
        made = DeviceArray(self.memory, self.offset, shape, self.dtype)
        assert made.size == self.size, f"{self.shape} as {shape}"
        return made

    def assign(self, source: "DeviceArray | NDArray[Any]") -> None:
        """Copy the numbers of an array of the same size and dtype into this one."""
        if source.dtype != self.dtype or source.size != self.size:
            raise Rejected(
                f"{source.dtype} {source.shape} cannot be copied to {self.dtype} {self.shape}"
            )
        if isinstance(source, DeviceArray):
            self.memory.copy_from(self.offset, source.memory, source.offset, self.nbytes)
        else:
            whole = np.ascontiguousarray(source)
            self.memory.upload(self.offset, whole.reshape(-1).view(np.uint8).data)

    def to_host(self) -> NDArray[Any]:
        made = np.empty(self.shape, self.dtype)
        self.memory.download(self.offset, made.reshape(-1).view(np.uint8).data)
        return made

    def __array__(self, *_: Any, **__: Any) -> NDArray[Any]:
        raise TypeError("numbers on a device: copy them with to_host()")


def copy_into(target: Any, source: Any) -> None:
    """Copy as np.copyto does; either array may be on a device."""
    if isinstance(target, DeviceArray):
        target.assign(source)
    elif isinstance(source, DeviceArray):
        np.copyto(target, source.to_host().reshape(target.shape))
    else:
        np.copyto(target, source)


# Regions ------------------------------------------------------------------------------------------

_lock: Final = threading.RLock()


class _Lease:
    """A peer has an allocation open."""

    def __init__(self, pid: int) -> None:
        self.over = pid == os.getpid()  # Ours: it holds a reference, like any user here.
        self._process = -1
        if not self.over:
            try:
                self._process = os.pidfd_open(pid)
            except OSError:  # Gone already, or of another namespace: then only its word counts.
                self.over = pid > 0

    def alive(self) -> bool:
        if self.over:
            return False
        if self._process < 0:
            return True
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return not poll.poll(0)

    def end(self) -> None:
        self.over = True
        if self._process >= 0:
            os.close(self._process)
            self._process = -1


_retired: Final[list[tuple[DeviceMemory, list[_Lease]]]] = []


def reap() -> int:
    """Free what no peer has open any more; how many allocations still wait for one."""
    with _lock:
        kept = []
        for memory, leases in _retired:
            for lease in leases:
                if not lease.alive():
                    lease.end()
            living = [lease for lease in leases if not lease.over]
            if living:
                kept.append((memory, living))
        _retired[:] = kept
        return len(kept)


class DeviceRegion(Region):
    """Bytes [body[0], body[1]) are on the device, the others in the memfd."""

    in_place = False

    def __init__(
        self, fd: int, nbytes: int, label: str, memory: DeviceMemory, body: tuple[int, int]
    ) -> None:
        super().__init__(fd, nbytes, label)
        self._memory: DeviceMemory | None = memory
        self.body = body
        self._leases: list[_Lease] = []
        self._copying = threading.Lock()
        """A copy in another thread ends before the memfd is unpinned and unmapped."""
        self._unpin: Callable[[], None] | None = None

    @classmethod
    def on(
        cls,
        device: Device,
        nbytes: int,
        label: str,
        body: tuple[int, int] | None = None,
        *,
        pin: bool = False,
    ) -> "DeviceRegion":
        """Zeroed. `body`: None: all of it. `pin`: staging will be used, make it fast; that takes
        the memfd's pages now. Raises MemoryError, Rejected."""
        first, last = body if body is not None else (0, nbytes)
        if not 0 <= first < last <= nbytes:
            raise Rejected(f"region {label}: a body of bytes [{first}, {last}) of {nbytes}")
        reap()
        memory = device.allocate(last - first)
        host = Region.create(nbytes, label)
        region = cls(os.dup(host.fileno()), nbytes, label, memory, (first, last))
        host.close()
        if pin:
            region.pin()
        return region

    @classmethod
    def over(cls, array: DeviceArray, label: str) -> "DeviceRegion":
        """A program's own array, registered: the region is its memory, all of it body."""
        reap()
        host = Region.create(array.nbytes, label)
        part = _Part(array.memory, array.offset, array.nbytes)
        region = cls(os.dup(host.fileno()), host.nbytes, label, part, (0, host.nbytes))
        host.close()
        return region

    @property
    def memory(self) -> DeviceMemory:
        """The body. Raises Rejected once closed."""
        if self._memory is None:
            raise Rejected(f"region {self.label} is closed")
        return self._memory

    def pin(self) -> None:
        """Best effort: without it copies are slower, and right."""
        if self._unpin is None:
            first, last = self.body
            try:
                self._unpin = self.memory.device.pin(self.buffer[first:last])
            except MemoryError:
                return

    def populate(self) -> None:
        """Nothing: the device's memory is there, and pages of the memfd are taken as needed."""

    # Staging --------------------------------------------------------------------------------------

    def arrived(self, offset: int, nbytes: int) -> None:
        first, last = max(offset, self.body[0]), min(offset + nbytes, self.body[1])
        with self._copying:
            if first < last and self._memory is not None:
                self._memory.upload(first - self.body[0], self.buffer[first:last])

    def fetch(self, offset: int, nbytes: int) -> None:
        first, last = max(offset, self.body[0]), min(offset + nbytes, self.body[1])
        with self._copying:
            if first < last and self._memory is not None:
                self._memory.download(first - self.body[0], self.buffer[first:last])

    def whole(self) -> Region:
        """A copy, in a memfd of its own."""
        made = Region.create(self.nbytes, self.label)
        first, last = self.body
        made.buffer[:first] = self.buffer[:first]
        made.buffer[last:] = self.buffer[last:]
        self.memory.download(0, made.buffer[first:last])
        return made

    def load(self, host: Region) -> None:
        """The body's bytes, from a region of the same size."""
        first, last = self.body
        self.memory.upload(0, host.buffer[first:last])

    # Lending --------------------------------------------------------------------------------------

    def invitation(self) -> bytes:
        """Return the bytes that a peer needs to open the allocation; only the body's place where it
        cannot."""
        place = _OPENED.pack(*self.body)
        memory = self.memory
        try:
            raw, start = memory.export()
        except Rejected:
            return place
        identity = memory.device.identity
        return place + _HANDLE.pack(identity, os.getpid(), start, memory.nbytes, raw)

    def lend(self, pid: int) -> Callable[[], None]:
        """A peer is told how to open it; the result is called when it has given it back. One that
        never says so has it until its process ends."""
        for old in [lease for lease in self._leases if not lease.alive()]:
            old.end()
            self._leases.remove(old)
        lease = _Lease(pid)
        self._leases.append(lease)

        def ended() -> None:
            lease.end()
            if lease in self._leases:
                self._leases.remove(lease)
            reap()

        return ended

    def close(self) -> None:
        if self.closed:
            return
        with self._copying:
            if self._unpin is not None:
                self._unpin()
                self._unpin = None
            super().close()
            memory, self._memory = self._memory, None
        assert memory is not None
        with _lock:
            _retired.append((memory, self._leases))
        del memory
        reap()


# The importing side -------------------------------------------------------------------------------


class _Part:
    """A part of an allocation, under the same rules."""

    def __init__(self, whole: DeviceMemory, start: int, nbytes: int) -> None:
        self._held, self._start, self._nbytes = [whole], start, nbytes

    @property
    def _whole(self) -> DeviceMemory:
        return self._held[0]

    @property
    def device(self) -> Device:
        return self._whole.device

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def address(self) -> int:
        return self._whole.address + self._start

    def upload(self, offset: int, source: memoryview) -> None:
        self._whole.upload(self._start + offset, source)

    def download(self, offset: int, target: memoryview) -> None:
        self._whole.download(self._start + offset, target)

    def copy_from(self, offset: int, source: DeviceMemory, start: int, nbytes: int) -> None:
        self._whole.copy_from(self._start + offset, source, start, nbytes)

    def export(self) -> tuple[bytes, int]:
        raw, start = self._whole.export()
        return raw, start + self._start


class Loan(_Part):
    """A peer's allocation, open here. `returned` is called, in any thread, when its
    last user has gone and it is closed."""

    def __init__(self, memory: DeviceMemory, returned: Callable[[], None]) -> None:
        super().__init__(memory, 0, memory.nbytes)
        weakref.finalize(self, _give_back, self._held, returned).atexit = False


def _give_back(held: list[DeviceMemory], returned: Callable[[], None]) -> None:
    """Closed first, then told: the owner may free it as soon as it hears."""
    held.clear()
    returned()


def body_of(invitation: bytes) -> tuple[int, int]:
    """Raises AccessRefused."""
    if len(invitation) not in (_OPENED.size, _OPENED.size + _HANDLE.size):
        raise AccessRefused(f"an invitation to device memory of {len(invitation)} bytes")
    first, last = _OPENED.unpack_from(invitation)
    if first >= last:
        raise AccessRefused(f"an invitation to a body of bytes [{first}, {last})")
    return first, last


def borrow(device: Device | None, invitation: bytes, returned: Callable[[], None]) -> Loan | None:
    """Open a peer's allocation here, or None: no device here, another one, or no handle. Raises
    AccessRefused."""
    first, last = body_of(invitation)
    if device is None or len(invitation) == _OPENED.size:
        return None
    identity, pid, start, nbytes, raw = _HANDLE.unpack_from(invitation, _OPENED.size)
    if identity != device.identity:
        return None
    if nbytes != last - first:
        raise AccessRefused(f"{nbytes} bytes of device memory for a body of {last - first}")
    if pid == os.getpid():
        own = own_exports.get((device.name, raw))
        if own is None:
            raise AccessRefused("the allocation is this process's own, and is freed")
        return Loan(_Part(own, start, nbytes), returned)
    return Loan(device.open(raw, start, nbytes), returned)


own_exports: Final["weakref.WeakValueDictionary[tuple[str, bytes], Any]"] = (
    weakref.WeakValueDictionary()
)
"""Memory that this process exported, by device and raw handle: whole allocations."""
