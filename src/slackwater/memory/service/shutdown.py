"""Ending a device in order, for as long as it moves; and by force once it does not.

A device that is told to end first finishes what was begun, and brings everything to its backup
file: a slow disk may take its time. What does not move is waited for no longer than
limits.RING_STUCK_S: a machine must be able to shut down.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

from slackwater.common.base import limits
from slackwater.common.shell.main import EX_FAILED

INTERRUPTED: Final = 128 + signal.SIGINT
_LOOK_S: Final = 0.1
_AGAIN_S: Final = 1.0
"""Once something was given up, what follows has so long."""
_log = structlog.get_logger()


class Patience:
    """Waits for the steps of an ending. `progress` is another value whenever something moved."""

    def __init__(
        self, progress: Callable[[], object], stuck_s: float = limits.RING_STUCK_S
    ) -> None:
        self.given_up: list[str] = []
        self._progress = progress
        self._stuck_s = stuck_s

    async def wait(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Return when `work` is done, or was cancelled because nothing moves."""
        task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
        seen, since_s = self._progress(), loop.time()
        stuck_s = min(self._stuck_s, _AGAIN_S) if self.given_up else self._stuck_s
        while True:
            await asyncio.wait((task,), timeout=min(_LOOK_S, stuck_s))
            if task.done():
                task.result()
                return
            if (now := self._progress()) != seen:
                seen, since_s = now, loop.time()
            elif loop.time() - since_s >= stuck_s:
                break
        self.given_up.append(what)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def prepare(work: Callable[[], None], stop: asyncio.Event) -> None:
    """Do what takes long, in a thread, before anything is served or held. When it is stopped
    meanwhile the process ends at once: the thread compiles, and looks at nothing."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not working.done():
        _log.warning("device.interrupted", reason="it was told to end while it compiled")
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    working.result()


def end_by_force(after_s: float) -> None:
    """The process is gone by then, whatever its threads hang in."""
    timer = threading.Timer(after_s, os._exit, (EX_FAILED,))
    timer.daemon = True
    timer.start()
