"""Transfers of early layers go first (ByteScheduler, SOSP 2019; Gu et al. 2021, section 4.7).

The backward pass hands over the last layer first, and the next forward pass needs the first one
first. Whoever sends in the order of coming makes the program wait for layers that it needs late. So
a few transfers are under way at once, the credit, and of those that wait the one with the lowest
rank is next: large tensors that are divided into buckets (`divide_bytes`) are overtaken between two
of these.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Lets at most `count` through at once. Of equal rank, first come, first served."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._came = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, rank: int) -> AsyncIterator[None]:
        """Enter when it is this one's turn; leave at the end of the block."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(rank)
        try:
            yield
        finally:
            self._next()

    async def _wait(self, rank: int) -> None:
        come: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._came += 1
        heapq.heappush(self._waiting, (rank, self._came, come))
        try:
            await come
        except asyncio.CancelledError:
            if come.done() and not come.cancelled():
                self._next()  # Its turn had come: the next one's has.
            raise

    def _next(self) -> None:
        """Give a place that is left to whoever is next."""
        while self._waiting:
            _, _, come = heapq.heappop(self._waiting)
            if not come.done():
                come.set_result(None)
                return
        self._free += 1
