"""One-sided writes and reads as numbered parts on several data streams: both ends of it.

The asking end cuts an operation into parts, keeps what is unacknowledged within a credit, and
completes the operation when every part was answered. The serving end receives a WRITE straight
into the region it names and sends a READ straight out of it, after checking handle and range.
A part that was under way when its stream broke is sent again under its number; the serving end
remembers the numbers it has done (the credit bounds how far they lie apart), so that a part is
never applied twice.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from slackwater.common import limits
from slackwater.common.errors import AccessRefused, DecodeRejected, SlackwaterError, Unavailable
from slackwater.common.transport import wire
from slackwater.common.transport.region import Region
from slackwater.common.transport.stream import Buffer, Stream

_FULL_BYTES: Final = 256 * 1024
"""Parts share one stream up to this load: small ones then leave and arrive in fewer calls."""
_REMEMBERED: Final = 2 * limits.TRANSFERS_MAX

Push = Callable[..., None]


class _Operation:
    """A write or read of the program: done when all its parts are."""

    __slots__ = ("abandoned", "done", "error", "issued", "pending")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()
        self.pending = 0
        self.issued = False
        self.abandoned = False
        self.error: SlackwaterError | None = None

    def settle(self) -> None:
        if self.issued and not self.pending and not self.done.done():
            if self.error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(self.error)


class _Part:
    __slots__ = ("handle", "index", "kind", "offset", "operation", "view")

    def __init__(
        self,
        kind: int,
        handle: int,
        offset: int,
        view: memoryview,
        operation: _Operation,
        index: int,
    ) -> None:
        self.kind, self.handle, self.offset = kind, handle, offset
        self.view, self.operation, self.index = view, operation, index


class Transfers:
    """The asking end. `push(index, *buffers)` sends on a data stream, or drops while it is down."""

    def __init__(self, push: Push, streams: int, *, part_bytes: int, credit_bytes: int) -> None:
        self._push = push
        self._part_bytes = part_bytes
        self._credit_bytes = max(credit_bytes, part_bytes)
        self._loop = asyncio.get_running_loop()
        self._parts: dict[int, _Part] = {}
        self._number = 0
        self._in_flight_bytes = 0
        self._load = [0] * streams
        self._up = [False] * streams
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._receivers: list[DataReceiver | None] = [None] * streams
        self._lost: str | None = None

    async def run(self, kind: int, handle: int, offset: int, view: memoryview) -> None:
        """WRITE `view` to, or READ it from, an opened region. Raises AccessRefused, Unavailable."""
        operation = _Operation(self._loop)
        step = self._part_bytes
        try:
            for start in range(0, len(view), step):
                piece = view[start : start + step]
                if self._waiters or not self._has_credit(len(piece)):
                    await self._wait_for_credit(len(piece))
                if self._lost is not None:
                    raise Unavailable(self._lost)
                if operation.error is not None:
                    break
                self._launch(_Part(kind, handle, offset + start, piece, operation, self._pick()))
            operation.issued = True
            operation.settle()
            await operation.done
        except BaseException:
            self._abandon(operation)
            raise

    async def run_scattered(
        self, kind: int, handle: int, offsets: Sequence[int], length: int, view: memoryview
    ) -> None:
        """As `run`, for pieces of `length` bytes (at most a part) at these offsets, which lie one
        behind the other in `view`: one operation, and few system calls, for all of them."""
        operation = _Operation(self._loop)
        try:
            for i, offset in enumerate(offsets):
                if self._waiters or not self._has_credit(length):
                    await self._wait_for_credit(length)
                if self._lost is not None:
                    raise Unavailable(self._lost)
                if operation.error is not None:
                    break
                piece = view[i * length : (i + 1) * length]
                self._launch(_Part(kind, handle, offset, piece, operation, self._pick()))
            operation.issued = True
            operation.settle()
            await operation.done
        except BaseException:
            self._abandon(operation)
            raise

    def waiting(self, index: int) -> bool:
        """Parts of this stream are unanswered."""
        return self._load[index] > 0

    # Credit --------------------------------------------------------------------------------------

    def _has_credit(self, nbytes: int) -> bool:
        if not self._parts:
            return True
        oldest = next(iter(self._parts))
        return (
            self._in_flight_bytes + nbytes <= self._credit_bytes
            and self._number - oldest < limits.TRANSFERS_MAX
        )

    async def _wait_for_credit(self, nbytes: int) -> None:
        """First come, first served: whoever has got its credit wakes the next."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            while self._lost is None and (
                self._waiters[0] is not waiter or not self._has_credit(nbytes)
            ):
                await waiter
                fresh: asyncio.Future[None] = self._loop.create_future()
                self._waiters[self._waiters.index(waiter)] = fresh
                waiter = fresh
        finally:
            self._waiters.remove(waiter)
            self._wake()

    def _wake(self) -> None:
        if self._waiters and not self._waiters[0].done():
            self._waiters[0].set_result(None)

    # Parts ---------------------------------------------------------------------------------------

    def _pick(self) -> int:
        """The first stream that is up and has room; the least loaded where none has."""
        best, best_load = 0, -1
        for index, load in enumerate(self._load):
            if self._up[index]:
                if load < _FULL_BYTES:
                    return index
                if best_load < 0 or load < best_load:
                    best, best_load = index, load
        return best

    def _launch(self, part: _Part) -> None:
        self._number += 1
        self._parts[self._number] = part
        part.operation.pending += 1
        self._in_flight_bytes += len(part.view)
        self._load[part.index] += len(part.view)
        self._transmit(self._number, part)

    def _transmit(self, number: int, part: _Part) -> None:
        buffers: tuple[Buffer, ...]
        if part.kind == wire.WRITE:
            header = wire.pack_header(wire.WRITE, part.handle, number, part.offset, len(part.view))
            buffers = (header, part.view)
        else:
            wanted = wire.WORD.pack(len(part.view))
            buffers = (
                wire.pack(
                    wire.READ, handle=part.handle, number=number, offset=part.offset, body=wanted
                ),
            )
        self._push(part.index, *buffers)

    def awaited(self, index: int, header: wire.Header) -> memoryview | None:
        """Where the DATA of a part belongs; None when nobody wants it any more. Raises
        DecodeRejected when it was not asked for like this."""
        part = self._parts.get(header.number)
        if (
            part is None
            or part.kind != wire.READ
            or part.index != index
            or len(part.view) != header.length
        ):
            raise DecodeRejected(f"data for transfer {header.number}, which did not ask for it")
        return None if part.operation.abandoned else part.view

    def answered(self, index: int, header: wire.Header, error: SlackwaterError | None) -> None:
        """Raises DecodeRejected when no such part is under way."""
        part = self._parts.pop(header.number, None)
        fits = {wire.ACK: wire.WRITE, wire.DATA: wire.READ}
        if part is None or part.index != index or fits.get(header.kind, part.kind) != part.kind:
            raise DecodeRejected(f"an answer to transfer {header.number}, which is not under way")
        self._release(part)
        operation = part.operation
        operation.pending -= 1
        if error is not None and operation.error is None:
            operation.error = error
        operation.settle()

    def _release(self, part: _Part) -> None:
        self._in_flight_bytes -= len(part.view)
        self._load[part.index] -= len(part.view)
        self._wake()

    def _abandon(self, operation: _Operation) -> None:
        """The caller is gone or has its error: nothing more may come into its buffer."""
        operation.abandoned = True
        if operation.done.done() and not operation.done.cancelled():
            operation.done.exception()
        for receiver in self._receivers:
            if receiver is None:
                continue
            part = self._parts.get(receiver.arriving)
            if part is not None and part.operation is operation:
                receiver.stream.parser.divert()

    # Streams come and go -------------------------------------------------------------------------

    def attach(self, index: int, receiver: "DataReceiver") -> None:
        """A stream is there (again): send what was under way on it."""
        self._up[index] = True
        self._receivers[index] = receiver
        for number in [number for number, part in self._parts.items() if part.index == index]:
            part = self._parts[number]
            if part.operation.abandoned:
                del self._parts[number]
                self._release(part)
            else:
                self._transmit(number, part)

    def detach(self, index: int) -> None:
        self._up[index] = False
        self._receivers[index] = None

    def lose(self, why: str) -> None:
        self._lost = why
        parts, self._parts = self._parts, {}
        for part in parts.values():
            if not part.operation.done.done():
                part.operation.done.set_exception(Unavailable(why))
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class Served:
    """The serving end's memory: regions the peer has opened, and the writes done lately."""

    def __init__(self) -> None:
        self.opened: dict[int, Region] = {}
        self._done = [0] * _REMEMBERED

    def locate(self, header: wire.Header, nbytes: int) -> memoryview:
        """Raises AccessRefused."""
        region = self.opened.get(header.handle)
        if region is None or region.closed:
            raise AccessRefused("the region's key was revoked, or the region is gone")
        if header.offset + nbytes > region.nbytes:
            raise AccessRefused(
                f"bytes [{header.offset}, {header.offset + nbytes}) of a region "
                f"that has {region.nbytes}"
            )
        return region.buffer[header.offset : header.offset + nbytes]

    def arrived(self, header: wire.Header) -> None:
        """The bytes of a write are in the region's buffer."""
        region = self.opened.get(header.handle)
        if region is not None and not region.closed:
            region.arrived(header.offset, header.length)

    def fetch(self, header: wire.Header, nbytes: int) -> None:
        """The bytes of a read that was located are about to be sent."""
        self.opened[header.handle].fetch(header.offset, nbytes)

    def was_done(self, number: int) -> bool:
        return self._done[number % _REMEMBERED] == number

    def mark_done(self, number: int) -> None:
        self._done[number % _REMEMBERED] = number


class DataReceiver:
    """Owner of one data stream: takes what the peer asks for and what it answers."""

    def __init__(
        self,
        stream: Stream,
        index: int,
        transfers: Transfers,
        served: Served,
        on_lost: Callable[[Stream, Exception | None], None],
    ) -> None:
        self.stream = stream
        self.arriving = 0
        """The transfer whose DATA is coming in at present."""
        self._index = index
        self._transfers = transfers
        self._served = served
        self._on_lost = on_lost
        self._refused: AccessRefused | None = None

    def begin(self, header: wire.Header) -> memoryview | None:
        if header.kind == wire.WRITE:
            wire.check_length(header, limits.CHUNK_BYTES)
            self._refused = None
            try:
                place = self._served.locate(header, header.length)
            except AccessRefused as error:
                self._refused = error
                return memoryview(bytearray(header.length))
            if self._served.was_done(header.number):
                return memoryview(bytearray(header.length))
            return place
        if header.kind == wire.DATA:
            wire.check_length(header, limits.CHUNK_BYTES)
            place_or_none = self._transfers.awaited(self._index, header)
            self.arriving = header.number
            return memoryview(bytearray(header.length)) if place_or_none is None else place_or_none
        if header.kind == wire.READ:
            wire.check_length(header, wire.WORD.size)
        else:
            wire.check_length(header, wire.REASON_BYTES_MAX)
        return None

    def end(self, header: wire.Header, body: bytes) -> None:
        match header.kind:
            case wire.WRITE:
                self._end_write(header)
            case wire.ACK:
                self._transfers.answered(self._index, header, None)
            case wire.READ:
                self._serve_read(header, body)
            case wire.DATA if header.length:
                self.arriving = 0
                self._transfers.answered(self._index, header, None)
            case wire.REFUSED:
                self._transfers.answered(self._index, header, wire.refusal(header, body))
            case _:
                raise DecodeRejected(f"a record of kind {header.kind} on a data stream")

    def _end_write(self, header: wire.Header) -> None:
        if self._refused is not None and header.length:
            self.stream.push(wire.pack_refusal(self._refused, number=header.number))
            self._refused = None
            return
        if header.length and not self._served.was_done(header.number):
            self._served.arrived(header)
        self._served.mark_done(header.number)
        self.stream.push(wire.pack_header(wire.ACK, 0, header.number, 0, 0))

    def _serve_read(self, header: wire.Header, body: bytes) -> None:
        if len(body) != wire.WORD.size:
            raise DecodeRejected(f"a read request with {len(body)} bytes")
        (wanted,) = wire.WORD.unpack(body)
        if not 0 < wanted <= limits.CHUNK_BYTES:
            raise DecodeRejected(f"a read of {wanted} bytes, 1 to {limits.CHUNK_BYTES} are served")
        try:
            place = self._served.locate(header, wanted)
        except AccessRefused as error:
            self.stream.push(wire.pack_refusal(error, number=header.number))
            return
        self._served.fetch(header, wanted)
        self.stream.push(wire.pack_header(wire.DATA, 0, header.number, 0, wanted), place)

    def lost(self, stream: Stream, error: Exception | None) -> None:
        self._on_lost(stream, error)
