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
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slackwater.schemas.base import AggregatorId
from slackwater.services.controller.policies.cyclic import Cyclic
from slackwater.services.controller.policies.demand import (
    Demand,
    Load,
    Tasks,
    holds,
    schedulable,
)
from slackwater.services.controller.policies.view import (
    NEW,
    ClusterView,
    JobView,
    Order,
    loss_limit,
    unused,
)

SLIP: Final = 1e-9
LOOKS_MAX: Final = 128
"""Exact tests while one job is placed: a bound on the time that it takes."""


class Edf(Cyclic):
    """Registered as `edf`."""

    order: Order = "deadline"

    def free(self, view: ClusterView) -> dict[AggregatorId, float]:
        return unused(view)

    def place(self, view: ClusterView, job: JobView) -> tuple[dict[int, str], int]:
        placed, new = place_by_deadline(view, job)
        if new and view.aggregators:
            closer = place_by_deadline(view, job, looks=LOOKS_MAX)
            if closer[1] < new:
                return closer
        return placed, new


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
    """Of the residents, once an exact test asks."""

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
        """The utilisation that they ask for."""
        key = (cpu_share, *tasks)
        if key not in self._wanted:
            own = self.tasks(cpu_share)
            self._wanted[key] = float(own.slots_s[tasks].sum()) / own.iteration_s
        return self._wanted[key]

    def takes(self, target: _Aggregator, tasks: list[int]) -> bool:
        """Whether every deadline there would still hold."""
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
        """Of the job with those tasks there: the same on all where nothing of it is yet."""
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
    """What a placed and profiled job asks of one of its aggregators."""
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
        """Of `order`, from where so much is free that they may fit."""
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
