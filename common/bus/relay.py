"""The bus of a job's program: a Unix socket of the worker service, which passes on what is allowed.

The worker service starts a program with a ticket: a sealed memfd that names the socket and holds a
token of this one process of the rank. A program needs no address and no credential of the bus, and
cannot say anything there about another job. The connection is made anew when the service was
started anew. `publish` and `request` are the bus's; nothing can be subscribed to or served here.
"""

import asyncio
import contextlib
import fcntl
import os
import socket
import ssl
import struct
from collections.abc import Mapping
from typing import BinaryIO, Final

import msgspec

from slackwater.common.base import codec, limits
from slackwater.common.base.clock import Clock, LiveClock
from slackwater.common.base.errors import (
    AccessRefused,
    DeadlineExceeded,
    DecodeRejected,
    NobodyThere,
    Rejected,
    Retryable,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.bus.base import BusCounters, Endpoint, Handler, ServiceInfo, Subscription
from slackwater.common.transport.socket_files import connect, within
from slackwater.common.transport.tls import TlsEnds
from slackwater.schemas.base import Message
from slackwater.schemas.relay import (
    Kind,
    RelayAnswer,
    RelayAsk,
    RelayFrame,
    RelayHello,
    RelayRefused,
    RelayTell,
)

TICKET: Final = "SLACKWATER_TOKEN_FD"
"""Names the descriptor of the ticket to a program that was started cold; a forked one has it under
another number."""
_NAME: Final = "slackwater-ticket"
_BYTES_MAX: Final = 512 * 1024
_ANCESTORS_MAX: Final = 64
_SIZES: Final = struct.Struct(">HI")
"""Bytes of a frame's head, and of the payload that follows it."""
_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_KINDS: Final[dict[Kind, type[SlackwaterError]]] = {
    "access": AccessRefused,
    "rejected": Rejected,
    "nobody": NobodyThere,
    "late": DeadlineExceeded,
    "unavailable": Unavailable,
}


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Makes a process of a rank known to its worker service."""

    path: str
    """The relay's socket."""
    hello: RelayHello
    service: int = 0
    """The account of the services of this host."""
    ca: str = ""
    """Certificates, in PEM, of the authority that vouches for other hosts; empty: none does."""

    def tls(self) -> TlsEnds | None:
        """Return by which certificates the program connects to other hosts."""
        return TlsEnds(connects=ssl.create_default_context(cadata=self.ca)) if self.ca else None

    def __str__(self) -> str:
        return f"the worker service ({self.path})"

    def __repr__(self) -> str:
        return f"Ticket({self.path!r}, {self.hello.job!r}, {self.hello.rank})"  # Without the token.


def write_ticket(ticket: Ticket) -> int:
    """Return a descriptor for the program to inherit; the caller closes it. Raises OSError."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, msgspec.msgpack.encode(ticket))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def find_ticket(environment: Mapping[str, str]) -> Ticket | None:
    """Read the ticket of this process; where it closed what it inherited (a launcher's children
    do), an ancestor's. None: no worker service started it."""
    if TICKET not in environment:
        return None
    pid = os.getpid()
    for _ in range(_ANCESTORS_MAX):
        if found := _ticket_of(pid):
            return found
        try:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            return None
        if pid <= 1:
            return None
    return None


def _ticket_of(pid: int) -> Ticket | None:
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # It has ended, or is another account's.
        return None
    return next(filter(None, (read_ticket(f"/proc/{pid}/fd/{each}") for each in numbers)), None)


def read_ticket(path: str) -> Ticket | None:
    """Read the ticket in an open file of a process; None: it has another, or may not be read."""
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        with open(path, "rb") as file:
            return msgspec.msgpack.decode(file.read(_BYTES_MAX), type=Ticket)
    except (OSError, msgspec.DecodeError):  # It is another file, another user's, or damaged.
        return None


def frame(head: Message, payload: bytes = b"") -> bytes:
    """Raises Rejected for what is too large."""
    if len(payload) > limits.MESSAGE_BYTES_MAX:
        raise Rejected(
            f"{len(payload)} bytes are over a message's {limits.MESSAGE_BYTES_MAX}; move large "
            "state over the transport"
        )
    encoded = codec.encode(head)
    return _SIZES.pack(len(encoded), len(payload)) + encoded + payload


def _sizes(data: bytes) -> tuple[int, int]:
    """Return the bytes of a frame's head and of its payload. Raises DecodeRejected."""
    head, payload = _SIZES.unpack(data)
    if head > limits.RELAY_FRAME_HEAD or payload > limits.MESSAGE_BYTES_MAX:
        raise DecodeRejected(f"a frame of {head} and {payload} bytes is too large")
    return head, payload


def take_frame(file: BinaryIO) -> RelayFrame:
    """Return the head of a blocking connection's next frame, one without a payload. Raises
    DecodeRejected, Unavailable at the end, OSError."""
    data = file.read(_SIZES.size)
    if len(data) == _SIZES.size:
        head, payload = _sizes(data)
        data = file.read(head + payload)
        if len(data) == head + payload:
            found: RelayFrame = codec.decode(data[:head], RelayFrame)
            return found
    raise Unavailable("the other end closed the connection")


async def read_frame(reader: asyncio.StreamReader) -> tuple[RelayFrame, bytes]:
    """Raises DecodeRejected, Unavailable at the end."""
    try:
        head, payload = _sizes(await reader.readexactly(_SIZES.size))
        found: RelayFrame = codec.decode(await reader.readexactly(head), RelayFrame)
        return found, await reader.readexactly(payload)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise Unavailable("the other end closed the connection") from error


def refusal(number: int, error: SlackwaterError) -> RelayRefused:
    """Tell an error to the other end."""
    kind: Kind = "unavailable"
    match error:
        case AccessRefused():
            kind = "access"
        case Rejected():
            kind = "rejected"
        case NobodyThere():
            kind = "nobody"
        case DeadlineExceeded():
            kind = "late"
    retry_after_s = error.retry_after_s if isinstance(error, Retryable) else 0.0
    return RelayRefused(number=number, kind=kind, reason=str(error), retry_after_s=retry_after_s)


async def greeted(ticket: Ticket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection to the worker service, which knows who is at this end. Raises
    AccessRefused, Retryable, DecodeRejected, OSError, TimeoutError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(limits.RELAY_GREETING_S):
            with within(ticket.path) as path:
                await connect(sock, path)
            reader, writer = await asyncio.open_unix_connection(sock=sock)
    except BaseException:
        sock.close()
        raise
    try:
        async with asyncio.timeout(limits.RELAY_GREETING_S):
            writer.write(frame(ticket.hello))
            answer, _ = await read_frame(reader)
        if isinstance(answer, RelayRefused):
            raise _error(answer)
    except BaseException:
        writer.close()
        raise
    return reader, writer


class RelayBus:
    """A connection to the relay. Make it with `await RelayBus.connect(ticket)`."""

    def __init__(self, ticket: Ticket, clock: Clock) -> None:
        self._ticket, self._clock = ticket, clock
        self.counters = BusCounters()
        self._writer: asyncio.StreamWriter | None = None
        self._asked = 0
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._refused: SlackwaterError | None = None
        self._closing = False
        self._first = asyncio.Event()
        self._life = asyncio.get_running_loop().create_task(self._live())

    @classmethod
    async def connect(cls, ticket: Ticket, *, clock: Clock | None = None) -> "RelayBus":
        """Raises Unavailable if nobody listens within RELAY_CONNECT_S, AccessRefused if the relay
        does not know the token."""
        bus = cls(ticket, clock or LiveClock())
        try:
            async with asyncio.timeout(limits.RELAY_CONNECT_S):
                await bus._first.wait()
        except TimeoutError:
            await bus.close()
            raise Unavailable(
                f"{ticket} did not answer within {limits.RELAY_CONNECT_S:g} s; `slackwater nodes` "
                "says whether it runs"
            ) from None
        if bus._refused is not None:
            await bus.close()
            raise bus._refused
        return bus

    @property
    def connected(self) -> bool:
        return self._writer is not None

    async def publish(self, subject: str, payload: bytes) -> None:
        self.counters.published += 1
        number = self._number()
        told = RelayTell(number=number, subject=subject)
        await self._send(subject, number, frame(told, payload), limits.REQUEST_TIMEOUT_S)

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        json: bool = False,
        again: bool = True,
    ) -> bytes:
        if json:
            raise Rejected(f"{subject}: the worker service passes on msgpack alone")
        self.counters.requested += 1
        number = self._number()
        asked = RelayAsk(number=number, subject=subject, timeout_s=timeout_s)
        return await self._send(subject, number, frame(asked, payload), timeout_s)

    async def subscribe(self, pattern: str, handler: Handler) -> Subscription:
        raise AccessRefused(f"{pattern}: a job's program cannot listen to the bus")

    async def serve(self, info: ServiceInfo, endpoints: list[Endpoint]) -> None:
        raise AccessRefused(f"{info.name}: a job's program cannot serve on the bus")

    async def stop_serving(self) -> None:
        """Nothing is served here."""

    async def flush(self) -> None:
        """`publish` has returned when the bus has a message: there is nothing to wait for."""
        if self._writer is None:
            raise self._away("flush")

    async def close(self) -> None:
        self._closing = True
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)

    def _number(self) -> int:
        self._asked += 1
        return self._asked

    def _away(self, subject: str) -> SlackwaterError:
        if self._refused is not None:
            return type(self._refused)(str(self._refused))
        return Unavailable(
            f"{subject}: {self._ticket} is away; nothing was sent", limits.RECONNECT_WAIT_S
        )

    async def _send(self, subject: str, number: int, sent: bytes, timeout_s: float) -> bytes:
        writer = self._writer
        if writer is None:
            raise self._away(subject)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                writer.write(sent)
                with contextlib.suppress(ConnectionError):  # `_receive` notices, and ends waits.
                    await writer.drain()
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(
                f"{subject}: no answer within {timeout_s:g} s; it may still have been acted on",
                limits.RETRY_WAIT_S_MIN,
            ) from None
        finally:
            del self._answers[number]
            answer.cancel()

    # The connection's life ------------------------------------------------------------------------

    async def _live(self) -> None:
        while True:
            try:
                await self._once()
            except (Retryable, DecodeRejected, OSError, TimeoutError):
                self.counters.errors += 1
            except Rejected as error:
                self._refused = error
                self._first.set()
                return
            await asyncio.sleep(limits.RECONNECT_WAIT_S)
            self.counters.reconnects += self._first.is_set()

    async def _once(self) -> None:
        """Greet, and receive until the connection is lost. Raises AccessRefused, Unavailable."""
        reader, writer = await greeted(self._ticket)
        try:
            self._writer = writer
            self._first.set()
            await self._receive(reader)
        finally:
            self._writer = None
            writer.close()
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(
                        DeadlineExceeded(
                            f"{self._ticket} was lost before its answer; it may still have been "
                            "acted on",
                            limits.RECONNECT_WAIT_S,
                        )
                    )

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while True:
            head, payload = await read_frame(reader)
            if not isinstance(head, RelayAnswer | RelayRefused):
                raise DecodeRejected(f"{self._ticket} sent a {type(head).__name__}")
            waiting = self._answers.get(head.number)
            if waiting is None or waiting.done():
                continue  # Its deadline has passed.
            self.counters.received += 1
            if isinstance(head, RelayAnswer):
                waiting.set_result(payload)
            else:
                waiting.set_exception(_error(head))


def _error(refused: RelayRefused) -> SlackwaterError:
    error = _KINDS[refused.kind](refused.reason)
    if isinstance(error, Retryable):
        error.retry_after_s = refused.retry_after_s
    return error
