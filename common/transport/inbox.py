"""Frames that arrived and wait for the program, and the credit that bounds them at the sender.

The sender counts what it sent, the receiver tells how much its program has consumed; the difference
may not pass SEND_QUEUE. So a slow program stops its peer's `send` and never the socket, on which
answers to other requests must still come through.
"""

import asyncio
from collections import deque

from slackwater.common.base import limits
from slackwater.common.base.errors import DecodeRejected, Unavailable


class Inbox:
    """Frames that came and were not received yet, first in first out, for any number of waiters."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._bytes = 0
        self._closed: str | None = None
        self.consumed_frames = self.consumed_bytes = 0
        self._told_frames = self._told_bytes = 0

    def put(self, frame: bytes) -> None:
        """Raises DecodeRejected when the peer sends beyond its credit."""
        self._bytes += len(frame)
        if (
            len(self._frames) >= limits.SEND_QUEUE_FRAMES + limits.PROGRESS_FRAMES
            or self._bytes > limits.SEND_QUEUE_BYTES + limits.PROGRESS_BYTES
        ):
            raise DecodeRejected(
                f"{len(self._frames)} frames wait here: the peer ignores its credit"
            )
        self._frames.append(frame)
        self._wake()

    async def get(self) -> bytes:
        """Raises Unavailable once closed and empty."""
        while not self._frames:
            if self._closed is not None:
                raise Unavailable(self._closed)
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()  # It was our turn: the next one has it.
                raise
            finally:
                if not waiter.done() or waiter.cancelled():
                    self._forget(waiter)
        frame = self._frames.popleft()
        self._bytes -= len(frame)
        self.consumed_frames += 1
        self.consumed_bytes += len(frame)
        return frame

    def progress_due(self) -> bool:
        """True when the peer should be told how far the program is; counts as told."""
        if (
            self.consumed_frames - self._told_frames < limits.PROGRESS_FRAMES
            and self.consumed_bytes - self._told_bytes < limits.PROGRESS_BYTES
        ):
            return False
        self._told_frames, self._told_bytes = self.consumed_frames, self.consumed_bytes
        return True

    def close(self, why: str) -> None:
        """Close the inbox; frames that are there can still be received."""
        self._closed = why
        while self._waiters:
            self._wake()

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _forget(self, waiter: "asyncio.Future[None]") -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)


class Credit:
    """The sender's side: how many frames and bytes the peer's program has not consumed."""

    def __init__(self) -> None:
        self._sent_frames = self._sent_bytes = 0
        self._consumed_frames = self._consumed_bytes = 0

    def take(self, nbytes: int) -> None:
        """Raises Unavailable when the queue is full."""
        waiting = self._sent_frames - self._consumed_frames
        if (
            waiting >= limits.SEND_QUEUE_FRAMES
            or self._sent_bytes - self._consumed_bytes + nbytes > limits.SEND_QUEUE_BYTES
        ):
            raise Unavailable(
                f"{waiting} frames wait at the peer, which does not receive: try again later",
                retry_after_s=0.1,
            )
        self._sent_frames += 1
        self._sent_bytes += nbytes

    def returned(self, frames: int, nbytes: int) -> None:
        """The peer's program has consumed this much, in all. Raises DecodeRejected."""
        if not (
            self._consumed_frames <= frames <= self._sent_frames
            and self._consumed_bytes <= nbytes <= self._sent_bytes
        ):
            raise DecodeRejected(f"{frames} frames consumed of {self._sent_frames} sent")
        self._consumed_frames, self._consumed_bytes = frames, nbytes
