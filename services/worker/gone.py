"""Wait for the end of a process, whoever started it."""

import asyncio
import os
from collections.abc import Callable


async def gone(pid: int, alive: Callable[[], bool] = lambda: True) -> None:
    """Return when the process is gone, or was before we looked. `alive` tells, once the descriptor
    is open, that this is still the process that was meant."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, over.set)
    try:
        if alive():
            await over.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
