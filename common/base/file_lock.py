"""One process at a time: a lock on a file, which the kernel lets go when its process ends.

A child that inherits the descriptor holds the lock as well: it is free once both have ended.
"""

import fcntl
import os
from pathlib import Path


class FileLock:
    """Take it with `take`; it is held until `release`, or until this process and every child that
    was given `fd` are gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def take(self) -> str:
        """Empty: it is ours, and says so with our pid. Else the pid of the process that has it."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip()
            os.close(fd)
            return holder or "unknown"
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        self._fd = fd
        return ""

    @property
    def fd(self) -> int:
        """The descriptor, for a child that must not outlive the lock. -1: the lock is not held."""
        return self._fd

    def release(self) -> None:
        """The file stays: removing it would let two others lock two files of one name."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
