"""The index of a queue-ordered policy: which job is in which level, bucket and place.

Waiting jobs lie in buckets of equal demand, each a heap by key with stale entries that are dropped
when they surface; running jobs lie in one sorted list per level, with the sum of their GPUs. It is
the policy's memory between decisions (`queues`) and what the walk reads (`walk`).
"""

from bisect import bisect_left, insort
from heapq import heappop, heappush
from math import inf
from typing import Any

from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.room import Demand
from slackwater.services.master.scheduling.view import JobView

Level = tuple[float, ...]
Key = tuple[float, ...]
Entry = tuple[Key, int, JobId]
"""(key, submission number, job): the order inside a bucket; the number makes it total."""
Held = tuple[Key, int, int, JobId]
"""(key, submission number, GPUs held, job): the same for a running job."""

RUNNING_LEVEL: Level = ()
"""The level before all others: where the running jobs of a policy without preemption are."""


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
        """The policy's own notes (a distribution, promotions)."""

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
