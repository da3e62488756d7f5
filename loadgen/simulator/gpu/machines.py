"""Machines that come and go: failures and repairs, growth and shrinking, and how long they were up.

Nodes fail by their plans, and the cluster's size follows the policy's `desired_nodes`. What becomes
of the jobs on a node is the engine's matter.
"""

from collections.abc import Iterator
from heapq import heappush
from math import inf

from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.events import BACK, LOST, Heap
from slackwater.loadgen.simulator.gpu.failures import Failures
from slackwater.loadgen.simulator.gpu.outcome import Scaling


class Machines:
    """Puts the events of nodes on the engine's heap; the engine calls when one happens."""

    def __init__(
        self, cluster: Cluster, failures: Failures, scaling: Scaling | None, heap: Heap
    ) -> None:
        self._cluster, self._failures, self._scaling = cluster, failures, scaling
        self._heap = heap
        self._plans: list[Iterator[tuple[float, float]]] = []
        self._repairs: list[float] = []
        self._origin_s: float = 0
        self._down: dict[int, float] = {}
        self._coming: set[int] = set()
        self._outages: list[tuple[int, float, float]] = []
        self._up_gpu_s: float = 0
        self._counted_s: float = 0

    def begin(self, now_s: float, origin_s: float) -> None:
        """Count from now on; plans of failures are in seconds from `origin_s` on."""
        self._counted_s, self._origin_s = now_s, origin_s
        if self._failures.mtbf_s <= 0:
            return
        nodes = range(len(self._cluster.sizes))
        self._plans = [self._failures.outages(node) for node in nodes]
        self._repairs = [0.0] * len(nodes)
        for node in nodes:
            self._plan(node)

    def _plan(self, node: int) -> None:
        lost_s, back_s = next(self._plans[node])
        self._repairs[node] = self._origin_s + back_s
        heappush(self._heap, (self._origin_s + lost_s, LOST, node, 0))

    def lose(self, node: int, now_s: float) -> bool:
        """The node fails; False if it was not up."""
        heappush(self._heap, (self._repairs[node], BACK, node, 0))
        if not self._cluster.up[node]:
            return False
        self._count(now_s)
        self._down[node] = now_s
        self._cluster.lose(node)
        return True

    def bring(self, node: int, now_s: float) -> None:
        self._count(now_s)
        self._coming.discard(node)
        if node in self._down:
            self._outages.append((node, self._down.pop(node), now_s))
        self._cluster.bring(node)
        if self._plans and self._repairs[node] == now_s:
            self._plan(node)

    def scale(self, desired: int, now_s: float) -> None:
        """Grow from the lowest index (after the provisioning time), shrink from the highest: only
        idle machines go, so it is the policy's plan that vacates them."""
        scaling = self._scaling
        if scaling is None:
            return
        desired = min(max(desired, scaling.nodes_min), scaling.nodes_max, len(self._cluster.up))
        for node, up in enumerate(self._cluster.up):
            if node < desired and not up and node not in self._coming and node not in self._down:
                self._coming.add(node)
                heappush(self._heap, (now_s + scaling.provision_s, BACK, node, 0))
            elif node >= desired and up and self._cluster.idle(node):
                self._count(now_s)
                self._cluster.lose(node)

    def _count(self, now_s: float) -> None:
        self._up_gpu_s += self._cluster.view.gpus * (now_s - self._counted_s)
        self._counted_s = now_s

    def account(self, now_s: float) -> tuple[float, list[tuple[int, float, float]]]:
        """Return the GPU-seconds that were up, and every outage (see Result)."""
        self._count(now_s)
        return self._up_gpu_s, sorted(
            [*self._outages, *((node, at_s, inf) for node, at_s in self._down.items())]
        )
