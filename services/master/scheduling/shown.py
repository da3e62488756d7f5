"""A job as policies see it, made of what its user asks for.

The live master and the simulator both show it so, and add what happens to it afterwards.
"""

from math import inf

from slackwater.schemas.base import JobId
from slackwater.schemas.jobs import JobSpec
from slackwater.services.master.gangs import lies_anywhere
from slackwater.services.master.scheduling.view import JobView


def shown(
    spec: JobSpec,
    number: int,
    submitted_s: float,
    *,
    skew: float = 0.0,
    restart_s: float | None = None,
) -> JobView:
    """Show a job that has not run yet. Without GPUs it asks for a slot for each process.

    `skew` and `restart_s` are known of its application, or they are not (see JobView).
    """
    least, most = size_bounds(spec, 0)
    each = spec.gpus_each or 1
    return JobView(
        id=JobId(spec.id),
        number=number,
        submitted_s=submitted_s,
        gpus=spec.gpus or spec.workers,
        gpus_min=least,
        gpus_max=most,
        model=spec.model,
        tenant=spec.tenant,
        priority=spec.priority,
        batch_size=spec.batch_size,
        skew=skew,
        speeds=spec.gpu_types,
        cores=spec.cores / each,
        memory_bytes=spec.memory_bytes // each,
        limit_s=spec.time_limit_s or inf,
        within=spec.within,
        anywhere=lies_anywhere(spec),
        one_each=spec.by_turns and lies_anywhere(spec),
        restart_s=restart_s,
    )


def size_bounds(spec: JobSpec, held: int) -> tuple[int, int]:
    """Return the fewest and the most GPUs (or slots) that a job which holds so many may be given: a
    job that is not adaptive keeps the number that it was started with."""
    if held and not spec.adaptive:
        return held, held
    least, most = spec.gpu_bounds
    return least or spec.workers, most or spec.workers
