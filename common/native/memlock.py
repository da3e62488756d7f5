"""Memory that stays: what a process must have through which other memory is swapped.

The kernel swaps a page out in order to free memory. Whoever carries that page elsewhere must not
wait for a page of its own that was swapped out, nor for writeback that waits for it, nor be killed
to make room: each of these is a machine that stands still. Every function here says what is missing
and what would help, or nothing.
"""

import ctypes
import os
import resource
from pathlib import Path
from typing import Final

_MCL_CURRENT: Final = 1
_MCL_FUTURE: Final = 2
_MCL_ONFAULT: Final = 4
_PR_SET_IO_FLUSHER: Final = 57
_CAP_IPC_LOCK: Final = 14
_STATUS: Final = Path("/proc/self/status")
_OOM_SCORE: Final = Path("/proc/self/oom_score_adj")
_NEVER: Final = "-1000"


def lock_memory(*, as_touched: bool = False) -> str:
    """Keep this process's present and future memory from being swapped out. Pages come in now, or
    when they are touched.

    Refused under a limit, however high: memory that is asked for beyond it would fail later, in the
    middle of a request.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard != resource.RLIM_INFINITY and not capable(_CAP_IPC_LOCK):
        return "locked memory is limited: run as root, or set LimitMEMLOCK=infinity (ulimit -l)"
    if hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    flags = _MCL_CURRENT | _MCL_FUTURE | (_MCL_ONFAULT if as_touched else 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(flags) != 0:
        return f"memory cannot be locked: {os.strerror(ctypes.get_errno())}"
    return ""


def become_io_flusher() -> str:
    """Let this thread, and those that it starts, get memory without waiting for I/O to free
    some."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_IO_FLUSHER, 1, 0, 0, 0) != 0:
        why = os.strerror(ctypes.get_errno())
        return f"no exemption from writeback: {why}; run as root, or with CAP_SYS_RESOURCE"
    return ""


def be_killed_last() -> str:
    """The OOM killer leaves this process alone."""
    try:
        _OOM_SCORE.write_text(_NEVER)
    except OSError as error:
        why = error.strerror
        return f"no exemption from the OOM killer: {why}; run as root, or with CAP_SYS_RESOURCE"
    return ""


def capable(number: int) -> bool:
    """Say whether this process has a capability, by its number in linux/capability.h."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
