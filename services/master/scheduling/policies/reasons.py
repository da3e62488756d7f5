"""Why a job waits: the walk of `queues`, done once more slowly, with a sentence for each refusal.

The question most often asked of a production scheduler. The answer names the rule, the resource
that is lacking, and the instant at which the job starts if nothing arrives, ends or fails until
then (see `forecast`). A job is said to wait for a minimum run time only where it would start now
without one.
"""

from copy import deepcopy
from math import inf
from typing import Any

from msgspec.structs import replace

from slackwater.common.base.words import number_of
from slackwater.services.master.scheduling.policies.forecast import forecast
from slackwater.services.master.scheduling.policies.order import Explained
from slackwater.services.master.scheduling.policies.placement import Placer
from slackwater.services.master.scheduling.policies.queue_index import Queues
from slackwater.services.master.scheduling.policies.room import Demand, Room, demand_of, type_held
from slackwater.services.master.scheduling.view import JobView, Pending, View


def explain_queue(policy: Explained, view: View, memory: Any) -> list[Pending]:
    """One reason for each pending job, in the policy's order; `view` shows the plan applied."""
    waiting = [job for job in view.jobs.values() if not job.allocation]
    if not waiting:
        return []

    def notes() -> Any:
        return policy.fresh_notes() if memory is None else deepcopy(memory.notes)

    known, protected_end_s = notes(), inf
    room = Room(view.cluster, view.rules)
    room.borrowing = view.rules.borrowing
    for job in view.jobs.values():
        if job.allocation:
            room.take(type_held(job, view.cluster), job.held_gpus, job.tenant)
            until_s = policy.protected_until_s(job, view)
            if until_s > view.now_s:
                protected_end_s = min(protected_end_s, until_s)
    whole = replace(view, changed=None)
    queues = policy.update(whole, Queues(notes()))
    next_s = policy.next_s(view, queues, {}, protected_end_s)
    if memory is not None:  # Queues made anew show a demotion that the policy has yet to make.
        next_s = max(view.now_s, min(next_s, memory.next_due_s()))
    starts = forecast(policy, view, queues, next_s)
    unprotected = replace(whole, rules=replace(view.rules, min_run_s=0))
    at_once = policy.allocate(unprotected, Queues(notes()))[0].allocations
    order = {j.id: (*policy.place(j, view.now_s, known)[:2], j.number) for j in waiting}
    waiting.sort(key=lambda j: order[j.id])
    head: dict[str, JobView] = {}
    answers = []
    for job in waiting:
        demand = demand_of(job, view.cluster, view.rules)
        first = head.setdefault(demand.tenant, job)
        start_s = starts.get(job.id, inf)
        if policy.strict and first is not job:
            answers.append(_behind(job, first, start_s))
        else:
            mode = policy.wants_consolidation(job, known)
            protected = view.rules.min_run_s > 0 and bool(at_once.get(job.id))
            answers.append(_reason(job, demand, room, view, mode, start_s, protected))
    return answers


def _behind(job: JobView, first: JobView, start_s: float) -> Pending:
    return Pending(
        job.id, "head-of-line", number_of(job.gpus, "GPU"), start_s,
        f"waits behind job {first.id} ({number_of(first.gpus, 'GPU')}), which does not fit and "
        "may not be passed",
    )  # fmt: skip


def _reason(
    job: JobView,
    demand: Demand,
    room: Room,
    view: View,
    mode: str,
    start_s: float,
    protected: bool,
) -> Pending:
    gpus = demand.gpus
    free = max((room.free[kind] for kind in demand.types), default=0)
    asked = number_of(gpus, "GPU")
    lacking = f"{asked}, {free} idle"
    if gpus > _up(demand, view):
        return Pending(
            job.id, "capacity", f"{asked}, {_up(demand, view)} up", inf,
            f"asks for {asked} while only {_up(demand, view)} it can use are up",
        )  # fmt: skip
    quota = view.rules.quotas.get(job.tenant, 0)
    used = room.used.get(job.tenant, 0)
    if view.rules.quotas and used + gpus > quota and (not view.rules.borrowing or free < gpus):
        return Pending(
            job.id, "quota", f"{asked} of tenant {job.tenant}'s {quota}", start_s,
            f"tenant {job.tenant} uses {used} of its {number_of(quota, 'GPU')}, and "
            + ("none are idle to borrow" if view.rules.borrowing else "may not borrow"),
        )  # fmt: skip
    if free >= gpus:
        kind = next((k for k in demand.types if room.free[k] >= gpus), 0)
        tight = mode == "require" or job.needs_host or bool(job.within)
        if tight and not Placer(view).place_job(job, view.cluster.gpu_types[kind], mode):
            return Pending(
                job.id, "fragmentation", lacking, start_s,
                f"enough GPUs are idle, but not {_where(job, mode)}",
            )  # fmt: skip
        return Pending(
            job.id, "round", lacking, start_s, "fits, and starts when the policy next decides"
        )
    if protected and start_s < inf:
        return Pending(
            job.id, "protected", lacking, start_s,
            "would start at once if the jobs that come after it had run for their minimum time",
        )  # fmt: skip
    return Pending(
        job.id, "order", lacking, start_s, "the GPUs it lacks are held by jobs that come before it"
    )


def _where(job: JobView, mode: str) -> str:
    """Say where its GPUs must lie."""
    if job.within:
        return "on one node" if job.within == "node" else "in one rack"
    if mode == "require":
        return "on the few machines it must have"
    return "beside the cores and the memory it needs"


def _up(demand: Demand, view: View) -> int:
    names = {view.cluster.gpu_types[kind] for kind in demand.types}
    if len(view.cluster.gpu_types) == 1:
        return view.cluster.gpus
    up = dict.fromkeys(names, 0)
    for node in view.cluster.nodes:
        if node.gpu_type in up:
            up[node.gpu_type] += node.gpus
    return max(up.values(), default=0)
