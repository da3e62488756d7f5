"""Choose the aggregator cluster of a new job: the first of the two steps of AutoPS section 3.3.3.

Best fit by free CPU: the cluster with sufficient but the least; ties to the lowest id. Free CPU is
what could still be allocated to the cluster plus the free slots F_n of what it has
(docs/readings.md). The demand is the profiled CPU consumption of the same model where one was
profiled, else the servers asked for. Where no cluster suffices, the one with the most takes the
job: its controller queues or shares, which refusing here would only move to the submitter.

How many clusters take new jobs is the master's half of hybrid scaling. Jobs in different clusters
share nothing, so as few as the demand needs should: once a period the number follows the demand of
the jobs that run, and between two periods one more is opened where none of the open ones has room.
A cluster that is closed keeps its jobs; when they have ended it is empty, and so is retired.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, floor

from slackwater.common.base.limits import CLUSTERS_MAX, LOST_AFTER_S, MODELS_KNOWN_MAX
from slackwater.schemas.base import AggregatorId, ClusterId, JobId
from slackwater.schemas.cluster import ClusterReport, TenantUse
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import Profile
from slackwater.services.master.members import longest_silent, outdated


@dataclass(frozen=True, slots=True)
class ClusterRoom:
    id: ClusterId
    free_cpu: float


def best_fit(rooms: Iterable[ClusterRoom], demand_cpu: float) -> ClusterId | None:
    """Return the cluster with the least free CPU that suffices, else the one with the most; None
    without any cluster."""
    ordered = sorted(rooms, key=lambda room: (room.free_cpu, room.id))
    for room in ordered:
        if room.free_cpu >= demand_cpu:
            return room.id
    if not ordered:
        return None
    return min(ordered, key=lambda room: (-room.free_cpu, room.id)).id


FILL = 0.8
"""The share of a cluster's greatest CPU that the demand may take before another is opened at a
period's end."""


class Clusters:
    """The controllers' reports and the demands of the models profiled so far. `scaling_s`: the
    period after which the number of clusters that take new jobs is adjusted; 0: all take them."""

    def __init__(self, scaling_s: float = 0.0) -> None:
        self._scaling_s = scaling_s
        self._scaled_s = -scaling_s
        self.open: set[ClusterId] = set()
        self._reports: dict[ClusterId, tuple[ClusterReport, float]] = {}
        self._demands_cpu: OrderedDict[str, float] = OrderedDict()
        self.since_s = 0.0
        """When this master began to listen."""

    def heard(self, report: ClusterReport, now_s: float) -> None:
        if report.cluster not in self._reports and len(self._reports) >= CLUSTERS_MAX:
            oldest = longest_silent(self._seen_s(), now_s, LOST_AFTER_S)
            if oldest is None:
                return
            del self._reports[oldest]
        self._reports[report.cluster] = (report, now_s)

    def tick(self, now_s: float) -> None:
        """Forget clusters that have been silent for long."""
        for id in outdated(self._seen_s(), now_s):
            del self._reports[id]

    def _seen_s(self) -> Iterator[tuple[ClusterId, float]]:
        return ((id, heard_s) for id, (_, heard_s) in self._reports.items())

    def learned(self, model: str, profile: Profile) -> None:
        """The model's total CPU consumption, in cores."""
        if model and profile.iteration_s > 0.0:
            self._demands_cpu[model] = sum(profile.task_cpu_s) / profile.iteration_s
            self._demands_cpu.move_to_end(model)
            if len(self._demands_cpu) > MODELS_KNOWN_MAX:
                self._demands_cpu.popitem(last=False)

    def demand_cpu(self, spec: JobSpec, share: float) -> float:
        known = self._demands_cpu.get(spec.model) if spec.model else None
        return spec.servers * share if known is None else known

    def rooms(
        self,
        unallocated_cpu: dict[ClusterId, float],
        placed: Iterable[tuple[ClusterId, JobId, float]],
        now_s: float,
    ) -> list[ClusterRoom]:
        """Clusters heard of lately; `placed` are (cluster, job, demand) of the jobs sent there, of
        which those that a report does not count yet are subtracted."""
        uncounted: dict[ClusterId, float] = {}
        for cluster, job, demand_cpu in placed:
            entry = self._reports.get(cluster)
            if entry is not None and job not in entry[0].jobs:
                uncounted[cluster] = uncounted.get(cluster, 0.0) + demand_cpu
        return [
            ClusterRoom(
                cluster,
                report.free_cpu + unallocated_cpu.get(cluster, 0.0) - uncounted.get(cluster, 0.0),
            )
            for cluster, (report, _) in self._reports.items()
            if self.alive(cluster, now_s)
        ]

    def alive(self, cluster: ClusterId, now_s: float) -> bool:
        entry = self._reports.get(cluster)
        return entry is not None and now_s - entry[1] <= LOST_AFTER_S

    def silent(self, cluster: ClusterId, now_s: float) -> bool:
        """Say whether the cluster was silent for too long; before its first report, since the
        master's start."""
        heard_s = self._reports[cluster][1] if cluster in self._reports else self.since_s
        return now_s - heard_s > LOST_AFTER_S

    def counts(self, cluster: ClusterId | None, job: JobId) -> bool:
        """Say whether the job shares aggregators there, by its controller's last report."""
        entry = self._reports.get(cluster) if cluster is not None else None
        return entry is not None and job in entry[0].jobs

    def waiting(self, cluster: ClusterId, job: JobId) -> str:
        """Why the job waits there, by the controller's last report; empty: it does not."""
        entry = self._reports.get(cluster)
        return entry[0].waiting.get(job, "") if entry is not None else ""

    def drains(self, now_s: float) -> dict[AggregatorId, str]:
        """List aggregators that are being emptied: draining, late or drained."""
        return {
            id: state
            for cluster, (report, _) in self._reports.items()
            if self.alive(cluster, now_s)
            for id, state in report.drains.items()
        }

    def uses(self, now_s: float) -> dict[str, TenantUse]:
        """Return what each tenant uses, summed over the live clusters."""
        found: dict[str, TenantUse] = {}
        for cluster, (report, _) in self._reports.items():
            for use in report.tenants if self.alive(cluster, now_s) else ():
                found[use.tenant] = found.get(use.tenant, TenantUse(tenant=use.tenant)) + use
        return found

    @property
    def known(self) -> list[ClusterId]:
        return sorted(self._reports)

    def scale(
        self, placed: Iterable[tuple[ClusterId, JobId, float]], most_cpu: float, now_s: float
    ) -> None:
        """At the first look of a period: as many clusters as the demand of all jobs needs are open,
        those with the most of it. `most_cpu`: what one cluster may hold."""
        period_s = self._scaling_s
        if not period_s:
            self.open = set(self._reports)
            return
        if self.open and floor(now_s / period_s) == floor(self._scaled_s / period_s):
            return
        self._scaled_s = now_s
        demands_cpu = dict.fromkeys(self.known, 0.0)
        for cluster, _, demand_cpu in placed:
            demands_cpu[cluster] = demands_cpu.get(cluster, 0.0) + demand_cpu
        total_cpu = sum(demands_cpu.values())
        needed = max(1, ceil(total_cpu / (FILL * most_cpu))) if most_cpu else 1
        fullest = sorted(demands_cpu, key=lambda cluster: (-demands_cpu[cluster], cluster))
        self.open = set(fullest[:needed])

    def choose(self, rooms: Iterable[ClusterRoom], demand_cpu: float) -> ClusterId | None:
        """The best fit among the open ones; on demand the lowest of the others that suffices."""
        rooms = list(rooms)
        opened = [room for room in rooms if room.id in self.open]
        spare = [r.id for r in rooms if r.id not in self.open and r.free_cpu >= demand_cpu]
        if spare and not any(room.free_cpu >= demand_cpu for room in opened):
            self.open.add(min(spare))
            return min(spare)
        return best_fit(opened or rooms, demand_cpu)
