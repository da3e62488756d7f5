"""Worker nodes: their slots, their GPUs, and why a job without GPUs waits for slots.

Room is counted from the master's own records, never from a heartbeat, so that two starts cannot be
promised the same slot or GPU.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Final, Literal, assert_never

from slackwater.common.base.limits import HEARTBEAT_S, WORKER_NODES_MAX
from slackwater.common.base.words import number_of
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import PermitUse, WorkerHeartbeat
from slackwater.schemas.gpus import Gpu, NodeGpuIds
from slackwater.schemas.jobs import JobRecord
from slackwater.services.master.gangs import asked, lies_anywhere
from slackwater.services.master.members import longest_silent, outdated
from slackwater.services.master.snapshot import Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Why a job is not started: it waits for slots, for a node, or for its turn."""

    job: str
    cause: Literal["slots", "turn", "larger-node", "node"]
    asked: int
    """Slots, on one node unless `anywhere`."""
    anywhere: bool = False
    free: int = 0
    slots: int = 0
    """Free and existing slots of all nodes."""
    most: int = 0
    """GPUs that the roomiest node has free; for `larger-node`: slots of the largest node, or of all
    where it may lie anywhere."""
    ahead: str = ""
    """The first of those that wait for slots: nobody overtakes it."""
    ahead_for: str = "slots"

    @property
    def reason(self) -> str:
        asks = f"waits for {number_of(self.asked, 'worker slot')}"
        match self.cause:
            case "node":
                return (
                    f"{asks}: no worker node is heard that takes jobs; start one with `slackwater "
                    "run worker`"
                )
            case "larger-node" if self.anywhere:
                return (
                    f"{asks}: all nodes together have {self.most}; start another one with "
                    "`slackwater run worker`, or submit the job with fewer workers"
                )
            case "larger-node":
                return (
                    f"{asks} on one node: the largest has {self.most}; start a worker node with "
                    f"`slots` of {self.asked} or more, or submit the job with fewer workers"
                )
            case "slots":
                room = f"{self.free} of {self.slots} free"
                if self.most < self.free and not self.anywhere:
                    room += f", at most {self.most} on one node"
                remedy = "runs when a job ends or `slackwater run worker` adds a node"
                return f"{asks}: {room}; {remedy}"
            case "turn":
                return (
                    f"{asks}: {self.free} of {self.slots} free, but job {self.ahead}, submitted "
                    f"earlier, waits for {self.ahead_for} too; runs after it, or cancel that one"
                )
        assert_never(self.cause)


FIRST_AVOIDED_S: Final = 5.0
AVOIDED_S_MAX: Final = 60.0
"""Seconds for which a node that did not take a gang, or did not start it, is given no GPU job: the
first time, then twice as many each time, up to the second."""


GAP_S: Final = 3 * HEARTBEAT_S
"""Heartbeats further apart than this are not one series: the node, or the bus, was away between."""


@dataclass(slots=True)
class _Avoided:
    why: str
    until_s: float
    times: int


@dataclass(slots=True)
class _Node:
    heartbeat: WorkerHeartbeat
    seen_s: float
    since_s: float
    """Since when its heartbeats come without a gap."""


@dataclass(slots=True)
class Room:
    """The free slots of the nodes that are heard."""

    free: dict[NodeId, int]
    slots: int
    """Slots of all of them, used or not."""
    largest: int
    """Slots of the largest node."""
    ahead: JobId | None = None
    """The first of those that wait for slots: nobody overtakes it."""
    ahead_for: str = "slots"
    """The thing that the job ahead waits for."""

    def barrier(self, asked: int, anywhere: bool) -> Literal["slots", "larger-node", "node"]:
        """Name what a job that asks for so many slots, on any nodes or on one, waits for if it
        cannot start."""
        if asked <= (self.slots if anywhere else self.largest):
            return "slots"
        return "larger-node" if self.free else "node"

    def wait(self, record: JobRecord) -> Wait | None:
        """Why it waits; None: it need not."""
        id, slots, anywhere = record.spec.id, asked(record), lies_anywhere(record.spec)
        barrier = self.barrier(slots, anywhere)
        if barrier != "slots":
            most = self.slots if anywhere else self.largest
            return Wait(job=id, cause=barrier, asked=slots, anywhere=anywhere, most=most)
        free = [max(0, left) for left in self.free.values()]
        fits = slots <= (sum(free) if anywhere else max(free))
        if fits and self.ahead in (None, id):
            return None
        return Wait(
            job=id,
            cause="turn" if fits else "slots",
            asked=slots,
            anywhere=anywhere,
            free=sum(free),
            slots=self.slots,
            most=max(free),
            ahead=self.ahead or "",
            ahead_for=self.ahead_for,
        )


class Nodes:
    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._nodes: dict[NodeId, _Node] = {}
        self._avoided: dict[NodeId, _Avoided] = {}
        self.since_s = 0.0
        """Since when this master listens."""
        self.leaving: frozenset[NodeId] = frozenset()
        """Machines that are being returned: no job is started there."""
        self.taken: Counter[NodeId] = Counter()
        """Slots that are promised to jobs without GPUs, by their records."""

    def heard(self, heartbeat: WorkerHeartbeat, now_s: float) -> bool:
        """True if the node has other slots or GPUs than before: it is new, back, or changed."""
        known = self._nodes.get(heartbeat.node)
        if known is None and len(self._nodes) >= WORKER_NODES_MAX:
            oldest = longest_silent(self._seen_s(), now_s, self._silent_s)
            if oldest is None:
                return False
            self._forget(oldest)
        unbroken = known is not None and now_s - known.seen_s <= GAP_S
        since_s = known.since_s if known is not None and unbroken else now_s
        self._nodes[heartbeat.node] = _Node(heartbeat, now_s, since_s)
        return (
            known is None
            or now_s - known.seen_s > self._silent_s
            or known.heartbeat.slots != heartbeat.slots
            or known.heartbeat.gpus != heartbeat.gpus
            or known.heartbeat.rack != heartbeat.rack
            or known.heartbeat.cordoned != heartbeat.cordoned
        )

    def tick(self, now_s: float) -> None:
        """Forget nodes that have been silent for long."""
        for id in outdated(self._seen_s(), now_s):
            self._forget(id)

    def _seen_s(self) -> Iterator[tuple[NodeId, float]]:
        return ((id, node.seen_s) for id, node in self._nodes.items())

    def _forget(self, id: NodeId) -> None:
        del self._nodes[id]
        self._avoided.pop(id, None)

    def heartbeats(self, now_s: float) -> Iterator[tuple[WorkerHeartbeat, bool]]:
        """Each node's last heartbeat, and whether it came lately."""
        for node in self._nodes.values():
            yield node.heartbeat, now_s - node.seen_s <= self._silent_s

    def seen_s(self, node: NodeId) -> float | None:
        entry = self._nodes.get(node)
        return entry.seen_s if entry else None

    def heard_s(self, node: NodeId) -> float:
        """Return for how long its heartbeats came without a gap, up to the last one."""
        entry = self._nodes.get(node)
        return entry.seen_s - entry.since_s if entry else 0.0

    def runs(self, node: NodeId) -> frozenset[tuple[JobId, int]]:
        """The (job, rank) pairs of the node's last heartbeat."""
        entry = self._nodes.get(node)
        return frozenset(entry.heartbeat.running) if entry else frozenset()

    def service_id(self, node: NodeId) -> str:
        """Under which the node's worker service answers."""
        entry = self._nodes.get(node)
        return entry.heartbeat.id if entry else node

    def gpus_told(self, node: NodeId) -> tuple[Gpu, ...]:
        """Return its GPUs as it told them last, faulty ones too."""
        entry = self._nodes.get(node)
        return entry.heartbeat.gpus if entry else ()

    def silent(self, node: NodeId, now_s: float) -> bool:
        """Say whether nothing was heard of it for long, or ever since this master listens."""
        entry = self._nodes.get(node)
        seen_s = self.since_s if entry is None else entry.seen_s
        return now_s - seen_s > self._silent_s

    def cordoned(self) -> frozenset[NodeId]:
        """Name the nodes that an operator is about to take away, as they told last."""
        return frozenset(id for id, node in self._nodes.items() if node.heartbeat.cordoned)

    def avoid(self, node: NodeId, why: str, now_s: float) -> float:
        """Give the node no GPU job for a while; return for how many seconds."""
        times = self._avoided[node].times + 1 if node in self._avoided else 1
        wait_s = min(AVOIDED_S_MAX, FIRST_AVOIDED_S * 2.0 ** min(times - 1, 16))
        self._avoided[node] = _Avoided(why, now_s + wait_s, times)
        return wait_s

    def started(self, node: NodeId) -> None:
        """The node has started a gang: what it refused before is forgotten."""
        self._avoided.pop(node, None)

    def avoided(self, now_s: float) -> str:
        """Say which nodes are given no GPU job at this moment, and why; empty: none."""
        return "; ".join(
            f"worker node {node} is left out for {one.until_s - now_s:.0f} s more: {one.why}"
            for node, one in sorted(self._avoided.items())
            if one.until_s > now_s
        )

    def _usable(self, node: NodeId, now_s: float) -> bool:
        avoided = self._avoided.get(node)
        kept = avoided is None or avoided.until_s <= now_s
        return kept and self._open(node, now_s)

    def _open(self, node: NodeId, now_s: float) -> bool:
        """Say whether jobs may be started there: it is heard, and nobody takes it away."""
        entry = self._nodes.get(node)
        taken_away = entry is None or entry.heartbeat.cordoned or node in self.leaving
        return not taken_away and not self.silent(node, now_s)

    def slots(self, now_s: float) -> tuple[Capacity, ...]:
        """Slots of each node that was ever heard; none while it is silent, or is taken away."""
        return tuple(
            Capacity(id, int(node.heartbeat.slots) if self._open(id, now_s) else 0)
            for id, node in sorted(self._nodes.items())
        )

    def turns_of(self, job: JobId) -> tuple[PermitUse, ...]:
        """Return what the job has had of its nodes' permits, as they told last."""
        told = (node.heartbeat.turns for _, node in sorted(self._nodes.items()))
        return tuple(each for turns in told for each in turns if each.job == job)

    def gpus(self, now_s: float) -> tuple[Capacity, ...]:
        """Healthy GPUs of each node that has any; none while it is silent or avoided."""
        return tuple(
            Capacity(
                id,
                len(self.healthy(id)) if self._usable(id, now_s) else 0,
                node.heartbeat.gpus[0].type,
                node.heartbeat.cores or inf,
                node.heartbeat.memory_bytes or inf,
                node.heartbeat.rack,
            )
            for id, node in sorted(self._nodes.items())
            if node.heartbeat.gpus
        )

    def healthy(self, node: NodeId) -> NodeGpuIds:
        """GPUs that jobs may be given, of the type of the node's first. A node whose GPUs differ
        is best run as two worker services."""
        entry = self._nodes.get(node)
        told = entry.heartbeat.gpus if entry is not None else ()
        return tuple(gpu.id for gpu in told if not gpu.fault and gpu.type == told[0].type)

    def room(self, now_s: float) -> Room:
        slots = {
            id: int(node.heartbeat.slots)
            for id, node in sorted(self._nodes.items())
            if self._open(id, now_s)
        }
        return Room(
            free={id: count - self.taken[id] for id, count in slots.items()},
            slots=sum(slots.values()),
            largest=max(slots.values(), default=0),
        )
