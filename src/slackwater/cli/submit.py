"""`slackwater submit`: hand a job to the cluster."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from slackwater.cli.job_file import read_job
from slackwater.cli.show import with_client
from slackwater.cli.submit_wait import attend
from slackwater.common.base.errors import Rejected
from slackwater.common.shell.client import Client
from slackwater.common.shell.config import explained
from slackwater.console.names import new_id, said
from slackwater.console.options import Json, Seed, Url
from slackwater.console.outcome import Usage, err, out, print_json, reported
from slackwater.console.usage import an_id, typed
from slackwater.loadgen.replay.workload import COMPUTE_S, emulated
from slackwater.schemas.base import COUNT_MAX
from slackwater.schemas.jobs import Consistency, JobSpec

ITERATIONS: Final = 100
"""Iterations of an emulated job that is given no number."""
SECONDS_MAX: Final = 86_400
OF_EMULATION: Final = ("compute_s", "bytes_scale")
OF_A_JOB: Final = (
    "model", "workers", "servers", "iterations", "consistency", "staleness", "seed", *OF_EMULATION,
)  # fmt: skip
Id = Annotated[
    str,
    typer.Option(help="The job's id; submitted again it changes nothing. By default one is made."),
]
Program = Annotated[
    list[str] | None,
    typer.Argument(help="The command that each worker runs, after --, as its node finds it."),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Run the program in this folder of its node; by default in the one you are in.",
    ),
]
Model = Annotated[
    str | None, typer.Option(help="Emulate the training of this network, for example vgg19.")
]
File = Annotated[
    Path | None,
    typer.Option(help="Read the job from a JSON or TOML file; see `slackwater config sample job`."),
]
Processes = Annotated[int, typer.Option(min=1, max=64, help="Run so many processes, one per rank.")]
Servers = Annotated[
    int,
    typer.Option(min=1, max=64, help="Parameter servers that the job would reserve for itself."),
]
Iterations = Annotated[
    int | None,
    typer.Option(
        min=1, max=COUNT_MAX,
        help="Iterations of training; an emulation has 100 by default, a program counts itself.",
    ),
]  # fmt: skip
ComputeS = Annotated[
    float | None,
    typer.Option(
        min=0, max=SECONDS_MAX,
        help="Seconds of computing per iteration, with --model; by default the network's own.",
    ),
]  # fmt: skip
BytesScale = Annotated[
    float, typer.Option(min=0, max=1, help="Share of the network's real bytes, with --model.")
]
Mode = Annotated[
    Consistency, typer.Option(help="When a gradient is applied, and whom a worker waits for.")
]
Staleness = Annotated[
    int,
    typer.Option(
        min=0, max=1000,
        help="Iterations that a worker may be ahead of the slowest, if stale-synchronous.",
    ),
]  # fmt: skip
Restarts = Annotated[
    int,
    typer.Option(
        min=0, max=1000,
        help="Restart ranks that die so many times in all; each goes on where the job is.",
    ),
]  # fmt: skip
Tenant = Annotated[
    str, typer.Option(help="The tenant on whose account it runs, for example vision.")
]
Fractional = Annotated[
    bool,
    typer.Option(
        "--allow-fractional-share",
        help="Let a program that really trains use aggregators of less than a core.",
    ),
]
LossLimit = Annotated[
    float,
    typer.Option(
        min=0, max=0.999,
        help="Part of its speed that sharing may cost; 0: the tenant's or cluster's limit.",
    ),
]  # fmt: skip
Wait = Annotated[
    bool, typer.Option("--wait", help="Print its logs until it ends, and exit as it does.")
]


def submit(
    context: typer.Context,
    id: Id = "",
    program: Program = None,
    folder: Folder = None,
    model: Model = None,
    file: File = None,
    workers: Processes = 2,
    servers: Servers = 2,
    iterations: Iterations = None,
    compute_s: ComputeS = None,
    bytes_scale: BytesScale = 0.2,
    consistency: Mode = "synchronous",
    staleness: Staleness = 0,
    restarts: Restarts = 0,
    tenant: Tenant = "",
    loss_limit: LossLimit = 0.0,
    seed: Seed = 0,
    wait: Wait = False,
    allow_fractional_share: Fractional = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Submit a job, and return once it is stored.

    For example: `slackwater submit --workers 2 -- python train.py`. With --wait: once it has ended,
    with 0 if it completed, else with the exit code of the first rank that failed (1 where that is a
    signal, or the job was cancelled). Ctrl-C leaves it running.
    """
    with reported():
        if typed(context, "id"):
            an_id("--id", id)
        given = frozenset(name for name in OF_A_JOB if typed(context, name))
        shape: dict[str, Any] = {
            "workers": workers, "servers": servers, "seed": seed, "consistency": consistency,
            "staleness": staleness,
        }  # fmt: skip
        if file is not None:
            _refuse_beside("--file", given | ({"program"} if program else set()))
            spec = _named(read_job(file), id, file)
        elif program:
            _refuse_beside("-- PROGRAM", given & {*OF_EMULATION})
            spec = JobSpec(
                id=id or new_id(model, program), model=model or "", program=tuple(program),
                iterations=iterations or 1, **shape,
            )  # fmt: skip
        elif model is not None:
            shape |= {"iterations": iterations or ITERATIONS, "compute_s": compute_s}
            spec = _emulated(id or new_id(model, None), model, bytes_scale=bytes_scale, **shape)
            _refuse_of_programs(model, folder, allow_fractional_share)
        else:
            raise Usage("nothing to submit: give --model NAME, --file FILE or -- PROGRAM")
        more = _given(
            spec, tenant=tenant, restarts=restarts, loss_limit=loss_limit,
            fractional_share=allow_fractional_share,
            folder=_folder(spec, folder) if program or file is not None else "",
        )  # fmt: skip
        spec = checked(more)
    _store(spec, url, json, wait)


def _given(spec: JobSpec, **options: str | float) -> JobSpec:
    """Replace what the file says by the options that are given."""
    return msgspec.structs.replace(spec, **{name: it for name, it in options.items() if it})


def _folder(spec: JobSpec, given: Path | None) -> str:
    """Return the folder that a program runs in; a relative one begins where the user is."""
    return str((given or Path(spec.folder)).absolute()) if spec.program else ""


def _refuse_beside(what: str, ignored: Iterable[str]) -> None:
    names = sorted("-- PROGRAM" if n == "program" else _option(n) for n in ignored)
    if names:
        raise Usage(f"{what} beside {', '.join(names)}: it says that itself; leave one out")


def _refuse_of_programs(model: str, folder: Path | None, fractional_share: bool) -> None:
    """Raises Usage for what changes nothing in an emulation."""
    if folder is not None:
        raise Usage(f"--folder beside --model {model}: it runs no program of yours; leave it out")
    if fractional_share:
        raise Usage(
            f"--allow-fractional-share beside --model {model}: an emulated job may use them "
            "anyway; leave it out"
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _named(spec: JobSpec, id: str, file: Path) -> JobSpec:
    if id and spec.id != id:
        raise Usage(f"--id {id}: {file} says id {spec.id}; use one id")
    return spec


def _emulated(
    id: str, model: str, *, compute_s: float | None, bytes_scale: float, **shape: Any
) -> JobSpec:
    if bytes_scale == 0:
        raise Usage("--bytes-scale 0: give a number above 0 and at most 1")
    seconds = compute_s if compute_s is not None else COMPUTE_S.get(model, 1.0)
    try:
        return emulated(id, model, compute_s=seconds, bytes_scale=bytes_scale, **shape)
    except Rejected as error:
        raise Usage(f"--model: {error}") from error


def checked(spec: JobSpec) -> JobSpec:
    """Refuse options that the master would refuse, or that would do nothing. Raises Usage."""
    if len(spec.tenant) > 64:
        raise Usage(f"--tenant: a name has at most 64 characters, this one {len(spec.tenant)}")
    if spec.staleness and spec.consistency != "stale-synchronous":
        raise Usage(
            f"--staleness {spec.staleness}: a {spec.consistency} job has none; add --consistency "
            "stale-synchronous, or leave it out"
        )
    if spec.program and not spec.program[0].strip():
        raise Usage("-- PROGRAM: the program's name is empty; name what the workers run")
    try:
        return msgspec.convert(msgspec.to_builtins(spec), JobSpec)
    except msgspec.ValidationError as error:
        raise Usage(explained(str(error), msgspec.to_builtins(spec), JobSpec)) from error


def _store(spec: JobSpec, url: str | None, json: bool, wait: bool) -> None:
    if wait:
        code = with_client(url, lambda client: _attended(client, spec, json))
        if code:
            raise typer.Exit(code)
        return
    known = with_client(url, lambda client: client.submit(spec))
    if json:
        print_json(spec)
    else:
        out.print(said(spec, known), markup=False, highlight=False, soft_wrap=True)


async def _attended(client: Client, spec: JobSpec, json: bool) -> int:
    known = await client.submit(spec)
    err.print(said(spec, known), markup=False)
    return await attend(client, spec, json)
