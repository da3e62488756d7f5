"""Optimus with an oracle (Peng et al., EuroSys'18; as Pollux's evaluation ran it, thesis 3.5.1).

Sizes adapt, batches do not. At every round each job gets one GPU in order of submission, and then
GPUs go one by one to whom one more saves most time:

    gain_j(k) = (iteration time on k GPUs - on k + 1) x iterations left

The published Optimus fits both factors online and assumes parameter servers; here, as in that
evaluation, both come from an oracle: `job.profile.iteration_s(k)` on full machines and
`job.profile.remaining_iterations`. Whose size stays keeps its GPUs; the others are placed in order
of size, each on the emptiest machines.
"""

from heapq import heapify, heapreplace
from math import floor, inf
from typing import Any, Protocol

from slackwater.common.base.errors import Rejected
from slackwater.services.master.scheduling.policies.placement import Placer
from slackwater.services.master.scheduling.registry import Period, register
from slackwater.services.master.scheduling.rules import Rule
from slackwater.services.master.scheduling.view import (
    NOTHING,
    Allocation,
    JobView,
    Pending,
    Plan,
    View,
)


class OracleProfile(Protocol):
    """The interface that `job.profile` must offer."""

    @property
    def remaining_iterations(self) -> float: ...
    def iteration_s(self, gpus: int) -> float: ...


@register("optimus")
class Optimus:
    elastic = True
    """Jobs may run on any number of GPUs between their bounds."""
    divisible = True
    honours = frozenset[Rule]({"min_run_s"})

    def __init__(self, round_s: Period = 60) -> None:
        self.round_s = round_s

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
        tick_s = floor(view.now_s / self.round_s) * self.round_s
        next_s = tick_s + self.round_s if view.jobs else inf
        if tick_s != view.now_s:
            return Plan(next_decision_s=next_s), True
        kept = [job for job in view.jobs.values() if view.rules.protects(job, view.now_s)]
        jobs = sorted(
            (job for job in view.jobs.values() if not view.rules.protects(job, view.now_s)),
            key=lambda job: job.number,
        )
        sizes = _sizes(jobs, view.cluster.gpus - sum(job.held_gpus for job in kept))
        return Plan(_place(view, jobs, sizes), next_decision_s=next_s), True

    def explain(self, view: View, memory: Any) -> list[Pending]:
        tick_s = (floor(view.now_s / self.round_s) + 1) * self.round_s
        free = sum(view.free)
        return [
            Pending(
                job.id,
                "round" if free else "capacity",
                f"1 GPU, {free} idle",
                tick_s,
                "every job gets one GPU in order of submission, decided at rounds",
            )
            for job in sorted(view.jobs.values(), key=lambda job: job.number)
            if not job.allocation
        ]


def _profile(job: JobView) -> OracleProfile:
    if not hasattr(job.profile, "remaining_iterations"):
        raise Rejected(
            f"optimus needs the iteration times of job {job.id}; run it with a job model that "
            "knows them (profiles)"
        )
    profile: OracleProfile = job.profile
    return profile


def _sizes(jobs: list[JobView], gpus: int) -> list[int]:
    sizes = [1 if i < gpus else 0 for i in range(len(jobs))]
    left = gpus - sum(sizes)
    if left <= 0:
        return sizes
    profiles = [_profile(job) for job in jobs]

    def gain(i: int) -> float:
        if sizes[i] + 1 > jobs[i].gpus_max:
            return 0.0
        before, after = (profiles[i].iteration_s(k) for k in (sizes[i], sizes[i] + 1))
        return (before - after) * profiles[i].remaining_iterations

    heap = [(-gain(i), i) for i in range(len(jobs))]
    heapify(heap)
    while left > 0 and heap and heap[0][0] < 0:
        i = heap[0][1]
        sizes[i] += 1
        left -= 1
        heapreplace(heap, (-gain(i), i))
    return sizes


def _place(view: View, jobs: list[JobView], sizes: list[int]) -> dict[Any, Allocation]:
    placer = Placer(view)
    changes: dict[Any, Allocation] = {}
    starts: list[tuple[int, JobView]] = []
    for job, size in zip(jobs, sizes, strict=True):
        if size == job.held_gpus:
            continue
        placer.give_back(job.allocation)
        if size:
            starts.append((size, job))
        else:
            changes[job.id] = NOTHING
    for size, job in sorted(starts, key=lambda start: start[0]):
        changes[job.id] = placer.place(size, mode="emptiest")
    return changes
