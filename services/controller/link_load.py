"""The steady load of machines' links beside our jobs' gradients: the median of `host_s` seconds, as
of other work on processors (host_load.py)."""

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Final

from slackwater.schemas.base import AggregatorId, NodeId
from slackwater.schemas.cluster import AggregatorHeartbeat

SAMPLES_MAX: Final = 60


class LinkLoads:
    """Keeps them. `host_s`: the seconds that count; 0: nothing but our jobs counts."""

    def __init__(self, host_s: float) -> None:
        self._host_s, self._sample_s = host_s, max(2.0, host_s / SAMPLES_MAX)
        self._samples: dict[NodeId, deque[tuple[float, float]]] = {}
        """(when, bytes a second of others)"""
        self._node_of: dict[AggregatorId, NodeId] = {}
        self._here: dict[NodeId, set[AggregatorId]] = {}

    def heard(
        self,
        said: AggregatorHeartbeat,
        gradients_bytes_s: Callable[[], float],
        now_s: float,
    ) -> None:
        """Take a heartbeat. `gradients_bytes_s` says, where it is asked, what of the link's traffic
        is our jobs'."""
        self._note(AggregatorId(said.id), said.node)
        if not self._host_s or not said.network_budget_bytes_s:
            return
        samples = self._samples.setdefault(said.node, deque())
        if samples and now_s - samples[-1][0] < self._sample_s:
            return
        samples.append((now_s, max(0.0, said.network_load_bytes_s - gradients_bytes_s())))
        while samples[0][0] < now_s - self._host_s:
            samples.popleft()

    def _note(self, id: AggregatorId, node: NodeId) -> None:
        before = self._node_of.get(id)
        if before == node:
            return
        if before is not None:
            self._here[before].discard(id)
        self._node_of[id] = node
        self._here.setdefault(node, set()).add(id)

    def aggregators_of(self, node: NodeId) -> list[AggregatorId]:
        """Return the aggregators that were last heard from there."""
        return sorted(self._here.get(node, ()))

    def others_bytes_s(self, node: NodeId) -> float:
        """Return what else the link carries, the busier way."""
        samples = self._samples.get(node)
        return median(rate for _, rate in samples) if samples else 0.0
