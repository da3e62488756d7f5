"""A region: memory that a fabric can register and a supervisor can keep.

It is a memfd, mapped shared, so that one object serves every transport: `shm` hands the descriptor
to the peer, `tcp` receives into the mapping, and systemd's (or our supervisor's) descriptor store
holds it across a kill of its owner. Its size is sealed: a party that could shrink memory which
another has mapped could kill that other with SIGBUS. (Punching holes remains possible.)
"""

import bisect
import ctypes
import fcntl
import os
import stat
import threading
import weakref
from collections.abc import Callable
from typing import Final

from slackwater.common.base.errors import AccessRefused, Rejected
from slackwater.common.transport.mapping import Mapping

_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# The open regions of this process by their first address: whose memory is this? Threads close them.
_lock = threading.Lock()
_starts: list[int] = []
_by_start: "dict[int, weakref.ref[Region]]" = {}


class Region:
    """`nbytes` of zeroed shared memory, or the memory behind an existing descriptor."""

    def __init__(self, fd: int, nbytes: int, label: str) -> None:
        self._fd = fd
        self.nbytes = nbytes
        self.label = label
        self._map = Mapping(fd, nbytes)
        self.buffer = self._map.view
        self._closers: dict[Callable[[], None], None] = {}
        self.address = _enlist(self)
        """Where the buffer begins in this process."""

    @classmethod
    def create(cls, nbytes: int, label: str, *, prefault: bool = False) -> "Region":
        """Raises Rejected when the size is not positive, MemoryError when there is no room.

        `prefault` takes the pages now.
        """
        if nbytes <= 0:
            raise Rejected(f"region {label}: {nbytes} bytes, at least 1 is needed")
        fd = -1
        try:
            fd = os.memfd_create(label[:60], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            region = cls(fd, nbytes, label)
        except (OSError, OverflowError, ValueError) as error:
            if fd >= 0:
                os.close(fd)
            raise MemoryError(f"region {label}: {nbytes} bytes: {error}") from error
        if prefault:
            try:
                region.prefault()
            except MemoryError:
                region.close()
                raise
        return region

    @classmethod
    def adopt(cls, fd: int, label: str) -> "Region":
        """Take over a descriptor (from a peer or the descriptor store); it is ours from now on."""
        return cls(fd, os.fstat(fd).st_size, label)

    def prefault(self) -> None:
        """Take every page now (about 1 s per GB, the interpreter lock released): the first touch of
        a fresh page is some ten times slower than a later one, and a machine without room says so
        here and not by a signal in the middle of a write. Raises MemoryError."""
        try:
            os.posix_fallocate(self._fd, 0, self.nbytes)
        except OSError as error:
            why = f"region {self.label}: {self.nbytes} bytes: {error}"
            raise MemoryError(why) from error
        self.populate()

    def populate(self) -> None:
        """Map every page into this process now, the interpreter lock released: a first touch costs
        microseconds a page, and whoever is charged for CPU time would be charged for that. In large
        pages where the kernel has them. Blocks for about 0.1 s per GB of memory that is there."""
        if self.closed:
            return
        self._map.enlarge()
        self._map.populate()

    def take_pages(self, first: int, nbytes: int) -> None:
        """Make the pages of a part that begins at a large page present, as `create` prefaults and
        `populate` maps them. Raises MemoryError."""
        if self.closed:
            return
        nbytes = min(nbytes, self.nbytes - first)
        try:
            os.posix_fallocate(self._fd, first, nbytes)
        except OSError as error:
            raise MemoryError(f"region {self.label}: {self.nbytes} bytes: {error}") from error
        self._map.enlarge(first, nbytes)
        self._map.populate(first, nbytes)

    # Memory elsewhere (gpu.py): for a memfd there is nothing to do -----------------------------

    in_place = True
    """A peer that maps the memfd works in the region itself."""

    def arrived(self, offset: int, nbytes: int) -> None:
        """A transport has put bytes into the buffer there."""

    def fetch(self, offset: int, nbytes: int) -> None:
        """A transport is about to send the buffer's bytes from there."""

    def whole(self) -> "Region":
        """All its bytes in one memfd: what a handover gives. The caller closes what is not us."""
        return self

    def fileno(self) -> int:
        return self._fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def when_closed(self, call: Callable[[], None]) -> None:
        """For whoever registered the memory with a device: called once, in the closing thread."""
        self._closers[call] = None

    def forget_when_closed(self, call: Callable[[], None]) -> None:
        self._closers.pop(call, None)

    def close(self) -> None:
        """Let go of the descriptor; the mapping goes when the last view of it does."""
        if self._fd < 0:
            return
        _delist(self, self.address)
        closers, self._closers = self._closers, {}
        for call in closers:
            call()
        os.close(self._fd)
        self._fd = -1
        self._map.close()


def _enlist(region: Region) -> int:
    start = ctypes.addressof(ctypes.c_char.from_buffer(region.buffer))
    with _lock:
        if start not in _by_start:  # Else of one that was collected without being closed.
            bisect.insort(_starts, start)
        _by_start[start] = weakref.ref(region)
    return start


def _delist(region: Region, start: int) -> None:
    with _lock:
        known = _by_start.get(start)
        if known is not None and known() is region:
            del _by_start[start]
            _starts.remove(start)


def region_at(address: int, nbytes: int) -> Region | None:
    """The open region of this process in whose mapping these bytes lie."""
    with _lock:
        position = bisect.bisect_right(_starts, address) - 1
        if position < 0:
            return None
        start = _starts[position]
        region = _by_start[start]()
        if region is None:
            del _by_start[start], _starts[position]
            return None
        return region if address + nbytes <= start + region.nbytes else None


def check_foreign(fd: int) -> int:
    """The size of a descriptor that a peer sent. Raises AccessRefused unless it is memory whose
    size nobody can change under us."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        status = os.fstat(fd)
    except OSError as error:
        raise AccessRefused(f"the peer's descriptor is not a memfd: {error}") from error
    if not stat.S_ISREG(status.st_mode) or status.st_size <= 0:
        raise AccessRefused("the peer's descriptor is not memory, or is empty")
    if not seals & fcntl.F_SEAL_SHRINK:
        raise AccessRefused("the peer's memory could shrink under us: it must be sealed")
    return status.st_size
