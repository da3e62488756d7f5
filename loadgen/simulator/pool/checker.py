"""What must hold in a simulated pool after every event (`--set pool.check=true`).

Each bucket of a job is on one aggregator, the one of its record (or, while it moves, on one of the
two); nothing else is held; what the master has allocated is what the controllers have; where
scaling is immediate, each serves a job; no aggregator's cycle is overfilled. While the consequences
of a kill are going on only the first is looked at: nobody may hold what another has, too, at the
same epoch.
"""

from collections.abc import Mapping
from typing import Final

from slackwater.common.errors import Fatal
from slackwater.loadgen.simulator.pool.world import World
from slackwater.schemas.base import AggregatorId
from slackwater.services.controller.core import Controller
from slackwater.services.controller.policies.scheme import Packing, executions
from slackwater.services.controller.policies.view import EPSILON, ClusterView
from slackwater.services.controller.snapshot import cluster_view
from slackwater.services.controller.state import Job

SLOT_EPSILON_S: Final = 1e-7
LEAKED_AFTER_S: Final = 60.0
"""An aggregator that serves nobody is given back once it was seen empty."""


class Broken(Fatal):
    """An invariant of the pool does not hold."""


def overfilled(view: ClusterView) -> dict[AggregatorId, float]:
    """Aggregators whose cycles do not suffice, and by how much slot time. A job that another
    aggregator stretches beyond this cycle, as happens when the longest job here has left, runs once
    in its d_j and not once in C_n. `usable` is for what comes: what was there when a job left for a
    loss may fill more."""
    packing = Packing(view)
    durations_s = packing.durations_s()
    used_s: dict[AggregatorId, float] = {}
    for aggregator in view.aggregators:
        cycle_s = packing.free_s(aggregator.id)[1]
        for job in view.jobs:
            if (cpu_s := job.cpu_by_place_s().get(aggregator.id, 0.0)) and job.iteration_s > 0.0:
                duration_s = durations_s[job.id]
                count = min(executions(cycle_s, duration_s), cycle_s / duration_s * (1 + EPSILON))
                slots_s = count * cpu_s / aggregator.cpu_share
                used_s[aggregator.id] = used_s.get(aggregator.id, -cycle_s) + slots_s
    return {id: over_s for id, over_s in used_s.items() if over_s > SLOT_EPSILON_S}


class Checker:
    def __init__(self, world: World, controllers: Mapping[str, Controller]) -> None:
        self._world, self._controllers = world, controllers
        self.checks = 0
        self._idle_s: dict[AggregatorId, float] = {}
        """Aggregators that serve nobody, and since when."""

    def check(self) -> None:
        """Raises Broken."""
        self.checks += 1
        held = self._world.held()
        for key, places in held.items():
            if len({epoch for _, epoch in places}) < len(places):
                self._broken(f"{key} is held twice: {places}")
        if not self._world.calm:
            return
        for controller in self._controllers.values():
            for job in controller.state.living():
                for bucket in range(len(job.record.places)):
                    self._check_bucket(job, bucket, held.pop((job.id, bucket), []))
            self._check_cycles(controller)
        for key, places in held.items():
            self._broken(f"{key} is held at {places} and belongs to no job")
        self._check_allocated()

    def _check_bucket(self, job: Job, bucket: int, found: list[tuple[AggregatorId, int]]) -> None:
        record = job.record
        places = {place.aggregator for place in (record.places[bucket], job.target(bucket))}
        if len(found) != 1 or found[0][0] not in places:
            self._broken(f"bucket {bucket} of {job.id} is at {found}, by its record at {places}")

    def _check_cycles(self, controller: Controller) -> None:
        state = controller.state
        if state.policy_named(state.config.policy).order != "cyclic":
            return
        unplanned = {
            home
            for job in state.living()
            if job.record.cause == "unprofiled"
            for home in job.homes()
        }
        for id, over_s in overfilled(cluster_view(state, None)).items():
            if id not in unplanned:
                self._broken(f"{id}: {over_s:.4f} s over its cycle")

    def _check_allocated(self) -> None:
        listing = self._world.master.state.pool.listing()
        allocated = {i.record.id for i in listing.aggregators if i.record.cluster is not None}
        ours: set[str] = set()
        idle: set[AggregatorId] = set()
        for controller in self._controllers.values():
            state = controller.state
            mine = {entry.id for entry in state.aggregators.values() if entry.ours}
            ours |= mine
            if state.config.scaling_s == 0.0:
                idle |= mine - {home for job in state.jobs.values() for home in job.involved()}
        if ours != allocated:
            self._broken(f"allocated {sorted(allocated)}, the controllers have {sorted(ours)}")
        now_s = self._world.now_s
        self._idle_s = {id: self._idle_s.get(id, now_s) for id in idle}
        leaked = sorted(id for id, at_s in self._idle_s.items() if now_s - at_s > LEAKED_AFTER_S)
        if leaked:
            self._broken(f"{leaked} serve nobody and are kept")

    def _broken(self, what: str) -> None:
        raise Broken(f"at {self._world.now_s:.3f} s: {what}")
