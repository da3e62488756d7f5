"""A cap of bandwidth for what may take its time: copies of regions to other hosts, pages of remote
memory that are put back.

What is capped goes piece by piece, each when its turn has come, and all that shares one `Bandwidth`
together keeps to its rate. Pushes and pulls have channels of their own and are never capped: they
share the link with pieces that are short and far apart. Where the host's link has a budget, the
rate is what everything else on the link leaves of it (`Leftover`): gradients, reads of pages, and
the other processes of this host that move in the background. So these need not know each other:
what one of them takes is to the other what is not left.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from slackwater.common.base.clock import Clock
from slackwater.common.native.link import Link

Pace = Callable[[int], Awaitable[None]]
"""Returns when so many bytes may be sent."""
Parts = Sequence[tuple[int, int]]
"""(offset, bytes) of what is to be sent of a region."""
PIECE_BYTES: Final = 256 * 1024
"""Bytes behind which a push or pull may have to wait on the link: 2 ms at 1 Gbit/s."""
PIECES: Final = 8
"""Pieces of one copy that are under way at once: a link that is slower than the cap is kept
busy."""
LOOK_S: Final = 0.2
"""Seconds between two looks at what the link carries."""
SETTLE_S: Final = 1.0
"""Traffic comes in bursts: a change counts in full after about so long."""
LEAST_PART: Final = 1 / 16
"""The part of a budget that background work gets on a link that others fill, so that it ends."""


class Leftover:
    """Tells what a link's budget leaves, in bytes a second. `carried`: (bytes received, bytes sent)
    by the link so far; the busier way counts. Pure but for that."""

    def __init__(self, budget_bytes_s: float, carried: Callable[[], tuple[int, int]]) -> None:
        assert budget_bytes_s > 0, budget_bytes_s
        self._budget, self._carried = budget_bytes_s, carried
        self._before: tuple[float, tuple[int, int]] | None = None
        self._own_bytes = 0
        self.others_bytes_s = 0.0
        """Carried for everybody else, lately."""

    def spent(self, nbytes: int) -> None:
        """So many bytes more of the link's traffic are the asker's own."""
        self._own_bytes += nbytes

    def bytes_s(self, now_s: float) -> float:
        """Return what is left now, LEAST_PART of the budget at least."""
        if self._before is None:
            self._before = now_s, self._carried()
        since_s, before = self._before
        span_s = now_s - since_s
        if span_s >= LOOK_S:
            carried = self._carried()
            busier = max(new - old for new, old in zip(carried, before, strict=True))
            others = max(0.0, busier - self._own_bytes) / span_s
            self.others_bytes_s += (others - self.others_bytes_s) * min(1.0, span_s / SETTLE_S)
            self._before, self._own_bytes = (now_s, carried), 0
        return max(LEAST_PART * self._budget, self._budget - self.others_bytes_s)


def leftover_of(link: Link | None) -> Leftover | None:
    """Return what the link leaves; None: nothing is known of it."""
    if link is None:
        return None
    return Leftover(link.budget_bytes_s, link.interface.carried_bytes)


class Bandwidth:
    """First come, first served: each taker waits until those before it have had their time."""

    def __init__(self, bytes_s: float, clock: Clock, leftover: Leftover | None = None) -> None:
        """`bytes_s`: the cap; 0: none but `leftover`."""
        assert bytes_s > 0 or leftover is not None
        self._bytes_s, self._clock, self._leftover = bytes_s or float("inf"), clock, leftover
        self._free_s = 0.0

    def spend(self, nbytes: int, now_s: float) -> float:
        """Take so many bytes, and return when the next may be sent. Idle time is not saved up."""
        rate = self._bytes_s
        if self._leftover is not None:
            rate = min(rate, self._leftover.bytes_s(now_s))
            self._leftover.spent(nbytes)
        self._free_s = max(self._free_s, now_s) + nbytes / rate
        return self._free_s

    async def take(self, nbytes: int) -> None:
        """Over any span the bytes taken are at most its seconds times the rate, and one piece. A
        taker that is cancelled has taken."""
        now_s = self._clock.now_s()
        at_s = max(now_s, self._free_s)
        self.spend(nbytes, now_s)
        await self._clock.sleep_until(at_s)


async def paced(
    view: memoryview,
    pace: Pace | None,
    write: Callable[[int, memoryview], Awaitable[None]],
    parts: Parts | None = None,
) -> None:
    """`write(offset, piece)` of these parts of `view`, of all of it where none are given; each part
    in one piece where nothing sets a pace."""
    wanted = ((0, len(view)),) if parts is None else parts
    if pace is None:
        for start, nbytes in wanted:
            await write(start, view[start : start + nbytes])
        return
    room = asyncio.Semaphore(PIECES)

    async def send(offset: int, piece: memoryview) -> None:
        try:
            await write(offset, piece)
        finally:
            room.release()

    try:
        async with asyncio.TaskGroup() as group:
            for first, nbytes in wanted:
                for start in range(first, first + nbytes, PIECE_BYTES):
                    piece = view[start : min(start + PIECE_BYTES, first + nbytes)]
                    await room.acquire()
                    await pace(len(piece))
                    group.create_task(send(start, piece))
    except BaseExceptionGroup as failed:  # Fails as a single write would.
        raise failed.exceptions[0] from failed
