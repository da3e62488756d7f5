"""The asking end of a data stream on the event loop; initiator_kernels.py is its compiled part."""

import asyncio
import socket
from collections.abc import Iterable
from typing import Final, Protocol

from slackwater.common.base.errors import DecodeRejected, SlackwaterError
from slackwater.common.native import libc
from slackwater.common.transport import initiator_kernels, wire
from slackwater.common.transport.target_stream import OnLost

_WORD: Final = 8
_RING: Final = initiator_kernels.RING_AT // _WORD
_DONE: Final = initiator_kernels.DONE_AT // _WORD
_HEAD, _TAIL = initiator_kernels.HEAD // _WORD, initiator_kernels.TAIL // _WORD
_COUNT: Final = initiator_kernels.DONE // _WORD


class TransferOwner(Protocol):
    """The owner of the parts."""

    table_address: int

    def completed(self, numbers: Iterable[int]) -> None: ...

    def refused(self, number: int, error: SlackwaterError) -> None: ...

    def detach(self, end: "InitiatorEnd") -> None: ...


class InitiatorEnd:
    """Takes over a connected, non-blocking socket and reads from it at once."""

    def __init__(
        self,
        sock: socket.socket,
        rest: bytes,
        index: int,
        transfers: TransferOwner,
        on_lost: OnLost,
    ) -> None:
        self.index = index
        self.closed = False
        self._sock = sock
        self._fd = sock.fileno()
        self._transfers = transfers
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._seen_records = self._idle_ticks = 0
        self._writing = False
        self._block, self.address = libc.allocate(initiator_kernels.BLOCK_BYTES)
        self._words = words = self._block[: initiator_kernels.STAGING_AT].cast("q")
        words[initiator_kernels.FD // _WORD], words[initiator_kernels.INDEX // _WORD] = (
            self._fd,
            index,
        )
        words[initiator_kernels.LIMIT // _WORD] = initiator_kernels.STAGING_BYTES
        words[initiator_kernels.END // _WORD] = len(rest)
        self._block[initiator_kernels.STAGING_AT : initiator_kernels.STAGING_AT + len(rest)] = rest
        self._reading = True
        self._loop.add_reader(self._fd, self._on_readable)

    def ask(self, number: int) -> None:
        """Enter a part into the ring; `flush` or `settle` sends it."""
        words = self._words
        tail = words[_TAIL]
        words[_RING + tail % initiator_kernels.RING] = number
        words[_TAIL] = tail + 1

    @property
    def asks(self) -> bool:
        """There is something in the ring."""
        return self._words[_HEAD] < self._words[_TAIL]

    def flush(self) -> None:
        if self.closed:
            return
        status = initiator_kernels.flush(self.address, self._transfers.table_address)
        if status == initiator_kernels.FAILED:
            self._fail(status)
            return
        self._watch_writable(status == initiator_kernels.BUSY)

    def settle(self, limit_ns: int) -> bool:
        """Send, and wait in place for an answer; False when none came."""
        if self.closed:
            return False
        return self.settled(
            initiator_kernels.settle(self.address, self._transfers.table_address, limit_ns)
        )

    def settled(self, status: int) -> bool:
        """See to what a call that waited has brought."""
        settled = self._words[_COUNT] > 0 or status != initiator_kernels.IDLE
        self._after(status)
        if not self.closed:
            self._watch_writable(self.asks)
        return settled

    def divert(self, number: int) -> None:
        """Stop an answer that is coming in from writing into memory that is wanted back."""
        if self._words[initiator_kernels.ARRIVING // _WORD] == number:
            self._words[initiator_kernels.TARGET // _WORD] = 0

    def idle_ticks(self, waiting: bool) -> int:
        """Count idle ticks as Watched defines them."""
        words = self._words
        records = words[initiator_kernels.RECORDS // _WORD]
        partial = words[initiator_kernels.END // _WORD] > words[initiator_kernels.START // _WORD]
        if records != self._seen_records or not (waiting or partial):
            self._seen_records, self._idle_ticks = records, 0
        else:
            self._idle_ticks += 1
        return self._idle_ticks

    def _watch_writable(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._fd, self.flush)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._fd)
        self._writing = wanted

    def _on_readable(self) -> None:
        self._after(initiator_kernels.take(self.address, self._transfers.table_address))

    def _after(self, status: int) -> None:
        words = self._words
        while True:
            count = words[_COUNT]
            if count:
                self._transfers.completed(words[_DONE : _DONE + count].tolist())
            if status != initiator_kernels.REFUSED:
                break
            self._transfers.refused(words[initiator_kernels.NUMBER // _WORD], self._refusal())
            status = initiator_kernels.take(self.address, self._transfers.table_address)
        if status > initiator_kernels.BUSY:
            self._fail(status)

    def _refusal(self) -> SlackwaterError:
        words = self._words
        start = words[initiator_kernels.REASON // _WORD] - self.address
        length = words[initiator_kernels.LENGTH // _WORD]
        code = words[initiator_kernels.CODE // _WORD]
        body = bytes(self._block[start : start + length])
        return wire.refusal(wire.Header(wire.REFUSED, code, 0, 0, length), body)

    # The end --------------------------------------------------------------------------------------

    def _fail(self, status: int) -> None:
        words = self._words
        match status:
            case initiator_kernels.MALFORMED:
                kind, length = (
                    words[initiator_kernels.KIND // _WORD],
                    words[initiator_kernels.LENGTH // _WORD],
                )
                self.fail(
                    DecodeRejected(f"a record of kind {kind} with {length} bytes on a data stream")
                )
            case initiator_kernels.UNASKED:
                number = words[initiator_kernels.NUMBER // _WORD]
                self.fail(DecodeRejected(f"an answer to transfer {number}, which is not under way"))
            case initiator_kernels.FAILED:
                self.fail(OSError(words[initiator_kernels.ERROR // _WORD], "the connection broke"))
            case _:
                self.fail(None)

    def fail(self, error: Exception | None) -> None:
        """Close, and tell the channel why."""
        if not self.closed:
            self.close()
            self._on_lost(self, error)

    def pause(self) -> None:
        """Neither send nor receive any more."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)
            self._watch_writable(False)

    def close(self) -> None:
        """Idempotent."""
        if not self.closed:
            self.pause()
            self.closed = True
            self._sock.close()
            self._transfers.detach(self)
