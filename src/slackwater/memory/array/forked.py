"""Guards a forked process against using its parent's arrays: it ends with a reason.

The kernel serves an array's pages to the process that made it alone. Its child would find nothing
at these addresses (SIGSEGV), or, worse, zeros. So each forked process maps memory of its own there,
of which no page is ever given: who touches it wakes a thread, compiled, that needs no interpreter
lock, writes one line and ends the process. Signal handlers, such as those of torch's data loaders,
are left alone. Methods of the array raise instead (array.py).
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, Final, Protocol

import numpy as np
from numba import types

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.native import libc
from slackwater.common.native.compiled import njit
from slackwater.memory.array.userfault import Userfault, open_userfault
from slackwater.memory.store import PAGE_BYTES

EXIT: Final = 1
_STDERR: Final = 2
_MESSAGE_BYTES: Final = 32
"""The size of a fault message."""
_EINTR: Final = 4
_NORESERVE: Final = 0x4000
_FIXED_NOREPLACE: Final = 0x100000
_START_S: Final = 5.0
_TOUCHED: Final = (
    b"slackwater: a forked process touched a RemoteArray of its parent, and ends: make the array "
    b"in it, or share samples by slackwater.memory.spill.SpillServer\n"
)
_read: Any = types.ExternalFunction("read", libc.SIZE(libc.INT, libc.ADDRESS, libc.ADDRESS))
_write: Any = types.ExternalFunction("write", libc.SIZE(libc.INT, libc.ADDRESS, libc.ADDRESS))
_exit: Any = types.ExternalFunction("_exit", types.void(libc.INT))
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class Forkable(Protocol):
    """An array as the forked process sees it."""

    @property
    def area(self) -> tuple[int, int] | None:
        """Return (address, bytes); None: the array is closed."""
        ...

    def forked(self) -> None:
        """Give up what is shared with the process that made the array: this one did not."""
        ...


_arrays: "weakref.WeakSet[Any]" = weakref.WeakSet()


def watch_forks(array: Forkable) -> None:
    """Guard this array against forked processes from now on."""
    _guard(-1, np.zeros(1, np.int64), np.frombuffer(_TOUCHED, np.uint8).copy())  # It is loaded now.
    _arrays.add(array)


def _after_fork() -> None:
    arrays: list[Forkable] = list(_arrays)
    for array in arrays:
        array.forked()
    areas = [area for array in arrays if (area := array.area) is not None]
    if areas:
        _keep_off(areas)


def _keep_off(areas: Iterable[tuple[int, int]]) -> None:
    """Start one guard for all arrays."""
    try:
        faults = open_userfault()
    except ConfigRejected as error:  # It gave up what its parent was allowed.
        os.write(
            _STDERR, f"slackwater: RemoteArrays are not guarded after a fork: {error}\n".encode()
        )
        return
    os.set_blocking(faults, True)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED_NOREPLACE
    for address, nbytes in areas:
        found = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
        assert found == address, (found, address)  # MADV_DONTFORK has left it free.
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_DONTFORK)
        Userfault(faults, address, nbytes // PAGE_BYTES).register()
    words = np.zeros(1, np.int64)
    message = np.frombuffer(_TOUCHED, np.uint8).copy()
    guard = threading.Thread(
        target=_guard, args=(faults, words, message), name="array-guard", daemon=True
    )
    guard.start()
    deadline_s = time.monotonic() + _START_S
    while not words[0] and time.monotonic() < deadline_s:  # From then on it needs no lock.
        time.sleep(1e-4)


@njit(nogil=True, cache=True)
def _guard(faults, words, message):
    """Wait until somebody touches what is guarded."""
    words[0] = 1
    buffer = np.zeros(_MESSAGE_BYTES, np.uint8)
    came = -1
    while came < 0:
        came = _read(
            libc.INT(faults), libc.ADDRESS(buffer.ctypes.data), libc.ADDRESS(_MESSAGE_BYTES)
        )
        if came < 0 and libc.errno() != _EINTR:
            return
    if came > 0:
        _write(libc.INT(_STDERR), libc.ADDRESS(message.ctypes.data), libc.ADDRESS(message.size))
        _exit(libc.INT(EXIT))


os.register_at_fork(after_in_child=_after_fork)
