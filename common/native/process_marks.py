"""Find processes by a variable in their environment, whatever session or parent they have.

A process inherits it from whoever started it; only a program that clears its environment escapes.
"""

import os
from pathlib import Path


def mark_of(pid: int, name: str) -> str | None:
    """Return what the process was started with as `name`; None: nothing, or it is gone."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # Gone, or another user's.
        return None
    start = f"{name}=".encode()
    for variable in environment.split(b"\0"):
        if variable.startswith(start):
            return variable[len(start) :].decode(errors="replace")
    return None


def marks(name: str) -> dict[int, str]:
    """Map every process but this one that has the variable to its value."""
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdecimal())
    found = {pid: mark_of(pid, name) for pid in pids if pid != os.getpid()}
    return {pid: mark for pid, mark in found.items() if mark is not None}
