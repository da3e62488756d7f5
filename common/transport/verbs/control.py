"""The control records of a channel: a byte stream through two rings (ring.py), one at each side.

What is pushed in one turn of the loop leaves in as few messages as credit and the ring's end allow.
Bytes that arrive are copied once, out of the peer's reach, and go through the parser that every
socket uses, with the same checks.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Final

from slackwater.common.base import limits
from slackwater.common.base.errors import DecodeRejected
from slackwater.common.transport import wire
from slackwater.common.transport.verbs import library as ibv
from slackwater.common.transport.verbs.device import Exposure, Memory
from slackwater.common.transport.verbs.queue_pair import QueuePair, Work, WorkWithCallback
from slackwater.common.transport.verbs.ring import Incoming, Outgoing, read_credit

RING: Final = struct.Struct("<QII")
"""Where the peer may write its control records: address, key, bytes."""
WORKS: Final = limits.VERBS_MESSAGES + limits.VERBS_CREDIT_MESSAGES
"""Requests of the queue pair that control may have under way."""
_BYTES: Final = limits.VERBS_RING_BYTES


class ControlStream:
    """`lose` ends the channel, with a reason."""

    def __init__(self, pair: QueuePair, sink: wire.Sink, lose: Callable[[str], None]) -> None:
        """Raises Rejected where the memory cannot be registered."""
        self._pair, self._lose = pair, lose
        self._loop = asyncio.get_running_loop()
        self._memory = Memory(pair.domain, 2 * _BYTES, "control rings")
        self._inward, self._outward = self._memory.view[:_BYTES], self._memory.view[_BYTES:]
        self._incoming = Incoming(_BYTES, limits.VERBS_MESSAGES)
        self._outgoing = Outgoing(_BYTES, limits.VERBS_MESSAGES)
        self._parser = wire.Parser(sink)
        self._records: deque[memoryview] = deque()
        self._scheduled = self._closed = False
        self._flushed: asyncio.Future[None] | None = None
        self._exposure: Exposure | None = None
        self._peer = (0, 0)
        """Address and key of the peer's ring, once we know it."""

    @property
    def partial(self) -> bool:
        """The peer began a record and did not end it, or takes no bytes."""
        return self._parser.partial or bool(self._records)

    # Meeting the peer -----------------------------------------------------------------------------

    async def expose(self) -> bytes:
        """Connect the queue pair and return all that the peer must know. Raises Unavailable,
        Rejected."""
        memory = self._memory
        self._exposure = await self._pair.expose(
            memory.registration, memory.address, _BYTES, ibv.REMOTE_WRITE
        )
        return RING.pack(memory.address, self._exposure.rkey, _BYTES)

    def start(self, ring: bytes) -> None:
        """Raises DecodeRejected."""
        if len(ring) != RING.size:
            raise DecodeRejected(f"a control ring described in {len(ring)} bytes")
        address, rkey, nbytes = RING.unpack(ring)
        if nbytes != _BYTES:
            raise DecodeRejected(f"a control ring of {nbytes} bytes, {_BYTES} were expected")
        self._peer = address, rkey
        self._flush()

    # Out ------------------------------------------------------------------------------------------

    def push(self, record: bytes) -> None:
        self._records.append(memoryview(record))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        if len(self._records) > limits.OUTBOX_ENTRIES_MAX:
            self._loop.call_soon(self._lose, "the peer asks and does not read")

    async def drain(self) -> None:
        """Wait until the peer's NIC has everything. The caller sets a deadline."""
        while not self._closed and (self._records or not self._outgoing.idle):
            self._flushed = self._loop.create_future()
            await self._flushed

    def _flush(self) -> None:
        self._scheduled = False
        while self._records and not self._closed and self._peer[1]:
            room = self._outgoing.room()
            if not room:
                return
            offset = self._outgoing.written % _BYTES
            nbytes = self._fill(offset, room)
            self._outgoing.put(nbytes)
            self._send(offset, nbytes)

    def _fill(self, offset: int, room: int) -> int:
        """Copy records into our copy of the peer's ring."""
        filled = 0
        while self._records and filled < room:
            record = self._records.popleft()
            piece = record[: room - filled]
            begin = offset + filled
            self._outward[begin : begin + len(piece)] = piece
            filled += len(piece)
            if len(piece) < len(record):
                self._records.appendleft(record[len(piece) :])
        return filled

    def _send(self, offset: int, nbytes: int) -> None:
        memory, (address, rkey), written = self._memory, self._peer, self._outgoing.written

        def completed() -> None:
            self._outgoing.completed = written
            self._progress()

        request = self._pair.rdma(
            ibv.WRITE_WITH_IMMEDIATE,
            (memory.address + _BYTES + offset, nbytes, memory.lkey),
            (address + offset, rkey),
            immediate=nbytes,
            inline=nbytes <= self._pair.inline_bytes,
        )
        self._pair.submit(WorkWithCallback(request, completed))

    def _progress(self) -> None:
        """The ring may have room again, or be empty."""
        if self._records:
            self._flush()
        elif self._outgoing.idle:
            self._wake()

    def _wake(self) -> None:
        if self._flushed is not None and not self._flushed.done():
            self._flushed.set_result(None)

    # In -------------------------------------------------------------------------------------------

    def arrived(self, word: int) -> None:
        """A message's immediate word."""
        try:
            credit = read_credit(word)
            if credit is not None:
                self._outgoing.credit(*credit)
                self._progress()
                return
            offset = self._incoming.arrived(word)
            self._parse(self._inward[offset : offset + word])
        except DecodeRejected as error:
            self._lose(f"the peer violates the protocol: {error}")
            return
        except BaseException:
            self._lose("the channel's own handler failed")
            raise
        owed = self._incoming.owed()
        if owed is not None and not self._closed:
            self._give_credit(owed)

    def _parse(self, data: memoryview) -> None:
        while data and not self._closed:
            room = self._parser.room()
            count = min(len(room), len(data))
            room[:count] = data[:count]
            self._parser.took(count)
            data = data[count:]

    def _give_credit(self, word: int) -> None:
        nothing = (self._memory.address, 0, self._memory.lkey)
        request = self._pair.rdma(ibv.WRITE_WITH_IMMEDIATE, nothing, self._peer, immediate=word)
        self._pair.submit(Work(request))

    # The end --------------------------------------------------------------------------------------

    @property
    def landing(self) -> Memory:
        return self._memory

    def hide(self) -> None:
        """The peer can write here no more. Before the queue pair goes."""
        self._closed = True
        self._parser.stop()
        if self._exposure is not None:
            self._exposure.close()
        self._wake()

    def close(self) -> None:
        """Close the ring, after its queue pair."""
        self._inward = self._outward = memoryview(b"")
        self._memory.close()
