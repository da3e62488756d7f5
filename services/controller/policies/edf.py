"""Our own placement: share as long as every deadline holds, the earliest running first.

The paper gives an aggregator the longest iteration of its jobs as its cycle and stretches the
others to fit, so that jobs of D = 5 and D = 12 cannot share (17 % lost) however idle it is. Here
nobody is stretched: an aggregator takes a task if it is then still used to at most all of its time
and every task of every job on it is done before its layer waits longer than the loss limit allows
(demand.py; docs/adr/0010). The aggregators' slots run in that order (schedule.py).

A job goes whole to the aggregator with the least sufficient free time; where none takes all of it,
its tasks are dealt largest first by the same rule. That is reckoned with a quick sufficient test;
where it would cost new aggregators, once more with the exact one. Everything else (profiling on
temporary aggregators, a lone job keeps what it asked for, never more than that) is the paper's.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.schemas.base import AggregatorId, JobId
from slackwater.services.controller.policies.cyclic import Cyclic
from slackwater.services.controller.policies.demand import (
    Demand,
    Load,
    Tasks,
    holds,
    schedulable,
    slack_s,
    spare_s,
)
from slackwater.services.controller.policies.view import (
    NEW,
    AggregatorView,
    ClusterView,
    Expected,
    JobView,
    Order,
    TaskIntervals,
    loss_limit,
    residents,
    unused,
)

SLIP: Final = 1e-9
LOOKS_MAX: Final = 128
"""Exact tests while one job is placed: a bound on the time that it takes."""


class Edf(Cyclic):
    """Registered as `edf`."""

    order: Order = "deadline"
    prefers: Mapping[str, Any] = MappingProxyType({"scaling_s": 0.0, "pack_alone": True})
    """Scale with every exit; let a lone job share with itself."""
    _last_residents: tuple[ClusterView, dict[AggregatorId, list[JobId]]] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[AggregatorId, _Known] = {}

    def free(self, view: ClusterView) -> dict[AggregatorId, float]:
        return unused(view)

    def explains(self, view: ClusterView, job: JobId) -> Expected | None:
        """The most that the job can lose, whatever the phases. Nothing, if it has all that it asked
        for to itself."""
        jobs = {each.id: each for each in view.jobs}
        subject = jobs.get(job)
        if subject is None or subject.iteration_s <= 0.0:
            return None
        if self._last_residents is None or self._last_residents[0] is not view:
            self._last_residents = (view, residents(view))
        there = self._last_residents[1]
        homes = [a for a in view.aggregators if job in there.get(a.id, ())]
        alone = all(there[home.id] == [job] for home in homes)
        if alone and len(homes) >= min(subject.servers, len(subject.places)):
            return Expected(0.0)
        by_home = {
            home.id: self._late_s(view, home, [jobs[id] for id in there[home.id]])[job]
            for home in homes
        }
        late_s, limit = max(by_home.values(), default=0.0), loss_limit(subject, view)
        slack = slack_s(subject.iteration_s, limit)
        if late_s <= slack:
            return Expected(min(limit, late_s / (subject.iteration_s + late_s)))
        loss = late_s / (subject.iteration_s + late_s) if late_s < inf else 1.0
        where = tuple(id for id, each_s in by_home.items() if each_s > slack)
        return Expected(loss, where, job)  # It fitted when it was placed: by another profile.

    def plans(self, view: ClusterView) -> dict[AggregatorId, TaskIntervals]:
        """Return each job's own D_j: no job is stretched."""
        every_s = {job.id: job.iteration_s for job in view.jobs}
        there = residents(view).items()
        return {id: TaskIntervals({job: every_s[job] for job in jobs}) for id, jobs in there}

    def place(self, view: ClusterView, job: JobView) -> tuple[dict[int, str], int]:
        placed, new = place_by_deadline(view, job)
        if new and view.aggregators:
            closer = place_by_deadline(view, job, looks=LOOKS_MAX)
            if closer[1] < new:
                return closer
        return placed, new

    def _late_s(
        self, view: ClusterView, home: AggregatorView, jobs: list[JobView]
    ) -> dict[JobId, float]:
        """Call `lateness_s` only if the aggregator or a job there has changed."""
        where = (home, view.loss_limit)
        known = self._known.get(home.id)
        if known is not None and known.where == where and _same(known.jobs, jobs):
            return known.late_s
        found = lateness_s(view, home, jobs)
        self._known[home.id] = _Known(where, tuple(jobs), found)
        return found


def _same(known: Sequence[JobView], jobs: Sequence[JobView]) -> bool:
    return len(known) == len(jobs) and all(old is new for old, new in zip(known, jobs, strict=True))


class _Known(NamedTuple):
    where: tuple[AggregatorView, float]
    """The aggregator, and the cluster's limit."""
    jobs: tuple[JobView, ...]
    """The jobs when the result was computed."""
    late_s: dict[JobId, float]


def lateness_s(
    view: ClusterView, home: AggregatorView, jobs: Sequence[JobView]
) -> dict[JobId, float]:
    """Return by how much each job's iteration can last longer on a shared aggregator, whatever the
    phases. An aggregator whose jobs need more than all of its time slows all of them in
    proportion."""
    share = home.cpu_share
    limits = [loss_limit(job, view) for job in jobs]
    pairs = list(zip(jobs, limits, strict=True))
    slacks_s = {job.id: slack_s(job.iteration_s, limit) for job, limit in pairs}
    loads = [load_on(job, home.id, share, limit) for job, limit in pairs]
    used = sum(load.utilisation for load in loads)
    if used > 1.0:
        return {job.id: job.iteration_s * (used - 1.0) for job in jobs}
    earlier_s = spare_s(loads, max(slacks_s.values()))
    if earlier_s < 0.0 and holds(
        [Demand.of(tasks_of(job, share, limit), tasks_on(job, home.id)) for job, limit in pairs]
    ):
        earlier_s = 0.0
    return {id: max(0.0, slack - earlier_s) for id, slack in slacks_s.items()}


@dataclass(slots=True)
class _Aggregator:
    id: str
    cpu_share: float
    usable: float
    residents: list[JobView] = field(default_factory=list)
    loads: list[Load] | None = None
    """Theirs, once somebody asks."""
    used: float = 0.0
    """Utilisation by other jobs."""
    chosen: NDArray[np.bool_] | None = None
    """The tasks of the job that is being placed."""
    own: float = 0.0
    """Utilisation by them."""
    demand: Demand | None = None
    """The demand of the residents, once an exact test asks."""

    @property
    def free(self) -> float:
        return self.usable - self.used - self.own


class Deadlines:
    """The aggregators' loads while one job is being placed."""

    def __init__(self, view: ClusterView, job: JobView, looks: int = 0) -> None:
        self._view = view
        self._job = job
        self._looks = looks
        self._prepared: dict[float, Tasks] = {}
        self._wanted: dict[tuple[float, ...], float] = {}
        self._first: dict[tuple[float, ...], Load] = {}
        self.aggregators = {
            a.id: _Aggregator(a.id, a.cpu_share, a.usable)
            for a in sorted(view.aggregators, key=lambda a: a.id)
        }
        for other in view.jobs:
            if other.iteration_s > 0.0:  # An unprofiled job weighs nothing yet.
                for place, cpu_s in other.cpu_by_place_s().items():
                    if place in self.aggregators:
                        target = self.aggregators[place]
                        target.residents.append(other)
                        target.used += cpu_s / target.cpu_share / other.iteration_s
        kept = [task for task, place in enumerate(job.places) if place in self.aggregators]
        for name in {job.places[task] for task in kept}:
            assert name is not None
            self.put(self.aggregators[name], [t for t in kept if job.places[t] == name])

    def tasks(self, cpu_share: float) -> Tasks:
        if cpu_share not in self._prepared:
            self._prepared[cpu_share] = Tasks(
                self._job, cpu_share, loss_limit(self._job, self._view)
            )
        return self._prepared[cpu_share]

    def put(self, target: _Aggregator, tasks: list[int]) -> None:
        target.chosen = self._with(target, tasks)
        own = self.tasks(target.cpu_share)
        target.own = float(own.slots_s[target.chosen].sum()) / own.iteration_s

    def wanted(self, cpu_share: float, tasks: list[int]) -> float:
        """Return the utilisation that they ask for."""
        key = (cpu_share, *tasks)
        if key not in self._wanted:
            own = self.tasks(cpu_share)
            self._wanted[key] = float(own.slots_s[tasks].sum()) / own.iteration_s
        return self._wanted[key]

    def takes(self, target: _Aggregator, tasks: list[int]) -> bool:
        """Say whether every deadline there would still hold."""
        if self.wanted(target.cpu_share, tasks) > target.free + SLIP:
            return False
        if target.loads is None:
            target.loads = [
                load_on(other, target.id, target.cpu_share, loss_limit(other, self._view))
                for other in target.residents
            ]
        chosen = self._with(target, tasks)
        if schedulable((*target.loads, self._load(target, tasks, chosen)), target.usable):
            return True
        if not self._looks:
            return False
        self._looks -= 1
        own = self.tasks(target.cpu_share)
        return holds((*self._residents(target), Demand.of(own, chosen)))

    def _load(self, target: _Aggregator, tasks: list[int], chosen: NDArray[np.bool_]) -> Load:
        """Return the load of the job with those tasks there; it is the same on all aggregators that
        hold nothing of it yet."""
        own = self.tasks(target.cpu_share)
        if target.chosen is not None:
            return own.load(chosen)
        key = (target.cpu_share, *tasks)
        if key not in self._first:
            self._first[key] = own.load(chosen)
        return self._first[key]

    def _residents(self, target: _Aggregator) -> tuple[Demand, ...]:
        if not target.residents:
            return ()
        if target.demand is None:
            parts = [
                Demand.of(
                    tasks_of(other, target.cpu_share, loss_limit(other, self._view)),
                    tasks_on(other, target.id),
                )
                for other in target.residents
            ]
            target.demand = Demand(*(np.concatenate(each) for each in zip(*parts, strict=True)))
        return (target.demand,)

    def _with(self, target: _Aggregator, tasks: list[int]) -> NDArray[np.bool_]:
        count = len(self._job.places)
        chosen = np.zeros(count, bool) if target.chosen is None else target.chosen.copy()
        chosen[tasks] = True
        return chosen

    def add(self, name: str) -> _Aggregator:
        self.aggregators[AggregatorId(name)] = _Aggregator(name, self._view.new_share, 1.0)
        return self.aggregators[AggregatorId(name)]


def load_on(job: JobView, aggregator: str, cpu_share: float, limit: float) -> Load:
    """Compute what a placed and profiled job asks of one of its aggregators."""
    tasks = tasks_of(job, cpu_share, limit)
    key = ("load", aggregator, cpu_share, limit)
    return job.reckon(key, lambda: tasks.load(tasks_on(job, aggregator)))


def tasks_of(job: JobView, cpu_share: float, limit: float) -> Tasks:
    return job.reckon(("tasks", cpu_share, limit), lambda: Tasks(job, cpu_share, limit))


def tasks_on(job: JobView, aggregator: str) -> NDArray[np.bool_]:
    """Marks those of its tasks that are there."""
    return np.array([place == aggregator for place in job.places])


def place_by_deadline(
    view: ClusterView, job: JobView, looks: int = 0
) -> tuple[dict[int, str], int]:
    """(bucket -> aggregator, how many new ones) for the open buckets of a profiled job. `new_max`
    is not enforced here: the caller judges the number. `looks`: exact tests that may be made."""
    state = Deadlines(view, job, looks)
    open_buckets = [bucket for bucket, place in enumerate(job.places) if place is None]
    open_buckets.sort(key=lambda bucket: (-job.task_cpu_s[bucket], bucket))
    order: list[tuple[float, int, str]] = []  # By what is free, then in the order of ids.
    ranks: dict[str, int] = {}
    for rank, target in enumerate(state.aggregators.values()):
        ranks[target.id] = rank
        if target.id not in job.excluded:
            order.append((target.free, rank, target.id))
    order.sort()
    shares = {view.new_share, *(target.cpu_share for target in state.aggregators.values())}

    def with_room(tasks: list[int]) -> list[tuple[float, int, str]]:
        """Return the part of `order` that has enough room for the tasks."""
        least = min(state.wanted(share, tasks) for share in shares) - 2.0 * SLIP
        return order[bisect_left(order, (least, -1, "")) :]

    for _, _, name in with_room(open_buckets):
        if state.takes(state.aggregators[AggregatorId(name)], open_buckets):
            return dict.fromkeys(open_buckets, name), 0
    placed: dict[int, str] = {}
    new = 0
    for bucket in open_buckets:
        chosen = None
        for free, _, name in with_room([bucket]):
            target = state.aggregators[AggregatorId(name)]
            if free > 0.0 and state.takes(target, [bucket]):
                chosen = target
                break
        if chosen is None:
            chosen = state.add(f"{NEW}{new}")
            ranks[chosen.id] = len(ranks)
            new += 1
        else:
            del order[bisect_left(order, (chosen.free, ranks[chosen.id], chosen.id))]
        state.put(chosen, [bucket])
        insort(order, (chosen.free, ranks[chosen.id], chosen.id))
        placed[bucket] = chosen.id
    return placed, new
