"""`slackwater checkpoint`: saves what aggregators keep of a job, while it trains or is paused."""

import asyncio
import secrets
import shlex
from pathlib import Path
from typing import Annotated, Final

import typer

from slackwater.cli.job_ids import JobId
from slackwater.cli.show import with_client
from slackwater.common.base import saved_program
from slackwater.common.base.errors import Rejected
from slackwater.common.shell.client import Client
from slackwater.console.options import Json, Url
from slackwater.console.outcome import TRY_LATER, err, out, print_json, reported
from slackwater.console.usage import an_id
from slackwater.schemas.checkpoints import CheckpointProgress
from slackwater.schemas.jobs import JobSpec

POLL_S: Final = 0.1
TOLD_S: Final = 5.0
"""Seconds between two lines that say how far it is."""


def checkpoint(
    id: JobId,
    folder: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="FOLDER",
            help="The folder to save in, which all of its aggregators see.",
        ),
    ],
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait until it is durable (0: without limit).")
    ] = 300.0,
    request: Annotated[
        str, typer.Option("--id", metavar="ID", help="Name the order, to repeat it safely.")
    ] = "",
    url: Url = None,
    json: Json = False,
) -> None:
    """Save a job's parameters and optimiser states, all at one iteration, while it trains.

    A paused job is saved, too. Another job of the same tensors begins with the newest that a folder
    has: `slackwater submit --from FOLDER`. An elastic program that is paused goes on from there:
    `slackwater launch APP --from FOLDER`. Files are numpy's, with checksums; an iteration counts
    once all of its files are durable.
    Exits with 75 if --timeout is over before.
    """
    with reported():
        if request:
            an_id("--id", request)
    order, where = request or f"checkpoint-{secrets.token_hex(4)}", str(folder.absolute())

    made, spec, paused = with_client(url, lambda client: _made(client, id, order, where, timeout))
    if json:
        print_json(made)
    if made.phase == "failed":
        with reported():
            raise Rejected(f"job {id} is not saved: {made.reason}")
    if made.phase != "done":
        err.print(f"{_on_its_way(made)}: not durable within {timeout:g} s", markup=False)
        raise typer.Exit(TRY_LATER)
    if not json:
        _show(made, where)
    if not folder.is_dir():
        err.print(
            f"{where} is not seen from here: its aggregators have it on their machine; `submit "
            "--from` finds it where they do",
            markup=False,
        )
    elif spec.program and (saved_program.own_folder(spec) / saved_program.JOURNAL).is_file():
        with reported():
            _save_program(spec, folder.absolute(), paused)


async def _made(
    client: Client, id: str, order: str, where: str, timeout_s: float
) -> tuple[CheckpointProgress, JobSpec, bool]:
    """Make the checkpoint; return what became of it, the job, and whether that was paused all the
    time."""
    before = await client.job(id)
    made = await _follow(client, id, order, where, timeout_s)
    after = await client.job(id)
    same = before.state == after.state == "paused" and before.attempt == after.attempt
    return made, after.spec, same


def _save_program(spec: JobSpec, folder: Path, paused: bool) -> None:
    """Let an elastic program go on from the checkpoint. Raises Rejected."""
    if not paused:
        err.print(
            f"job {spec.id} is not paused: its tables alone are saved, and a program that begins "
            f"with them begins at its first task; `slackwater pause {spec.id}` before, to go on",
            markup=False,
        )
        return
    try:
        made = saved_program.save(saved_program.own_folder(spec), folder)
    except OSError as error:
        raise Rejected(f"{folder}: the program was not saved: {error.strerror}") from error
    err.print(f"its program goes on from there, by {made.name}: launch --from", markup=False)


async def _follow(
    client: Client, id: str, order: str, where: str, timeout_s: float
) -> CheckpointProgress:
    """Give the order, and ask how far it is until it is over, or the time is (0: no limit)."""
    clock = client.clock
    begun_s = told_s = clock.now_s()
    while True:
        made = await client.checkpoint(id, order, where)
        now_s = clock.now_s()
        if made.phase in ("done", "failed") or (timeout_s and now_s - begun_s >= timeout_s):
            return made
        if now_s - told_s >= TOLD_S:
            told_s = now_s
            err.print(_on_its_way(made), markup=False)
        await asyncio.sleep(POLL_S)


def _on_its_way(made: CheckpointProgress) -> str:
    if made.phase == "writing":
        return (
            f"job {made.job}: iteration {made.iteration} is copied; {made.written} of "
            f"{made.buckets} files are written"
        )
    return f"job {made.job}: waits for iteration {made.iteration}, to copy it"


def _show(made: CheckpointProgress, where: str) -> None:
    out.print(
        f"job {made.job} is saved at iteration {made.iteration}: {made.nbytes / 1e6:,.1f} MB in "
        f"{made.buckets} files, {made.took_s:.2f} s\n"
        f"begin another with it: slackwater submit --from {shlex.quote(where)} ...",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
