"""A job's gang by its record: which rank runs on which node, on which GPUs, and what it has used.

Pure. Ranks go to the nodes of the allocation in its order, each with an equal part of the job's
GPUs, so that a master that was killed finds every rank where its record says. All processes of an
attempt are numbered above those of the attempts before.
"""

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

import msgspec

from slackwater.schemas.base import RUN_ATTEMPTS, NodeId
from slackwater.schemas.gpus import NodeAllocation, NodeGpuIds, held
from slackwater.schemas.job_states import HOLDING_STATES, TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec


def fits_processes(spec: JobSpec, allocation: NodeAllocation) -> bool:
    """Tell whether every process finds its GPUs on one node."""
    each = spec.gpus_each
    return not each or not any(number % each for _, number in allocation)


def lies_anywhere(spec: JobSpec) -> bool:
    """Tell whether its processes may be on any nodes: those of an asynchronous job without GPUs
    need no place to meet but the master; others of slots meet on their node."""
    return not spec.gpus and spec.consistency == "asynchronous"


def processes(record: JobRecord) -> int:
    """Count the ranks of the attempt that the record is in."""
    spec = record.spec
    if not spec.program:  # A user who starts the program has GPUs of their own.
        return spec.workers
    if spec.gpus:
        return spec.processes(held(record.allocation))
    scaled = spec.elastic and record.allocation
    return held(record.allocation) if scaled else asked(record)


def asked(record: JobRecord) -> int:
    """Count the workers that its user wants it to have."""
    return record.workers or record.spec.workers


def present(record: JobRecord) -> int:
    """Count the ranks that count: those that join do not yet, those that leave do no more."""
    return record.counted or processes(record)


def asked_spec(record: JobRecord) -> JobSpec:
    """Return its specification with the number of workers that its user wants now."""
    spec, workers = record.spec, record.workers
    if workers in (0, spec.workers):
        return spec
    if not spec.gpus:  # A bound that is not said is the number that it was submitted with.
        least, most = spec.workers_bounds
        return msgspec.structs.replace(spec, workers=workers, workers_min=least, workers_max=most)
    gpus = workers * spec.gpus_each
    return msgspec.structs.replace(spec, workers=workers, gpus=gpus, gpus_min=gpus, gpus_max=gpus)


def ranks_at(record: JobRecord) -> dict[NodeId, tuple[int, ...]]:
    """Node -> its ranks, ended ones included."""
    each, first = record.spec.gpus_each or 1, 0
    found = {}
    for node, number in record.allocation:
        count = number // each
        found[node] = tuple(range(first, first + count))
        first += count
    return found


def node_of(record: JobRecord, rank: int) -> NodeId | None:
    return next((node for node, ranks in ranks_at(record).items() if rank in ranks), None)


def last_placed(record: JobRecord) -> JobRecord:
    """Return the record as of when the job last held an allocation: its logs are there."""
    if record.allocation or not record.ran_on:
        return record
    return msgspec.structs.replace(record, allocation=record.ran_on)


def process_number(record: JobRecord, rank: int) -> int:
    """Number the rank's present process, as worker services do."""
    return RUN_ATTEMPTS * record.attempt + record.restarts.get(str(rank), 0) + joins(record, rank)


def is_rank_0(record: JobRecord, attempt: int) -> bool:
    """Say whether the process of this number is its rank 0 at present."""
    return attempt == process_number(record, 0)


def joins(record: JobRecord, rank: int) -> int:
    """Count how often the rank joined in this attempt, after others had begun it."""
    return record.joins.get(str(rank), 0)


def slots_held(record: JobRecord) -> dict[NodeId, int]:
    """Slots by node of a job without GPUs: those of ranks that have not ended."""
    if record.spec.gpus or record.state not in HOLDING_STATES:
        return {}
    return {
        node: sum(str(rank) not in record.results for rank in ranks)
        for node, ranks in ranks_at(record).items()
    }


def vacating(record: JobRecord) -> bool:
    """Tell whether the job is losing what it holds: others may be promised it, and wait."""
    return record.state == "stopping" or record.state in TERMINAL_STATES


def choose_gpus(
    allocation: NodeAllocation,
    healthy: Mapping[NodeId, NodeGpuIds],
    taken: Collection[str],
    leaving: Collection[str],
) -> dict[NodeId, NodeGpuIds]:
    """Choose GPUs of each node: idle ones first, then those that others are leaving. `taken`: held
    for good by others. A node that has too few gives what it has.
    """
    chosen = {}
    for node, number in allocation:
        usable = (id for id in healthy.get(node, ()) if id not in taken)
        chosen[node] = tuple(islice(sorted(usable, key=lambda id: id in leaving), number))
    return chosen


def used(record: JobRecord, now_s: float) -> dict[str, Any]:
    """The record's sums, and since when they are true, at a change of what the job holds."""
    if record.state not in HOLDING_STATES:
        return {"since_s": now_s}
    lasted_s = max(0.0, now_s - record.since_s)
    worked_s = max(0.0, now_s - record.begun_s) if record.begun_s else 0.0
    return {
        "since_s": now_s,
        "gpu_s": record.gpu_s + held(record.allocation) * lasted_s,
        "run_s": record.run_s + lasted_s,
        "begun_s": 0.0,
        "worked_s": record.worked_s + min(worked_s, lasted_s),
    }
