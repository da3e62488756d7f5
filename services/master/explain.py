"""Why a job waits, in words for its user: what it asks for, what there is, and the remedy.

Computed when somebody looks, from what is known then, and never stored: a stored reason would have
to be corrected with every slot that comes free. Whoever holds the job up knows why: the worker
nodes' room (nodes.py), the node or the controller that refused an order, and the reports of the
job's controller.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from slackwater.common.base.limits import LIST_BYTES_MAX
from slackwater.schemas.base import JobId, Record
from slackwater.schemas.job_requests import JobInfo
from slackwater.schemas.jobs import JobRecord
from slackwater.services.master import following, idle_gpus
from slackwater.services.master.clusters import Clusters
from slackwater.services.master.dispatch import room_of, waits_for_gpus, waits_here
from slackwater.services.master.hangs import hang_of
from slackwater.services.master.jobs import Job
from slackwater.services.master.lifecycle import stop_grace_s
from slackwater.services.master.missing_ranks import stall, unheard
from slackwater.services.master.nodes import Room
from slackwater.services.master.pausing import why_held
from slackwater.services.master.regrouping import group_of
from slackwater.services.master.scaling import lacking
from slackwater.services.master.state import State

REASON_CHARS_MAX = 1024
BRIEF_CHARS_MAX = 200
_Record = TypeVar("_Record", bound=Record)
NO_CONTROLLER = "waits for a cluster of aggregators: no controller is heard"


def shown(state: State, page: Iterable[Job], now_s: float) -> Iterator[JobRecord]:
    """The records of `page`; those that wait say why."""
    room: Room | None = None
    gpus: dict[JobId, str] | None = None
    for job in page:
        record = job.record
        if job.ended:
            why = record.reason
        elif job.queued and record.held:
            why = why_held(record)
        elif job.queued and record.waits_for:
            why = following.why(record)
        elif job.queued and record.spec.gpus:
            gpus = waits_for_gpus(state, now_s) if gpus is None else gpus
            why = gpus.get(job.id) or "its GPUs are free, it is about to start"
        elif job.queued:
            room = room or room_of(state, now_s)
            why = waits_here(state, room, job) or "its slots are free, it is about to start"
        elif job.id in state.held:
            why = state.held[job.id].reason
        else:
            why = _why(job, state.clusters, now_s)
            why = why or unheard(job, state.config.agent_silent_s, now_s) or lacking(record)
            why = why or idle_gpus.reason(job)
        yield msgspec.structs.replace(record, reason=why[:REASON_CHARS_MAX])


def info(state: State, job: Job, now_s: float) -> JobInfo:
    """Tell all that is known of one job."""
    (record,) = shown(state, [job], now_s)
    return JobInfo(
        job=record,
        progress=job.shown_progress(now_s, by_rank=True),
        hang=hang_of(job),
        history=tuple(job.learning.points),
        turns=state.nodes.turns_of(job.id),
        group=group_of(state, job),
    )


def _why(job: Job, clusters: Clusters, now_s: float) -> str:
    """Return why the job waits; empty: it does not."""
    record = job.record
    if record.state == "pending":
        return (
            "waits for its user to start its program, whose Agents register; "
            "a job that a worker node starts has a `program`"
        )
    if (hang := hang_of(job)) is not None:
        return hang.reason
    if stalled := stall(job, now_s):
        # Ranks blame one another while an aggregator is away, which only its controller knows.
        away = clusters.waiting(record.cluster, job.id) if record.cluster is not None else ""
        return f"{stalled}; {away}" if away else stalled
    if record.state == "stopping":
        return _leaving(job)
    for node, _ in record.allocation:
        orders = job.order("prepare", node), job.order("start", node)
        refused = next((job.refusals[each] for each in orders if each in job.refusals), "")
        if refused:
            return f"waits for worker node {node}, which refused: {refused}"
    if record.cluster is None:
        return _no_cluster(clusters, now_s) if job.tensors else ""
    if why := next((w for order, w in job.refusals.items() if order.verb == "place"), ""):
        return f"controller {record.cluster} refused it: {why}"
    if clusters.silent(record.cluster, now_s):
        return (
            f"its controller {record.cluster} is not heard: what it has to decide waits; start it "
            f"with `slackwater run controller` (id {record.cluster})"
        )
    return clusters.waiting(record.cluster, job.id)


def _leaving(job: Job) -> str:
    grace_s, waits = stop_grace_s(job.record), ", ".join(job.unstopped)
    then = "it goes on with other GPUs" if job.record.planned else "it waits for GPUs"
    if job.record.held:
        then = f"it stays paused until `slackwater resume {job.id}`"
    return f"saves and ends on {waits}, for which it has {grace_s:g} s; then {then}"


def _no_cluster(clusters: Clusters, now_s: float) -> str:
    if any(clusters.alive(known, now_s) for known in clusters.known):
        return ""  # The next registration, due any moment, finds it.
    return (
        f"{NO_CONTROLLER} ({len(clusters.known)} were heard before); start one with "
        "`slackwater run controller`"
    )


def fitting(records: Iterable[_Record]) -> Iterator[_Record]:
    """Return as many whole records as fit into an answer, one at least."""
    nbytes = 0
    for number, record in enumerate(records):
        nbytes += len(msgspec.msgpack.encode(record))
        if number and nbytes > LIST_BYTES_MAX:
            return
        yield record


def brief(record: JobRecord) -> JobRecord:
    """A record as a list has it: `get` gives the rest."""
    return msgspec.structs.replace(
        record,
        results={},
        reason=record.reason[:BRIEF_CHARS_MAX],
        spec=msgspec.structs.replace(record.spec, program=record.spec.program[:1]),
    )
