"""Effects of a placement on a job's speed: being spread, and sharing a node's network.

Placement sensitivity (Tiresias section 3.3.3): a job on more machines than it needs runs slower in
proportion to its skew, or by its model's own measured factor. Network interference (Pollux sections
3.4.2 and 3.5.3): distributed jobs that meet on a node keep (1 - interference) of their speed.
"""

from collections.abc import Mapping, Sequence

import msgspec

from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.services.master.scheduling.view import Allocation, ClusterView


class Slowdowns(msgspec.Struct, frozen=True):
    """Zero everywhere: placement never changes speed."""

    spread: float = 0.0
    """A spread job's step takes 1 + spread * skew times as long."""
    spread_by_model: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Model -> factor >= 1 on the step of a spread job, instead of the skew rule."""
    interference: float = 0.0

    @property
    def any(self) -> bool:
        return bool(self.spread or self.spread_by_model or self.interference)


class Surroundings:
    """Find the jobs that share GPUs, and the nodes on which distributed jobs meet."""

    def __init__(self, slowdowns: Slowdowns) -> None:
        self._slowdowns = slowdowns
        self._distributed: dict[int, set[int]] = {}
        self._groups: dict[str, list[int]] = {}

    def enter(self, number: int, allocation: Allocation, group: str) -> set[int]:
        """Job `number` holds these GPUs now; answers whose speed may have changed by that."""
        touched = self._move(number, allocation, True)
        if group:
            members = self._groups.setdefault(group, [])
            touched.update(members)
            members.append(number)
            members.sort()
        return touched

    def leave(self, number: int, allocation: Allocation, group: str) -> set[int]:
        touched = self._move(number, allocation, False)
        if group:
            members = self._groups[group]
            members.remove(number)
            touched.update(members)
            if not members:
                del self._groups[group]
        return touched

    def members(self, group: str) -> Sequence[int]:
        """Jobs that share GPUs under that label, in the order of their numbers."""
        return self._groups.get(group, ())

    def _move(self, number: int, allocation: Allocation, comes: bool) -> set[int]:
        if not self._slowdowns.interference or len(allocation) < 2:
            return set()
        met: set[int] = set()
        for node, _ in allocation:
            here = self._distributed.setdefault(node, set())
            if comes:
                met |= here
                here.add(number)
            else:
                here.discard(number)
                met |= here
        return met - {number}

    def slowdown(self, job: Submission, allocation: Allocation, cluster: ClusterView) -> float:
        factor = 1.0
        rules = self._slowdowns
        if len(allocation) > 1:
            gpus = sum(count for _, count in allocation)
            kind = cluster.nodes[allocation[0][0]].gpu_type
            if len(allocation) > cluster.fewest_nodes(gpus, kind):
                by_skew = 1.0 + rules.spread * job.oracle.skew
                factor = rules.spread_by_model.get(job.spec.model, by_skew)
            if rules.interference and any(
                len(self._distributed.get(node, ())) > 1 for node, _ in allocation
            ):
                factor /= 1.0 - rules.interference
        return factor
