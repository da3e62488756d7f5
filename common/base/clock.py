"""Time as an argument: cores get `now_s`, shells read their world's clock, none a global."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since the epoch; never runs backwards within a process."""
        ...

    async def sleep_until(self, at_s: float) -> None: ...


class LiveClock:
    """Wall-clock seconds at start plus monotonic seconds since: no jump when it is set."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()  # noqa: TID251 (the one place)

    def now_s(self) -> float:
        return self._offset_s + time.monotonic()

    async def sleep_until(self, at_s: float) -> None:
        delay_s = at_s - self.now_s()
        await asyncio.sleep(max(0.0, delay_s))
