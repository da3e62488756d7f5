"""A cap of bandwidth for what may take its time: the copy of a region to another host.

What is capped goes piece by piece, each when its turn has come, and all that shares one `Bandwidth`
together keeps to its rate. Pushes and pulls have channels of their own and are never capped: they
share the link with pieces that are short and far apart.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from slackwater.common.base.clock import Clock

Pace = Callable[[int], Awaitable[None]]
"""Returns when so many bytes may be sent."""
Parts = Sequence[tuple[int, int]]
"""(offset, bytes) of what is to be sent of a region."""
PIECE_BYTES: Final = 256 * 1024
"""Bytes behind which a push or pull may have to wait on the link: 2 ms at 1 Gbit/s."""
PIECES: Final = 8
"""Pieces of one copy that are under way at once: a link that is slower than the cap is kept
busy."""


class Bandwidth:
    """First come, first served: each taker waits until those before it have had their time."""

    def __init__(self, bytes_s: int, clock: Clock) -> None:
        self._bytes_s, self._clock = bytes_s, clock
        self._free_s = 0.0

    async def take(self, nbytes: int) -> None:
        """Over any span the bytes taken are at most its seconds times the rate, and one piece. A
        taker that is cancelled has taken."""
        at_s = max(self._clock.now_s(), self._free_s)
        self._free_s = at_s + nbytes / self._bytes_s
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
