"""Bounds of what is under way, first come first served, and the blocks that bytes pass through."""

import asyncio
from collections import deque
from typing import Final

from slackwater.common.base import limits
from slackwater.common.base.errors import Unavailable

PAGE_BYTES: Final = 4096


class Quota:
    """At most `parts` and `nbytes` at once. Nobody overtakes a waiter, however small its wish."""

    def __init__(self, parts: int, nbytes: int) -> None:
        self._parts, self._nbytes = parts, nbytes
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()
        self._lost: str | None = None

    async def take(self, nbytes: int) -> None:
        """Wait for `nbytes` of the staging memory and take them; a larger demand than the whole
        takes everything. Raises Unavailable once lost."""
        if self._lost is not None:
            raise Unavailable(self._lost)
        if not self._waiters and self._take(nbytes):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((waiter, nbytes))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.give(nbytes)  # It was our turn just now.
            else:
                self._waiters = deque(entry for entry in self._waiters if entry[0] is not waiter)
                self._wake()
            raise

    def give(self, nbytes: int) -> None:
        self._parts += 1
        self._nbytes += nbytes
        self._wake()

    def lose(self, why: str) -> None:
        self._lost = why
        waiters, self._waiters = self._waiters, deque()
        for waiter, _ in waiters:
            if not waiter.done():
                waiter.set_exception(Unavailable(why))

    def _take(self, nbytes: int) -> bool:
        if self._parts < 1 or self._nbytes < nbytes:
            return False
        self._parts -= 1
        self._nbytes -= nbytes
        return True

    def _wake(self) -> None:
        while self._waiters:
            waiter, nbytes = self._waiters[0]
            if not waiter.done():
                if not self._take(nbytes):
                    return
                waiter.set_result(None)
            self._waiters.popleft()


class Block:
    """Part of the staging memory, one user's until it is given back."""

    __slots__ = ("offset", "pool", "view")

    def __init__(self, pool: "_Pool", offset: int, view: memoryview) -> None:
        self.pool, self.offset, self.view = pool, offset, view

    def give(self) -> None:
        self.pool.free.append(self)
        self.pool.quota.give(0)


class _Pool:
    def __init__(self, memory: memoryview, first: int, count: int, nbytes: int) -> None:
        self.quota = Quota(count, 0)
        self.free = [
            Block(self, offset, memory[offset : offset + nbytes])
            for offset in range(first, first + count * nbytes, nbytes)
        ]


class Staging:
    """Memory cut into pages for small operations and blocks for the others, so that neither waits
    for the other kind."""

    def __init__(self, memory: memoryview) -> None:
        self._pages = _Pool(memory, 0, limits.VERBS_STAGING_PAGES, PAGE_BYTES)
        first = limits.VERBS_STAGING_PAGES * PAGE_BYTES
        count = (len(memory) - first) // limits.VERBS_BLOCK_BYTES
        self._blocks = _Pool(memory, first, count, limits.VERBS_BLOCK_BYTES)

    async def take(self, nbytes: int) -> Block:
        """A block of at least this size; at most VERBS_BLOCK_BYTES."""
        pool = self._pages if nbytes <= PAGE_BYTES else self._blocks
        await pool.quota.take(0)
        return pool.free.pop()
