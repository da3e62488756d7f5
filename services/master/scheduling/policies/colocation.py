"""Co-location under any queue-ordered policy: jobs interleave their stages on the same GPUs.

The inner policy's order decides, as before, who comes first: down the queue, whoever fits gets
GPUs of its own. Those who do not fit then join, in order, a group of the same number of GPUs: the
one in which the stages interleave best (`common.models.interleave`: measured stage times), as long
as that adds at least `gain` jobs' worth of progress. So nobody shares while GPUs are idle, and a
job that interleaves with nobody waits its turn. Muri (SIGCOMM'22) groups by matching among the
candidates of three clusters' worth of GPUs; in order and greedily is as good on its own trace, and
keeps the running groups together: a group lives on under its label while one member stays.
"""

from collections.abc import Iterable
from math import inf
from typing import Any

import msgspec

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.words import number_of
from slackwater.common.domains.models.interleave import StageProfile, efficiency
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.placement import Placer
from slackwater.services.master.scheduling.policies.queues import QueuePolicy, Queues
from slackwater.services.master.scheduling.rules import Rule
from slackwater.services.master.scheduling.view import (
    NOTHING,
    Allocation,
    JobView,
    Pending,
    Plan,
    Policy,
    Remembers,
    View,
    name_of,
)


class Sharing(msgspec.Struct):
    """The memory: the inner policy's, and the next label."""

    queues: Queues | None = None
    next_label: int = 0


class SharingFacts(msgspec.Struct, frozen=True):
    """Facts that a restarted master must have: the inner policy's, encoded, and the next label."""

    inner: bytes
    next_label: int


class Group(msgspec.Struct):
    gpus: int
    members: list[JobView]
    label: str = ""

    def profiles(self) -> list[StageProfile]:
        return [member.profile for member in self.members]


class Colocated:
    """`inner` with up to `ways` jobs on the same GPUs."""

    honours = frozenset[Rule]({"priorities", "min_run_s"})

    def __init__(self, inner: Policy, ways: int = 3, gain: float = 0.1, stay: float = 0.2) -> None:
        if not isinstance(inner, QueuePolicy):
            raise ConfigRejected(
                f"{name_of(inner)} orders no queue, so there is no order to co-locate by; "
                "use one of the queue-ordered policies"
            )
        self.registered_name = f"{name_of(inner)} with co-location"
        self.inner, self.ways, self.gain, self.stay = inner, ways, gain, stay

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
        sharing = memory if memory is not None else Sharing()
        queues = self.inner.update(view, sharing.queues)
        order = self.inner.in_order(view, queues)
        protected, protected_end_s = self._protected(view)
        order.sort(key=lambda job: job.id not in protected)
        groups, left = self._leaders(order, view)
        waiting = self._join(groups, left, view)
        next_label = self._label(groups, sharing.next_label)
        allocations, labels = self._changes(groups, waiting, view)
        next_s = inf
        if waiting:
            next_s = self.inner.next_s(view, queues, allocations, protected_end_s)
        return Plan(allocations, labels, next_s), Sharing(queues, next_label)

    def _protected(self, view: View) -> tuple[set[JobId], float]:
        if not self.inner.protects(view):
            return set(), inf
        ends = {
            job.id: self.inner.protected_until_s(job, view)
            for job in view.jobs.values()
            if job.allocation
        }
        ends = {job_id: until_s for job_id, until_s in ends.items() if until_s > view.now_s}
        return set(ends), min(ends.values(), default=inf)

    def _leaders(self, order: list[JobView], view: View) -> tuple[list[Group], list[JobView]]:
        """Return the jobs that get GPUs of their own, and the others, both in order. Jobs in their
        minimum run time keep their groups."""
        held: dict[str, Group] = {}
        for job in order:
            if view.rules.protects(job, view.now_s):
                held.setdefault(job.group, Group(job.gpus, [], job.group)).members.append(job)
        groups = list(held.values())
        free = view.cluster.gpus - sum(group.gpus for group in groups)
        left: list[JobView] = []
        for job in order:
            if job.group in held and view.rules.protects(job, view.now_s):
                continue
            if job.gpus <= free and not (self.inner.strict and left):
                free -= job.gpus
                groups.append(Group(job.gpus, [job]))
            else:
                left.append(job)
        return groups, left

    def _join(self, groups: list[Group], left: Iterable[JobView], view: View) -> list[JobView]:
        """Put each into the group that gains most; answers who is left out. Where moving costs a
        restart, a job's present group has `stay` in hand."""
        by_size: dict[int, list[Group]] = {}
        for group in groups:
            by_size.setdefault(group.gpus, []).append(group)
        stay = self.stay if view.rules.restart_s > 0 else 0.0
        out = []
        for job in left:
            best, best_gain = None, self.gain
            for group in by_size.get(job.gpus, ()):
                if len(group.members) >= self.ways:
                    continue
                profiles = group.profiles()
                gain = efficiency([*profiles, job.profile]) - efficiency(profiles)
                if stay and any(job.group and m.group == job.group for m in group.members):
                    gain += stay
                if gain > best_gain:
                    best, best_gain = group, gain
            if best is None:
                out.append(job)
            else:
                best.members.append(job)
        return out

    def _label(self, groups: list[Group], next_label: int) -> int:
        """A group keeps the label of its first member that had one nobody else keeps."""
        kept: set[str] = set()
        for group in groups:
            labels = (m.group for m in group.members if m.group and m.group not in kept)
            group.label = next(labels, "")
            if not group.label:
                group.label = f"share-{next_label}"
                next_label += 1
            kept.add(group.label)
        return next_label

    def _changes(
        self, groups: list[Group], waiting: list[JobView], view: View
    ) -> tuple[dict[JobId, Allocation], dict[JobId, str]]:
        allocations: dict[JobId, Allocation] = {j.id: NOTHING for j in waiting if j.allocation}
        labels: dict[JobId, str] = {}
        places: dict[str, Allocation] = {
            job.group: job.allocation for job in view.jobs.values() if job.group
        }
        placer = Placer(view)
        kept = {group.label for group in groups}
        for label, allocation in places.items():
            if label not in kept:
                placer.give_back(allocation)
        for group in groups:
            allocation = places.get(group.label) or placer.place(group.gpus)
            for job in group.members:
                if job.group != group.label or job.allocation != allocation:
                    allocations[job.id] = allocation
                    labels[job.id] = group.label
        return allocations, labels

    facts = SharingFacts

    def durable(self, memory: Sharing) -> SharingFacts:
        facts = None
        if isinstance(self.inner, Remembers) and memory.queues is not None:
            facts = self.inner.durable(memory.queues)
        inner = b"" if facts is None else msgspec.msgpack.encode(facts)
        return SharingFacts(inner, memory.next_label)

    def restored(self, facts: SharingFacts) -> Sharing:
        queues = None
        if facts.inner and isinstance(self.inner, Remembers):
            inner = msgspec.msgpack.decode(facts.inner, type=self.inner.facts)
            queues = self.inner.restored(inner)
        return Sharing(queues, facts.next_label)

    def explain(self, view: View, memory: Any) -> list[Pending]:
        free = sum(view.free)
        return [
            Pending(
                job.id,
                "order",
                f"{number_of(job.gpus, 'GPU')}, {free} idle",
                inf,
                "the GPUs it lacks are held by jobs that come before it, and it would add less "
                f"than {self.gain} jobs' worth of progress to any group of "
                f"{number_of(job.gpus, 'GPU')}",
            )
            for job in self.inner.in_order(view, self.inner.update(view, None))
            if not job.allocation
        ]
