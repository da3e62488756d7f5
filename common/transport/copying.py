"""Copies between mapped buffers that do not stop the event loop.

A short copy is done at once: a thread would cost more. A long one runs in a thread, by numpy with
the interpreter lock released, in pieces, so that a cancelled caller gets its buffer back soon.
"""

import asyncio
import threading
from typing import Final

import numpy as np

from slackwater.common.base import limits

_PIECE_BYTES: Final = 8 * 1024 * 1024


async def copy(target: memoryview, source: memoryview) -> None:
    """Byte views of equal length. When this returns or raises, nobody touches them any more."""
    if len(source) <= limits.COPY_INLINE_BYTES:
        target[:] = source
        return
    stop = threading.Event()
    work = asyncio.get_running_loop().run_in_executor(None, _copy_pieces, target, source, stop)
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({work})
        raise


def _copy_pieces(target: memoryview, source: memoryview, stop: threading.Event) -> None:
    to = np.frombuffer(target, np.uint8)
    of = np.frombuffer(source, np.uint8)
    for start in range(0, len(of), _PIECE_BYTES):
        if stop.is_set():
            return
        np.copyto(to[start : start + _PIECE_BYTES], of[start : start + _PIECE_BYTES])
