"""A region: memory that a fabric can register and a supervisor can keep.

It is a memfd, mapped shared, so that one object serves every transport: `shm` hands the descriptor
to the peer, `tcp` receives into the mapping, and systemd's (or our supervisor's) descriptor store
holds it across a kill of its owner. Its size is sealed: a party that could shrink memory which
another has mapped could kill that other with SIGBUS. (Punching holes remains possible.)
"""

import ctypes
import fcntl
import mmap
import os
import stat
from typing import Final

from slackwater.common.errors import AccessRefused, Rejected

_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)


class Region:
    """`nbytes` of zeroed shared memory, or the memory behind an existing descriptor."""

    def __init__(self, fd: int, nbytes: int, label: str) -> None:
        self._fd = fd
        self.nbytes = nbytes
        self.label = label
        self._map = mmap.mmap(fd, nbytes)
        self.buffer = memoryview(self._map)

    @classmethod
    def create(cls, nbytes: int, label: str, *, prefault: bool = False) -> "Region":
        """Raises Rejected when the size is not positive, MemoryError when there is no room.

        `prefault` takes the pages now (about 1 s per GB, the interpreter lock released): the first
        touch of a fresh page is some ten times slower than a later one, and a machine without room
        says so here and not by a signal in the middle of a write.
        """
        if nbytes <= 0:
            raise Rejected(f"region {label}: {nbytes} bytes, at least 1 is needed")
        fd = -1
        try:
            fd = os.memfd_create(label[:60], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            if prefault:
                os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            region = cls(fd, nbytes, label)
            if prefault:
                region.populate()
            return region
        except (OSError, OverflowError, ValueError) as error:
            if fd >= 0:
                os.close(fd)
            raise MemoryError(f"region {label}: {nbytes} bytes: {error}") from error

    @classmethod
    def adopt(cls, fd: int, label: str) -> "Region":
        """Take over a descriptor (from a peer or the descriptor store); it is ours from now on."""
        return cls(fd, os.fstat(fd).st_size, label)

    def populate(self) -> None:
        """Map every page into this process now, the interpreter lock released: a first touch costs
        microseconds a page, and whoever is charged for CPU time would be charged for that. Blocks
        for about 0.1 s per GB of memory that is there; a kernel that cannot (before 5.14) faults
        page by page later."""
        if self.closed:
            return
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(self.nbytes), _MADV_POPULATE_WRITE)

    def fileno(self) -> int:
        return self._fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        """Let go of the descriptor; the mapping goes when the last view of it does."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        release(self.buffer, self._map)
        self._map = None  # type: ignore[assignment]  # A view that is out keeps it.


def release(view: memoryview, mapping: mmap.mmap) -> None:
    """Unmap now, or when the last view (a numpy array's, say) is collected."""
    try:
        view.release()
        mapping.close()
    except BufferError:
        return  # Views are out: they hold the map, and it closes with the last of them.


def check_foreign(fd: int) -> int:
    """The size of a descriptor that a peer sent. Raises AccessRefused unless it is memory whose
    size nobody can change under us."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        status = os.fstat(fd)
    except OSError as error:
        raise AccessRefused(f"the peer's descriptor is no memfd: {error}") from error
    if not stat.S_ISREG(status.st_mode) or status.st_size <= 0:
        raise AccessRefused("the peer's descriptor is no memory, or is empty")
    if not seals & fcntl.F_SEAL_SHRINK:
        raise AccessRefused("the peer's memory could shrink under us: it must be sealed")
    return status.st_size
