"""`slackwater replay ID`, and the journal as `slackwater job ID --journal` shows it.

Both read the journal that the job's program keeps beside its checkpoints, in a folder that this
machine must have, too.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final, TextIO

import typer

from slackwater.agent.journal import REPLAY, REPLAYED, Entry, Journal, last_run, path_of
from slackwater.cli.job_ids import JobId
from slackwater.cli.show import with_client
from slackwater.common.base.errors import Rejected
from slackwater.common.shell.client import Client
from slackwater.console import tables
from slackwater.console.options import Json, Url
from slackwater.console.outcome import FAILED, err, print_json, reported
from slackwater.console.tables import Row
from slackwater.schemas.jobs import JobSpec

HEADS: Final = ("ITERATION", "WHAT", "WORKERS", "VIRTUAL RANKS", "M", "S", "RATE", "DIGEST")
_LAUNCHED: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS")


def replay(
    id: JobId,
    journal: Annotated[
        Path | None,
        typer.Option(help="The journal's file, where it is not in the job's own folder."),
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Run a job of virtual ranks again in one process, and compare it with its journal.

    The program is the one that was submitted, in its folder; it must use slackwater.torch.Elastic.
    Wherever the journal has a digest of the parameters, the replay must have the same one.
    Exits as the program does, with 1 where it differs from the journal.
    """

    async def seen(client: Client) -> JobSpec:
        return (await client.job(id)).spec

    spec = with_client(url, seen)
    with reported():
        path = journal or path_of(spec)
        _entries(spec, path)
        code = _run(spec, path.absolute(), sys.stderr if json else sys.stdout)
    if json:
        print_json({"job": id, "equal": code == 0, "code": code})
    if code:
        raise typer.Exit(code)


def show_journal(spec: JobSpec, *, json: bool) -> None:
    """Print the journal of the job's last run."""
    with reported():
        entries = _entries(spec, path_of(spec))
    if json:
        print_json(entries)
        return
    tables.show(tables.lines(HEADS, [_row(each) for each in entries]))


def _row(entry: Entry) -> Row:
    held = " ".join(f"{first}-{end - 1}" for first, end in entry.assignment)
    figures = (entry.m or "", entry.s, f"{entry.rate:g}", entry.digest)
    who = f"{entry.what} (rank {entry.rank})" if entry.rank else entry.what
    return Row(tuple(map(str, (entry.iteration, who, entry.workers, held, *figures))))


def _entries(spec: JobSpec, path: Path) -> list[Entry]:
    entries = last_run(Journal(path).entries())
    if not entries:
        raise Rejected(
            f"job {spec.id} has no journal at {path}; programs with slackwater.torch.Elastic keep "
            "one in --checkpoint, else in checkpoints/ID of their folder: look on its node"
        )
    return entries


def _run(spec: JobSpec, path: Path, shown: TextIO) -> int:
    """Return the exit code: the program's, or 1 where it did not follow the journal."""
    if not spec.program:
        raise Rejected(
            f"job {spec.id} was started by its user: run its program with {REPLAY}={path} and "
            "without a job's name"
        )
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLACKWATER_") and name not in _LAUNCHED
    }
    first = spec.program[0]
    words = [sys.executable if first == "python" else shutil.which(first) or first]
    words += spec.program[1:]
    program = subprocess.Popen(
        words, cwd=spec.folder or None, env={**own, **spec.env, REPLAY: str(path)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.stdout is not None
    followed = False
    with program:
        for line in program.stdout:
            followed |= line.startswith(REPLAYED)
            shown.write(line)
    if program.returncode == 0 and not followed:
        err.print(
            "the program ended without a replay: it made no slackwater.torch.Elastic", markup=False
        )
        return FAILED
    return program.returncode if program.returncode >= 0 else FAILED
