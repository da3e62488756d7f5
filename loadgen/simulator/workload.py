"""The simulator's own job: a trace row brought to the simulator's terms, once, before the run."""

from collections.abc import Mapping
from typing import Any

import msgspec


class SimJob(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to be known about a job before it runs. Nothing here changes during a run.

    `duration_s` is the running time with `gpus` GPUs of the reference type, undisturbed: what the
    fixed model works off; models with a progress of their own ignore it (0 where a trace has none).
    """

    id: str
    number: int
    submit_s: float
    gpus: int
    duration_s: float
    gpus_min: int
    gpus_max: int
    model: str = ""
    tenant: str = ""
    priority: int = 0
    batch_size: int = 0
    skew: float = 0.0
    stages_s: tuple[float, ...] = ()
    """Measured stage times of an iteration (Muri: GPU, CPU, network or storage), if any."""
    iteration_s: float = 0.0
    iterations: int = 0
    speeds: Mapping[str, float] = msgspec.field(default_factory=dict)
    """GPU type -> speed relative to the reference; empty: every type alike."""
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """What the trace had beyond that, by column, for job models that know it."""
