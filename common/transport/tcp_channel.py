"""One tcp channel: a control stream and data streams, any of which may break and come back.

Ordered control records are counted and kept until the peer has said that it has them; a control
stream that comes back begins behind what the other side has, so no frame is lost or doubled.
Transfers see to themselves (transfers.py). The connecting side mends, the accepting side waits for
it within the same bounds, and past them the channel is lost.
"""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from slackwater.common import limits
from slackwater.common.errors import (
    AccessRefused,
    DecodeRejected,
    Rejected,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.transport import wire
from slackwater.common.transport.base import OnHandover, RemoteRegion
from slackwater.common.transport.channel import SocketChannel, as_bytes, check_range
from slackwater.common.transport.region import Region
from slackwater.common.transport.stream import Stream
from slackwater.common.transport.transfers import DataReceiver, Served, Transfers

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


class TcpRemoteRegion:
    view = None

    def __init__(self, channel: "TcpChannel", key: bytes, handle: int, nbytes: int) -> None:
        self.channel, self.key, self.handle, self.nbytes = channel, key, handle, nbytes
        self.revoked = self.closed = False

    def close(self) -> None:
        self.closed = True
        self.channel.forget(self)


class _Linger:
    """Owner of a stream whose channel is closed: waits for the peer's end, takes nothing."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def begin(self, header: wire.Header) -> memoryview | None:
        wire.check_length(header, limits.FRAME_BYTES_MAX + 1024)
        return None

    def end(self, header: wire.Header, body: bytes) -> None:
        """Too late."""

    def lost(self, stream: Stream, error: Exception | None) -> None:
        self.ended.set()


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
    ) -> None:
        super().__init__(hello, on_handover, stall_s=tuning.stall_s)
        self.session = session
        self.streams = streams
        self.complete = False
        """All data streams have been there."""
        self._tuning = tuning
        self._redial = redial
        self._on_change = on_change
        self._control: Stream | None = None
        self._data: list[Stream | None] = [None] * streams
        self._transfers = Transfers(
            self._push_data,
            streams,
            part_bytes=tuning.part_bytes,
            credit_bytes=tuning.credit_bytes,
        )
        self._served = Served()
        self._handles = 0
        self._keys: dict[bytes, set[int]] = {}
        self._opened: set[TcpRemoteRegion] = set()
        self._prepared: dict[int, Region] = {}
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
        self._data[index] = stream
        stream.index = index
        self._by_eof.discard(index)
        receiver = DataReceiver(stream, index, self._transfers, self._served, self.lost)
        self._transfers.attach(index, receiver)
        stream.start(receiver)
        if not self.complete and all(self._data):
            self.complete = True
            self._on_change(self)
        self._check_complete()

    @property
    def received_ordinal(self) -> int:
        return self._received_ordinal

    def lost(self, stream: Stream, error: Exception | None) -> None:
        """A stream ended. It may come back, unless the peer violated the protocol."""
        if stream is not (self._control if stream.index == CONTROL else self._data[stream.index]):
            return  # Replaced already.
        if isinstance(error, SlackwaterError):
            self.lose(f"the peer violates the protocol: {error}")
            return
        if error is None:
            self._by_eof.add(stream.index)
        if stream.index == CONTROL:
            self._control = None
        else:
            self._data[stream.index] = None
            self._transfers.detach(stream.index)
        if self._redial is not None:
            self._spawn(self._mend(stream.index, self._redial))
        else:
            self._await_return()

    def _await_return(self) -> None:
        """The accepting side: give the peer time to mend."""
        everything = len(self._by_eof) == self.streams + 1
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
        await self._transfer(wire.WRITE, remote, offset, as_bytes(local))

    async def read(self, remote: RemoteRegion, offset: int, local: memoryview) -> None:
        await self._transfer(wire.READ, remote, offset, as_bytes(local))

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
        if not 0 < length <= limits.TRANSFER_BYTES or nbytes != length * len(offsets):
            raise Rejected(f"{len(offsets)} pieces of {length} bytes do not make {nbytes}")
        opened = self._opened_region(remote)
        for offset in offsets:
            check_range(offset, length, opened.nbytes)
        return opened.handle

    async def _transfer(
        self, kind: int, remote: RemoteRegion, offset: int, view: memoryview
    ) -> None:
        opened = self._opened_region(remote)
        check_range(offset, len(view), opened.nbytes)
        await self._transfers.run(kind, opened.handle, offset, view)

    def _opened_region(self, remote: RemoteRegion) -> "TcpRemoteRegion":
        """Raises AccessRefused where it cannot be used here."""
        self._check_alive()
        if not isinstance(remote, TcpRemoteRegion) or remote.channel is not self:
            raise AccessRefused(
                "the region was opened on another channel: open its key on this one"
            )
        if remote.closed:
            raise AccessRefused("this remote region was closed here: open its key again")
        if remote.revoked:
            raise AccessRefused("the owner revoked the key of this region")
        return remote

    def forget(self, remote: TcpRemoteRegion) -> None:
        self._opened.discard(remote)

    def revoke(self, key: bytes) -> None:
        for handle in self._keys.pop(key, ()):
            self._served.opened.pop(handle, None)
        super().revoke(key)

    async def handover(self, region: Region, note: bytes) -> None:
        """A copy: the peer makes room, we write into it, the peer's program takes it."""
        if region.closed:
            raise Rejected(f"region {region.label} is closed: only an open one can be handed over")
        label = region.label.encode()[:200]
        if len(note) > limits.FRAME_BYTES_MAX:
            raise Rejected(f"a note of {len(note)} bytes, at most {limits.FRAME_BYTES_MAX} fit")
        answer = await self._ask(wire.PREPARE, number=region.nbytes, body=label)
        handle = answer.header.handle
        whole = await asyncio.to_thread(region.whole) if not region.in_place else region
        try:
            await self._transfers.run(wire.WRITE, handle, 0, memoryview(whole.buffer))
        except BaseException:
            if not self.closed:
                self._push(wire.pack(wire.REVOKED, number=handle))
            raise
        finally:
            if whole is not region:
                whole.close()
        await self._ask(
            wire.HANDOVER,
            handle=len(label),
            number=handle,
            body=label + note,
            deadline_s=limits.HANDOVER_S,
        )

    # Records -------------------------------------------------------------------------------------

    def begin(self, header: wire.Header) -> memoryview | None:
        wire.check_length(header, limits.FRAME_BYTES_MAX + 1024)
        return None

    def end(self, header: wire.Header, body: bytes) -> None:
        if header.kind not in _UNORDERED:
            self._received_ordinal += 1
            if self._received_ordinal - self._told_ordinal >= limits.PROGRESS_FRAMES:
                self._push_progress()
        match header.kind:
            case wire.OPENED:
                self._answer(header, body)
            case wire.REVOKED:
                self._peer_revoked(header, body)
            case wire.PREPARE:
                self._prepare(header, body)
            case wire.GOODBYE:
                self.lose("the peer closed the channel")
            case _:
                self._control_record(header, body)

    def _peer_revoked(self, header: wire.Header, key: bytes) -> None:
        for region in self._opened:
            region.revoked |= bool(key) and region.key == key
        prepared = self._prepared.pop(header.number, None) if header.number else None
        if prepared is not None:
            self._served.opened.pop(header.number, None)
            prepared.close()

    def _serve_open(self, header: wire.Header, key: bytes, region: Region) -> None:
        handle = self._serve(region)
        if handle:
            self._keys.setdefault(key, set()).add(handle)
            record = wire.pack(
                wire.OPENED, handle=handle, number=region.nbytes, offset=header.offset
            )
        else:
            full = Unavailable(f"{limits.GRANTS_MAX} regions are open on this channel")
            record = wire.pack_refusal(full, offset=header.offset)
        self._push(record)

    def _serve(self, region: Region) -> int:
        """A handle for the region, or 0 when there are too many."""
        if len(self._served.opened) >= limits.GRANTS_MAX:
            return 0
        self._handles += 1
        self._served.opened[self._handles] = region
        return self._handles

    def _prepare(self, header: wire.Header, body: bytes) -> None:
        """Room for a region that the peer will hand over."""
        label = body.decode("utf-8", "replace")
        try:
            if self._on_handover is None:
                raise Rejected("this side takes no regions: it named no on_handover")
            if len(self._prepared) >= limits.HANDOVERS_MAX:
                raise Unavailable(f"{len(self._prepared)} handovers are under way")
            region = Region.create(header.number, label)
        except SlackwaterError as error:
            self._push(wire.pack_refusal(error, offset=header.offset))
            return
        except MemoryError as error:
            self._push(wire.pack_refusal(Rejected(str(error)), offset=header.offset))
            return
        handle = self._serve(region)
        self._prepared[handle] = region
        self._push(
            wire.pack(wire.OPENED, handle=handle, number=region.nbytes, offset=header.offset)
        )

    def _adopt(self, header: wire.Header, label: str) -> Region:
        region = self._prepared.pop(header.number, None)
        if region is None:
            raise DecodeRejected(f"a handover of {header.number}, which was not prepared")
        self._served.opened.pop(header.number, None)
        return region

    def _connections(self) -> Iterable[tuple[Stream, bool]]:
        for stream in (self._control, *self._data):
            if stream is not None:
                waiting = stream.index != CONTROL and self._transfers.waiting(stream.index)
                yield stream, waiting

    def _push(self, record: bytes, *, fd: int = -1, ordered: bool = True) -> None:
        if ordered:
            self._sent_ordinal += 1
            self._retained.append(record)
        if self._control is not None:
            self._control.push(record)

    def _push_data(self, index: int, *buffers: bytes | memoryview) -> None:
        stream = self._data[index]
        if stream is not None:
            stream.push(*buffers)

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
        for stream in (self._control, *self._data):
            if stream is not None:
                stream.close()
        self._control, self._data = None, [None] * self.streams
        self._transfers.lose(self._lost or "")
        self._served.opened.clear()
        for region in self._prepared.values():
            region.close()
        self._prepared.clear()
        self._retained.clear()
        self._on_change(self)

    async def close(self) -> None:
        """Says goodbye behind everything that was sent, and waits, within CLOSE_S, until the peer
        has ended too: closing earlier would let the kernel throw away what is on its way."""
        control, data = self._control, self._data
        self._control, self._data = None, [None] * self.streams
        if not self.closed:
            self.lose("the channel was closed here")
            for stream in data:
                if stream is not None:
                    stream.pause()
            if control is not None:
                await self._say_goodbye(control)
        for stream in (control, *data):
            if stream is not None:
                stream.close()
        await self._join_tasks()
        for region in tuple(self._opened):
            region.close()

    async def _say_goodbye(self, control: Stream) -> None:
        linger = _Linger()
        control.start(linger)
        control.push(wire.pack(wire.GOODBYE))
        with contextlib.suppress(TimeoutError):  # The peer does not read: so it loses the rest.
            async with asyncio.timeout(limits.CLOSE_S):
                await control.drain()
                control.finish()
                if not control.closed:
                    await linger.ended.wait()
