"""Every option of a simulation in one struct, as the manifest records it, and what `--set` says.

prepare.py reads the trace and makes the jobs of a run, build.py its other parts.
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeVar, get_args, get_origin

import msgspec

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

GENERATED = "generate:"
"""A trace argument that starts so names a generator, drawn by the seed, with its options:
`generate:tiresias`, `generate:lin,load=0.7`."""


Seconds = Annotated[float, msgspec.Meta(ge=0, le=limits.TRACE_SECONDS_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=limits.TRACE_GPUS_MAX)]


PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
    "pollux-artifact": {
        "nodes": 16, "gpus_per_node": 4, "job_model": "profiles", "start_s": 30.0,
        "restart_s": 30.0, "rebase": False,
    },
}  # fmt: skip
"""Options of published comparisons by name; what a user gives beside one wins."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`loadgen simulate`, every option with its default."""

    trace: str
    policies: tuple[str, ...] = ("tiresias-las",)
    nodes: Annotated[int, msgspec.Meta(ge=1, le=limits.TRACE_GPUS_MAX)] = 16
    gpus_per_node: Annotated[int, msgspec.Meta(ge=1, le=limits.TRACE_GPUS_MAX)] = 4
    racks: Annotated[int, msgspec.Meta(ge=1, le=limits.TRACE_GPUS_MAX)] = 1
    """Racks of machines: a job that finds no one machine is put into one rack if it can be."""
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
    # Choice of jobs
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
    stop_s: Seconds = 0
    """Seconds in which a job that loses its GPUs saves, and holds them."""
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
