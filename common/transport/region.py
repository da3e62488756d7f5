"""A region: memory that a fabric can register and a supervisor can keep.

It is a memfd, mapped shared, so that one object serves every transport: `shm` hands the descriptor
to the peer, `tcp` receives into the mapping, and systemd's (or our supervisor's) descriptor store
holds it across a kill of its owner.
"""

import mmap
import os

from slackwater.common.errors import Rejected


class Region:
    """`nbytes` of zeroed shared memory, or the memory behind an existing descriptor."""

    def __init__(self, fd: int, nbytes: int, label: str) -> None:
        self._fd = fd
        self.nbytes = nbytes
        self.label = label
        self._map = mmap.mmap(fd, nbytes)
        self.buffer = memoryview(self._map)

    @classmethod
    def create(cls, nbytes: int, label: str) -> "Region":
        """Raises Rejected when the size is not positive, MemoryError when there is no room."""
        if nbytes <= 0:
            raise Rejected(f"region {label}: {nbytes} bytes, at least 1 is needed")
        fd = os.memfd_create(label[:200], os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            return cls(fd, nbytes, label)
        except OSError as error:
            os.close(fd)
            raise MemoryError(f"region {label}: {nbytes} bytes: {error}") from error

    @classmethod
    def adopt(cls, fd: int, label: str) -> "Region":
        """Take over a descriptor (from a peer or the descriptor store); it is ours from now on."""
        return cls(fd, os.fstat(fd).st_size, label)

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
        try:
            self.buffer.release()
            self._map.close()
        except BufferError:
            # A numpy view is still out: the map closes with it, when it is collected.
            self._map = None  # type: ignore[assignment]
