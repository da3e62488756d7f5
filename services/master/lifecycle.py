"""A job from its start on a worker node to its end, and what others must be told of it.

Orders follow from the record alone: whatever its state demands and nobody has confirmed is ordered
(again), so that a master which was killed at any instant loses none.
"""

from collections.abc import Mapping
from heapq import heappop
from typing import Any, Final

from slackwater.common.base import limits
from slackwater.common.base.effects import Log, Persist, StartTimer
from slackwater.schemas import subjects
from slackwater.schemas.base import CONFLICT, RUNS_MAX, JobId, Message, NodeId, Refused
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.gpus import NodeAllocation, held
from slackwater.schemas.job_states import JobState
from slackwater.schemas.jobs import (
    PAUSE_GRACE_S,
    JobRecord,
)
from slackwater.schemas.placement import ReleaseJob
from slackwater.schemas.telemetry import IterationsObserved
from slackwater.schemas.workers import Prepared, PrepareWorkers, StartWorkers, StopWorkers
from slackwater.services.master.ended import ENDED_BUCKET
from slackwater.services.master.environment import launch_environment
from slackwater.services.master.gangs import (
    choose_gpus,
    joins,
    present,
    process_number,
    processes,
    ranks_at,
    used,
    vacating,
)
from slackwater.services.master.jobs import Job
from slackwater.services.master.keys import JobForgotten, Order, UsageStored, Verb
from slackwater.services.master.scheduling.delays import reallocation_s
from slackwater.services.master.state import JOBS_BUCKET, State
from slackwater.services.master.usage import (
    FORGOTTEN_AT_ONCE,
    USAGE_BUCKET,
    Aggregation,
    counted,
    merged,
)

TO_START: Final[frozenset[Verb]] = frozenset({"prepare", "start", "again"})
"""Orders whose refusal for good means that the job cannot run."""
AS_ALL_COUNT: Final[dict[str, Any]] = {"counted": 0, "size_next": 0, "resizing": ""}
"""In the record of a job of which no rank joins or leaves."""
ROLL_BACK_GRACE_S: Final = 0.2
"""Seconds that processes have to end whose work since the mark counts no more."""
RESULTS_BYTES_MAX = limits.RECORD_BYTES_MAX * 3 // 4


def rank_ended(state: State, job: Job, rank: int, result: str, now_s: float) -> None:
    if job.ended or str(rank) in job.record.results:
        return
    workers = present(job.record)
    room = min(limits.RESULT_BYTES_MAX, RESULTS_BYTES_MAX // workers)
    kept = result.encode()[:room].decode(errors="ignore")
    results = job.record.results | {str(rank): kept}
    if len(results) == workers:
        end(state, job, "completed", "", now_s, results=results)
    else:
        state.change(job, now_s, results=results)
        _runs_once_started(state, job, now_s)


def end(state: State, job: Job, final: JobState, reason: str, now_s: float, **changes: Any) -> None:
    changes |= used(job.record, now_s) if job.record.state != "stopping" else {}
    changes |= count_use(state, job, final, now_s)
    changes |= AS_ALL_COUNT
    if final == "completed":
        changes["gpu_ids"] = {}
    state.change(job, now_s, final, state=final, reason=reason, finished_s=now_s, **changes)
    answer_waiting(
        state, job, Refused(reason=f"job {job.record.spec.id} is {final}", code=CONFLICT)
    )
    advance(state, job)
    if final == "completed":
        start_ready(state)


def count_use(state: State, job: Job, final: JobState | None, now_s: float) -> dict[str, Any]:
    """Count what the attempt used, and a job that ends; stored with the stop itself."""
    uses = job.used(state.pool.share(), now_s)
    if final is not None:
        uses += counted(job.record, final, now_s)
        state.sharers.drop(job.id)
    job.aggregation = Aggregation()
    state.usage.note(uses)
    usage = {"usage": merged(job.record.usage, uses)} if uses else {}
    return {"used_s": now_s, **usage}


def count_until_now(state: State, job: Job, now_s: float) -> dict[str, Any]:
    """Count what it used so far, as what it holds is about to change while it runs."""
    return count_use(state, job, None, now_s) | used(job.record, now_s)


def answer_waiting(state: State, job: Job, message: Message) -> None:
    """To all registrations that wait."""
    for token in job.waiting:
        state.reply(token, message)
    job.waiting.clear()


# Orders -------------------------------------------------------------------------------------------


def advance(state: State, job: Job) -> None:
    """Order whatever the job's state demands and nobody has confirmed."""
    record = job.record
    if record.state in ("starting", "running") and ready(state, job):
        if job.handed_s is None and job.found != record.attempt:
            job.handed_s = state.now_s
        unprepared = job.unprepared
        for node, placed in ranks_at(record).items():
            if not unprepared:
                _order_start(state, job, node, placed)
            elif node in unprepared:
                _order_prepare(state, job, node, placed)
    if record.state == "stopping" or (job.ended and not record.released):
        stop = StopWorkers(
            job=job.id, run=record.run, attempt=record.attempt, grace_s=stop_grace_s(record)
        )
        for node in job.stopped_by:
            state.ask(job, job.order("stop", node), _worker(state, node, "stop"), stop)
    if job.ended and not record.released:
        if record.cluster is not None:
            subject = subjects.command("controller", record.cluster, "release")
            release = ReleaseJob(job=job.id, run=record.placement)
            state.ask(job, Order("release"), subject, release)
        _settle(state, job)


def ready(state: State, job: Job) -> bool:
    """Tell whether all others have left the GPUs that it is given, and it does not wait after one
    of its ranks died."""
    if job.rests:
        return False
    ids = (id for ids in job.record.gpu_ids.values() for id in ids)
    return all(len(state.holders[id]) == 1 for id in ids)


def start_ready(state: State) -> None:
    """Order the starts that waited until others left their GPUs."""
    for job in list(state.starting.values()):
        advance(state, job)


def _order_prepare(state: State, job: Job, node: NodeId, placed: tuple[int, ...]) -> None:
    record = job.record
    spec = record.spec
    prepare = PrepareWorkers(
        job=job.id,
        attempt=record.attempt,
        ranks=placed,
        program=spec.program,
        folder=spec.folder,
        env=spec.env,
        gpu_ids=record.gpu_ids.get(node, ()),
        pack=spec.code,
        venv=spec.venv,
    )
    order = job.order("prepare", node)
    state.ask(job, order, _worker(state, node, "prepare"), prepare)


def _order_start(state: State, job: Job, node: NodeId, placed: tuple[int, ...]) -> None:
    record = job.record
    subject = _worker(state, node, "start")
    ranks = tuple(rank for rank in placed if str(rank) not in record.results)
    first = tuple(rank for rank in ranks if not joins(record, rank))
    if first:
        state.ask(job, job.order("start", node), subject, _start(job, node, first))
    for rank in ranks:
        if record.resizing == "leaving" and rank >= record.counted:
            continue
        if joins(record, rank):
            state.ask(job, job.join_order(rank), subject, _start(job, node, (rank,)))
        again = record.restarts.get(str(rank), 0)
        if again and rank not in job.resting:
            order = Order("again", f"-{rank}-{again}")
            state.ask(job, order, subject, _start(job, node, (rank,)))


def _start(job: Job, node: NodeId, ranks: tuple[int, ...]) -> StartWorkers:
    record, spec = job.record, job.record.spec
    numbers = tuple(process_number(record, rank) for rank in ranks)
    first, each = ranks_at(record)[node][0], spec.gpus_each
    ids = record.gpu_ids.get(node, ())
    return StartWorkers(
        job=spec.id,
        ranks=ranks,
        workers=processes(record),
        program=spec.program,
        folder=spec.folder,
        attempts=numbers if any(numbers) else (),
        attempt=record.attempt,
        allocation=record.allocation if spec.gpus else (),
        gpu_ids=tuple(id for r in ranks for id in ids[(r - first) * each : (r - first + 1) * each]),
        rendezvous=job.meeting,
        grace_s=spec.grace_s,
        env=launch_environment(job.spec),
        pack=spec.code,
        venv=spec.venv,
        tenant=spec.tenant,
    )


def stop_grace_s(record: JobRecord) -> float:
    """Return the seconds that its processes have after SIGTERM; 0: as their service says."""
    if record.rolls_back:
        return ROLL_BACK_GRACE_S
    return record.spec.grace_s or (PAUSE_GRACE_S if record.state == "stopping" else 0.0)


def carried_out(state: State, job: Job, what: Order, answer: Message, now_s: float) -> None:
    """Take the answer to prepare, start, again, stop or release."""
    refused = answer if isinstance(answer, Refused) else None
    if refused is None:
        job.told.add(what)
        if isinstance(answer, Prepared):
            _prepared(state, job, what, answer, now_s)
        if what.verb == "start":
            _started(state, job, what, now_s)
        if what.verb == "stop":
            on_processes_gone(state, job, now_s)
        _settle(state, job)
    elif (
        what.verb in TO_START
        and refused.retry_after_s == 0.0
        and not job.ended
        and job.concerns_now(what)
    ):
        end(state, job, "failed", f"it cannot be started: {refused.reason}", now_s)
    else:
        fields = {"what": str(what), "job": job.id, "reason": refused.reason}
        state.out.append(Log("ask.refused", fields, "warning"))


def _prepared(state: State, job: Job, what: Order, answer: Prepared, now_s: float) -> None:
    nodes = [node for node, _ in job.record.allocation]
    if nodes and what == job.order("prepare", nodes[0]):
        host = answer.host if len(nodes) > 1 else "127.0.0.1"
        job.meeting = f"{host}:{answer.port}" if answer.port else ""
    job.codes |= {n: answer.code for n in nodes if what == job.order("prepare", n)}
    if why := different_code(job):
        end(state, job, "failed", why, now_s)
    elif not job.unprepared:
        advance(state, job)


def different_code(job: Job) -> str:
    """Say which nodes of the gang have different code; empty: none that have said theirs."""
    said = [(node, code) for node, code in job.codes.items() if code]
    for node, code in said[1:]:
        if code != said[0][1]:
            first, script = said[0], " ".join(job.record.spec.program[:2])
            return (
                f"its ranks would run different code: {script} and the files beside it have the "
                f"digest {first[1][:12]} on {first[0]}, {code[:12]} on {node}; submit it with "
                "--workdir, which sends the same to all nodes"
            )
    return ""


def _started(state: State, job: Job, what: Order, now_s: float) -> None:
    for node, _ in job.record.allocation:
        if job.order("start", node) == what:
            state.nodes.started(node)
    _runs_once_started(state, job, now_s)


def _runs_once_started(state: State, job: Job, now_s: float) -> None:
    if job.record.state == "starting" and not job.unprepared and not job.unstarted:
        if job.handed_s is not None:
            job.starting_s = now_s - job.handed_s
        state.change(job, now_s, "running", state="running", begun_s=now_s, reason="")


def on_iterations(job: Job, message: IterationsObserved, now_s: float) -> None:
    """Learn from the first report of an attempt when its ranks began to train: a program may load
    for long after it was started."""
    if job.trains or job.starting_s is None or job.handed_s is None or not message.durations_s:
        return
    trained_s = now_s - sum(message.durations_s)
    if trained_s > job.handed_s:  # Else it is late news of the attempt before.
        job.trains = True
        job.starting_s = max(job.starting_s, trained_s - job.handed_s)


def leave(
    state: State, job: Job, planned: NodeAllocation, now_s: float, fact: str = "", **changes: Any
) -> None:
    """Intend that the job leaves what it holds, and what it goes on with; empty: it pauses.
    `fact`: it is told; left out: what follows from `planned`."""
    record = job.record
    changes |= used(record, now_s) if record.state != "stopping" else {"since_s": now_s}
    changes |= count_use(state, job, None, now_s)
    changes |= AS_ALL_COUNT
    if record.state != "stopping":
        job.left_s = now_s
    fact = fact or ("resized" if planned else "stopping")
    state.change(job, now_s, fact, state="stopping", planned=planned, **changes)


def on_processes_gone(state: State, job: Job, now_s: float) -> None:
    """Go on once no process of a stopping or ended job is left: it pauses or starts at its new
    size, and others start where it was. A node that is silent is not waited for: the processes
    that it may still have are stopped when it is heard again."""
    record = job.record
    if any(not state.nodes.silent(node, now_s) for node in job.unstopped):
        return
    if record.state == "stopping":
        goes_on = bool(record.planned)
        changes: dict[str, Any] = {"attempt": record.attempt + 1, "planned": (), "joins": {}}
        changes |= count_use(state, job, None, now_s)
        changes["gpu_ids"] = {}
        changes |= _measured(job, now_s) | next_placement(state, job, record.rolls_back)
        job.next_attempt()
        if goes_on:
            # Its own GPUs are not taken by itself: they are given up first.
            state.change(job, now_s, gpu_ids={})
            devices = choose_devices(state, record, record.planned)
            goes_on = suffice(devices, record.planned)
        if goes_on:
            changes |= devices | {"state": "starting", "allocation": record.planned}
        else:  # It pauses, too, where its GPUs are gone or not heard of yet.
            changes |= {"state": "paused", "allocation": (), "ran_on": record.allocation}
            if record.planned:
                changes["reason"] = "GPUs that it was to go on with are gone, or not heard of yet"
        other_size = goes_on and held(record.planned) != held(record.allocation)
        scales = record.spec.gpus or record.spec.elastic
        if (scales and other_size) or meets_alone(record):
            changes["results"] = {}  # Ranks that meet without aggregators need all others.
        state.change(job, now_s, "starting" if goes_on else "paused", **changes)
    elif job.ended and record.gpu_ids and not job.unstopped:
        state.change(job, now_s, gpu_ids={})
    else:
        return
    advance(state, job)
    start_ready(state)


def meets_alone(record: JobRecord) -> bool:
    """Tell whether its ranks meet without aggregators: each of them needs all others. So do those
    of a job without GPUs whose user says that it is plain DistributedDataParallel."""
    plain = record.spec.gpus or (record.spec.aggregate == "off" and record.spec.workers > 1)
    return record.sums or (bool(plain) and record.cluster is None)


def next_placement(state: State, job: Job, goes_back: bool) -> dict[str, Any]:
    """Have the regions of an attempt dropped in which gradients were added up, or of which a part
    was lost: what is left of it there is part of nothing that the next one computes."""
    record = job.record
    if record.cluster is None or not (record.sums or goes_back):
        return {}
    back = {"rolls_back": False, "begins_with": record.mark} if goes_back else {}
    subject = subjects.command("controller", record.cluster, "release")
    order = Order("release", f"-{record.placement}")
    state.ask(job, order, subject, ReleaseJob(job=job.id, run=record.placement))
    job.tensors, job.placed = (), False
    return {"placement": min(record.placement + 1, RUNS_MAX), **back}


def _measured(job: Job, now_s: float) -> dict[str, Any]:
    """Take what the attempt that has just ended tells of the job's re-allocation delay: nothing
    where this master saw a part of it only, or a silent node was not waited for."""
    if job.left_s is None or job.starting_s is None or job.unstopped:
        return {}
    stopping_s = now_s - job.left_s
    before_s = job.record.reallocation_s
    return {"reallocation_s": reallocation_s(before_s, stopping_s, job.starting_s)}


def choose_devices(state: State, record: JobRecord, allocation: NodeAllocation) -> dict[str, Any]:
    """Choose the GPUs of a job that gets an allocation; nothing for a job on slots."""
    if not record.spec.gpus:
        return {"node": allocation[0][0]}
    taken, leaving = set(), set()
    for id, jobs in state.holders.items():
        if any(not vacating(job.record) for job in jobs.values()):
            taken.add(id)
        elif jobs:
            leaving.add(id)
    healthy = {node: state.nodes.healthy(node) for node, _ in allocation}
    ids = choose_gpus(allocation, healthy, taken, leaving)
    return {"node": allocation[0][0], "gpu_ids": ids}


def suffice(devices: Mapping[str, Any], allocation: NodeAllocation) -> bool:
    """Say whether each node gives as many GPUs as were allocated there, if any were."""
    ids = devices.get("gpu_ids")
    return ids is None or all(len(ids[node]) == number for node, number in allocation)


def stop_strangers(state: State, heartbeat: WorkerHeartbeat) -> None:
    """End what a node still runs of jobs that have gone on elsewhere, once it is heard again."""
    for id in sorted({id for id, _ in heartbeat.running}):
        job = state.jobs.get(id)
        if job is None or not job.record.attempt:
            continue
        record = job.record
        elsewhere = heartbeat.node not in dict(record.allocation)
        if elsewhere and record.state in ("paused", "starting", "running"):
            stop = StopWorkers(job=id, attempt=record.attempt - 1)
            subject = _worker(state, heartbeat.node, "stop")
            order = Order("stranger", f"-{record.attempt}@{heartbeat.node}")
            state.ask(job, order, subject, stop)


def _worker(state: State, node: NodeId, verb: str) -> str:
    return subjects.command("worker", state.nodes.service_id(node), verb)


def _settle(state: State, job: Job) -> None:
    """An ended job is settled when all who knew of it have let it go."""
    record = job.record
    needed = {Order("release")} if record.cluster is not None else set()
    if job.ended and not record.released and needed <= job.told and not job.unstopped:
        state.change(job, record.finished_s, released=True)
        prune(state)


def prune(state: State) -> None:
    """Put the use of the oldest ended jobs into their tenants' sums, to forget them."""
    usage = state.usage
    while len(state.settled) > state.config.jobs_kept_max:
        if len(usage.forgetting) >= FORGOTTEN_AT_ONCE:
            return
        ended_s, id = heappop(state.settled)
        for key, kept in usage.forget(state.jobs[id].record):
            state.out.append(Persist(USAGE_BUCKET, key, kept))
        state.out += [Persist(USAGE_BUCKET, key, None) for key in usage.outdated(ended_s)]
        keep_id(state, state.jobs[id].record)
        state.out.append(StartTimer(UsageStored(id), ended_s))


def keep_id(state: State, record: JobRecord) -> None:
    """Store that a job with this id ended, before its record is deleted."""
    kept = state.ended.add(record, state.now_s)
    if kept is not None:
        state.out.append(Persist(ENDED_BUCKET, *kept))


def expire(state: State) -> None:
    """Make the ids of jobs free that ended long ago."""
    for key in state.ended.expired(state.now_s):
        state.out.append(Persist(ENDED_BUCKET, key, None))


def forget(state: State, id: JobId) -> None:
    """Delete the record of a job whose use is durable in its tenants' sums."""
    state.jobs.pop(id, None)
    state.usage.forgetting.add(id)  # Its mark stays until the record is gone for good.
    state.out.append(Persist(JOBS_BUCKET, id, None))
    state.out.append(StartTimer(JobForgotten(id), 0.0))


def forget_again(state: State, record: JobRecord) -> None:
    """Go on with the job that a former master was about to forget: it is in the sums."""
    id = JobId(record.spec.id)
    state.usage.forgetting.add(id)
    keep_id(state, record)
    state.out.append(StartTimer(UsageStored(id), record.finished_s))


def forgotten(state: State, id: JobId) -> None:
    """Drop the mark of a job whose record is deleted, and forget those that come next."""
    state.usage.forgetting.discard(id)
    prune(state)
