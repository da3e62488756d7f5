"""One tcp channel: a control stream and data streams, any of which may break and come back.

Ordered control records are counted and kept until the peer has said that it has them; a control
stream that comes back begins behind what the other side has, so no frame is lost or doubled.
Transfers see to themselves (transfers.py). The connecting side mends, the accepting side waits for
it within the same bounds, and past them the channel is lost.
"""

import asyncio
import contextlib
import random
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from slackwater.common.base import limits
from slackwater.common.base.errors import (
    AccessRefused,
    DecodeRejected,
    Rejected,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.transport import wire
from slackwater.common.transport.base import Lane, OnHandover, OnPrepare, RemoteRegion
from slackwater.common.transport.channel import (
    LABEL_BYTES_MAX,
    OpenedRegion,
    SocketChannel,
    as_bytes,
    check_access,
    check_pieces,
    check_range,
    foreign,
)
from slackwater.common.transport.pacing import Pace, Parts, paced
from slackwater.common.transport.region import Region
from slackwater.common.transport.reservations import GiveBack, Reservations, once
from slackwater.common.transport.stream import Linger, Stream

if TYPE_CHECKING:
    from slackwater.common.transport.target_stream import DataStream

CONTROL: Final = -1
"""The control stream's index; data streams count from 0."""
_UNORDERED: Final = frozenset({wire.PROGRESS, wire.GOODBYE})
_MEND_WAIT_S: Final = 0.05
_MEND_WAIT_S_MAX: Final = 0.5


@dataclass(frozen=True, slots=True)
class TcpTuning:
    """Both sides may differ: each bounds what it asks for; the connecting side names `streams`."""

    streams: int = limits.STREAMS
    part_bytes: int = limits.TRANSFER_BYTES
    credit_bytes: int = limits.CREDIT_BYTES
    greet_s: float = limits.CONNECT_S
    resume_s: float = limits.RESUME_S
    resume_eof_s: float = limits.RESUME_EOF_S
    stall_s: float = limits.STALL_S


Redial = Callable[[int, int], Awaitable[tuple[Stream, wire.Header]]]
"""(index, ordered records received) -> the stream that replaces a lost one, paused behind the
answer. Raises Rejected when the peer does not know the session (any more), ConnectionRefusedError
when nobody listens, another OSError, Unavailable or TimeoutError when it may be tried again."""


class TcpRemoteRegion(OpenedRegion):
    def __init__(self, channel: "TcpChannel", key: bytes, handle: int, nbytes: int) -> None:
        super().__init__(channel, key, nbytes)
        self.handle = handle


class TcpChannel(SocketChannel):
    """`redial` is None at the accepting side. `on_change` is told when all streams are there for
    the first time, and of the end."""

    def __init__(
        self,
        hello: bytes,
        session: bytes,
        on_handover: OnHandover | None,
        tuning: TcpTuning,
        streams: int,
        redial: Redial | None,
        on_change: Callable[["TcpChannel"], None] = lambda _channel: None,
        on_prepare: OnPrepare | None = None,
    ) -> None:
        super().__init__(hello, on_handover, on_prepare, stall_s=tuning.stall_s)
        self.session = session
        self.streams = streams
        self.complete = False
        """All data streams have been there."""
        self._tuning = tuning
        self._redial = redial
        self._on_change = on_change
        self._control: Stream | None = None
        self._data: list[DataStream | None] = [None] * (streams + 1)
        # Compiled code: whoever makes no channel over tcp need not load it.
        from slackwater.common.transport.lanes import InitiatorLanes, TargetLanes
        from slackwater.common.transport.target_stream import Served
        from slackwater.common.transport.transfers import Transfers

        self._asking = range(streams) if redial is not None else range(streams, streams + 1)
        self._transfers = Transfers(
            self._asking, part_bytes=tuning.part_bytes, credit_bytes=tuning.credit_bytes
        )
        self._served = Served()
        self._initiator_lanes = InitiatorLanes(streams + 1)
        self._target_lanes = TargetLanes(streams + 1, self._served, self.violated)
        self._keys: dict[bytes, set[int]] = {}
        self._rooms = Reservations(self._served)
        self._retained: deque[bytes] = deque()
        self._sent_ordinal = self._received_ordinal = self._told_ordinal = 0
        self._by_eof: set[int] = set()
        self._jitter = random.Random(session)
        self._deadline: asyncio.TimerHandle | None = None
        if redial is None:
            self._deadline = self._loop.call_later(tuning.greet_s, self._expire)

    # Streams come and go -------------------------------------------------------------------------

    def attach_control(self, stream: Stream, peer_has: int) -> None:
        """A control stream is there (again); the peer has `peer_has` of our ordered records."""
        if self._control is not None:
            self._control.close()
        if self.closed:
            stream.close()
            return
        try:
            self._peer_received(peer_has)
        except DecodeRejected as error:
            stream.close()
            self.lose(str(error))
            return
        self._control = stream
        stream.index = CONTROL
        self._by_eof.discard(CONTROL)
        stream.push(*self._retained)
        stream.start(self)
        self._check_complete()

    def attach_data(self, stream: Stream, index: int) -> None:
        if self.closed:
            stream.close()
            return
        old = self._data[index]
        if old is not None:
            old.close()
            self._data[index] = None
        self._by_eof.discard(index)
        try:
            sock, rest = stream.release()
        except Unavailable:
            self._seek(index)
            return
        self._take_over(sock, rest, index)
        if not self.complete and all(self._data):
            self.complete = True
            self._served.begin()
            self._on_change(self)
        self._check_complete()

    def _take_over(self, sock: socket.socket, rest: bytes, index: int) -> None:
        """Give a data stream to compiled code."""
        from slackwater.common.transport.initiator_stream import InitiatorEnd
        from slackwater.common.transport.target_stream import ServingEnd

        if index in self._asking:
            end = InitiatorEnd(sock, rest, index, self._transfers, self.lost)
            self._data[index] = end  # Before it sends, which may be its end.
            self._transfers.attach(end)
        else:
            self._data[index] = ServingEnd(sock, rest, index, self._served, self.lost)

    @property
    def received_ordinal(self) -> int:
        return self._received_ordinal

    def lost(self, stream: "Stream | DataStream", error: Exception | None) -> None:
        """A stream ended. It may come back, unless the peer violated the protocol."""
        if stream is not (self._control if stream.index == CONTROL else self._data[stream.index]):
            return  # Replaced already.
        if isinstance(error, SlackwaterError):
            self.violated(str(error))
            return
        if error is None:
            self._by_eof.add(stream.index)
        if stream.index == CONTROL:
            self._control = None
        else:
            self._data[stream.index] = None
        self._seek(stream.index)

    def attach_lane(self, stream: Stream, index: int) -> None:
        """The accepting side. Raises DecodeRejected, Unavailable."""
        self._target_lanes.check(index)
        if self.closed or not self.complete:
            raise Unavailable("the channel is not complete, or over")
        stream.push(wire.pack(wire.WELCOME))
        sock, rest = stream.release()
        self._target_lanes.attach(sock, rest, index)

    async def lane(self) -> Lane:
        """Open a lane, as Laned defines it."""
        self._check_alive()
        if self._redial is None:
            raise Rejected("the side that was connected to asks for no lanes")
        return await self._initiator_lanes.open(self._redial, lambda: self.closed)

    def lane_handle(self, remote: RemoteRegion) -> int:
        """Return the region's handle on lanes, as Laned defines it. Raises AccessRefused,
        Unavailable."""
        return self._handle(remote, 0, 0)

    def violated(self, why: str) -> None:
        self.lose(f"the peer violates the protocol: {why}")

    def _tick(self) -> None:
        self._target_lanes.tick()
        super()._tick()

    def _seek(self, index: int) -> None:
        """Reconnect a missing stream, or await the peer that does."""
        if self._redial is not None:
            self._spawn(self._mend(index, self._redial))
        else:
            self._await_return()

    def _await_return(self) -> None:
        """Give the peer time to reconnect; for the accepting side."""
        everything = len(self._by_eof) == len(self._data) + 1
        if self._deadline is not None:
            if not everything:
                return
            self._deadline.cancel()
        wait_s = self._tuning.resume_eof_s if everything else self._tuning.resume_s
        self._deadline = self._loop.call_later(wait_s, self._expire)

    def _check_complete(self) -> None:
        if self._control is not None and all(self._data) and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        self.lose("the peer is gone: its connections broke and did not come back in time")

    async def _mend(self, index: int, redial: Redial) -> None:
        """The connecting side: bring the stream back within `resume_s`, or lose the channel."""
        wait_s = _MEND_WAIT_S
        try:
            async with asyncio.timeout(self._tuning.resume_s):
                while True:
                    try:
                        stream, header = await redial(index, self._received_ordinal)
                        break
                    except ConnectionRefusedError as error:
                        self.lose(f"the peer is gone, nobody listens any more: {error}")
                        return
                    except Rejected as error:
                        self.lose(f"the peer has given up the session: {error}")
                        return
                    except (OSError, Unavailable):
                        await asyncio.sleep(wait_s * self._jitter.uniform(0.5, 1.0))
                        wait_s = min(2 * wait_s, _MEND_WAIT_S_MAX)
        except TimeoutError:
            self.lose(f"the connection broke and did not come back in {self._tuning.resume_s:g} s")
            return
        if index == CONTROL:
            self.attach_control(stream, header.number)
        else:
            self.attach_data(stream, index)

    # One-sided access ----------------------------------------------------------------------------

    async def open(self, key: bytes) -> RemoteRegion:
        answer = await self._ask(wire.OPEN, body=key)
        region = TcpRemoteRegion(self, key, answer.header.handle, answer.header.number)
        self._opened.add(region)
        return region

    async def write(self, local: memoryview, remote: RemoteRegion, offset: int) -> None:
        view = as_bytes(local)
        handle = self._handle(remote, offset, len(view))
        await self._transfers.run(wire.WRITE, handle, offset, view)

    async def read(self, remote: RemoteRegion, offset: int, local: memoryview) -> None:
        view = as_bytes(local)
        handle = self._handle(remote, offset, len(view))
        await self._transfers.run(wire.READ, handle, offset, view)

    async def write_scattered(
        self, local: memoryview, remote: RemoteRegion, offsets: Sequence[int], length: int
    ) -> None:
        view = as_bytes(local)
        handle = self._opened_handle(remote, offsets, length, len(view))
        await self._transfers.run_scattered(wire.WRITE, handle, offsets, length, view)

    async def read_scattered(
        self, remote: RemoteRegion, offsets: Sequence[int], length: int, local: memoryview
    ) -> None:
        view = as_bytes(local)
        handle = self._opened_handle(remote, offsets, length, len(view))
        await self._transfers.run_scattered(wire.READ, handle, offsets, length, view)

    def _opened_handle(
        self, remote: RemoteRegion, offsets: Sequence[int], length: int, nbytes: int
    ) -> int:
        """Raises AccessRefused, Rejected."""
        check_pieces(len(offsets), length, nbytes)
        handle = self._handle(remote, 0, 0)
        for offset in offsets:
            check_range(offset, length, remote.nbytes)
        return handle

    def _handle(self, remote: RemoteRegion, offset: int, nbytes: int) -> int:
        """Raises AccessRefused, Unavailable."""
        self._check_alive()
        if not isinstance(remote, TcpRemoteRegion) or remote.channel is not self:
            raise foreign()
        if remote.closed or remote.revoked or not 0 <= offset <= remote.nbytes - nbytes:
            check_access(remote, offset, nbytes)
        return remote.handle

    def revoke(self, key: bytes) -> None:
        for handle in self._keys.pop(key, ()):
            self._served.remove(handle)
        super().revoke(key)

    async def handover(
        self, region: Region, note: bytes, pace: Pace | None = None, parts: Parts | None = None
    ) -> None:
        """A copy: the peer makes room, we write into it, the peer's program takes it."""
        room = await self.make_room(region, ahead=False)
        await self.hand_over_into(room, region, note, pace, parts)

    async def make_room(self, region: Region, *, ahead: bool = True) -> int:
        if region.closed:
            raise Rejected(f"region {region.label} is closed: only an open one can be handed over")
        label = region.label.encode()[:LABEL_BYTES_MAX]
        answer = await self._ask_for_room(region.nbytes, label, ahead=ahead)
        return answer.header.handle

    def give_back(self, room: int) -> None:
        self._reply(wire.pack(wire.REVOKED, number=room))

    async def hand_over_into(
        self, room: int, region: Region, note: bytes, pace: Pace | None, parts: Parts | None
    ) -> None:
        label = region.label.encode()[:LABEL_BYTES_MAX]
        if len(note) > limits.FRAME_BYTES_MAX:
            self.give_back(room)
            raise Rejected(f"a note of {len(note)} bytes, at most {limits.FRAME_BYTES_MAX} fit")
        whole = await asyncio.to_thread(region.whole) if not region.in_place else region
        try:
            await paced(
                memoryview(whole.buffer),
                pace,
                lambda offset, piece: self._transfers.run(wire.WRITE, room, offset, piece),
                parts,
            )
        except BaseException:
            self.give_back(room)
            raise
        finally:
            if whole is not region:
                whole.close()
        await self._ask(
            wire.HANDOVER,
            handle=len(label),
            number=room,
            body=label + note,
            deadline_s=limits.HANDOVER_S,
        )

    # Records -------------------------------------------------------------------------------------

    def begin(self, header: wire.Header) -> None:
        wire.check_length(header, limits.FRAME_BYTES_MAX + 1024)

    def end(self, header: wire.Header, body: bytes) -> None:
        if header.kind not in _UNORDERED:
            self._received_ordinal += 1
            if self._received_ordinal - self._told_ordinal >= limits.PROGRESS_FRAMES:
                self._push_progress()
        self._control_record(header, body)

    def _withdraw(self, handle: int) -> None:
        self._rooms.withdraw(handle)

    def _serve_open(self, header: wire.Header, key: bytes, region: Region) -> None:
        handle = self._served.add(region)
        if handle:
            self._keys.setdefault(key, set()).add(handle)
            record = wire.pack(
                wire.OPENED, handle=handle, number=region.nbytes, offset=header.offset
            )
        else:
            full = Unavailable(f"{limits.GRANTS_MAX} regions are open on this channel")
            record = wire.pack_refusal(full, offset=header.offset)
        self._push(record)

    def _serve_prepare(self, header: wire.Header, label: str) -> None:
        give_back = once(self._ask_room(header.number))
        asked = self._spawn(self._rooms.answer(header, label, give_back, self._reply))
        asked.add_done_callback(lambda done: give_back() if done.cancelled() else None)

    def _adopt(self, header: wire.Header, label: str) -> tuple[Region, GiveBack]:
        room = self._rooms.take(header.number)
        if room is None:
            raise AccessRefused(f"a handover of {header.number}: no room is there, or any more")
        return room

    def _connections(self) -> "Iterable[tuple[Stream | DataStream, bool]]":
        for stream in (self._control, *self._data):
            if stream is not None:
                yield stream, stream.index in self._asking and self._transfers.waiting(stream.index)

    def _push(self, record: bytes, *, fd: int = -1, ordered: bool = True) -> None:
        if ordered:
            self._sent_ordinal += 1
            self._retained.append(record)
        if self._control is not None:
            self._control.push(record)

    def _received(self) -> int:
        self._told_ordinal = self._received_ordinal
        return self._received_ordinal

    def _peer_received(self, ordinal: int) -> None:
        first = self._sent_ordinal - len(self._retained)
        if not first <= ordinal <= self._sent_ordinal:
            raise DecodeRejected(f"{ordinal} ordered records received of {self._sent_ordinal} sent")
        for _ in range(ordinal - first):
            self._retained.popleft()

    # The end -------------------------------------------------------------------------------------

    def _teardown(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._initiator_lanes.end()
        self._target_lanes.close()
        for stream in (self._control, *self._data):
            if stream is not None:
                stream.close()
        self._control, self._data = None, [None] * len(self._data)
        self._transfers.lose(self._lost or "")
        self._rooms.close()
        self._served.close()
        self._retained.clear()
        self._on_change(self)

    async def close(self) -> None:
        """Says goodbye behind everything that was sent, and waits, within CLOSE_S, until the peer
        has ended too: closing earlier would let the kernel throw away what is on its way."""
        control, data = self._control, self._data
        self._control, self._data = None, [None] * len(data)
        if not self.closed:
            self._target_lanes.pause()
            for stream in data:
                if stream is not None:
                    stream.pause()  # Before the regions go: no request is refused for that.
            self.lose("the channel was closed here")
            if control is not None:
                await self._say_goodbye(control)
        for stream in (control, *data):
            if stream is not None:
                stream.close()
        await self._tasks.begun_ended(limits.CLOSE_S)
        for region in tuple(self._opened):
            region.close()

    async def _say_goodbye(self, control: Stream) -> None:
        linger = Linger()
        control.start(linger)
        control.push(wire.pack(wire.GOODBYE))
        with contextlib.suppress(TimeoutError):  # The peer does not read: so it loses the rest.
            async with asyncio.timeout(limits.CLOSE_S):
                await control.drain()
                control.finish()
                if not control.closed:
                    await linger.ended.wait()
