"""Room that is still free while a policy walks down its queue: GPUs by type, and tenants' quotas.

A walk only ever takes from a `Room`, so a demand that once did not fit will not fit later in the
same walk: whole buckets of equal demands are dropped at their first refusal, which is why a
decision does not cost time for each waiting job.
"""

from typing import NamedTuple

from slackwater.services.master.scheduling.view import ClusterView, JobView, Rules


class Demand(NamedTuple):
    """Jobs with equal demands are interchangeable as far as room is concerned."""

    gpus: int
    types: tuple[int, ...]
    """Indexes of usable GPU types, the job's fastest first."""
    tenant: str


def demand_of(job: JobView, cluster: ClusterView, rules: Rules) -> Demand:
    tenant = job.tenant if rules.quotas else ""
    if len(cluster.gpu_types) == 1 and not job.speeds:
        return Demand(job.gpus, (0,), tenant)
    return Demand(job.gpus, usable_types(job, cluster), tenant)


def usable_types(job: JobView, cluster: ClusterView) -> tuple[int, ...]:
    types = range(len(cluster.gpu_types))
    if not job.speeds:
        return tuple(types)
    usable = [t for t in types if cluster.gpu_types[t] in job.speeds]
    usable.sort(key=lambda t: (-job.speeds[cluster.gpu_types[t]], t))
    return tuple(usable)


class Room:
    """Free GPUs by type and, where there are quotas, what each tenant uses."""

    __slots__ = ("borrowing", "free", "quotas", "used")

    def __init__(self, cluster: ClusterView, rules: Rules) -> None:
        if len(cluster.gpu_types) == 1:
            self.free = [cluster.gpus]
        else:
            index = {name: i for i, name in enumerate(cluster.gpu_types)}
            self.free = [0] * len(index)
            for node in cluster.nodes:
                self.free[index[node.gpu_type]] += node.gpus
        self.quotas = rules.quotas
        self.used: dict[str, int] = {}
        self.borrowing = False

    def fits(self, demand: Demand) -> int:
        """The type that has room for the demand, or -1."""
        if self.quotas and not self.borrowing:
            quota = self.quotas.get(demand.tenant, 0)
            if self.used.get(demand.tenant, 0) + demand.gpus > quota:
                return -1
        for kind in demand.types:
            if self.free[kind] >= demand.gpus:
                return kind
        return -1

    def take(self, kind: int, gpus: int, tenant: str) -> None:
        self.free[kind] -= gpus
        if self.quotas:
            self.used[tenant] = self.used.get(tenant, 0) + gpus


def type_held(job: JobView, cluster: ClusterView) -> int:
    """The type index of the GPUs that a running job holds."""
    if len(cluster.gpu_types) == 1:
        return 0
    return cluster.gpu_types.index(cluster.nodes[job.allocation[0][0]].gpu_type)
