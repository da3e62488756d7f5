"""Learn how much each send call on a socket took, from the kernel's tracepoint.

`sock:sock_send_length` (Linux 6.3) tells the result of every send on this host: loopback and TLS
alike, nothing of what is sent. Nothing is preloaded into programs. Opening the events needs root or
CAP_PERFMON, and tracefs; reading them does not. Structures are those of linux/perf_event.h.
"""

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from slackwater.common.base.errors import Unavailable

TRACEFS: Final = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
EVENT: Final = "events/sock/sock_send_length/id"
PAGES: Final = 32
"""Pages of each core's ring of events: some 2,300 calls."""
CAP_PERFMON: Final = 38
TCP_FAMILIES: Final = (2, 10)
_PERF_EVENT_OPEN: Final = {"x86_64": 298, "aarch64": 241}
_TRACEPOINT, _ATTRIBUTES_BYTES = 2, 128
_TID, _TIME, _RAW = 1 << 1, 1 << 2, 1 << 10
_DISABLED, _WATERMARK = 1 << 0, 1 << 14
_ENABLE, _DISABLE = 0x2400, 0x2401
_CLOSE_ON_EXEC: Final = 8
_SAMPLE, _LOST = 9, 2
_HEAD, _TAIL = 1024, 1032
_NEW_MOUNTS, _RECURSIVE, _PRIVATE = 0x00020000, 1 << 14, 1 << 18


class SendCall(NamedTuple):
    ns: int
    pid: int
    socket: int
    nbytes: int


class _Ring:
    """One core's events: the kernel writes at its head, we read up to it and say so in its tail."""

    def __init__(self, fd: int) -> None:
        self.fd, self._size = fd, PAGES * mmap.PAGESIZE
        self._memory = mmap.mmap(fd, self._size + mmap.PAGESIZE)
        self.lost = 0

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)

    def drain(self) -> Iterator[SendCall]:
        head, tail = struct.unpack_from("=QQ", self._memory, _HEAD)
        while tail < head:
            kind, size, body = self._record(tail)
            if kind == _SAMPLE:
                pid, _, ns, _ = struct.unpack_from("=IIQI", body, 8)
                socket, family, _, nbytes, _ = struct.unpack_from("=QHHii", body, 36)
                if family in TCP_FAMILIES and nbytes > 0:
                    yield SendCall(ns, pid, socket, nbytes)
            elif kind == _LOST:
                self.lost += struct.unpack_from("=QQ", body, 8)[1]
            tail += size
            struct.pack_into("=Q", self._memory, _TAIL, tail)

    def _record(self, tail: int) -> tuple[int, int, bytes]:
        """Return kind, size and bytes of the record at `tail`, which may wrap around."""
        at = tail % self._size
        kind, _, size = struct.unpack_from("=IHH", self._memory, mmap.PAGESIZE + at)
        first = mmap.PAGESIZE + at
        body = self._memory[first : min(first + size, mmap.PAGESIZE + self._size)]
        return kind, size, body + self._memory[mmap.PAGESIZE : mmap.PAGESIZE + size - len(body)]


class SendCalls:
    """Opening it raises Unavailable, which names what lacks. Events come between `enable` and
    `disable`."""

    def __init__(self) -> None:
        event = _event()
        self._rings: list[_Ring] = []
        try:
            for core in sorted(os.sched_getaffinity(0)):
                self._rings.append(_Ring(_opened(event, core)))
        except OSError as error:
            self.close()
            raise Unavailable(
                f"send calls cannot be watched: {error.strerror}; run the service as root, or with "
                "CAP_PERFMON"
            ) from error

    def close(self) -> None:
        for ring in self._rings:
            ring.close()

    def enable(self) -> None:
        for ring in self._rings:
            fcntl.ioctl(ring.fd, _ENABLE, 0)

    def disable(self) -> None:
        for ring in self._rings:
            fcntl.ioctl(ring.fd, _DISABLE, 0)

    def read(self) -> list[SendCall]:
        """Return the calls since the last time, in order; those of one core, where one reads late,
        may come after later ones of another."""
        return sorted(call for ring in self._rings for call in ring.drain())

    @property
    def lost(self) -> int:
        return sum(ring.lost for ring in self._rings)


def mount_tracefs() -> None:
    """Mount tracefs where no one did, in a mount namespace of this process's own. For a process of
    one thread. Where that is refused, opening SendCalls says what lacks."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = TRACEFS[0]
    if (folder / "events").is_dir() or not folder.is_dir() or libc.unshare(_NEW_MOUNTS):
        return
    if libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None) == 0:
        libc.mount(b"nodev", bytes(folder), b"tracefs", 0, None)


def _event() -> int:
    """Return the tracepoint's number. Raises Unavailable."""
    reason = "tracefs is not mounted (mount -t tracefs nodev /sys/kernel/tracing)"
    for folder in TRACEFS:
        try:
            return int((folder / EVENT).read_text())
        except PermissionError:
            reason = f"{folder} cannot be read; run the service as root"
        except FileNotFoundError:
            if (folder / "events").is_dir():
                reason = "this kernel has no tracepoint sock:sock_send_length (Linux 6.3 has)"
    raise Unavailable(f"send calls cannot be watched: {reason}")


def _opened(event: int, core: int) -> int:
    """Open the event on one core, for every process. Raises OSError."""
    attributes = bytearray(_ATTRIBUTES_BYTES)
    struct.pack_into(
        "=IIQQQQQI", attributes, 0, _TRACEPOINT, _ATTRIBUTES_BYTES, event, 1,
        _TID | _TIME | _RAW, 0, _DISABLED | _WATERMARK, PAGES * mmap.PAGESIZE // 4,
    )  # fmt: skip
    libc = ctypes.CDLL(None, use_errno=True)
    number = _PERF_EVENT_OPEN.get(os.uname().machine)
    if number is None:
        raise OSError(0, f"unknown on {os.uname().machine}")
    given = (ctypes.c_char * len(attributes)).from_buffer(attributes)
    fd: int = libc.syscall(number, given, -1, core, -1, _CLOSE_ON_EXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd
