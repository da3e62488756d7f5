"""Give a job another number of workers, as people ask or a policy decides, while it trains.

Pure. A job whose parameters are in aggregators is not stopped: ranks that stay keep their process
and their GPUs. What is to happen is stored before anything is ordered:

    joining   its record holds the additional slots or GPUs, and the new ranks are started; nothing
              changes for the job before the last of them says that it is ready
    ordered   rank 0 is told the number; it fixes the iteration from which on so many count
    leaving   that has come: the processes that do not count any more are ended, then what they held
              is free

A job of another kind, or one whose Agents are not there yet, saves, ends and starts at its new
size. One that waits starts at it.

What is idle is taken at once, before jobs that wait, unless these have a higher priority and wait
for slots: somebody asked for it by name, and the answer says before whom. Whatever a policy takes
from a job that runs it may take from this one afterwards.
"""

from typing import Any, Literal

import msgspec

from slackwater.common.base.words import number_of
from slackwater.schemas import subjects
from slackwater.schemas.base import CONFLICT, NOT_FOUND, RUN_ATTEMPTS, Message, NodeId, Ok, Refused
from slackwater.schemas.gpus import NodeAllocation, held
from slackwater.schemas.job_requests import (
    AskSize,
    JobInfo,
    JoinJob,
    Meet,
    Meeting,
    ScaleJob,
    SizeWanted,
)
from slackwater.schemas.job_states import STATE_SAID
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.progress import ProgramProgress
from slackwater.schemas.workers import StopWorkers, WorkerExited
from slackwater.services.master import lifecycle
from slackwater.services.master.gangs import asked, present, processes, ranks_at
from slackwater.services.master.jobs import Job, unknown
from slackwater.services.master.keys import Order
from slackwater.services.master.lifecycle import (
    AS_ALL_COUNT,
    advance,
    count_until_now,
    leave,
    stop_grace_s,
)
from slackwater.services.master.rank_restarts import death
from slackwater.services.master.scheduling.hosts import HostUse
from slackwater.services.master.state import State

RETRY_S = 1.0
NAMED_MAX = 3
"""Jobs that wait which an answer names."""
JOINING_S = 120.0
"""Seconds that ranks which join have to be ready, all together, before they are given up."""


def scale(
    state: State, message: ScaleJob, now_s: float, who: Literal["user", "program"] = "user"
) -> Message:
    """Give the job this number of workers; repeated, the answer is the same. Refused: nothing
    changed."""
    job = state.shown_job(message.job)
    if job is None:
        return Refused(reason=unknown(message.job), code=NOT_FOUND)
    record, workers = job.record, message.workers
    if asked(record) == workers:
        return _answer(state, job)
    refused = _refusal(state, job, workers)
    if refused is not None:
        return refused
    state.change(job, now_s, workers=workers)
    state.tell(job, "scaling", now_s, f"its {who} asks for {number_of(workers, 'worker')}")
    pursue(state, job, now_s)
    return _answer(state, job)


def _answer(state: State, job: Job) -> JobInfo:
    """Tell what the job lacks for the workers that it is to have, or before whom it takes that."""
    record = job.record
    reason = lacking(record)
    if record.resizing == "joining" or held(record.planned) > held(record.allocation):
        schedule = state.gpus if record.spec.gpus else state.slots
        waiting = list(schedule.snapshot.waiting)
        more = f" and {len(waiting) - NAMED_MAX} more" if len(waiting) > NAMED_MAX else ""
        if waiting:
            what = f"{'idle GPUs' if record.spec.gpus else 'free slots'} before jobs that wait"
            reason = f"it takes {what}: {', '.join(waiting[:NAMED_MAX])}{more}"
    return JobInfo(job=msgspec.structs.replace(record, reason=reason))


def lacking(record: JobRecord) -> str:
    """Say that it lacks room for the workers that its user asks for; empty: it has them."""
    has, wanted = processes(record), asked(record)
    if record.state != "running" or record.resizing or not record.workers or has >= wanted:
        return ""
    each, within = record.spec.gpus_each, record.spec.within
    more = number_of((wanted - has) * (each or 1), f"more {'idle GPU' if each else 'free slot'}")
    where = f" of its {within}" if within else ""
    return (
        f"trains with {number_of(has, 'worker')}; {wanted} were asked for: it waits for "
        f"{more}{where}; `slackwater scale {record.spec.id} --workers {has}` takes that back"
    )


def _refusal(state: State, job: Job, workers: int) -> Refused | None:
    record, id = job.record, job.id
    spec = record.spec
    least, most = spec.workers_bounds
    if job.ended:
        reason = f"job {id} {STATE_SAID[record.state]}; `slackwater rerun {id}` runs it again"
        return Refused(reason=reason, code=CONFLICT)
    if job.by_hand:
        reason = f"job {id} was started by its user, who alone can start or end its processes"
        return Refused(reason=reason, code=CONFLICT)
    if not spec.elastic:
        bounds = "--gpus-min and --gpus-max" if spec.gpus else "--workers-min and --workers-max"
        reason = (
            f"job {id} has {number_of(spec.workers, 'worker')} for good: it was submitted without "
            f"other bounds; submit it with {bounds}"
        )
        if spec.consistency == "stale-synchronous":
            reason = f"job {id} is {spec.consistency}: the slowest worker bounds all, none may go"
        return Refused(reason=reason, code=CONFLICT)
    if spec.adaptive:
        reason = f"job {id} is adaptive: the policy {state.gpus.policy} decides how many it has"
        return Refused(reason=reason, code=CONFLICT)
    if not least <= workers <= most:
        reason = f"{number_of(workers, 'worker')}: job {id} can have {least} to {most}"
        return Refused(reason=reason)
    if record.resizing or record.state == "starting" or record.planned:
        what = (
            f"changes to {number_of(record.size_next, 'worker')}"
            if record.resizing
            else "is starting its ranks"
        )
        reason = f"job {id} {what}; try again when it has"
        return Refused(reason=reason, retry_after_s=RETRY_S)
    return None


def pursue(state: State, job: Job, now_s: float) -> None:
    """Bring the job to the number of workers that was asked for, as far as there is room."""
    record = job.record
    if record.state != "running" or record.resizing or not record.workers:
        return
    wanted, has = record.workers, processes(record)
    if wanted == has or record.results or job.resting:
        return
    if wanted > has and _outranked(state, record):
        return
    allocation: NodeAllocation | None
    if wanted < has:
        allocation = trimmed(record.allocation, wanted * (record.spec.gpus_each or 1))
    elif record.spec.gpus or not lives(job):
        allocation = _grown(state, record, wanted - has, now_s)
    else:  # Some of them will do until there are all.
        some = (_grown(state, record, more, now_s) for more in range(wanted - has, 0, -1))
        allocation = next((found for found in some if found is not None), None)
    if allocation is None:
        return
    if lives(job):
        begin(state, job, allocation, now_s)
    else:
        reason = f"it goes on with {number_of(wanted, 'worker')}"
        leave(state, job, allocation, now_s, reason=reason, reallocations=record.reallocations + 1)
        advance(state, job)


def _outranked(state: State, record: JobRecord) -> bool:
    """Say whether a job of higher priority waits for slots."""
    first = None if record.spec.gpus else state.slots.first_waiting
    return first is not None and first.priority > record.spec.priority


def lives(job: Job) -> bool:
    """Tell whether it can change its number of workers without being stopped."""
    record = job.record
    return (
        record.state == "running"
        and record.cluster is not None
        and not record.sums
        and record.spec.elastic
        and not record.resizing
        and not record.results
        and not job.resting
        and max(record.joins.values(), default=0) + record.spec.restarts < RUN_ATTEMPTS - 1
    )


def resize(state: State, job: Job, allocation: NodeAllocation, now_s: float) -> bool:
    """Let a job go on with what a policy gives it, without being stopped. False: it must be."""
    ordered = compatible(job.record.allocation, allocation) if lives(job) else None
    if ordered is None:
        return False
    before, gpus = dict(job.record.allocation), job.record.spec.gpus
    slots = {} if gpus else state.nodes.room(now_s).free
    for node, number in ordered:
        free = len(_idle(state, node)) if gpus else slots.get(node, 0)
        if number - before.get(node, 0) > max(0, free):  # Others have yet to leave them.
            return False
    begin(state, job, ordered, now_s)
    return True


def compatible(old: NodeAllocation, new: NodeAllocation) -> NodeAllocation | None:
    """Return the new allocation in an order in which ranks that stay keep their numbers and nodes;
    None: they cannot."""
    less, more = (old, new) if held(old) < held(new) else (new, old)
    larger = dict(more)
    if held(old) == held(new) or any(larger.get(node, 0) < number for node, number in less):
        return None
    if more is old:
        return new if trimmed(old, held(new)) == _in_order(old, new) else None
    first = tuple((node, larger[node]) for node, _ in old)
    if any(now != then for now, then in zip(first[:-1], old[:-1], strict=True)):
        return None
    return (*first, *((node, number) for node, number in new if node not in dict(old)))


def _in_order(old: NodeAllocation, new: NodeAllocation) -> NodeAllocation:
    kept = dict(new)
    return tuple((node, kept[node]) for node, _ in old if node in kept)


def trimmed(allocation: NodeAllocation, number: int) -> NodeAllocation:
    """Return the first so many GPUs or slots of it."""
    kept: list[tuple[NodeId, int]] = []
    for node, here in allocation:
        taken = min(here, number - sum(count for _, count in kept))
        if taken > 0:
            kept.append((node, taken))
    return tuple(kept)


def _grown(state: State, record: JobRecord, more: int, now_s: float) -> NodeAllocation | None:
    """Return what it holds and so many processes more, where that is free; None: it is not. Only
    the last node of the allocation may get more, or ranks would change their numbers."""
    each = record.spec.gpus_each or 1
    left, grown = more * each, list(record.allocation)
    free = _free_gpus(state, record, now_s) if record.spec.gpus else state.nodes.room(now_s).free
    last = grown[-1][0]
    nodes = [last, *sorted(free.keys() - dict(grown).keys(), key=lambda node: (-free[node], node))]
    for node in nodes:
        here = min(left, free.get(node, 0) // each * each)
        if here <= 0:
            continue
        left -= here
        if node == last:
            grown[-1] = (last, grown[-1][1] + here)
        else:
            grown.append((node, here))
    return None if left else tuple(grown)


def _free_gpus(state: State, record: JobRecord, now_s: float) -> dict[NodeId, int]:
    """Count the idle GPUs of each node onto which the job may grow: GPUs of the type that it has,
    on its node or in its rack where it must lie together, with the cores and the memory that it
    needs beside them. A node that is silent or left out has none."""
    nodes = {each.node: each for each in state.nodes.gpus(now_s) if each.number}
    last = nodes.get(record.allocation[-1][0])
    if last is None:  # It is not heard: its type and its rack are not known.
        return {}
    snapshot, within = state.gpus.snapshot, record.spec.within
    seen, view = snapshot.preview(record), snapshot.shown(now_s)
    hosts = HostUse(view.cluster, view.jobs.values()) if seen.needs_host else None
    place = {node.id: index for index, node in enumerate(view.cluster.nodes)}
    free = {}
    for node, each in nodes.items():
        together = node == last.node if within == "node" else each.rack == last.rack
        if each.gpu_type == last.gpu_type and (together or not within):
            idle = len(_idle(state, node))
            fed = hosts.fitting(seen, place[node]) if hosts and node in place else idle
            free[node] = min(idle, fed)
    return free


def _idle(state: State, node: NodeId) -> list[str]:
    return [id for id in state.nodes.healthy(node) if not state.holders.get(id)]


def begin(state: State, job: Job, allocation: NodeAllocation, now_s: float) -> None:
    """Intend that the job goes on with this allocation, which is `compatible` with its own."""
    record = job.record
    each = record.spec.gpus_each or 1
    has, wanted = processes(record), held(allocation) // each
    job.joined.clear()
    job.joining_s = now_s
    if wanted < has:
        state.change(job, now_s, resizing="ordered", size_next=wanted)
        state.tell(job, "resizing", now_s, f"{has - wanted} of its {has} workers leave")
        return
    for rank in range(has, wanted):  # One of its number may have been missed before it left.
        job.missing_since_s.pop(rank, None)
    joins = {str(r): record.joins.get(str(r), 0) + 1 for r in range(has, wanted)}
    changes: dict[str, Any] = {
        "allocation": allocation,
        "counted": has,
        "size_next": wanted,
        "resizing": "joining",
        "joins": record.joins | joins,
        "reallocations": record.reallocations + 1,
    }
    if record.spec.gpus:
        changes["gpu_ids"] = {
            node: (*kept, *_idle(state, node)[: number - len(kept)])
            for node, number in allocation
            for kept in (record.gpu_ids.get(node, ()),)
        }
    state.change(job, now_s, **changes, **count_until_now(state, job, now_s))
    state.tell(job, "joining", now_s, f"{wanted - has} more start, to join {has}")
    advance(state, job)


# Messages of ranks --------------------------------------------------------------------------------


def joined(state: State, message: JoinJob, now_s: float) -> Message:
    """Take it that a rank is ready; once all are, rank 0 is to let them count."""
    job = state.shown_job(message.job)
    if job is not None and job.record.resizing == "joining":
        record = job.record
        job.joined.add(message.rank)
        if job.joined.issuperset(range(record.counted, processes(record))):
            state.change(job, now_s, resizing="ordered")
            state.tell(job, "resizing", now_s, "those that join are ready")
    return Ok()


def size(state: State, message: AskSize, now_s: float) -> Message:
    """Tell rank 0 how many workers are wanted, and learn how many count."""
    job = state.shown_job(message.job)
    if job is None or job.ended:
        return Refused(reason=unknown(message.job), code=NOT_FOUND)
    record = job.record
    news = message.since > record.size_since
    if record.resizing == "ordered" and news and message.workers == record.size_next:
        _counts(state, job, message, now_s)
    record = job.record
    wanted = record.size_next if record.resizing == "ordered" else present(record)
    return SizeWanted(workers=max(1, wanted))


def meet(state: State, message: Meet, now_s: float) -> Message:
    """Tell a host of an elastic program where its driver is, or learn it from rank 0."""
    job = state.shown_job(message.job)
    if job is None:
        return Refused(reason=unknown(message.job), code=NOT_FOUND)
    if message.rank == 0 and message.address:
        job.hosts_meet = message.address, message.secret
        if message.progress is not None:
            _tell_moves(state, job, message.progress, now_s)
        job.progress.program = message.progress
    address, secret = job.hosts_meet
    return Meeting(address=address, secret=secret, over=job.ended or "0" in job.record.results)


def _tell_moves(state: State, job: Job, now: ProgramProgress, now_s: float) -> None:
    """Tell how many executors went elsewhere since rank 0 was heard before."""
    before = job.progress.program
    if before is None or now.moves <= before.moves:
        return
    moved = number_of(now.moves - before.moves, "executor")
    were = f", before on {before.hosts}" if before.hosts != now.hosts else ""
    on = f"{now.executors} are on {number_of(now.hosts, 'host')}{were}"
    state.tell(job, "executors-moved", now_s, f"{moved} moved, {on}")


def _counts(state: State, job: Job, message: AskSize, now_s: float) -> None:
    """The new number counts: ranks beyond it are not needed any more."""
    since = message.since
    if message.workers == processes(job.record):
        state.change(job, now_s, **AS_ALL_COUNT, size_since=since)
        _tell_size(state, job, now_s)
    else:
        state.change(
            job, now_s, counted=message.workers, size_next=0, resizing="leaving", size_since=since
        )
    order(state, job)
    pursue(state, job, now_s)


def _tell_size(state: State, job: Job, now_s: float) -> None:
    workers, since = processes(job.record), job.record.size_since
    state.tell(
        job, "scaled", now_s, f"{number_of(workers, 'worker')} counted from iteration {since} on"
    )


# Ranks that leave ---------------------------------------------------------------------------------


def leavers(record: JobRecord) -> dict[NodeId, tuple[int, ...]]:
    """Node -> its ranks that are to end."""
    if record.state != "running" or record.resizing != "leaving":
        return {}
    placed = {
        node: tuple(rank for rank in ranks if rank >= record.counted)
        for node, ranks in ranks_at(record).items()
    }
    return {node: ranks for node, ranks in placed.items() if ranks}


def order(state: State, job: Job) -> None:
    """Order that the ranks which do not count any more end; free what they held once they have."""
    record = job.record
    leaving = leavers(record)
    if not leaving:
        return
    for node, ranks in leaving.items():
        what = job.leave_order(node)
        if what not in job.told:
            stop = StopWorkers(
                job=job.id, run=record.run, attempt=record.attempt, ranks=ranks,
                grace_s=stop_grace_s(record),
            )  # fmt: skip
            subject = subjects.command("worker", state.nodes.service_id(node), "stop")
            state.ask(job, what, subject, stop)


def left(state: State, job: Job, now_s: float) -> None:
    """Once they have ended, what they held is free. A node that is silent is not waited for."""
    record = job.record
    leaving = leavers(record)
    if not leaving or any(
        job.leave_order(node) not in job.told and not state.nodes.silent(node, now_s)
        for node in leaving
    ):
        return
    each = record.spec.gpus_each or 1
    allocation = trimmed(record.allocation, record.counted * each)
    gpu_ids = {node: record.gpu_ids[node][:n] for node, n in allocation if node in record.gpu_ids}
    results = {r: said for r, said in record.results.items() if int(r) < record.counted}
    state.change(
        job, now_s, allocation=allocation, gpu_ids=gpu_ids, results=results,
        **AS_ALL_COUNT, **count_until_now(state, job, now_s),
    )  # fmt: skip
    _tell_size(state, job, now_s)
    state.slots.due = state.gpus.due = True
    pursue(state, job, now_s)


def give_up(state: State, job: Job, why: str, now_s: float) -> None:
    """Give ranks up that were to join, before anybody was told: they are ended."""
    back = job.record.counted
    asked_now = back if job.record.workers else 0
    state.change(job, now_s, resizing="leaving", size_next=0, workers=asked_now)
    state.tell(job, "waiting", now_s, f"it stays with {number_of(back, 'worker')}: {why}")
    order(state, job)


def rank_ended(state: State, job: Job, exited: WorkerExited, now_s: float) -> bool:
    """Take the end of a rank that does not count. False: it counts."""
    record = job.record
    if record.state == "running" and exited.rank >= processes(record):
        return True  # It left before: its end is told late.
    if record.resizing not in ("joining", "leaving") or exited.rank < record.counted:
        return False
    if record.resizing == "joining":
        give_up(state, job, death(exited), now_s)
    return True


def carried_out(state: State, job: Job, what: Order, answer: Message, now_s: float) -> None:
    """Take the final answer to an order about the job's processes."""
    refused = answer if isinstance(answer, Refused) else None
    if what.verb == "join" and refused is not None and refused.retry_after_s == 0.0:
        if job.record.resizing == "joining" and job.concerns_now(what):
            give_up(state, job, f"a rank cannot be started: {refused.reason}", now_s)
        return
    lifecycle.carried_out(state, job, what, answer, now_s)
    if what.verb == "leave":
        left(state, job, now_s)


def look_after(state: State, job: Job, now_s: float) -> None:
    """Do what time alone makes due: called at each tick."""
    record = job.record
    if record.resizing == "joining" and now_s - job.joining_s > JOINING_S:
        missing = set(range(record.counted, processes(record))) - job.joined
        ranks = ", ".join(map(str, sorted(missing)))
        give_up(state, job, f"rank {ranks} was not ready within {JOINING_S:g} s", now_s)
    order(state, job)
    left(state, job, now_s)
    pursue(state, job, now_s)
