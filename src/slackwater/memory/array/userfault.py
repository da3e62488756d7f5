"""userfaultfd: the kernel tells a pager which page of a mapping is touched, and waits for it.

The program makes the descriptor and registers its mapping; the pager, another process, reads the
faults and resolves them through an inherited copy: every call here acts on the program's memory.
The mapping is a shared memfd. So a page is taken away by punching it out of the file, which the
pager may do (only a program itself may MADV_DONTNEED its own private memory), and read out through
the pager's own mapping of the file.
"""

import ctypes
import errno
import fcntl
import os
import platform
import struct
from dataclasses import dataclass
from typing import Final

from slackwater.common.base.errors import ConfigRejected
from slackwater.memory.store import PAGE_BYTES

_SYSCALL: Final = {"x86_64": 323, "aarch64": 282}
_API: Final = 0xAA
_PAGEFAULT_FLAG_WP: Final = 1 << 0
_MISSING_SHMEM: Final = 1 << 5
_THREAD_ID: Final = 1 << 8
_WP_SHMEM: Final = 1 << 12
_MODES: Final = 1 | 2
"""Registered for pages that are missing, and for writes to protected ones."""
_COPY_WP: Final = 2
_WRITEPROTECT_DONTWAKE: Final = 2
_EVENT_PAGEFAULT: Final = 0x12
_MESSAGE: Final = struct.Struct("<B7xQQI4x")
_MESSAGES: Final = 64
"""Faults that are read at a time."""
_COPY_TRIES: Final = 1000
"""The kernel answers "again" while the program changes its mappings."""


def _request(direction: int, number: int, size: int) -> int:
    return direction << 30 | size << 16 | _API << 8 | number


_DO_API: Final = _request(3, 0x3F, 24)
_DO_REGISTER: Final = _request(3, 0x00, 32)
DO_WAKE: Final = _request(2, 0x02, 16)
_DO_COPY: Final = _request(3, 0x03, 40)
_DO_ZEROPAGE: Final = _request(3, 0x04, 32)
_DO_WRITEPROTECT: Final = _request(3, 0x06, 24)
_DO_POISON: Final = _request(3, 0x08, 32)


@dataclass(frozen=True, slots=True)
class Fault:
    """`protected`: a write to a page that is there; else the page is missing. The thread waits."""

    address: int
    thread: int
    write: bool
    protected: bool


def open_userfault() -> int:
    """A descriptor for this process's memory. Raises ConfigRejected with what is missing."""
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise ConfigRejected(f"arrays in remote memory are not known on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        why = ctypes.get_errno()
        remedy = {
            errno.EPERM: "run as root, or set sysctl vm.unprivileged_userfaultfd=1",
            errno.ENOSYS: "the kernel needs CONFIG_USERFAULTFD",
        }.get(why, "see userfaultfd(2)")
        raise ConfigRejected(f"userfaultfd: {os.strerror(why)}; {remedy}")
    asked = bytearray(
        struct.pack("<QQQ", _API, _PAGEFAULT_FLAG_WP | _MISSING_SHMEM | _THREAD_ID | _WP_SHMEM, 0)
    )
    try:
        fcntl.ioctl(fd, _DO_API, asked)
    except OSError as error:
        os.close(fd)
        raise ConfigRejected(
            f"userfaultfd: {error.strerror}; shared memory with write protection needs Linux 5.19"
        ) from error
    return fd


class Userfault:
    """Calls on one registered mapping. Pages count from its start."""

    def __init__(self, fd: int, address: int, pages: int) -> None:
        self.fd = fd
        self._address = address
        self._pages = pages

    def register(self) -> None:
        """By the program, once."""
        fcntl.ioctl(
            self.fd,
            _DO_REGISTER,
            bytearray(struct.pack("<QQQQ", self._address, self._pages * PAGE_BYTES, _MODES, 0)),
        )

    def page(self, fault: Fault) -> int:
        return (fault.address - self._address) // PAGE_BYTES

    def faults(self) -> list[Fault]:
        """Return the faults that are new. Raises OSError when the program is gone."""
        try:
            data = os.read(self.fd, _MESSAGE.size * _MESSAGES)
        except BlockingIOError:
            return []
        return [
            Fault(address, thread, bool(flags & 1), bool(flags & 2))
            for event, flags, address, thread in _MESSAGE.iter_unpack(data)
            if event == _EVENT_PAGEFAULT
        ]

    def copy(self, page: int, count: int, source: int, *, protected: bool) -> None:
        """Fill missing pages from the address `source` and wake who waits for them."""
        done = 0
        mode = _COPY_WP if protected else 0
        for _ in range(_COPY_TRIES):
            asked = bytearray(
                struct.pack(
                    "<QQQQq",
                    self._address + page * PAGE_BYTES + done,
                    source + done,
                    count * PAGE_BYTES - done,
                    mode,
                    0,
                )
            )
            try:
                fcntl.ioctl(self.fd, _DO_COPY, asked)
                return
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    raise
                done += max(0, struct.unpack_from("<q", asked, 32)[0])
        raise OSError(errno.EAGAIN, "the program changes its mappings without end")

    def zero(self, page: int) -> None:
        """Fill a missing page with zeros, writable."""
        for _ in range(_COPY_TRIES):
            try:
                self._range(_DO_ZEROPAGE, page, 1, "<QQQq", 0, 0)
                return
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    raise

    def protect(self, page: int, count: int) -> None:
        """When this returns nobody can write to these pages: who tries, waits."""
        self._range(_DO_WRITEPROTECT, page, count, "<QQQ", 1)

    def unprotect(self, page: int, count: int) -> None:
        """And wake who waits to write."""
        self._range(_DO_WRITEPROTECT, page, count, "<QQQ", 0)

    def wake(self, page: int, count: int) -> None:
        self._range(DO_WAKE, page, count, "<QQ")

    def poison(self, page: int) -> None:
        """Poison this missing page: a thread that touches it gets SIGBUS. OSError before Linux
        6.6."""
        # The mark of its protection has outlived it, and counts as something that is there.
        self._range(_DO_WRITEPROTECT, page, 1, "<QQQ", _WRITEPROTECT_DONTWAKE)
        self._range(_DO_POISON, page, 1, "<QQQq", 0, 0)

    def _range(self, request: int, page: int, count: int, layout: str, *rest: int) -> None:
        start, length = self._address + page * PAGE_BYTES, count * PAGE_BYTES
        fcntl.ioctl(self.fd, request, bytearray(struct.pack(layout, start, length, *rest)))
