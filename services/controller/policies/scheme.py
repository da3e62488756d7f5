"""The paper's assignment scheme (AutoPS section 3.3.1, Pseudocode 1), read as in docs/readings.md.

An aggregator n repeats an execution cycle C_n, the longest profiled iteration D_j of its jobs. A
job on it iterates at d_j = C_n / floor(C_n / D_j), the maximum over its aggregators, and has
k_jn = max(1, floor(C_n / d_j)) executions of each of its tasks per cycle. What is left free is
F_n = usable * C_n - sum_j k_jn * sum_i e_i, without the new task, which fits if F_n >= k_kn * e_t.
e_t is slot time: profiled CPU time / cpu_share. A job loses 1 - D_j / d_j; an aggregator where any
job, the new one included, would lose LossLimit or more is not a candidate. Best fit: the least
sufficient free slots; ties to the lowest id.

Tasks are assigned largest first: the paper goes "task by task" in no stated order, and a tensor is
indivisible (fc6 is 72 % of VGG19), so small ones first would fill the only gaps it fits into. An
estimate stays valid until an assignment changes a cycle or an iteration on its aggregator, and the
valid ones stand on shelves ordered by what is free, so that placing a job costs one estimate per
aggregator of its cluster and then one search per task.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import floor

from slackwater.schemas.base import AggregatorId, JobId
from slackwater.services.controller.policies.view import (
    EPSILON,
    NEW,
    AggregatorView,
    ClusterView,
    JobView,
    loss_limit,
)


def repetitions(cycle_s: float, duration_s: float) -> int:
    """floor(C / D), forgiving the last bits of measured floats."""
    return floor(cycle_s / duration_s * (1.0 + EPSILON))


def stretched_s(cycle_s: float, iteration_s: float) -> float:
    """d_j on one aggregator: C_n / floor(C_n / D_j). C=12, D=5 gives 6."""
    return cycle_s / max(1, repetitions(cycle_s, iteration_s))


def executions(cycle_s: float, duration_s: float) -> int:
    """k_jn: without the 1, a job stretched elsewhere would count no slots and overfill n."""
    return max(1, repetitions(cycle_s, duration_s))


def loss(iteration_s: float, duration_s: float) -> float:
    """The share of its speed that a job loses when an iteration lasts `duration_s`."""
    return (duration_s - iteration_s) / duration_s


@dataclass(slots=True)
class _Job:
    iteration_s: float
    stretches: dict[str, float] = field(default_factory=dict)
    """Per aggregator, C_n / floor(C_n / D_j)."""

    def duration_s(self) -> float:
        return max(self.stretches.values(), default=self.iteration_s)

    def duration_with_s(self, aggregator: str, cycle_s: float) -> float:
        """d_j if that aggregator's cycle were `cycle_s`."""
        here = stretched_s(cycle_s, self.iteration_s)
        for other, stretch_s in self.stretches.items():
            if stretch_s > here and other != aggregator:
                here = stretch_s
        return here


@dataclass(slots=True)
class _Aggregator:
    cpu_share: float
    usable: float
    cycle_s: float = 0.0
    slots_s: dict[JobId, float] = field(default_factory=dict)
    """Per job, the sum of its tasks' slot times here."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The scheme's estimate of one aggregator for a task of job k (lines 2 to 9)."""

    free_s: float
    executions: int
    loss_max: float
    excess_max: float
    """The largest loss of all jobs there above (or, negative, below) its own limit."""
    duration_s: float
    """d_k with the task there."""


class Packing:
    """The aggregators' cycles and free slots while one job is being assigned."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._loss_limits: dict[JobId, float] = {}
        self._aggregators: dict[str, _Aggregator] = {}
        self._jobs: dict[JobId, _Job] = {}
        for aggregator in view.aggregators:
            self.add(aggregator)
        for job in view.jobs:
            self.put(job)

    def add(self, aggregator: AggregatorView) -> None:
        self._aggregators[aggregator.id] = _Aggregator(aggregator.cpu_share, aggregator.usable)

    def put(self, job: JobView) -> None:
        """Count a job's tasks where they already are. An unprofiled job weighs nothing yet."""
        self._loss_limits[job.id] = loss_limit(job, self._view)
        if not job.task_cpu_s or job.iteration_s <= 0.0:
            return
        for name, sum_s in job.cpu_by_place_s().items():
            if name in self._aggregators:
                self.assign(job.id, job.iteration_s, sum_s, name)

    def estimate(self, aggregator: str, job: JobId, iteration_s: float) -> Estimate:
        """Lines 2 to 9 for one aggregator."""
        target = self._aggregators[aggregator]
        cycle_s = max(target.cycle_s, iteration_s)
        newcomer = self._jobs.get(job) or _Job(iteration_s)
        duration_s = newcomer.duration_with_s(aggregator, cycle_s)
        loss_max = loss(iteration_s, duration_s)
        excess_max = loss_max - self.limit(job)
        used_s = 0.0
        for other, slots_s in target.slots_s.items():
            if other == job:
                used_s += executions(cycle_s, duration_s) * slots_s
                continue
            neighbour = self._jobs[other]
            stretched = neighbour.duration_with_s(aggregator, cycle_s)
            lost = loss(neighbour.iteration_s, stretched)
            loss_max = max(loss_max, lost)
            excess_max = max(excess_max, lost - self.limit(other))
            used_s += executions(cycle_s, stretched) * slots_s
        return Estimate(
            free_s=target.usable * cycle_s - used_s,
            executions=executions(cycle_s, duration_s),
            loss_max=loss_max,
            excess_max=excess_max,
            duration_s=duration_s,
        )

    def assign(self, job: JobId, iteration_s: float, cpu_s: float, aggregator: str) -> set[str]:
        """Count one task there: the aggregators whose jobs' iterations that changed. Those where
        only this job's d_j now ends elsewhere are not among them."""
        target = self._aggregators[aggregator]
        entry = self._jobs.setdefault(job, _Job(iteration_s))
        first = job not in target.slots_s
        target.slots_s[job] = target.slots_s.get(job, 0.0) + cpu_s / target.cpu_share
        stale = {aggregator}
        if not first:
            return stale
        if iteration_s > target.cycle_s:
            target.cycle_s = iteration_s
            for present in target.slots_s:
                neighbour = self._jobs[present]
                stretch_s = stretched_s(iteration_s, neighbour.iteration_s)
                if present != job and stretch_s != neighbour.stretches[aggregator]:
                    neighbour.stretches[aggregator] = stretch_s
                    stale.update(neighbour.stretches)
        entry.stretches[aggregator] = stretched_s(target.cycle_s, iteration_s)
        return stale

    def stretch_s(self, job: JobId, aggregator: str) -> float:
        """Return the length of the job's iteration that follows from that aggregator's cycle
        alone."""
        return self._jobs[job].stretches[aggregator]

    def free_s(self, aggregator: str) -> tuple[float, float]:
        """(F_n, C_n) as assigned; C_n is 0 for an empty one."""
        target = self._aggregators[aggregator]
        used_s = sum(
            executions(target.cycle_s, self._jobs[job].duration_s()) * slots_s
            for job, slots_s in target.slots_s.items()
        )
        return target.usable * target.cycle_s - used_s, target.cycle_s

    def lasting_s(self, job: JobId, aggregator: str) -> float:
        """Return the part of the job's iteration that aggregator alone requires: its cycle, or,
        where the job that made it longer has ended, the job's own slots there."""
        return max(self.stretch_s(job, aggregator), self._aggregators[aggregator].slots_s[job])

    def leavers(self, aggregator: str) -> dict[JobId, float]:
        """The jobs there of which each, if it left, would leave nobody whom that aggregator makes
        lose more than its limit, and its slot time there."""
        slots_s = self._aggregators[aggregator].slots_s
        found: dict[JobId, float] = {}
        for leaving in slots_s:
            stay = {job: self._jobs[job].iteration_s for job in slots_s if job != leaving}
            cycle_s = max(stay.values(), default=0.0)
            if all(
                loss(each_s, max(stretched_s(cycle_s, each_s), slots_s[job])) <= self.limit(job)
                for job, each_s in stay.items()
            ):
                found[leaving] = slots_s[leaving]
        return found

    def durations_s(self) -> dict[JobId, float]:
        """d_j of every job, with its own slots."""
        found = {job: entry.iteration_s for job, entry in self._jobs.items()}
        for name, aggregator in self._aggregators.items():
            for job in aggregator.slots_s:
                found[job] = max(found[job], self.lasting_s(job, name))
        return found

    def standalone_s(self, job: JobId) -> float:
        """D_j."""
        return self._jobs[job].iteration_s

    def uses(self, job: JobId, aggregator: str) -> bool:
        return job in self._aggregators[aggregator].slots_s

    def qualifies(self, estimate: Estimate) -> bool:
        """Line 6 tests every job; a loss equal to the limit is out, as printed."""
        return estimate.excess_max < -EPSILON

    def limit(self, job: JobId) -> float:
        """How much of its speed it may lose."""
        return self._loss_limits.get(job, self._view.loss_limit)


class _Shelves:
    """The qualified estimates: one shelf per (executions, cpu_share), since these decide how many
    slots a task needs; on each the aggregators by what is free, then by rank."""

    def __init__(self) -> None:
        self._shelves: dict[tuple[int, float], list[tuple[float, int]]] = {}
        self._at: dict[int, tuple[tuple[int, float], Estimate]] = {}
        self._durations_s: list[tuple[float, int]] = []
        """(d_k there, rank), in order."""

    def put(self, rank: int, cpu_share: float, estimate: Estimate) -> None:
        key = (estimate.executions, cpu_share)
        insort(self._shelves.setdefault(key, []), (estimate.free_s, rank))
        insort(self._durations_s, (estimate.duration_s, rank))
        self._at[rank] = (key, estimate)

    def take(self, rank: int) -> None:
        """Take the rank out, if it is there."""
        entry = self._at.pop(rank, None)
        if entry is not None:
            key, estimate = entry
            shelf = self._shelves[key]
            del shelf[bisect_left(shelf, (estimate.free_s, rank))]
            of = self._durations_s
            del of[bisect_left(of, (estimate.duration_s, rank))]

    def shorter_than(self, duration_s: float) -> list[int]:
        of = self._durations_s
        return [rank for _, rank in of[: bisect_left(of, (duration_s, -1))]]

    def best_fit(self, cpu_s: float) -> int | None:
        """Lines 16 to 21: the rank of the least sufficient; ties to the lowest."""
        best: tuple[float, int] | None = None
        for (count, cpu_share), shelf in self._shelves.items():
            needed_s = count * cpu_s / cpu_share * (1.0 - EPSILON)
            index = bisect_left(shelf, (needed_s, -1))
            if index < len(shelf) and (best is None or shelf[index] < best):
                best = shelf[index]
        return None if best is None else best[1]


def place_tasks(view: ClusterView, job: JobView) -> tuple[dict[int, str], int]:
    """Pseudocode 1 for every open bucket of a profiled job: (bucket -> aggregator, how many new
    ones). `new_max` is not enforced here: the caller judges the number."""
    packing = Packing(view)
    packing.put(job)
    open_buckets = [bucket for bucket, place in enumerate(job.places) if place is None]
    open_buckets.sort(key=lambda bucket: (-job.task_cpu_s[bucket], bucket))
    welcome = [a for a in view.aggregators if a.id not in job.excluded]
    welcome.sort(key=lambda a: a.id)
    names: list[str] = [a.id for a in welcome]  # By rank: in the order of ids, then the new ones.
    shares = [a.cpu_share for a in welcome]
    ranks = {name: rank for rank, name in enumerate(names)}
    shelves = _Shelves()

    def look_again(stale: Iterable[int]) -> None:
        for rank in stale:
            shelves.take(rank)
            estimate = packing.estimate(names[rank], job.id, job.iteration_s)
            if packing.qualifies(estimate):
                shelves.put(rank, shares[rank], estimate)

    look_again(range(len(names)))
    placed: dict[int, str] = {}
    new = 0
    for bucket in open_buckets:
        cpu_s = job.task_cpu_s[bucket]
        rank = shelves.best_fit(cpu_s)
        if rank is None:
            rank = len(names)
            names.append(f"{NEW}{new}")
            shares.append(view.new_share)
            ranks[names[rank]] = rank
            new += 1
            packing.add(AggregatorView(AggregatorId(names[rank]), view.new_share))
        placed[bucket] = names[rank]
        changed = packing.assign(job.id, job.iteration_s, cpu_s, names[rank])
        stale = {ranks[name] for name in changed if name in ranks}
        stale.update(shelves.shorter_than(packing.stretch_s(job.id, names[rank])))
        look_again(stale)
    return placed, new
