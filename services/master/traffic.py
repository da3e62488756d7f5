"""Keep what is known best of a job's traffic: iterations, bytes, sizes, skew.

Pure. The tensors that an Agent registers are exact and cost nothing; what worker services see of
other jobs is trusted by the way it was seen (schemas/traffic.py), and kept where it says more than
what is known, or otherwise. The skew decides how Tiresias places the job (section 3.3.3).
"""

from math import prod
from typing import Final

from slackwater.schemas import subjects
from slackwater.schemas.job_states import HOLDING_STATES
from slackwater.schemas.tensors import TensorSpec
from slackwater.schemas.traffic import SIZES_MAX, TRUST, JobTraffic, TrafficObserved
from slackwater.services.master.gangs import processes
from slackwater.services.master.state import State

ELEMENT_BYTES: Final = 4
"""Parameters are float32."""
SAME: Final = 1e-3
"""Figures that differ by a smaller part are the same."""
MORE: Final = 2
"""A record is written again once so many times as many iterations were seen."""


def take(state: State, report: TrafficObserved, subject: str, now_s: float) -> None:
    """Keep a worker service's report if it is of the job's attempt, and says more."""
    job = state.jobs.get(report.job)
    if job is None or subject != subjects.telemetry("job", report.job, "traffic"):
        return
    record, found = job.record, report.traffic
    if record.state not in HOLDING_STATES or report.attempt != record.attempt:
        return
    if found.rank >= processes(record) or found.by == "agent" or not better(record.traffic, found):
        return
    skew = record.skew
    if record.spec.gpus and found.skew:
        skew = found.skew
    state.change(job, now_s, traffic=found, skew=skew)


def better(known: JobTraffic | None, found: JobTraffic) -> bool:
    """Say whether what was found is to replace what is known."""
    if known is None:
        return True
    ranks = [(one.skew > 0.0, TRUST.index(one.by), -one.rank) for one in (found, known)]
    if ranks[0] != ranks[1]:
        return ranks[0] > ranks[1]
    if known.by == "agent":
        return found != known
    apart = abs(found.bytes_per_iteration - known.bytes_per_iteration)
    return (
        apart > SAME * known.bytes_per_iteration
        or abs(found.skew - known.skew) > SAME
        or found.sizes != known.sizes
        or found.windows != known.windows
        or found.iterations >= MORE * known.iterations
    )


def registered(tensors: tuple[TensorSpec, ...]) -> JobTraffic:
    """Describe a job by the tensors that its Agents registered."""
    sizes = sorted((ELEMENT_BYTES * prod(each.shape) for each in tensors), reverse=True)
    total = sum(sizes)
    return JobTraffic(
        by="agent",
        kind="tensors",
        bytes_per_iteration=total,
        sizes_bytes=tuple(sizes[:SIZES_MAX]),
        sizes=len(sizes),
        skew=max(sizes, default=0) / max(1, total),
    )
