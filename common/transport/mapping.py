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
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LARGE_PAGE: Final = 2 * 1024 * 1024
_MAP_FIXED: Final = 0x10
_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
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

    def populate(self, first: int = 0, nbytes: int = 0) -> None:
        """Take the pages, of so many bytes or of all, into this process's tables now. A kernel that
        cannot (before 5.14) faults page by page later."""
        _libc.madvise(self.address + first, nbytes or self.nbytes, _MADV_POPULATE_WRITE)

    def enlarge(self, first: int = 0, nbytes: int = 0) -> None:
        """Ask for large pages, which copies the small ones: about a second per GB. A kernel that
        cannot, or has none left, leaves it as it is."""
        if (nbytes or self.nbytes) >= LARGE_PAGE:
            _libc.madvise(self.address + first, nbytes or self.nbytes, _MADV_COLLAPSE)

    def close(self) -> None:
        """Unmap now, or when the last view (a numpy array's, say) is collected."""
        try:
            self.view.release()
        except BufferError:
            return


class Window:
    """Consecutive addresses on which pieces of other shared mappings are shown, each a second time,
    one behind the other. The memory that is shown stays at least until something else is."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """Bytes of each piece: whole pages, but for the last. Raises OSError."""
        ends = list(accumulate(lengths, initial=0))
        if any(end % mmap.PAGESIZE for end in ends[:-1]):
            raise ValueError(f"pieces of {lengths} bytes: all but the last must be whole pages")
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._at = _checked(_libc.mmap(None, ends[-1], 0, private, -1, 0))
        self._pieces = list(zip(ends, lengths, strict=False))
        memory = (ctypes.c_ubyte * ends[-1]).from_address(self._at)
        weakref.finalize(memory, _unmap, self._at, ends[-1]).atexit = False
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array(memory)

    def show(self, piece: int, array: NDArray[Any]) -> None:
        """From now on that memory, which begins at a page of a shared mapping. Raises OSError."""
        first, nbytes = self._pieces[piece]
        if array.nbytes != nbytes or array.ctypes.data % mmap.PAGESIZE:
            raise ValueError(f"{array.nbytes} bytes at {array.ctypes.data:#x}, {nbytes} fit")
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
        # An old size of 0 maps a shared mapping once more; the old one stays where it is.
        _checked(_libc.mremap(array.ctypes.data, 0, nbytes, flags, self._at + first))


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
