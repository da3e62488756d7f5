"""Measure an iteration of a job that takes turns: seconds of computing, and of moving bytes, on its
nodes (Lee 2020, section 4.3.2).

Pure. Worker services tell with each heartbeat how long a job's processes held its permits so far.
Divided by the iterations that ended meanwhile, that is the node's part of one. The slowest node
counts: the others wait for it. Moving averages over windows, as in the paper; where the job lies
elsewhere than before, it is measured anew, and what was known counts until then.
"""

from dataclasses import dataclass, field
from typing import Final

from slackwater.common.domains.models.group import Subtasks
from slackwater.schemas.base import NodeId
from slackwater.schemas.cluster import PermitUse
from slackwater.schemas.gpus import NodeAllocation

WINDOW_ITERATIONS: Final = 5
WINDOW_S: Final = 5.0
"""The fewest iterations and seconds of a window: heartbeats and iterations are told once a second.
"""
WEIGHT: Final = 0.3
"""Weight of the newest window in the moving average."""


@dataclass(slots=True)
class _Node:
    """One node's window, which began at `since_s` with these sums, and the averages so far."""

    iteration: int
    since_s: float
    computed_s: float
    moved_s: float
    windows: int = 0
    cpu_s: float = 0.0
    network_s: float = 0.0

    def begins(self, use: PermitUse, iteration: int, now_s: float) -> None:
        self.iteration, self.since_s = iteration, now_s
        self.computed_s, self.moved_s = use.computed_s, use.moved_s

    def ends(self, use: PermitUse, iteration: int, now_s: float) -> None:
        ended = iteration - self.iteration
        weight = WEIGHT if self.windows else 1.0
        self.cpu_s += weight * ((use.computed_s - self.computed_s) / ended - self.cpu_s)
        self.network_s += weight * ((use.moved_s - self.moved_s) / ended - self.network_s)
        self.windows += 1
        self.begins(use, iteration, now_s)


@dataclass(slots=True)
class TurnProfile:
    """Follows one job."""

    attempt: int = -1
    placed: NodeAllocation = ()
    """The placement that is measured."""
    since_s: float = 0.0
    """Since when."""
    known: Subtasks | None = None
    """An iteration's seconds, and the nodes that it lay on; None: not measured yet."""
    decided: bool = False
    """It was looked at which jobs it is to share nodes with, since it was measured here."""
    _nodes: dict[NodeId, _Node] = field(default_factory=dict)

    def lies(self, attempt: int, placed: NodeAllocation, now_s: float) -> None:
        """Take where the job's processes are. Elsewhere than before: it is measured anew."""
        if (attempt, placed) != (self.attempt, self.placed):
            self.attempt, self.placed, self.since_s = attempt, placed, now_s
            self.decided = False
            self._nodes.clear()

    def heard(self, use: PermitUse, iteration: int, now_s: float) -> None:
        """Take what one of its nodes tells, and the iterations that have ended by then."""
        if all(node != use.node for node, _ in self.placed):
            return  # It is late news of the placement before.
        node = self._nodes.get(use.node)
        if node is None:
            node = self._nodes[use.node] = _Node(iteration, now_s, use.computed_s, use.moved_s)
        back = iteration < node.iteration
        if back or use.computed_s < node.computed_s or use.moved_s < node.moved_s:
            node.begins(use, iteration, now_s)  # The job went back, or the service began anew.
        elif iteration - node.iteration >= WINDOW_ITERATIONS and now_s - node.since_s >= WINDOW_S:
            node.ends(use, iteration, now_s)
            self._sum_up()

    @property
    def measured(self) -> bool:
        """Say whether all nodes were measured where it lies now."""
        return len(self._nodes) == len(self.placed) > 0 and all(
            node.windows for node in self._nodes.values()
        )

    def _sum_up(self) -> None:
        nodes = self._nodes.values()
        cpu_s = max(node.cpu_s for node in nodes)
        network_s = max(node.network_s for node in nodes)
        if self.measured and cpu_s + network_s > 0.0:
            self.known = Subtasks(cpu_s, network_s, len(self.placed))
