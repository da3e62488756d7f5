"""The simulated machines: who holds which GPUs, which nodes are up, who shares."""

import re
from collections.abc import Sequence
from math import inf

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected
from slackwater.schemas.base import NodeId
from slackwater.services.master.scheduling.view import Allocation, ClusterView, NodeView, racks_of


def parse_nodes(text: str) -> list[tuple[int, str]]:
    """ "16x4" or "6x4:t4,2x8:dgx": (GPUs, type) of each node."""
    nodes: list[tuple[int, str]] = []
    for part in text.split(","):
        size, _, kind = part.strip().partition(":")
        found = re.fullmatch(r"0*([1-9][0-9]{0,17})x0*([1-9][0-9]{0,17})", size)
        if found is None:
            raise ConfigRejected(f"nodes {part!r}: write NODESxGPUS or NODESxGPUS:TYPE, as 6x4:t4")
        count, gpus = int(found[1]), int(found[2])
        if len(nodes) + count > limits.TRACE_GPUS_MAX or gpus > limits.TRACE_GPUS_MAX:
            raise ConfigRejected(f"nodes {part!r}: at most {limits.TRACE_GPUS_MAX} of each")
        nodes += [(gpus, kind)] * count
    return nodes


def racks_for(nodes: int, racks: int) -> list[str]:
    """Deal machines to racks as they stand, each with as many as the next, but for one."""
    return [f"r{n * racks // nodes + 1}" for n in range(nodes)]


class Cluster:
    """Mutable, the engine's own. `free[i]` is 0 while node i is down."""

    def __init__(
        self,
        nodes: Sequence[tuple[int, str]],
        up: int | None = None,
        hosts: Sequence[tuple[float, float]] = (),
        racks: Sequence[str] = (),
    ) -> None:
        """`nodes`: GPUs and type of each. `hosts`: cores and bytes of memory of each, where a
        job's needs of them count. `racks`: the rack of each, where there are several."""
        self.sizes = [gpus for gpus, _ in nodes]
        self.types = [kind for _, kind in nodes]
        self.gpu_types = tuple(sorted(set(self.types))) or ("",)
        first_up = len(nodes) if up is None else up
        self.up = [i < first_up for i in range(len(nodes))]
        self.free = [gpus if self.up[i] else 0 for i, gpus in enumerate(self.sizes)]
        self._hosts = hosts or [(inf, inf)] * len(nodes)
        self._racks = racks or [""] * len(nodes)
        self._members: dict[str, int] = {}
        self.view = self._view()

    @classmethod
    def counted(cls, gpus: int) -> "Cluster":
        """Every GPU on one machine: GPUs are only counted."""
        return cls([(gpus, "")])

    def take(self, allocation: Allocation, group: str) -> None:
        if group:
            self._members[group] = self._members.get(group, 0) + 1
            if self._members[group] > 1:
                return
        for node, gpus in allocation:
            self.free[node] -= gpus

    def give_back(self, allocation: Allocation, group: str) -> None:
        if group:
            self._members[group] -= 1
            if self._members[group]:
                return
            del self._members[group]
        for node, gpus in allocation:
            if self.up[node]:
                self.free[node] += gpus

    def lose(self, node: int) -> None:
        """The node goes down. Its jobs must have given back everything before or must do so
        afterwards: what they held there does not come back."""
        self.up[node] = False
        self.free[node] = 0
        self.view = self._view()

    def idle(self, node: int) -> bool:
        return self.free[node] == self.sizes[node]

    def bring(self, node: int) -> None:
        self.up[node] = True
        self.free[node] = self.sizes[node]
        self.view = self._view()

    def gpus_by_type(self) -> dict[str, int]:
        """With every node up."""
        sums = dict.fromkeys(self.gpu_types, 0)
        for gpus, kind in zip(self.sizes, self.types, strict=True):
            sums[kind] += gpus
        return sums

    def _view(self) -> ClusterView:
        nodes = tuple(
            NodeView(
                i, NodeId(f"n{i}"), gpus if self.up[i] else 0, self.types[i], *self._hosts[i],
                self._racks[i],
            )
            for i, gpus in enumerate(self.sizes)
        )  # fmt: skip
        return ClusterView(
            nodes,
            sum(node.gpus for node in nodes),
            self.gpu_types,
            max((node.gpus for node in nodes), default=0),
            racks_of(nodes),
        )
