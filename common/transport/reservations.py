"""Memory that a peer asked for before it hands a region over: made, written, taken or given up.

It is asked for before it is made, so that whoever keeps an account of memory may refuse; and it is
given back when the peer writes no more into it and hands nothing over.

Who asks ahead freezes what it hands over only when the room is there, and nobody waits until then.
So a room that is asked for ahead gets its pages at once: who writes into it, and who folds in it
first, then waits for none. They are taken bit by bit, beside what this machine does for others.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected, SlackwaterError, Unavailable
from slackwater.common.transport import wire
from slackwater.common.transport.mapping import LARGE_PAGE
from slackwater.common.transport.region import Region

if TYPE_CHECKING:  # Compiled code comes with it.
    from slackwater.common.transport.target_stream import Served

GiveBack = Callable[[], None]

_STEP_BYTES: Final = 4 * LARGE_PAGE
_REST: Final = 2.0
"""Rest after each step, as a multiple of the step's time."""
_UNHURRIED_S: Final = limits.HANDOVER_S / 3
"""Then without a rest: the peer waits at most HANDOVER_S."""


_unhurried: Final = ThreadPoolExecutor(1, "slackwater-rooms")
"""One after the other, of all channels: who waits for a thread of the loop's own is in a hurry."""


def no_account() -> None:
    """Give back a room that nobody keeps account of."""


def once(give_back: GiveBack) -> GiveBack:
    """Give back at the first call, and do nothing at any other."""
    left = [give_back]

    def call() -> None:
        if left:
            left.pop()()

    return call


class Arriving:
    """A region that was handed over and is not the program's yet, and the room it was given."""

    def __init__(self, region: Region, give_back: GiveBack) -> None:
        self.region = region
        self.accepted = False
        """Set once the region is the program's."""
        self.give_back = once(give_back)

    def end(self) -> None:
        self.give_back()
        if not self.accepted:
            self.region.close()


@dataclass(slots=True)
class _Room:
    region: Region
    give_back: GiveBack
    patience_s: float
    blocks: int = 0
    """Blocks of its memory that were present at the last look: they grow as bytes come."""
    look: asyncio.TimerHandle | None = None


class Reservations:
    """The rooms of one channel, by their handles among what it serves."""

    def __init__(self, served: "Served") -> None:
        self._served = served
        self._rooms: dict[int, _Room] = {}
        self._making = 0
        self._closed = threading.Event()
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._rooms)

    async def answer(
        self, header: wire.Header, label: str, give_back: GiveBack, reply: Callable[[bytes], None]
    ) -> None:
        """A peer's PREPARE, for which there is memory on the account until `give_back`."""
        try:
            handle = await self.make(header.number, label, give_back, ahead=bool(header.handle))
        except SlackwaterError as error:
            reply(wire.pack_refusal(error, offset=header.offset))
        else:
            number, offset = header.number, header.offset
            reply(wire.pack(wire.OPENED, handle=handle, number=number, offset=offset))

    async def make(self, nbytes: int, label: str, give_back: GiveBack, *, ahead: bool) -> int:
        """The handle. `give_back` is called in the end, whatever happens. Raises Rejected: there is
        no such room; Unavailable: too many wait."""
        try:
            region = await self._made(nbytes, label, ahead)
        except BaseException:
            give_back()
            raise
        handle = 0 if self._closed.is_set() else self._served.add(region)
        if not handle:
            region.close()
            give_back()
            raise Unavailable(f"{limits.GRANTS_MAX} regions are open on this channel")
        patience_s = limits.PREPARED_AHEAD_S if ahead else limits.PREPARED_S
        self.add(handle, region, give_back, patience_s)
        return handle

    async def _made(self, nbytes: int, label: str, ahead: bool) -> Region:
        if self._making + len(self._rooms) >= limits.HANDOVERS_MAX:
            raise Unavailable(f"{limits.HANDOVERS_MAX} handovers are under way")
        self._making += 1
        pool = _unhurried if ahead else None
        work = self._loop.run_in_executor(pool, _make, nbytes, label, ahead, self._closed)
        try:
            return await asyncio.shield(work)
        except MemoryError as error:
            raise Rejected(str(error)) from error
        except asyncio.CancelledError:
            work.add_done_callback(_let_go)
            raise
        finally:
            self._making -= 1

    def add(self, handle: int, region: Region, give_back: GiveBack, patience_s: float) -> None:
        """Reserve the region; it is withdrawn after `patience_s` without a write."""
        self._rooms[handle] = room = _Room(region, give_back, patience_s)
        self._wait(handle, room)

    def _wait(self, handle: int, room: _Room) -> None:
        room.look = self._loop.call_later(room.patience_s, self._look, handle)

    def _look(self, handle: int) -> None:
        room = self._rooms[handle]
        blocks = os.fstat(room.region.fileno()).st_blocks
        if blocks == room.blocks:
            self.withdraw(handle)
            return
        room.blocks = blocks
        self._wait(handle, room)

    def take(self, handle: int) -> tuple[Region, GiveBack] | None:
        """The room is the caller's from now on."""
        room = self._rooms.pop(handle, None)
        if room is None:
            return None
        if room.look is not None:
            room.look.cancel()
        self._served.remove(handle)
        return room.region, room.give_back

    def withdraw(self, handle: int) -> None:
        """Give the memory back unused. Idempotent."""
        taken = self.take(handle)
        if taken is not None:
            region, give_back = taken
            region.close()
            give_back()

    def close(self) -> None:
        """With the channel."""
        self._closed.set()
        for handle in tuple(self._rooms):
            self.withdraw(handle)


def _make(nbytes: int, label: str, ahead: bool, closed: threading.Event) -> Region:
    """In a thread; in vain, if `closed` meanwhile. Raises MemoryError."""
    region = Region.create(nbytes, label)
    if not ahead or nbytes > os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return region
    begun_s = time.monotonic()
    for first in range(0, nbytes, _STEP_BYTES):
        before_s = time.monotonic()
        try:
            region.take_pages(first, _STEP_BYTES)
        except MemoryError:
            region.close()
            raise
        spent_s = time.monotonic() - before_s
        hurry = time.monotonic() - begun_s > _UNHURRIED_S
        if closed.wait(0.0 if hurry else _REST * spent_s):
            break
    return region


def _let_go(work: "asyncio.Future[Region]") -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().close()
