"""A non-blocking stream socket in the event loop: coalesced scatter-gather sends, parsed receives.

Raw sockets and not asyncio transports, for three reasons that were measured or looked up: a
transport copies what the socket does not take at once, cannot receive into a given buffer while
it passes descriptors, and `writelines` joins. Buffers pushed in one turn of the loop leave in one
`sendmsg`. A stream belongs to one owner, who is told of its records and of its end, once.
"""

import array
import asyncio
import contextlib
import os
import socket
from collections import deque
from itertools import islice
from typing import Any, Final, Protocol

from slackwater.common.base import limits
from slackwater.common.base.errors import DecodeRejected, Unavailable
from slackwater.common.transport import wire

_GATHER_MAX: Final = 256
_READ_BUDGET: Final = 1024 * 1024
"""Bytes that one stream receives before the others have their turn."""
_FDS_MAX: Final = 16
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_FDS_MAX * 4)

Buffer = bytes | memoryview


class Owner(wire.Sink, Protocol):
    def lost(self, stream: "Stream", error: Exception | None) -> None:
        """The stream ended: in good order (None), by a socket error, or by a malformed record."""
        ...


class _Described:
    """A record that carries a descriptor, with a duplicate that is ours until it is sent."""

    __slots__ = ("data", "fd")

    def __init__(self, data: Buffer, fd: int) -> None:
        self.data, self.fd = data, os.dup(fd)


class Stream:
    """Takes over a connected, non-blocking socket. Reads from the moment of `start`."""

    def __init__(self, sock: socket.socket, owner: Owner, *, passes_fds: bool = False) -> None:
        self.owner = owner
        self.parser = wire.Parser(owner)
        self.index = -1
        """The owner's name for this stream."""
        self.fds: deque[int] = deque()
        """Descriptors that came and no record has claimed."""
        self._sock = sock
        self._fd = sock.fileno()
        self._passes_fds = passes_fds
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Buffer | _Described] = deque()
        self._drained: asyncio.Future[None] | None = None
        self._scheduled = self._writing = self._reading = False
        self.closed = False
        self._seen_records = self._idle_ticks = 0

    @property
    def sock(self) -> socket.socket:
        """To ask it, not to use it."""
        return self._sock

    # Receiving ------------------------------------------------------------------------------------

    def start(self, owner: Owner) -> None:
        """Give every record from now on to `owner`, beginning with those that wait."""
        self.owner = self.parser.sink = owner
        if not self.closed:
            self._resume()

    def _resume(self) -> None:
        self.parser.paused = False
        try:
            self.parser.run()
        except DecodeRejected as error:
            self.fail(error)
        if not self.closed and not self.parser.paused and not self._reading:
            self._loop.add_reader(self._fd, self._on_readable)
            self._reading = True

    def pause(self) -> None:
        """Hold back what follows the present record until the next `start`."""
        self.parser.paused = True
        if self._reading:
            self._loop.remove_reader(self._fd)
            self._reading = False

    def release(self) -> tuple[socket.socket, bytes]:
        """Give the socket away, and what was received behind the present record. Raises Unavailable
        when it does not take what was pushed."""
        self._flush()
        if self.closed or self._queue:
            self.close()
            raise Unavailable("the connection ended, or its peer does not read")
        self.pause()
        self.closed = True
        rest = self.parser.rest()
        self.parser.stop()
        return self._sock, rest

    def claim_fd(self) -> int:
        """The descriptor that came with the present record. Raises DecodeRejected."""
        if not self.fds:
            raise DecodeRejected("a record that must carry a descriptor came without one")
        return self.fds.popleft()

    def idle_ticks(self, waiting: bool) -> int:
        """Called at each tick of the owner's watch: for how many ticks in a row no record was
        completed although one was begun, or the owner waits for one."""
        records = self.parser.records
        if records != self._seen_records or not (waiting or self.parser.partial):
            self._seen_records, self._idle_ticks = records, 0
        else:
            self._idle_ticks += 1
        return self._idle_ticks

    def _on_readable(self) -> None:
        """Read all records that came. The owner's answers to records that came together leave
        together, at once."""
        self._scheduled = True
        self._read()
        self._scheduled = False
        if self._queue and not self._writing:
            self._flush()

    def _read(self) -> None:
        budget = _READ_BUDGET
        parser = self.parser
        try:
            while budget > 0 and not self.closed and not parser.paused:
                room = parser.room()
                count = self._receive(room)
                if count == 0:
                    self.fail(None)
                    return
                parser.took(count)
                if count < len(room):
                    return
                budget -= count
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, DecodeRejected) as error:
            self.fail(error)
        except BaseException:
            self.fail(Unavailable("the channel's own handler failed"))
            raise

    def _receive(self, room: memoryview) -> int:
        if not self._passes_fds:
            return self._sock.recv_into(room)
        count, ancillary, flags, _ = self._sock.recvmsg_into(
            [room], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        if ancillary:
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                    self.fds.extend(fds)
            if flags & socket.MSG_CTRUNC or len(self.fds) > _FDS_MAX:
                raise DecodeRejected("more descriptors than records that carry one")
        return count

    # Sending --------------------------------------------------------------------------------------

    def push(self, *buffers: Buffer) -> None:
        """Send in this order, at the end of this turn of the loop. Dropped once closed."""
        if self.closed:
            return
        self._queue.extend(buffers)
        self._schedule()

    def push_with_fd(self, record: bytes, fd: int) -> None:
        """Raises Unavailable when this process has no descriptor left for the duplicate."""
        if self.closed:
            return
        try:
            self._queue.append(_Described(record, fd))
        except OSError as error:
            raise Unavailable(f"a descriptor cannot be sent: {error}") from error
        self._schedule()

    async def drain(self) -> None:
        """Wait until the socket has taken everything, or the stream is closed."""
        if self.closed or not self._queue:
            return
        if self._drained is None:
            self._drained = self._loop.create_future()
        await asyncio.shield(self._drained)

    def _schedule(self) -> None:
        if not (self._scheduled or self._writing):
            self._scheduled = True
            self._loop.call_soon(self._flush)
        if len(self._queue) > limits.OUTBOX_ENTRIES_MAX:
            self._loop.call_soon(self.fail, Unavailable("the peer asks and does not read"))

    def _flush(self) -> None:
        self._scheduled = False
        if self.closed:
            return
        blocked = False
        try:
            while self._queue and not blocked:
                blocked = not self._send_some()
        except (BlockingIOError, InterruptedError):
            blocked = True
        except OSError as error:
            self.fail(error)
            return
        if blocked != self._writing:
            if blocked:
                self._loop.add_writer(self._fd, self._flush)
            else:
                self._loop.remove_writer(self._fd)
            self._writing = blocked
        if not blocked and self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    def _send_some(self) -> bool:
        """Send with one system call; True if the socket took everything."""
        first = self._queue[0]
        buffers: list[Buffer] = []
        ancillary: list[tuple[int, int, Any]] = []
        if isinstance(first, _Described):
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [first.fd]))]
            buffers.append(first.data)
        for entry in islice(self._queue, len(buffers), _GATHER_MAX):
            if isinstance(entry, _Described):
                break
            buffers.append(entry)
        wanted = sum(map(len, buffers))
        sent = self._sock.sendmsg(buffers, ancillary)
        if isinstance(first, _Described):
            os.close(first.fd)  # It left with the first byte.
            self._queue[0] = first.data
        self._drop_sent(sent)
        return sent == wanted

    def _drop_sent(self, sent: int) -> None:
        queue = self._queue
        while sent:
            head = queue[0]
            assert not isinstance(head, _Described)
            if len(head) > sent:
                queue[0] = memoryview(head)[sent:]
                return
            sent -= len(head)
            queue.popleft()

    # The end --------------------------------------------------------------------------------------

    def flush_and_close(self) -> None:
        """Close without telling the owner, after a last try to send what waits."""
        self._flush()
        self.close()

    def finish(self) -> None:
        """No more will be sent; what the peer still sends is received until its end."""
        if not self.closed:
            with contextlib.suppress(OSError):  # The peer may have ended it meanwhile.
                self._sock.shutdown(socket.SHUT_WR)

    def fail(self, error: Exception | None) -> None:
        """Close, and tell the owner why."""
        if not self.closed:
            self.close()
            self.owner.lost(self, error)

    def close(self) -> None:
        """Close without telling the owner. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.parser.stop()
        if self._reading:
            self._loop.remove_reader(self._fd)
        if self._writing:
            self._loop.remove_writer(self._fd)
        self._sock.close()
        for entry in self._queue:
            if isinstance(entry, _Described):
                os.close(entry.fd)
        self._queue.clear()
        while self.fds:
            os.close(self.fds.popleft())
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None


class Greeting:
    """The owner of a connection while both sides say who they are: record by record."""

    def __init__(self, sock: socket.socket, *, passes_fds: bool = False) -> None:
        self._first: asyncio.Future[tuple[wire.Header, bytes]] = (
            asyncio.get_running_loop().create_future()
        )
        self.stream = Stream(sock, self, passes_fds=passes_fds)

    async def first_record(self) -> tuple[wire.Header, bytes]:
        """The peer's first record; the stream is paused behind it. Raises Unavailable when the
        connection ends before, DecodeRejected when it is malformed. The caller sets a deadline."""
        self.stream.start(self)
        return await self._first

    async def next_record(self) -> tuple[wire.Header, bytes]:
        """The same for a record after the first, or for the first. Ask for one at a time."""
        if self._first.done():
            self._first = asyncio.get_running_loop().create_future()
        return await self.first_record()

    def begin(self, header: wire.Header) -> None:
        wire.check_length(header, limits.FRAME_BYTES_MAX)

    def end(self, header: wire.Header, body: bytes) -> None:
        self.stream.pause()
        if not self._first.done():
            self._first.set_result((header, body))

    def lost(self, stream: Stream, error: Exception | None) -> None:
        if self._first.done():
            return
        if not isinstance(error, DecodeRejected):
            error = Unavailable(f"the connection ended before its first record: {error}")
        self._first.set_exception(error)


class Linger:
    """Owner of a stream whose channel is closed: waits for the peer's end, takes nothing."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def begin(self, header: wire.Header) -> None:
        wire.check_length(header, limits.FRAME_BYTES_MAX + 1024)

    def end(self, header: wire.Header, body: bytes) -> None:
        """Too late."""

    def lost(self, stream: Stream, error: Exception | None) -> None:
        self.ended.set()
