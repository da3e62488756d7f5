"""From a reason to assign a job's buckets to a validated plan, an approval and an order.

A pending assignment says why: the job is new (start), was profiled, slows somebody (reverted), or
its aggregator is gone (lost), has a congested link (interfered) or is being emptied (drained).
Deciding is repeated from the present snapshot until the plan needs no aggregator that is not there;
what is missing is asked of the master (AutoPS section 3.3.3). A refusal leaves the job where it is,
with the reason, and is followed by another try; only a job that is nowhere is placed without
approval: on the least loaded of what there is.
"""

from math import inf

from slackwater.common.base.effects import StartTimer
from slackwater.schemas.base import REASON_CHARS_MAX, AggregatorId, Message, Refused
from slackwater.schemas.cluster import AggregatorsAllocated, AllocateAggregators
from slackwater.schemas.placement import BucketPlace
from slackwater.services.controller import (
    evacuation,
    hosting,
    migrations,
    network,
    room,
    scaling,
)
from slackwater.services.controller.keys import AllocationAsked, ServeDue
from slackwater.services.controller.policies.view import (
    NEW,
    ClusterView,
    JobView,
    Plan,
    PlanRefused,
    validate,
)
from slackwater.services.controller.snapshot import cluster_view, job_view
from slackwater.services.controller.state import (
    RETRY_S_MAX,
    RUN_EPOCHS,
    Cause,
    Job,
    PendingAssignment,
    State,
    numbered,
)
from slackwater.services.controller.waiting_jobs import TRIED_AT_ONCE

FIRST_EPOCH = 1
FULL_MAX = 256
"""Aggregators without room that one attempt leaves out."""


def request_assignment(
    state: State, job: Job, cause: Cause, now_s: float, *, standalone: bool = False,
    protected: str = "", request: str = "", endured_s: float = 0.0,
) -> None:  # fmt: skip
    """Decide where the job goes now, and again until that is carried out."""
    if job.pending is not None and job.pending.cause == cause:
        return
    job.pending = PendingAssignment(
        cause,
        since_s=now_s,
        next_s=now_s,
        wait_s=state.config.retry_s,
        standalone=standalone,
        protected=protected,
        request=request,
        endured_s=endured_s,
    )
    decide(state, job, now_s)


def resume_pending(state: State, job: Job, now_s: float) -> None:
    """Resume what the record alone says is still to be decided: after a restart, or a request
    undone."""
    record = job.record
    if job.pending is not None or record.phase == "released":
        return
    if record.phase == "waiting":
        # The same request as before a restart: it may have been granted.
        request = numbered(job.id, "a", record.asks, record.run) if record.asks else ""
        retry_s = state.config.retry_s
        job.pending = PendingAssignment(
            "start", since_s=now_s, next_s=inf, wait_s=retry_s, request=request
        )
        state.line.join(job.id, now_s)
        state.line.wake()
    elif record.phase == "profiling" and record.profile is not None:
        request_assignment(state, job, "profiled", now_s)
    elif record.phase == "steady" and job.homes() & set(record.excluded):
        request_assignment(state, job, "reverted", now_s)


def decide(state: State, job: Job, now_s: float) -> None:
    """Try once to carry out the pending assignment of the job."""
    pending = job.pending
    if pending is None or AllocationAsked(job.id) in state.asked:
        return
    evacuates = pending.cause in evacuation.CAUSES
    if evacuates and not evacuation.buckets(state, job, pending.cause):
        job.pending = None  # The link is good again, or the order was taken back.
        return
    pending.next_s = now_s + pending.wait_s
    if not state.pool_known and pending.cause != "start":
        pending.next_s = now_s  # The pool is not known yet: the next tick decides.
        return
    view, subject = _case(state, job, pending, now_s)
    name = state.policy_name(job)
    state.plans += 1
    plan, memory = state.policy_named(name).assign(view, subject, state.memories.get(name))
    try:
        validate(plan, view, subject)
    except PlanRefused as error:  # The policy's fault; the job stays where it is.
        state.log("plan.refused", "error", job=job.id, policy=name, reason=str(error))
        _wait(state, job, f"policy {name}: {error}")
        return
    state.memories[name] = memory
    fresh = _fresh(state, job, pending)
    if evacuates and _stays(state, job, pending, view, subject, plan, now_s):
        return
    if pending.cause == "profiled" and job.record.temporary and _keeps(job, plan, pending):
        _apply(state, job, pending, [p.aggregator for p in job.record.places], plan, now_s)
    elif not plan.places:
        _wait(state, job, plan.reason)
    elif pending.cause == "profiled" and scaling.postponed(state, job, plan.new, now_s):
        pending.next_s = scaling.period_end_s(state, now_s)
        _wait(state, job, f"{plan.new} new aggregators: at the end of the scaling period")
    elif plan.new <= len(fresh) or (pending.at_least and fresh):
        homes = _name(plan, subject, fresh)
        _apply(state, job, pending, homes, plan, now_s)
    else:
        _ask(state, job, pending, plan.new - len(fresh), now_s)


def _stays(
    state: State, job: Job, pending: PendingAssignment, view: ClusterView, subject: JobView,
    plan: Plan, now_s: float,
) -> bool:  # fmt: skip
    """Say whether what should leave cannot, or had better not; without room it is tried by
    force."""
    if not plan.places and not pending.refused:
        pending.refused = True
        decide(state, job, now_s)
        return True
    if pending.cause == "interfered" and view.forced and plan.places:
        reason = evacuation.not_worthwhile(view, subject, plan, pending.endured_s)
        if reason:
            pending.refused = False  # The next time, more aggregators are asked for again.
            _wait(state, job, reason)
            return True
    return False


def _case(
    state: State, job: Job, pending: PendingAssignment, now_s: float
) -> tuple[ClusterView, JobView]:
    """Return the snapshot and the job's open buckets, by cause."""
    buckets = frozenset(range(len(job.record.buckets)))
    if pending.cause == "lost":
        lost = frozenset(
            b for b, p in enumerate(job.record.places) if state.is_gone(p.aggregator, now_s)
        )
        forced = pending.refused and state.adapts(job)
        view = cluster_view(state, job, forced=forced, without=pending.full)
        return view, job_view(state, job, lost, lost)
    if pending.cause in evacuation.CAUSES:
        return evacuation.case(state, job, pending)
    if pending.cause == "start":
        forced = _is_forced(state, job, pending)
        view = cluster_view(state, job, forced=forced)
        if forced and not view.aggregators:
            view = cluster_view(state, job)
        return view, job_view(state, job)
    view = cluster_view(state, job, without=pending.full)
    return view, job_view(state, job, buckets, standalone=pending.standalone)


def _is_forced(state: State, job: Job, pending: PendingAssignment) -> bool:
    """Say whether a new job, which was refused a single aggregator, is to begin wherever it can."""
    refused = pending.cause == "start" and pending.refused and pending.at_least == 1
    return refused and state.adapts(job)


def _fresh(state: State, job: Job, pending: PendingAssignment) -> list[AggregatorId]:
    """Return aggregators that can be the plan's new ones without a request to the master."""
    reserved = [
        entry.id
        for entry in state.aggregators.values()
        if entry.reserved_for == job.id and entry.alive and not entry.avoided
    ]
    # Better a slow link than none: nobody else has an aggregator for it.
    fresh = reserved + scaling.unused(state, congested=_is_forced(state, job, pending))
    if pending.cause == "profiled":
        temporary = (a for a in job.record.temporary if state.alive(a))
        fresh = [a for a in temporary if not state.aggregators[a].avoided] + fresh
    without = frozenset[AggregatorId]() if pending.refused else pending.full
    return sorted((id for id in fresh if id not in without), key=lambda id: id in pending.full)


def _keeps(job: Job, plan: Plan, pending: PendingAssignment) -> bool:
    """Sharing that would need as many new aggregators as the job has saves nothing: it stays,
    unless they have no room either, and others may be had."""
    if pending.full & set(job.record.temporary) and not pending.refused:
        return False
    return not plan.places or plan.new >= len(job.record.temporary)


def _name(plan: Plan, subject: JobView, fresh: list[AggregatorId]) -> list[AggregatorId]:
    """Give the plan's new#k names of aggregators, so that as few buckets as possible move."""
    if plan.new == 0:
        return [AggregatorId(place) for place in plan.places]
    left = list(fresh)
    names: dict[str, AggregatorId] = {}
    for k in range(plan.new):
        wanted = [
            current
            for place, current in zip(plan.places, subject.current, strict=False)
            if place == f"{NEW}{k}"
        ]
        if not left:  # Fewer than asked for: they take turns.
            names[f"{NEW}{k}"] = fresh[k % len(fresh)]
            continue
        best = min(left, key=lambda name: (-wanted.count(name), left.index(name)))
        left.remove(best)
        names[f"{NEW}{k}"] = best
    return [names.get(place, AggregatorId(place)) for place in plan.places]


def _wait(state: State, job: Job, reason: str) -> None:
    reason = reason[:REASON_CHARS_MAX]  # Cut as the record cuts it, to compare with it.
    if job.record.reason != reason:
        state.change(job, reason=reason)


# Asking the master --------------------------------------------------------------------------------


def serve(state: State, now_s: float) -> None:
    """Try jobs that stand in line, until one has to wait for the master's answer."""
    line, tried = state.line, 0
    while line.serving:
        if line.asked is not None and AllocationAsked(line.asked) in state.asked:
            return
        if tried == TRIED_AT_ONCE:
            state.out.append(StartTimer(ServeDue(), now_s))
            return
        id = line.next()
        job = state.jobs.get(id)
        pending = job.pending if job is not None else None
        if job is None or pending is None or pending.cause != "start":
            line.leave(id)
        elif pending.need == 0 or line.known(pending.need) is None:
            tried, line.asked = tried + 1, id
            decide(state, job, now_s)


def _ask(state: State, job: Job, pending: PendingAssignment, count: int, now_s: float) -> None:
    if not pending.request:
        state.change(job, asks=job.record.asks + 1)
        pending.request = numbered(job.id, "a", job.record.asks, job.record.run)
    patience_s = state.config.unprofiled_after_s
    impatient = pending.hopeless or now_s - pending.since_s >= patience_s
    pending.at_least = 1 if pending.cause == "start" and impatient and state.adapts(job) else 0
    pending.need = pending.at_least or count
    known = state.line.known(pending.need) if pending.cause == "start" and pending.refused else None
    if known is not None:  # The master has just refused as much.
        _refused(state, job, pending, known, now_s)
        return
    profiling = pending.cause == "start" and state.adapts(job)
    message = AllocateAggregators(
        request=pending.request,
        cluster=state.cluster,
        count=count,
        at_least=pending.at_least,
        temporary_for=job.id if profiling else "",
    )
    insist = pending.cause != "start"
    state.ask_master(AllocationAsked(job.id), "allocate", message, now_s, insist=insist)


def allocated(state: State, job: Job | None, answer: Message, now_s: float) -> None:
    """The master's answer. An aggregator for a job that is no more is swept up as unused."""
    pending = job.pending if job is not None else None
    if isinstance(answer, AggregatorsAllocated):
        for id in answer.aggregators:
            entry = state.aggregator(id, now_s)
            entry.ours, entry.ours_since_s, entry.request = True, now_s, answer.request
            entry.temporary = pending is not None and pending.cause == "start"
            if job is not None and pending is not None:
                entry.reserved_for = job.id
    if job is None or pending is None:
        return
    if isinstance(answer, Refused):
        _refused(state, job, pending, answer, now_s)
    elif isinstance(answer, AggregatorsAllocated):
        pending.request, pending.refused = "", False
        decide(state, job, now_s)


def _refused(
    state: State, job: Job, pending: PendingAssignment, answer: Refused, now_s: float
) -> None:
    _wait(state, job, f"more aggregators were refused: {answer.reason}")
    pending.refused = True
    pending.next_s = now_s + pending.wait_s
    hopeless = answer.retry_after_s == 0.0
    if pending.cause == "start":
        _stand(state, job, pending, answer, now_s)
    urgent = pending.cause == "lost" or pending.cause in evacuation.CAUSES
    if urgent or (pending.cause == "start" and pending.at_least == 1):
        if pending.wait_s == state.config.retry_s:
            pending.wait_s *= 2
            decide(state, job, now_s)  # Forced, where there is anything to be forced onto.
    elif pending.cause == "start" and hopeless and not pending.hopeless:
        pending.hopeless = True
        decide(state, job, now_s)  # With fewer, at once: waiting would not help.
    elif pending.cause != "start":
        pending.wait_s = min(2 * pending.wait_s, RETRY_S_MAX)


def _stand(
    state: State, job: Job, pending: PendingAssignment, answer: Refused, now_s: float
) -> None:
    """Put the job in line, until it is tried again or may do with less."""
    state.line.join(job.id, now_s)
    if answer.retry_after_s:
        state.line.note_refusal(pending.need, answer)
    patient = pending.at_least == 0 and state.adapts(job)
    pending.next_s = (
        max(now_s, pending.since_s + state.config.unprofiled_after_s) if patient else inf
    )


# Carrying a plan out ------------------------------------------------------------------------------


def _apply(
    state: State, job: Job, pending: PendingAssignment, homes: list[AggregatorId], plan: Plan,
    now_s: float,
) -> None:  # fmt: skip
    fitting = _with_room(state, job, pending, homes, now_s)
    if fitting is None:
        return
    homes, job.pending = fitting, None
    for entry in state.aggregators.values():
        if entry.reserved_for == job.id:
            entry.reserved_for = None  # In the plan, or unused and swept up.
    if pending.cause == "start":
        _place_first(state, job, homes, plan.temporary, now_s)
    elif pending.cause == "lost":
        _place_again(state, job, homes, now_s)
    else:
        _reassign(state, job, pending, homes, now_s)


def _with_room(
    state: State, job: Job, pending: PendingAssignment, homes: list[AggregatorId], now_s: float
) -> list[AggregatorId] | None:
    """`homes` where the job's regions fit by their bytes, and its gradients on the links; else
    None: another attempt leaves out what is full, and when nothing fits the job waits with that
    reason."""
    short = room.without_room(state, job, homes)
    if pending.cause in network.CHOOSY:
        traffic = network.Traffic(state)
        short = traffic.crowded(job, homes, may_stay=pending.refused) | short
    if not short:
        return homes
    if pending.cause == "start" and (dealt := room.repacked(state, job, homes)):
        return dealt
    if (
        pending.cause != "start"
        and not short.keys() <= pending.full
        and len(pending.full) < FULL_MAX
    ):
        pending.full |= short.keys()
        decide(state, job, now_s)
        return None
    if pending.cause != "start":
        pending.wait_s = min(2 * pending.wait_s, RETRY_S_MAX)
    pending.full = frozenset()
    job.refusals.pop(AllocationAsked(job.id), None)  # It has aggregators; they have no room.
    _wait(state, job, "; ".join(dict.fromkeys(short.values())))
    return None


def _place_first(
    state: State, job: Job, homes: list[AggregatorId], temporary: bool, now_s: float
) -> None:
    first = RUN_EPOCHS * job.record.run + FIRST_EPOCH
    state.change(
        job,
        phase="hosting",
        reason="",
        places=tuple(BucketPlace(aggregator=a, location_epoch=first) for a in homes),
        temporary=tuple(sorted(set(homes))) if temporary else (),
        assigned_s=now_s,
        cause="" if temporary or not state.adapts(job) else "unprofiled",
    )
    if not temporary:  # Profiling comes first; then the assignment.
        _tell_assigned(state, job, now_s)
    hosting.settle(state, job, now_s)
    hosting.host(state, job, now_s)


def _place_again(state: State, job: Job, homes: list[AggregatorId], now_s: float) -> None:
    """Lost buckets begin anew elsewhere, seeded from the workers' parameters."""
    old = job.record.places
    lost = [b for b, home in enumerate(homes) if old[b].aggregator != home]
    places = tuple(
        BucketPlace(aggregator=home, location_epoch=place.location_epoch + 1)
        if bucket in set(lost)
        else place
        for bucket, (place, home) in enumerate(zip(old, homes, strict=True))
    )
    gone = {old[bucket].aggregator for bucket in lost}
    job.saving.interval.losses += len(gone)
    temporary = set(job.record.temporary) - gone
    if set(job.record.temporary) & gone:
        temporary |= {homes[bucket] for bucket in lost}
    state.change(
        job,
        phase="hosting",
        reason="",
        places=places,
        temporary=tuple(sorted(temporary)),
        assigned_s=now_s,
    )
    for bucket in lost:
        job.confirmed.pop(homes[bucket], None)
    state.tell(
        job,
        "rehosted",
        now_s,
        buckets=str(len(lost)),
        lost=",".join(sorted(gone)),
        aggregators=",".join(sorted({homes[bucket] for bucket in lost})),
    )
    hosting.settle(state, job, now_s)
    hosting.host(state, job, now_s)


def _reassign(
    state: State, job: Job, pending: PendingAssignment, homes: list[AggregatorId], now_s: float
) -> None:
    record = job.record
    if pending.protected:
        state.change(job, protected=pending.protected)
    if homes != [place.aggregator for place in record.places]:
        why: migrations.MigrationCause = "profiled"
        if pending.cause == "reverted":
            why = "expanded" if pending.standalone else "reverted"
            why = "protected" if pending.protected else why
        elif pending.cause == "interfered" or pending.cause == "drained":
            why = pending.cause
        migrations.begin(state, job, homes, why, now_s)
        _tell_assigned(state, job, now_s)
        return
    hosting.settle(state, job, now_s)
    state.change(
        job, phase="steady", temporary=(), assigned_s=now_s, cause=pending.cause, reason=""
    )
    _tell_assigned(state, job, now_s)
    state.tell(job, "steady", now_s, aggregators=",".join(sorted(job.homes())))


def _tell_assigned(state: State, job: Job, now_s: float) -> None:
    state.tell(
        job,
        "assigned",
        now_s,
        aggregators=",".join(sorted(job.homes())),
        temporary=",".join(job.record.temporary),
        migration=job.record.migration,
        cause=job.record.cause,
        beside=",".join(id for id in state.index.users(job.homes()) if id != job.id),
    )
