"""Invariants of the whole system, watched at every moment.

each tensor on exactly one aggregator     `OwnerWatch` at any moment, `check_settled` in peace
every update applied once                 by every program, of every version that it reads;
                                          `OwnerWatch`: nothing is folded where it was left behind
no aggregator over its cycle              `CycleWatch`; by deadline: no task that may be late
no job beyond its loss limit for longer
than the feedback window                  `LossWatch`
every index as its records say            `IndexWatch`; in smaller simulations `watch_indexes`
no allocation leaked                      `LeakWatch`, `check_settled`, `check_empty`
"""

from dataclasses import dataclass, field

from tests.sim.system import SHARE, Job, System

from slackwater.common.domains.models.iterations import mean_s
from slackwater.loadgen.simulator.pool.checker import Overdue, overfilled
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.services.controller.core import Controller
from slackwater.services.controller.snapshot import cluster_view
from slackwater.services.controller.state import Job as Placed

WINDOW = 20
"""Iterations of one monitor window here."""
WINDOWS = 4
"""How many may pass under one placement: one begins before the placement has settled, one is the
measurement, one confirms it, and the remedy takes a part of the fourth."""
GRACE_S = 30.0
"""After a fault, until what it caused is over: rehosting, retries with their waits."""
LEAKED_AFTER_S = 30.0
"""An allocation that is on its way to a job, or back, takes some seconds."""


def controllers(system: System) -> list[Controller]:
    return [system.controllers[name] for name in sorted(system.controllers)]


def owned(system: System) -> dict[tuple[str, int], list[tuple[str, int, int]]]:
    """(job, bucket) -> (aggregator, location epoch, version) of each that serves it now."""
    found: dict[tuple[str, int], list[tuple[str, int, int]]] = {}
    for id in system.lives.ids:
        life = system.lives.lives[id]
        if not life.alive:
            continue
        for key, bucket in life.aggregator.core.buckets.items():
            if bucket.phase in ("ready", "folding"):
                entry = (id, bucket.location_epoch, bucket.version)
                found.setdefault(key, []).append(entry)
    return found


@dataclass
class Peace:
    """Whether faults, and what they caused, are over."""

    system: System
    disturbed_s: float = 0.0

    def disturb(self, for_s: float) -> None:
        self.disturbed_s = max(self.disturbed_s, self.system.now_s() + for_s + GRACE_S)

    @property
    def reigns(self) -> bool:
        return self.system.now_s() > self.disturbed_s


@dataclass
class IndexWatch:
    """Every core's indexes and sums are what its records and buckets say, at any moment."""

    system: System

    def check(self) -> None:
        self.system.check_indexes()
        for id in self.system.lives.ids:
            self.system.lives.lives[id].aggregator.core.check_invariants()


@dataclass
class OwnerWatch:
    """Nobody's update may be folded at two places, nor at one that no record names. In peace every
    bucket of a job that is at rest is served, where its record says."""

    peace: Peace
    served: int = 0
    """Buckets that were looked for in peace."""
    _left: dict[tuple[object, ...], int] = field(default_factory=dict)
    """The version that a bucket had when it was found left behind."""

    def check(self) -> None:
        system, found = self.peace.system, owned(self.peace.system)
        for key, places in found.items():
            epochs = [epoch for _, epoch, _ in places]
            assert len(set(epochs)) == len(epochs), f"{key} is served twice: {places}"
            for id, epoch, version in places:
                if epoch < max(epochs):
                    known = (id, system.lives.lives[id].born, key, epoch)
                    before = self._left.setdefault(known, version)
                    assert version == before, f"{key} is folded where it was left behind: {places}"
        for controller in controllers(system):
            for job in controller.state.living():
                for bucket in range(len(job.record.places)):
                    self._check_places(job, bucket, found.get((job.id, bucket), []))

    def _check_places(self, job: Placed, bucket: int, places: list[tuple[str, int, int]]) -> None:
        record, target = job.record, job.target(bucket)
        named = {p.location_epoch: p.aggregator for p in (record.places[bucket], target)}
        for id, epoch, _ in places:
            assert epoch <= max(named), f"{job.id}/{bucket} is at {places}, by its record {named}"
            assert named.get(epoch, id) == id, f"{job.id}/{bucket} is at {places}, not {named}"
        if record.phase == "steady" and job.located and self.peace.reigns:
            self.served += 1
            served = [(id, epoch) for id, epoch, _ in places]
            wanted = [(target.aggregator, target.location_epoch)]
            assert served == wanted, f"{job.id}/{bucket} is at {served}, by its record at {wanted}"


@dataclass
class CycleWatch:
    """The slots of every shared aggregator's cycle suffice, or every deadline there holds, unless
    its buckets had nowhere to go."""

    system: System
    _overdue: dict[str, Overdue] = field(default_factory=dict)

    def check(self) -> None:
        for controller in controllers(self.system):
            state = controller.state
            unplanned = {
                home
                for job in state.living()
                if job.record.cause in ("unprofiled", "") or job.record.phase == "hosting"
                for home in job.homes()
            }
            view = cluster_view(state, None)
            if state.policy_named(state.config.policy).order == "deadline":
                found = self._overdue.setdefault(state.config.id, Overdue()).look(view)
                what = "used to {:.3f}, and a task may miss its deadline"
            else:
                found, what = overfilled(view), "{:.3f} s over its cycle"
            for id, much in found.items():
                if id not in unplanned:
                    there = [_described(job, id) for job in state.living() if id in job.homes()]
                    raise AssertionError(
                        f"{self.system.now_s():.1f}: {id}: {what.format(much)}: " + "; ".join(there)
                    )


def _described(job: Placed, aggregator: str) -> str:
    record = job.record
    profile = record.profile
    assert profile is not None
    slots_s = sum(
        cpu_s / SHARE
        for cpu_s, place in zip(profile.task_cpu_s, record.target or record.places, strict=True)
        if place.aggregator == aggregator
    )
    return (
        f"{job.id} (D {profile.iteration_s:.3f} s, {slots_s:.3f} s of slots here, {record.phase}, "
        f"{record.cause}, assigned {record.assigned_s:.1f}, {record.reverts} reverts)"
    )


@dataclass
class LossWatch:
    """Follows every job's iterations under one placement of its neighbourhood."""

    peace: Peace
    looks: int = 0
    """Windows that were seen in peace."""
    _since: dict[str, tuple[object, float]] = field(default_factory=dict)
    beyond: int = 0
    """Windows beyond the limit that were seen at all."""
    reverts: dict[str, int] = field(default_factory=dict)

    def check(self) -> None:
        system = self.peace.system
        now_s = system.now_s()
        for controller in controllers(system):
            for placed in controller.state.living():
                job = system.jobs[placed.id]
                self._check_one(controller, placed, job, now_s)

    def _check_one(self, controller: Controller, placed: Placed, job: Job, now_s: float) -> None:
        state = controller.state
        homes = placed.homes()
        self.reverts[job.spec.id] = placed.record.reverts
        near = [each for each in state.living() if each.homes() & homes]
        signature = tuple((each.id, each.location_epoch, each.record.phase) for each in near)
        known = self._since.get(job.spec.id)
        if known is None or known[0] != signature:
            self._since[job.spec.id] = (signature, now_s)
            return
        profile = placed.record.profile
        if placed.record.phase != "steady" or profile is None or len(near) < 2:
            return
        since_s = max(known[1], self.peace.disturbed_s)
        lasted_s = [s for at_s, s in job.iterations_s if at_s - s >= since_s]
        if len(lasted_s) < WINDOW:
            return
        loss = 1.0 - profile.iteration_s / mean_s(lasted_s[-WINDOW:])
        self.looks += 1
        self.beyond += loss > state.config.loss_limit
        if len(lasted_s) < (WINDOWS + 1) * WINDOW:
            return
        windows = [mean_s(lasted_s[-n * WINDOW :][:WINDOW]) for n in range(1, WINDOWS + 1)]
        least = 1.0 - profile.iteration_s / min(windows)
        waiting = [each.id for each in near if each.pending is not None and each.pending.refused]
        assert least <= state.config.loss_limit + 0.02 or waiting, (
            f"{now_s:.1f}: {job.spec.id} loses {least:.3f} for {WINDOWS} windows on {sorted(homes)}"
            f" with {[(e.id, e.record.reverts, e.record.cause, e.pending) for e in near]}"
        )


@dataclass
class LeakWatch:
    """In peace, what is allocated serves a job soon, or is given back."""

    peace: Peace
    _idle_s: dict[AggregatorId, float] = field(default_factory=dict)

    def check(self) -> None:
        system = self.peace.system
        if system.master is None or not self.peace.reigns:
            self._idle_s.clear()
            return
        jobs = [job for each in controllers(system) for job in each.state.jobs.values()]
        idle = system.allocated() - {home for job in jobs for home in job.involved()}
        now_s = system.now_s()
        self._idle_s = {id: self._idle_s.get(id, now_s) for id in sorted(idle)}
        leaked = [id for id, at_s in self._idle_s.items() if now_s - at_s > LEAKED_AFTER_S]
        assert not leaked, f"{now_s:.1f}: {leaked} serve nobody and are kept"


def check_settled(system: System) -> None:
    held: dict[tuple[JobId, int], list[tuple[AggregatorId, int]]] = {}
    for id in system.lives.ids:
        for key, bucket in system.lives.lives[id].aggregator.core.buckets.items():
            held.setdefault(key, []).append((AggregatorId(id), bucket.location_epoch))
    system.check_settled(held)


def check_empty(system: System) -> None:
    """All jobs have ended: no memory, no allocation, no record of a placement is left."""
    assert system.allocated() == set()
    for id in system.lives.ids:
        life = system.lives.lives[id]
        assert life.aggregator.core.buckets == {}, id
        assert system.lives.kept(id) == 0, id
    for controller in controllers(system):
        assert controller.state.jobs == {}
    assert system.master is not None
    for job in system.jobs.values():
        record = system.master.state.jobs[JobId(job.spec.id)].record
        assert record.state == (job.ended or "completed"), record
        assert record.released, record
