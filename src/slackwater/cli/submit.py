"""`slackwater submit`: hand a job to the cluster."""

import os
import re
from collections.abc import Iterable, Mapping
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
from slackwater.console.durations import seconds
from slackwater.console.gpus import batch_bounds, gpu_types
from slackwater.console.names import new_id, said
from slackwater.console.options import Json, Seed, Url
from slackwater.console.outcome import Usage, err, out, print_json, reported
from slackwater.console.sizes import size_bytes
from slackwater.console.usage import an_id, shown, typed
from slackwater.loadgen.replay.workload import COMPUTE_S, emulated
from slackwater.schemas.base import CORES_MAX, COUNT_MAX, GPUS_MAX, NAME_CHARS_MAX, WORKERS_MAX
from slackwater.schemas.jobs import (
    ENV_NAME_PATTERN,
    GRACE_S_MAX,
    OWN_ENV,
    PRIORITY_MAX,
    Consistency,
    JobSpec,
)

ITERATIONS: Final = 100
"""Iterations of an emulated job that is given no number."""
SECONDS_MAX: Final = 86_400
OF_EMULATION: Final = ("compute_s", "bytes_scale")
SHAPE: Final = ("workers", "servers", "seed", "consistency", "staleness")
OF_ANY_JOB: Final = (
    "tenant", "restarts", "loss_limit", "gpus", "gpus_min", "gpus_max", "cores", "priority",
    "adaptive", "preemptible", "grace_s",
)  # fmt: skip
"""Fields that have an option each, also for a job that comes from a file."""
OF_A_JOB: Final = (
    "model", "workers", "servers", "iterations", "consistency", "staleness", "seed", *OF_EMULATION,
)  # fmt: skip
Id = Annotated[
    str,
    typer.Option(
        help="The job's id; by default one is made. Submitting an id again changes nothing."
    ),
]
Program = Annotated[
    list[str] | None,
    typer.Argument(help="The command that each worker runs, after --, as its node finds it."),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        "--cwd",
        metavar="FOLDER",
        help="Run the program in this folder of its node; by default the present one.",
    ),
]
Model = Annotated[
    str | None, typer.Option(help="Emulate the training of this network, for example vgg19.")
]
File = Annotated[
    Path | None,
    typer.Option(help="Read the job from a JSON or TOML file; see `slackwater config sample job`."),
]
Processes = Annotated[int, typer.Option(min=1, max=64, help="Number of processes, one per rank.")]
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
        help="Restarts of ranks that die, in all; each continues at the job's iteration.",
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
Gpus = Annotated[
    int,
    typer.Option(
        min=0, max=GPUS_MAX,
        help="GPUs of the whole job, given all together; by default it has a process on each.",
    ),
]  # fmt: skip
GpusMin = Annotated[
    int, typer.Option(min=0, max=GPUS_MAX, help="The fewest GPUs that it can run on.")
]
GpusMax = Annotated[int, typer.Option(min=0, max=GPUS_MAX, help="The most GPUs that it can use.")]
GpuTypes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TYPE[=SPEED]",
        help="A type that it can run on, with its relative speed, as V100=2.5; may be repeated.",
    ),
]
CoresEach = Annotated[
    float, typer.Option(min=0, max=CORES_MAX, help="Cores of CPU that each process needs.")
]
MemoryEach = Annotated[str, typer.Option(help="Memory that each process needs, for example 8G.")]
Preferred = Annotated[
    int,
    typer.Option(
        min=-PRIORITY_MAX, max=PRIORITY_MAX,
        help="Priority; policies that use it prefer the higher.",
    ),
]  # fmt: skip
Batch = Annotated[
    str,
    typer.Option(
        metavar="MIN[:MAX]",
        help="Examples of one iteration over all processes, and up to how many it may grow.",
    ),
]
Adaptive = Annotated[
    bool, typer.Option("--adaptive/--fixed", help="Let its number of GPUs change while it runs.")
]
Preemptible = Annotated[
    bool,
    typer.Option(
        "--preemptible/--no-preemptible", help="Let a policy pause it in favour of other jobs."
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        "--grace", min=0, max=GRACE_S_MAX,
        help="Seconds from SIGTERM to SIGKILL, to save its state; 0: 30 for a pause, else the "
        "node's setting.",
    ),
]  # fmt: skip
Checkpoint = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="The folder in which its program saves checkpoints."),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=VALUE]",
        help="An environment variable of its program; without a value, yours. May be repeated.",
    ),
]
TimeLimit = Annotated[
    str,
    typer.Option(help="How long it may run, for example 90m; then it fails. By default no limit."),
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Print its logs until it ends, and exit with its exit code.")
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
    gpus: Gpus = 0,
    gpus_min: GpusMin = 0,
    gpus_max: GpusMax = 0,
    gpu_type: GpuTypes = None,
    cores: CoresEach = 0.0,
    memory: MemoryEach = "",
    priority: Preferred = 0,
    batch: Batch = "",
    adaptive: Adaptive = False,
    preemptible: Preemptible = True,
    grace_s: Grace = 0.0,
    checkpoint: Checkpoint = None,
    env: Env = None,
    time_limit: TimeLimit = "",
    url: Url = None,
    json: Json = False,
) -> None:
    """Submit a job, and return once it is stored.

    For example: `slackwater submit --workers 2 -- python train.py`. With --wait: once it has ended,
    with 0 if it completed, else with the exit code of the first rank that failed (1 where that is a
    signal, or the job was cancelled). Ctrl-C leaves it running.
    """
    options = {**locals()}
    with reported():
        spec = checked(_with_options(_asked(context, options), context, options))
    _store(spec, url, json, wait)


def _asked(context: typer.Context, options: Mapping[str, Any]) -> JobSpec:
    """Make the job of the file, the program or the model that is given. Raises Usage."""
    id, program, model = options["id"], options["program"], options["model"]
    if typed(context, "id"):
        an_id("--id", id)
    given = frozenset(name for name in OF_A_JOB if typed(context, name))
    shape = {name: options[name] for name in SHAPE}
    if options["gpus"] and not typed(context, "workers"):
        shape["workers"] = _a_process_each(options["gpus"])
    if options["file"] is not None:
        _refuse_beside("--file", given | ({"program"} if program else set()))
        return _named(read_job(options["file"]), id, options["file"])
    if program:
        _refuse_beside("-- PROGRAM", given & {*OF_EMULATION})
        return JobSpec(
            id=id or new_id(model, program), model=model or "", program=tuple(program),
            iterations=options["iterations"] or 1, **shape,
        )  # fmt: skip
    if model is None:
        raise Usage("nothing to submit: give --model NAME, --file FILE or -- PROGRAM")
    _refuse_of_programs(model, options["folder"], options["allow_fractional_share"])
    shape |= {"iterations": options["iterations"] or ITERATIONS, "compute_s": options["compute_s"]}
    return _emulated(id or new_id(model, None), model, bytes_scale=options["bytes_scale"], **shape)


def _a_process_each(gpus: int) -> int:
    if gpus > WORKERS_MAX:
        raise Usage(
            f"--gpus {gpus}: a job has at most {WORKERS_MAX} processes, so it cannot have one on "
            f"each; add --workers with a divisor of {gpus}"
        )
    return gpus


def _with_options(
    spec: JobSpec, context: typer.Context, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Replace what the file says by the options that are given."""
    fields = {name: options[name] for name in OF_ANY_JOB if typed(context, name)}
    if options["allow_fractional_share"]:
        fields["fractional_share"] = True
    if options["gpu_type"]:
        fields["gpu_types"] = gpu_types(options["gpu_type"])
    if options["memory"]:
        fields["memory_bytes"] = size_bytes(options["memory"], "--memory")
    if options["batch"]:
        fields |= batch_bounds(options["batch"])
    if options["env"]:
        fields["env"] = {**spec.env, **environment(options["env"], os.environ)}
    if options["time_limit"]:
        fields["time_limit_s"] = seconds(options["time_limit"], "--time-limit")
    if options["checkpoint"] is not None:
        fields["checkpoint"] = str(options["checkpoint"].absolute())
    if options["program"] or options["file"] is not None:
        fields["folder"] = _folder(spec, options["folder"])
    return {**msgspec.to_builtins(spec), **fields}


def environment(given: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """Parse NAME=VALUE, or NAME for the variable in `own`. Raises Usage."""
    found = {}
    for word in given:
        name, sign, value = word.partition("=")
        if re.fullmatch(ENV_NAME_PATTERN, name) is None or name.startswith(OWN_ENV):
            raise Usage(
                f"--env {shown(word)}: give NAME=VALUE, or NAME for your own value; a name has "
                f"letters, digits and _, and does not begin with {OWN_ENV}"
            )
        if not sign and name not in own:
            raise Usage(f"--env {name}: you have no such variable; give {name}=VALUE")
        found[name] = value if sign else own[name]
    return found


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


def checked(fields: Mapping[str, Any]) -> JobSpec:
    """Refuse options that the master would refuse, or that would do nothing. Raises Usage."""
    tenant, mode = fields.get("tenant", ""), fields.get("consistency", "synchronous")
    if len(tenant) > NAME_CHARS_MAX:
        raise Usage(
            f"--tenant: a name has at most {NAME_CHARS_MAX} characters, this one {len(tenant)}"
        )
    if fields.get("staleness") and mode != "stale-synchronous":
        raise Usage(
            f"--staleness {fields['staleness']}: a {mode} job has none; add --consistency "
            "stale-synchronous, or leave it out"
        )
    if fields.get("program") and not fields["program"][0].strip():
        raise Usage("-- PROGRAM: the program's name is empty; name what the workers run")
    try:
        return msgspec.convert(fields, JobSpec)
    except msgspec.ValidationError as error:
        raise Usage(explained(str(error), fields, JobSpec)) from error


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
