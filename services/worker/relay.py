"""The relay: the socket by which programs of jobs say what they may on the bus, and ask for the
node's permits (permits.py).

A connection is of one process of a rank: its token, the account at its other end (SO_PEERCRED) and
the containment that the process is in must all be of that rank. Each frame is looked at: subject,
type, job and rank; what goes on is encoded anew, so that nothing else can ride on it.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import structlog

from slackwater.common.base import codec, limits
from slackwater.common.base.background import Tasks
from slackwater.common.base.errors import (
    AccessRefused,
    DecodeRejected,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.bus.base import Bus
from slackwater.common.bus.relay import frame, read_frame, refusal
from slackwater.common.transport.socket_files import PathTaken, bind, credentials, within
from slackwater.schemas.base import Message
from slackwater.schemas.job_requests import RegisterJob
from slackwater.schemas.relay import (
    MemoryAsk,
    PermitAsk,
    PermitEnd,
    RelayAnswer,
    RelayAsk,
    RelayHello,
    RelayTell,
    is_own,
    may,
)
from slackwater.services.worker.permit_server import PermitServer

_log = structlog.get_logger()
_LOG_EVERY_S: Final = 10.0
_OTHER_ENDS_S: Final = 10.0
"""For how long a service that was started again waits until the one before it has ended."""
_LOOK_S: Final = 0.05
Known = Callable[[RelayHello, int, int], bool]
"""Says whether the process (pid, account) is the one that it says."""
Rank = tuple[str, int, int]
"""Job, rank and the number of its process."""


@dataclass(slots=True)
class Allowance:
    """Counts what a rank may still send: `burst` at once, `per_s` for long."""

    left: float = limits.RELAY_BURST
    at_s: float = 0.0
    per_s: float = limits.RELAY_PER_S
    burst: float = limits.RELAY_BURST

    def take(self, now_s: float) -> float:
        """Take one. Return 0, or the seconds after which there is one again."""
        grown = self.left + (now_s - self.at_s) * self.per_s
        self.left, self.at_s = min(self.burst, grown), now_s
        if self.left < 1.0:
            return (1.0 - self.left) / self.per_s
        self.left -= 1.0
        return 0.0


@dataclass(slots=True)
class _Peers:
    """The connections of one rank's process."""

    allowance: Allowance
    writers: set[asyncio.StreamWriter] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Greeting:
    """A connection whose process has not made itself known."""

    pid: int
    uid: int
    writer: asyncio.StreamWriter
    rank: Rank | None = None
    """The rank that it says it is of, which is being looked at."""


def first_to_go(greetings: Collection[Greeting]) -> Greeting:
    """Choose the one that makes room for another, of one or more in the order of arrival: the
    oldest one of whoever has most of them, so that no account, and in it no process, can keep
    others out."""
    uids, pids = (Counter(getattr(each, what) for each in greetings) for what in ("uid", "pid"))
    return max(greetings, key=lambda each: (uids[each.uid], pids[each.pid]))


class Relay:
    """`path`: of the socket; `count`: adds to a counter of the metrics."""

    def __init__(
        self,
        path: Path,
        bus: Bus,
        known: Known,
        count: Callable[[str], None],
        permits: PermitServer,
        mode: int = 0o600,
        memory: Callable[[RelayHello], int] = lambda _: 0,
    ) -> None:
        """`memory`: returns the bytes that a process's job asked for, for each of its processes;
        it may read files."""
        self.path, self._bus, self._known, self._count = path, bus, known, count
        self._permits, self._memory = permits, memory
        self._mode = mode
        self._peers: dict[Rank, _Peers] = {}
        self._greetings: dict[Greeting, None] = {}
        """In the order of arrival."""
        self._tasks = Tasks(self._failed)
        self.registered: set[Rank] = set()
        """Processes whose Agents have told their tensors."""
        self._server: asyncio.Server | None = None
        self._told_s = float("-inf")

    async def start(self) -> None:
        """Listen, once a service that is just ending has gone. Raises ConfigRejected where the
        socket cannot be made, PathTaken where the other one stays."""
        deadline_s = asyncio.get_running_loop().time() + _OTHER_ENDS_S
        with within(str(self.path)) as short:
            while True:
                try:
                    sock = bind(short, self._mode)
                    break
                except PathTaken:
                    if asyncio.get_running_loop().time() > deadline_s:
                        raise
                    await asyncio.sleep(_LOOK_S)
        self._server = await asyncio.start_unix_server(self._accept, sock=sock)

    async def stop(self) -> None:
        if self._server is not None:
            self.path.unlink(missing_ok=True)  # First, while nobody else can listen there.
            self._server.close()
        await self._tasks.close()
        self._permits.stop()

    def ended(self, rank: Rank) -> None:
        """Close the connections of a process that has ended, and those that say they are its."""
        for greeting in self._greetings:
            if greeting.rank == rank:
                greeting.writer.transport.abort()
        self.registered.discard(rank)
        if peers := self._peers.pop(rank, None):
            for writer in peers.writers:
                writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.spawn(self._serve(reader, writer))

    def _failed(self, name: str, error: BaseException) -> None:
        _log.error("relay.failed", task=name, exc_info=error)

    def _refused(self, error: SlackwaterError, **who: object) -> None:
        self._count("relay_refused")
        now_s = asyncio.get_running_loop().time()
        if now_s - self._told_s > _LOG_EVERY_S:  # A stranger does not fill the log.
            self._told_s = now_s
            _log.warning("relay.refused", reason=str(error), **who)

    # A connection ---------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid, uid = credentials(writer.get_extra_info("socket"))
        try:
            hello = await self._greeted(Greeting(pid, uid, writer), reader)
            rank = hello.job, hello.rank, hello.attempt
            peers = self._peers.setdefault(rank, _Peers(Allowance()))
            if len(peers.writers) >= limits.RELAY_OF_A_RANK_MAX:
                raise Unavailable(f"{limits.RELAY_OF_A_RANK_MAX} connections of this rank are open")
            peers.writers.add(writer)
            try:
                await self._write(writer, RelayAnswer(number=0))
                await self._receive(hello, peers, reader, writer)
            finally:
                peers.writers.discard(writer)
        except (AccessRefused, DecodeRejected, Unavailable) as error:
            if not reader.at_eof():
                self._refused(error, pid=pid, uid=uid)
                with contextlib.suppress(Unavailable):
                    await self._write(writer, refusal(0, error))
        except TimeoutError:
            self._count("relay_refused")
        finally:
            writer.close()

    async def _greeted(self, greeting: Greeting, reader: asyncio.StreamReader) -> RelayHello:
        """Learn who is there. Raises AccessRefused, DecodeRejected, Unavailable, TimeoutError."""
        if len(self._greetings) >= limits.RELAY_GREETINGS_MAX:
            crowding = first_to_go(self._greetings)
            del self._greetings[crowding]
            crowding.writer.transport.abort()
            self._count("relay_refused")
        self._greetings[greeting] = None
        try:
            async with asyncio.timeout(limits.RELAY_GREETING_S):
                hello = await self._greet(greeting, reader)
        finally:
            self._greetings.pop(greeting, None)
        if greeting.writer.transport.is_closing():  # Its rank ended just now, or it made room.
            raise Unavailable("the connection was closed before its greeting was looked at")
        return hello

    async def _greet(self, greeting: Greeting, reader: asyncio.StreamReader) -> RelayHello:
        head, _ = await read_frame(reader)
        if not isinstance(head, RelayHello):
            raise DecodeRejected(f"the first frame is a {type(head).__name__}")
        greeting.rank = head.job, head.rank, head.attempt
        # Reads files, and looks at a process: not on the loop.
        if not await asyncio.to_thread(self._known, head, greeting.pid, greeting.uid):
            raise AccessRefused(
                f"process {greeting.pid} of account {greeting.uid} is not process {head.attempt} "
                f"of job {head.job}, rank {head.rank}, or that has ended"
            )
        return head

    async def _receive(
        self,
        hello: RelayHello,
        peers: _Peers,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Raises DecodeRejected, Unavailable at the end."""
        room = asyncio.Semaphore(limits.RELAY_ASKS_MAX)
        under_way = self._tasks.group()
        try:
            while True:
                head, payload = await read_frame(reader)
                if isinstance(head, PermitAsk | PermitEnd | MemoryAsk):
                    await self._order(hello, head, reader, writer)
                if not isinstance(head, RelayAsk | RelayTell):
                    raise DecodeRejected(f"a {type(head).__name__} came in the middle")
                await room.acquire()  # Else the program's frames wait in its socket.
                wait_s = peers.allowance.take(asyncio.get_running_loop().time())
                task = under_way.spawn(self._pass_on(hello, head, payload, wait_s, writer))
                task.add_done_callback(lambda _: room.release())
        finally:
            await under_way.close()

    async def _order(
        self,
        hello: RelayHello,
        head: PermitAsk | PermitEnd | MemoryAsk,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Serve a connection that asks for permits, and for nothing else from now on. One that asks
        too often is read more slowly. Raises DecodeRejected, Unavailable at the end."""
        now_s = asyncio.get_running_loop().time
        allowance = Allowance(
            limits.PERMITS_BURST, now_s(), limits.PERMITS_PER_S, limits.PERMITS_BURST
        )
        lane = self._permits.open(hello.job, writer)
        try:
            while True:
                if isinstance(head, MemoryAsk):
                    await self._share(hello, lane, head)
                else:
                    self._permits.heard(lane, head)
                if (wait_s := allowance.take(now_s())) > 0.0:
                    await asyncio.sleep(wait_s)
                    allowance.take(now_s())
                came, _ = await read_frame(reader)
                if not isinstance(came, PermitAsk | PermitEnd | MemoryAsk):
                    raise DecodeRejected(f"a {type(came).__name__} came among permits")
                head = came
        finally:
            self._permits.close(lane)

    async def _share(self, hello: RelayHello, lane: int, head: MemoryAsk) -> None:
        """Answer a process that asks how much memory it may use. Raises DecodeRejected."""
        if not self._permits.shares.knows(lane):
            try:
                asked_bytes = await asyncio.to_thread(self._memory, hello)
            except (OSError, ValueError) as error:  # The job was just removed.
                raise Unavailable(f"the memory of job {hello.job} is not known: {error}") from error
            self._permits.asked_memory(lane, hello.job, asked_bytes)
        self._permits.share(lane, head)

    async def _pass_on(
        self,
        hello: RelayHello,
        head: RelayAsk | RelayTell,
        payload: bytes,
        wait_s: float,
        writer: asyncio.StreamWriter,
    ) -> None:
        answer: Message = RelayAnswer(number=head.number)
        told = b""
        try:
            if wait_s > 0.0:
                raise Unavailable(
                    f"job {hello.job}, rank {hello.rank} sends over {limits.RELAY_PER_S:g} "
                    "messages a second",
                    wait_s,
                )
            message = allowed(hello, head, payload)
            checked = codec.encode(message)
            if isinstance(head, RelayAsk):
                timeout_s = min(head.timeout_s, limits.REQUEST_TIMEOUT_S)
                told = await self._bus.request(head.subject, checked, timeout_s=timeout_s)
            else:
                await self._bus.publish(head.subject, checked)
            self._count("relay_passed")
            if isinstance(message, RegisterJob):
                self.registered.add((hello.job, hello.rank, hello.attempt))
        except SlackwaterError as error:
            if isinstance(error, AccessRefused | DecodeRejected) or wait_s > 0.0:
                self._refused(error, job=hello.job, rank=hello.rank)
            answer = refusal(head.number, error)
        with contextlib.suppress(Unavailable):  # The program ended, or left.
            await self._write(writer, answer, told)

    async def _write(
        self, writer: asyncio.StreamWriter, head: Message, payload: bytes = b""
    ) -> None:
        """Raises Unavailable where the program does not read, or has gone."""
        try:
            async with asyncio.timeout(limits.RELAY_SEND_S):
                writer.write(frame(head, payload))
                await writer.drain()
        except (ConnectionError, TimeoutError) as error:
            writer.transport.abort()
            raise Unavailable(f"the program takes no answer: {error!r}") from error


def allowed(hello: RelayHello, head: RelayAsk | RelayTell, payload: bytes) -> Message:
    """Return the message as it may go on: from this rank, and with no epoch, which is for services.
    Raises AccessRefused, DecodeRejected."""
    kind = may(hello.job, "ask" if isinstance(head, RelayAsk) else "tell", head.subject)
    if kind is None:
        raise AccessRefused(f"a program of job {hello.job} has no say at {head.subject}")
    message = codec.decode(payload, kind)
    if not is_own(message, hello.job, hello.rank, hello.attempt):
        raise AccessRefused(
            f"job {hello.job}, rank {hello.rank} speaks for itself alone at {head.subject}"
        )
    sender = f"agent.{hello.job}.{hello.rank}"
    return msgspec.structs.replace(message, sender=sender, epoch=0)
