"""Find the TCP ports of processes: the inodes of their sockets in the kernel's table."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ESTABLISHED: Final = "01"
_SOCKET: Final = "socket:["


def inodes(pid: int, proc: Path = Path("/proc")) -> set[str]:
    """Return the inodes of a process's sockets; none: it is gone, or another account's."""
    found = set()
    try:
        for name in os.listdir(proc / str(pid) / "fd"):
            target = os.readlink(proc / str(pid) / "fd" / name)
            if target.startswith(_SOCKET):
                found.add(target[len(_SOCKET) : -1])
    except OSError:  # It ended, or closed one just now: what was read counts.
        return found
    return found


def ports(pids: Iterable[int], proc: Path = Path("/proc")) -> set[int]:
    """Return the local ports of the processes' connections over IPv4, or over IPv6 to addresses of
    IPv4, in this network namespace."""
    own = {inode for pid in pids for inode in inodes(pid, proc)}
    found: set[int] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "self" / "net" / table).read_text().splitlines()[1:]
        except FileNotFoundError:  # The host has no IPv6.
            continue
        for words in map(str.split, lines):
            if words[3] == ESTABLISHED and words[9] in own:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found
