"""`slackwater submit --wait`: stay with a job until it ends, and end as it did."""

import asyncio

from slackwater.cli.logs import printer, show_printed
from slackwater.client import logs, waits
from slackwater.client.worker_service import Worker
from slackwater.common.base.errors import Rejected, Retryable, SlackwaterError
from slackwater.common.shell.client import Client
from slackwater.console.outcome import FAILED, err, noted
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.logs import LogPiece

CODE_MAX = 125
"""The largest exit code to pass on: above are a shell's own, for a command not found or a
signal."""


async def attend(client: Client, spec: JobSpec, json: bool) -> int:
    """Print what the job's ranks print. Return its exit code: 0 completed, else that of the first
    rank that failed where a program can give it, else 1."""
    try:
        await follow(client, spec, json)
        await waits.until(client, [spec.id], "ended", 0.0)
    except asyncio.CancelledError:
        err.print(
            f"job {spec.id} goes on: `slackwater logs -f {spec.id}` shows it again, "
            f"`slackwater cancel {spec.id}` ends it",
            markup=False,
        )
        raise
    return await ended_as(client, await client.job(spec.id))


async def ended_as(client: Client, record: JobRecord) -> int:
    """Return the exit code of an ended job, and say why it failed."""
    if record.state == "completed":
        return 0
    why = f": {record.reason}" if record.reason else ""
    err.print(f"job {record.spec.id} {record.state}{why}", markup=False)
    return FAILED if record.state == "cancelled" else await _code(client, record)


async def follow(client: Client, spec: JobSpec, json: bool) -> None:
    """Print what its ranks print until they end. A job without a program prints where its user
    starts it."""
    if not spec.program:
        return
    try:
        record = await logs.started(client, spec.id, patient=True, note=noted)
        ranks = logs.ranks_of(record)
        await show_printed(client, record, ranks, -1, True, printer(record, ranks, json))
    except Rejected as error:  # It ended before it was started: the record says more.
        err.print(str(error), markup=False)


async def _code(client: Client, record: JobRecord) -> int:
    """Choose the first failure's exit code: the other ranks are told to end then, so theirs come
    later, and are signals."""
    found: list[LogPiece] = []
    for rank in logs.ranks_of(record) if record.node else ():
        try:
            piece = await Worker(client, record, rank).piece(None, 0, patient=False)
        except Rejected:  # It was never started: the record says why.
            continue
        except Retryable as error:
            _unknown(rank, error)
            continue
        if piece.ended and piece.code:
            found.append(piece)
    first = min(found, key=lambda piece: piece.ended_s or float("inf"), default=None)
    return first.code if first is not None and 1 <= first.code <= CODE_MAX else FAILED


def _unknown(rank: int, error: SlackwaterError) -> None:
    err.print(f"rank {rank}: its exit code is not known: {error}", markup=False)
