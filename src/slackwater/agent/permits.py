"""Permits, as a process of a job that takes turns has them (Lee 2020, section 4.3.1).

Of the jobs that share a node one computes, one sends and one receives at a time. The program's
thread has the permit to compute while it does not wait for anything of its Agent; the Agent's own
thread has those to move bytes while bytes of the job move over a network, and never while it waits
for other workers. What stays on this host, in shared memory, moves no bytes.

The worker service gives permits (services/worker/permits.py). Where it is away, or does not answer,
the process goes on without, and asks again later: an order among jobs is worth no standstill.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO, Final, TypeVar

from slackwater.common.base import limits
from slackwater.common.base.clock import LiveClock
from slackwater.common.base.errors import DecodeRejected, SlackwaterError, Unavailable
from slackwater.common.bus.relay import Ticket, find_ticket, frame, greeted, read_frame, take_frame
from slackwater.common.native.link import Interface
from slackwater.common.transport.pacing import Bandwidth, Leftover, Pace
from slackwater.common.transport.socket_files import within
from slackwater.schemas.jobs import BY_TURNS_VARIABLE
from slackwater.schemas.relay import (
    MemoryAsk,
    MemoryShare,
    PermitAsk,
    PermitEnd,
    PermitGranted,
    RelayAnswer,
)
from slackwater.schemas.telemetry import SubtaskTimes

T = TypeVar("T", MemoryShare, PermitGranted)
_COMPUTE: Final = frame(PermitAsk(kind="compute"))
_END: Final = frame(PermitEnd())
_AWAY: Final = (OSError, SlackwaterError, TimeoutError)


class ComputePermit:
    """The program's thread's."""

    between_waits = True
    """Taken at the end of each wait for the Agent, by itself: the program computes then."""

    def __init__(self, ticket: Ticket, now_s: Callable[[], float] = time.monotonic) -> None:
        self._ticket, self._now_s = ticket, now_s
        self._socket: socket.socket | None = None
        self._file: BinaryIO | None = None
        self._again_s = float("-inf")
        self._since_s: float | None = None
        """When the subtask began; None: none runs."""
        self._waited = False
        """It was given back since the last boundary of an iteration."""
        self.computed_s = self.waited_s = 0.0
        """Seconds in all in which it was held, and waited for."""

    def take(self) -> None:
        """Begin to compute, once it is this process's turn. Repeated, it changes nothing."""
        if self._since_s is not None:
            return
        asked_s = self._now_s()
        self._ask(_COMPUTE, PermitGranted, limits.PERMIT_WAIT_S)  # Unanswered: without an order.
        self._since_s = self._now_s()
        self.waited_s += self._since_s - asked_s

    def give_back(self) -> None:
        """Stop computing: wait for something, or be done. Repeated, it changes nothing."""
        if self._since_s is None:
            return
        self.computed_s += self._now_s() - self._since_s
        self._since_s, self._waited = None, True
        if self._socket is not None:
            try:
                self._socket.sendall(_END)
            except OSError:  # It is back for the next one, or is not.
                self.close()

    def share(self, told: MemoryAsk) -> int | None:
        """Return the bytes of memory that this process may use; None: nobody says."""
        found = self._ask(frame(told), MemoryShare, limits.RELAY_GREETING_S)
        return None if found is None else found.limit_bytes

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let others compute while this thread waits; go on computing afterwards."""
        computing = self._since_s is not None or self.between_waits
        self.give_back()
        try:
            yield
        finally:
            if computing:
                self.take()

    def on_boundary(self) -> None:
        """An iteration has ended: let others go first, if it waited for nothing in it."""
        if self.between_waits and not self._waited:
            self.give_back()
            self.take()
        self._waited = False

    def _ask(self, question: bytes, answer: type[T], within_s: float) -> T | None:
        """Return the answer; None: the service is away, or was a moment ago."""
        if self._socket is None and self._now_s() < self._again_s:
            return None
        try:
            if self._socket is None:
                self._connect()
            assert self._socket is not None
            assert self._file is not None
            self._socket.settimeout(within_s)
            self._socket.sendall(question)
            if not isinstance(found := take_frame(self._file), answer):
                raise DecodeRejected(f"{self._ticket} sent a {type(found).__name__}")
            return found
        except _AWAY:
            self.close()
            self._again_s = self._now_s() + limits.PERMIT_AGAIN_S
            return None

    def _connect(self) -> None:
        self._socket = sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(limits.RELAY_GREETING_S)
        with within(self._ticket.path) as path:
            sock.connect(path)
        self._file = sock.makefile("rb")
        sock.sendall(frame(self._ticket.hello))
        if not isinstance(found := take_frame(self._file), RelayAnswer):
            raise Unavailable(f"{self._ticket} answered {found}")

    def close(self) -> None:
        """Give up what it has. Idempotent."""
        if self._file is not None:
            self._file.close()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._file = None


class MovePermit:
    """The Agent's own thread's: one for all transfers of the process that are under way one way:
    those that send, or (`receives`) those that receive."""

    def __init__(
        self, ticket: Ticket, now_s: Callable[[], float] = time.monotonic, receives: bool = False
    ) -> None:
        self._ticket, self._now_s, self._receives = ticket, now_s, receives
        self._asks = frame(PermitAsk(kind="receive" if receives else "move"))
        self._lock = asyncio.Lock()
        self._transfers = 0
        self._since_s = 0.0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._again_s = float("-inf")
        self._bandwidth: Bandwidth | None = None
        """The rate that the primary one leaves, while this is the secondary one."""
        self._rising: asyncio.Task[None] | None = None
        self.moved_s = self.waited_s = 0.0
        """Seconds in all in which it was held, and waited for."""

    async def begin(self) -> None:
        """Begin a transfer, once it is this process's turn. `end` follows."""
        asked_s = self._now_s()
        async with self._lock:  # The first one asks, for those behind it, too.
            if not self._transfers:
                await self._take(asked_s)
            self._transfers += 1

    def end(self) -> None:
        self._transfers -= 1
        if not self._transfers:
            self._give_back()

    @property
    def pace(self) -> Pace | None:
        """Return the pace of bytes that others' go before; None: these are the others."""
        return None if self._bandwidth is None else self._paced

    async def _paced(self, nbytes: int) -> None:
        """Wait for so many bytes' turn on the link, at most until this is the primary one."""
        rising = self._rising
        if self._bandwidth is None or rising is None:
            return
        taking = asyncio.ensure_future(self._bandwidth.take(nbytes))
        try:
            await asyncio.wait({taking, rising}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            taking.cancel()

    async def _take(self, asked_s: float) -> None:
        try:
            await self._ask()
        except _AWAY:  # Without an order, then.
            self.close()
            self._again_s = self._now_s() + limits.PERMIT_AGAIN_S
        self._since_s = self._now_s()
        self.waited_s += self._since_s - asked_s

    async def _ask(self) -> None:
        """Raises OSError, SlackwaterError, TimeoutError."""
        if self._streams is None:
            if self._now_s() < self._again_s:
                return
            self._streams = await greeted(self._ticket)
        reader, writer = self._streams
        writer.write(self._asks)
        try:
            async with asyncio.timeout(limits.PERMIT_WAIT_S):
                granted = await self._granted(reader)
        except asyncio.CancelledError:
            self.close()  # It may yet be granted.
            raise
        if granted.secondary:
            carried_bytes, way = Interface(granted.interface).carried_bytes, 1 - self._receives
            left = Leftover(granted.budget_bytes_s, lambda: (carried_bytes()[way], 0))
            self._bandwidth = Bandwidth(0, LiveClock(), left)
            self._rising = asyncio.create_task(self._rises(reader))

    async def _rises(self, reader: asyncio.StreamReader) -> None:
        """Go on at full speed once this is the primary one, or nobody can say."""
        with contextlib.suppress(*_AWAY):
            await self._granted(reader)
        self._bandwidth = None

    async def _granted(self, reader: asyncio.StreamReader) -> PermitGranted:
        """Raises DecodeRejected, Unavailable."""
        head, _ = await read_frame(reader)
        if not isinstance(head, PermitGranted):
            raise DecodeRejected(f"{self._ticket} sent a {type(head).__name__}")
        return head

    def _give_back(self) -> None:
        self.moved_s += self._now_s() - self._since_s
        rising, self._rising = self._rising, None
        if rising is not None and not rising.done():
            rising.cancel()
            self.close()  # It may become the primary one in this moment: begin anew.
        self._bandwidth = None
        if self._streams is not None:
            self._streams[1].write(_END)

    def close(self) -> None:
        """Give up what it has. Idempotent."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = self._bandwidth = None


class NodePermits:
    """The permits of one process."""

    def __init__(self, ticket: Ticket) -> None:
        self.compute = ComputePermit(ticket)
        self.move, self.receive = MovePermit(ticket), MovePermit(ticket, receives=True)
        self._told = SubtaskTimes()

    def take_times(self) -> SubtaskTimes:
        """Return the seconds since the last call."""
        before, self._told = (
            self._told,
            SubtaskTimes(
                compute_s=self.compute.computed_s,
                move_s=self.move.moved_s + self.receive.moved_s,
                waited_s=self.compute.waited_s + self.move.waited_s + self.receive.waited_s,
            ),
        )
        return SubtaskTimes(
            compute_s=self._told.compute_s - before.compute_s,
            move_s=self._told.move_s - before.move_s,
            waited_s=self._told.waited_s - before.waited_s,
        )


def node_permits(environment: Mapping[str, str] = os.environ) -> NodePermits | None:
    """Return the permits of this process; None: its job does not take turns, or no worker service
    started it."""
    if environment.get(BY_TURNS_VARIABLE) != "1":
        return None
    ticket = find_ticket(environment)
    return None if ticket is None else NodePermits(ticket)


def leave(permits: NodePermits | None) -> None:
    """Give up what the program's thread has: it needs its Agent no more."""
    if permits is not None:
        permits.compute.between_waits = False
        permits.compute.give_back()
        permits.compute.close()


def on_boundary(permits: NodePermits | None) -> None:
    """An iteration of the program has ended."""
    if permits is not None:
        permits.compute.on_boundary()


@contextmanager
def lent(permits: NodePermits | None) -> Iterator[None]:
    """Let others compute while the program's thread waits within."""
    if permits is None:
        yield
        return
    with permits.compute.lent():
        yield
