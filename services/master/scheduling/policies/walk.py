"""One pass down the queues (Tiresias, Pseudocode 2): who fits runs, who does not is skipped.

From the first level to the last, from the first key to the last. A waiting job that fits starts, a
running one that does not is preempted; `strict`, the first misfit blocks what is behind it. With
quotas there are two passes: within the guarantees, then what is borrowed.
"""

from bisect import bisect_left
from collections.abc import Container
from heapq import heappop, heappush
from math import inf

from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.order import Order
from slackwater.services.master.scheduling.policies.queue_index import (
    RUNNING_LEVEL,
    Bucket,
    Entry,
    Held,
    Key,
    Level,
    Queues,
)
from slackwater.services.master.scheduling.policies.room import Demand, Room, type_held
from slackwater.services.master.scheduling.view import View


def _rank(held: Held) -> tuple[Key, int]:
    return held[:2]


class Walk:
    """One pass down the queues. Afterwards: `starts` (job, GPU type) and `stops`."""

    def __init__(
        self,
        policy: Order,
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
        self.one_type = len(view.cluster.gpu_types) == 1
        self.simple = self.one_type and not view.rules.quotas

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
                if level == RUNNING_LEVEL and not last:
                    self._count_borrowed(running)
                self._start_waiting(self._heads(level), None)
            else:
                self._merge(level, last)

    def _keep_running(self, level: Level, last: bool) -> None:
        gpus_sum = self.queues.running_gpus[level]
        if self.simple and not self.protected and gpus_sum <= self.room.free[0]:
            self.room.free[0] -= gpus_sum
        else:
            self._keep_some(sorted(self._running_now(level)), last)

    def _count_borrowed(self, running: list[Held]) -> None:
        """Count what runs beyond a tenant's guarantee as used by it: without preemption a tenant's
        later jobs come after these, and push none of them out."""
        used = self.room.used
        for _, _, gpus, job_id in running:
            if job_id not in self.settled and job_id not in self.protected:
                tenant = self.queues.seen[job_id].tenant
                used[tenant] = used.get(tenant, 0) + gpus

    def _keep_in_order(self, running: list[Held], last: bool) -> None:
        """`_keep` for each, where there is one GPU type (a busy cluster's innermost loop)."""
        room, seen, protected, settled = self.room, self.queues.seen, self.protected, self.settled
        free, quotas, used = room.free[0], room.quotas, room.used
        for _, _, gpus, job_id in running:
            if job_id in protected or job_id in settled:
                continue
            fits = gpus <= free
            if quotas:
                tenant = seen[job_id].tenant
                mine = used.get(tenant, 0) + gpus
                fits = fits and (room.borrowing or mine <= quotas.get(tenant, 0))
                if fits:
                    used[tenant] = mine
            if fits:
                free -= gpus
                if not last:
                    settled.add(job_id)
            elif last:
                self.stops.append(job_id)
        room.free[0] = free

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
            behind = self._behind_waiting(self._running_now(level), heads)
            at = 0
            while heads and at < len(behind):
                # Keep those that come before the first waiting job, then start it, and so on.
                first = heads[0][0][:2]
                until = bisect_left(behind, first, lo=at, key=_rank)
                self._keep_some(behind[at:until], last)
                at = until
                self._start_waiting(
                    heads, (*behind[at][:2], JobId("")) if at < len(behind) else None
                )
            self._keep_some(behind[at:], last)
        self._start_waiting(heads, None)

    def _keep_some(self, running: list[Held], last: bool) -> None:
        if self.one_type:
            self._keep_in_order(running, last)
        else:
            for held in running:
                self._keep(held, last)

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
