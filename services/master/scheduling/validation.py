"""Check a plan of any policy before anything of it is carried out.

Refused is what a cluster cannot do (capacity of each node, whole gangs, jobs that nobody knows,
groups that hold different GPUs), and what the operator's rules forbid: GPUs of several types for
one job, GPUs of several machines or racks for one that must lie together, taking GPUs from a job in
its protected minutes, more cores or main memory than a machine has, and, where tenants may not
borrow, more GPUs than a tenant's quota.
"""

from slackwater.common.base.errors import Rejected
from slackwater.common.base.words import number_of
from slackwater.services.master.scheduling.hosts import HostUse
from slackwater.services.master.scheduling.view import (
    NOTHING,
    Allocation,
    ClusterView,
    JobView,
    Plan,
    View,
)


class PlanRefused(Rejected):
    """A policy's plan breaks capacity, a gang or a rule; nothing of it was applied."""


def validate(plan: Plan, view: View) -> None:
    """Refuse a plan that the cluster cannot carry out. Costs only what the plan changes."""
    room: dict[int, int] = {}
    groups = _groups_of(view, plan) if plan.groups or _any_grouped(plan, view) else None
    protecting, fed = view.rules.min_run_s > 0, False
    for job_id, allocation in plan.allocations.items():
        job = view.jobs.get(job_id)
        if job is None:
            raise PlanRefused(f"the plan names job {job_id}, which is not active; drop it")
        if groups is None or not job.group:
            for node, gpus in job.allocation:
                room[node] = room.get(node, 0) + gpus
        if protecting and view.rules.protects(job, view.now_s):
            _check_protected(job, allocation, plan.groups.get(job_id, ""), view)
        if allocation:
            fed = fed or job.cores > 0 or job.memory_bytes > 0
            _check_gang(job, allocation, view.cluster)
            if groups is None or job_id not in plan.groups:
                for node, gpus in allocation:
                    room[node] = room.get(node, 0) - gpus
    if groups is not None:
        _check_groups(groups, room)
    for node, change in room.items():
        if view.free[node] + change < 0:
            raise PlanRefused(
                f"the plan needs {number_of(-change, 'more GPU')} on node "
                f"{view.cluster.nodes[node].id}, which "
                f"has {view.free[node]} idle of {view.cluster.nodes[node].gpus}"
            )
    if view.rules.quotas and not view.rules.borrowing:
        _check_quotas(plan, view)
    if fed:
        _check_hosts(plan, view)


def _check_gang(job: JobView, allocation: Allocation, cluster: ClusterView) -> None:
    last, total = -1, 0
    for node, gpus in allocation:
        if not last < node < len(cluster.nodes) or gpus < 1:
            raise PlanRefused(
                f"job {job.id}: allocation {allocation} must name existing nodes in ascending "
                "order with at least one GPU each"
            )
        if job.speeds and cluster.nodes[node].gpu_type not in job.speeds:
            raise PlanRefused(
                f"job {job.id} cannot run on GPUs of type {cluster.nodes[node].gpu_type!r} "
                f"(node {cluster.nodes[node].id}); its types are {sorted(job.speeds)}"
            )
        if last >= 0 and cluster.nodes[node].gpu_type != cluster.nodes[last].gpu_type:
            raise PlanRefused(
                f"job {job.id}: allocation {allocation} lies on GPUs of several types; give it "
                "GPUs of one"
            )
        last = node
        total += gpus
    if job.within:
        nodes = {cluster.nodes[node].id for node, _ in allocation}
        places = nodes if job.within == "node" else {cluster.nodes[n].rack for n, _ in allocation}
        if len(places) > 1:
            raise PlanRefused(
                f"job {job.id}: allocation on {', '.join(sorted(nodes))} is not within one "
                f"{job.within}, as it must be"
            )
    if not job.gpus_min <= total <= job.gpus_max:
        raise PlanRefused(
            f"job {job.id}: an allocation of {number_of(total, 'GPU')} breaks its gang of "
            f"{job.gpus_min}..{job.gpus_max}"
        )


def _check_hosts(plan: Plan, view: View) -> None:
    kept = (job for job in view.jobs.values() if job.id not in plan.allocations)
    use = HostUse(view.cluster, kept)
    for job_id, allocation in plan.allocations.items():
        use.add(view.jobs[job_id], allocation)
    for job_id, allocation in plan.allocations.items():
        for node, _ in allocation if view.jobs[job_id].needs_host else ():
            if lacking := use.overfull(node):
                raise PlanRefused(
                    f"the plan puts job {job_id} on node {view.cluster.nodes[node].id}, whose jobs "
                    f"then need {lacking}"
                )


def _check_protected(job: JobView, allocation: Allocation, group: str, view: View) -> None:
    """Others may join it on its GPUs, and leave it there."""
    if allocation != job.allocation or (group and job.group and group != job.group):
        raise PlanRefused(
            f"job {job.id} runs since {job.since_s} s and is protected for "
            f"{view.rules.min_run_s} s; leave it as it is at {view.now_s} s"
        )


def _check_quotas(plan: Plan, view: View) -> None:
    """Where tenants may not borrow, none that gains GPUs holds more than its quota afterwards."""
    held: dict[str, int] = {}
    gained: dict[str, int] = {}
    for job in view.jobs.values():
        after = plan.allocations.get(job.id, job.allocation)
        gpus = sum(count for _, count in after)
        if gpus:
            held[job.tenant] = held.get(job.tenant, 0) + gpus
        if gpus != job.held_gpus:
            gained[job.tenant] = gained.get(job.tenant, 0) + gpus - job.held_gpus
    for tenant, change in gained.items():
        quota = view.rules.quotas.get(tenant, 0)
        if change > 0 and held[tenant] > quota:
            raise PlanRefused(
                f"the plan gives tenant {tenant!r} {number_of(held[tenant], 'GPU')} of its "
                f"{quota}, and tenants "
                "may not borrow"
            )


def _any_grouped(plan: Plan, view: View) -> bool:
    return any((job := view.jobs.get(i)) is not None and job.group for i in plan.allocations)


def _groups_of(view: View, plan: Plan) -> dict[str, tuple[set[Allocation], set[Allocation]]]:
    """Label -> (allocations held by members before, allocations held by members after)."""
    groups: dict[str, tuple[set[Allocation], set[Allocation]]] = {}
    for job in view.jobs.values():
        if job.group:
            before, after = groups.setdefault(job.group, (set(), set()))
            before.add(job.allocation)
            if job.id not in plan.allocations:
                after.add(job.allocation)
    for job_id, label in plan.groups.items():
        allocation = plan.allocations.get(job_id, NOTHING)
        if not label or not allocation:
            raise PlanRefused(
                f"job {job_id} is put in group {label!r} without an allocation of its own; name "
                "both the label and the allocation that the group shares"
            )
        groups.setdefault(label, (set(), set()))[1].add(allocation)
    return groups


def _check_groups(
    groups: dict[str, tuple[set[Allocation], set[Allocation]]], room: dict[int, int]
) -> None:
    for label, (before, after) in groups.items():
        if len(after) > 1:
            raise PlanRefused(
                f"group {label}: its members hold different GPUs {sorted(after)}; jobs that share "
                "must have equal allocations"
            )
        for allocation in before:
            for node, gpus in allocation:
                room[node] = room.get(node, 0) + gpus
        for allocation in after:
            for node, gpus in allocation:
                room[node] = room.get(node, 0) - gpus
