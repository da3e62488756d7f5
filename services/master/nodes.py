"""Worker nodes and their slots: where a job's processes are started.

All ranks of a job start on one node with room for them, first come first served: a job that could
fit somewhere holds back those behind it, one that no known node could ever hold does not. (GPU
scheduling replaces this order by a policy; what stays is that room is counted from the master's own
records, never from a heartbeat, so that two starts cannot be promised the same slot.)
"""

from collections.abc import Iterable
from dataclasses import dataclass

from slackwater.common.limits import WORKER_NODES_MAX
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.jobs import JobRecord


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
    ) -> tuple[list[tuple[JobRecord, NodeId]], list[tuple[JobRecord, str]]]:
        """(jobs to start and where, jobs that no known node could hold and why)."""
        present = {
            id: node for id, node in self._nodes.items() if now_s - node.seen_s <= self._silent_s
        }
        room = {id: int(node.heartbeat.slots) for id, node in present.items()}
        largest = max(room.values(), default=0)
        for record in running:
            if record.node in room:
                room[record.node] -= record.spec.workers - len(record.results)
        starts: list[tuple[JobRecord, NodeId]] = []
        hopeless: list[tuple[JobRecord, str]] = []
        blocked = False
        for record in sorted(waiting, key=lambda r: (r.submitted_s, r.spec.id)):
            if record.spec.workers > largest:
                if present:
                    why = f"{record.spec.workers} workers: no worker node has over {largest} slots"
                    hopeless.append((record, why))
                continue
            fitting = [id for id in sorted(room) if room[id] >= record.spec.workers]
            if not fitting:
                blocked = True
            if blocked:
                continue
            node = min(fitting, key=lambda id: (room[id], id))
            room[node] -= record.spec.workers
            starts.append((record, node))
        return starts, hopeless
