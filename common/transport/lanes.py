"""Lanes: further data streams of a tcp channel, on which the program's own compiled code asks.

What the event loop asks on a channel's own streams costs a turn of it, and the interpreter. Whoever
has a loop of his own in compiled code asks for a lane instead, and writes and reads records
(wire.py) himself. It reaches what the channel has opened, and is answered as the channel's own
streams are (target_kernels.py).

A lane that breaks, stalls or is closed is not mended: its asker has the channel itself to fall back
on, and may ask for another. One that violates the protocol ends the channel. What ends the channel
ends its lanes, on both sides: nothing that was begun on one lands afterwards.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable

from slackwater.common.base import limits
from slackwater.common.base.errors import (
    DeadlineExceeded,
    DecodeRejected,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.transport import wire
from slackwater.common.transport.channel import STALL_TICKS
from slackwater.common.transport.stream import Stream
from slackwater.common.transport.target_stream import DataStream, Served, ServingEnd

Dial = Callable[[int, int], Awaitable[tuple[Stream, wire.Header]]]
"""The same as tcp_channel's Redial."""


class Lane:
    """The asking end: a non-blocking socket. `close` it in the thread that uses it."""

    def __init__(self, sock: socket.socket, index: int) -> None:
        self.index = index
        self.closed = False
        self._sock = sock
        self._turn = threading.Lock()

    def fileno(self) -> int:
        return self._sock.fileno()

    def end(self) -> None:
        """End the lane: a thread that asks on it finds it ended. Callable from any thread."""
        with self._turn:
            if not self.closed:
                with contextlib.suppress(OSError):  # The peer may have ended it meanwhile.
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        with self._turn:
            self.closed = True
            self._sock.close()


class InitiatorLanes:
    """The lanes that this side has on one channel; the first has index `first`."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._lanes: dict[int, Lane | None] = {}

    async def open(self, dial: Dial, over: Callable[[], bool]) -> Lane:
        """One more, of a channel that is not `over`. Raises Unavailable, Rejected,
        DeadlineExceeded."""
        index = self._reserve()
        try:
            async with asyncio.timeout(limits.CONNECT_S):
                stream, _ = await dial(index, 0)
            sock, rest = stream.release()
            if rest or over():
                sock.close()
                raise Unavailable("the channel is over, or bytes came that nobody has asked for")
        except BaseException as error:
            del self._lanes[index]
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the peer gave no lane in time") from None
            if isinstance(error, OSError):
                raise Unavailable(f"no lane leads to the peer: {error}") from error
            raise
        self._lanes[index] = lane = Lane(sock, index)
        return lane

    def _reserve(self) -> int:
        for index in range(self._first, self._first + limits.LANES_MAX):
            lane = self._lanes.get(index)
            if index not in self._lanes or (lane is not None and lane.closed):
                self._lanes[index] = None
                return index
        raise Unavailable(f"{limits.LANES_MAX} lanes are open on this channel")

    def end(self) -> None:
        for lane in self._lanes.values():
            if lane is not None:
                lane.end()


class TargetLanes:
    """The lanes on which this side answers. `violated` is told why when a peer may not be trusted
    any more."""

    def __init__(self, first: int, served: Served, violated: Callable[[str], None]) -> None:
        self._first = first
        self._served = served
        self._violated: Callable[[str], None] | None = violated
        self._ends: dict[int, ServingEnd] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def check(self, index: int) -> None:
        """Raises DecodeRejected."""
        if not self._first <= index < self._first + limits.LANES_MAX:
            raise DecodeRejected(f"lane {index} of {self._first} to {limits.LANES_MAX} more")

    def attach(self, sock: socket.socket, rest: bytes, index: int) -> None:
        """One that comes under the index of another takes its place."""
        old = self._ends.pop(index, None)
        if old is not None:
            old.close()
        self._ends[index] = ServingEnd(sock, rest, index, self._served, self._lost, lane=True)

    def _lost(self, end: DataStream, error: Exception | None) -> None:
        if self._ends.get(end.index) is end:
            del self._ends[end.index]
        if isinstance(error, SlackwaterError) and self._violated is not None:
            self._violated(str(error))

    def tick(self) -> None:
        """Called at each tick of the channel's watch: one that stalls is closed, it alone."""
        for index, end in tuple(self._ends.items()):
            if end.idle_ticks(False) >= STALL_TICKS:
                del self._ends[index]
                end.close()

    def pause(self) -> None:
        for end in self._ends.values():
            end.pause()

    def close(self) -> None:
        ends, self._ends = self._ends, {}
        for end in ends.values():
            end.close()
        self._violated = None  # The channel's: it is to be collected at once.
