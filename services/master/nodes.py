"""Worker nodes and their slots: where a job's processes are started, and why not yet.

All ranks of a job start on one node with room for them, first come first served: a job that could
fit somewhere holds back those behind it, one that no known node could ever hold does not. (GPU
scheduling replaces this order by a policy; what stays is that room is counted from the master's own
records, never from a heartbeat, so that two starts cannot be promised the same slot.)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, assert_never

from slackwater.common.limits import WORKER_NODES_MAX
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.jobs import JobRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Why a job is not started: it waits for slots, for a node, or for its turn."""

    job: str
    cause: Literal["slots", "turn", "larger-node", "node"]
    asked: int
    """Slots on one node."""
    free: int = 0
    slots: int = 0
    """Free and existing slots of all nodes."""
    most: int = 0
    """What the roomiest node has free; for `larger-node`: what the largest node has."""
    ahead: str = ""
    """The first of those that wait for slots: nobody overtakes it."""

    @property
    def reason(self) -> str:
        asks = f"waits for {self.asked} worker {'slot' if self.asked == 1 else 'slots'}"
        match self.cause:
            case "node":
                return f"{asks}: no worker node is heard; start one with `slackwater run worker`"
            case "larger-node":
                return (
                    f"{asks} on one node: the largest has {self.most}; start a worker node with "
                    f"`slots` of {self.asked} or more, or submit the job with fewer workers"
                )
            case "slots":
                room = f"{self.free} of {self.slots} free"
                room += "" if self.most == self.free else f", at most {self.most} on one node"
                remedy = "runs when a job ends or `slackwater run worker` adds a node"
                return f"{asks}: {room}; {remedy}"
            case "turn":
                return (
                    f"{asks}: {self.free} of {self.slots} free, but job {self.ahead}, submitted "
                    "earlier, waits for slots too; runs after it, or cancel that one"
                )
        assert_never(self.cause)


@dataclass(slots=True)
class _Node:
    heartbeat: WorkerHeartbeat
    seen_s: float


class Nodes:
    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._nodes: dict[NodeId, _Node] = {}

    def heard(self, heartbeat: WorkerHeartbeat, now_s: float) -> bool:
        """True if the node has other slots than before: it is new, back, or changed."""
        known = self._nodes.get(heartbeat.node)
        if known is None and len(self._nodes) >= WORKER_NODES_MAX:
            return False
        self._nodes[heartbeat.node] = _Node(heartbeat, now_s)
        return (
            known is None
            or now_s - known.seen_s > self._silent_s
            or known.heartbeat.slots != heartbeat.slots
        )

    def seen_s(self, node: NodeId) -> float | None:
        entry = self._nodes.get(node)
        return entry.seen_s if entry else None

    def runs(self, node: NodeId) -> frozenset[tuple[JobId, int]]:
        """The (job, rank) pairs of the node's last heartbeat."""
        entry = self._nodes.get(node)
        return frozenset(entry.heartbeat.running) if entry else frozenset()

    def service_id(self, node: NodeId) -> str:
        """Under which the node's worker service answers."""
        entry = self._nodes.get(node)
        return entry.heartbeat.id if entry else node

    def assign(
        self, waiting: Iterable[JobRecord], running: Iterable[JobRecord], now_s: float
    ) -> tuple[list[tuple[JobRecord, NodeId]], list[Wait]]:
        """(jobs to start and where, why each of the others is not)."""
        present = {
            id: node for id, node in self._nodes.items() if now_s - node.seen_s <= self._silent_s
        }
        room = {id: int(node.heartbeat.slots) for id, node in present.items()}
        slots, largest = sum(room.values()), max(room.values(), default=0)
        for record in running:
            if record.node in room:
                room[record.node] -= record.spec.workers - len(record.results)
        starts: list[tuple[JobRecord, NodeId]] = []
        waits: list[Wait] = []
        ahead = ""
        for record in sorted(waiting, key=lambda r: (r.submitted_s, r.spec.id)):
            id, asked = record.spec.id, record.spec.workers
            if asked > largest:
                cause: Literal["larger-node", "node"] = "larger-node" if present else "node"
                waits.append(Wait(job=id, cause=cause, asked=asked, most=largest))
                continue
            fitting = [node for node in sorted(room) if room[node] >= asked]
            if ahead or not fitting:
                free = [max(0, left) for left in room.values()]
                waits.append(
                    Wait(
                        job=id,
                        cause="turn" if fitting else "slots",
                        asked=asked,
                        free=sum(free),
                        slots=slots,
                        most=max(free),
                        ahead=ahead,
                    )
                )
                ahead = ahead or id
                continue
            node = min(fitting, key=lambda id: (room[id], id))
            room[node] -= asked
            starts.append((record, node))
        return starts, waits
