"""Why a job waits: the walk of `queues`, done once more slowly, with a sentence for each refusal.

The question most often asked of a production scheduler. The answer names the rule, the resource
that is lacking, and the earliest instant at which something is known to change.
"""

from math import inf
from typing import TYPE_CHECKING, Any

from slackwater.services.master.scheduling.policies.placement import Placer
from slackwater.services.master.scheduling.policies.room import Demand, Room, demand_of, type_held
from slackwater.services.master.scheduling.view import JobView, Pending, View

if TYPE_CHECKING:
    from slackwater.services.master.scheduling.policies.queues import QueuePolicy


def explain_queue(policy: "QueuePolicy", view: View, memory: Any) -> list[Pending]:
    """One reason for each pending job, in the policy's order; `view` shows the plan applied."""
    notes = memory.notes if memory is not None else policy.fresh_notes()
    room = Room(view.cluster, view.rules)
    room.borrowing = view.rules.borrowing
    change_s, protected_end_s = inf, inf
    for job in view.jobs.values():
        if job.allocation:
            room.take(type_held(job, view.cluster), job.held_gpus, job.tenant)
            change_s = min(change_s, policy.place(job, view.now_s, notes)[2])
            until_s = policy.protected_until_s(job, view)
            if until_s > view.now_s:
                protected_end_s = min(protected_end_s, until_s)
    change_s = min(change_s, policy.next_round_s(view))
    waiting = [job for job in view.jobs.values() if not job.allocation]
    order = {j.id: (*policy.place(j, view.now_s, notes)[:2], j.number) for j in waiting}
    waiting.sort(key=lambda j: order[j.id])
    head: dict[str, JobView] = {}
    answers = []
    for job in waiting:
        demand = demand_of(job, view.cluster, view.rules)
        first = head.setdefault(demand.tenant, job)
        if policy.strict and first is not job:
            answers.append(_behind(job, first))
        else:
            mode = policy.wants_consolidation(job, notes)
            answers.append(_reason(job, demand, room, view, mode, change_s, protected_end_s))
    return answers


def _behind(job: JobView, first: JobView) -> Pending:
    return Pending(
        job.id, "head-of-line", f"{job.gpus} GPUs", inf,
        f"waits behind job {first.id} ({first.gpus} GPUs), which does not fit and may not be "
        "passed",
    )  # fmt: skip


def _reason(
    job: JobView,
    demand: Demand,
    room: Room,
    view: View,
    mode: str,
    change_s: float,
    protected_end_s: float,
) -> Pending:
    gpus = demand.gpus
    free = max((room.free[kind] for kind in demand.types), default=0)
    lacking = f"{gpus} GPUs, {free} idle"
    if gpus > _up(demand, view):
        return Pending(
            job.id, "capacity", f"{gpus} GPUs, {_up(demand, view)} up", inf,
            f"asks for {gpus} GPUs while only {_up(demand, view)} it can use are up",
        )  # fmt: skip
    quota = view.rules.quotas.get(job.tenant, 0)
    used = room.used.get(job.tenant, 0)
    if view.rules.quotas and used + gpus > quota and (not view.rules.borrowing or free < gpus):
        return Pending(
            job.id, "quota", f"{gpus} GPUs of tenant {job.tenant}'s {quota}", inf,
            f"tenant {job.tenant} uses {used} of its {quota} GPUs, and "
            + ("none are idle to borrow" if view.rules.borrowing else "may not borrow"),
        )  # fmt: skip
    if free >= gpus:
        placer = Placer(view)
        kind = next((k for k in demand.types if room.free[k] >= gpus), 0)
        if mode == "require" and not placer.place(gpus, view.cluster.gpu_types[kind], mode):
            return Pending(
                job.id, "fragmentation", lacking, inf,
                "enough GPUs are idle, but not on the few machines it must have",
            )  # fmt: skip
        return Pending(
            job.id, "round", lacking, change_s, "fits, and starts when the policy next decides"
        )
    if protected_end_s < inf:
        return Pending(
            job.id, "protected", lacking, min(change_s, protected_end_s),
            "running jobs may not be preempted before their minimum run time is over",
        )  # fmt: skip
    return Pending(
        job.id, "order", lacking, change_s, "the GPUs it lacks are held by jobs that come before it"
    )


def _up(demand: Demand, view: View) -> int:
    names = {view.cluster.gpu_types[kind] for kind in demand.types}
    if len(view.cluster.gpu_types) == 1:
        return view.cluster.gpus
    up = dict.fromkeys(names, 0)
    for node in view.cluster.nodes:
        if node.gpu_type in up:
            up[node.gpu_type] += node.gpus
    return max(up.values(), default=0)
