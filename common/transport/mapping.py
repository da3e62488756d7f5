"""Shared memory mapped so that the processor can use large pages.

A fold streams through six or more arrays at once, each of which needs its own entries of the
processor's address cache: with pages of 4 KiB it ran a fifth slower than with pages of 2 MiB
(benchmarks/kernels.py, 100 MB). A memfd gets large pages where its mapping begins at a multiple of
2 MiB, and, where the administrator has not allowed them for all shared memory, only on demand
(`enlarge`: MADV_COLLAPSE, Linux 6.1). mmap.mmap cannot choose an address; so this maps by itself.
"""

import ctypes
import mmap
import os
import weakref
from typing import Final

import numpy as np

LARGE_PAGE: Final = 2 * 1024 * 1024
_MAP_FIXED: Final = 0x10
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mapping:
    """`nbytes` of a descriptor, readable and writable, shared with all who map it. It ends with
    the last view of it, `view` included; the descriptor is the caller's and may be closed."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Raises OSError, OverflowError."""
        self.address, reserved = _map(fd, nbytes)
        self.nbytes = nbytes
        memory = (ctypes.c_ubyte * nbytes).from_address(self.address)
        ends = weakref.finalize(memory, _unmap, *reserved)
        ends.atexit = False  # The process's end unmaps everything.
        self.view: memoryview = np.ctypeslib.as_array(memory).data

    def populate(self) -> None:
        """Take the pages into this process's tables now. A kernel that cannot (before 5.14) faults
        page by page later."""
        _libc.madvise(self.address, self.nbytes, _MADV_POPULATE_WRITE)

    def enlarge(self) -> None:
        """Ask for large pages, which copies the small ones: about a second per GB. A kernel that
        cannot, or has none left, leaves it as it is."""
        if self.nbytes >= LARGE_PAGE:
            _libc.madvise(self.address, self.nbytes, _MADV_COLLAPSE)

    def close(self) -> None:
        """Unmap now, or when the last view (a numpy array's, say) is collected."""
        try:
            self.view.release()
        except BufferError:
            return


def _map(fd: int, nbytes: int) -> tuple[int, tuple[int, int]]:
    """(address, (what to unmap, its length))."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if nbytes < LARGE_PAGE:
        address = _checked(_libc.mmap(None, nbytes, access, mmap.MAP_SHARED, fd, 0))
        return address, (address, nbytes)
    length = nbytes + LARGE_PAGE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = _checked(_libc.mmap(None, length, 0, private, -1, 0))
    aligned = -(-reserved // LARGE_PAGE) * LARGE_PAGE
    try:
        flags = mmap.MAP_SHARED | _MAP_FIXED
        _checked(_libc.mmap(aligned, nbytes, access, flags, fd, 0))
    except OSError:
        _unmap(reserved, length)
        raise
    return aligned, (reserved, length)


def _checked(address: int | None) -> int:
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def _unmap(address: int, length: int) -> None:
    _libc.munmap(address, length)
