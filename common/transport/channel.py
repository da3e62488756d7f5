"""The common base of channels: frames, keys, handovers; over sockets requests and their answers.

A channel ends once, with a reason: every operation that waits ends with Unavailable, frames that
have arrived can still be received, nothing stays open. Keys are random, live in the table of one
channel, and so are worthless on another. Records that must not come end the channel: a peer that
violates the protocol is treated as lost.
"""

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from slackwater.common.base import limits
from slackwater.common.base.background import Tasks
from slackwater.common.base.errors import (
    AccessRefused,
    DeadlineExceeded,
    DecodeRejected,
    Rejected,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.transport import wire
from slackwater.common.transport.base import OnHandover, OnPrepare, RemoteRegion
from slackwater.common.transport.inbox import Credit, Inbox
from slackwater.common.transport.mapping import Mapping
from slackwater.common.transport.region import Region
from slackwater.common.transport.reservations import Arriving, GiveBack, no_account

KEY_BYTES: Final = 32
LABEL_BYTES_MAX: Final = 200
"""Bytes of a region's label on the wire; it is for people."""
Answering = Callable[[SlackwaterError | None], None]
"""Told how a handover ended: why it was refused; None: it was accepted."""
T = TypeVar("T")
STALL_TICKS: Final = 4
"""In a row without progress: what is Watched has stalled."""


class Answer(NamedTuple):
    """The answer to a request; `mapping` where the record carried a descriptor."""

    header: wire.Header
    body: bytes
    mapping: Mapping | None


class Watched(Protocol):
    """A part of a channel that may stall."""

    def idle_ticks(self, waiting: bool) -> int:
        """Called at each tick of the channel's watch: for how many in a row it made no progress
        although it had begun something, or `waiting` says that something is awaited."""
        ...


def as_bytes(view: memoryview) -> memoryview:
    """The same memory as bytes. Raises Rejected when it is not contiguous."""
    if view.format == "B" and view.ndim == 1 and view.contiguous:
        return view
    if not view.c_contiguous:
        raise Rejected("a buffer with gaps cannot be moved: copy it into a contiguous one")
    return view.cast("B")


def check_range(offset: int, nbytes: int, region_bytes: int) -> None:
    """Raises AccessRefused."""
    if offset < 0 or offset + nbytes > region_bytes:
        raise AccessRefused(
            f"bytes [{offset}, {offset + nbytes}) of a region that has {region_bytes}"
        )


def check_pieces(count: int, length: int, nbytes: int) -> None:
    """Check the size of a buffer of scattered pieces. Raises Rejected."""
    if not 0 < length <= limits.TRANSFER_BYTES or nbytes != length * count:
        raise Rejected(f"{count} pieces of {length} bytes do not make {nbytes}")


class Opened(Protocol):
    """A peer's region, as far as the channel that opened it looks at it."""

    channel: Any
    nbytes: int
    revoked: bool

    @property
    def closed(self) -> bool: ...


class OpenedRegion:
    """A peer's region that is reached by a key, and not mapped here."""

    view: memoryview | None = None

    def __init__(self, channel: "SocketChannel", key: bytes, nbytes: int) -> None:
        self.channel, self.key, self.nbytes = channel, key, nbytes
        self.revoked = self.closed = False

    def close(self) -> None:
        self.closed = True
        self.channel.forget(self)


def check_access(remote: Opened, offset: int, nbytes: int) -> None:
    """Check an access to a region that the right channel has opened. Raises AccessRefused."""
    if remote.closed:
        raise AccessRefused("this remote region was closed here: open its key again")
    if remote.revoked:
        raise AccessRefused("the owner revoked the key of this region")
    check_range(offset, nbytes, remote.nbytes)


def foreign() -> AccessRefused:
    """Why a region is refused that was not opened on this channel."""
    return AccessRefused("the region was opened on another channel: open its key on this one")


class ChannelEnd(ABC):
    """One end of a channel of any kind: the peer's hello, keys, frames, regions that arrive."""

    def __init__(
        self, hello: bytes, on_handover: OnHandover | None, on_prepare: OnPrepare | None
    ) -> None:
        self._hello = hello
        self._on_handover = on_handover
        self._on_prepare = on_prepare
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox()
        self._credit = Credit()
        self._grants: dict[bytes, Region] = {}
        self._tasks = Tasks(self._broke)
        self._spawn = self._tasks.spawn
        self._handovers = 0
        self._lost: str | None = None

    @abstractmethod
    def _broke(self, name: str, error: BaseException) -> None:
        """Lose the channel after a task's failure: waits for its work would never end."""

    @property
    def hello(self) -> bytes:
        return self._hello

    @property
    def closed(self) -> bool:
        return self._lost is not None

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise Unavailable(self._lost)

    def _new_key(self) -> bytes:
        return secrets.token_bytes(KEY_BYTES)

    def grant(self, region: Region) -> bytes:
        self._check_alive()
        if region.closed:
            raise Rejected(f"region {region.label} is closed: only an open one can be granted")
        if len(self._grants) >= limits.GRANTS_MAX:
            raise Rejected(f"{limits.GRANTS_MAX} keys granted on one channel: revoke some")
        key = self._new_key()
        self._grants[key] = region
        return key

    def granted(self, key: bytes) -> Region:
        """Raises AccessRefused."""
        region = self._grants.get(key)
        if region is None or region.closed:
            raise AccessRefused("no region is granted on this channel under this key")
        return region

    def _take_credit(self, frame: bytes) -> None:
        """Raises Unavailable, Rejected where the frame cannot be sent."""
        self._check_alive()
        if len(frame) > limits.FRAME_BYTES_MAX:
            raise Rejected(
                f"a frame of {len(frame)} bytes, at most {limits.FRAME_BYTES_MAX} fit: "
                "write bulk bytes into a region"
            )
        self._credit.take(len(frame))

    # Regions that arrive --------------------------------------------------------------------------

    def _ask_room(self, nbytes: int) -> GiveBack:
        """Ask for room before memory is taken for a handover. Raises AccessRefused, Rejected,
        Unavailable."""
        if self._on_handover is None:
            raise Rejected("this side takes no regions: it named no on_handover")
        return no_account if self._on_prepare is None else self._on_prepare(self._hello, nbytes)

    def _begin_handover(self, arriving: Arriving, note: bytes, answer: Answering) -> None:
        """Hand a region that has arrived to the program. `answer` is told how that ended, unless
        the channel ends before."""
        if self._handovers >= limits.HANDOVERS_MAX or self.closed:
            arriving.end()
            answer(Unavailable(f"{self._handovers} handovers are under way", retry_after_s=0.1))
            return
        self._handovers += 1
        task = self._spawn(self._run_handover(arriving, note, answer))
        task.add_done_callback(lambda _task: self._handover_ended(arriving))

    async def _run_handover(self, arriving: Arriving, note: bytes, answer: Answering) -> None:
        """Hand a region over. It belongs to the program once the callback has returned."""
        on_handover = self._on_handover
        assert on_handover is not None  # Else no room was given.
        try:
            arriving.give_back()
            await on_handover(arriving.region, note)
            arriving.accepted = True
            answer(None)
        except SlackwaterError as error:
            answer(error)
        except Exception as error:  # A caller's callback: the giver is told.
            answer(Unavailable("on_handover failed"))
            self._report("on_handover failed", error)

    def _handover_ended(self, arriving: Arriving) -> None:
        """Also of a task that was cancelled before it began."""
        self._handovers -= 1
        arriving.end()

    def _report(self, what: str, error: BaseException) -> None:
        self._loop.call_exception_handler(
            {"message": f"transport: {what}", "exception": error, "channel": self}
        )


class SocketChannel(ChannelEnd):
    """Base of the shm, the tcp and the verbs channel."""

    def __init__(
        self,
        hello: bytes,
        on_handover: OnHandover | None,
        on_prepare: OnPrepare | None = None,
        *,
        stall_s: float = limits.STALL_S,
    ) -> None:
        super().__init__(hello, on_handover, on_prepare)
        self._opened: set[Any] = set()
        """The peer's regions that are open here."""
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._requests = 0
        self._asked_for_room: set[asyncio.Task[Answer]] = set()
        self._tick_s = stall_s / STALL_TICKS
        self._watch = self._loop.call_later(self._tick_s, self._tick)

    # Differences between kinds of channels --------------------------------------------------------

    @abstractmethod
    def _push(self, record: bytes, *, fd: int = -1, ordered: bool = True) -> None:
        """Send a control record. Unordered: it may be lost with a connection that is resumed."""

    @abstractmethod
    def _teardown(self) -> None:
        """Close sockets; called once."""

    @abstractmethod
    def _connections(self) -> Iterable[tuple[Watched, bool]]:
        """Yield each connection that is up, and whether an answer is awaited on it."""

    @abstractmethod
    def _serve_open(self, header: wire.Header, key: bytes, region: Region) -> None:
        """Answer an OPEN whose key is good."""

    def _serve_prepare(self, header: wire.Header, label: str) -> None:
        """Make room for a region that the peer will hand over, and say where. Raises
        DecodeRejected."""
        raise DecodeRejected("nothing is prepared where memory itself is handed over")

    def _withdraw(self, handle: int) -> None:
        """Free the memory that was prepared under this handle: its region will not come. Raises
        DecodeRejected."""
        raise DecodeRejected(f"nothing was prepared under handle {handle}")

    @abstractmethod
    def _adopt(self, header: wire.Header, label: str) -> tuple[Region, GiveBack]:
        """The region that a HANDOVER speaks of, and its room. Raises DecodeRejected, Rejected,
        Unavailable."""

    @abstractmethod
    async def open(self, key: bytes) -> RemoteRegion: ...

    @abstractmethod
    async def close(self) -> None: ...

    # Frames and keys -----------------------------------------------------------------------------

    def revoke(self, key: bytes) -> None:
        if self._grants.pop(key, None) is not None and not self.closed:
            self._push(wire.pack(wire.REVOKED, body=key))

    def send(self, frame: bytes) -> None:
        self._take_credit(frame)
        self._push(wire.pack(wire.FRAME, body=frame))

    async def receive(self) -> bytes:
        frame = await self._inbox.get()
        if self._inbox.progress_due() and not self.closed:
            self._push_progress()
        return frame

    def _push_progress(self) -> None:
        record = wire.pack(
            wire.PROGRESS,
            number=self._inbox.consumed_frames,
            offset=self._inbox.consumed_bytes,
            body=wire.WORD.pack(self._received()),
        )
        self._push(record, ordered=False)

    def _received(self) -> int:
        """Return the number of ordered records received so far."""
        return 0

    def _peer_received(self, ordinal: int) -> None:
        """Note how many of our ordered records the peer has. Raises DecodeRejected."""
        if ordinal:
            raise DecodeRejected(f"{ordinal} numbered records on a channel that numbers none")

    # Requests ------------------------------------------------------------------------------------

    async def _ask(
        self,
        kind: int,
        *,
        handle: int = 0,
        number: int = 0,
        body: bytes = b"",
        fd: int = -1,
        deadline_s: float = limits.CHANNEL_REQUEST_S,
    ) -> Answer:
        """Raises what the peer refused with, Unavailable, DeadlineExceeded."""
        self._check_alive()
        if len(self._waiting) >= limits.CHANNEL_REQUESTS_MAX:
            raise Unavailable(
                f"{limits.CHANNEL_REQUESTS_MAX} requests wait on this channel", retry_after_s=0.1
            )
        self._requests += 1
        request = self._requests
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[request] = answer
        record = wire.pack(kind, handle=handle, number=number, offset=request, body=body)
        try:
            self._push(record, fd=fd)
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(
                f"the peer did not answer within {deadline_s:g} s; it may still act on the request"
            ) from None
        finally:
            self._waiting.pop(request, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # Seen, also where a cancellation overtook it.

    async def _ask_for_room(self, nbytes: int, label: bytes, *, ahead: bool = False) -> Answer:
        """Have the peer prepare a handover. Room that comes for a caller who is gone is given
        back. `ahead`: nobody waits for it yet."""
        ask = self._ask(
            wire.PREPARE,
            handle=int(ahead),
            number=nbytes,
            body=label,
            deadline_s=limits.HANDOVER_S if ahead else limits.CHANNEL_REQUEST_S,
        )
        asking = self._loop.create_task(ask)
        self._asked_for_room.add(asking)  # It ends with the channel, as whatever waits does.
        asking.add_done_callback(self._asked_for_room.discard)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(self._give_room_back)
            raise

    def _give_room_back(self, asked: "asyncio.Task[Answer]") -> None:
        if not asked.cancelled() and asked.exception() is None:
            self._reply(wire.pack(wire.REVOKED, number=asked.result().header.handle))

    def _answer(self, header: wire.Header, body: bytes, mapping: Mapping | None = None) -> None:
        """Hand an answer to the one who waits. Nobody may do so any more: then it is dropped, and
        a mapping closes with its last reference."""
        waiter = self._waiting.get(header.offset)
        if header.kind == wire.REFUSED:
            self._fail(header, wire.refusal(header, body))
        elif waiter is not None and not waiter.done():
            waiter.set_result(Answer(header, body, mapping))

    def _fail(self, header: wire.Header, error: SlackwaterError) -> None:
        waiter = self._waiting.get(header.offset)
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    # Records -------------------------------------------------------------------------------------

    def _control_record(self, header: wire.Header, body: bytes) -> None:
        """One control record of those that several kinds of channel know. Raises DecodeRejected."""
        match header.kind:
            case wire.FRAME:
                self._inbox.put(body)
            case wire.PROGRESS:
                if len(body) != wire.WORD.size:
                    raise DecodeRejected(f"progress with {len(body)} bytes")
                self._credit.returned(header.number, header.offset)
                self._peer_received(wire.WORD.unpack(body)[0])
            case wire.OPEN:
                try:
                    region = self.granted(body)
                except AccessRefused as why:
                    self._push(wire.pack_refusal(why, offset=header.offset))
                else:
                    self._serve_open(header, body, region)
            case wire.OPENED:
                self._end_opened(header, body)
            case wire.REFUSED | wire.ACCEPTED:
                self._answer(header, body)
            case wire.REVOKED:
                for opened in self._opened:
                    opened.revoked |= bool(body) and opened.key == body
                if header.number:
                    self._withdraw(header.number)
            case wire.PREPARE:
                self._begin_prepare(header, body[:LABEL_BYTES_MAX].decode("utf-8", "replace"))
            case wire.GOODBYE:
                self.lose("the peer closed the channel")
            case wire.HANDOVER:
                self._take_handover(header, body)
            case _:
                raise DecodeRejected(f"a record of kind {header.kind} is not expected here")

    def _end_opened(self, header: wire.Header, body: bytes) -> None:
        self._answer(header, body)

    def _begin_prepare(self, header: wire.Header, label: str) -> None:
        try:
            self._serve_prepare(header, label)
        except DecodeRejected:
            raise
        except SlackwaterError as error:
            self._push(wire.pack_refusal(error, offset=header.offset))

    def forget(self, remote: object) -> None:
        """Forget a remote region that was closed here."""
        self._opened.discard(remote)

    def _take_handover(self, header: wire.Header, body: bytes) -> None:
        if header.handle > len(body):
            raise DecodeRejected(f"a label of {header.handle} bytes in {len(body)}")
        label = body[: min(header.handle, LABEL_BYTES_MAX)].decode("utf-8", "replace")
        note = body[header.handle :]
        try:
            arriving = Arriving(*self._adopt(header, label))
        except (Rejected, Unavailable) as error:
            if isinstance(error, DecodeRejected):
                raise
            self._push(wire.pack_refusal(error, offset=header.offset))
            return
        self._begin_handover(arriving, note, partial(self._answer_handover, header.offset))

    def _answer_handover(self, request: int, refusal: SlackwaterError | None) -> None:
        if refusal is None:
            self._reply(wire.pack(wire.ACCEPTED, offset=request))
        else:
            self._reply(wire.pack_refusal(refusal, offset=request))

    def _reply(self, record: bytes) -> None:
        if not self.closed:
            self._push(record)

    # The end -------------------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """The channel is over. Idempotent: the first reason stands."""
        if self._lost is not None:
            return
        self._lost = why
        self._teardown()
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(Unavailable(why))
        self._inbox.close(why)
        self._grants.clear()
        self._tasks.cancel()
        self._watch.cancel()

    def _broke(self, name: str, error: BaseException) -> None:
        self._report(f"{name} failed", error)
        self.lose(f"the channel broke here: {name} failed: {error!r}")

    def _tick(self) -> None:
        """A peer that began a record and does not end it, or owes an answer, is lost."""
        for stream, waiting in self._connections():
            if stream.idle_ticks(waiting) >= STALL_TICKS:
                self.lose(f"the peer made no progress for {self._tick_s * STALL_TICKS:g} s")
                return
        self._watch = self._loop.call_later(self._tick_s, self._tick)
