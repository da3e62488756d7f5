"""Wait for what comes about elsewhere: in another process, a thread or a task.

A look from outside has no event to wait for, so these look again and again until a deadline.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")
LOOK_S = 0.005


def eventually(look: Callable[[], T], what: str = "", within_s: float = 30.0) -> T:
    """Return what `look` finds once that is true."""
    deadline_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"never: {what or look}"
        time.sleep(LOOK_S)
    return found


async def soon(look: Callable[[], T], what: str = "", within_s: float = 30.0) -> T:
    """Do the same without holding up the loop."""
    deadline_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"never: {what or look}"
        await asyncio.sleep(LOOK_S)
    return found


def gone(pid: int) -> bool:
    """Tell whether the process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
