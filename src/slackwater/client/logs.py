"""Read what a job's processes print, each from the machine that it runs on."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Final, NamedTuple, TypeVar

from slackwater.common.base import codec, limits
from slackwater.common.base.errors import Rejected, Retryable, SlackwaterError, Unavailable
from slackwater.common.bus.base import Delivery
from slackwater.common.shell.client import Client
from slackwater.schemas import subjects
from slackwater.schemas.base import Message, NodeId, Refused
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.logs import LogPiece, ReadLog
from slackwater.services.master.gangs import last_placed, node_of, processes

M = TypeVar("M", bound=Message)
LOOK_S: Final = 1.0
HEARD_S: Final = 2.5
"""Seconds to wait for a heartbeat, which worker services send every second."""
GLANCE_S: Final = 1.0
QUEUE_LINES: Final = 1000
LINE_BYTES_MAX: Final = 64 * 1024
"""A longer line is shown in parts."""


class Said(NamedTuple):
    """Output of a rank on a node: bytes as they are, or a line without its line feed."""

    rank: int
    node: str
    data: bytes


Note = Callable[[str], None]
"""Takes a sentence about what is missing, or is waited for."""


def unnoted(_: str) -> None:
    """Take a note and tell nobody."""


def ranks_of(record: JobRecord) -> range:
    """The ranks of its present or last attempt; those that it asks for where it had none."""
    return range(processes(record) or record.spec.workers)


def place_of(record: JobRecord, rank: int) -> NodeId | None:
    """The node on which the rank runs or ran; where the record does not say, the job's first."""
    return node_of(record, rank) or record.node


async def started(client: Client, job: str, patient: bool, note: Note = unnoted) -> JobRecord:
    """Return the job's record once it has processes, as placed where they ran last; `patient`: wait
    for them. Raises Rejected if there will be none."""
    told = ""
    while True:
        record = await client.job(job)
        if not record.spec.program:
            raise Rejected(
                f"job {job} has no program: its user started it by hand, and its output is there"
            )
        if record.node is not None:
            return last_placed(record)
        why = f": {record.reason}" if record.reason else ""
        if record.state in TERMINAL_STATES:
            raise Rejected(f"job {job} {record.state} before it was started{why}; it has no log")
        if not patient:
            raise Rejected(f"job {job} was not started yet{why}; --follow waits for it")
        if record.reason != told:
            told = record.reason
            note(f"job {job} waits{why.removeprefix(': waits')}")
        await client.clock.sleep_until(client.clock.now_s() + LOOK_S)


async def printed(
    client: Client,
    record: JobRecord,
    ranks: Sequence[int],
    tail: int,
    follow: bool,
    *,
    by_line: bool,
    note: Note = unnoted,
) -> AsyncGenerator[Said, None]:
    """Yield what there is, rank by rank; the first error is raised after all that can be read.
    `follow`: of all ranks as it comes, until they have ended."""
    if follow:
        async with aclosing(_together(client, record, ranks, tail, by_line, note)) as pieces:
            async for said in pieces:
                yield said
        return
    first: SlackwaterError | None = None
    for rank in ranks:
        try:
            pieces = read(client, record, rank, tail, False, by_line, note)
            async with aclosing(pieces):
                async for said in pieces:
                    yield said
        except (Rejected, Retryable) as error:
            if first is not None:
                note(f"rank {rank}: {error}")
            first = first or error
    if first is not None:
        raise first


async def _together(
    client: Client,
    record: JobRecord,
    ranks: Sequence[int],
    tail: int,
    by_line: bool,
    note: Note,
) -> AsyncGenerator[Said, None]:
    """Follow these ranks side by side."""
    pieces: asyncio.Queue[Said | None] = asyncio.Queue(QUEUE_LINES)

    async def one(rank: int) -> None:
        async with aclosing(read(client, record, rank, tail, True, by_line, note)) as found:
            async for said in found:
                await pieces.put(said)

    reading = asyncio.gather(*(one(rank) for rank in ranks))
    reading.add_done_callback(lambda _: asyncio.ensure_future(pieces.put(None)))
    try:
        while (said := await pieces.get()) is not None:
            yield said
        await reading
    finally:
        if reading.cancel():
            with suppress(asyncio.CancelledError):
                await reading


async def read(
    client: Client,
    record: JobRecord,
    rank: int,
    tail: int,
    follow: bool,
    by_line: bool,
    note: Note = unnoted,
) -> AsyncGenerator[Said, None]:
    """Yield what the rank printed; `by_line`: line by line, without the line feeds. `follow`: until
    it has ended for good, through whatever happens to services and bus meanwhile, and on whichever
    node it goes on. Raises Unavailable, Rejected."""
    worker = Worker(client, record, rank, note)
    places: dict[str, int | None] = {worker.node: 0 if tail < 0 else None}
    rest, until, asked_last = b"", -1, False
    while True:
        place = places.setdefault(worker.node, 0)
        piece: LogPiece | None = None
        try:
            piece = await worker.piece(place, tail, follow)
        except Rejected:
            # A node knows no rank that it has not been told to start yet. One that has ended by now
            # may have been started since: it is asked for once more.
            if not follow or asked_last:
                raise
            asked_last = await _over(client, record, rank)
        if piece is not None:
            if place is not None and piece.start > place:
                lost = piece.start - place
                note(f"rank {rank}: its first {lost} bytes are not kept")
            place = places[worker.node] = piece.start + len(piece.data)
            until = piece.end if until < 0 else until
            if by_line:
                *whole, rest = (rest + piece.data).split(b"\n")
                for line in whole:
                    yield Said(rank, worker.node, line)
                if len(rest) > LINE_BYTES_MAX:
                    yield Said(rank, worker.node, rest)
                    rest = b""
            elif piece.data:
                yield Said(rank, worker.node, piece.data)
            over = not follow and (not piece.data or place >= until)
            if over or (follow and piece.ended and await _over(client, record, rank)):
                if rest:
                    yield Said(rank, worker.node, rest)
                return
        if piece is None or piece.ended:
            await client.clock.sleep_until(client.clock.now_s() + LOOK_S)
            moved = await worker.moved()
            if moved is not worker and rest:
                yield Said(rank, worker.node, rest)
                rest = b""
            worker = moved


async def _over(client: Client, record: JobRecord, rank: int) -> bool:
    """Tell whether the rank has ended for good. One that died may be started again, and goes on in
    the same log, or on another node."""
    try:
        now = await client.job(record.spec.id)
    except Retryable:
        return False
    return now.state in TERMINAL_STATES or str(rank) in now.results


class Worker:
    """Asks the worker service of a rank's machine about it."""

    def __init__(self, client: Client, record: JobRecord, rank: int, note: Note = unnoted) -> None:
        self._client, self._record, self._rank = client, record, rank
        self._note = note
        self.node: str = place_of(record, rank) or ""
        self._id = self.node
        """The service's id: most often the name of its node."""
        self._heard = False
        self._told = False

    async def moved(self) -> "Worker":
        """Return who is to be asked now: another service, where the rank went to another node."""
        try:
            now = await self._client.job(self._record.spec.id)
        except Retryable:
            return self
        node = node_of(now, self._rank)
        same = node is None or node == self.node
        return self if same else Worker(self._client, now, self._rank, self._note)

    async def piece(self, place: int | None, tail: int, patient: bool) -> LogPiece:
        """Ask for a piece. `patient`: wait for what will be printed, and for a service that is
        away. Raises Unavailable, Rejected."""
        wait_s = limits.LOG_WAIT_S if patient else 0.0
        asked = ReadLog(
            job=self._record.spec.id, rank=self._rank, offset=place, tail=max(tail, 0),
            wait_s=wait_s,
        )  # fmt: skip
        return await self.asked("log", asked, LogPiece, patient, again=not patient)

    async def asked(
        self, verb: str, message: Message, kind: type[M], patient: bool, again: bool = True
    ) -> M:
        """Ask the service; `patient`: until it answers; not `again`: its answer takes long on
        purpose. Raises Unavailable, Rejected."""
        while True:
            subject = self._client.subject("worker", self._id, verb)
            try:
                return await self._client.ask(subject, message, kind, again=again)
            except SlackwaterError as error:
                if not self._heard and await self._hear():
                    continue
                if not isinstance(error, Retryable):
                    raise
                if not patient:
                    raise self._away() from error
            if not self._told:
                self._told = True
                self._note(f"{self._away()}; waiting for it")

    def _away(self) -> Unavailable:
        return Unavailable(
            f"the worker service of node {self.node} does not answer: is the machine up? "
            f"The log is there, in jobs/{self._record.spec.id} of its state_dir"
        )

    async def _hear(self) -> bool:
        """Find out whether a service of another name beats for the node."""
        heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def beat(delivery: Delivery) -> None:
            found = codec.decode(delivery.payload, WorkerHeartbeat)
            if found.node == self.node and not heard.done():
                heard.set_result(found.id)

        pattern = subjects.telemetries("worker", what="heartbeat")
        try:
            subscription = await self._client.bus.subscribe(pattern, beat)
            async with asyncio.timeout(HEARD_S):
                found = await heard
            await subscription.unsubscribe()
        except (TimeoutError, Retryable):
            return False
        self._heard, changed = True, found != self._id
        self._id = found
        return changed


async def last_lines(client: Client, record: JobRecord, rank: int, count: int) -> list[str]:
    """Return the last lines of a rank's log; none where its machine does not answer at once."""
    asked = ReadLog(job=record.spec.id, rank=rank, tail=count)
    subject = client.subject("worker", place_of(record, rank) or "", "log")
    try:
        raw = await client.bus.request(subject, codec.encode(asked), timeout_s=GLANCE_S)
    except Retryable:
        return []
    piece: LogPiece | Refused = codec.decode(raw, LogPiece | Refused)
    if isinstance(piece, Refused):
        return []
    return piece.data.decode(errors="replace").splitlines()
