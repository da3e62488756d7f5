"""Let jobs that take turns share nodes with those that they fit best (Harmony: Lee 2020, section
4.3.2), as far as they can be moved.

A job that is new is put where fewest others are (placement.py), and measured there. Once all that
run are measured, it is looked at who should be with whom (turn_groups.py); a job that is to be
elsewhere gets or gives hosts while it runs, or stops, and goes on there from where it was. Nothing
of this is stored but each job's allocation: the next master measures, and looks again.
"""

from math import inf
from typing import Final

from slackwater.common.base.effects import Log
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import TURNS_MAX, TurnGroup, TurnState, WorkerHeartbeat
from slackwater.schemas.gpus import NodeAllocation
from slackwater.schemas.job_states import WAITING_STATES
from slackwater.schemas.jobs import JobRecord
from slackwater.services.master.gangs import lies_anywhere, processes
from slackwater.services.master.jobs import Job
from slackwater.services.master.lifecycle import advance, leave
from slackwater.services.master.scaling import resize
from slackwater.services.master.scheduling.meeting import meeting
from slackwater.services.master.state import State
from slackwater.services.master.turn_groups import Member, regroup

LOOK_S: Final = 5.0
"""Seconds between two looks."""
PROFILING_S: Final = 120.0
"""A job that was not measured in this time is not waited for."""
RESTART_S: Final = 10.0
"""Seconds that a job loses which stops and goes on elsewhere, where nothing is known of it."""
SETTLE_S: Final = 60.0
"""So long a move may wait until its nodes have room."""


def heard(state: State, heartbeat: WorkerHeartbeat, now_s: float) -> None:
    """Take what jobs had of a node's permits so far."""
    for each in heartbeat.turns:
        job = state.turning.jobs.get(each.job)
        if job is None or each.node != heartbeat.node:
            continue
        record = job.record
        job.turn_profile.lies(record.attempt, record.allocation, now_s)
        if record.state != "running" or record.resizing:
            continue
        if (progress := job.shown_progress(now_s)) is not None:
            job.turn_profile.heard(each, progress.iteration, now_s)


def look(state: State, now_s: float) -> None:
    """Go on with what was decided; else look, once in a while, who should be with whom."""
    state.turning.moves = {
        id: (nodes, until_s)
        for id, (nodes, until_s) in state.turning.moves.items()
        if now_s < until_s and id in state.turning.jobs and not _moved(state, id, nodes, now_s)
    }
    if state.turning.moves or now_s < state.turning.look_s or not state.config.regroup_gain:
        return
    state.turning.look_s = now_s + LOOK_S
    jobs = list(state.turning.jobs.values())
    if len(jobs) < 2 or not all(_looked_at(job, now_s) for job in jobs):
        return
    known = [job for job in jobs if job.turn_profile.measured and job.turn_profile.known]
    members = [_member(job, now_s) for job in known]
    free = state.nodes.room(now_s).free
    slots = {
        node: count + sum(member.nodes.count(node) for member in members)
        for node, count in free.items()
    }
    slots = {node: count for node, count in slots.items() if count > 0}
    memory = {each.node: each.memory_bytes for each, _ in state.nodes.heartbeats(now_s)}
    found = regroup(members, slots, state.config.regroup_gain, memory)
    for job in known:
        job.turn_profile.decided = True
    if found is None:
        return
    fields = {
        "use": round(found.before, 3),
        "use_after": round(found.after, 3),
        "moves": {id: list(nodes) for id, nodes in found.places.items()},
    }
    state.out.append(Log("turns.regrouped", fields))
    state.turning.moves = {
        id: (nodes, now_s + SETTLE_S)
        for id, nodes in found.places.items()
        if not _moved(state, id, nodes, now_s)
    }


def group_of(state: State, job: Job) -> TurnGroup | None:
    """Show how far it is with its group; None: it takes no turns."""
    record, profile = job.record, job.turn_profile
    if not record.spec.by_turns or job.ended:
        return None
    times = profile.known
    return TurnGroup(
        state=_state_of(record, job),
        computing_s=times.cpu_s if times is not None else 0.0,
        moving_s=times.network_s if times is not None else 0.0,
        nodes=times.machines if times is not None else 0,
        shares_with=tuple(sorted(_with(state, job.id)))[:TURNS_MAX],
    )


def _state_of(record: JobRecord, job: Job) -> TurnState:
    if record.state in WAITING_STATES:
        return "paused" if record.state == "paused" else "waiting"
    if job.turn_profile.known is None:
        return "profiling"
    return "running" if job.turn_profile.decided else "profiled"


def _with(state: State, id: JobId) -> set[JobId]:
    places = {each: _nodes_of(job.record) for each, job in state.turning.jobs.items()}
    group = next((jobs for jobs, _ in meeting(places) if id in jobs), set())
    return group - {id}


def _nodes_of(record: JobRecord) -> tuple[NodeId, ...]:
    return tuple(node for node, count in record.allocation for _ in range(count))


def _looked_at(job: Job, now_s: float) -> bool:
    """Say whether it is measured where it is, or is not waited for; one that is about to be
    elsewhere is."""
    record, profile = job.record, job.turn_profile
    if record.state != "running" or record.resizing:
        return False
    profile.lies(record.attempt, record.allocation, now_s)
    return profile.measured or now_s - profile.since_s > PROFILING_S


def _member(job: Job, now_s: float) -> Member:
    record, spec = job.record, job.record.spec
    times = job.turn_profile.known
    assert times is not None, job.id
    number = processes(record)
    fixed = not spec.elastic or spec.choose_hosts or bool(record.workers)
    least, most = (number, number) if fixed else spec.workers_bounds
    progress = job.shown_progress(now_s)
    left_s = progress.eta_s if progress is not None else None
    return Member(
        job=job.id,
        nodes=_nodes_of(record),
        times=times,
        least=least,
        most=most,
        moves=lies_anywhere(spec) and bool(spec.program) and not record.results,
        cost_s=record.reallocation_s or RESTART_S,
        left_s=inf if left_s is None else left_s,
        memory_bytes=spec.memory_bytes,
    )


def _moved(state: State, id: JobId, nodes: tuple[NodeId, ...], now_s: float) -> bool:
    """Let the job go on at these nodes. False: they have no room yet."""
    job = state.jobs[id]
    record = job.record
    if record.state != "running" or record.resizing or record.results or job.resting:
        return True  # It is otherwise engaged: it is looked at again when it runs.
    free = state.nodes.room(now_s).free
    if any(free.get(node, 0) < 1 for node in nodes if node not in dict(record.allocation)):
        return False
    placed: NodeAllocation = tuple((node, nodes.count(node)) for node in dict.fromkeys(nodes))
    if not resize(state, job, placed, now_s):
        reason = f"it goes on where it uses nodes best: {', '.join(nodes)}"
        leave(state, job, placed, now_s, reason=reason, reallocations=record.reallocations + 1)
        advance(state, job)
    return True
