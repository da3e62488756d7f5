"""A channel inside one process: what it grants, moves and hands over (memory.py)."""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slackwater.common.base import limits
from slackwater.common.base.errors import (
    AccessRefused,
    DeadlineExceeded,
    Rejected,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.transport.base import Address, OnHandover, OnPrepare, RemoteRegion
from slackwater.common.transport.channel import (
    Answering,
    ChannelEnd,
    as_bytes,
    check_access,
    check_pieces,
    check_range,
    foreign,
)
from slackwater.common.transport.pacing import Pace, Parts
from slackwater.common.transport.region import Region
from slackwater.common.transport.reservations import Arriving, GiveBack

if TYPE_CHECKING:
    from slackwater.common.transport.memory import MemoryNetwork


class MemoryRemoteRegion:
    def __init__(self, channel: "MemoryChannel", key: bytes, region: Region, mapped: bool) -> None:
        self.channel, self.key = channel, key
        self.nbytes = region.nbytes
        self._view = memoryview(region.buffer) if mapped and region.in_place else None
        self.closed = self.revoked = False

    @property
    def view(self) -> memoryview | None:
        return self._view

    def close(self) -> None:
        self.closed = True
        self._view = None


def _check_open(region: Region) -> None:
    if region.closed:
        raise Rejected(f"region {region.label} is closed: only an open one can be handed over")


def _put(region: Region, offset: int, data: memoryview) -> None:
    region.buffer[offset : offset + len(data)] = data
    region.arrived(offset, len(data))


def _taken(region: Region, offset: int, nbytes: int) -> bytes:
    region.fetch(offset, nbytes)
    return bytes(region.buffer[offset : offset + nbytes])


def _halves(pieces: range) -> tuple[range, range]:
    middle = (len(pieces) + 1) // 2
    return pieces[:middle], pieces[middle:]


class MemoryChannel(ChannelEnd):
    """One end; `peer` is the other. It scatters, offers and reserves, as the real kinds do."""

    peer: "MemoryChannel"
    address: Address = ""
    """Where the listening end listens."""

    def __init__(
        self,
        network: "MemoryNetwork",
        hello: bytes,
        on_handover: OnHandover | None,
        mapped: bool,
        on_prepare: OnPrepare | None = None,
    ) -> None:
        super().__init__(hello, on_handover, on_prepare)
        self._network = network
        self._mapped = mapped
        self._opened: dict[MemoryRemoteRegion, None] = {}
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._lane: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._offered: dict[bytes, None] = {}
        """Keys that the peer offered, and that can be opened without asking."""
        self._rooms: dict[int, tuple[GiveBack, asyncio.TimerHandle]] = {}
        """Room that the peer asked for, by number."""
        self._rooms_made = 0

    # Keys and regions ----------------------------------------------------------------------------

    def _new_key(self) -> bytes:
        return self._network.key()

    def revoke(self, key: bytes) -> None:
        self._grants.pop(key, None)

    def offer(self, region: Region) -> bytes:
        key = self.grant(region)
        self._later(self.peer.offered, key)
        return key

    def offered(self, key: bytes) -> None:
        self._offered[key] = None
        if len(self._offered) > limits.OFFERS_MAX:
            del self._offered[next(iter(self._offered))]

    async def open(self, key: bytes) -> RemoteRegion:
        if key in self._offered:
            del self._offered[key]
            self._check_alive()
            region = MemoryRemoteRegion(self, key, self.peer.granted(key), self._mapped)
        else:
            await self._way()
            region = MemoryRemoteRegion(self, key, self.peer.granted(key), self._mapped)
            await self._way()
        self._opened[region] = None
        return region

    async def write(self, local: memoryview, remote: RemoteRegion, offset: int) -> None:
        source = as_bytes(local)
        key = self._check_access(remote, offset, len(source))
        await self._way()
        _put(self.peer.granted(key), offset, source)
        await self._way()

    async def read(self, remote: RemoteRegion, offset: int, local: memoryview) -> None:
        target = as_bytes(local)
        key = self._check_access(remote, offset, len(target))
        await self._way()
        data = _taken(self.peer.granted(key), offset, len(target))
        await self._way()
        target[:] = data

    async def write_scattered(
        self, local: memoryview, remote: RemoteRegion, offsets: Sequence[int], length: int
    ) -> None:
        """The first half of the pieces lands a step before the others."""
        source = as_bytes(local)
        key = self._check_pieces(remote, offsets, length, len(source))
        for part in _halves(range(len(offsets))):
            await self._way()
            region = self.peer.granted(key)
            for number in part:
                _put(region, offsets[number], source[number * length : (number + 1) * length])
        await self._way()

    async def read_scattered(
        self, remote: RemoteRegion, offsets: Sequence[int], length: int, local: memoryview
    ) -> None:
        """The first half of the pieces is read a step before the others."""
        target = as_bytes(local)
        key = self._check_pieces(remote, offsets, length, len(target))
        data = b""
        for part in _halves(range(len(offsets))):
            await self._way()
            region = self.peer.granted(key)
            data += b"".join(_taken(region, offsets[number], length) for number in part)
        await self._way()
        target[:] = data

    def _check_access(self, remote: RemoteRegion, offset: int, nbytes: int) -> bytes:
        self._check_alive()
        if not isinstance(remote, MemoryRemoteRegion) or remote.channel is not self:
            raise foreign()
        check_access(remote, offset, nbytes)
        return remote.key

    def _check_pieces(
        self, remote: RemoteRegion, offsets: Sequence[int], length: int, nbytes: int
    ) -> bytes:
        check_pieces(len(offsets), length, nbytes)
        key = self._check_access(remote, 0, 0)
        for offset in offsets:
            check_range(offset, length, remote.nbytes)
        return key

    # Frames --------------------------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        self._take_credit(frame)
        self._later(self.peer.arrive, bytes(frame))

    def arrive(self, frame: bytes) -> None:
        if not self.closed:
            self._inbox.put(frame)

    async def receive(self) -> bytes:
        frame = await self._inbox.get()
        if self._inbox.progress_due() and not self.closed:
            self._later(self.peer.returned, self._inbox.consumed_frames, self._inbox.consumed_bytes)
        return frame

    def returned(self, frames: int, nbytes: int) -> None:
        self._credit.returned(frames, nbytes)

    # Handover ------------------------------------------------------------------------------------

    async def handover(
        self, region: Region, note: bytes, pace: Pace | None = None, parts: Parts | None = None
    ) -> None:
        _check_open(region)
        await self._way()
        if region.closed:
            raise Rejected(f"region {region.label} was closed while it was handed over")
        give_back = self.peer.ask_room(region.nbytes)
        try:
            copy = await self._copied(region, pace, parts)
        except BaseException:
            give_back()
            raise
        await self._given(Arriving(copy, give_back), note)

    async def make_room(self, region: Region) -> int:
        _check_open(region)
        await self._way()
        room = self.peer.reserve(region.nbytes)
        try:
            await self._way()
        except BaseException:
            self.peer.withdraw(room)
            raise
        return room

    def give_back(self, room: int) -> None:
        if not self.closed:
            self._later(self.peer.withdraw, room)

    async def hand_over_into(
        self, room: int, region: Region, note: bytes, pace: Pace | None, parts: Parts | None
    ) -> None:
        try:
            _check_open(region)
            await self._way()
            copy = await self._copied(region, pace, parts)
        except BaseException:
            self.give_back(room)
            raise
        give_back = self.peer.use(room)
        if give_back is None:
            copy.close()
            raise AccessRefused(f"a handover of {room}: no room is there, or any more")
        await self._given(Arriving(copy, give_back), note)

    async def _given(self, arriving: Arriving, note: bytes) -> None:
        """Let the peer's program take it, and wait until it has."""
        answer: asyncio.Future[None] = self._loop.create_future()

        def told(refusal: SlackwaterError | None) -> None:
            if refusal is None:
                answer.set_result(None)
            else:
                answer.set_exception(refusal)
                answer.exception()  # The giver may be gone.

        self.peer.take(arriving, bytes(note), told)
        done, _ = await asyncio.wait(
            {answer, self._ended},
            timeout=limits.HANDOVER_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if answer in done:
            answer.result()
            await self._way()
        self._check_alive()
        if not done:
            raise DeadlineExceeded(f"the peer did not take it within {limits.HANDOVER_S:g} s")

    async def _copied(self, region: Region, pace: Pace | None, parts: Parts | None) -> Region:
        """Return the copy that arrives at the peer."""
        if not region.in_place:
            return region.whole()
        if self._network.shared:
            return Region.adopt(os.dup(region.fileno()), region.label)
        wanted = ((0, region.nbytes),) if parts is None else parts
        if pace is not None:
            await pace(sum(nbytes for _, nbytes in wanted))
        copy = Region.create(region.nbytes, region.label)
        for first, nbytes in wanted:
            copy.buffer[first : first + nbytes] = region.buffer[first : first + nbytes]
            self._network.copied_bytes += nbytes
        return copy

    def ask_room(self, nbytes: int) -> GiveBack:
        return self._ask_room(nbytes)

    def take(self, arriving: Arriving, note: bytes, answer: Answering) -> None:
        """A region arrives."""
        self._begin_handover(arriving, note, answer)

    def reserve(self, nbytes: int) -> int:
        """Keep room for a region until it comes, or PREPARED_AHEAD_S have passed. Raises
        AccessRefused, Rejected, Unavailable."""
        if len(self._rooms) >= limits.HANDOVERS_MAX:
            raise Unavailable(f"{limits.HANDOVERS_MAX} handovers are under way")
        give_back = self._ask_room(nbytes)
        self._rooms_made += 1
        room = self._rooms_made
        timer = self._loop.call_later(limits.PREPARED_AHEAD_S, self.withdraw, room)
        self._rooms[room] = give_back, timer
        return room

    def use(self, room: int) -> GiveBack | None:
        """The room is the caller's from now on; None: it is not there, or not any more."""
        give_back, timer = self._rooms.pop(room, (None, None))
        if timer is not None:
            timer.cancel()
        return give_back

    def withdraw(self, room: int) -> None:
        """The room will not be used. Idempotent."""
        if (give_back := self.use(room)) is not None:
            give_back()

    # The way and its end -------------------------------------------------------------------------

    async def _way(self) -> None:
        """One step of the way to the peer or back. Raises Unavailable when it ends meanwhile."""
        self._check_alive()
        await asyncio.sleep(self._network.way_s(self.address))
        self._check_alive()

    def _later(self, what: Callable[..., None], *arguments: Any) -> None:
        """In order with everything else on this way: the loop's timers alone keep no order among
        those that are due at one moment."""
        self._lane.append((what, arguments))
        if way_s := self._network.way_s(self.address):
            self._loop.call_later(way_s, self._deliver)
        else:
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        what, arguments = self._lane.popleft()
        what(*arguments)

    def lose(self, why: str) -> None:
        """The channel is over at this end. Idempotent: the first reason stands."""
        if self._lost is not None:
            return
        self._lost = why
        self._inbox.close(why)
        self._grants.clear()
        self._offered.clear()
        for room in tuple(self._rooms):
            self.withdraw(room)
        self._ended.set_result(None)
        self._tasks.cancel()

    async def close(self) -> None:
        if not self.closed:
            self.lose("the channel was closed here")
            self._later(self.peer.lose, "the peer closed the channel or died")
        for region in self._opened:
            region.close()
        self._opened.clear()
        await self._tasks.begun_ended(limits.CLOSE_S)

    def _broke(self, name: str, error: BaseException) -> None:
        """A task raised what none may: whoever waits for what it was to do would wait for ever."""
        self.lose(f"the channel broke here: {name} failed: {error!r}")
        self._later(self.peer.lose, "the peer closed the channel or died")
