"""`slackwater launch`: a program as a job of several workers, for as long as the command runs.

The counterpart of torchrun on one machine, and on a cluster that is up. Where none is, the run has
a cluster of its own, which ends with it.
"""

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from slackwater.cli import terminal
from slackwater.cli.elastic_program import (
    ChooseHosts,
    Hosts,
    Recover,
    elastic_fields,
    named_after_its_file,
    program_of,
)
from slackwater.cli.show import with_client
from slackwater.cli.submit import begun_with, checked, environment, saving
from slackwater.cli.submit_options import (
    Aggregate,
    ByTurns,
    Checkpoint,
    Env,
    From,
    Gpus,
    Id,
    MemoryEach,
    Preferred,
    Restarts,
    SaveDtype,
    SaveEvery,
    SaveFraction,
    SaveTo,
)
from slackwater.cli.submit_wait import ended_as, follow
from slackwater.client.waits import until
from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected, SlackwaterError, Unavailable
from slackwater.common.embedded import (
    ClusterOptions,
    EmbeddedCluster,
    controllers_for,
    whole_cores,
)
from slackwater.common.shell.client import Client, connect
from slackwater.console import figures
from slackwater.console.after_dashes import CommandAfterDashes, after_dashes
from slackwater.console.names import new_id, said
from slackwater.console.options import Json, Url
from slackwater.console.outcome import Usage, err, reported
from slackwater.console.sizes import size_bytes
from slackwater.console.usage import an_id, shown
from slackwater.console.where import resolve
from slackwater.schemas.base import WORKERS_MAX
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.terminals import in_terminal, keeps_terminal

PROGRESS_S: Final = 10.0
"""Seconds between two lines that say how far it is."""
INTERRUPTED: Final = 130
AS_GIVEN: Final = ("gpus", "restarts", "priority", "aggregate", "by_turns")
"""Options that are fields of the job."""

_Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=WORKERS_MAX,
        help="Number of processes, one per rank; by default one for each of --gpus, else 2.",
        show_default=False,
    ),
]


def launch(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="APP", help="An elastic program (a .py file); a command comes after --."
        ),
    ] = None,
    workers: _Workers = None,
    hosts: Hosts = "",
    choose_hosts: ChooseHosts = False,
    gpus: Gpus = 0,
    restarts: Restarts = 0,
    memory: MemoryEach = "",
    priority: Preferred = 0,
    aggregate: Aggregate = "auto",
    by_turns: ByTurns = False,
    checkpoint: Checkpoint = None,
    start_from: From = None,
    save_to: SaveTo = None,
    save_every: SaveEvery = "",
    save_fraction: SaveFraction = 1.0,
    save_dtype: SaveDtype = "float32",
    recover: Recover = "partial",
    env: Env = None,
    id: Id = "",
    pty: Annotated[
        bool,
        typer.Option(
            "--pty", help="Sit at the terminal of the program, as of a shell: -- bash. One process."
        ),
    ] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Run a program as a job, show what its ranks print, and exit as it does.

    For example: `slackwater launch --workers 2 -- python train.py`. The program may be any that
    torchrun starts. `slackwater launch app.py --hosts 2:8` runs an elastic program, whose hosts
    come and go, `slackwater launch --pty --gpus 1 -- bash` a shell where the GPU is. On the cluster
    that is up, else on one that starts and ends with this command. Ctrl-C cancels the job.
    """
    with reported():
        options = {**locals()}
        program = after_dashes(context)
        app = None if program else program_of(words or [], hosts)
        spec = _spec(options, program, app)
        here = _has_none(url)
    if here:
        with reported():
            code = asyncio.run(_on_its_own(spec, json, pty))
    else:
        code = with_client(url, lambda client: _on_this(client, spec, options, app is not None))
    if code:
        raise typer.Exit(code)


launch.command_class = CommandAfterDashes  # type: ignore[attr-defined]


def _spec(
    options: dict[str, Any], program: tuple[str, ...] | None, app: tuple[str, ...] | None
) -> JobSpec:
    """`app`: the command of an elastic program. Raises Usage."""
    if options["recover"] == "rollback" and app is None:
        raise Usage("--recover rollback: an elastic program goes back; a command saves itself")
    if options["choose_hosts"] and app is None:
        raise Usage("--choose-hosts: an elastic program chooses; a command has --workers")
    if options["hosts"] and app is None:
        raise Usage(f"--hosts {options['hosts']}: of an elastic program; for a command --workers")
    program = app or program
    if not app and (options["words"] or not program):
        given = " ".join(options["words"] or ())
        what = f"{shown(given)}: a command" if given else "nothing to run: the command"
        usual = "--pty -- bash" if options["pty"] else "-- python train.py"
        like = f"-- {given}" if given else usual
        raise Usage(f"{what} comes after --: slackwater launch {like}")
    if options["id"]:
        an_id("--id", options["id"])
    if options["pty"]:
        _check_pty(options, app)
    fields: dict[str, Any] = {
        "id": options["id"] or new_id(None, program),
        "program": program,
        "folder": str(Path.cwd()),
        "workers": options["workers"] or options["gpus"] or 2,
        "env": environment(options["env"] or (), os.environ),
    }
    fields |= {name: options[name] for name in AS_GIVEN}
    if options["checkpoint"] is not None:
        fields["checkpoint"] = str(options["checkpoint"].absolute())
    if options["start_from"] is not None:
        fields["start_from"] = begun_with(options["start_from"])
    if options["memory"]:
        fields["memory_bytes"] = size_bytes(options["memory"], "--memory")
    fields |= saving(options)
    if app is not None:
        fields |= elastic_fields(options, fields["env"])
    if options["pty"]:
        fields |= _at_terminal(fields["program"], fields["env"])
    return checked(fields)


def _check_pty(options: dict[str, Any], app: tuple[str, ...] | None) -> None:
    """Raises Usage."""
    if app is not None:
        raise Usage(
            "--pty: an elastic program has hosts that come and go; a command has a terminal"
        )
    leave = {"workers": (None, 1), "restarts": (0,), "json": (False,)}
    for name, may in leave.items():
        if options[name] not in may:
            raise Usage(f"--pty: one process, once, for a person: leave --{name} out")
    terminal.check()


def _at_terminal(command: tuple[str, ...], env: dict[str, str]) -> dict[str, Any]:
    """Return the fields of a job whose command runs in a terminal of this one's size."""
    kind = {"TERM": os.environ.get("TERM", "xterm")}
    program = in_terminal(command, terminal.size(), limits.TERMINAL_ALONE_S)
    return {"program": program, "workers": 1, "preemptible": False, "env": kind | env}


def _has_none(url: str | None) -> bool:
    """Tell whether no cluster is known, and none was named. Raises Rejected where one was that does
    not run, or it is not clear which is meant."""
    try:
        resolve(url)
    except Unavailable:
        return True
    return False


async def _on_its_own(spec: JobSpec, json: bool, pty: bool) -> int:
    count = whole_cores(1.0)
    options = ClusterOptions(controllers=controllers_for(count), aggregators=count)
    begun_s = time.monotonic()
    async with EmbeddedCluster(options) as cluster:
        took_s = time.monotonic() - begun_s
        err.print(f"no cluster is up: this run has one of its own, ready after {took_s:.1f} s")
        async with connect(cluster.url, "slackwater-launch") as client:
            patient = client.patient()
            return await attended(patient, spec, json, pty)


async def _on_this(client: Client, spec: JobSpec, options: dict[str, Any], elastic: bool) -> int:
    if elastic and not options["id"]:
        spec = await named_after_its_file(client, spec)
    if options["pty"] and options["id"]:
        spec = await _the_one_that_runs(client, spec)
    return await attended(client, spec, options["json"], options["pty"])


async def _the_one_that_runs(client: Client, spec: JobSpec) -> JobSpec:
    """Return the terminal's job of this id that has not ended, whatever size its window had."""
    try:
        known = await client.job(spec.id)
    except Rejected:  # There is none.
        return spec
    runs = known.state not in TERMINAL_STATES and keeps_terminal(known.spec.program)
    return known.spec if runs else spec


async def attended(client: Client, spec: JobSpec, json: bool, pty: bool = False) -> int:
    """Submit the job, stay with it, and return its exit code. Interrupted, it is cancelled. Raises
    Rejected where a job of this id has ended: its output would pass for that of this run."""
    known = await client.submit(spec)
    if known is not None and known.state in TERMINAL_STATES:
        raise Rejected(said(spec, known))
    telling = asyncio.create_task(_tell(client, spec.id))
    try:
        if pty:
            telling.cancel()
            await terminal.sit(client, spec, new=known is None)
        else:
            await follow(client, spec, json)
        await until(client, [spec.id], "ended", 0.0)
    except (asyncio.CancelledError, terminal.Left):
        err.print(f"job {spec.id} is cancelled", markup=False)
        with suppress(SlackwaterError):
            await client.cancel(spec.id)
            await until(client, [spec.id], "ended", limits.REQUEST_TIMEOUT_S)
        return INTERRUPTED
    finally:
        telling.cancel()
    record = await client.job(spec.id)
    progress = (await client.job_info(spec.id)).progress
    lasted_s = record.finished_s - record.started_s
    told = f"job {spec.id} {record.state} after {lasted_s:.1f} s"
    if progress is not None and progress.program is not None:
        told += f": {progress.iteration} iterations, {figures.program(progress.program)}"
    elif progress is not None and progress.iteration:
        told += f": {progress.iteration} iterations whose gradients aggregators took"
    if record.state == "completed":
        err.print(told, markup=False)
    return await ended_as(client, record)


async def _tell(client: Client, id: str) -> None:
    """Say now and then how far the job is, for those who wait for a program that prints little. An
    elastic program says so by itself."""
    before, at_s = 0, time.monotonic()
    while True:
        await asyncio.sleep(PROGRESS_S)
        try:
            progress = (await client.job_info(id)).progress
        except SlackwaterError:
            continue  # The next time, perhaps.
        now_s = time.monotonic()
        if progress is None or progress.program is not None:
            continue
        if progress.iteration > before:
            speed = (progress.iteration - before) / (now_s - at_s)
            err.print(f"{id}: iteration {progress.iteration}, {speed:.3g} a second", markup=False)
            before, at_s = progress.iteration, now_s
