"""The view that a placement policy sees, the plan that it answers, and the check of every plan.

A policy is a function of a frozen snapshot: it places the open buckets of one job, names new
aggregators `new#0`, `new#1`, ... and changes nothing. Its plan is validated before anything is
applied, under every policy (ARCHITECTURE.md, A service).
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol, TypeVar

from slackwater.common.base.errors import Rejected
from slackwater.schemas.base import AggregatorId, JobId

T = TypeVar("T")

NEW: Final = "new#"
EPSILON: Final = 1e-9
"""Relative: cycles and durations are sums of measured floats."""


@dataclass(frozen=True, slots=True)
class AggregatorView:
    """A shared aggregator that is alive. `usable` is the fraction of its cycle that tasks may fill;
    it falls where a job has lost speed (docs/readings.md: best fit alone never spreads)."""

    id: AggregatorId
    cpu_share: float
    usable: float = 1.0


@dataclass(frozen=True, slots=True)
class JobView:
    """A job and its tasks; `task_cpu_s` is empty until the job is profiled."""

    id: JobId
    servers: int
    iteration_s: float
    task_cpu_s: tuple[float, ...]
    places: tuple[AggregatorId | None, ...]
    """Per bucket; None: open, this is what the policy decides."""
    current: tuple[AggregatorId | None, ...] = ()
    """Where an open bucket lives now (its temporary aggregator); None: nowhere any more."""
    excluded: frozenset[AggregatorId] = frozenset()
    """Aggregators where this job lost speed: it may not return there."""
    standalone: bool = False
    """Set where the job, alone on fewer aggregators than it asked for, loses speed: give it all of
    them."""
    loss_limit: float = 0.0
    """The tenant's limit; 0: the cluster's."""
    positions: tuple[float, ...] = ()
    """Per bucket, which part of the forward pass comes before it is pulled; empty: not profiled."""
    _reckoned: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def reckon(self, of: Hashable, how: Callable[[], T]) -> T:
        """Compute once what follows from the view alone; `of` names it. Every decision in the
        cluster asks for every job."""
        if of not in self._reckoned:
            self._reckoned[of] = how()
        found: T = self._reckoned[of]
        return found

    def cpu_by_place_s(self) -> dict[AggregatorId, float]:
        """Return the CPU time of its tasks, in seconds, by aggregator."""
        found: dict[AggregatorId, float] | None = self._reckoned.get("cpu")
        return self.reckon("cpu", self._sum_by_place_s) if found is None else found

    def _sum_by_place_s(self) -> dict[AggregatorId, float]:
        sums_s: dict[AggregatorId, float] = {}
        for cpu_s, place in zip(self.task_cpu_s, self.places, strict=False):
            if place is not None:
                sums_s[place] = sums_s.get(place, 0.0) + cpu_s
        return sums_s


@dataclass(frozen=True, slots=True)
class ClusterView:
    aggregators: tuple[AggregatorView, ...]
    jobs: tuple[JobView, ...]
    """Every other job whose tasks are on `aggregators`."""
    new_share: float
    """cpu_share of an aggregator that would be allocated."""
    new_max: int
    """How many may be asked for: 0 while recycling."""
    loss_limit: float
    forced: bool = False
    """Set where no aggregator can be added and the buckets have no home: the least loaded take
    them, even beyond their capacity."""
    pack_alone: bool = False
    """A job alone in its cluster is placed as any other, instead of keeping what it asked for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`places` of all buckets, or none of them and the reason why it cannot be done."""

    places: tuple[str, ...] = ()
    new: int = 0
    temporary: bool = False
    """The new aggregators serve for profiling only: `assign` is asked again afterwards."""
    reason: str = ""


Order = Literal["arrival", "cyclic", "deadline"]
"""The order of a job's tasks: as they come, in the paper's cycle, or the earliest deadline
first."""


@dataclass(frozen=True, slots=True)
class TaskIntervals:
    """How the tasks on one aggregator take turns."""

    every_s: dict[JobId, float]
    """Seconds between two executions of each of a profiled job's tasks."""
    cycle_s: float = 0.0
    """C_n; 0: the aggregator has no cycle, its tasks run by deadline."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Says what sharing costs a job where it is, by the policy's own estimate."""

    loss: float
    """The share of its standalone speed: what it loses, or the most that it can lose."""
    where: tuple[AggregatorId, ...] = ()
    """Aggregators that by themselves make it lose more than its limit."""
    leaving: JobId | None = None
    """The job that should leave them: the job itself, or another without which all others stay
    within their limits."""


Memory = Any
"""The value that a policy carries from one decision to the next; None at first and after a
restart."""


class Policy(Protocol):
    @property
    def adapts(self) -> bool:
        """Say whether its jobs are monitored, reverted and recycled."""
        ...

    @property
    def private(self) -> bool:
        """Say whether each job has aggregators of its own; else the jobs of this policy share."""
        ...

    @property
    def order(self) -> Order:
        """The order in which its jobs' tasks run on aggregators that they share."""
        ...

    def assign(self, view: ClusterView, job: JobView, memory: Memory) -> tuple[Plan, Memory]: ...

    def free(self, view: ClusterView) -> dict[AggregatorId, float]:
        """The part of each aggregator that the policy could still give away, below 0 where it is
        overfull: by it clusters are compared, and the least loaded aggregator is emptied."""
        ...

    def explains(self, view: ClusterView, job: JobId) -> Expected | None:
        """Estimate what sharing costs a job of `view.jobs`, and why; None: the policy does not
        know. If it names `leaving`, that job moves, and the newest assignment is not looked for."""
        ...

    def plans(self, view: ClusterView) -> dict[AggregatorId, TaskIntervals]:
        """Return the turns of aggregators' slots. Aggregators that are left out run tasks as they
        come, or by the deadlines that came with the buckets."""
        ...

    @property
    def prefers(self) -> Mapping[str, Any]:
        """Settings of `loadgen simulate --pool aggregation` under which the policy is judged unless
        others are given."""
        ...


class Defaults:
    """A policy that orders, watches and expects nothing; others override what they do."""

    adapts: bool = False
    private: bool = False
    order: Order = "arrival"
    prefers: Mapping[str, Any] = MappingProxyType({})

    def free(self, view: ClusterView) -> dict[AggregatorId, float]:
        return unused(view)

    def explains(self, view: ClusterView, job: JobId) -> Expected | None:
        return None

    def plans(self, view: ClusterView) -> dict[AggregatorId, TaskIntervals]:
        return {}


class PlanRefused(Rejected):
    """A policy's plan breaks a rule that holds whatever the policy."""


@dataclass(slots=True)
class _Load:
    utilisation: float = 0.0
    jobs: set[JobId] = field(default_factory=set)


def validate(plan: Plan, view: ClusterView, job: JobView) -> None:
    """Raises PlanRefused. Capacity is judged by utilisation with every iteration stretched to the
    loss limit: necessary for any policy, and implied by the paper's slots."""
    if not plan.places:
        if not plan.reason:
            raise PlanRefused(f"job {job.id}: a plan without places needs a reason")
        return
    if len(plan.places) != len(job.places):
        raise PlanRefused(
            f"job {job.id}: the plan places {len(plan.places)} of {len(job.places)} buckets"
        )
    if plan.new > view.new_max:
        raise PlanRefused(
            f"job {job.id}: the plan asks for {plan.new} new aggregators of {view.new_max}"
        )
    known = {aggregator.id for aggregator in view.aggregators}
    known |= {place for place in job.current if place is not None}
    fresh = {f"{NEW}{k}" for k in range(plan.new)}
    for bucket, (place, kept) in enumerate(zip(plan.places, job.places, strict=True)):
        if kept is not None and place != kept:
            raise PlanRefused(f"job {job.id}: bucket {bucket} is not open, yet the plan moves it")
        if kept is None and place not in known and place not in fresh:
            raise PlanRefused(f"job {job.id}: bucket {bucket}: there is no aggregator {place!r}")
        if kept is None and place in job.excluded and not view.forced:
            raise PlanRefused(f"job {job.id}: bucket {bucket} may not return to {place}")
    if job.task_cpu_s and not view.forced:
        _check_capacity(plan, view, job)


def _check_capacity(plan: Plan, view: ClusterView, job: JobView) -> None:
    loads: dict[str, _Load] = defaultdict(_Load)
    shares = {aggregator.id: aggregator.cpu_share for aggregator in view.aggregators}
    touched = {
        place for place, kept in zip(plan.places, job.places, strict=True) if kept is None
    } & shares.keys()
    placed = replace(job, places=tuple(AggregatorId(place) for place in plan.places))
    for other in (*view.jobs, placed):
        if not touched.isdisjoint(other.cpu_by_place_s()):
            _add(loads, shares, other, view)
    for place in sorted(touched):
        load = loads[place]
        if load.utilisation > 1.0 + EPSILON and load.jobs != {job.id}:
            raise PlanRefused(
                f"job {job.id}: aggregator {place} would be used to {load.utilisation:.3f}"
            )


def residents(view: ClusterView) -> dict[AggregatorId, list[JobId]]:
    """List the profiled jobs of each of the view's aggregators that has any."""
    found: dict[AggregatorId, list[JobId]] = {each.id: [] for each in view.aggregators}
    for job in view.jobs:
        if job.iteration_s > 0.0:
            for place in job.cpu_by_place_s():
                if place in found:
                    found[place].append(job.id)
    return {id: jobs for id, jobs in found.items() if jobs}


def unused(view: ClusterView) -> dict[AggregatorId, float]:
    """The usable part of each aggregator less what its jobs use of it, each in its own time."""
    free = {aggregator.id: aggregator.usable for aggregator in view.aggregators}
    shares = {aggregator.id: aggregator.cpu_share for aggregator in view.aggregators}
    for job in view.jobs:
        if job.iteration_s > 0.0:  # An unprofiled job weighs nothing yet.
            for place, cpu_s in job.cpu_by_place_s().items():
                if place in free:
                    free[place] -= cpu_s / shares[place] / job.iteration_s
    return free


def loss_limit(job: JobView, view: ClusterView) -> float:
    """How much of its speed the job may lose: its tenant's limit, else the cluster's."""
    return job.loss_limit or view.loss_limit


def _add(
    loads: dict[str, _Load],
    shares: dict[AggregatorId, float],
    job: JobView,
    view: ClusterView,
) -> None:
    if job.iteration_s <= 0.0:
        return
    stretched_s = job.iteration_s / (1.0 - loss_limit(job, view))
    for place, cpu_s in job.cpu_by_place_s().items():
        load = loads[place]
        load.utilisation += cpu_s / shares.get(place, view.new_share) / stretched_s
        load.jobs.add(job.id)
