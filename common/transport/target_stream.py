"""The part of our memory that a channel's peer may reach, and the threads that serve it
(target_kernels.py)."""

import asyncio
import contextlib
import errno
import functools
import socket
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from slackwater.common.base import limits
from slackwater.common.base.errors import (
    AccessRefused,
    DecodeRejected,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.native import libc
from slackwater.common.transport import target_kernels, wire
from slackwater.common.transport.region import Region

_ENTRY_WORDS: Final = target_kernels.ENTRY_BYTES // 8
_HANDLE_MAX: Final = 2**32 - 1
_WORD_MAX: Final = 2**64 - 1


class DataStream(Protocol):
    """One end of a data stream, as its channel sees it."""

    index: int
    closed: bool

    def idle_ticks(self, waiting: bool) -> int: ...

    def pause(self) -> None: ...

    def close(self) -> None: ...


OnLost = Callable[[Any, Exception | None], None]
"""(the end, why): None where the peer ended it in good order, a SlackwaterError where it violates
the protocol."""


class Served:
    """The regions that the peer has opened, in a table that compiled code reads, and the writes
    done lately."""

    def __init__(self) -> None:
        self.ends: dict[int, ServingEnd] = {}
        self.open = False
        self._regions: dict[int, tuple[Region, Callable[[], None]]] = {}
        self._handle = 0
        # Pages that nobody touches are not there: of 2 MiB a channel with few regions has one.
        table, self.table_address = libc.allocate(
            target_kernels.ENTRIES * target_kernels.ENTRY_BYTES
        )
        done, self.done_address = libc.allocate(8 * target_kernels.REMEMBERED)
        self._words = table.cast("q")
        self.memory = table, done
        """Behind the addresses: kept by each end, too, as long as its thread may run."""

    def begin(self) -> None:
        """The channel is complete: what its peer asks on the streams is served from now on."""
        self.open = True
        for end in self.ends.values():
            end.listen()

    def add(self, region: Region) -> int:
        """A handle for the region, or 0 when there are too many."""
        if len(self._regions) >= limits.GRANTS_MAX:
            return 0
        while True:
            self._handle = self._handle % _HANDLE_MAX + 1
            entry = self._handle % target_kernels.ENTRIES * _ENTRY_WORDS
            if not self._words[entry]:
                break
        handle = self._handle
        forget = functools.partial(self.remove, handle)
        self._regions[handle] = region, forget
        region.when_closed(forget)
        self._words[entry + target_kernels.ENTRY_ADDRESS // 8] = region.address
        self._words[entry + target_kernels.ENTRY_NBYTES // 8] = region.nbytes
        self._words[entry + target_kernels.ENTRY_STAGED // 8] = not region.in_place
        self._words[entry] = handle
        return handle

    def remove(self, handle: int) -> None:
        """When this returns, nobody touches the region by this handle any more. From any thread."""
        words = self._words  # Before it is looked up: `close` may come in between.
        region, forget = self._regions.pop(handle, (None, None))
        if region is None or forget is None:
            return
        words[handle % target_kernels.ENTRIES * _ENTRY_WORDS] = 0
        for end in tuple(self.ends.values()):
            end.fence()
        region.forget_when_closed(forget)

    def region(self, handle: int) -> Region | None:
        return self._regions.get(handle, (None, None))[0]

    def close(self) -> None:
        """The channel is over: no region is reached, and the table goes with its last thread."""
        for handle in tuple(self._regions):
            self.remove(handle)
        self.memory = memoryview(b""), memoryview(b"")
        self._words = memoryview(b"").cast("q")


class ServingEnd:
    """Takes over a connected socket. Its thread begins with the first request."""

    def __init__(
        self,
        sock: socket.socket,
        rest: bytes,
        index: int,
        served: Served,
        on_lost: OnLost,
        *,
        lane: bool = False,
    ) -> None:
        """`lane`: its transfers have numbers of their own."""
        self.index = index
        self.closed = False
        self._sock = sock
        self._served = served
        self._memory = served.memory
        self._done_address = served.done_address
        if lane:
            self._done, self._done_address = libc.allocate(8 * target_kernels.REMEMBERED)
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._thread: threading.Thread | None = None
        self._seen_records = self._idle_ticks = 0
        self._block, self._address = libc.allocate(target_kernels.BLOCK_BYTES)
        self._words = self._block[: target_kernels.MUTEX_AT].cast("q")
        self._words[target_kernels.FD // 8] = sock.fileno()
        self._words[target_kernels.LIMIT // 8] = target_kernels.STAGING_BYTES
        self._words[target_kernels.END // 8] = len(rest)
        self._block[target_kernels.STAGING_AT : target_kernels.STAGING_AT + len(rest)] = rest
        served.ends[index] = self
        self._waits = False
        if served.open:
            self.listen()

    def listen(self) -> None:
        """Serve, from the first byte on."""
        if self.closed or self._waits or self._thread is not None:
            return
        self._waits = True
        if self._words[target_kernels.END // 8]:
            self._loop.call_soon(self._begin)
        else:
            self._loop.add_reader(self._sock.fileno(), self._begin)

    def fence(self) -> None:
        target_kernels.fence(self._address)

    def idle_ticks(self, waiting: bool) -> int:
        """Count idle ticks as Watched defines them: a record that was begun, or an answer that is
        not read."""
        words = self._words
        records = words[target_kernels.RECORDS // 8]
        busy = words[target_kernels.PARTIAL // 8] or words[target_kernels.SENDING // 8]
        if records != self._seen_records or not busy:
            self._seen_records, self._idle_ticks = records, 0
        else:
            self._idle_ticks += 1
        return self._idle_ticks

    # The thread -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._waits:
            return
        self._wait_no_more()
        self._sock.setblocking(True)  # The loop may have undone that before.
        thread = threading.Thread(target=self._run, name="transport-serve", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # The limit of threads is reached.
            self._ended(OSError(errno.EAGAIN, str(error)))
        else:
            self._thread = thread

    def _wait_no_more(self) -> None:
        if self._waits:
            self._waits = False
            self._loop.remove_reader(self._sock.fileno())

    def _run(self) -> None:
        error: Exception | None
        try:
            error = self._serve()
        except Exception as failed:  # The thread's end: the channel says why.
            error = Unavailable(f"the channel's own region failed: {failed!r}")
        with contextlib.suppress(RuntimeError):  # The loop is over, and the channel with it.
            self._loop.call_soon_threadsafe(self._ended, error)

    def _serve(self) -> Exception | None:
        """Serve the stream; return why it ended."""
        words, served = self._words, self._served
        while True:
            status = target_kernels.serve(self._address, served.table_address, self._done_address)
            match status:
                case target_kernels.REFUSE if words[target_kernels.STOP // 8]:
                    return None  # The channel ends, and with it the grants: no fault of the peer's.
                case target_kernels.REFUSE:
                    self._refuse()
                case target_kernels.ARRIVED | target_kernels.FETCH:
                    self._take_part(status)
                case target_kernels.FAILED:
                    return OSError(words[target_kernels.ERROR // 8], "the connection broke")
                case target_kernels.MALFORMED:
                    kind, length = (
                        words[target_kernels.KIND // 8],
                        words[target_kernels.LENGTH // 8],
                    )
                    return DecodeRejected(
                        f"a record of kind {kind} with {length} bytes on a data stream"
                    )
                case _:
                    return None

    def _take_part(self, status: int) -> None:
        """Pass the bytes of a region on a device through its buffer."""
        words = self._words
        region = self._served.region(words[target_kernels.HANDLE // 8])
        if region is None or region.closed:
            return
        offset, length = words[target_kernels.OFFSET // 8], words[target_kernels.LENGTH // 8]
        if status == target_kernels.ARRIVED:
            region.arrived(offset, length)
        else:
            region.fetch(offset, length)

    def _refuse(self) -> None:
        words = self._words
        offset, length = (
            words[target_kernels.OFFSET // 8] & _WORD_MAX,
            words[target_kernels.LENGTH // 8],
        )
        region = self._served.region(words[target_kernels.HANDLE // 8])
        error: SlackwaterError
        if words[target_kernels.REFUSAL // 8] == target_kernels.OUTSIDE and region is not None:
            error = AccessRefused(
                f"bytes [{offset}, {offset + length}) of a region that has {region.nbytes}"
            )
        else:
            error = AccessRefused("the region's key was revoked, or the region is gone")
        number = words[target_kernels.NUMBER // 8] & _WORD_MAX
        record = wire.pack_refusal(error, number=number)
        start = target_kernels.OUT_AT + words[target_kernels.OUT // 8]
        self._block[start : start + len(record)] = record
        words[target_kernels.OUT // 8] += len(record)
        words[target_kernels.PENDING // 8] = 0

    # The end --------------------------------------------------------------------------------------

    def _ended(self, error: Exception | None) -> None:
        if not self.closed:
            self.close()
            self._on_lost(self, error)

    def pause(self) -> None:
        """From now on nothing is served."""
        self._wait_no_more()
        target_kernels.stop(self._address)

    def close(self) -> None:
        """Returns when the thread has ended. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.pause()
        with contextlib.suppress(OSError):  # The peer may have ended it meanwhile.
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        self._sock.close()
        if self._served.ends.get(self.index) is self:
            del self._served.ends[self.index]
