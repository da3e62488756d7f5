"""Feedback (AutoPS sections 3.3.1 and 3.3.2): revert what slows a job, recycle what is little used.

A window counts only if it lies wholly after the last change on every aggregator of its job. If
the job lost more than LossLimit of its standalone speed in it, and in the next one too, the
newest assignment among the jobs that share its aggregators is undone: that job may not return to
where the loss was, those aggregators may be filled less, and it is assigned again, with a new
aggregator where nothing else fits. Where the scheme's own reckoning says that a cycle stretches
the job beyond its limit, no assignment is to blame: the cycle's longest job has ended, and what
is left fits the others worse. Then the job is assigned again, or, if that moves less, the one
whose cycle it is. Where transfer times say that a link is congested, the job leaves that link
instead (interference.py). A job is reverted a bounded number of times, so two jobs cannot chase
each other for ever. A job that shares with nobody is never reverted; if it loses on fewer
aggregators than it asked for, it gets those.

When all who could be reverted were, the loser gets its own aggregators until it ends (protected).

Nobody is faster shared than alone: windows that are shorter than the profile correct it, and what
followed from it is decided again (docs/adr/0013).

When a job has ended, the least loaded aggregator's buckets are reassigned to the others without new
allocations; while that succeeds, it is repeated with the next.
"""

from dataclasses import replace
from math import inf

import msgspec

from slackwater.schemas.base import AggregatorId
from slackwater.schemas.placement import Profile
from slackwater.schemas.telemetry import JobProfiled, WindowMeasured
from slackwater.services.controller import assignment, interference, migrations, network, room
from slackwater.services.controller.policies.scheme import loss as loss_of
from slackwater.services.controller.policies.view import (
    ClusterView,
    JobView,
    Plan,
    PlanRefused,
    validate,
)
from slackwater.services.controller.snapshot import cluster_view, free_parts, job_view, shared
from slackwater.services.controller.state import Job, State

COST_CHANGE = 0.2
"""A task's cost that moved less than this share is not worth a record."""
FASTER_FROM = 0.02
"""Nor is a standalone iteration that is shorter by less."""
DOUBTLESS = 2.5
"""A loss of more than so many times the limit needs no second window."""


# Profiles -----------------------------------------------------------------------------------------


def profiled(state: State, job: Job, fact: JobProfiled, now_s: float) -> None:
    record, profile = job.record, fact.profile
    buckets = len(record.buckets)
    fits = len(profile.task_cpu_s) == buckets and len(profile.positions) in (0, buckets)
    if not fits or profile.iteration_s <= 0.0:
        state.log("profile.unfit", "warning", job=job.id, tasks=len(profile.task_cpu_s))
        return
    if fact.location_epoch != job.location_epoch or not record.places or job.moving:
        return  # Measured at another placement; the profiler measures this one too.
    if record.phase == "profiling" and record.profile is None:
        state.change(job, profile=profile)
        state.tell(
            job,
            "measured",
            now_s,
            iteration_s=f"{profile.iteration_s:.6g}",
            cpu_s=f"{sum(profile.task_cpu_s):.6g}",
            utilisation=f"{_utilisation(state, job, profile):.4g}",
        )
        assignment.request_assignment(state, job, "profiled", now_s)
    elif record.profile is None:
        state.change(job, profile=profile)
    elif record.profile.pull_s_per_byte == 0.0 < profile.pull_s_per_byte:
        measured = msgspec.structs.replace(  # At last: its first transfers had been of no size.
            record.profile,
            push_s_per_byte=profile.push_s_per_byte,
            pull_s_per_byte=profile.pull_s_per_byte,
        )
        state.change(job, profile=measured)
    elif _moved(record.profile.task_cpu_s, profile.task_cpu_s):
        # The standalone iteration is not this one, of a job that shares: the windows' yardstick.
        kept = msgspec.structs.replace(record.profile, task_cpu_s=profile.task_cpu_s)
        state.change(job, profile=kept)


def _lower(state: State, job: Job, iteration_s: float, now_s: float) -> bool:
    """Lower the profiled iteration of a job that is faster than its profile, and say whether. No
    job is faster shared than alone: two shorter windows in succession mean that the profile was
    disturbed."""
    profile = job.record.profile
    if profile is None or iteration_s >= profile.iteration_s * (1.0 - FASTER_FROM):
        return False
    factor = profile.iteration_s / iteration_s
    positions = tuple(min(1.0, position * factor) for position in profile.positions)
    lowered = msgspec.structs.replace(profile, iteration_s=iteration_s, positions=positions)
    state.change(job, profile=lowered)
    state.tell(
        job,
        "corrected",
        now_s,
        iteration_s=f"{iteration_s:.6g}",
        profiled_s=f"{profile.iteration_s:.6g}",
    )
    _decide_again(state, job, now_s)
    return True


def _decide_again(state: State, job: Job, now_s: float) -> None:
    """Decide again what followed from too long an iteration: where the job may not stay by the new
    one, it leaves; where it was left to itself, it shares if it can."""
    if job.pending is not None:
        assignment.decide(state, job, now_s)
        return
    if job.record.phase != "steady" or not state.adapts(job):
        return
    neighbours = _neighbours(state, job)
    if any(each.record.phase != "steady" or each.pending is not None for each in neighbours):
        return
    if not neighbours:
        _share(state, job, now_s)
        return
    for each in (job, *neighbours):
        if stretched := _stretched(state, each):
            assignment.request_assignment(state, stretched[0], "reverted", now_s)
            return
    view = cluster_view(state, job)
    plan = Plan(places=tuple(place.aggregator for place in job.record.places))
    try:
        validate(plan, view, job_view(state, job, _buckets(job)))
    except PlanRefused:
        assignment.request_assignment(state, job, "reverted", now_s)


def _share(state: State, job: Job, now_s: float) -> None:
    """Assign a job that has its aggregators to itself to those of others, if they have room."""
    view = cluster_view(state, job, new_max=0, without=job.homes())
    subject = replace(job_view(state, job, _buckets(job)), current=())
    if view.aggregators and (homes := planned(state, job, view, subject)):
        migrations.begin(state, job, homes, "profiled", now_s)


def _buckets(job: Job) -> frozenset[int]:
    return frozenset(range(len(job.record.buckets)))


def planned(state: State, job: Job, view: ClusterView, subject: JobView) -> list[AggregatorId]:
    """Where the job's policy puts each bucket; empty: nowhere."""
    name = state.policy_name(job)
    plan, _ = state.policy_named(name).assign(view, subject, state.memories.get(name))
    try:
        validate(plan, view, subject)
    except PlanRefused as error:
        state.log("plan.refused", "error", job=job.id, policy=name, reason=str(error))
        return []
    return [AggregatorId(place) for place in plan.places]


def _utilisation(state: State, job: Job, profile: Profile) -> float:
    """Return the utilisation of the servers that it would have reserved for itself, on average (the
    paper's figures 2 and 3): the part of their CPU that its updates use."""
    share = sum(state.aggregators[a].cpu_share for a in job.homes())
    return sum(profile.task_cpu_s) / profile.iteration_s / share if share else 0.0


def _moved(old: tuple[float, ...], new: tuple[float, ...]) -> bool:
    return abs(sum(new) - sum(old)) > COST_CHANGE * sum(old)


# Windows ------------------------------------------------------------------------------------------


def measured(state: State, job: Job, window: WindowMeasured, now_s: float) -> None:
    if window.location_epoch != job.location_epoch or window.iteration_s <= 0.0:
        return
    before, job.window = job.window, window
    if job.record.profile is not None:
        state.losses.add(loss_of(job.record.profile.iteration_s, window.iteration_s))
    if before is not None and before.location_epoch == window.location_epoch:
        shortest_s = max(before.iteration_s, window.iteration_s)
        if _lower(state, job, shortest_s, now_s):
            return
    record = job.record
    if record.phase != "steady" or record.profile is None or not state.adapts(job):
        return
    neighbours = _neighbours(state, job)
    if any(each.record.phase != "steady" and each.record.profile for each in neighbours):
        return  # Something changes here already.
    loss = loss_of(record.profile.iteration_s, window.iteration_s)
    limit = record.loss_limit or state.config.loss_limit
    begun_s = now_s - (window.spanned_s or window.iterations * window.iteration_s)
    if begun_s < job.settled_s:
        return
    # A move may have been refused.
    remedied = any(each.pending is not None for each in (job, *neighbours))
    if loss > limit and not remedied and (stretched := _stretched(state, job)):
        # The job is stretched even after all changes since the window began.
        leaving, where = stretched
        _tell_loss(state, leaving, "reverted", job, loss, window, where, now_s)
        assignment.request_assignment(state, leaving, "reverted", now_s)
        return
    changed_s = max(state.aggregators[a].changed_s for a in job.homes())
    if begun_s < changed_s:
        return
    interference.look(state, job, window, now_s)
    if loss <= limit:
        job.doubted_s = -inf
        interference.relieved(state, job)
        _forgive(state, job)
        return
    if interference.mitigate(state, job, window, loss, now_s) or remedied:
        return
    steady_s = window.quieter_half_s or window.iteration_s
    steadily = loss_of(record.profile.iteration_s, steady_s)
    if not _confirmed(job, steadily, limit, max(changed_s, job.settled_s), now_s):
        return
    if neighbours:
        _revert(state, job, neighbours, loss, window, now_s)
    elif len(job.homes()) < record.spec.servers:
        _tell_loss(state, job, "expanded", job, loss, window, sorted(job.homes()), now_s)
        assignment.request_assignment(state, job, "reverted", now_s, standalone=True)


def _confirmed(job: Job, steadily: float, limit: float, changed_s: float, now_s: float) -> bool:
    """One window beyond the limit may be a busy moment of the machine, which may reach into the
    next one. What also shows in the quieter half of that (`steadily`) does not pass; nor does what
    shows in three windows; and one above DOUBTLESS times the limit is certain."""
    before = job.doubts if job.doubted_s > changed_s else 0
    job.doubts, job.doubted_s = before + 1, now_s
    if steadily > DOUBTLESS * limit:
        return True
    return before >= (1 if steadily > limit else 2)


def _neighbours(state: State, job: Job) -> list[Job]:
    """Return the jobs that share an aggregator with this one."""
    return [state.jobs[id] for id in state.index.users(job.homes()) if id != job.id]


def _forgive(state: State, job: Job) -> None:
    """Take back the job's pending reversion and exclusions: it does well where it is."""
    if job.pending is not None and job.pending.cause == "reverted":
        job.pending = None
        homes = job.homes()
        left = tuple(a for a in job.record.excluded if a not in homes)
        state.change(job, excluded=left, reason="")


def _stretched(state: State, job: Job) -> tuple[Job, list[AggregatorId]] | None:
    """If by the policy's own reckoning the job loses more than its limit where it is: who leaves,
    and on which aggregators that is so."""
    name = state.policy_name(job)
    view = cluster_view(state, None, policy=name)
    expected = state.policy_named(name).explains(view, job.id)
    if expected is None or expected.leaving is None:
        return None
    return state.jobs[expected.leaving], list(expected.where)


def _revert(
    state: State, victim: Job, neighbours: list[Job], loss: float, window: WindowMeasured,
    now_s: float,
) -> None:  # fmt: skip
    """Undo the newest assignment that could cause the loss and may still be undone."""
    suspects = [
        job
        for job in (victim, *neighbours)
        if state.adapts(job)
        and job.record.profile
        and job.record.reverts < state.config.reverts_max
    ]
    if not suspects and state.config.reverts_max:
        _protect(state, victim, neighbours, loss, window, now_s)
    if not suspects:
        return
    newest = max(suspects, key=lambda job: (job.record.assigned_s, job.id))
    if newest is victim:
        others = frozenset(a for each in neighbours for a in each.homes())
    else:
        others = victim.homes()
    where = newest.homes() & others
    record = newest.record
    state.change(
        newest,
        reverts=record.reverts + 1,
        excluded=tuple(sorted({*record.excluded, *where})),
        crowded=tuple(sorted({*record.crowded, *where})),
    )
    _tell_loss(state, newest, "reverted", victim, loss, window, sorted(where), now_s)
    assignment.request_assignment(state, newest, "reverted", now_s)


def _protect(
    state: State, victim: Job, neighbours: list[Job], loss: float, window: WindowMeasured,
    now_s: float,
) -> None:  # fmt: skip
    """Everybody there was reverted as often as may be: the loser gets aggregators of its own, as
    many as it asked for, until it ends. That it does not lose by sharing is what was promised."""
    where = victim.homes() & {a for each in neighbours for a in each.homes()}
    limit = victim.record.loss_limit or state.config.loss_limit
    why = (
        f"it lost {loss:.0%} of its speed beside others, more than its limit of {limit:.0%}, after "
        f"{state.config.reverts_max} reverts of each job there"
    )
    _tell_loss(state, victim, "protected", victim, loss, window, sorted(where), now_s)
    assignment.request_assignment(state, victim, "reverted", now_s, standalone=True, protected=why)


def _tell_loss(
    state: State, job: Job, fact: str, victim: Job, loss: float, window: WindowMeasured,
    where: list[AggregatorId], now_s: float,
) -> None:  # fmt: skip
    assert victim.record.profile is not None
    state.tell(
        job,
        fact,
        now_s,
        loss=f"{loss:.4f}",
        loser=victim.id,
        iteration_s=f"{window.iteration_s:.6g}",
        standalone_s=f"{victim.record.profile.iteration_s:.6g}",
        aggregators=",".join(where),
        beside=",".join(id for id in state.index.users(where) if id != victim.id),
        limit=f"{victim.record.loss_limit or state.config.loss_limit:g}",
    )


# Recycling ----------------------------------------------------------------------------------------


def recycle(state: State, now_s: float) -> None:
    """One aggregator at a time, while nothing else changes; the next when it is empty."""
    if not state.recycle_due:
        return
    if any(_changing(job) for job in state.jobs.values()):
        return
    state.recycle_due = False
    free = free_parts(state)
    if len(free) < 2:
        return
    least = min(free, key=lambda id: (-free[id], id))
    plans = _empty_out(state, least)
    if plans is None:
        return
    state.recycle_due = True  # Another may follow.
    for job, homes in plans:
        migrations.begin(state, job, homes, "recycled", now_s)


def _changing(job: Job) -> bool:
    """Say whether its part in the load of shared aggregators is about to change."""
    if job.moving or job.record.phase == "released":
        return True
    if job.pending is not None:
        return job.pending.cause != "start"
    return job.record.phase == "hosting" and not job.record.temporary


def _keeps_all(state: State, job: Job) -> bool:
    """Alone in its cluster, it keeps what it asked for, or what it was given for a loss."""
    if len(job.homes()) > job.record.spec.servers:
        return False
    return not state.config.pack_alone or job.record.cause == "expanded"


def _empty_out(
    state: State, aggregator: AggregatorId
) -> list[tuple[Job, list[AggregatorId]]] | None:
    """Return new homes for all buckets there; None: it stays."""
    present = [entry.id for entry in shared(state)]
    users = [state.jobs[id] for id in state.index.users(present)]
    jobs = [job for job in users if state.adapts(job)]
    if any(job.record.profile is None for job in jobs):
        return None
    if len(jobs) == 1 and _keeps_all(state, jobs[0]):
        return None
    views: dict[str, JobView] = {job.id: job_view(state, job) for job in jobs}
    traffic = network.Traffic(state)
    plans: list[tuple[Job, list[AggregatorId]]] = []
    for job in jobs:
        leaving = frozenset(
            bucket
            for bucket, place in enumerate(job.record.places)
            if place.aggregator == aggregator
        )
        if not leaving:
            continue
        others = tuple(
            replace(each, places=tuple(p if p != aggregator else None for p in each.places))
            for id, each in views.items()
            if id != job.id
        )
        view = cluster_view(state, job, new_max=0, without=frozenset({aggregator}), others=others)
        # Not `current`: alone or not, this is about leaving.
        subject = replace(job_view(state, job, leaving), current=())
        homes = planned(state, job, view, subject)
        full = homes and (
            traffic.crowded(job, homes, may_stay=True) or room.without_room(state, job, homes)
        )
        if not homes or full:
            return None
        traffic.take(job, homes)
        views[job.id] = replace(views[job.id], places=tuple(homes))
        plans.append((job, homes))
    return plans or None
