"""GPUs of running jobs that compute nothing, which their nodes' drivers tell.

Pure. Nothing is done to such a job: it may wait for data, or its program may not use all that it
asked for. People are told once, by a fact and by the job's reason, until its GPUs compute again.
"""

from collections.abc import Iterator

from slackwater.common.base.effects import Count
from slackwater.schemas.base import NodeId
from slackwater.schemas.gpus import Gpu
from slackwater.services.master.jobs import Job
from slackwater.services.master.state import State


def watch(state: State, job: Job, now_s: float) -> None:
    """Find the GPUs of the job that have been idle for `idle_gpu_s`, and tell of the first."""
    idle = tuple(_idle(state, job, now_s))
    if idle and not job.idle_gpus:
        job.idle_gpus = idle
        state.tell(job, "gpus-idle", now_s, reason(job))
        state.out.append(Count("idle_gpus"))
    job.idle_gpus = idle


def reason(job: Job) -> str:
    """Say which GPUs of the job compute nothing; empty: none is known to."""
    if not job.idle_gpus:
        return ""
    named = [f"GPU {gpu.index} of {node}" for node, gpu in job.idle_gpus]
    more = f" and {len(named) - 4} more" if len(named) > 4 else ""
    minutes = min(gpu.idle_s for _, gpu in job.idle_gpus) / 60.0
    have = "has" if len(named) == 1 else "have"
    return (
        f"{', '.join(named[:4])}{more} {have} computed nothing for {minutes:.0f} min: its program "
        "waits, or does not use what it asked for"
    )


def _idle(state: State, job: Job, now_s: float) -> Iterator[tuple[NodeId, Gpu]]:
    record, limit_s = job.record, state.config.idle_gpu_s
    if not limit_s or record.state != "running" or now_s - record.since_s < limit_s:
        return
    for node, ids in sorted(record.gpu_ids.items()):
        if not state.nodes.silent(node, now_s):
            of = state.nodes.gpus_told(node)
            yield from ((node, gpu) for gpu in of if gpu.id in ids and gpu.idle_s >= limit_s)
