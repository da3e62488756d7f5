"""`slackwater logs`: what a job's processes print, each from the machine that it runs on."""

import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Annotated

import msgspec
import typer

from slackwater.cli.job_ids import JobId
from slackwater.cli.show import with_client
from slackwater.client.logs import Said, printed, ranks_of, started
from slackwater.common.base.errors import Rejected
from slackwater.common.shell.client import Client
from slackwater.console.options import Json, Url
from slackwater.console.outcome import Usage, noted
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.logs import TAIL_LINES_MAX


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

    With several ranks each line says whose it is, and where they lie on several nodes, from which
    one. A machine keeps the last 16 MiB of each rank (`log_bytes_max` of its worker service).
    """

    async def show(client: Client) -> None:
        record = await started(client, job, follow, noted)
        every = ranks_of(record)
        if rank >= len(every):
            raise Usage(f"--rank {rank}: job {job} has {len(every)} (from 0 on)")
        ranks = every if rank < 0 else range(rank, rank + 1)
        out = printer(record, ranks, json)
        try:
            await show_printed(client, record, ranks, tail, follow, out)
        except Rejected as error:
            if record.state not in TERMINAL_STATES or not record.reason:
                raise
            why = f"{error}; the job {record.state}: {record.reason}"
            raise Rejected(why) from error

    with_client(url, show)


async def show_printed(
    client: Client,
    record: JobRecord,
    ranks: Sequence[int],
    tail: int,
    follow: bool,
    show: Callable[[Said], None],
) -> None:
    """Print what these ranks printed; `follow`: until they have ended."""
    by_line = len(ranks) > 1
    pieces = printed(client, record, ranks, tail, follow, by_line=by_line, note=noted)
    async with aclosing(pieces):
        async for said in pieces:
            show(said)


def printer(record: JobRecord, ranks: Sequence[int], json: bool) -> Callable[[Said], None]:
    """Write to stdout what comes: bytes of one rank as they are, lines of several with their rank
    before them, and the node where that is not the same for all."""
    home = record.node if len(record.allocation) <= 1 else None

    def plain(said: Said) -> None:
        where = "" if said.node == home else f" on {said.node}"
        whose = f"rank {said.rank}{where} | ".encode()
        sys.stdout.buffer.write(whose + said.data + b"\n" if len(ranks) > 1 else said.data)
        sys.stdout.buffer.flush()

    def document(said: Said) -> None:
        for line in said.data.decode(errors="replace").splitlines() or [""]:
            text = msgspec.json.encode({"rank": said.rank, "node": said.node, "line": line})
            sys.stdout.buffer.write(text + b"\n")
        sys.stdout.buffer.flush()

    return document if json else plain
