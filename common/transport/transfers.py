"""One-sided writes and reads as numbered parts on several data streams: the asking end.

An operation is cut into parts; what is unacknowledged stays within a credit; the operation is done
when every part was answered. A part that was under way when its stream broke is sent again under
its number; the serving end remembers the numbers it has done (the credit bounds how far they lie
apart), so that a part is never applied twice.

What is asked in one turn of the loop leaves together at its end. A few small requests are waited
for right there, in compiled code: their answers come sooner than the loop could be told of them.
Where each turn has a single one, the next few are sent and waited for by their caller at once; and
then again one by the loop, so that others have their turn.
"""

import asyncio
import ctypes
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from slackwater.common.base import limits
from slackwater.common.base.errors import SlackwaterError, Unavailable
from slackwater.common.native import libc
from slackwater.common.transport import initiator_kernels
from slackwater.common.transport.initiator_stream import InitiatorEnd

_FULL_BYTES: Final = 256 * 1024
"""Parts share one stream up to this load: small ones then leave and arrive in fewer calls."""
_SETTLE_NS: Final = int(limits.SETTLE_S * 1e9)
_LONE_TURNS: Final = 2
"""Turns with one request each after which callers wait for the next ones themselves."""
_IMPATIENCE_MAX: Final = 255
_WORD: Final = 8
_PART: Final = struct.Struct("<8q")
"""number, kind, handle, offset, address, length, stream, abandoned"""
_PART_WORDS: Final = initiator_kernels.PART_BYTES // _WORD


class _Operation:
    """A write or read of the program: done when all its parts are."""

    __slots__ = ("abandoned", "done", "error", "pending")

    def __init__(self, pending: int) -> None:
        self.pending = pending
        """Parts that are unanswered; while parts are being launched, one more."""
        self.done: asyncio.Future[None] | None = None
        self.abandoned = False
        self.error: SlackwaterError | None = None

    def answered(self) -> None:
        """One part more."""
        self.pending -= 1
        if not self.pending and self.done is not None and not self.done.done():
            self.done.set_result(None)


_Part = tuple[_Operation, memoryview, int]
"""The operation that the part belongs to, the caller's bytes, the stream's index; all else is in
the table."""


def _address(view: memoryview) -> int:
    """Where the bytes lie; whoever asks keeps the view."""
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Transfers:
    """The operations of one channel, on data streams with these indices."""

    def __init__(self, indices: Iterable[int], *, part_bytes: int, credit_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._credit_bytes = max(credit_bytes, part_bytes)
        self._loop = asyncio.get_running_loop()
        self._parts: dict[int, _Part] = {}
        self._table, self.table_address = libc.allocate(
            initiator_kernels.PARTS * initiator_kernels.PART_BYTES
        )
        self._words = self._table.cast("q")
        self._number = 0
        self._in_flight_bytes = 0
        self._load = dict.fromkeys(indices, 0)
        self._ends: dict[int, InitiatorEnd] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._lost: str | None = None
        self._turn_due = False
        self._asked = 0
        """Parts that this turn of the loop has launched."""
        self._lone_turns = self._at_once = 0
        self._impatience = self._patience_in = 0

    async def run(self, kind: int, handle: int, offset: int, view: memoryview) -> None:
        """WRITE `view` to, or READ it from, an opened region. Raises AccessRefused, Unavailable."""
        nbytes = len(view)
        if 0 < nbytes <= self._part_bytes and not self._waiters and self._has_credit(nbytes):
            operation: _Operation | None
            if self._at_once and not self._parts and nbytes <= limits.SETTLE_BYTES:
                operation = self._exchange(kind, handle, offset, view)
            else:
                operation = _Operation(1)
                self._launch(kind, handle, offset, view, operation)
            if operation is not None:
                await self._finish(operation)
            return
        step = self._part_bytes
        offsets = range(offset, offset + nbytes, step)
        await self._run_all(kind, handle, offsets, step, view)

    async def run_scattered(
        self, kind: int, handle: int, offsets: Sequence[int], length: int, view: memoryview
    ) -> None:
        """Run like `run`, for pieces of `length` bytes (at most a part) at these offsets, which lie
        one behind the other in `view`: one operation, and few system calls, for all of them."""
        end = self._ends.get(self._pick())
        if not offsets or self._waiters or not self._has_credit(length, len(offsets)) or not end:
            await self._run_all(kind, handle, offsets, length, view)
            return
        count = len(offsets)
        operation = _Operation(count)
        first, self._number = self._number + 1, self._number + count
        where = np.asarray(offsets, np.int64)
        initiator_kernels.enter(
            end.address, self.table_address,
            first, count, kind, handle, int(where.ctypes.data), _address(view), length,
        )  # fmt: skip
        part = operation, view[:length], end.index
        for number in range(first, first + count):
            self._parts[number] = part
        self._in_flight_bytes += len(view)
        self._load[end.index] += len(view)
        self._schedule(count)
        await self._finish(operation)

    async def _run_all(
        self, kind: int, handle: int, offsets: Sequence[int], length: int, view: memoryview
    ) -> None:
        operation = _Operation(1)
        try:
            for i, offset in enumerate(offsets):
                piece = view[i * length : (i + 1) * length]
                if self._waiters or not self._has_credit(len(piece)):
                    await self._wait_for_credit(len(piece))
                if operation.error is not None:
                    break
                operation.pending += 1
                self._launch(kind, handle, offset, piece, operation)
        except BaseException:
            self._abandon(operation)
            raise
        operation.answered()
        await self._finish(operation)

    async def _finish(self, operation: _Operation) -> None:
        """Raises what a part was refused with, Unavailable."""
        try:
            if operation.pending and operation.error is None:
                operation.done = self._loop.create_future()
                await operation.done
            if operation.error is not None:
                raise operation.error
        except BaseException:
            self._abandon(operation)
            raise

    def waiting(self, index: int) -> bool:
        """Parts of this stream are unanswered."""
        return self._load[index] > 0

    # Credit --------------------------------------------------------------------------------------

    def _has_credit(self, nbytes: int, count: int = 1) -> bool:
        """For `count` parts of so many bytes."""
        if not self._parts:
            return count == 1 or (
                count < limits.TRANSFERS_MAX and count * nbytes <= self._credit_bytes
            )
        oldest = next(iter(self._parts))
        return (
            self._in_flight_bytes + count * nbytes <= self._credit_bytes
            and self._number + count - oldest < limits.TRANSFERS_MAX
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

    # Asking --------------------------------------------------------------------------------------

    def _pick(self) -> int:
        """The first stream that is up and has room; the least loaded where none has."""
        best, best_load = -1, -1
        for index, load in self._load.items():
            if index in self._ends:
                if load < _FULL_BYTES:
                    return index
                if best_load < 0 or load < best_load:
                    best, best_load = index, load
        return best if best >= 0 else next(iter(self._load))

    def _launch(
        self, kind: int, handle: int, offset: int, view: memoryview, operation: _Operation
    ) -> None:
        """Raises Unavailable."""
        if self._lost is not None:
            raise Unavailable(self._lost)
        nbytes = len(view)
        index = self._pick()
        self._number = number = self._number + 1
        _PART.pack_into(
            self._table,
            number % initiator_kernels.PARTS * initiator_kernels.PART_BYTES,
            *(number, kind, handle, offset, _address(view), nbytes, index, 0),
        )
        self._parts[number] = operation, view, index
        self._in_flight_bytes += nbytes
        self._load[index] += nbytes
        end = self._ends.get(index)
        if end is None:
            return  # Sent when its stream is there again.
        end.ask(number)
        self._schedule(1)

    def _schedule(self, count: int) -> None:
        """Send `count` more parts at the end of this turn of the loop."""
        if self._turn_due:
            self._asked += count
        else:
            self._turn_due = True
            self._asked = count
            self._loop.call_soon(self._turn)

    def _exchange(self, kind: int, handle: int, offset: int, view: memoryview) -> _Operation | None:
        """Ask for one part and wait in place, with nothing else under way. None: it is done. Raises
        Unavailable."""
        index = self._pick()
        end = self._ends.get(index)
        if end is None:
            operation = _Operation(1)
            self._launch(kind, handle, offset, view, operation)
            return operation
        self._at_once -= 1
        self._number = number = self._number + 1
        nbytes = len(view)
        status = initiator_kernels.exchange(
            end.address, self.table_address,
            number, kind, handle, offset, _address(view), nbytes, _SETTLE_NS,
        )  # fmt: skip
        if status == initiator_kernels.ANSWERED:
            return None
        operation = _Operation(1)
        self._parts[number] = operation, view, index
        self._in_flight_bytes += nbytes
        self._load[index] += nbytes
        self._settled(end.settled(status))
        return operation

    def _turn(self) -> None:
        """Send the scheduled parts: all that was ready in this turn of the loop has run."""
        self._turn_due = False
        lone = self._asked == 1 and len(self._parts) == 1
        self._lone_turns = self._lone_turns + 1 if lone else 0
        self._at_once = 0
        patient = self._patience_in == 0 and self._in_flight_bytes <= limits.SETTLE_BYTES
        if not patient and self._patience_in:
            self._patience_in -= 1
        for end in tuple(self._ends.values()):
            if not end.asks:
                continue
            if patient:
                self._settle(end)
                if self._lone_turns >= _LONE_TURNS and not self._parts:
                    self._at_once = limits.SETTLES_MAX
            else:
                end.flush()

    def _settle(self, end: InitiatorEnd) -> None:
        self._settled(end.settle(_SETTLE_NS))

    def _settled(self, answered: bool) -> None:
        """Where it was in vain to wait in place, that is left alone for a while."""
        if answered:
            self._impatience = 0
        else:
            self._impatience = min(2 * self._impatience + 1, _IMPATIENCE_MAX)
            self._patience_in = self._impatience
            self._at_once = 0

    # Answers -------------------------------------------------------------------------------------

    def completed(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            operation, view, index = self._parts.pop(number)
            nbytes = len(view)
            self._in_flight_bytes -= nbytes
            self._load[index] -= nbytes
            operation.answered()
        if self._waiters:
            self._wake()

    def refused(self, number: int, error: SlackwaterError) -> None:
        operation = self._parts[number][0]
        if operation.error is None:
            operation.error = error
        self.completed((number,))

    def _abandon(self, operation: _Operation) -> None:
        """The caller is gone or has its error: nothing more may come into its buffer."""
        operation.abandoned = True
        if not operation.pending:
            return
        for number, (owner, _, index) in self._parts.items():
            if owner is operation:
                at = number % initiator_kernels.PARTS * _PART_WORDS
                self._words[at + initiator_kernels.PART_ABANDONED // _WORD] = 1
                if index in self._ends:
                    self._ends[index].divert(number)

    # Streams come and go -------------------------------------------------------------------------

    def attach(self, end: InitiatorEnd) -> None:
        """A stream is there (again): send what was under way on it."""
        self._ends[end.index] = end
        abandoned = []
        for number, (operation, _, index) in self._parts.items():
            if index != end.index:
                continue
            if operation.abandoned:
                abandoned.append(number)
            else:
                self._words[number % initiator_kernels.PARTS * _PART_WORDS] = number
                end.ask(number)
        self.completed(abandoned)
        end.flush()

    def detach(self, end: InitiatorEnd) -> None:
        """Answers of a stream that is gone are asked for again."""
        if self._ends.get(end.index) is end:
            del self._ends[end.index]

    def lose(self, why: str) -> None:
        self._lost = why
        self._ends.clear()
        parts, self._parts = self._parts, {}
        for operation, _, _ in parts.values():
            if operation.error is None:
                operation.error = Unavailable(why)
            if operation.done is not None and not operation.done.done():
                operation.done.set_result(None)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
