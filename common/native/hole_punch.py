"""Holes in files and memfds: the bytes read as zeros, the memory or disk is free."""

import ctypes
import os
from typing import Final

_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
_libc = ctypes.CDLL(None, use_errno=True)


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Raises OSError (EOPNOTSUPP: the file system cannot)."""
    mode = ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE)
    length = ctypes.c_int64(nbytes)
    if _libc.fallocate(ctypes.c_int(fd), mode, ctypes.c_int64(offset), length) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot punch a hole of {nbytes} bytes: {os.strerror(error)}")
