"""Whether jobs' gradients fit on the links of the machines that they are placed on.

A machine's link has one budget for all that crosses it: gradients, copies of buckets, pages of
remote memory, anything else. Each job's profile says how many bytes of an iteration pass over a
network; so many a second, by the parts that are there, its aggregators' machine has to carry each
way. What the link carries beside our jobs is measured: a link's rate by heartbeats, less what the
jobs' windows say of their own transfers. As with other work on the processors (host_load.py) the
median of `host_s` seconds counts.

A placement that would load a link beyond `network_fill` of its budget is not carried out: another
is looked for, without that machine's aggregators. What must leave (a lost aggregator, a drain)
leaves even so: slow is better than nowhere.
"""

from collections.abc import Sequence
from typing import Final

from slackwater.schemas.base import AggregatorId, JobId, NodeId
from slackwater.schemas.cluster import AggregatorHeartbeat
from slackwater.services.controller.room import node_of, sized, sizes_of
from slackwater.services.controller.state import Cause, Job, State

CHOOSY: Final[frozenset[Cause]] = frozenset({"profiled", "reverted", "interfered"})
"""Causes of an assignment that had better not be carried out than load a link too much."""


# Measured -----------------------------------------------------------------------------------------


def heard(state: State, heartbeat: AggregatorHeartbeat, now_s: float) -> None:
    """Take what its machine's link carries."""
    node = heartbeat.node

    def gradients_bytes_s() -> float:
        """Return what the last windows of our jobs say that they send there, or fetch."""
        return sum(
            _transferred_bytes_s(state.jobs[id], aggregator)
            for aggregator in state.links.aggregators_of(node)
            for id in state.index.users([aggregator])
        )

    state.links.heard(heartbeat, gradients_bytes_s, now_s)


def _transferred_bytes_s(job: Job, aggregator: AggregatorId) -> float:
    window = job.window
    if window is None or window.location_epoch != job.location_epoch:
        return 0.0
    span_s = window.spanned_s or window.iterations * window.iteration_s
    found = (link for link in window.links if link.aggregator == aggregator)
    return sum(max(link.pushed_bytes, link.pulled_bytes) for link in found) / max(span_s, 1e-9)


# Reckoned -----------------------------------------------------------------------------------------


def demand_bytes_s(job: Job) -> float:
    """Return the bytes a second that all its aggregators together send to its workers over a
    network, or get from them, whichever is more; 0: nothing is known, or all is on one machine."""
    profile = job.record.profile
    if profile is None or profile.iteration_s <= 0.0:
        return 0.0
    return profile.network_bytes / profile.iteration_s


class Traffic:
    """The load of links while placements are dealt: the state stands still meanwhile."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._moved: dict[JobId, list[AggregatorId]] = {}

    def crowded(
        self, job: Job, homes: Sequence[AggregatorId], *, may_stay: bool = False
    ) -> dict[AggregatorId, str]:
        """Return the aggregators of all machines whose links would be loaded too much if each
        bucket were at its aggregator of `homes` -> why. A machine where no bucket is new may keep
        what it has; with `may_stay`, one whose link carries as much of the job already."""
        demand = demand_bytes_s(job)
        if not demand:
            return {}
        state, found = self._state, dict[AggregatorId, str]()
        places = job.record.places
        now = self._by_node(job, [place.aggregator for place in places])
        new = {
            node_of(state, home)
            for bucket, home in enumerate(homes)
            if not places or places[bucket].aggregator != home
        }
        for node, wanted in sorted(self._by_node(job, homes).items()):
            budget = budget_bytes_s(state, node)
            stays = node not in new or (may_stay and wanted <= now.get(node, 0.0))
            if not budget or stays:
                continue
            used = state.links.others_bytes_s(node) + self._others(job, node)
            if used + wanted > state.config.network_fill * budget:
                why = (
                    f"{sized(wanted)}/s of its gradients would cross the link of {node}, which "
                    f"carries {sized(used)}/s: at most {state.config.network_fill:.0%} of "
                    f"{sized(budget)}/s are to be used (network_fill, network_bytes_s)"
                )
                found |= dict.fromkeys(state.links.aggregators_of(node), why)
        return found

    def take(self, job: Job, homes: list[AggregatorId]) -> None:
        """Reckon from now on with the job there."""
        self._moved[job.id] = homes

    def _others(self, job: Job, node: NodeId) -> float:
        """Return what the other jobs are to carry there."""
        users = set(self._state.index.users(self._state.links.aggregators_of(node)))
        return sum(
            self._by_node(other, self._homes(other)).get(node, 0.0)
            for other in (self._state.jobs[id] for id in sorted(users | self._moved.keys()))
            if other is not job
        )

    def _homes(self, job: Job) -> list[AggregatorId]:
        places = job.record.target or job.record.places
        return self._moved.get(job.id) or [place.aggregator for place in places]

    def _by_node(self, job: Job, homes: Sequence[AggregatorId]) -> dict[NodeId, float]:
        """Deal the job's demand by the bytes of its buckets."""
        sizes, found = sizes_of(job), dict[NodeId, float]()
        per_byte = demand_bytes_s(job) / max(sum(sizes), 1)
        for home, nbytes in zip(homes, sizes, strict=False):
            node = node_of(self._state, home)
            if node is not None:
                found[node] = found.get(node, 0.0) + nbytes * per_byte
        return found


def budget_bytes_s(state: State, node: NodeId) -> int:
    """Return the budget of the machine's link, each way; 0: no aggregator there says one."""
    entries = (state.aggregators.get(id) for id in state.links.aggregators_of(node))
    beats = (entry.heartbeat for entry in entries if entry is not None)
    return max((beat.network_budget_bytes_s for beat in beats if beat is not None), default=0)
