"""The simulator's own job: a trace row brought to the simulator's terms, once, before the run.

Whole seconds where the job model counts them: a submission is floored, a duration rounded and at
least one second (as public simulators have it, with `--overhead none`). Equal submissions
keep the trace's order, which is also every policy's last tie-breaker.
"""

from collections.abc import Mapping, Sequence
from math import floor
from typing import Any

import msgspec

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected
from slackwater.loadgen.traces.record import TraceJob


class SimJob(msgspec.Struct, frozen=True, kw_only=True):
    """The facts known about a job before it runs. Nothing here changes during a run.

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
    """Further columns of the trace, by name, for job models that know them."""

    @property
    def needs_host(self) -> bool:
        """Traces say nothing of processor cores and main memory."""
        return False


SKEWS: Mapping[str, float] = {
    "vgg19": 0.715, "vgg16": 0.743, "vgg11": 0.773, "alexnet": 0.61, "resnet152": 0.039,
    "resnet101": 0.053, "resnet50": 0.092, "inception4": 0.036, "inception3": 0.086,
    "googlenet": 0.146,
}  # fmt: skip
"""Largest tensor's share of the model: Tiresias table 3.3. Other models count as not skewed."""


def workload(
    rows: Sequence[TraceJob],
    *,
    whole_seconds: bool = True,
    priorities: bool = False,
    speeds: Mapping[str, Mapping[str, float]] | None = None,
    job_speeds: Mapping[str, Mapping[str, float]] | None = None,
) -> list[SimJob]:
    """The trace's jobs, numbered by submission. `speeds`: model -> GPU type -> relative speed
    (the key "" is for all other models); `job_speeds` the same by job id, and first. `priorities`:
    take the trace's `priority` column."""
    ordered = sorted(rows, key=lambda row: row.submit_s)
    seen: set[str] = set()
    jobs = []
    for number, row in enumerate(ordered):
        if row.id in seen:
            raise Rejected(f"two jobs are called {row.id!r}; give each job an id of its own")
        seen.add(row.id)
        by_type = (job_speeds or {}).get(row.id) or _by_model(row.model, speeds or {})
        jobs.append(_sim_job(row, number, whole_seconds, priorities, by_type))
    return jobs


def _by_model(model: str, speeds: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
    return speeds.get(model, speeds.get("", {}))


def _sim_job(
    row: TraceJob,
    number: int,
    whole_seconds: bool,
    priorities: bool,
    speeds: Mapping[str, float],
) -> SimJob:
    duration_s = row.duration_s or 0.0
    model = row.model.lower()
    return SimJob(
        id=row.id,
        number=number,
        submit_s=floor(row.submit_s) if whole_seconds else row.submit_s,
        gpus=row.gpus,
        duration_s=max(1, round(duration_s)) if whole_seconds else duration_s,
        gpus_min=row.gpus,
        gpus_max=row.gpus,
        model=row.model,
        tenant=row.tenant,
        priority=_priority(row) if priorities else 0,
        batch_size=row.batch_size or 0,
        skew=SKEWS.get(model, 0.0),
        stages_s=tuple(row.stages_s.values()),
        iteration_s=row.iteration_s or 0.0,
        iterations=row.iterations or 0,
        speeds=speeds,
        extra=row.extra,
    )


def _priority(row: TraceJob) -> int:
    """Raises Rejected for text and for fractions, which would be cut off in silence."""
    text = str(row.extra.get("priority", "0"))
    try:
        value = float(text)
        if value == int(value):
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise Rejected(
        f"job {row.id} has priority {text!r}; give whole numbers (higher runs first), or leave "
        "--priorities out"
    )


def any_size(jobs: Sequence[SimJob]) -> list[SimJob]:
    """The same jobs, free to run on any number of GPUs."""
    most = limits.TRACE_GPUS_MAX
    return [msgspec.structs.replace(job, gpus_min=1, gpus_max=most) for job in jobs]


def refuse_unfit(
    jobs: Sequence[SimJob], up: Mapping[str, int], quotas: Mapping[str, int], borrowing: bool
) -> None:
    """Jobs in equal jobs out: one that can never run is refused by name before the run.

    `up` is the number of GPUs of each type with every node up.
    """
    for job in jobs:
        usable = {k: n for k, n in up.items() if not job.speeds or k in job.speeds}
        room = max(usable.values(), default=0)
        if job.gpus < 1:
            raise Rejected(f"job {job.id} asks for {job.gpus} GPUs; leave such jobs out")
        if job.gpus_min > room:
            raise Rejected(
                f"job {job.id} asks for {job.gpus} GPUs of one type and the cluster has {room} "
                "that it can use; add nodes, or leave the job out (--max-gpus)"
            )
        if quotas and not borrowing and job.gpus > quotas.get(job.tenant, 0):
            raise Rejected(
                f"job {job.id} asks for {job.gpus} GPUs and its tenant {job.tenant!r} is limited "
                f"to {quotas.get(job.tenant, 0)} without borrowing; raise the quota or allow it"
            )
