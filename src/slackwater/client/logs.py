"""Read what a job's processes print, each from the machine that it runs on."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Final, NamedTuple

from slackwater.client.worker_service import Note, Worker, place_of, unnoted
from slackwater.common.base import codec
from slackwater.common.base.errors import Rejected, Retryable, SlackwaterError
from slackwater.common.shell.client import Client
from slackwater.schemas.base import Refused
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.logs import LogPiece, ReadLog
from slackwater.services.master.gangs import last_placed, processes

LOOK_S: Final = 1.0
GLANCE_S: Final = 1.0
QUEUE_LINES: Final = 1000
LINE_BYTES_MAX: Final = 64 * 1024
"""A longer line is shown in parts."""


class Said(NamedTuple):
    """Output of a rank on a node: bytes as they are, or a line without its line feed."""

    rank: int
    node: str
    data: bytes


def ranks_of(record: JobRecord) -> range:
    """The ranks of its present or last attempt; those that it asks for where it had none."""
    return range(processes(record) or record.spec.workers)


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
