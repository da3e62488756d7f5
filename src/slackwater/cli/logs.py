"""`slackwater logs`: what a job's processes print, from the machine that they run on."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Annotated, Final

import msgspec
import typer

from slackwater.cli.job_ids import JobId
from slackwater.cli.show import with_client
from slackwater.common.base import codec, limits
from slackwater.common.base.errors import Rejected, Retryable, SlackwaterError, Unavailable
from slackwater.common.bus.base import Delivery
from slackwater.common.shell.client import Client
from slackwater.console.options import Json, Url
from slackwater.console.outcome import Usage, err
from slackwater.schemas import subjects
from slackwater.schemas.base import Refused
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.logs import TAIL_LINES_MAX, LogPiece, ReadLog

LOOK_S: Final = 1.0
HEARD_S: Final = 2.5
"""Seconds to wait for a heartbeat, which worker services send every second."""
GLANCE_S: Final = 1.0
QUEUE_LINES: Final = 1000
LINE_BYTES_MAX: Final = 64 * 1024
"""A longer line is shown in parts."""
Print = Callable[[int, bytes], None]
"""Takes a rank and what it printed, whole lines where there are several ranks."""


def logs(
    job: JobId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing until the job has ended.")
    ] = False,
    rank: Annotated[int, typer.Option(min=-1, help="Show this rank alone (-1: all of them).")] = -1,
    tail: Annotated[
        int,
        typer.Option(
            min=-1, max=TAIL_LINES_MAX, help="Show so many last lines of each rank (-1: all)."
        ),
    ] = -1,
    url: Url = None,
    json: Json = False,
) -> None:
    """Print what a job's processes printed, also after they have ended.

    With several ranks each line says whose it is. A machine keeps the last 16 MiB of each rank
    (`log_bytes_max` of its worker service).
    """

    async def show(client: Client) -> None:
        record = await started(client, job, follow)
        ranks = range(record.spec.workers) if rank < 0 else [rank]
        if rank >= record.spec.workers:
            raise Usage(f"--rank {rank}: job {job} has {record.spec.workers} (from 0 on)")
        out = printer(len(ranks), json)
        if follow:
            await follow_all(client, record, ranks, tail, out)
            return
        for each in ranks:
            async with aclosing(read(client, record, each, tail, False, len(ranks) > 1)) as pieces:
                async for piece in pieces:
                    out(each, piece)

    with_client(url, show)


def printer(ranks: int, json: bool) -> Print:
    """Write to stdout what comes: bytes of one rank as they are, lines of several with their rank
    before them."""

    def plain(rank: int, data: bytes) -> None:
        sys.stdout.buffer.write(f"rank {rank} | ".encode() + data + b"\n" if ranks > 1 else data)
        sys.stdout.buffer.flush()

    def document(rank: int, data: bytes) -> None:
        for line in data.decode(errors="replace").splitlines() or [""]:
            text = msgspec.json.encode({"rank": rank, "line": line})
            sys.stdout.buffer.write(text + b"\n")
        sys.stdout.buffer.flush()

    return document if json else plain


async def started(client: Client, job: str, patient: bool) -> JobRecord:
    """Return the job's record once it has processes; `patient`: wait for them. Raises Rejected if
    there will be none."""
    told = ""
    while True:
        record = await client.job(job)
        if not record.spec.program:
            raise Rejected(
                f"job {job} has no program: its user started it by hand, and its output is there"
            )
        if record.node is not None:
            return record
        why = f": {record.reason}" if record.reason else ""
        if record.state in TERMINAL_STATES:
            raise Rejected(f"job {job} {record.state} before it was started{why}; it has no log")
        if not patient:
            raise Rejected(f"job {job} was not started yet{why}; --follow waits for it")
        if record.reason != told:
            told = record.reason
            err.print(f"job {job} waits{why.removeprefix(': waits')}", markup=False)
        await client.clock.sleep_until(client.clock.now_s() + LOOK_S)


async def follow_all(
    client: Client, record: JobRecord, ranks: Sequence[int], tail: int, out: Print
) -> None:
    """Print until the job has ended, or all of these ranks have."""
    lines: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue(QUEUE_LINES)

    async def one(rank: int) -> None:
        async with aclosing(read(client, record, rank, tail, True, len(ranks) > 1)) as pieces:
            async for piece in pieces:
                await lines.put((rank, piece))

    reading = asyncio.gather(*(one(rank) for rank in ranks))
    reading.add_done_callback(lambda _: asyncio.ensure_future(lines.put((-1, b""))))
    try:
        while (said := await lines.get())[0] >= 0:
            out(*said)
        await reading
    finally:
        reading.cancel()


async def read(
    client: Client, record: JobRecord, rank: int, tail: int, follow: bool, by_line: bool
) -> AsyncGenerator[bytes, None]:
    """Yield what the rank printed; `by_line`: line by line, without the line feeds. `follow`: until
    it has ended for good, through whatever happens to services and bus meanwhile."""
    worker = Worker(client, record, rank)
    place: int | None = 0 if tail < 0 else None
    rest, until = b"", -1
    while True:
        piece = await worker.piece(place, tail, follow)
        if place is not None and piece.start > place:
            lost = piece.start - place
            err.print(f"rank {rank}: its first {lost} bytes are not kept", markup=False)
        place = piece.start + len(piece.data)
        until = piece.end if until < 0 else until
        if by_line:
            *whole, rest = (rest + piece.data).split(b"\n")
            for line in whole:
                yield line
            if len(rest) > LINE_BYTES_MAX:
                yield rest
                rest = b""
        elif piece.data:
            yield piece.data
        over = not piece.data or place >= until
        if (over and not follow) or (follow and piece.ended and await _over(client, record, rank)):
            if rest:
                yield rest
            return
        if follow and piece.ended:
            await client.clock.sleep_until(client.clock.now_s() + LOOK_S)


async def _over(client: Client, record: JobRecord, rank: int) -> bool:
    """Tell whether the rank has ended for good. One that died may be started again, and goes on in
    the same log."""
    try:
        now = await client.job(record.spec.id)
    except Retryable:
        return False
    return now.state in TERMINAL_STATES or str(rank) in now.results


class Worker:
    """Asks the worker service of the job's machine for a rank's log."""

    def __init__(self, client: Client, record: JobRecord, rank: int) -> None:
        self._client, self._record, self._rank = client, record, rank
        self._id = record.node or ""
        """The service's id: most often the name of its node."""
        self._heard = False
        self._told = False

    async def piece(self, place: int | None, tail: int, patient: bool) -> LogPiece:
        """Ask for a piece. `patient`: wait for what will be printed, and for a service that is
        away. Raises Unavailable, Rejected."""
        wait_s = limits.LOG_WAIT_S if patient else 0.0
        asked = ReadLog(
            job=self._record.spec.id, rank=self._rank, offset=place, tail=max(tail, 0),
            wait_s=wait_s,
        )  # fmt: skip
        while True:
            try:
                return await self._client.ask(self._subject(), asked, LogPiece)
            except SlackwaterError as error:
                if not self._heard and await self._hear():
                    continue
                if not isinstance(error, Retryable):
                    raise
                if not patient:
                    raise self._away() from error
            if not self._told:
                self._told = True
                err.print(f"{self._away()}; waiting for it", markup=False)

    def _subject(self) -> str:
        return subjects.command("worker", self._id, "log")

    def _away(self) -> Unavailable:
        return Unavailable(
            f"the worker service of node {self._record.node} does not answer: is the machine up? "
            f"The log is there, in jobs/{self._record.spec.id} of its state_dir"
        )

    async def _hear(self) -> bool:
        """Find out whether a service of another name beats for the node."""
        heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def beat(delivery: Delivery) -> None:
            found = codec.decode(delivery.payload, WorkerHeartbeat)
            if found.node == self._record.node and not heard.done():
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
    subject = subjects.command("worker", record.node or "", "log")
    try:
        raw = await client.bus.request(subject, codec.encode(asked), timeout_s=GLANCE_S)
    except Retryable:
        return []
    piece: LogPiece | Refused = codec.decode(raw, LogPiece | Refused)
    if isinstance(piece, Refused):
        return []
    return piece.data.decode(errors="replace").splitlines()
