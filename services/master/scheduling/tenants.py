"""Tenants' quotas under a policy that knows none: it plans each tenant's part of the cluster.

A policy that is `divisible` sees a cluster of its own per tenant (a virtual cluster), with that
tenant's jobs alone, and plans there as it always does. The parts are cut anew at every decision:

1. A tenant is owed what its jobs can use of its quota. Where that is more than there is (lost
   nodes, quotas beyond the cluster), whole gangs get theirs, those that run first, then by priority
   and submission; and what is left is dealt evenly.
2. Where tenants may borrow, what is left of the cluster goes to jobs beyond the quotas in the same
   way.
3. A part that became smaller than what its tenant holds is cleared before the policy is asked:
   elastic jobs shrink, newest first, then whole jobs stop. So owners take back what they lent.
   Jobs in their protected minutes keep their GPUs, and count as part of the part.

A tenant's GPUs are chosen beside those that it holds, then on the emptiest machines.
"""

from collections.abc import Collection, Mapping, Sequence
from math import floor, inf
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from slackwater.common.base.errors import Rejected
from slackwater.common.base.words import number_of
from slackwater.schemas.base import JobId
from slackwater.schemas.scheduling import POLICY_FACTS_BYTES_MAX
from slackwater.services.master.scheduling.validation import PlanRefused, validate
from slackwater.services.master.scheduling.view import (
    Allocation,
    ClusterView,
    JobView,
    Pending,
    Plan,
    Policy,
    Remembers,
    Rules,
    View,
    name_of,
    shrunk,
)

_FACTS_FRAME_BYTES: Final = 16
"""At most so many bytes beside the names and facts themselves, for each and for all of them."""
Sizing = Literal["rigid", "moldable", "malleable"]
"""A policy gives each job just what it asks for, a size within its bounds for good, or any."""


class Parts(msgspec.Struct, frozen=True):
    """A cluster divided among tenants."""

    views: Mapping[str, View]
    """Each tenant's part, its jobs in it; a tenant without GPUs has none."""
    gpus: Mapping[str, int]
    """GPUs of each part."""
    cleared: Mapping[JobId, JobView]
    """Running jobs that lose GPUs to other tenants, as their part shows them."""
    until_s: float
    """When a protected job first ends its protection while an owner lacks GPUs; inf: none does."""


class Kept(msgspec.Struct, frozen=True):
    """A policy's memory of one tenant, and the jobs as it was last shown them (None: touched by its
    plan, so that they count as changed)."""

    memory: Any = None
    shown: Mapping[JobId, JobView | None] | None = None

    def changed(self, view: View) -> Sequence[JobId] | None:
        if self.shown is None:
            return None
        news = [id for id, job in view.jobs.items() if self.shown.get(id) != job]
        return news + [id for id in self.shown if id not in view.jobs]


class DividedFacts(msgspec.Struct, frozen=True):
    """Each tenant's durable facts, encoded as the policy's own."""

    tenants: dict[str, bytes]


class Divided:
    """`inner`, asked for each tenant."""

    facts = DividedFacts

    def __init__(self, inner: Policy) -> None:
        self.inner, self.registered_name = inner, name_of(inner)
        self._round_s: float = getattr(inner, "round_s", 0.0)
        elastic, moldable = (getattr(inner, name, False) for name in ("elastic", "moldable"))
        self._sizing: Sizing = ("moldable" if moldable else "malleable") if elastic else "rigid"

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
        """Raises PlanRefused for a plan that reaches beyond its tenant's part."""
        kept: dict[str, Kept] = {} if memory is None else memory
        if self._round_s and floor(view.now_s / self._round_s) * self._round_s != view.now_s:
            return Plan(next_decision_s=self._next_round_s(view)), kept
        parts = divide(view, self._sizing)
        after = {name: old for name, old in kept.items() if name in view.rules.quotas}
        allocations: dict[JobId, Allocation] = {}
        next_s = parts.until_s
        for tenant, part in parts.views.items():
            before = kept.get(tenant, Kept())
            asked = replace(part, changed=before.changed(part))
            plan, remembered = self.inner.allocate(asked, before.memory)
            if plan.groups:
                raise PlanRefused(
                    f"{name_of(self)} lets jobs share GPUs, whose tenant then cannot be told; it "
                    "must not declare itself divisible"
                )
            validate(plan, asked)
            shown: dict[JobId, JobView | None] = {**part.jobs, **dict.fromkeys(plan.allocations)}
            after[tenant] = Kept(remembered, shown)
            allocations.update(plan.allocations)
            next_s = min(next_s, plan.next_decision_s)
        for id, job in parts.cleared.items():
            allocations.setdefault(id, job.allocation)
        changes = {id: to for id, to in allocations.items() if to != view.jobs[id].allocation}
        if self._round_s:
            next_s = min(next_s, self._next_round_s(view))
        return Plan(changes, next_decision_s=next_s), after

    def _next_round_s(self, view: View) -> float:
        return (floor(view.now_s / self._round_s) + 1) * self._round_s if view.jobs else inf

    def explain(self, view: View, memory: Any) -> list[Pending]:
        parts, idle = divide(view, self._sizing), sum(view.free)
        kept: dict[str, Kept] = {} if memory is None else memory
        answers = []
        for tenant, gpus in parts.gpus.items():
            own = view.rules.quotas.get(tenant, 0)
            has = f"tenant {tenant} has {number_of(gpus, 'GPU')} now, {own} of its own"
            part = parts.views.get(tenant)
            if part is None:
                answers += [
                    Pending(
                        job.id,
                        "quota",
                        f"{number_of(_bounds(job, self._sizing)[0], 'GPU')}, {gpus} its tenant's",
                        inf,
                        has,
                    )
                    for job in view.jobs.values()
                    if job.tenant == tenant
                ]
                continue
            for why in self.inner.explain(part, kept.get(tenant, Kept()).memory):
                needs, _ = _bounds(view.jobs[why.job], self._sizing)
                kept_back = sum(part.free) < needs <= idle or gpus < needs <= view.cluster.gpus
                rule = "quota" if kept_back else why.rule
                answers.append(replace(why, rule=rule, text=f"{has}; {why.text}"))
        answers = [why for why in answers if not view.jobs[why.job].allocation]
        return sorted(answers, key=lambda why: view.jobs[why.job].number)

    def durable(self, memory: Any) -> DividedFacts | None:
        if not isinstance(self.inner, Remembers):
            return None
        found, room = {}, POLICY_FACTS_BYTES_MAX - _FACTS_FRAME_BYTES
        for tenant, kept in sorted(memory.items()):
            facts = None if kept.memory is None else self.inner.durable(kept.memory)
            encoded = b"" if facts is None else msgspec.msgpack.encode(facts)
            needs = len(encoded) + len(tenant.encode()) + _FACTS_FRAME_BYTES
            if encoded and needs <= room:  # Else it is forgotten: it decides by the view alone.
                found[tenant] = encoded
                room -= needs
        return DividedFacts(found) if found else None

    def restored(self, facts: DividedFacts) -> dict[str, Kept]:
        """Raises Rejected for facts of another policy."""
        if not isinstance(self.inner, Remembers):
            raise Rejected(f"{name_of(self)} keeps no durable facts; start without them")
        found = {}
        for tenant, encoded in facts.tenants.items():
            try:
                own = msgspec.msgpack.decode(encoded, type=self.inner.facts)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Rejected(
                    f"the facts of tenant {tenant!r} are not those of {name_of(self)} ({error}); "
                    "start without them"
                ) from error
            found[tenant] = Kept(self.inner.restored(own))
        return found


# The parts ----------------------------------------------------------------------------------------


def divide(view: View, sizing: Sizing = "malleable") -> Parts:
    """Cut the cluster into tenants' parts."""
    of: dict[str, dict[JobId, JobView]] = {}
    for job in view.jobs.values():
        of.setdefault(job.tenant, {})[job.id] = job
    tenants = {name: of[name] for name in sorted(of)}
    members = {name: list(jobs.values()) for name, jobs in tenants.items()}
    gpus, short = share_out(view, members, sizing)
    cleared: dict[JobId, JobView] = {}
    free = list(view.free)
    for name, jobs in tenants.items():
        for job in _cleared(view, members[name], gpus[name], sizing):
            left = dict(job.allocation)
            for node, held in view.jobs[job.id].allocation:
                free[node] += held - left.get(node, 0)
            cleared[job.id] = jobs[job.id] = job
    rules = Rules(min_run_s=view.rules.min_run_s, restart_s=view.rules.restart_s)
    views = {}
    for name in sorted(tenants, key=lambda name: (-gpus[name], name)):
        idle = _chosen(view.cluster, tenants[name].values(), gpus[name], free)
        cluster = _cluster(view.cluster, tenants[name].values(), idle)
        if cluster.gpus:
            views[name] = View(view.now_s, cluster, tenants[name], idle, None, rules)
    until_s = inf
    if short:
        protected = (job for job in view.jobs.values() if view.rules.protects(job, view.now_s))
        until_s = min((job.since_s + view.rules.min_run_s for job in protected), default=inf)
    return Parts({name: views[name] for name in tenants if name in views}, gpus, cleared, until_s)


def share_out(
    view: View, tenants: Mapping[str, Collection[JobView]], sizing: Sizing = "malleable"
) -> tuple[dict[str, int], bool]:
    """GPUs of each tenant's part, and whether some tenant is owed more than it gets."""
    rules, total = view.rules, view.cluster.gpus
    kept = {
        name: sum(job.held_gpus for job in jobs if rules.protects(job, view.now_s))
        for name, jobs in tenants.items()
    }
    parts, rest = dict(kept), max(0, total - sum(kept.values()))
    own = {name: rules.quotas.get(name, 0) for name in tenants}
    owed = {name: _usable(jobs, own[name], sizing) for name, jobs in tenants.items()}
    order = sorted(
        ((job, _bounds(job, sizing)[0]) for jobs in tenants.values() for job in jobs),
        key=lambda entry: (not entry[0].allocation, -entry[0].priority, entry[0].number),
    )
    rest = _raise(parts, owed, _grant(parts, order, own, rest))
    short = any(parts[name] < owed[name] for name in tenants)
    if rules.borrowing and rest:
        most = {name: _usable(jobs, total, sizing) for name, jobs in tenants.items()}
        _raise(parts, most, _grant(parts, order, dict.fromkeys(tenants, total), rest))
    return parts, short


def _bounds(job: JobView, sizing: Sizing) -> tuple[int, int]:
    return (job.gpus, job.gpus) if sizing == "rigid" else (job.gpus_min, job.gpus_max)


def _usable(jobs: Collection[JobView], gpus: int, sizing: Sizing) -> int:
    """How many of so many GPUs the jobs that fit there could use."""
    bounds = (_bounds(job, sizing) for job in jobs)
    return min(gpus, sum(most for least, most in bounds if least <= gpus))


def _grant(
    parts: dict[str, int],
    order: Sequence[tuple[JobView, int]],
    limits: Mapping[str, int],
    rest: int,
) -> int:
    """Raise parts, in place, so that one job after another has the fewest GPUs that it runs with,
    as far as its tenant's limit and the rest reach. Answers what is left."""
    needed = dict.fromkeys(parts, 0)
    for job, least in order:
        needs = needed[job.tenant] + least
        beyond = max(0, needs - parts[job.tenant])
        if needs <= limits[job.tenant] and beyond <= rest:
            needed[job.tenant] = needs
            parts[job.tenant] += beyond
            rest -= beyond
    return rest


def _raise(parts: dict[str, int], targets: Mapping[str, int], rest: int) -> int:
    """Raise all parts towards their targets by equal numbers, in place. Answers what is left."""
    low = [name for name in parts if parts[name] < targets[name]]
    while low and rest:
        step = max(1, rest // len(low))
        for name in low:
            more = min(step, targets[name] - parts[name], rest)
            parts[name] += more
            rest -= more
        low = [name for name in low if parts[name] < targets[name]]
    return rest


def _cleared(view: View, jobs: Collection[JobView], gpus: int, sizing: Sizing) -> list[JobView]:
    """Running jobs as they look once their tenant holds no more than its part."""
    beyond = sum(job.held_gpus for job in jobs) - gpus
    if beyond <= 0:
        return []
    movable = [job for job in jobs if job.allocation and not view.rules.protects(job, view.now_s)]
    movable.sort(key=lambda job: (job.priority, -job.number))
    left = {job.id: job.held_gpus for job in movable}
    for job in movable if sizing == "malleable" else ():
        fewer = max(0, min(beyond, left[job.id] - job.gpus_min))
        left[job.id] -= fewer
        beyond -= fewer
    for job in movable:
        if beyond > 0:
            beyond -= left[job.id]
            left[job.id] = 0
    return [
        replace(
            job.moved(shrunk(job.allocation, left[job.id]), view.now_s),
            ready_s=max(job.ready_s, view.now_s),
        )
        for job in movable
        if left[job.id] < job.held_gpus
    ]


def _chosen(
    cluster: ClusterView, jobs: Collection[JobView], gpus: int, free: list[int]
) -> list[int]:
    """Take the idle GPUs that fill a tenant's part out of `free`; answers them by node."""
    room = gpus - sum(job.held_gpus for job in jobs)
    here = {node for job in jobs for node, _ in job.allocation}
    types = {name for job in jobs for name in job.speeds or cluster.gpu_types}

    def order(index: int) -> tuple[bool, bool, int, int]:
        unfit = cluster.nodes[index].gpu_type not in types
        return unfit, index not in here, -free[index], index

    idle = [0] * len(free)
    for index in sorted(range(len(free)), key=order):
        idle[index] = max(0, min(free[index], room))
        free[index] -= idle[index]
        room -= idle[index]
    return idle


def _cluster(cluster: ClusterView, jobs: Collection[JobView], idle: Sequence[int]) -> ClusterView:
    """The machines as a tenant sees them: with its own GPUs and those chosen for it."""
    own = list(idle)
    for job in jobs:
        for node, held in job.allocation:
            own[node] += held
    nodes = tuple(
        node if node.gpus == gpus else replace(node, gpus=min(node.gpus, gpus))
        for node, gpus in zip(cluster.nodes, own, strict=True)
    )
    sizes = [node.gpus for node in nodes]
    return ClusterView(nodes, sum(sizes), cluster.gpu_types, max(sizes, default=0))
