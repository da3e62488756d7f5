"""A job's regions: hosted before anybody is told where they are, dropped before they are forgotten.

HostBuckets is idempotent by location epoch, so it is simply repeated until every aggregator of the
job has confirmed it in its present incarnation. Where regions must exist already, the aggregator is
first asked what it holds (reconcile.py): hosting anew what is lost would hide the loss.
"""

from typing import Any

import msgspec

from slackwater.common.base.limits import LOST_AFTER_S
from slackwater.common.domains.slots.rules import RULES
from slackwater.common.domains.slots.tokens import process_token
from slackwater.schemas.base import CONFLICT, NOT_FOUND, AggregatorId, Message, Refused
from slackwater.schemas.placement import DropJob, HostBuckets, Located, LocateJob
from slackwater.services.controller.keys import AllocationAsked, DropAsked, HostAsked
from slackwater.services.controller.policies.demand import slack_s
from slackwater.services.controller.snapshot import positions_of
from slackwater.services.controller.state import RETRY_S_MAX, RUN_EPOCHS, Asked, Job, State


def host(state: State, job: Job, now_s: float) -> None:
    """Order what is not confirmed; once all is, the job can be located."""
    record = job.record
    if job.lost or record.phase in ("waiting", "released"):
        return
    if record.phase != "hosting" and not job.moving and _confirmed(state, job, now_s):
        return
    leaving = set(job.moved()) - job.stranded - job.copied
    homes: dict[AggregatorId, list[int]] = {}
    for bucket in range(len(record.places)):
        if bucket not in leaving:  # It must not be made again behind its back.
            homes.setdefault(job.place(bucket).aggregator, []).append(bucket)
    unconfirmed = False
    for aggregator in sorted(homes):
        entry = state.aggregator(aggregator, now_s)
        if job.hosted_by(aggregator, entry.incarnation, now_s):
            continue
        unconfirmed = True
        checked = record.phase == "hosting" or entry.checked == entry.incarnation
        if not entry.alive or not checked:
            continue
        buckets = homes[aggregator]
        message = HostBuckets(
            cluster=state.cluster,
            plan=record.plan,
            buckets=tuple(record.buckets[bucket] for bucket in buckets),
            at_epochs=tuple(job.place(bucket).location_epoch for bucket in buckets),
            tensors=record.tensors,
            restore=record.spec.start_from if record.phase == "hosting" else "",
            saved=_saved(job),
            begins=record.phase == "hosting",
            **_turns(state, job, buckets),
        )
        state.ask_aggregator(HostAsked(job.id, aggregator), "host", aggregator, message, now_s)
    if not unconfirmed:
        _all_hosted(state, job, now_s)


def _saved(job: Job) -> str:
    """Return the folder whose checkpoint goes before workers' values. After its begin a synchronous
    job is filled in from it only where no rank comes or goes: how many count from which iteration
    on is not in a checkpoint. Of other jobs it has each rank's count."""
    spec, plan = job.record.spec, job.record.plan
    if RULES[plan.update.name].sums:
        return ""
    stands_in = plan.consistency != "synchronous" or not plan.active
    return spec.save_to if stands_in or job.record.phase == "hosting" else ""


def _confirmed(state: State, job: Job, now_s: float) -> bool:
    """Say whether every home has confirmed what it hosts, in its present incarnation."""
    return job.located and all(
        job.hosted_by(home, state.aggregator(home, now_s).incarnation, now_s)
        for home in job.homes()
    )


def _turns(state: State, job: Job, buckets: list[int]) -> dict[str, Any]:
    """Return the fields that tasks' deadlines follow from, where the job's policy wants
    deadlines."""
    if state.policy_named(state.policy_name(job)).order != "deadline":
        return {}
    record, limit = job.record, job.record.loss_limit or state.config.loss_limit
    where = positions_of(record)
    return {
        "positions": tuple(where[bucket] for bucket in buckets),
        "slack": min(1.0, slack_s(1.0, limit)),
        "iteration_s": record.profile.iteration_s if record.profile else 0.0,
    }


def hosted(
    state: State, job: Job, aggregator: AggregatorId, asked: Asked, answer: Message, now_s: float
) -> None:
    entry = state.aggregator(aggregator, now_s)
    if isinstance(answer, Refused):
        state.log("host.refused", "warning", job=job.id, at=aggregator, reason=answer.reason)
        if answer.code == CONFLICT:
            job.cannot_begin = answer.reason
        return  # The tick asks again; the job's ranks are told why `locate` has to wait.
    job.cannot_begin = ""
    if asked.incarnation == entry.incarnation:
        job.confirmed[aggregator] = (asked.incarnation, now_s)
    host(state, job, now_s)


def _all_hosted(state: State, job: Job, now_s: float) -> None:
    record = job.record
    job.located = True
    if record.phase != "hosting":
        return
    profiling = state.adapts(job) and (record.profile is None or bool(record.temporary))
    settle(state, job, now_s)
    state.change(job, phase="profiling" if profiling else "steady")
    places = sorted(job.homes())
    state.tell(
        job,
        "located",
        now_s,
        buckets=str(len(record.buckets)),
        aggregators=",".join(places),
        temporary=",".join(record.temporary),
    )
    if not profiling:
        state.tell(job, "steady", now_s, aggregators=",".join(places))


def settle(state: State, job: Job, now_s: float) -> None:
    """The job's placement changed just now: windows from before say nothing about it."""
    job.settled_s = now_s
    for aggregator in sorted(job.involved()):
        state.aggregator(aggregator, now_s).changed_s = now_s


def why_waiting(job: Job) -> str:
    """Say why a job cannot be located yet, or waits to be elsewhere; empty: it waits for
    nothing."""
    record = job.record
    if record.phase == "hosting":
        homes = sorted(job.homes())
        refusals = {a: job.refusals.get(HostAsked(job.id, a), "") for a in homes}
        refused = [f"{a} refused: {why}" for a, why in refusals.items() if why]
        return "; ".join([f"its aggregators ({', '.join(homes)}) are being prepared", *refused])
    asked = ""
    if job.refusals and job.pending is not None:
        asked = job.refusals.get(AllocationAsked(job.id), "")
    why = asked or record.reason
    if record.phase == "waiting":
        return f"waits for aggregators: {why or 'they are being asked for'}"
    if why:
        return f"trains on where it is: {why}"
    return f"has aggregators of its own: {record.protected}" if record.protected else ""


def why_standing(state: State, job: Job, now_s: float) -> str:
    """Say why a job cannot go on because an aggregator is away; empty: none is."""
    away = sorted(id for id in job.homes() if not state.alive(id) and state.aggregators.get(id))
    if not away:
        return ""
    entry = state.aggregators[away[0]]
    awaited_s = state.awaited_until_s(entry) - now_s
    if entry.given_up or awaited_s <= 0.0:
        return f"aggregator {entry.id} is gone: what was there begins anew elsewhere"
    times, said_s = entry.restarts
    if times and now_s - said_s <= LOST_AFTER_S:
        return f"waits for aggregator {entry.id}, which is being restarted ({_nth(times)} time)"
    return (
        f"waits for aggregator {entry.id}, silent for {now_s - entry.seen_s:.0f} s; what is there "
        f"begins anew elsewhere in {awaited_s:.0f} s"
    )


def _nth(number: int) -> str:
    teens = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def locate(state: State, job: Job | None, asked: LocateJob, now_s: float) -> Message:
    """The mapping table (appendix A), once all of it is true, with the token of the process that
    asks instead of the job's secret."""
    id = asked.job
    if id in state.unreadable:
        return unreadable(state, id)
    if job is None or job.record.phase == "released":
        return Refused(
            reason=f"cluster {state.cluster} has no job {id}: it ended, or never began",
            code=NOT_FOUND,
        )
    record = job.record
    if job.cannot_begin:
        return Refused(reason=f"job {id} cannot begin: {job.cannot_begin}", code=CONFLICT)
    if job.lost:
        return Refused(reason=f"job {id}: {job.lost}; it goes back to a mark", retry_after_s=0.2)
    if record.phase in ("waiting", "hosting"):
        return Refused(reason=f"job {id}: {why_waiting(job)}", retry_after_s=0.2)
    homes = {place.aggregator for place in (*record.places, *record.target)}
    unknown = sorted(a for a in homes if state.aggregator(a, now_s).heartbeat is None)
    if unknown:
        reason = f"job {id}: aggregator {unknown[0]} has not been heard of yet"
        return Refused(reason=reason, retry_after_s=0.2)
    return Located(
        job=job.id,
        plan=msgspec.structs.replace(
            record.plan, token=process_token(record.plan.token, asked.rank, asked.attempt)
        ),
        buckets=record.buckets,
        places=tuple(job.place(bucket) for bucket in range(len(record.places))),
        endpoints=tuple(state.aggregators[a].endpoint() for a in sorted(homes)),
    )


def unreadable(state: State, id: str) -> Refused:
    """Refuse a job whose record cannot be read. Its tensors are still in place; an operator can
    restore the record."""
    reason = (
        f"cluster {state.cluster}: the record of job {id} is damaged; restore key {id} of bucket "
        f"{state.bucket}, or delete it to give the job up, and start the controller again"
    )
    return Refused(reason=reason, retry_after_s=RETRY_S_MAX)


def let_go(state: State, job: Job, now_s: float) -> None:
    """A released job: drop it wherever anything of it may be, then forget it."""
    waiting = False
    for aggregator in sorted(job.involved()):
        entry = state.aggregator(aggregator, now_s)
        if aggregator in job.dropped or state.is_gone(aggregator, now_s):
            continue  # A lost aggregator is compared with the records when it comes back.
        waiting = True
        if entry.alive:
            key = DropAsked(job.id, aggregator)
            last = RUN_EPOCHS * (job.record.run + 1) - 1
            message = DropJob(job=job.id, up_to_epoch=last)
            state.ask_aggregator(key, "drop", aggregator, message, now_s)
    if not waiting:
        for aggregator in sorted(job.involved()):
            state.aggregator(aggregator, now_s).changed_s = now_s
        state.forget(job)
        state.job_ended = True
        state.recycle_due = state.recycle_due or state.config.scaling_s == 0.0
