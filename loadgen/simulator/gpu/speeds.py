"""How fast a job is on each type of GPU: measured tables brought to `JobSpec.gpu_types`.

Two sources: a JSON of our own (model -> GPU type -> relative speed, "" for all other models), and
Gavel's `simulation_throughputs.json` (GPU type -> "('job type', GPUs)" -> steps per second alone).
A type on which a job was not measured cannot run it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.traces.record import TraceJob

Speeds = dict[str, dict[str, float]]
"""Job id or model -> GPU type -> speed relative to the reference type."""


def read_speeds(path: Path) -> Speeds:
    """Our own format: by model."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Speeds)
    except (OSError, msgspec.DecodeError) as error:
        raise Rejected(f"{path}: expected model -> GPU type -> speed as JSON ({error})") from error
    for model, by_type in found.items():
        for kind, speed in by_type.items():
            if not speed > 0:
                raise Rejected(f"{path}: {model} on {kind} has speed {speed}; give one above 0")
    return found


def gavel_speeds(path: Path, rows: Iterable[TraceJob], types: Iterable[str], ref: str) -> Speeds:
    """Return speeds by job id, relative to the GPU type `ref` (which the durations are measured
    on)."""
    try:
        table: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise Rejected(f"{path}: expected Gavel's throughput table ({error})") from error
    kinds = sorted(set(types))
    missing = [kind for kind in [ref, *kinds] if not isinstance(table.get(kind), Mapping)]
    if missing:
        raise Rejected(f"{path}: no GPU type {missing[0]!r}; it has: {', '.join(table)}")
    speeds: Speeds = {}
    for row in rows:
        key = repr((row.extra.get("job_type", row.model), row.gpus))
        rates = {kind: table[kind].get(key, {}).get("null", 0) for kind in {ref, *kinds}}
        if not rates[ref] > 0:
            raise Rejected(f"{path}: no throughput of {key} on {ref}, which job {row.id} needs")
        speeds[row.id] = {kind: rates[kind] / rates[ref] for kind in kinds if rates[kind] > 0}
    return speeds
