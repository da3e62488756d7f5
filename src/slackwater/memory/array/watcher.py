"""The reaction of a program to its pager's death, compiled: it needs no interpreter lock.

A thread that touches a missing page waits in the kernel, perhaps with the lock held, and nobody
answers it any more. So the shared memory is cut to nothing and everybody is woken: who goes on, and
who touches the array from then on, gets SIGBUS. Nothing that was lost can be taken for zeros.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from typing import Any, Final

import numpy as np
from numba import types

from slackwater.common.native import libc
from slackwater.common.native.compiled import njit

ENDING: Final = 0
"""Word: the program closes the array, so the pager's end is expected."""
FAILED: Final = 1
"""Word: 1 after the pager has died."""
WATCHING: Final = 2
"""Word: 1 once `watch` runs, and needs the interpreter lock no more."""
WORDS: Final = 3

_STDERR: Final = 2
_EINTR: Final = 4
_SIGKILL: Final = 9
_kill: Any = types.ExternalFunction("kill", libc.INT(libc.INT, libc.INT))
_ftruncate: Any = types.ExternalFunction("ftruncate", libc.INT(libc.INT, types.int64))
_ioctl: Any = types.ExternalFunction("ioctl", libc.INT(libc.INT, libc.ADDRESS, libc.ADDRESS))
_write: Any = types.ExternalFunction("write", libc.SIZE(libc.INT, libc.ADDRESS, libc.ADDRESS))


@njit(nogil=True, cache=True)
def watch(beats, pager, memory, faults, wake, area, words, message):
    """Until the process `pager` ends or is silent for as long as `beats` waits. `area`: (address,
    bytes)."""
    words[WATCHING] = 1
    buffer = np.zeros(64, np.uint8)
    while True:
        n = libc.receive(beats, buffer.ctypes.data, 64)
        if n == 0 or (n < 0 and libc.errno() != _EINTR):
            break
    if words[ENDING]:
        return
    if n < 0:  # It hangs: what it may do later must not meet the memory's end.
        _kill(libc.INT(pager), libc.INT(_SIGKILL))
    words[FAILED] = 1
    _write(libc.INT(_STDERR), libc.ADDRESS(message.ctypes.data), libc.ADDRESS(message.size))
    _ftruncate(libc.INT(memory), types.int64(0))
    _ioctl(libc.INT(faults), libc.ADDRESS(wake), libc.ADDRESS(area.ctypes.data))
