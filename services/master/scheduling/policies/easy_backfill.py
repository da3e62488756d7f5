"""First come, first served, but jobs that delay nobody go first (EASY backfilling, Lifka 1995).

The first job that does not fit is promised the instant at which it starts if every running job
takes all the time it may: its reservation. A later job starts now if it fits beside the running
ones and either ends before that instant, or leaves room for the first job at that instant. So the
first job never starts later than it was promised, and GPUs that wait for its gang are used.

A job's time is its limit (`time_limit_s`); where a simulation knows durations and there is no
limit, its duration. A running job of which neither is known may run for ever: then the first job is
promised nothing, and nobody passes it.
"""

from collections.abc import Collection
from math import inf
from typing import Any, Final

from msgspec.structs import replace

from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.placement import Placer
from slackwater.services.master.scheduling.policies.queues import Queues
from slackwater.services.master.scheduling.policies.room import usable_types
from slackwater.services.master.scheduling.policies.sequences import Fifo
from slackwater.services.master.scheduling.registry import register
from slackwater.services.master.scheduling.rules import EVERY_RULE, Rule
from slackwater.services.master.scheduling.view import (
    NOTHING,
    Allocation,
    JobView,
    Pending,
    Plan,
    Rules,
    View,
)

_HONOURED: Final[frozenset[Rule]] = EVERY_RULE - {"quotas"}


@register("easy-backfill")
class EasyBackfill(Fifo):
    """Jobs start in order of submission; one passes the first if it does not delay it.

    Tenants' quotas hold by planning each tenant's part (`tenants`).
    """

    honours = _HONOURED
    divisible = True

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Queues]:
        plan, queues = super().allocate(view, memory)
        after = _Tentative(view, self.consolidate)
        for job_id, allocation in plan.allocations.items():
            after.start(view.jobs[job_id], allocation)
        if not after.idle:
            return plan, queues
        waiting = [job for job in self.in_order(view, queues) if not after.jobs[job.id].allocation]
        passed = after.pass_first(waiting) if len(waiting) > 1 else {}
        return replace(plan, allocations={**plan.allocations, **passed}), queues

    def explain(self, view: View, memory: Any) -> list[Pending]:
        found = super().explain(view, memory)
        if not found:
            return found
        first = found[0]
        promised_s, _ = _Tentative(view, self.consolidate).reservation(view.jobs[first.job])
        if promised_s == inf:
            why = "of which nobody knows when it starts, because a job that runs has no time limit"
        else:
            why = (
                f"which starts in {promised_s - view.now_s:g} s at the latest; this one does not "
                "fit, or would be in its way then"
            )
        return [
            replace(each, text=f"waits behind job {first.job}, {why}")
            if each.rule == "head-of-line"
            else each
            for each in found
        ]


def end_s(job: JobView, now_s: float, rules: Rules) -> float:
    """Return when the job ends at the latest if it runs on, or starts now; inf: nobody knows."""
    if job.limit_s < inf:
        return now_s + max(0.0, job.limit_s - job.run_s(now_s))
    if job.remaining_s_then == inf:
        return inf
    if job.allocation:
        begins_s = max(now_s, job.ready_s)
        return begins_s + (job.remaining_s(now_s) / job.speed if job.speed > 0.0 else inf)
    return now_s + _restart_s(job, rules) + job.remaining_s_then


def _restart_s(job: JobView, rules: Rules) -> float:
    """Return the seconds that pass before a job that is started now makes progress."""
    if job.first_start_s == inf:
        return 0.0
    return rules.restart_s if job.restart_s is None else job.restart_s


class _Tentative:
    """The cluster as it is with what was decided at this instant."""

    def __init__(self, view: View, mode: str) -> None:
        self.jobs, self._free = dict(view.jobs), list(view.free)
        self._view = replace(view, jobs=self.jobs, free=self._free)
        self._mode = mode

    @property
    def idle(self) -> int:
        return sum(self._free)

    def start(self, job: JobView, allocation: Allocation) -> None:
        now_s = self._view.now_s
        ready_s = now_s + _restart_s(job, self._view.rules)
        self.jobs[job.id] = replace(job.moved(allocation, now_s), speed=1.0, ready_s=ready_s)
        for node, gpus in allocation:
            self._free[node] -= gpus

    def _take_back(self, job: JobView) -> None:
        for node, gpus in self.jobs[job.id].allocation:
            self._free[node] += gpus
        self.jobs[job.id] = job

    def reservation(self, first: JobView) -> tuple[float, frozenset[JobId]]:
        """Return when the job starts at the latest, and who has ended by then. inf with somebody
        left: nobody knows; with nobody left: it is too large for what is up."""
        now_s, rules = self._view.now_s, self._view.rules
        running = sorted(
            (end_s(self._view.jobs[id], now_s, rules), job.number, id)
            for id, job in self.jobs.items()
            if job.allocation
        )
        ended: set[JobId] = set()
        for at, (at_s, _, id) in enumerate(running):
            if at_s == inf:
                return inf, frozenset(ended)
            ended.add(id)
            last = at + 1 == len(running) or running[at + 1][0] > at_s
            if last and self._place(first, ended):
                return at_s, frozenset(ended)
        return inf, frozenset(ended)

    def pass_first(self, waiting: list[JobView]) -> dict[JobId, Allocation]:
        """Start jobs behind the first of `waiting`, in order, that do not delay it; none before one
        of higher priority that is no larger."""
        first, *others = waiting
        running = sum(1 for job in self.jobs.values() if job.allocation)
        promised_s, ended = self.reservation(first)
        if promised_s == inf and len(ended) < running:
            return {}
        idle, passed = self.idle, dict[JobId, Allocation]()
        left_out: dict[int, int] = {}  # Priority -> the smallest such job that stays behind.
        for job in others:
            if not idle:
                break
            below = any(p > job.priority and gpus <= job.gpus for p, gpus in left_out.items())
            allocation = NOTHING if below or job.gpus > idle else self._place(job)
            if not allocation:
                left_out[job.priority] = min(left_out.get(job.priority, job.gpus), job.gpus)
                continue
            in_time = end_s(job, self._view.now_s, self._view.rules) <= promised_s
            self.start(job, allocation)
            if not in_time and not self._place(first, ended):
                self._take_back(job)
                left_out[job.priority] = min(left_out.get(job.priority, job.gpus), job.gpus)
                continue
            passed[job.id] = allocation
            idle -= job.gpus
            if in_time:
                ended = ended | {job.id}
        return passed

    def _place(self, job: JobView, ended: Collection[JobId] = ()) -> Allocation:
        """Place the job where these have ended; NOTHING: it does not fit."""
        types = self._view.cluster.gpu_types
        for kind in usable_types(job, self._view.cluster):
            found = Placer(self._view, ended).place_job(job, types[kind], self._mode)
            if found:
                return found
        return NOTHING
