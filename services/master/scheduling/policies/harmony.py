"""Harmony: co-locate jobs that use CPU and network in turns (Lee, dissertation, section 4.3.2).

Groups of jobs share machines; `harmony_grouping` says which jobs and how many machines. A job that
is in no group waits (is paused). What is decided when:

- **A job completes.** A waiting job like it (iteration time and ratio of computation to
  communication within `similar`, on its group's machines) takes its place, or else a bunch, up to
  four that together are like it. Otherwise
  algorithm 1 runs over the waiting jobs and those of the finished job's group, then of one group
  more, the one with the fewest jobs, and so on; the smallest such change is taken whose utilisation
  is within `gain` of the best, and none if the best does not improve U by `gain`.
- **A job arrives.** If nobody else waits, it joins the group where it raises U most; if it raises
  none, the same search for a regrouping runs, and else it waits. (In the paper it just waits, and a
  single group would swallow all machines for ever.)
- **Machines come or go**, or nothing runs: algorithm 1 over everybody, running jobs first.

Groups keep their label and machines where members stay, so that few jobs move. Deviation: profiles
are known at submission; the paper profiles new jobs in a group first.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import inf
from typing import Any, Final

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.group import (
    CPU_WEIGHT,
    Subtasks,
    utilization,
    weighted,
)
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.harmony_grouping import (
    FEWER_JOBS,
    machines_for,
    schedule,
)
from slackwater.services.master.scheduling.policies.placement import Placer
from slackwater.services.master.scheduling.registry import AtLeast0, Share, register
from slackwater.services.master.scheduling.rules import NOTHING_HONOURED
from slackwater.services.master.scheduling.view import (
    NOTHING,
    Allocation,
    JobView,
    Pending,
    Plan,
    View,
    shrunk,
)

LABEL: Final = "harmony-"
AMONG: Final = {2: 200, 3: 60, 4: 30}
"""Waiting jobs among which a bunch of so many is looked for: some 30,000 are tried at most."""


class Group(msgspec.Struct):
    """A job group: who shares which machines."""

    label: str
    members: list[JobView]
    machines: int
    allocation: Allocation = NOTHING


class Memory(msgspec.Struct):
    """The facts that a decision must know of the one before."""

    profiles: dict[JobId, Subtasks]
    """Subtasks of every active job, for the day it is gone."""
    group_of: dict[JobId, str]
    waiting: set[JobId]
    gpus: int
    next_label: int


@register("harmony")
class Harmony:
    elastic = True
    honours = NOTHING_HONOURED
    job_model = "subtasks"

    def __init__(
        self,
        gain: AtLeast0 = 0.05,
        similar: AtLeast0 = 0.05,
        cpu_weight: Share = CPU_WEIGHT,
        fewer_jobs: AtLeast0 = FEWER_JOBS,
        tune: bool = True,
        memory_gb: AtLeast0 = 0.0,
    ) -> None:
        """`memory_gb`: of a machine, which its group's data and models fit in; 0: they are spilled
        to disks where they do not (section 4.3.3)."""
        self.gain, self.similar = gain, similar
        self.fewer_jobs, self.tune, self.memory_bytes = fewer_jobs, tune, memory_gb * 1e9
        self.weights = (cpu_weight, 1 - cpu_weight)

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
        known: Memory | None = memory
        groups = _groups_of(view)
        waiting = _waiting_of(view)
        for job in [*waiting, *(job for group in groups for job in group.members)]:
            _check(job, view)
        if not view.jobs or not view.cluster.gpus:
            return Plan(), self._memory(view, groups, waiting, known)
        if known is None or not groups or known.gpus != view.cluster.gpus:
            changed = self._everybody(groups, waiting, view)
        else:
            changed = self._repair(groups, waiting, view, known)
        plan, groups = _carry_out(groups, changed, view, 0 if known is None else known.next_label)
        placed = {job.id for group in groups for job in group.members}
        waiting = [job for job in view.jobs.values() if job.id not in placed]
        return plan, self._memory(view, groups, waiting, known)

    def _memory(
        self,
        view: View,
        groups: Sequence[Group],
        waiting: Iterable[JobView],
        known: Memory | None,
    ) -> Memory:
        numbers = [int(group.label.removeprefix(LABEL)) + 1 for group in groups]
        return Memory(
            {job.id: job.profile for job in view.jobs.values()},
            {job.id: group.label for group in groups for job in group.members},
            {job.id for job in waiting},
            view.cluster.gpus,
            max([*numbers, 0 if known is None else known.next_label]),
        )

    # Decisions: each answers the groups that replace some of the present ones ------------------

    def _everybody(
        self, groups: list[Group], waiting: list[JobView], view: View
    ) -> "Change | None":
        return self._regrouped(groups, waiting, view.cluster.gpus)

    def _repair(
        self, groups: list[Group], waiting: list[JobView], view: View, known: Memory
    ) -> "Change | None":
        """Regroup after completions and arrivals."""
        gone = [job_id for job_id in known.group_of if job_id not in view.jobs]
        by_label = {group.label: group for group in groups}
        touched: dict[str, Group] = {}
        unreplaced = False
        for job_id in gone:
            label = known.group_of[job_id]
            group = touched.get(label) or by_label.get(label)
            stand_ins = self._like(known.profiles[job_id], waiting, group) if group else []
            if group is None or not stand_ins:
                unreplaced = True
                continue
            touched[label] = _with(group, stand_ins)
            taken = {job.id for job in stand_ins}
            waiting = [job for job in waiting if job.id not in taken]
        replaced = [touched.get(group.label, group) for group in groups]
        arrived = [job for job in waiting if job.id not in known.profiles]
        if arrived and not unreplaced and len(arrived) == len(waiting):
            for job in list(arrived):
                better = self._best_home(replaced, job, view.cluster.gpus)
                if better is not None:
                    touched[better.label] = better
                    replaced = [touched.get(group.label, group) for group in groups]
                    waiting = [other for other in waiting if other is not job]
        simple = Change([by_label[label] for label in touched], list(touched.values()))
        if not (unreplaced or (arrived and waiting)):
            return simple
        first = {known.group_of[job_id] for job_id in gone}
        found = self._search(replaced, waiting, view.cluster.gpus, first)
        if found is None:
            return simple
        was = [by_label[group.label] for group in found.before]
        extra = [label for label in touched if label not in {group.label for group in was}]
        return Change(
            was + [by_label[label] for label in extra],
            found.after + [touched[label] for label in extra],
        )

    def _like(self, gone: Subtasks, waiting: list[JobView], group: Group) -> list[JobView]:
        """Return a waiting job like the finished one of the group, or a bunch that together is."""
        length_s = gone.iteration_s(group.machines) * (1.0 + self.similar)
        short = [job for job in waiting if job.profile.iteration_s(group.machines) <= length_s]
        for count in (1, *AMONG):
            for bunch in combinations(short[: AMONG.get(count)], count):
                profiles = [job.profile for job in bunch]
                if self._alike(gone, profiles, group.machines) and self._fits(_with(group, bunch)):
                    return list(bunch)
        return []

    def _alike(self, gone: Subtasks, others: Sequence[Subtasks], machines: int) -> bool:
        gone_s = gone.cpu_on_s(machines)
        cpu_s = sum(other.cpu_on_s(machines) for other in others)
        network_s = sum(other.network_s for other in others)
        near = abs(cpu_s + network_s - gone_s - gone.network_s) <= self.similar * (
            gone_s + gone.network_s
        )
        # Ratios, cross-multiplied: either time may be 0.
        return near and abs(cpu_s * gone.network_s - gone_s * network_s) <= (
            self.similar * gone_s * network_s
        )

    def _fits(self, group: Group) -> bool:
        """Say whether its machines hold its jobs' data and models."""
        nbytes = sum(job.profile.nbytes for job in group.members)
        return machines_for(nbytes, self.memory_bytes) <= group.machines

    def _best_home(self, groups: list[Group], job: JobView, machines: int) -> Group | None:
        """The group that gains most of U by this job, with it; None if none gains."""
        best, best_gain = None, 1e-9
        for group in groups:
            joined = _with(group, [job])
            gain = self._used([joined], machines) - self._used([group], machines)
            if gain > best_gain and self._fits(joined):
                best, best_gain = joined, gain
        return best

    def _search(
        self, groups: list[Group], waiting: list[JobView], machines: int, first: set[str]
    ) -> "Change | None":
        """Algorithm 1 over ever more groups: those of finished jobs, then the smallest."""
        order = sorted(groups, key=lambda g: (g.label not in first, len(g.members), g.label))
        idle = machines - sum(group.machines for group in groups)
        now = self._used(groups, machines)
        options: list[tuple[float, Change]] = []
        least = max(1, sum(group.label in first for group in groups))
        for count in _steps(least, len(order)):
            involved = order[:count]
            room = idle + sum(group.machines for group in involved)
            # Algorithm 1 takes a prefix: who stands far behind in the queue can't be reached.
            near = 32 + 4 * sum(len(group.members) for group in involved)
            change = self._regrouped(involved, waiting[:near], room)
            if change is not None:
                rest = self._used(order[count:], machines)
                options.append((rest + self._used(change.after, machines), change))
        best = max((used for used, _ in options), default=0.0)
        if best < now * (1 + self.gain) or best <= now:
            return None
        return next(change for used, change in options if used >= best / (1 + self.gain))

    def _regrouped(
        self, groups: list[Group], waiting: list[JobView], machines: int
    ) -> "Change | None":
        running = [job for group in groups for job in group.members]
        running.sort(key=lambda job: job.number)
        jobs = running + waiting
        if not jobs or machines < 1:
            return None
        found = schedule(
            [job.profile for job in jobs], machines, self.weights, self.fewer_jobs, self.tune,
            self.memory_bytes,
        )  # fmt: skip
        after = [
            Group("", [jobs[i] for i in sorted(members)], count)
            for members, count in zip(found.groups, found.machines, strict=True)
        ]
        return Change(groups, after)

    def _used(self, groups: Iterable[Group], machines: int) -> float:
        """Their part of U."""
        return sum(
            group.machines
            * weighted(
                utilization([job.profile for job in group.members], group.machines), self.weights
            )
            for group in groups
        ) / max(machines, 1)

    facts = Memory

    def durable(self, memory: Memory) -> Memory:
        """All of it: without, a restarted master would group everybody anew."""
        return memory

    def restored(self, facts: Memory) -> Memory:
        return facts

    def explain(self, view: View, memory: Any) -> list[Pending]:
        return [
            Pending(
                job.id, "order", f"a place in a group, {sum(view.free)} machines idle", inf,
                "no group's use of CPU and network improves by this job; it may join when a job "
                "completes",
            )
            for job in _waiting_of(view)
        ]  # fmt: skip


class Change(msgspec.Struct):
    """Some of the present groups, and what is in their place; labels "" are new."""

    before: list[Group]
    after: list[Group]


def _steps(least: int, most: int) -> list[int]:
    """Numbers of groups to involve: all up to 16, then ever sparser."""
    counts = []
    count = min(least, most)
    while count < most:
        counts.append(count)
        count = count + 1 if count < least + 16 else int(count * 1.5)
    return [*counts, most] if most else []


def _with(group: Group, jobs: Sequence[JobView]) -> Group:
    return Group(group.label, [*group.members, *jobs], group.machines, group.allocation)


def _waiting_of(view: View) -> list[JobView]:
    waiting = [job for job in view.jobs.values() if not job.allocation]
    return sorted(waiting, key=lambda job: (-job.priority, job.number))


def _groups_of(view: View) -> list[Group]:
    found: dict[str, Group] = {}
    for job in sorted(view.jobs.values(), key=lambda job: job.number):
        if job.allocation:
            label = job.group if job.group.startswith(LABEL) else f"{LABEL}{job.number}"
            group = found.setdefault(label, Group(label, [], job.held_gpus, job.allocation))
            group.members.append(job)
    return list(found.values())


def _check(job: JobView, view: View) -> None:
    if not isinstance(job.profile, Subtasks):
        raise Rejected(
            f"harmony needs the subtask times of job {job.id}; run it with --job-model subtasks"
        )
    if job.gpus_min > 1 or job.gpus_max < view.cluster.gpus:
        raise Rejected(
            f"harmony chooses the machines of job {job.id} itself, which may have "
            f"{job.gpus_min}..{job.gpus_max}; run it with --mode malleable"
        )


def _carry_out(
    groups: list[Group], change: Change | None, view: View, next_label: int
) -> tuple[Plan, list[Group]]:
    """The plan, and all groups after it. A new group takes over the label and machines of the old
    one with which it shares most jobs."""
    if change is None or not change.after:
        return Plan(), groups
    old = {group.label: group for group in change.before}
    next_label = max([next_label, *(int(g.label.removeprefix(LABEL)) + 1 for g in groups)])
    free_labels = set(old) - {group.label for group in change.after}
    for group in sorted(change.after, key=lambda g: -len(g.members)):
        if group.label:
            continue
        shared = {label: sum(job.group == label for job in group.members) for label in free_labels}
        best = max(shared, key=lambda label: (shared[label], label), default="")
        if best and shared[best]:
            group.label = best
            free_labels.discard(best)
        else:
            group.label = f"{LABEL}{next_label}"
            next_label += 1
    placer = Placer(view)
    for group in change.before:
        placer.give_back(group.allocation)
    for group in change.after:
        held = old[group.label].allocation if group.label in old else NOTHING
        group.allocation = shrunk(held, group.machines)
        placer.take(group.allocation)
    allocations: dict[JobId, Allocation] = {}
    labels: dict[JobId, str] = {}
    for group in change.after:
        missing = group.machines - sum(count for _, count in group.allocation)
        together = dict(group.allocation)
        for node, count in placer.place(missing) if missing else ():
            together[node] = together.get(node, 0) + count
        group.allocation = tuple(sorted(together.items()))
        for job in group.members:
            if job.group != group.label or job.allocation != group.allocation:
                allocations[job.id], labels[job.id] = group.allocation, group.label
    placed = {job.id for group in change.after for job in group.members}
    for group in change.before:
        allocations |= {job.id: NOTHING for job in group.members if job.id not in placed}
    kept = [group for group in groups if group.label not in old]
    return Plan(allocations, labels), kept + change.after
