"""The pool of aggregators: who is there, who has been given to which cluster.

AutoPS section 3.3.3: a controller asks for every allocation and deallocation, and the master
approves within the pool and the cluster's maximum. Who is allocated is durable (bucket `nodes`),
who is alive is learned from heartbeats. Every request is granted once: a repeated one gets the
answer it got before, and a late deallocation cannot end a newer allocation.

An aggregator that was given back while it was dead may come back with buckets that have long begun
anew elsewhere. A free one that holds anything is not given to anybody; the master drops what is
there, by the location epochs it was told, so that nothing newer can be hit.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from slackwater.common.base.effects import Effect, Log, Persist, Publish, Request
from slackwater.common.base.limits import LOST_AFTER_S
from slackwater.common.base.words import number_of
from slackwater.schemas import subjects
from slackwater.schemas.base import (
    AGGREGATORS_MAX,
    AggregatorId,
    ClusterId,
    JobId,
    Message,
    Ok,
    Refused,
)
from slackwater.schemas.cluster import (
    AdoptAggregators,
    AggregatorHeartbeat,
    AggregatorInfo,
    AggregatorList,
    AggregatorRecord,
    AggregatorsAllocated,
    AllocateAggregators,
    AllocationEvent,
    DeallocateAggregators,
)
from slackwater.schemas.placement import BucketHeld, BucketsHeld, DropJob, ListBuckets
from slackwater.services.master.keys import CleanKey, HeldKey
from slackwater.services.master.members import longest_silent, outdated

_Fact = Literal["allocated", "released", "lost", "returned", "adopted"]
BUCKET = "nodes"
RETRY_S = 1.0
CLEAN_BUDGET_S = 5.0
NO_DRAINS: Final[Mapping[AggregatorId, str]] = MappingProxyType({})


@dataclass(slots=True)
class _Member:
    heartbeat: AggregatorHeartbeat
    seen_s: float
    alive: bool = True


class Pool:
    """Methods return the effects and, for a request, its answer."""

    def __init__(self, aggregators_max: int) -> None:
        self._max = aggregators_max
        self._records: dict[AggregatorId, AggregatorRecord] = {}
        """Records of allocated aggregators only; one without a record is free."""
        self._members: dict[AggregatorId, _Member] = {}
        self._epoch = 0
        self._full_logged = False
        self._cleaning: set[AggregatorId] = set()
        """Free ones that are being asked what they still hold."""
        self.leaving: frozenset[str] = frozenset()
        """Free ones that are about to be stopped: they are given to nobody."""
        self.lacked = (0, -math.inf)
        """The number that the last request asked for, if it was refused for want of free ones, and
        when."""
        self.grows_to = 0
        """The most that the operator's hook may start; 0: none."""
        self.unreadable: frozenset[str] = frozenset()
        """Aggregators whose records are damaged: they are somebody's, and neither given nor
        emptied."""

    def recover(self, records: dict[str, AggregatorRecord], epoch: int) -> None:
        self._epoch = epoch
        self._records = {r.id: r for r in records.values() if r.cluster is not None}

    # For the choice of a cluster ------------------------------------------------------------------

    def share(self) -> float:
        """cpu_share of a member (they are alike on one machine); 0 while none is known."""
        return max((m.heartbeat.cpu_share for m in self._members.values()), default=0.0)

    def smallest_share(self) -> float:
        """Return the cores of the slowest aggregator that is heard; infinite: none is."""
        shares = (m.heartbeat.cpu_share for m in self._members.values() if m.alive)
        return min(shares, default=math.inf)

    def unallocated(self, cluster: ClusterId) -> int:
        """How many more aggregators the cluster could be given now."""
        return min(self._max - self._held_by(cluster), len(self.free()))

    def lent(self) -> Counter[JobId]:
        """Count the temporary aggregators that are allocated for each job's profiling."""
        return Counter(r.temporary_for for r in self._records.values() if r.temporary_for)

    @property
    def profiling(self) -> set[JobId]:
        """Jobs that have their temporary aggregators."""
        return {r.temporary_for for r in self._records.values() if r.temporary_for is not None}

    @property
    def alive(self) -> int:
        """Aggregators that are heard, allocated or not."""
        return sum(member.alive for member in self._members.values())

    @property
    def in_use(self) -> int:
        return len(self._records)

    # Membership ---------------------------------------------------------------------------------

    def heard(self, heartbeat: AggregatorHeartbeat, now_s: float) -> list[Effect]:
        id = AggregatorId(heartbeat.id)
        member = self._members.get(id)
        if member is None:
            if len(self._members) >= AGGREGATORS_MAX and not self._make_room(now_s):
                return self._log_full(id)
            self._members[id] = _Member(heartbeat, now_s)
            return []
        if heartbeat.incarnation < member.heartbeat.incarnation:
            return []  # Sent by an instance that was replaced.
        back = not member.alive or heartbeat.incarnation > member.heartbeat.incarnation
        member.heartbeat, member.seen_s, member.alive = heartbeat, now_s, True
        record = self._records.get(id)
        if record is None:
            return self._clean(id, heartbeat)
        return [self._event(record, "returned", now_s)] if back else []

    def _clean(self, id: AggregatorId, heartbeat: AggregatorHeartbeat) -> list[Effect]:
        if heartbeat.buckets == 0 or id in self._cleaning or id in self.unreadable:
            return []
        self._cleaning.add(id)
        subject = subjects.command("aggregator", id, "held")
        return [Request(subject, ListBuckets(), HeldKey(id), budget_s=CLEAN_BUDGET_S)]

    def held(self, id: AggregatorId, answer: Message) -> list[Effect]:
        """Drop what a free aggregator holds. The next heartbeat shows whether it is gone."""
        self._cleaning.discard(id)
        if not isinstance(answer, BucketsHeld) or id in self._records:
            return []
        jobs: dict[JobId, list[BucketHeld]] = {}
        for each in answer.held:
            jobs.setdefault(each.job, []).append(each)
        return [
            Request(
                subjects.command("aggregator", id, "drop"),
                DropJob(
                    job=job,
                    buckets=tuple(each.bucket for each in stale),
                    up_to_epochs=tuple(each.location_epoch for each in stale),
                ),
                CleanKey(id, job),
                budget_s=CLEAN_BUDGET_S,
            )
            for job, stale in jobs.items()
        ]

    def counts(self) -> dict[str, int]:
        """Count members by state: free, used by a cluster, dead."""
        dead = len(self._members) - self.alive
        free = len(self.free())
        return {"free": free, "used": self.alive - free, "dead": dead}

    def tick(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for id, member in self._members.items():
            if member.alive and now_s - member.seen_s > LOST_AFTER_S:
                member.alive = False
                record = self._records.get(id)
                if record is not None:
                    effects.append(self._event(record, "lost", now_s))
        for id in outdated(self._forgettable(), now_s):
            del self._members[id]
        return effects

    def _forgettable(self) -> Iterator[tuple[AggregatorId, float]]:
        """Yield those that are lost and nobody's, and when each was heard."""
        for id, member in self._members.items():
            if not member.alive and id not in self._records:
                yield id, member.seen_s

    def _make_room(self, now_s: float) -> bool:
        """Forget one for another; False: there is none to forget."""
        id = longest_silent(self._forgettable(), now_s, LOST_AFTER_S)
        if id is not None:
            del self._members[id]
        return id is not None

    # Approval -----------------------------------------------------------------------------------

    def allocate(self, ask: AllocateAggregators, now_s: float) -> tuple[list[Effect], Message]:
        given = sorted(
            r.id for r in self._records.values()
            if r.request == ask.request and r.cluster == ask.cluster
        )  # fmt: skip
        if given:
            return [], AggregatorsAllocated(request=ask.request, aggregators=tuple(given))
        needed = ask.at_least or ask.count
        if needed > self._max:
            return [], Refused(
                reason=f"{number_of(needed, 'aggregator')} asked for, a cluster may have "
                f"{self._max} "
                "(aggregators_max of the master)"
            )
        free = self.free()
        room = self._max - self._held_by(ask.cluster)
        count = min(ask.count, room, len(free))
        if count < needed:
            if room >= needed:
                self.lacked = (needed, now_s)
            return [], self._short(ask, needed, len(free), room)
        self.lacked = (0, now_s)
        effects: list[Effect] = []
        for id in free[:count]:
            record = AggregatorRecord(
                id=id,
                cluster=ask.cluster,
                since_s=now_s,
                temporary_for=JobId(ask.temporary_for) if ask.temporary_for else None,
                request=ask.request,
                epoch=self._epoch,
            )
            self._records[id] = record
            effects += [Persist(BUCKET, id, record), self._event(record, "allocated", now_s)]
        return effects, AggregatorsAllocated(request=ask.request, aggregators=tuple(free[:count]))

    def deallocate(self, ask: DeallocateAggregators, now_s: float) -> tuple[list[Effect], Message]:
        if ask.requests and len(ask.requests) != len(ask.aggregators):
            return [], Refused(
                reason=f"{len(ask.aggregators)} aggregators and {len(ask.requests)} requests: "
                "name one request for each, or none"
            )
        effects: list[Effect] = []
        for index, id in enumerate(ask.aggregators):
            record = self._records.get(id)
            if record is None or record.cluster != ask.cluster:
                continue
            if ask.requests and ask.requests[index] != record.request:
                continue
            del self._records[id]
            effects += [Persist(BUCKET, id, None), self._event(record, "released", now_s)]
        return effects, Ok()

    def adopt(self, ask: AdoptAggregators, now_s: float) -> tuple[list[Effect], Message]:
        effects: list[Effect] = []
        for id in ask.aggregators:
            record = self._records.get(id)
            if record is None or record.cluster != ask.cluster or record.temporary_for is None:
                continue
            record = msgspec.structs.replace(record, temporary_for=None, epoch=self._epoch)
            self._records[id] = record
            effects += [Persist(BUCKET, id, record), self._event(record, "adopted", now_s)]
        return effects, Ok()

    def listing(self, drains: Mapping[AggregatorId, str] = NO_DRAINS) -> AggregatorList:
        """`drains`: which are being emptied, and how far that is."""
        ids = sorted(self._records.keys() | self._members.keys())
        infos = []
        for id in ids[:AGGREGATORS_MAX]:
            member = self._members.get(id)
            infos.append(
                AggregatorInfo(
                    record=self._records.get(id) or AggregatorRecord(id=id),
                    alive=member is not None and member.alive,
                    heartbeat=member.heartbeat if member else None,
                    drain=drains.get(id, ""),
                )
            )
        return AggregatorList(aggregators=tuple(infos))

    def free(self) -> list[AggregatorId]:
        """Return live, unallocated, empty aggregators, by id."""
        return sorted(
            id
            for id, member in self._members.items()
            if member.alive
            and member.heartbeat.buckets == 0
            and id not in self._records
            and id not in self.unreadable
            and id not in self.leaving
        )

    def serving(self) -> list[AggregatorId]:
        """List those that are heard and are not about to be stopped, by id."""
        return sorted(id for id, m in self._members.items() if m.alive and id not in self.leaving)

    def is_alive(self, id: AggregatorId) -> bool:
        return id in self._members and self._members[id].alive

    def serves(self, id: AggregatorId) -> bool:
        """Say whether it is allocated, or holds anything."""
        member = self._members.get(id)
        return id in self._records or (member is not None and member.heartbeat.buckets > 0)

    # Inside -------------------------------------------------------------------------------------

    def _short(self, ask: AllocateAggregators, needed: int, free: int, room: int) -> Refused:
        """Waiting would not help in a pool that is too small to profile a job beside one that asks
        for as much, once nobody is being profiled there: nothing is given back soon."""
        small = len(self._members) < 2 * needed and self.alive >= self.grows_to and self._records
        hopeless = ask.temporary_for and small and not self.profiling
        remedies = []
        if free < needed:
            remedies.append("`slackwater run aggregator` adds one")
        if room < needed:
            remedies.append("the master's aggregators_max is raised")
        asked = f"{number_of(needed, 'aggregator')} asked for"
        return Refused(
            reason=f"{asked}: {free} free in the pool, cluster {ask.cluster} may have {room} more; "
            f"that changes when a job ends or {' and '.join(remedies)}",
            retry_after_s=0.0 if hopeless else RETRY_S,
        )

    def _held_by(self, cluster: ClusterId) -> int:
        return sum(record.cluster == cluster for record in self._records.values())

    def _event(self, record: AggregatorRecord, fact: _Fact, now_s: float) -> Publish:
        return Publish(
            subjects.event("aggregator", record.id, fact),
            AllocationEvent(
                aggregator=record.id,
                fact=fact,
                cluster=record.cluster,
                temporary_for=record.temporary_for or "",
                in_use=self.in_use,
                at_s=now_s,
            ),
        )

    def _log_full(self, id: AggregatorId) -> list[Effect]:
        if self._full_logged:
            return []
        self._full_logged = True
        return [Log("pool.full", {"refused": id, "aggregators_max": AGGREGATORS_MAX}, "warning")]
