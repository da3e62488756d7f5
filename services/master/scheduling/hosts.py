"""Processor cores and main memory of machines, as jobs use them beside their GPUs."""

from collections.abc import Iterable
from math import floor, inf

from slackwater.services.master.scheduling.view import Allocation, ClusterView, JobView

_ROUNDING = 1e-9
"""Fractions of a core add up to a whole one but for this."""


class HostUse:
    """Cores and bytes that jobs use on each machine. A group's members each use their own."""

    def __init__(self, cluster: ClusterView, running: Iterable[JobView]) -> None:
        self._cluster = cluster
        self.cores = [0.0] * len(cluster.nodes)
        self.memory_bytes = [0.0] * len(cluster.nodes)
        for job in running:
            self.add(job, job.allocation)

    def add(self, job: JobView, allocation: Allocation) -> None:
        for node, gpus in allocation:
            self.cores[node] += gpus * job.cores
            self.memory_bytes[node] += gpus * job.memory_bytes

    def fitting(self, job: JobView, node: int) -> int:
        """GPUs of the job that the machine can feed beside what runs there."""
        host, most = self._cluster.nodes[node], inf
        if job.cores > 0:
            most = (host.cores - self.cores[node] + _ROUNDING) / job.cores
        if job.memory_bytes > 0:
            most = min(most, (host.memory_bytes - self.memory_bytes[node]) / job.memory_bytes)
        return host.gpus if most >= host.gpus else max(0, floor(most))

    def overfull(self, node: int) -> str:
        """Name what the machine has too little of; empty: all is well."""
        host = self._cluster.nodes[node]
        if self.cores[node] > host.cores + _ROUNDING:
            return f"{self.cores[node]} cores of {host.cores}"
        if self.memory_bytes[node] > host.memory_bytes:
            return f"{self.memory_bytes[node]:.0f} bytes of memory of {host.memory_bytes:.0f}"
        return ""
