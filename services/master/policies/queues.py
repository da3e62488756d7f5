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

from bisect import bisect_left, insort
from collections.abc import Container, Mapping
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from slackwater.schemas.base import JobId
from slackwater.services.master.policies.placement import Placer
from slackwater.services.master.policies.room import Demand, Room, demand_of, type_held
from slackwater.services.master.policies.view import (
    NOTHING,
    Allocation,
    JobView,
    Pending,
    Plan,
    View,
)

Level = tuple[float, ...]
Key = tuple[float, ...]
Entry = tuple[Key, int, JobId]
"""(key, submission number, job): the order inside a bucket; the number makes it total."""
Held = tuple[Key, int, int, JobId]
"""(key, submission number, GPUs held, job): the same for a running job."""

RUNNING_LEVEL: Level = ()
"""Before every other level: where the running jobs of a policy without preemption are."""

_REPLACEMENT_WALKS_MAX = 4
"""How often a walk is repeated without the jobs for which no placement was found."""


class Bucket:
    __slots__ = ("demand", "heap")

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.heap: list[Entry] = []


class Queues:
    """The memory of a queue-ordered policy: an index of the active jobs, kept between decisions."""

    __slots__ = (
        "buckets",
        "changes",
        "due_s",
        "entries",
        "held",
        "levels",
        "notes",
        "running",
        "running_gpus",
        "seen",
        "where",
    )

    def __init__(self, notes: Any) -> None:
        self.levels: list[Level] = []
        self.buckets: dict[Level, dict[Demand, Bucket]] = {}
        self.running: dict[Level, list[Held]] = {}
        """Running jobs in order of the key they were put in with."""
        self.held: dict[JobId, Held] = {}
        self.running_gpus: dict[Level, int] = {}
        self.seen: dict[JobId, JobView] = {}
        self.where: dict[JobId, Level] = {}
        self.entries: dict[JobId, Entry] = {}
        """Waiting jobs' valid entries; a heap may hold older ones, dropped when they surface."""
        self.due_s: dict[JobId, float] = {}
        self.changes: list[tuple[float, int, JobId]] = []
        """When a job's place changes by itself; valid if it equals `due_s`."""
        self.notes = notes
        """What the policy itself remembers (a distribution, promotions)."""

    def put(self, job: JobView, level: Level, key: Key, due_s: float, demand: Demand) -> None:
        if level not in self.buckets:
            self.buckets[level] = {}
            self.running[level] = []
            self.running_gpus[level] = 0
            insort(self.levels, level)
        self.seen[job.id] = job
        self.where[job.id] = level
        if job.allocation:
            held = self.held[job.id] = (key, job.number, job.held_gpus, job.id)
            insort(self.running[level], held)
            self.running_gpus[level] += held[2]
        else:
            entry = (key, job.number, job.id)
            self.entries[job.id] = entry
            bucket = self.buckets[level].get(demand)
            if bucket is None:
                bucket = self.buckets[level][demand] = Bucket(demand)
            heappush(bucket.heap, entry)
        if due_s < inf:
            self.due_s[job.id] = due_s
            heappush(self.changes, (due_s, job.number, job.id))

    def drop(self, job_id: JobId) -> JobView | None:
        job = self.seen.pop(job_id, None)
        if job is None:
            return None
        level = self.where.pop(job_id)
        if job.allocation:
            held, running = self.held.pop(job_id), self.running[level]
            del running[bisect_left(running, held)]
            self.running_gpus[level] -= held[2]
        else:
            self.entries.pop(job_id, None)
        self.due_s.pop(job_id, None)
        return job

    def pop_due(self, now_s: float) -> tuple[float, JobId] | None:
        """The next job whose place has changed by itself, with the instant it did."""
        while self.changes:
            at_s, _, job_id = self.changes[0]
            if self.due_s.get(job_id) == at_s:
                if at_s > now_s:
                    return None
                heappop(self.changes)
                del self.due_s[job_id]
                return at_s, job_id
            heappop(self.changes)
        return None

    def next_due_s(self) -> float:
        while self.changes and self.due_s.get(self.changes[0][2]) != self.changes[0][0]:
            heappop(self.changes)
        return self.changes[0][0] if self.changes else inf


class QueuePolicy:
    """An order over jobs, made into a policy by the walk. Subclasses say `place`."""

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

    def place(self, job: JobView, now_s: float, notes: Any) -> tuple[Level, Key, float]:
        """(level, key, instant at which one of them changes by itself)."""
        raise NotImplementedError

    def key_now(self, job: JobView, now_s: float, notes: Any) -> Key:
        """A running job's key at this instant."""
        return self.place(job, now_s, notes)[1]

    def fresh_notes(self) -> Any:
        return None

    def ended(self, job: JobView, now_s: float, queues: Queues) -> None:
        """A job left the system (hook for policies that learn from history)."""

    def changed_by_itself(self, job: JobView, at_s: float, notes: Any) -> None:
        """The instant that `place` announced has come (hook: promotion)."""

    def protected_until_s(self, job: JobView, view: View) -> float:
        return job.since_s + view.rules.min_run_s

    def protects(self, view: View) -> bool:
        """Whether any running job can be protected: the walk is shorter where none is."""
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
        for attempt in range(_REPLACEMENT_WALKS_MAX):
            placed, failed = self._place_starts(walk, placer, view, queues)
            if not failed or self.strict or attempt == _REPLACEMENT_WALKS_MAX - 1:
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
        next_s = self.next_s(view, queues, allocations, walk.protected_end_s) if waits else inf
        return Plan(allocations, next_decision_s=next_s), queues

    def _place_starts(
        self, walk: "Walk", placer: Placer, view: View, queues: Queues
    ) -> tuple[dict[JobId, Allocation], list[JobId]]:
        placed: dict[JobId, Allocation] = {}
        failed: list[JobId] = []
        for job_id, kind in walk.starts:
            if failed and self.strict:
                failed.append(job_id)
                continue
            job = view.jobs[job_id]
            mode = self.wants_consolidation(job, queues.notes)
            allocation = placer.place(job.gpus, view.cluster.gpu_types[kind], mode)
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
        from slackwater.services.master.policies.reasons import explain_queue

        return explain_queue(self, view, memory)


class Walk:
    """One pass down the queues. Afterwards: `starts` (job, GPU type) and `stops`."""

    def __init__(
        self,
        policy: QueuePolicy,
        view: View,
        queues: Queues,
        without: Container[JobId] = (),
    ) -> None:
        self.policy, self.view, self.queues, self.without = policy, view, queues, without
        self.room = Room(view.cluster, view.rules)
        self.starts: list[tuple[JobId, int]] = []
        self.stops: list[JobId] = []
        self.protected_end_s = inf
        self.protected: set[JobId] = set()
        self.settled: set[JobId] = set()
        """Jobs that an earlier phase admitted (only kept where there are quotas)."""
        self.blocked: set[str] = set()
        self.popped: list[tuple[Bucket, Entry]] = []
        self.simple = not view.rules.quotas and len(view.cluster.gpu_types) == 1

    def run(self) -> None:
        if self.policy.protects(self.view):
            self._hold_protected()
        if not self.view.rules.quotas:
            self._phase(last=True)
            return
        borrowing = self.view.rules.borrowing
        self._phase(last=not borrowing)
        if borrowing:
            self.room.borrowing = True
            self.blocked.clear()
            self.restore(self.settled)
            self._phase(last=True)

    def restore(self, started: Container[JobId]) -> None:
        """Put the entries of all others back into their buckets: these jobs wait on."""
        kept = []
        for bucket, entry in self.popped:
            if entry[2] in started:
                kept.append((bucket, entry))
            else:
                heappush(bucket.heap, entry)
        self.popped = kept

    def _hold_protected(self) -> None:
        for running in self.queues.running.values():
            for _, _, gpus, job_id in running:
                job = self.queues.seen[job_id]
                until_s = self.policy.protected_until_s(job, self.view)
                if until_s > self.view.now_s:
                    self.protected.add(job_id)
                    self.protected_end_s = min(self.protected_end_s, until_s)
                    self.room.take(type_held(job, self.view.cluster), gpus, job.tenant)

    def _phase(self, last: bool) -> None:
        for level in self.queues.levels:
            running = self.queues.running[level]
            if self.policy.running_first or level == RUNNING_LEVEL:
                if running:
                    self._keep_running(level, last)
                self._start_waiting(self._heads(level), None)
            else:
                self._merge(level, last)

    def _keep_running(self, level: Level, last: bool) -> None:
        if not self.simple or self.protected:
            for held in sorted(self._running_now(level)):
                self._keep(held, last)
            return
        free, gpus_sum = self.room.free[0], self.queues.running_gpus[level]
        if gpus_sum <= free:
            self.room.free[0] -= gpus_sum
            return
        for _, _, gpus, job_id in sorted(self._running_now(level)):
            if gpus <= free:
                free -= gpus
            else:
                self.stops.append(job_id)
        self.room.free[0] = free

    def _running_now(self, level: Level) -> list[Held]:
        """The level's running jobs with their keys of this instant."""
        running = self.queues.running[level]
        if not self.policy.keys_move:
            return running
        now_s, notes, seen = self.view.now_s, self.queues.notes, self.queues.seen
        key_now = self.policy.key_now
        return [
            (key_now(seen[job_id], now_s, notes), number, gpus, job_id)
            for _, number, gpus, job_id in running
        ]

    def _keep(self, held: Held, last: bool) -> None:
        _, _, gpus, job_id = held
        if job_id in self.protected or job_id in self.settled:
            return
        job = self.queues.seen[job_id]
        kind = type_held(job, self.view.cluster)
        if self.room.fits(Demand(gpus, (kind,), job.tenant)) >= 0:
            self.room.take(kind, gpus, job.tenant)
            if not last:
                self.settled.add(job_id)
        elif last:
            self.stops.append(job_id)

    def _heads(self, level: Level) -> list[tuple[Entry, Bucket]]:
        """The first valid entry of every bucket that fits, as a heap."""
        heads: list[tuple[Entry, Bucket]] = []
        for bucket in self.queues.buckets[level].values():
            if bucket.heap and (self.policy.strict or self.room.fits(bucket.demand) >= 0):
                self._push_head(heads, bucket)
        return heads

    def _push_head(self, heads: list[tuple[Entry, Bucket]], bucket: Bucket) -> None:
        entries, heap = self.queues.entries, bucket.heap
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is not entry:
                heappop(heap)
            elif entry[2] in self.without:
                self.popped.append((bucket, heappop(heap)))
            else:
                heappush(heads, (entry, bucket))
                return

    def _start_waiting(self, heads: list[tuple[Entry, Bucket]], before: Entry | None) -> None:
        """Start who fits, in order, up to (not with) the entry `before`."""
        room = self.room
        while heads and (before is None or heads[0][0] < before):
            entry, bucket = heappop(heads)
            demand = bucket.demand
            if self.policy.strict and demand.tenant in self.blocked:
                continue
            kind = room.fits(demand)
            if kind < 0:
                if self.policy.strict:
                    self.blocked.add(demand.tenant)
                continue
            room.take(kind, demand.gpus, demand.tenant)
            heappop(bucket.heap)
            self.popped.append((bucket, entry))
            self.settled.add(entry[2])
            self.starts.append((entry[2], kind))
            self._push_head(heads, bucket)

    def _merge(self, level: Level, last: bool) -> None:
        """Running and waiting jobs by key alone."""
        heads = self._heads(level)
        running = self.queues.running[level]
        if running and not heads and self.simple and not self.protected:
            self._keep_running(level, last)
        elif running:
            for held in self._behind_waiting(self._running_now(level), heads):
                self._start_waiting(heads, (held[0], held[1], held[3]))
                self._keep(held, last)
        self._start_waiting(heads, None)

    def _behind_waiting(self, running: list[Held], heads: list[tuple[Entry, Bucket]]) -> list[Held]:
        """The running jobs in order, without those ahead of every waiting one if they all fit:
        these are taken as one sum."""
        if not self.simple or self.protected:
            return sorted(running)
        first = heads[0][0][:2]
        ahead = sum(held[2] for held in running if held[:2] < first)
        if ahead > self.room.free[0]:
            return sorted(running)
        self.room.free[0] -= ahead
        return sorted(held for held in running if held[:2] > first)
