"""Whether a job's regions fit into the memory of the aggregators that are to hold them.

A region has a gradient slot for each worker, two buffers of parameters and two of each optimiser
state: its size is known once the job is registered. A job that can never fit is refused then; one
that fits when others are gone waits with that reason. What is held is reckoned from the records, as
a heartbeat is a second old. An aggregator that does not say what it may hold takes anything.
"""

import math
from collections.abc import Sequence

from slackwater.common.domains.slots.layout import bucket_tensors
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.schemas.base import AggregatorId, NodeId
from slackwater.schemas.placement import JobPlacement
from slackwater.services.controller.state import Job, State

REMEDY = "use fewer workers or smaller tensors, or add aggregators or memory_bytes_max"


def region_sizes(record: JobPlacement) -> tuple[int, ...]:
    """Return the region size of each bucket, in bytes."""
    return tuple(
        SlotRegion.nbytes_of(record.plan, layout, bucket_tensors(layout, record.tensors))
        for layout in record.buckets
    )


def impossible_reason(state: State, job: Job, aggregators_max: int) -> str:
    """Why the job could not be held by all the aggregators that it may get (at most
    `aggregators_max`, 0: any number), were they empty; empty: it could, or how much they may hold
    is not known."""
    known = [entry.heartbeat for entry in state.aggregators.values() if entry.heartbeat]
    if not known or not all(heartbeat.memory_bytes for heartbeat in known):
        return ""
    count = min(job.record.spec.servers, aggregators_max or len(known))
    most = sorted(known, key=lambda heartbeat: -heartbeat.memory_bytes)[:count]
    total = sum(heartbeat.memory_bytes for heartbeat in most)
    free: float = sum(max(0, heartbeat.memory_bytes - heartbeat.held_bytes) for heartbeat in most)
    if all(heartbeat.node_memory_bytes for heartbeat in known):
        ledger, nodes = Ledger(state), {heartbeat.node: heartbeat for heartbeat in known}
        total = min(total, sum(each.node_memory_bytes for each in nodes.values()))
        free = min(free, sum(max(0.0, ledger.node_free(node)[0]) for node in nodes))
    sizes = sizes_of(job)
    if sum(sizes) > total:
        return (
            f"job {job.id} needs {sized(sum(sizes))} on its {len(most)} aggregators, {sized(free)} "
            f"are free of {sized(total)}: {REMEDY}"
        )
    largest = most[0].memory_bytes
    if max(sizes) > largest:
        bucket = job.record.buckets[sizes.index(max(sizes))]
        tensor = job.record.tensors[bucket.first].name
        return (
            f"job {job.id} needs {sized(max(sizes))} for tensor {tensor} on one aggregator, and "
            f"the largest may hold {sized(largest)}: {REMEDY}"
        )
    return ""


def without_room(state: State, job: Job, homes: Sequence[AggregatorId]) -> dict[AggregatorId, str]:
    """Aggregators of `homes`, one for each bucket, that cannot hold what is new to them -> why."""
    wanted: dict[AggregatorId, list[int]] = {}
    for bucket, (home, size) in enumerate(zip(homes, sizes_of(job), strict=True)):
        places = _places_of(job.record, bucket)
        if home not in places:
            both = wanted.setdefault(home, [0, 0])
            both[0] += size
            # Between aggregators of one node a region is handed over, not copied.
            both[1] += (
                0 if node_of(state, home) in {node_of(state, place) for place in places} else size
            )
    found, ledger = {}, Ledger(state)
    for id in sorted(wanted):
        free, total = ledger.free(id)
        if not ledger.take(id, *wanted[id]):
            found[id] = (
                f"{sized(wanted[id][0])} are needed on {id}, {sized(max(0, free))} are free of "
                f"{sized(total)} (memory_bytes_max)"
            )
    return found


def repacked(state: State, job: Job, homes: Sequence[AggregatorId]) -> list[AggregatorId] | None:
    """The buckets on the same aggregators so that each holds its part, the largest dealt first to
    where most is free; None: they do not fit."""
    ledger, ids = Ledger(state), sorted(set(homes))
    sizes = sizes_of(job)
    dealt = list(homes)
    for bucket in sorted(range(len(sizes)), key=lambda bucket: -sizes[bucket]):
        best = max(ids, key=lambda id: ledger.free(id)[0])
        if not ledger.take(best, sizes[bucket], sizes[bucket]):
            return None
        dealt[bucket] = best
    return dealt


class Ledger:
    """The memory that is free on aggregators, and on the nodes whose memory several of them
    share, while a placement is dealt. Aggregators that are not ours count with what their
    heartbeats say."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._taken: dict[AggregatorId, int] = {}
        self._taken_of: dict[NodeId, int] = {}
        # The state stands still while a placement is dealt: each sum is reckoned once.
        self._held_by: dict[AggregatorId, int] = {}
        self._held_of: dict[NodeId, tuple[int, int]] = {}

    def take(self, id: AggregatorId, nbytes: int, of_node: int) -> bool:
        """Say whether so much is free there, and on its node; it is taken then."""
        entry = self._state.aggregators.get(id)
        heartbeat = entry.heartbeat if entry is not None else None
        if heartbeat is None or not heartbeat.memory_bytes:
            return True
        node = heartbeat.node
        beyond = heartbeat.node_memory_bytes and of_node and of_node > self.node_free(node)[0]
        if beyond or nbytes > heartbeat.memory_bytes - self._held(id):
            return False
        self._taken[id] = self._taken.get(id, 0) + nbytes
        self._taken_of[node] = self._taken_of.get(node, 0) + of_node
        return True

    def free(self, id: AggregatorId) -> tuple[float, int]:
        """(bytes free, of how many): its own, or its node's where that is less."""
        entry = self._state.aggregators.get(id)
        heartbeat = entry.heartbeat if entry is not None else None
        if heartbeat is None or not heartbeat.memory_bytes:
            return math.inf, 0
        own = (heartbeat.memory_bytes - self._held(id), heartbeat.memory_bytes)
        return min(own, self.node_free(heartbeat.node)) if heartbeat.node_memory_bytes else own

    def node_free(self, node: NodeId) -> tuple[float, int]:
        """The same of a node, all its aggregators together."""
        if node not in self._held_of:
            self._held_of[node] = self._told_of(node)
        held, total = self._held_of[node]
        return total - held - self._taken_of.get(node, 0), total

    def _told_of(self, node: NodeId) -> tuple[int, int]:
        """(bytes held, of how many) on a node."""
        total = told = theirs = 0
        for entry in self._state.aggregators.values():
            heartbeat = entry.heartbeat
            if heartbeat is not None and heartbeat.node == node:
                total = max(total, heartbeat.node_memory_bytes)
                if entry.ours:
                    told += heartbeat.held_bytes
                else:
                    theirs += heartbeat.held_bytes
        return max(told, self._recorded(node)) + theirs, total

    def _held(self, id: AggregatorId) -> int:
        """Return the bytes held there by the records, which are ahead of heartbeats."""
        if id not in self._held_by:
            jobs = self._state.jobs.values()
            held = sum(_held(job).get(id, 0) for job in jobs if id in job.involved())
            self._held_by[id] = held
        return self._held_by[id] + self._taken.get(id, 0)

    def _recorded(self, node: NodeId) -> int:
        """Sum up the bytes of all our jobs there; a bucket that moves between two aggregators of
        the node counts once."""
        held = 0
        for job in self._state.jobs.values():
            record, sizes = job.record, sizes_of(job)
            held += sum(n for id, n in _held(job).items() if node_of(self._state, id) == node)
            for bucket in job.moved():
                pair = (record.places[bucket].aggregator, record.target[bucket].aggregator)
                if all(node_of(self._state, id) == node for id in pair):
                    held -= sizes[bucket]
        return held


def node_of(state: State, id: AggregatorId) -> NodeId | None:
    """Return the machine of an aggregator; None: it was not heard yet."""
    entry = state.aggregators.get(id)
    return entry.heartbeat.node if entry is not None and entry.heartbeat else None


def sized(nbytes: float) -> str:
    """Write a size as a person reads it: 17.7 GB."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:,.1f} GB"
    return f"{nbytes / 1e6:.1f} MB"


def _held(job: Job) -> dict[AggregatorId, int]:
    """Return what each aggregator holds, or is to hold, of the job; reckoned once per record."""
    if job.held is None or job.held[0] is not job.record:
        found: dict[AggregatorId, int] = {}
        for bucket, size in enumerate(sizes_of(job)):
            for home in _places_of(job.record, bucket):
                found[home] = found.get(home, 0) + size
        job.held = (job.record, found)
    return job.held[1]


def _places_of(record: JobPlacement, bucket: int) -> set[AggregatorId]:
    """Return where the bucket has a region, or is promised one; a moving bucket has two."""
    return {places[bucket].aggregator for places in (record.places, record.target) if places}


def sizes_of(job: Job) -> tuple[int, ...]:
    """Return the region size of each of its buckets, in bytes, computed once."""
    if job.sizes is None:
        job.sizes = region_sizes(job.record)
    return job.sizes
