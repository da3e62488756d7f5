"""Every option of a simulation in one struct: what the manifest records, and what a run is made of.

`prepare` reads the trace and makes the jobs; `build_*` make the parts of one run. Nothing here
depends on the clock, on the environment or on the order of processes.
"""

import inspect
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from random import Random
from typing import Annotated, Literal, TypeVar, get_args, get_origin

import msgspec

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.loadgen.generate import generate
from slackwater.loadgen.simulator.gpu.cluster import Cluster, parse_nodes
from slackwater.loadgen.simulator.gpu.failures import Failures
from slackwater.loadgen.simulator.gpu.interference import Slowdowns
from slackwater.loadgen.simulator.gpu.jobmodels.base import JobModel
from slackwater.loadgen.simulator.gpu.jobmodels.registry import make_model
from slackwater.loadgen.simulator.gpu.outcome import Costs, Scaling, Settings
from slackwater.loadgen.simulator.gpu.speeds import Speeds, gavel_speeds, read_speeds
from slackwater.loadgen.simulator.gpu.workload import SimJob, refuse_unfit, workload
from slackwater.loadgen.traces import Trace, read, seconds_after_origin, select
from slackwater.loadgen.traces.gavel import with_durations
from slackwater.loadgen.traces.record import TraceJob
from slackwater.services.master.scheduling import registry
from slackwater.services.master.scheduling.policies.colocation import Colocated
from slackwater.services.master.scheduling.view import Policy, Rules

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

GENERATED = "generate:"
"""A trace argument that starts so names a generator, drawn by the seed, with its options:
`generate:tiresias`, `generate:lin,load=0.7`."""


COLOCATION = ("colocate_gain", "colocate_stay")
"""What --set may say of a policy beside its own knobs: how much sharing must add to begin, to go
on."""
TIMED_MODELS = frozenset({"fixed", "interleaved"})
"""Job models whose work is the trace's duration."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=limits.TRACE_SECONDS_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=limits.TRACE_GPUS_MAX)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`loadgen simulate`, every option with its default."""

    trace: str
    policies: tuple[str, ...] = ("tiresias-las",)
    nodes: Annotated[int, msgspec.Meta(ge=1, le=limits.TRACE_GPUS_MAX)] = 16
    gpus_per_node: Annotated[int, msgspec.Meta(ge=1, le=limits.TRACE_GPUS_MAX)] = 4
    cluster: str = ""
    """Instead of the two above: "6x4:t4,2x8:dgx" for machines of several kinds."""
    overhead: Literal["full", "none"] = "full"
    """none: GPUs are only counted, preemption is free (as in public simulators)."""
    mode: Literal["rigid", "malleable", "moldable"] = "rigid"
    job_model: str = "fixed"
    settings: tuple[str, ...] = ()
    """--set policy.option=value (or job-model.option=value)."""
    seed: int = 0
    seeds: Annotated[int, msgspec.Meta(ge=1, le=limits.TRACE_SEEDS_MAX)] = 1
    """Runs of each policy: seed, seed + 1, ... Generated workloads, failures and the shake of
    submissions differ between them."""
    shake_s: Seconds = 60.0
    """With several seeds: submissions of all but the first run move by up to this, so that the
    interval shows what mere chance does to a result (input shaking)."""
    # Which jobs
    format: str = ""
    jobs: int = 0
    min_gpus: int = 0
    max_gpus: int = 0
    start: str = ""
    end: str = ""
    time_scale: float = 1.0
    rebase: bool = True
    priorities: bool = False
    """Take the trace's priority column (higher runs first)."""
    speeds: str = ""
    """A JSON file: model -> GPU type -> relative speed ("" for all other models)."""
    throughputs: str = ""
    """Gavel's measured steps per second by GPU type: durations on the reference type, and speeds
    on the others."""
    reference_gpu: str = "v100"
    # The world
    start_s: Seconds = 0
    restart_s: Seconds = 0
    restart_by_model: str = ""
    """model=seconds,... instead of restart_s for these models."""
    spread_slowdown: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0
    interference: Annotated[float, msgspec.Meta(ge=0, le=0.99)] = 0
    mtbf_s: Seconds = 0
    repair_s: Annotated[float, msgspec.Meta(ge=1, le=limits.TRACE_SECONDS_MAX)] = 3600
    checkpoint_s: Seconds = 0
    quotas: str = ""
    """tenant=GPUs,... or `equal` (the cluster shared out evenly among the trace's tenants)."""
    borrowing: bool = True
    min_run_s: Seconds = 0
    colocate: Count = 0
    """Up to so many jobs on the same GPUs; uses the job model `interleaved`."""
    nodes_max: Count = 0
    """Lets a policy that scales the cluster grow it to so many nodes."""
    provision_s: Seconds = 0
    why_at: tuple[Seconds, ...] = ()


class Prepared(msgspec.Struct):
    """The workload of one run."""

    jobs: list[SimJob]
    trace_sha256: str
    trace_format: str
    trace_rows: int
    skipped: dict[str, int]


def pairs(text: str, label: str) -> dict[str, float]:
    """ "a=1,b=2" as a mapping."""
    found: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if not name or not 0 <= found[name] <= limits.TRACE_SECONDS_MAX:
            raise ConfigRejected(f"{label}: {part!r} is not NAME=NUMBER, with a number from 0")
    return found


def settings_of(options: Options, name: str) -> dict[str, str]:
    """The --set values for one policy or job model."""
    known = {*options.policies, options.job_model}
    values: dict[str, str] = {}
    for text in options.settings:
        key, separator, value = text.partition("=")
        owner, dot, option = key.rpartition(".")
        if not separator or not dot:
            raise ConfigRejected(f"--set {text!r}: write POLICY.OPTION=VALUE")
        if owner not in known:
            raise ConfigRejected(
                f"--set {text!r}: {owner!r} is neither a policy of this run nor its job model "
                f"({', '.join(sorted(known))})"
            )
        if owner == name:
            values[option] = value
    return values


def settings_in(
    kind: type[_Struct], options: Options, owner: str, policy: str, own: Mapping[str, object]
) -> _Struct:
    """A pool's settings under a policy: defaults, the policy's `own`, `--set OWNER.x=...`, then
    `--set POLICY.x=...`. Raises ConfigRejected."""
    chosen = dict(own)
    for of in (owner, policy):
        for text in options.settings:
            key, separator, value = text.partition("=")
            found, dot, name = key.rpartition(".")
            if not separator or not dot or found not in (owner, *options.policies):
                raise ConfigRejected(
                    f"--set {text!r}: write OPTION as {owner}.NAME=VALUE, or POLICY.NAME=VALUE for "
                    f"a policy of this run ({', '.join(options.policies)})"
                )
            if found == of:
                chosen[name] = value
    try:
        return msgspec.convert(chosen, kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(_named(field) for field in msgspec.structs.fields(kind))
        raise ConfigRejected(f"--set for {policy}: {error}; options are {known}") from error


def _named(field: msgspec.structs.FieldInfo) -> str:
    choices = get_args(field.type) if get_origin(field.type) is Literal else ()
    return f"{field.name} ({'|'.join(choices)})" if choices else field.name


def read_trace(options: Options, seed: int) -> Trace:
    if options.trace.startswith(GENERATED):
        name, *given = options.trace[len(GENERATED) :].split(",")
        jobs = generate(name, seed, **dict(part.partition("=")[::2] for part in given))
        digest = f"generated by {name} with seed {seed}"
        return Trace(jobs=jobs, format="generated", sha256=digest, path=options.trace, origin_s=0)
    return read(Path(options.trace), options.format or None)


def selected(options: Options, trace: Trace) -> tuple[TraceJob, ...]:
    return select(
        trace.jobs,
        min_gpus=options.min_gpus,
        max_gpus=options.max_gpus or None,
        jobs=options.jobs or None,
        start_s=seconds_after_origin(options.start, trace) if options.start else None,
        end_s=seconds_after_origin(options.end, trace) if options.end else None,
        time_scale=options.time_scale,
        rebase=options.rebase,
    )


def prepare(options: Options, seed: int) -> Prepared:
    """The jobs of the run with this seed, each known to fit."""
    trace = read_trace(options, seed)
    if options.throughputs:
        trace = with_durations(trace, Path(options.throughputs), options.reference_gpu)
    rows = selected(options, trace)
    if seed != options.seed and options.shake_s and not options.trace.startswith(GENERATED):
        rows = _shaken(rows, options.shake_s, seed)
    model = build_model(options, seed)
    if model.name in TIMED_MODELS:
        _refuse_timeless(rows, trace)
    jobs = workload(
        rows,
        whole_seconds=model.integer_times,
        priorities=options.priorities,
        speeds=read_speeds(Path(options.speeds)) if options.speeds else None,
        job_speeds=_measured(options, rows),
    )
    cluster = build_cluster(options)
    if options.mode != "rigid":
        most = sum(cluster.sizes)
        jobs = [msgspec.structs.replace(job, gpus_min=1, gpus_max=most) for job in jobs]
    rules = build_rules(options, jobs)
    refuse_unfit(jobs, cluster.gpus_by_type(), rules.quotas, rules.borrowing)
    return Prepared(jobs, trace.sha256, trace.format, len(trace.jobs), dict(trace.skipped))


def _refuse_timeless(rows: Sequence[TraceJob], trace: Trace) -> None:
    for row in rows:
        if row.duration_s is None:
            raise Rejected(
                f"{trace.path}: job {row.id} has no duration (format {trace.format}); run it with "
                "a job model that finds one (--job-model profiles), or give measured speeds "
                "(--throughputs)"
            )


def _measured(options: Options, rows: Sequence[TraceJob]) -> Speeds | None:
    types = build_cluster(options).gpu_types
    if not options.throughputs or types == ("",):
        return None
    return gavel_speeds(Path(options.throughputs), rows, types, options.reference_gpu)


def _shaken(rows: tuple[TraceJob, ...], shake_s: float, seed: int) -> tuple[TraceJob, ...]:
    rng = Random(f"shake of seed {seed}")
    return tuple(
        msgspec.structs.replace(
            row, submit_s=max(0.0, row.submit_s + rng.uniform(-shake_s, shake_s))
        )
        for row in rows
    )


def build_cluster(options: Options) -> Cluster:
    nodes = (
        parse_nodes(options.cluster)
        if options.cluster
        else [(options.gpus_per_node, "")] * options.nodes
    )
    if options.overhead == "none":
        if len({kind for _, kind in nodes}) > 1:
            raise ConfigRejected(
                "--overhead none only counts GPUs, and this cluster has several types; "
                "leave one of the two out"
            )
        return Cluster([(sum(gpus for gpus, _ in nodes), nodes[0][1])])
    if 0 < options.nodes_max < len(nodes):
        raise ConfigRejected(
            f"--nodes-max {options.nodes_max} is below the {len(nodes)} nodes that there are"
        )
    if options.nodes_max > len(nodes):
        first = len(nodes)
        return Cluster(nodes + [nodes[0]] * (options.nodes_max - first), up=first)
    return Cluster(nodes)


def build_rules(options: Options, jobs: Sequence[SimJob]) -> Rules:
    quotas: dict[str, int] = {}
    if options.quotas == "equal":
        tenants = sorted({job.tenant for job in jobs})
        total = sum(build_cluster(options).sizes)
        share, rest = divmod(total, len(tenants))
        quotas = {tenant: share + (i < rest) for i, tenant in enumerate(tenants)}
    elif options.quotas:
        quotas = {k: int(v) for k, v in pairs(options.quotas, "--quotas").items()}
        _refuse_strangers("--quotas", "tenant", quotas, {job.tenant for job in jobs})
    return Rules(quotas, options.borrowing, options.min_run_s, options.restart_s)


def _refuse_strangers(option: str, kind: str, named: Mapping[str, object], known: set[str]) -> None:
    """A name that no job has is a slip, and would be ignored in silence."""
    strange = sorted(set(named) - known)
    if strange:
        some = ", ".join(map(repr, sorted(known)[:8]))
        more = f" and {len(known) - 8} more" if len(known) > 8 else ""
        raise ConfigRejected(
            f"{option}: no job has the {kind} {strange[0]!r}; there are {some}{more}"
        )


def build_settings(options: Options, jobs: Sequence[SimJob], seed: int) -> Settings:
    free = options.overhead == "none"
    if free and (options.restart_s or options.start_s or options.restart_by_model):
        raise ConfigRejected("--overhead none makes restarts free; leave the restart costs out")
    if free and (options.spread_slowdown or options.interference or options.mtbf_s):
        raise ConfigRejected(
            "--overhead none only counts GPUs, and knows no machines to be spread over or to "
            "fail; leave --spread-slowdown, --interference and --mtbf-s out"
        )
    scaling = None
    if options.nodes_max:
        scaling = Scaling(1, options.nodes_max, options.provision_s)
    by_model = pairs(options.restart_by_model, "--restart-by-model")
    _refuse_strangers("--restart-by-model", "model", by_model, {job.model for job in jobs})
    return Settings(
        rules=build_rules(options, jobs),
        costs=Costs(
            _whole(options.start_s),
            _whole(options.restart_s),
            {k: _whole(v) for k, v in by_model.items()},
        ),
        slowdowns=Slowdowns(spread=options.spread_slowdown, interference=options.interference),
        failures=Failures(options.mtbf_s, options.repair_s, options.checkpoint_s, seed),
        scaling=scaling,
        ask_why_s=options.why_at,
    )


def _whole(value: float) -> float:
    """An integer where it is one, so that integer instants stay integers."""
    return int(value) if value == int(value) else value


def build_policy(options: Options, name: str) -> Policy:
    values = settings_of(options, name)
    knobs = registry.options_of(name)
    if options.mode != "rigid" and "mode" in knobs:
        values.setdefault("mode", options.mode)
    own = {k: values.pop(k) for k in COLOCATION if k in values and k not in knobs}
    sharing = {k.removeprefix("colocate_"): _share(f"{name}.{k}", v) for k, v in own.items()}
    if own and options.colocate < 2:
        key, value = next(iter(own.items()))
        raise ConfigRejected(
            f"--set {name}.{key}={value} says when jobs share GPUs, and with --colocate "
            f"{options.colocate} none do; add --colocate 2, or leave it out"
        )
    policy = registry.make(name, values)
    if options.nodes_max and not getattr(policy, "scale", False):
        raise ConfigRejected(
            f"--nodes-max {options.nodes_max} is for a policy that scales the cluster, and {name} "
            "does not; add --set pollux.scale=true, or leave it out"
        )
    if options.colocate > 1:
        if options.quotas or len(build_cluster(options).gpu_types) > 1:
            raise ConfigRejected("--colocate knows neither quotas nor several GPU types")
        return Colocated(policy, ways=options.colocate, **sharing)
    return policy


def _share(label: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < inf:
        raise ConfigRejected(f"--set {label}={text}: give a share of at least 0, such as 0.1")
    return share


def build_model(options: Options, seed: int) -> JobModel:
    name = options.job_model
    if options.colocate > 1 and name == "fixed":
        name = "interleaved"
    return make_model(name, settings_of(options, options.job_model), seed)


def policy_knobs(name: str, options: Options) -> dict[str, object]:
    """Every knob of a policy as it runs: defaults, overridden."""
    knobs = {k: v for k, v in registry.options_of(name).items() if v is not inspect.Parameter.empty}
    return {**knobs, **settings_of(options, name)}
