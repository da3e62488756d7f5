"""Invariants of a simulated pool, checked after every event (`--set pool.check=true`).

Each bucket of a job is on one aggregator, the one of its record (or, while it moves, on one of the
two); nothing else is held; what the master has allocated is what the controllers have; where
scaling is immediate, each serves a job; no aggregator's cycle is overfilled, by deadline no task
may be late; nobody loses more than his limit for longer than feedback takes. While the consequences
of a kill are going on only the first is looked at: nobody may hold what another has, too, at the
same epoch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from slackwater.common.base.errors import Fatal
from slackwater.loadgen.simulator.pool.feedback import Feedback
from slackwater.loadgen.simulator.pool.world import World
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.services.controller.core import Controller
from slackwater.services.controller.policies.demand import Demand, Tasks, holds, schedulable
from slackwater.services.controller.policies.edf import tasks_on
from slackwater.services.controller.policies.scheme import Packing, executions
from slackwater.services.controller.policies.view import (
    EPSILON,
    AggregatorView,
    ClusterView,
    JobView,
    loss_limit,
)
from slackwater.services.controller.snapshot import cluster_view
from slackwater.services.controller.state import Job

SLOT_EPSILON_S: Final = 1e-7
LEAKED_AFTER_S: Final = 60.0
"""An aggregator that serves nobody is given back once it was seen empty."""
WINDOWS: Final = 4
"""How many may pass under one placement: one begins before the placement has settled, one is the
measurement, one confirms it, and the remedy takes a part of the fourth."""


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


class Overdue:
    """The same of aggregators whose tasks run by deadline: those on which one may miss its own, for
    neither the quick test nor the exact one, of all steps of the demand, says that none does. What
    is there is tested again only where it changed."""

    def __init__(self) -> None:
        self._known: dict[AggregatorId, tuple[list[JobView], float]] = {}

    def look(self, view: ClusterView) -> dict[AggregatorId, float]:
        """Each with its utilisation."""
        found: dict[AggregatorId, float] = {}
        for aggregator in view.aggregators:
            there = [
                job
                for job in view.jobs
                if job.iteration_s > 0.0 and aggregator.id in job.cpu_by_place_s()
            ]
            known = self._known.get(aggregator.id)
            if known is None or known[0] != there:
                known = (there, _overdue(view, aggregator, there))
                self._known[aggregator.id] = known
            if known[1]:
                found[aggregator.id] = known[1]
        return found


def _overdue(view: ClusterView, aggregator: AggregatorView, there: Sequence[JobView]) -> float:
    """The utilisation; 0: all is in time."""
    if not there:
        return 0.0
    prepared = [
        (Tasks(job, aggregator.cpu_share, loss_limit(job, view)), tasks_on(job, aggregator.id))
        for job in there
    ]
    loads = [tasks.load(here) for tasks, here in prepared]
    if schedulable(loads) or holds([Demand.of(tasks, here) for tasks, here in prepared]):
        return 0.0
    return sum(load.utilisation for load in loads)


@dataclass(frozen=True, slots=True)
class _Losing:
    """A job beyond its limit: its neighbourhood, and until when that has to change."""

    where: tuple[tuple[JobId, int, str], ...]
    due_s: float
    loss: float


class Checker:
    def __init__(
        self, world: World, controllers: Mapping[str, Controller], feedback: Feedback
    ) -> None:
        self._world, self._controllers, self._feedback = world, controllers, feedback
        self._idle_s: dict[AggregatorId, float] = {}
        """Aggregators that serve nobody, and since when."""
        self._overdue: dict[str, Overdue] = {}
        self._losing: dict[JobId, _Losing] = {}
        """Jobs beyond their limit."""

    def check(self) -> None:
        """Raises Broken."""
        self._check_time()
        held = self._world.held()
        for key, places in held.items():
            if len({epoch for _, epoch in places}) < len(places):
                self._broken(f"{key} is held twice: {places}")
        if not self._world.calm:
            self._losing.clear()
            self._idle_s.clear()
            return
        for controller in self._controllers.values():
            for job in controller.state.living():
                for bucket in range(len(job.record.places)):
                    self._check_bucket(job, bucket, held.pop((job.id, bucket), []))
            self._check_cycles(controller)
        self._check_losses()
        for key, places in held.items():
            self._broken(f"{key} is held at {places} and belongs to no job")
        self._check_allocated()

    def _check_time(self) -> None:
        """Check that all changes that were due before this event have happened: between two nothing
        does."""
        now_s = self._world.now_s
        for id, each in self._losing.items():
            if now_s > each.due_s:
                self._broken(f"{id} lost {each.loss:.3f} for {WINDOWS} windows with {each.where}")
        leaked = sorted(id for id, at_s in self._idle_s.items() if now_s - at_s > LEAKED_AFTER_S)
        if leaked:
            self._broken(f"{leaked} serve nobody and are kept")

    def _check_bucket(self, job: Job, bucket: int, found: list[tuple[AggregatorId, int]]) -> None:
        record = job.record
        places = {place.aggregator for place in (record.places[bucket], job.target(bucket))}
        if len(found) != 1 or found[0][0] not in places:
            self._broken(f"bucket {bucket} of {job.id} is at {found}, by its record at {places}")

    def _check_cycles(self, controller: Controller) -> None:
        state = controller.state
        order = state.policy_named(state.config.policy).order
        if order == "arrival":
            return
        unplanned = {
            home
            for job in state.living()
            if job.record.cause == "unprofiled"
            for home in job.homes()
        }
        view = cluster_view(state, None)
        if order == "deadline":
            overdue = self._overdue.setdefault(state.config.id, Overdue())
            for id, used in overdue.look(view).items():
                if id not in unplanned:
                    self._broken(f"{id}: used to {used:.3f}, a task may miss its deadline")
            return
        for id, over_s in overfilled(view).items():
            if id not in unplanned:
                self._broken(f"{id}: {over_s:.4f} s over its cycle")

    def _check_losses(self) -> None:
        """Check losses: a job beyond its limit though nothing of its own is slow gets a remedy
        within WINDOWS, which changes its place or its neighbours, or it waits for aggregators that
        are not to be had."""
        losing: dict[JobId, _Losing] = {}
        for controller in self._controllers.values():
            living = list(controller.state.living())
            for job in living:
                if not self._beyond(job):
                    continue
                homes = job.homes()
                near = [each for each in living if each.homes() & homes]
                if any(each.pending is not None and each.pending.refused for each in near):
                    continue
                where = tuple((each.id, each.location_epoch, each.record.phase) for each in near)
                known = self._losing.get(job.id)
                if known is not None and known.where == where:
                    losing[job.id] = known
                else:
                    due_s = self._world.now_s + WINDOWS * self._feedback.window_s(job)
                    losing[job.id] = _Losing(where, due_s, self._feedback.felt[job.id].loss)
        self._losing = losing

    def _beyond(self, job: Job) -> bool:
        felt = self._feedback.felt.get(job.id)
        return felt is not None and felt.beyond_s >= 0.0 and job.id not in self._feedback.slow

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
        self._idle_s = {id: self._idle_s.get(id, self._world.now_s) for id in idle}

    def _broken(self, what: str) -> None:
        raise Broken(f"at {self._world.now_s:.3f} s: {what}")
