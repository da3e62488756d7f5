"""The walk that every queue-ordered policy shares: in order of key, who fits runs, whole or not.

A policy of this family is an order: `place(job)` says in which level (priority class, queue of
Tiresias) a job is, with which key inside it, and when that will change by itself. The walk is the
paper's Pseudocode 2 (Tiresias section 3.3.2): from the first level to the last, from the first key
to the last, a job that fits takes its GPUs, one that does not is skipped (or, `strict`, blocks what
is behind it), and a running job that is skipped is preempted.

**Why it is fast.** Waiting jobs lie in buckets of equal demand, each a heap by key: the walk looks
at the heads of the buckets that still fit, and the first refusal drops a bucket whole. Running
jobs of a level that all fit are taken as one sum. So a decision costs what it changes, not what
waits. The index is the policy's memory; with memory None it is built from the view, and the plan
is the same.

**Quotas** (virtual clusters): first everybody within the tenant's guarantee, in order; then, from
what is idle, those who borrow. An owner that asks therefore pushes borrowers out (reclaim), unless
they are inside their protected minimum run time.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from heapq import heapify
from math import inf
from typing import Any

from slackwater.common.base import limits
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.placement import Placer
from slackwater.services.master.scheduling.policies.queue_index import (
    RUNNING_LEVEL,
    Key,
    Level,
    Queues,
)
from slackwater.services.master.scheduling.policies.reasons import explain_queue
from slackwater.services.master.scheduling.policies.room import demand_of
from slackwater.services.master.scheduling.policies.walk import Walk
from slackwater.services.master.scheduling.rules import EVERY_RULE
from slackwater.services.master.scheduling.view import (
    NOTHING,
    Allocation,
    JobView,
    Pending,
    Plan,
    View,
)

__all__ = ["Key", "Level", "QueuePolicy", "Queues"]


class QueuePolicy(ABC):
    """An order over jobs, made into a policy by the walk. Subclasses say `place`."""

    honours = EVERY_RULE
    strict = False
    """A job that does not fit blocks all behind it (of its tenant, where there are quotas)."""
    preemptive = True
    running_first = False
    """Inside a level running jobs come before waiting ones: equals never preempt each other."""
    keys_move = False
    """A running job's key changes as it runs (remaining time, an index)."""
    places_change = False
    """A job's place may change by itself: `place` answers instants."""
    consolidate = "prefer"

    @abstractmethod
    def place(self, job: JobView, now_s: float, notes: Any) -> tuple[Level, Key, float]:
        """(level, key, instant at which one of them changes by itself)."""

    def key_now(self, job: JobView, now_s: float, notes: Any) -> Key:
        """A running job's key at this instant."""
        return self.place(job, now_s, notes)[1]

    def fresh_notes(self) -> Any:
        return None

    def ended(self, job: JobView, now_s: float, queues: Queues) -> None:  # noqa: B027 (a hook)
        """A job left the system (hook for policies that learn from history)."""

    def changed_by_itself(self, job: JobView, at_s: float, notes: Any) -> None:  # noqa: B027
        """The instant that `place` announced has come (hook: promotion)."""

    def protected_until_s(self, job: JobView, view: View) -> float:
        return job.since_s + view.rules.min_run_s

    def protects(self, view: View) -> bool:
        """Say whether any running job can be protected: the walk is shorter where none is."""
        return view.rules.min_run_s > 0

    def next_round_s(self, view: View) -> float:
        """When to look again although nothing happens (only asked while jobs wait)."""
        return inf

    def wants_consolidation(self, job: JobView, notes: Any) -> str:
        """`prefer`, `require` or `no`: few machines, as Tiresias section 3.3.3 decides by skew."""
        return self.consolidate

    # The decision ------------------------------------------------------------------------------

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
        queues = self.update(view, memory)
        walk = Walk(self, view, queues)
        walk.run()
        placer = Placer(view, walk.stops)
        allocations: dict[JobId, Allocation] = dict.fromkeys(walk.stops, NOTHING)
        parked: set[JobId] = set()
        for attempt in range(limits.REPLACEMENT_WALKS_MAX):
            placed, failed = self._place_starts(walk, placer, view, queues)
            if not failed or self.strict or attempt == limits.REPLACEMENT_WALKS_MAX - 1:
                break
            # GPUs set aside for a job that found no placement go to those behind it.
            walk.restore(())
            parked.update(failed)
            walk = Walk(self, view, queues, without=parked)
            walk.run()
            placer = Placer(view, walk.stops)
            allocations = dict.fromkeys(walk.stops, NOTHING)
        walk.restore(placed)
        allocations.update(placed)
        waits = len(queues.entries) > len(placed) or bool(walk.stops)
        next_s = inf
        if waits:
            protected_end_s = min(walk.protected_end_s, self._protected_now_s(view, placed))
            next_s = self.next_s(view, queues, allocations, protected_end_s)
        return Plan(allocations, next_decision_s=next_s), queues

    def _protected_now_s(self, view: View, placed: Mapping[JobId, Allocation]) -> float:
        """When the protection of the first that starts now ends."""
        if not self.protects(view):
            return inf
        after = (view.jobs[job_id].moved(at, view.now_s) for job_id, at in placed.items())
        ends_s = (self.protected_until_s(job, view) for job in after)
        return min((end_s for end_s in ends_s if end_s > view.now_s), default=inf)

    def _place_starts(
        self, walk: Walk, placer: Placer, view: View, queues: Queues
    ) -> tuple[dict[JobId, Allocation], list[JobId]]:
        placed: dict[JobId, Allocation] = {}
        failed: list[JobId] = []
        for job_id, kind in walk.starts:
            if failed and self.strict:
                failed.append(job_id)
                continue
            job = view.jobs[job_id]
            mode = self.wants_consolidation(job, queues.notes)
            allocation = placer.place_job(job, view.cluster.gpu_types[kind], mode)
            if allocation:
                placed[job_id] = allocation
            else:
                failed.append(job_id)
        return placed, failed

    def next_s(
        self,
        view: View,
        queues: Queues,
        allocations: Mapping[JobId, Allocation],
        protected_end_s: float,
    ) -> float:
        """Asked only while jobs wait: otherwise nobody could gain from a demotion or a round, and
        places are brought up to date at the next decision."""
        next_s = min(queues.next_due_s(), self.next_round_s(view), protected_end_s)
        if not self.places_change:
            return next_s
        for job_id, allocation in allocations.items():
            after = view.jobs[job_id].moved(allocation, view.now_s)
            next_s = min(next_s, self.place(after, view.now_s, queues.notes)[2])
        return next_s

    def update(self, view: View, memory: Any) -> Queues:
        if memory is None or view.changed is None:
            queues = Queues(self.fresh_notes() if memory is None else memory.notes)
            for job in view.jobs.values():
                self._put(job, view, view.now_s, queues)
            if memory is not None:
                for job_id, job in memory.seen.items():
                    if job_id not in view.jobs:
                        self.ended(job, view.now_s, queues)
        else:
            queues = memory
            for job_id in view.changed:
                before = queues.drop(job_id)
                active = view.jobs.get(job_id)
                if active is not None:
                    self._put(active, view, view.now_s, queues)
                elif before is not None:
                    self.ended(before, view.now_s, queues)
        while (due := queues.pop_due(view.now_s)) is not None:
            at_s, job_id = due
            job = queues.seen[job_id]
            self.changed_by_itself(job, at_s, queues.notes)
            queues.drop(job_id)
            self._put(job, view, at_s, queues)
        return queues

    def in_order(self, view: View, queues: Queues) -> list[JobView]:
        """Every active job in the order of the walk (for those who walk it differently)."""
        first = self.running_first or not self.preemptive

        def key(job: JobView) -> tuple[Level, bool, Key, int]:
            level, inside, _ = self.place(job, view.now_s, queues.notes)
            if job.allocation and not self.preemptive:
                level = RUNNING_LEVEL
            return level, first and not job.allocation, inside, job.number

        return sorted(view.jobs.values(), key=key)

    def _put(self, job: JobView, view: View, now_s: float, queues: Queues) -> None:
        level, key, due_s = self.place(job, now_s, queues.notes)
        if job.allocation and not self.preemptive:
            level = RUNNING_LEVEL
        queues.put(job, level, key, due_s, demand_of(job, view.cluster, view.rules))

    def replace_waiting(self, view_now_s: float, queues: Queues) -> None:
        """Every waiting job's key anew (an index whose distribution was learned anew)."""
        for buckets in queues.buckets.values():
            for bucket in buckets.values():
                entries = []
                for entry in bucket.heap:
                    if queues.entries.get(entry[2]) is entry:
                        job = queues.seen[entry[2]]
                        key = self.place(job, view_now_s, queues.notes)[1]
                        queues.entries[job.id] = (key, job.number, job.id)
                        entries.append(queues.entries[job.id])
                heapify(entries)
                bucket.heap = entries

    def explain(self, view: View, memory: Any) -> list[Pending]:
        return explain_queue(self, view, memory)
