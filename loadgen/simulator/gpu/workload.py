"""A trace row brought to the simulator's terms, once, before the run: a job as users submit it, and
an oracle.

Whole seconds where the job model counts them: a submission is floored, a duration rounded and at
least one second (as public simulators have it, with `--overhead none`). Equal submissions
keep the trace's order, which is also every policy's last tie-breaker.
"""

from collections.abc import Mapping, Sequence
from math import floor
from typing import Any, Literal, cast

import msgspec
from msgspec.structs import replace

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected
from slackwater.loadgen.simulator.gpu.speeds import Speeds
from slackwater.loadgen.traces.record import TraceJob
from slackwater.schemas.jobs import JobSpec


class Oracle(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Facts of a job that nobody can tell before it has run, and that a trace recorded.

    `duration_s` is the running time with the GPUs that the job asks for, of the reference type,
    undisturbed: what the fixed model works off; models with a progress of their own ignore it (0
    where a trace has none).
    """

    duration_s: float = 0
    skew: float = 0.0
    """Largest tensor's share of the model."""
    stages_s: tuple[float, ...] = ()
    """Measured stage times of an iteration (Muri: GPU, CPU, network or storage), if any."""
    iteration_s: float = 0.0
    iterations: int = 0
    """Iterations that it ran for; 0: the trace does not say."""
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Further columns of the trace, by name, for job models that know them."""


class Submission(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job of the workload: what its user asks for, when, and the oracle. Nothing here changes
    during a run."""

    spec: JobSpec
    oracle: Oracle
    number: int
    submit_s: float


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
    speeds: Speeds | None = None,
    job_speeds: Speeds | None = None,
) -> list[Submission]:
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
        jobs.append(_submission(row, number, whole_seconds, priorities, by_type))
    return jobs


def _by_model(model: str, speeds: Speeds) -> dict[str, float]:
    return speeds.get(model, speeds.get("", {}))


def _submission(
    row: TraceJob,
    number: int,
    whole_seconds: bool,
    priorities: bool,
    speeds: dict[str, float],
) -> Submission:
    duration_s = row.duration_s or 0.0
    return Submission(
        spec=JobSpec(
            id=row.id,
            gpus=row.gpus,
            model=row.model,
            tenant=row.tenant,
            priority=_priority(row) if priorities else 0,
            batch_size=row.batch_size or 0,
            batch=_batch(row),
            gpu_types=speeds,
        ),
        oracle=Oracle(
            duration_s=max(1, round(duration_s)) if whole_seconds else duration_s,
            skew=SKEWS.get(row.model.lower(), 0.0),
            stages_s=tuple(row.stages_s.values()),
            iteration_s=row.iteration_s or 0.0,
            iterations=row.iterations or 0,
            extra=row.extra,
        ),
        number=number,
        submit_s=floor(row.submit_s) if whole_seconds else row.submit_s,
    )


def _batch(row: TraceJob) -> Literal["adaptive", "fixed"] | None:
    """Raises Rejected for another word."""
    text = str(row.extra.get("batch", "")).strip()
    if text not in ("", "adaptive", "fixed"):
        raise Rejected(
            f"job {row.id} has batch {text!r}; give adaptive or fixed, or leave it empty: then the "
            "policy says"
        )
    return cast("Literal['adaptive', 'fixed'] | None", text or None)


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


def resizable(job: Submission, most: int) -> Submission:
    """The same job, free to run on 1 to `most` GPUs and to change while it runs."""
    gpus = min(job.spec.gpus, most)
    spec = replace(job.spec, gpus=gpus, gpus_min=1, gpus_max=most, adaptive=True)
    return replace(job, spec=spec)


def any_size(jobs: Sequence[Submission]) -> list[Submission]:
    """The same jobs, free to run on any number of GPUs."""
    return [resizable(job, limits.TRACE_GPUS_MAX) for job in jobs]


def refuse_unfit(
    jobs: Sequence[Submission], up: Mapping[str, int], quotas: Mapping[str, int], borrowing: bool
) -> None:
    """Jobs in equal jobs out: one that can never run is refused by name before the run.

    `up` is the number of GPUs of each type with every node up.
    """
    for job in (each.spec for each in jobs):
        usable = {k: n for k, n in up.items() if not job.gpu_types or k in job.gpu_types}
        room, (least, _) = max(usable.values(), default=0), job.gpu_bounds
        if job.gpus < 1:
            raise Rejected(f"job {job.id} asks for {job.gpus} GPUs; leave such jobs out")
        if least > room:
            raise Rejected(
                f"job {job.id} asks for {least} GPUs of one type and the cluster has {room} "
                "that it can use; add nodes, or leave the job out (--max-gpus)"
            )
        if quotas and not borrowing and job.gpus > quotas.get(job.tenant, 0):
            raise Rejected(
                f"job {job.id} asks for {job.gpus} GPUs and its tenant {job.tenant!r} is limited "
                f"to {quotas.get(job.tenant, 0)} without borrowing; raise the quota or allow it"
            )
