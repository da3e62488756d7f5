"""From a reason to assign a job's buckets to a validated plan, an approval and an order.

A wish says why: the job is new (start), was profiled, slows somebody (reverted), or its aggregator
is gone (lost), has a congested link (interfered) or is being emptied (drained). Deciding is
repeated from the present snapshot until the plan needs no aggregator that is not there; what is
missing is asked of the master (AutoPS section 3.3.3). A refusal leaves the job where it is, with
the reason, and is followed by another try; only a job that is nowhere is placed without approval:
on the least loaded of what there is.
"""

from math import inf

from slackwater.common.base.effects import StartTimer
from slackwater.schemas.base import REASON_CHARS_MAX, AggregatorId, Message, Refused
from slackwater.schemas.cluster import AggregatorsAllocated, AllocateAggregators
from slackwater.schemas.placement import BucketPlace
from slackwater.services.controller import evacuation, hosting, migrations, room, scaling
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
    State,
    Wish,
    numbered,
)
from slackwater.services.controller.waiting_jobs import TRIED_AT_ONCE

FIRST_EPOCH = 1
FULL_MAX = 32
"""Aggregators without room that one attempt leaves out."""


def want(
    state: State,
    job: Job,
    cause: Cause,
    now_s: float,
    *,
    standalone: bool = False,
    protected: str = "",
    request: str = "",
    endured_s: float = 0.0,
) -> None:
    """Decide now, and again until it is done."""
    if job.wish is not None and job.wish.cause == cause:
        return
    job.wish = Wish(
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


def derive(state: State, job: Job, now_s: float) -> None:
    """Resume what the record alone says is still to be decided: after a restart, or a request
    undone."""
    record = job.record
    if job.wish is not None or record.phase == "released":
        return
    if record.phase == "waiting":
        # The same request as before a restart: it may have been granted.
        request = numbered(job.id, "a", record.asks, record.run) if record.asks else ""
        retry_s = state.config.retry_s
        job.wish = Wish("start", since_s=now_s, next_s=inf, wait_s=retry_s, request=request)
        state.line.join(job.id, now_s)
        state.line.wake()
    elif record.phase == "profiling" and record.profile is not None:
        want(state, job, "profiled", now_s)
    elif record.phase == "steady" and job.homes() & set(record.excluded):
        want(state, job, "reverted", now_s)


def decide(state: State, job: Job, now_s: float) -> None:
    """One attempt at the job's wish."""
    wish = job.wish
    if wish is None or AllocationAsked(job.id) in state.asked:
        return
    if job.record.phase == "released" or (job.moving and wish.cause != "lost"):
        return
    if wish.cause in evacuation.CAUSES and not evacuation.buckets(state, job, wish.cause):
        job.wish = None  # The link is good again, or the order was taken back.
        return
    wish.next_s = now_s + wish.wait_s
    if not state.pool_known and wish.cause != "start":
        wish.next_s = now_s  # Who is alive is not known yet; the tick decides.
        return
    view, subject = _case(state, job, wish, now_s)
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
    fresh = _fresh(state, job, wish)
    if wish.cause in evacuation.CAUSES and _stays(state, job, wish, view, subject, plan, now_s):
        return
    if wish.cause == "profiled" and job.record.temporary and _keeps(job, plan):
        _apply(state, job, wish, [p.aggregator for p in job.record.places], plan, now_s)
    elif not plan.places:
        _wait(state, job, plan.reason)
    elif wish.cause == "profiled" and scaling.postponed(state, job, plan.new, now_s):
        wish.next_s = scaling.period_end_s(state, now_s)
        _wait(state, job, f"{plan.new} new aggregators: at the end of the scaling period")
    elif plan.new <= len(fresh) or (wish.at_least and fresh):
        homes = _name(plan, subject, fresh)
        _apply(state, job, wish, homes, plan, now_s)
    else:
        _ask(state, job, wish, plan.new - len(fresh), now_s)


def _stays(
    state: State, job: Job, wish: Wish, view: ClusterView, subject: JobView, plan: Plan,
    now_s: float,
) -> bool:  # fmt: skip
    """Whether what should leave cannot, or had better not; without room it is tried by force."""
    if not plan.places and not wish.refused:
        wish.refused = True
        decide(state, job, now_s)
        return True
    if wish.cause == "interfered" and view.forced and plan.places:
        reason = evacuation.not_worthwhile(view, subject, plan, wish.endured_s)
        if reason:
            wish.refused = False  # The next time, more aggregators are asked for again.
            _wait(state, job, reason)
            return True
    return False


def _case(state: State, job: Job, wish: Wish, now_s: float) -> tuple[ClusterView, JobView]:
    """The snapshot and the job's open buckets, by cause."""
    buckets = frozenset(range(len(job.record.buckets)))
    if wish.cause == "lost":
        lost = frozenset(
            b for b, p in enumerate(job.record.places) if state.gone(p.aggregator, now_s)
        )
        forced = wish.refused and state.adapts(job)
        view = cluster_view(state, job, forced=forced, without=wish.full)
        return view, job_view(state, job, lost, lost)
    if wish.cause in evacuation.CAUSES:
        return evacuation.case(state, job, wish)
    if wish.cause == "start":
        forced = wish.refused and wish.at_least == 1 and state.adapts(job)
        view = cluster_view(state, job, forced=forced)
        if forced and not view.aggregators:
            view = cluster_view(state, job)
        return view, job_view(state, job)
    view = cluster_view(state, job, without=wish.full)
    return view, job_view(state, job, buckets, standalone=wish.standalone)


def _fresh(state: State, job: Job, wish: Wish) -> list[AggregatorId]:
    """Aggregators that may serve as the plan's new ones without asking anybody."""
    reserved = [
        entry.id
        for entry in state.aggregators.values()
        if entry.reserved_for == job.id and entry.alive and not entry.avoided
    ]
    fresh = reserved + scaling.idle(state)
    if wish.cause != "profiled":
        return fresh
    return [
        a for a in job.record.temporary if state.alive(a) and not state.aggregators[a].avoided
    ] + fresh


def _keeps(job: Job, plan: Plan) -> bool:
    """Sharing that would need as many new aggregators as the job has saves nothing: it stays."""
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
    reason = reason[:REASON_CHARS_MAX]  # As the record cuts it: the same is not stored again.
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
        wish = job.wish if job is not None else None
        if job is None or wish is None or wish.cause != "start":
            line.leave(id)
        elif wish.need == 0 or line.known(wish.need) is None:
            tried, line.asked = tried + 1, id
            decide(state, job, now_s)


def _ask(state: State, job: Job, wish: Wish, count: int, now_s: float) -> None:
    if not wish.request:
        state.change(job, asks=job.record.asks + 1)
        wish.request = numbered(job.id, "a", job.record.asks, job.record.run)
    patience_s = state.config.unprofiled_after_s
    impatient = wish.hopeless or now_s - wish.since_s >= patience_s
    wish.at_least = 1 if wish.cause == "start" and impatient and state.adapts(job) else 0
    wish.need = wish.at_least or count
    known = state.line.known(wish.need) if wish.cause == "start" and wish.refused else None
    if known is not None:  # The master has just refused as much.
        _refused(state, job, wish, known, now_s)
        return
    profiling = wish.cause == "start" and state.adapts(job)
    message = AllocateAggregators(
        request=wish.request,
        cluster=state.cluster,
        count=count,
        at_least=wish.at_least,
        temporary_for=job.id if profiling else "",
    )
    insist = wish.cause != "start"
    state.ask_master(AllocationAsked(job.id), "allocate", message, now_s, insist=insist)


def allocated(state: State, job: Job | None, answer: Message, now_s: float) -> None:
    """The master's answer. An aggregator for a job that is no more is swept up as unused."""
    wish = job.wish if job is not None else None
    if isinstance(answer, AggregatorsAllocated):
        for id in answer.aggregators:
            entry = state.aggregator(id, now_s)
            entry.ours, entry.ours_since_s, entry.request = True, now_s, answer.request
            entry.temporary = wish is not None and wish.cause == "start"
            if job is not None and wish is not None:
                entry.reserved_for = job.id
    if job is None or wish is None:
        return
    if isinstance(answer, Refused):
        _refused(state, job, wish, answer, now_s)
    elif isinstance(answer, AggregatorsAllocated):
        wish.request, wish.refused = "", False
        decide(state, job, now_s)


def _refused(state: State, job: Job, wish: Wish, answer: Refused, now_s: float) -> None:
    _wait(state, job, f"more aggregators were refused: {answer.reason}")
    wish.refused = True
    wish.next_s = now_s + wish.wait_s
    hopeless = answer.retry_after_s == 0.0
    if wish.cause == "start":
        _stand(state, job, wish, answer, now_s)
    urgent = wish.cause == "lost" or wish.cause in evacuation.CAUSES
    if urgent or (wish.cause == "start" and wish.at_least == 1):
        if wish.wait_s == state.config.retry_s:
            wish.wait_s *= 2
            decide(state, job, now_s)  # Forced, where there is anything to be forced onto.
    elif wish.cause == "start" and hopeless and not wish.hopeless:
        wish.hopeless = True
        decide(state, job, now_s)  # With fewer, at once: waiting would not help.
    elif wish.cause != "start":
        wish.wait_s = min(2 * wish.wait_s, RETRY_S_MAX)


def _stand(state: State, job: Job, wish: Wish, answer: Refused, now_s: float) -> None:
    """Put the job in line, until it is tried again or may do with less."""
    state.line.join(job.id, now_s)
    if answer.retry_after_s:
        state.line.short(wish.need, answer)
    patient = wish.at_least == 0 and state.adapts(job)
    wish.next_s = max(now_s, wish.since_s + state.config.unprofiled_after_s) if patient else inf


# Carrying a plan out ------------------------------------------------------------------------------


def _apply(
    state: State, job: Job, wish: Wish, homes: list[AggregatorId], plan: Plan, now_s: float
) -> None:
    fitting = _with_room(state, job, wish, homes, now_s)
    if fitting is None:
        return
    homes, job.wish = fitting, None
    for entry in state.aggregators.values():
        if entry.reserved_for == job.id:
            entry.reserved_for = None  # In the plan, or unused and swept up.
    if wish.cause == "start":
        _place_first(state, job, homes, plan.temporary, now_s)
    elif wish.cause == "lost":
        _place_again(state, job, homes, now_s)
    else:
        _reassign(state, job, wish, homes, now_s)


def _with_room(
    state: State, job: Job, wish: Wish, homes: list[AggregatorId], now_s: float
) -> list[AggregatorId] | None:
    """`homes` where the job's regions fit by their bytes; else None: another attempt leaves out
    what is full, and when nothing fits the job waits with that reason."""
    short = room.short(state, job, homes)
    if not short:
        return homes
    if wish.cause == "start" and (dealt := room.repacked(state, job, homes)):
        return dealt
    if wish.cause != "start" and not short.keys() <= wish.full and len(wish.full) < FULL_MAX:
        wish.full |= short.keys()
        decide(state, job, now_s)
        return None
    if wish.cause != "start":
        wish.wait_s = min(2 * wish.wait_s, RETRY_S_MAX)
    wish.full = frozenset()
    job.refusals.pop(AllocationAsked(job.id), None)  # It has aggregators; they have no memory.
    _wait(state, job, "; ".join(short.values()))
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
    lost = [b for b, (place, home) in enumerate(zip(old, homes, strict=True))
            if place.aggregator != home]  # fmt: skip
    places = tuple(
        BucketPlace(aggregator=home, location_epoch=place.location_epoch + 1)
        if bucket in set(lost)
        else place
        for bucket, (place, home) in enumerate(zip(old, homes, strict=True))
    )
    gone = {old[bucket].aggregator for bucket in lost}
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


def _reassign(state: State, job: Job, wish: Wish, homes: list[AggregatorId], now_s: float) -> None:
    record = job.record
    if wish.protected:
        state.change(job, protected=wish.protected)
    if homes != [place.aggregator for place in record.places]:
        why: migrations.MigrationCause = "profiled"
        if wish.cause == "reverted":
            why = "expanded" if wish.standalone else "reverted"
            why = "protected" if wish.protected else why
        elif wish.cause == "interfered" or wish.cause == "drained":
            why = wish.cause
        migrations.begin(state, job, homes, why, now_s)
        _tell_assigned(state, job, now_s)
        return
    hosting.settle(state, job, now_s)
    state.change(job, phase="steady", temporary=(), assigned_s=now_s, cause=wish.cause, reason="")
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


# What is gone for good ----------------------------------------------------------------------------


def lose(state: State, job: Job, now_s: float) -> None:
    """If an aggregator of the job stays away, its buckets must begin anew elsewhere."""
    if job.record.phase in ("waiting", "released"):
        return
    if not any(state.gone(aggregator, now_s) for aggregator in job.homes() | _sources(job)):
        return
    if job.moving:
        migrations.abandon(state, job, _resting_places(state, job, now_s), now_s)
        job.confirmed.clear()
        hosting.host(state, job, now_s)
    if any(state.gone(place.aggregator, now_s) for place in job.record.places):
        if job.wish is not None and job.wish.cause != "lost":
            job.wish = None
        want(state, job, "lost", now_s)


def _sources(job: Job) -> set[AggregatorId] | frozenset[AggregatorId]:
    if not job.moving:
        return job.homes()
    return {
        place.aggregator
        for bucket, place in enumerate(job.record.places)
        if bucket not in job.copied
    }


def _resting_places(state: State, job: Job, now_s: float) -> tuple[BucketPlace, ...]:
    """Where each bucket of a migration that cannot finish is to stay. The epoch rises above all
    that was promised, so that Agents which were sent on already follow."""
    moved = set(job.moved())
    resting = []
    for bucket, (old, new) in enumerate(zip(job.record.places, job.record.target, strict=True)):
        if bucket not in moved or bucket in job.copied:
            resting.append(new)
            continue
        stay = new if state.gone(old.aggregator, now_s) else old
        resting.append(
            BucketPlace(aggregator=stay.aggregator, location_epoch=new.location_epoch + 1)
        )
    return tuple(resting)
