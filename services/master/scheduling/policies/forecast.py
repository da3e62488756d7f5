"""When each waiting job starts if nothing arrives, ends or fails until then.

The policy itself is asked again, at every instant that it names (a demotion, a round, the end of a
minimum run time), and its plans are carried out on a copy of the view. So what `explain` says of an
instant is what the policy does then.
"""

from collections.abc import Iterable
from math import inf
from typing import Any

from msgspec.structs import replace

from slackwater.common.base import limits
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.view import JobView, Plan, Policy, View


def forecast(policy: Policy, view: View, memory: Any, next_s: float) -> dict[JobId, float]:
    """Job -> the instant at which it starts, from `next_s` on, where the policy decides next. Left
    out: a job that needs an arrival, an end or a repair, or more than FORECAST_DECISIONS_MAX
    decisions. `memory` is used up."""
    jobs, free = dict(view.jobs), list(view.free)
    waiting = {job.id for job in jobs.values() if not job.allocation}
    starts: dict[JobId, float] = {}
    changed: tuple[JobId, ...] = ()
    for _ in range(limits.FORECAST_DECISIONS_MAX):
        if next_s == inf or waiting <= starts.keys():
            break
        now = replace(view, now_s=next_s, jobs=jobs, free=free, changed=changed)
        plan, memory = policy.allocate(now, memory)
        for job_id in _carry_out(plan, now, jobs, free):
            starts.setdefault(job_id, next_s)
        next_s, changed = plan.next_decision_s, tuple(plan.allocations)
    return starts


def _carry_out(
    plan: Plan, view: View, jobs: dict[JobId, JobView], free: list[int]
) -> Iterable[JobId]:
    started = []
    for job_id, allocation in plan.allocations.items():
        job = jobs[job_id]
        for node, gpus in job.allocation:
            free[node] += gpus
        for node, gpus in allocation:
            free[node] -= gpus
        restart_s = view.rules.restart_s if job.restart_s is None else job.restart_s
        delay_s = restart_s if job.first_start_s < inf else 0.0
        jobs[job_id] = replace(
            job.moved(allocation, view.now_s), speed=1.0, ready_s=view.now_s + delay_s
        )
        if allocation and not job.allocation:
            started.append(job_id)
    return started
