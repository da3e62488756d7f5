"""`slackwater submit`: hand a job to the cluster."""

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import typer

from slackwater.cli import arrays
from slackwater.cli.job_file import JOB_FILE_ENDINGS, read_job
from slackwater.cli.show import with_client
from slackwater.cli.submit_options import (
    Adaptive,
    After,
    AfterAny,
    Aggregate,
    ArrayOf,
    Batch,
    BytesScale,
    ByTurns,
    Checkpoint,
    ComputeS,
    CoresEach,
    Env,
    File,
    Folder,
    Fractional,
    From,
    Gpus,
    GpusMax,
    GpusMin,
    GpuTypes,
    Grace,
    HangTimeout,
    Id,
    Iterations,
    JobFile,
    LossLimit,
    MemoryEach,
    Mode,
    Model,
    Preemptible,
    Preferred,
    Processes,
    Restarts,
    SaveDtype,
    SaveEvery,
    SaveFraction,
    SaveTo,
    Servers,
    Sharing,
    Staleness,
    Tenant,
    TimeLimit,
    Together,
    VenvFolder,
    Wait,
    Workdir,
    WorkersMax,
    WorkersMin,
)
from slackwater.cli.submit_wait import attend
from slackwater.cli.workdir import check_program, packed, packed_venv, within
from slackwater.client.packs import Sent, store
from slackwater.common.base import saved_program
from slackwater.common.base.checkpoint_folder import newest_of_buckets
from slackwater.common.base.errors import Rejected
from slackwater.common.shell.client import Client
from slackwater.common.shell.config import explained
from slackwater.console.after_dashes import CommandAfterDashes, after_dashes
from slackwater.console.durations import seconds
from slackwater.console.gpus import batch_bounds, gpu_types
from slackwater.console.names import new_id, policy_named, said
from slackwater.console.options import Json, Seed, Url
from slackwater.console.outcome import Usage, err, noted, out, print_json, reported
from slackwater.console.sizes import size_bytes
from slackwater.console.usage import an_id, shown, typed
from slackwater.loadgen.replay.workload import COMPUTE_S, emulated
from slackwater.schemas.base import NAME_CHARS_MAX, WORKERS_MAX
from slackwater.schemas.jobs import ENV_NAME_PATTERN, OWN_ENV, JobRecord, JobSpec

ITERATIONS: Final = 100
"""Iterations of an emulated job that is given no number."""
OF_EMULATION: Final = ("compute_s", "bytes_scale")
SHAPE: Final = ("workers", "servers", "seed", "consistency", "staleness")
OF_ANY_JOB: Final = (
    "tenant", "restarts", "loss_limit", "gpus", "gpus_min", "gpus_max", "within", "cores",
    "priority", "workers_min", "workers_max", "adaptive", "preemptible", "grace_s", "aggregate",
    "by_turns", "after_any",
)  # fmt: skip
"""Fields that have an option each, also for a job that comes from a file."""
OF_A_JOB: Final = (
    "model", "workers", "servers", "iterations", "consistency", "staleness", "seed", *OF_EMULATION,
)  # fmt: skip


def submit(
    context: typer.Context,
    id: Id = "",
    job_file: JobFile = None,
    folder: Folder = None,
    workdir: Workdir = None,
    venv: VenvFolder = None,
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
    aggregation: Sharing = "",
    aggregate: Aggregate = "auto",
    by_turns: ByTurns = False,
    seed: Seed = 0,
    wait: Wait = False,
    allow_fractional_share: Fractional = False,
    gpus: Gpus = 0,
    workers_min: WorkersMin = 0,
    workers_max: WorkersMax = 0,
    gpus_min: GpusMin = 0,
    gpus_max: GpusMax = 0,
    within: Together = "",
    gpu_type: GpuTypes = None,
    cores: CoresEach = 0.0,
    memory: MemoryEach = "",
    priority: Preferred = 0,
    after: After = None,
    after_any: AfterAny = False,
    array: ArrayOf = "",
    batch: Batch = "",
    adaptive: Adaptive = False,
    preemptible: Preemptible = True,
    grace_s: Grace = 0.0,
    checkpoint: Checkpoint = None,
    start_from: From = None,
    save_to: SaveTo = None,
    save_every: SaveEvery = "",
    save_fraction: SaveFraction = 1.0,
    save_dtype: SaveDtype = "float32",
    env: Env = None,
    time_limit: TimeLimit = "",
    hang_timeout: HangTimeout = "",
    url: Url = None,
    json: Json = False,
) -> None:
    """Submit a job, and return once it is stored.

    For example: `slackwater submit --gpus 2 -- python train.py`, or `slackwater submit a.yaml`."""
    with reported():
        jobs, sent = _made(context, {**locals()} | _what_runs(context, job_file or [], file))
    _store(jobs, sent, url, json, wait, bool(array))


submit.command_class = CommandAfterDashes  # type: ignore[attr-defined]


def _made(context: typer.Context, options: Mapping[str, Any]) -> tuple[list[JobSpec], Sent]:
    """Make the job, or those of its array, and pack what goes to the nodes. Raises Usage."""
    asked = _asked(context, options)
    sent = _sent(asked, options["workdir"], options["venv"])
    spec = checked(_with_options(asked, context, options, sent))
    array = options["array"]
    return (arrays.jobs(spec, arrays.parsed(array)) if array else [spec]), sent


def _what_runs(context: typer.Context, words: list[str], file: Path | None) -> dict[str, Any]:
    """Tell a job file, before --, from a command, after it. Raises Usage."""
    program = after_dashes(context)
    if program is not None and not program:
        raise Usage("nothing stands after --: give the command that each rank runs")
    if len(words) != 1 or Path(words[0]).suffix not in JOB_FILE_ENDINGS:
        if words:
            raise Usage(
                f"{shown(' '.join(words))} is not a job file, whose name ends in "
                f"{', '.join(JOB_FILE_ENDINGS)}; a command comes after --: slackwater submit -- "
                f"{shlex.join(words)}"
            )
    elif file is not None:
        raise Usage(f"{shown(words[0])} beside --file {file}: give one job file")
    else:
        file = Path(words[0])
        if not file.is_file():
            raise Usage(f"{shown(words[0])}: there is no such job file")
    return {"program": program, "file": file}


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
        beside = given | ({"program"} if program else set())
        _refuse_beside(str(options["file"]), beside)
        return _named(read_job(options["file"]), id, options["file"])
    if program:
        _refuse_beside("-- COMMAND", given & {*OF_EMULATION})
        return JobSpec(
            id=id or new_id(model, program), model=model or "", program=tuple(program),
            iterations=options["iterations"] or 1, **shape,
        )  # fmt: skip
    if model is None:
        raise Usage("nothing to submit: give -- COMMAND, JOB_FILE or --model NAME")
    _refuse_of_programs(model, options)
    shape |= {"iterations": options["iterations"] or ITERATIONS, "compute_s": options["compute_s"]}
    return _emulated(id or new_id(model, None), model, bytes_scale=options["bytes_scale"], **shape)


def _a_process_each(gpus: int) -> int:
    if gpus > WORKERS_MAX:
        raise Usage(
            f"--gpus {gpus}: a job has at most {WORKERS_MAX} processes, so it cannot have one on "
            f"each; add --workers with a divisor of {gpus}"
        )
    return gpus


def _sent(spec: JobSpec, workdir: Path | None, venv: Path | None) -> Sent:
    """Pack what goes to the nodes. Raises Usage."""
    if workdir is not None and not spec.program:
        raise Usage("--workdir: the job runs no program; give -- COMMAND, or leave it out")
    if venv is not None:
        check_program(spec, venv)
    return Sent(
        None if workdir is None else packed(workdir),
        None if venv is None else packed_venv(venv),
    )


def _with_options(
    spec: JobSpec, context: typer.Context, options: Mapping[str, Any], sent: Sent
) -> dict[str, Any]:
    """Replace what the file says by the options that are given."""
    fields = {name: options[name] for name in OF_ANY_JOB if typed(context, name)}
    if options["after"]:
        fields["after"] = list(options["after"])
    if options["allow_fractional_share"]:
        fields["fractional_share"] = True
    if options["aggregation"]:
        fields["aggregation"] = policy_named(options["aggregation"], "--aggregation")
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
    if options["hang_timeout"]:
        fields["hang_timeout_s"] = seconds(options["hang_timeout"], "--hang-timeout")
    if options["checkpoint"] is not None:
        fields["checkpoint"] = str(options["checkpoint"].absolute())
    names = ("save_to", "start_from")  # In a file, paths may begin where the user is.
    fields |= {n: str(Path(at).absolute()) for n in names if (at := getattr(spec, n))}
    fields |= saving(options, spec.save_to)
    if options["start_from"] is not None:
        fields["start_from"] = begun_with(options["start_from"])
    if sent.venv is not None:
        fields["venv"] = sent.venv.digest
    if sent.code is not None:
        fields |= {"code": sent.code.digest, "folder": within(options["folder"])}
    elif options["program"] or options["file"] is not None:
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


def saving(options: Mapping[str, Any], named: str = "") -> dict[str, Any]:
    """Return the fields of the options about how aggregators save a job; `named`: the folder that
    its file names. Raises Usage."""
    fields: dict[str, Any] = {}
    if options["save_to"] is not None:
        fields["save_to"] = str(options["save_to"].absolute())
    if options["save_every"]:
        fields["save_every_s"] = _save_every(options["save_every"])
    if options["save_fraction"] < 1.0:
        fields["save_fraction"] = options["save_fraction"]
    if options["save_dtype"] != "float32":
        fields["save_dtype"] = options["save_dtype"]
    if {"save_every_s", "save_fraction"} & fields.keys() and not (named or "save_to" in fields):
        raise Usage("--save-every and --save-fraction say how it is saved: add --save-to FOLDER")
    if fields.get("save_every_s") == 0.0 and "save_fraction" in fields:
        raise Usage(
            "--save-every auto saves all of it each time: leave --save-fraction out, or say how "
            "often, such as --save-every 5m"
        )
    return fields


def _save_every(text: str) -> float:
    """Return the seconds between two saves; 0: as the controller finds right. Raises Usage."""
    if text == "auto":
        return 0.0
    try:
        found = seconds(text, "--save-every")
    except Usage as error:
        raise Usage(f"{error}; or auto, as often as costs least") from error
    if not found:
        raise Usage(f"--save-every {text!r}: give a time, such as 5m, or auto")
    return found


def begun_with(folder: Path) -> str:
    """Return the folder of --from, absolute. One that is seen from here is looked into: aggregators
    say the rest. Raises Usage."""
    path = folder.absolute()
    path = saved_program.newest_mark(path) or path
    if path.is_dir():
        try:
            newest_of_buckets(path)
        except Rejected as error:
            raise Usage(f"--from: {error}") from error
    elif path.exists():
        raise Usage(f"--from {folder}: not a folder; name the one that `--out` had")
    return str(path)


def _folder(spec: JobSpec, given: Path | None) -> str:
    """Return the folder that a program runs in; a relative one begins where the user is."""
    return str((given or Path(spec.folder)).absolute()) if spec.program else ""


def _refuse_beside(what: str, ignored: Iterable[str]) -> None:
    names = sorted("-- COMMAND" if n == "program" else _option(n) for n in ignored)
    if names:
        raise Usage(f"{what} beside {', '.join(names)}: it says that itself; leave one out")


def _refuse_of_programs(model: str, options: Mapping[str, Any]) -> None:
    """Raises Usage for what changes nothing in an emulation."""
    for name in ("folder", "workdir", "venv"):
        if options[name] is not None:
            raise Usage(
                f"--{name} beside --model {model}: it runs no program of yours; leave it out"
            )
    if options["allow_fractional_share"]:
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
        raise Usage("-- COMMAND: the program's name is empty; name what the workers run")
    try:
        return msgspec.convert(fields, JobSpec)
    except msgspec.ValidationError as error:
        raise Usage(explained(str(error), fields, JobSpec)) from error


def _store(
    jobs: list[JobSpec], sent: Sent, url: str | None, json: bool, wait: bool, of_array: bool
) -> None:
    """Submit the job, or those of its array."""
    spec = jobs[0]
    if of_array:
        code = with_client(url, lambda client: arrays.submit(client, jobs, sent, wait, json))
        raise typer.Exit(code)
    if wait:
        ended = with_client(url, lambda client: _attended(client, spec, sent, json))
        if ended:
            raise typer.Exit(ended)
        return
    known = with_client(url, lambda client: _submitted(client, spec, sent))
    if json:
        print_json(spec)
    else:
        out.print(said(spec, known), markup=False, highlight=False, soft_wrap=True)


async def _submitted(client: Client, spec: JobSpec, sent: Sent) -> JobRecord | None:
    await store(client, sent, noted)
    return await client.submit(spec)


async def _attended(client: Client, spec: JobSpec, sent: Sent, json: bool) -> int:
    known = await _submitted(client, spec, sent)
    err.print(said(spec, known), markup=False)
    return await attend(client, spec, json)
