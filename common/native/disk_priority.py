"""A thread's priority at the disk."""

import ctypes
import platform
from typing import Final

_SYSCALLS: Final = {"x86_64": 251, "aarch64": 30}
"""ioprio_set's number, which the C library has no name for."""
_WHO_PROCESS: Final = 1
_CLASS_IDLE: Final = 3 << 13


def yield_the_disk() -> None:
    """Let this thread read and write only what no other wants to, if the disk's scheduler knows
    priorities. Its priority at the processor stays: it shares Python's lock with others, who would
    wait for it."""
    number = _SYSCALLS.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _WHO_PROCESS, 0, _CLASS_IDLE)
