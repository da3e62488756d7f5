"""Aggregators that are emptied by an operator's order, before their machine goes (AutoPS section 6,
transient resources: when a spot instance is going to expire, other aggregators take over).

An order has an id, a deadline, and a record, so that a controller that is killed goes on with it.
The aggregator takes nothing new; the jobs on it move as policies say, new aggregators where the
master has any, else whatever is there. Those come first that would lose their optimiser state with
the machine, and of these the smallest, so that as many as possible are whole in time. A few move
at a time, each by the lane and within the cap of migrations.

What has not left by the deadline is said, and still tries. When the machine then goes, a bucket
that is left begins anew elsewhere from the workers' parameters (`rehost_after_s`, without its
optimiser state), or goes on where it was if the aggregator comes back with its descriptor store.

An empty one is kept, alive and unused, until it is gone or the order is taken back: the pool would
lend it to somebody else.
"""

from typing import Final

import msgspec

from slackwater.common.base.effects import Persist
from slackwater.common.domains.slots.layout import (
    rule_names,
)
from slackwater.common.domains.slots.rules import RULES
from slackwater.schemas.base import CONFLICT, NOT_FOUND, AggregatorId, Message, Ok, Refused
from slackwater.schemas.cluster import (
    AggregatorDrain,
    DrainAggregator,
    DrainedJob,
    DrainProgress,
    RestoreAggregator,
)
from slackwater.services.controller import assignment, scaling
from slackwater.services.controller.room import sizes_of
from slackwater.services.controller.state import Job, State

JOBS_AT_ONCE: Final = 4
LISTED_MAX: Final = 1000
_LEADS_AWAY: Final = frozenset({"lost", "drained"})
"""Causes of a pending assignment that lead away from the aggregator already."""


def order(state: State, message: DrainAggregator, now_s: float) -> Message:
    """Begin, or say how far it is."""
    id = AggregatorId(message.aggregator)
    entry = state.aggregators.get(id)
    if entry is None or not entry.ours:
        return Refused(
            reason=f"aggregator {id} does not serve cluster {state.cluster}: nothing of it is "
            "there",
            code=NOT_FOUND,
        )
    known = state.drains.get(id)
    if known is None and id in scaling.given_back(state):
        return Refused(
            reason=f"aggregator {id} is empty and about to serve no cluster: it is not drained",
            code=CONFLICT,
        )
    if known is None or known.request != message.request:
        drain = AggregatorDrain(
            aggregator=id,
            request=message.request,
            begun_s=now_s,
            deadline_s=now_s + message.within_s,
        )
        entry.leaving = True
        _store(state, drain)
        state.count("drains")
        _tell(state, id, "draining", now_s, within_s=f"{message.within_s:g}")
        _pursue(state, drain, now_s)
        _judge(state, drain, now_s)
    return progress(state, id, now_s)


def restore(state: State, message: RestoreAggregator, now_s: float) -> Message:
    id = AggregatorId(message.aggregator)
    if id not in state.drains:
        return Ok(changed=False)
    _forget(state, id)
    state.tell_aggregator(id, "restored", now_s)
    return Ok()


def recover(state: State, drain: AggregatorDrain, now_s: float) -> None:
    state.drains[drain.aggregator] = drain
    state.aggregator(drain.aggregator, now_s).leaving = True


def tick(state: State, now_s: float) -> None:
    for id in sorted(state.drains):
        entry = state.aggregator(id, now_s)
        disowned = state.pool_known and not entry.ours
        if disowned or state.is_gone(id, now_s):
            _tell(state, id, "vanished", now_s, then=_THEN)
            _forget(state, id)
            continue
        _pursue(state, state.drains[id], now_s)
        _judge(state, state.drains[id], now_s)


def progress(state: State, id: AggregatorId, now_s: float) -> DrainProgress:
    jobs = jobs_on(state, id)
    nbytes = sum(_bytes(job, id) for job in jobs)
    heartbeat = state.aggregators[id].heartbeat
    cap = heartbeat.migration_bytes_s if heartbeat is not None else 0
    return DrainProgress(
        drain=state.drains[id],
        left=tuple(
            DrainedJob(
                job=job.id,
                buckets=len(_here(job, id)),
                nbytes=_bytes(job, id),
                keeps_state=_keeps_state(job),
                phase=job.record.phase,
                reason=_why(job),
            )
            for job in jobs[:LISTED_MAX]
        ),
        left_bytes=nbytes,
        needed_s=nbytes / cap if cap else 0.0,
        at_s=now_s,
    )


def jobs_on(state: State, id: AggregatorId) -> list[Job]:
    """Jobs with anything there, in the order in which they leave."""
    jobs = [job for job in state.living() if id in job.involved()]
    return sorted(jobs, key=lambda job: (not _keeps_state(job), _bytes(job, id), job.id))


# How it goes on -----------------------------------------------------------------------------------


def _pursue(state: State, drain: AggregatorDrain, now_s: float) -> None:
    """Let the next ones leave. A job that is being profiled leaves with its profile, or without
    one when half of the time is over."""
    jobs = jobs_on(state, drain.aggregator)
    urgent = now_s >= (drain.begun_s + drain.deadline_s) / 2
    under_way = sum(job.moving for job in jobs)
    for job in jobs:
        if under_way >= JOBS_AT_ONCE:
            return
        ready = job.record.phase == "steady" or (urgent and job.record.phase == "profiling")
        if job.moving or not ready:
            continue
        if job.pending is not None and job.pending.cause in _LEADS_AWAY:
            continue
        assignment.request_assignment(state, job, "drained", now_s)
        under_way += job.moving


def _judge(state: State, drain: AggregatorDrain, now_s: float) -> None:
    id = drain.aggregator
    empty = not jobs_on(state, id)
    if empty and drain.state != "drained":
        _store(state, msgspec.structs.replace(drain, state="drained"))
        spare_s = drain.deadline_s - now_s
        state.tell_aggregator(id, "drained", now_s, request=drain.request, spare_s=f"{spare_s:.3g}")
    elif not empty and drain.state == "draining" and now_s >= drain.deadline_s:
        _store(state, msgspec.structs.replace(drain, state="late"))
        state.count("drains_late")
        _tell(state, id, "late", now_s, then=_THEN)


_THEN: Final = (
    "goes on there if the aggregator comes back with its memory, else begins anew elsewhere from "
    "what its workers, and its checkpoint if it is saved, have"
)


def _tell(state: State, id: AggregatorId, fact: str, now_s: float, **detail: str) -> None:
    jobs = jobs_on(state, id)
    state.tell_aggregator(
        id,
        fact,
        now_s,
        request=state.drains[id].request,
        jobs=",".join(job.id for job in jobs),
        buckets=str(sum(len(_here(job, id)) for job in jobs)),
        nbytes=str(sum(_bytes(job, id) for job in jobs)),
        **detail,
    )


def _store(state: State, drain: AggregatorDrain) -> None:
    drain = msgspec.structs.replace(drain, epoch=state.epoch)
    state.drains[drain.aggregator] = drain
    state.out.append(Persist(state.drains_bucket, drain.aggregator, drain))


def _forget(state: State, id: AggregatorId) -> None:
    del state.drains[id]
    state.aggregators[id].leaving = False
    state.out.append(Persist(state.drains_bucket, id, None))


# Inventory ----------------------------------------------------------------------------------------


def _here(job: Job, id: AggregatorId) -> list[int]:
    return [
        bucket for bucket in range(len(job.record.places)) if job.place(bucket).aggregator == id
    ]


def _bytes(job: Job, id: AggregatorId) -> int:
    """Return the bytes of the regions there: a copy to another host moves so many."""
    sizes = sizes_of(job)
    return sum(sizes[bucket] for bucket in _here(job, id))


def _keeps_state(job: Job) -> bool:
    """Say whether the job has optimiser state, which would be lost with the machine."""
    names = rule_names(job.record.plan, job.record.tensors)
    return any(RULES[name].states > 0 for name in names)


def _why(job: Job) -> str:
    if job.moving:
        return ""
    if job.record.phase in ("waiting", "hosting", "profiling"):
        return f"is {job.record.phase}"
    if job.pending is not None and job.pending.cause == "drained":
        return job.record.reason or "more aggregators are being asked for"
    return "waits for its turn"
