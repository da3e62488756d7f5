"""A job from its start on a worker node to its end, and what others must be told of it.

Orders follow from the record alone: whatever its state demands and nobody has confirmed is ordered
(again), so that a master which was killed at any instant loses none.
"""

from heapq import heappop
from typing import Any

from slackwater.common.base import limits
from slackwater.common.base.effects import Log, Persist
from slackwater.schemas import subjects
from slackwater.schemas.base import CONFLICT, RUN_ATTEMPTS, JobId, Message, Refused
from slackwater.schemas.cluster import StartWorkers, StopWorkers
from slackwater.schemas.job_states import JobState
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.placement import ReleaseJob
from slackwater.services.master.admission import Hold, named
from slackwater.services.master.jobs import Job
from slackwater.services.master.nodes import Room
from slackwater.services.master.state import JOBS_BUCKET, State, held_back

RESULTS_BYTES_MAX = limits.RECORD_BYTES_MAX * 3 // 4


def start_waiting(state: State, now_s: float) -> None:
    """Give the worker nodes' free slots to the jobs that wait for them, and tell who waits why."""
    queued = state.queued
    if not queued:
        return
    room = state.nodes.room(now_s)
    told = {id for id in state.held if id in queued}
    held: dict[JobId, Hold] = {}
    state.closed.clear()
    while (ahead := queued.first(room.largest, state.closed)) is not None:
        room.ahead, job = ahead, state.jobs[ahead]
        why = held_back(state, job, now_s)
        if why is not None:
            held[ahead] = why
            if ahead not in told:
                state.tell(job, "waiting", now_s, why.reason)
            if why.cause == "tenant":
                state.closed.add(job.record.spec.tenant)
                continue
            room.ahead_for = why.cause
            break
        node = room.fitting(job.record.spec.workers)
        if node is None:
            break
        room.free[node] -= job.record.spec.workers
        state.change(job, now_s, "running", state="running", started_s=now_s, node=node)
        advance(state, job)
    else:
        room.ahead = None
    for id in told:
        del state.held[id]
    state.held |= held
    _tell_waits(state, room, now_s)


def _tell_waits(state: State, room: Room, now_s: float) -> None:
    """Those that are new, and all of which a barrier has changed; not with every slot that comes
    or goes."""
    queued = state.queued
    untold = [id for id in queued.untold if id in queued]
    queued.untold.clear()
    for group in queued.groups():
        barrier = room.barrier(group.asked)
        if queued.told.get(group) not in (None, barrier):
            untold += queued.members(group)
        queued.told[group] = barrier
    for id in dict.fromkeys(untold):
        job = state.jobs[id]
        why = waits_here(state, room, job)
        if why and id not in state.held:  # Those were told.
            state.tell(job, "waiting", now_s, why)


def waits_here(state: State, room: Room, job: Job) -> str:
    """Why a queued job is not started; empty: it is about to be."""
    wait = room.wait(job.record)
    if wait is not None and wait.cause not in ("slots", "turn"):
        return wait.reason
    if job.id in state.held:
        return state.held[job.id].reason
    tenant = job.record.spec.tenant
    if tenant in state.closed:
        return f"waits until {named(tenant)}'s jobs, submitted earlier, have their part of the pool"
    return wait.reason if wait is not None else ""


def rank_ended(state: State, job: Job, rank: int, result: str, now_s: float) -> None:
    if job.ended or str(rank) in job.record.results:
        return
    workers = job.record.spec.workers
    room = min(limits.RESULT_BYTES_MAX, RESULTS_BYTES_MAX // workers)
    kept = result.encode()[:room].decode(errors="ignore")
    results = job.record.results | {str(rank): kept}
    if len(results) == workers:
        end(state, job, "completed", "", now_s, results=results)
    else:
        state.change(job, now_s, results=results)
    start_waiting(state, now_s)


def end(state: State, job: Job, final: JobState, reason: str, now_s: float, **changes: Any) -> None:
    state.change(job, now_s, final, state=final, reason=reason, finished_s=now_s, **changes)
    answer_waiting(
        state, job, Refused(reason=f"job {job.record.spec.id} is {final}", code=CONFLICT)
    )
    advance(state, job)
    start_waiting(state, now_s)


def answer_waiting(state: State, job: Job, message: Message) -> None:
    """To all registrations that wait."""
    for token in job.waiting:
        state.reply(token, message)
    job.waiting.clear()


# Orders -------------------------------------------------------------------------------------------


def advance(state: State, job: Job) -> None:
    """Order whatever the job's state demands and nobody has confirmed."""
    record = job.record
    id = record.spec.id
    if record.state == "running" and record.node is not None:
        subject = _worker(state, job, "start")
        ranks = tuple(r for r in range(record.spec.workers) if str(r) not in record.results)
        state.ask(job, "start", subject, _start(record, ranks))
        for rank in ranks:
            again = record.restarts.get(str(rank), 0)
            if again and rank not in job.resting:
                state.ask(job, f"again-{rank}-{again}", subject, _start(record, (rank,)))
    if job.ended and not record.released:
        if record.node is not None and record.state != "completed":
            state.ask(job, "stop", _worker(state, job, "stop"), StopWorkers(job=id, run=record.run))
        if record.cluster is not None:
            subject = subjects.command("controller", record.cluster, "release")
            state.ask(job, "release", subject, ReleaseJob(job=id, run=record.run))
        _settle(state, job)


def _start(record: JobRecord, ranks: tuple[int, ...]) -> StartWorkers:
    first = RUN_ATTEMPTS * record.run
    attempts = tuple(first + record.restarts.get(str(rank), 0) for rank in ranks)
    return StartWorkers(
        job=record.spec.id,
        ranks=ranks,
        workers=record.spec.workers,
        program=record.spec.program,
        folder=record.spec.folder,
        attempts=attempts if any(attempts) else (),
    )


def carried_out(state: State, job: Job, what: str, refused: Refused | None, now_s: float) -> None:
    """Take the answer to start, again, stop or release."""
    if refused is None:
        job.told.add(what)
        _settle(state, job)
    elif what.startswith(("start", "again")) and refused.retry_after_s == 0.0 and not job.ended:
        end(state, job, "failed", f"it cannot be started: {refused.reason}", now_s)
    else:
        fields = {"what": what, "job": job.id, "reason": refused.reason}
        state.out.append(Log("ask.refused", fields, "warning"))


def _worker(state: State, job: Job, verb: str) -> str:
    assert job.record.node is not None
    return subjects.command("worker", state.nodes.service_id(job.record.node), verb)


def _settle(state: State, job: Job) -> None:
    """An ended job is settled when all who knew of it have let it go."""
    record = job.record
    needed = {"release"} if record.cluster is not None else set()
    if record.node is not None and record.state != "completed":
        needed.add("stop")
    if job.ended and not record.released and needed <= job.told:
        state.change(job, record.finished_s, released=True)
        _prune(state)


def _prune(state: State) -> None:
    while len(state.settled) > state.config.jobs_kept_max:
        _, id = heappop(state.settled)
        del state.jobs[id]
        state.out.append(Persist(JOBS_BUCKET, id, None))
