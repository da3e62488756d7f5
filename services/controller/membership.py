"""The cluster's aggregators: who is alive, who is ours, who is needed no longer.

The master's list is the truth about ours. An aggregator that no job uses, nor is about to use, is
given back once it holds nothing (section 3.3.3: by the master's approval); one that serves jobs for
good is adopted. Both follow from the present state and are simply asked again until granted, so a
crash between a decision and its approval leaks nothing.
"""

from bisect import bisect_right
from itertools import islice
from math import inf

from slackwater.common.base.effects import Publish
from slackwater.common.base.limits import HEARTBEAT_S, LOST_AFTER_S
from slackwater.schemas import subjects
from slackwater.schemas.base import CONFLICT, AggregatorId, JobId, Message, Ok, Refused
from slackwater.schemas.cluster import (
    PLACED_JOBS_MAX,
    TENANTS_MAX,
    WAITING_CHARS_MAX,
    WAITING_JOBS_MAX,
    AdoptAggregators,
    AggregatorHeartbeat,
    AggregatorList,
    AggregatorLost,
    AggregatorRestarts,
    ClusterReport,
    DeallocateAggregators,
    ListAggregators,
    LostTables,
    PlacedJob,
    TenantUse,
)
from slackwater.schemas.placement import WorkerDone
from slackwater.services.controller import (
    assignment,
    hosting,
    losses,
    migrations,
    network,
    scaling,
)
from slackwater.services.controller.keys import (
    AdoptionAsked,
    AllocationAsked,
    PoolAsked,
    ReturnAsked,
)
from slackwater.services.controller.snapshot import free_parts, shared
from slackwater.services.controller.state import Asked, Job, State, numbered


def heard(state: State, heartbeat: AggregatorHeartbeat, now_s: float) -> None:
    entry = state.aggregator(AggregatorId(heartbeat.id), now_s)
    if heartbeat.incarnation < entry.incarnation:
        return  # Sent by an instance that was replaced.
    news = not entry.alive or heartbeat.incarnation != entry.incarnation
    if news or (entry.heartbeat and entry.heartbeat.buckets and not heartbeat.buckets):
        state.line.wake()  # The master may have one more to give.
    entry.heartbeat, entry.seen_s, entry.restarts = heartbeat, now_s, (0, 0.0)
    entry.become("alive", "it is heard")
    if (usable := state.hosts.heard(heartbeat, now_s)) is not None:
        state.log("host.usable", node=heartbeat.node, usable=round(usable, 3))
    network.heard(state, heartbeat, now_s)
    _workers_arrived(state, heartbeat, now_s)
    if not news:
        return
    if entry.checked != entry.incarnation and (entry.ours or state.users(entry.id)):
        migrations.ask_held(state, entry.id, now_s)
    for job in state.users(entry.id):
        hosting.host(state, job, now_s)
        migrations.pursue(state, job, now_s)


def _workers_arrived(state: State, heartbeat: AggregatorHeartbeat, now_s: float) -> None:
    """Take WORKER_DONE from a heartbeat: the bus may have been away when it was published."""
    for at in heartbeat.arrived:
        job = state.jobs.get(at.job)
        if job is not None and job.moving and job.record.phase != "released":
            done = WorkerDone(
                job=at.job,
                bucket=at.bucket,
                location_epoch=at.location_epoch,
                target=AggregatorId(heartbeat.id),
            )
            migrations.worker_done(state, job, done, now_s)


def restarts(state: State, said: AggregatorRestarts, now_s: float) -> None:
    """Note the restarts that the supervisor reports while the aggregator cannot."""
    if said.given_up:
        give_up(state, said.aggregator, now_s)
        return
    entry = state.aggregator(said.aggregator, now_s)
    entry.restarts = said.restarts, now_s


def give_up(state: State, id: AggregatorId, now_s: float) -> None:
    """Stop waiting for the aggregator: the next tick moves its buckets elsewhere."""
    entry = state.aggregator(id, now_s)
    if not entry.given_up:
        state.log("aggregator.given_up", "warning", aggregator=id)
    entry.become("given_up", "it will not come back")


def lost(state: State, message: AggregatorLost, now_s: float) -> Message:
    """An operator's word. One that is heard is to be drained instead."""
    entry = state.aggregator(message.aggregator, now_s)
    if entry.alive and now_s - entry.seen_s <= 2 * HEARTBEAT_S:
        return Refused(
            reason=f"aggregator {entry.id} is alive: `slackwater drain {entry.id}` empties it",
            code=CONFLICT,
        )
    give_up(state, entry.id, now_s)
    return Ok()


def tick(state: State, now_s: float) -> None:
    for entry in list(state.aggregators.values()):
        if entry.alive and now_s - entry.seen_s > LOST_AFTER_S:
            entry.become("silent", "its heartbeats stopped")
            if entry.ours:
                state.log("aggregator.lost", "warning", aggregator=entry.id)
        unchecked = entry.checked != entry.incarnation
        due = unchecked or now_s - entry.checked_s >= state.config.resync_s
        if entry.ours and due:
            migrations.ask_held(state, entry.id, now_s)


# The master's pool --------------------------------------------------------------------------------


def ask_pool(state: State, now_s: float) -> None:
    state.ask_master(PoolAsked(), "aggregators", ListAggregators(), now_s)


def listed(state: State, asked: Asked, answer: Message, now_s: float) -> None:
    """Take in the master's list of our aggregators: all of a restart's knowledge, and the cure for
    leaks."""
    if not isinstance(answer, AggregatorList):
        return
    ours = {
        info.record.id: info for info in answer.aggregators if info.record.cluster == state.cluster
    }
    for id, info in sorted(ours.items()):
        entry = state.aggregator(id, now_s)
        if entry.heartbeat is None and info.alive and info.heartbeat is not None:
            heard(state, info.heartbeat, now_s)
        if entry.ours and entry.request:
            continue
        entry.temporary = info.record.temporary_for is not None
        entry.ours, entry.ours_since_s, entry.request = True, now_s, info.record.request
        for job in state.living():
            if job.pending is not None and job.pending.request == entry.request:
                entry.reserved_for = job.id
    for entry in state.aggregators.values():
        if entry.ours and entry.id not in ours and entry.ours_since_s < asked.at_s:
            entry.ours = False
            if state.users(entry.id):
                state.log("aggregator.disowned", "error", aggregator=entry.id)
    state.pool_known = True


# Giving back and adopting -----------------------------------------------------------------------


def sweep(state: State, now_s: float) -> None:
    if not state.pool_known:
        return
    used, private = state.index.involved, state.index.temporary
    due = [
        id
        for id, entry in state.aggregators.items()
        if entry.ours and (id not in used or (entry.temporary and id not in private))
    ]
    if not due:
        return
    asking = [key.job for key in state.asked if isinstance(key, AllocationAsked)]
    records = [(id, state.jobs[id].record) for id in asking if id in state.jobs]
    granting = {numbered(id, "a", record.asks, record.run) for id, record in records}
    kept = set(scaling.idle(state)) - set(scaling.surplus(state))
    for id in due:
        entry = state.aggregators[id]
        if not entry.request or entry.request in granting or entry.guarded:
            continue
        if entry.avoided and entry.alive:
            continue  # Another job would get its congested link, or lose the buckets brought there.
        if entry.reserved_for is not None:
            owner = state.jobs.get(entry.reserved_for)
            if owner is not None and owner.pending is not None:
                continue
            entry.reserved_for = None
        if id not in used:
            if entry.temporary or (state.releasing and id not in kept) or not entry.alive:
                _give_back(state, id, now_s)
        elif entry.temporary and id not in private:
            message = AdoptAggregators(cluster=state.cluster, aggregators=(id,))
            state.ask_master(AdoptionAsked(id), "adopt", message, now_s)


def _give_back(state: State, id: AggregatorId, now_s: float) -> None:
    """Give an aggregator back, once it was seen empty after its last change; a dead one at once."""
    entry = state.aggregators[id]
    if entry.alive and entry.empty_s < max(entry.changed_s, entry.ours_since_s):
        migrations.ask_held(state, id, now_s)
        return
    if not entry.alive and not state.is_gone(id, now_s):
        return
    message = DeallocateAggregators(
        cluster=state.cluster, aggregators=(id,), requests=(entry.request,)
    )
    state.ask_master(ReturnAsked(id), "deallocate", message, now_s)


def deallocated(state: State, id: AggregatorId, answer: Message) -> None:
    if isinstance(answer, Refused):
        return  # The sweep asks again.
    state.line.wake()
    entry = state.aggregators[id]
    entry.ours, entry.request, entry.temporary, entry.checked = False, "", False, -1
    for job in state.living():  # Its next use starts without its history.
        record = job.record
        if id in record.excluded or id in record.crowded:
            state.change(
                job,
                excluded=tuple(a for a in record.excluded if a != id),
                crowded=tuple(a for a in record.crowded if a != id),
            )


def adopted(state: State, id: AggregatorId, answer: Message) -> None:
    if not isinstance(answer, Refused):
        state.aggregators[id].temporary = False


# Reports to the master ----------------------------------------------------------------------------


def report(state: State, now_s: float) -> None:
    """Free CPU: over the shared aggregators, what their policy finds free of each cpu_share."""
    free = free_parts(state)
    free_cpu = sum(
        (e.cpu_share * max(0.0, free[e.id]) for e in shared(state) if not e.avoided), 0.0
    )
    counted = tuple(
        job.id
        for job in state.living()
        if job.record.profile is not None and job.record.places and not job.record.temporary
    )
    ours = tuple(id for id, entry in state.aggregators.items() if entry.ours)
    message = ClusterReport(
        cluster=state.cluster,
        waiting=_waiting(state, now_s),
        free_cpu=free_cpu,
        aggregators=ours,
        jobs=counted,
        tenants=_tenants(state),
        placed=_placed(state, ours),
        lost=_lost(state),
        drains={id: drain.state for id, drain in state.drains.items()},
        at_s=now_s,
    )
    state.out.append(Publish(subjects.telemetry("controller", state.cluster, "report"), message))


def _placed(state: State, ours: tuple[AggregatorId, ...]) -> dict[JobId, PlacedJob]:
    """Report where jobs are and what they lose, beginning behind the jobs of the last report."""
    ids = sorted(id for id, job in state.jobs.items() if _has_places(job))
    if len(ids) > PLACED_JOBS_MAX:
        begin = bisect_right(ids, state.placed_told)
        ids = (ids[begin:] + ids[:begin])[:PLACED_JOBS_MAX]
        state.placed_told = ids[-1]
    index = {id: number for number, id in enumerate(ours)}
    found = {}
    for id in ids:
        job = state.jobs[id]
        found[id] = PlacedJob(
            at=tuple(sorted(index[home] for home in job.homes() if home in index)),
            phase=job.record.phase,
            moves=job.record.moves,
            loss=_loss(job),
        )
    return found


def _lost(state: State) -> dict[JobId, LostTables]:
    """Report jobs that are to go back, until they are placed anew."""
    lost = (job for job in state.living() if job.lost)
    return {
        job.id: LostTables(run=job.record.run, what=job.lost)
        for job in islice(lost, PLACED_JOBS_MAX)
    }


def _has_places(job: Job) -> bool:
    return bool(job.record.places) and job.record.phase != "released"


def _loss(job: Job) -> float | None:
    """Return the part of its profiled speed that it lost in its last window; None: it had no
    window."""
    profile, window = job.record.profile, job.window
    if profile is None or window is None or window.iteration_s <= 0.0:
        return None
    return 1.0 - profile.iteration_s / window.iteration_s


def _tenants(state: State) -> tuple[TenantUse, ...]:
    """Return what each tenant's jobs used and lost, by their last windows."""
    found: dict[str, TenantUse] = {}
    for job in state.living():
        window, loss = job.window, _loss(job)
        if window is None or loss is None:
            continue
        limit = job.record.loss_limit or state.config.loss_limit
        name = job.record.spec.tenant
        found[name] = found.get(name, TenantUse(tenant=name)) + TenantUse(
            tenant=name, jobs=1, cpu=window.used_cpu, slots=window.used_slots, loss=loss,
            beyond=int(loss > limit),
        )  # fmt: skip
    return tuple(found[name] for name in sorted(found)[:TENANTS_MAX])


def _waiting(state: State, now_s: float) -> dict[JobId, str]:
    """Jobs that wait for something of this cluster, and why: the master tells their users."""
    reasons = (
        (job.id, hosting.why_standing(state, job, now_s) or hosting.why_waiting(job))
        for job in state.living()
    )
    some = islice(((id, why[:WAITING_CHARS_MAX]) for id, why in reasons if why), WAITING_JOBS_MAX)
    return dict(some)


def lose_and_retry(state: State, now_s: float) -> None:
    """Do what time alone makes due, job by job."""
    if state.line:
        openings = {*scaling.idle(state), *(entry.id for entry in shared(state))}
        state.line.look(frozenset(openings), now_s)
    for job in list(state.jobs.values()):
        if job.record.phase == "released":
            hosting.let_go(state, job, now_s)
            continue
        if job.record.phase == "waiting" and job.pending is not None:
            if now_s >= job.pending.next_s:
                job.pending.need, job.pending.next_s = 0, inf
                state.line.again(job.id)
            continue
        losses.lose(state, job, now_s)
        assignment.resume_pending(state, job, now_s)
        if job.pending is not None and now_s >= job.pending.next_s:
            assignment.decide(state, job, now_s)
        hosting.host(state, job, now_s)
        migrations.pursue(state, job, now_s)
