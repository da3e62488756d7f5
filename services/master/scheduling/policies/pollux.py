"""Pollux: co-adaptive scheduling for goodput (Qiao, thesis, chapter 3; OSDI'21).

At every round the goodput functions that the jobs' agents report are tabulated, and the allocation
matrix with the best FITNESS_p that the search finds is applied (section 3.4.2):

- a job's speedup is relative to its fair share of the cluster; who has reported nothing is
  believed to scale perfectly (section 3.4.1), but a job never grows beyond twice the most GPUs it
  was measured on (`growth`), nor beyond `gpus_max`;
- moving a job costs by its REALLOC_FACTOR, with the delay measured of its application, or else
  `delay_s`; jobs in their protected minute stay where they are;
- `avoid_interference`: at most one distributed job on a machine;
- among jobs that wait for lack of GPUs, who attained least service comes first (fitness does not
  tell them apart). Waiting never preempts by itself: equals would take turns, a restart each.

GPU types: goodput is tabulated per type, by a function of that type's own where the job was
measured on it, at the job's relative speed; a job keeps to one type at a time. `scale`: see
pollux_scaling.

**Restarts of the master.** The last reports are durable facts. A job that waits has no agent that
could report again, and one that runs would count as scaling perfectly until it does. The
population is not: it is a head start of the search, without which it finds another plan as good.
"""

from collections.abc import Mapping, Sequence
from math import floor, inf
from typing import Annotated, Any, Final, Protocol

import msgspec
import numpy as np

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.words import number_of
from slackwater.common.domains.models.fitness import (
    fair_share,
    fitness_of_worth,
    realloc_factor,
    worth,
)
from slackwater.common.domains.models.goodput import BatchLimits, GoodputModel, GoodputProfile
from slackwater.common.domains.models.shared_throughput import SharedThroughput
from slackwater.common.domains.models.throughput import Floats, ThroughputParams
from slackwater.schemas.base import JobId, NodeId
from slackwater.services.master.scheduling.policies import pollux_scaling
from slackwater.services.master.scheduling.policies.pollux_search import (
    POPULATION,
    STEPS,
    Ints,
    Problem,
    search,
)
from slackwater.services.master.scheduling.registry import (
    AtLeast0,
    Count,
    Period,
    Seconds,
    register,
)
from slackwater.services.master.scheduling.rules import Rule
from slackwater.services.master.scheduling.view import (
    NOTHING,
    Allocation,
    JobView,
    Pending,
    Plan,
    View,
)


class AdaptiveProfile(Protocol):
    """The interface that `job.profile` must offer: the agent's last report."""

    @property
    def model(self) -> GoodputModel | None:
        """The goodput function; a new object whenever it changed; None before the first report."""
        ...

    @property
    def gpus_seen(self) -> int:
        """The most GPUs that it was measured on."""
        ...

    def model_on(self, gpu_type: str) -> GoodputModel | None:
        """The goodput function on GPUs of that type, at speed 1 of `JobView.speeds`."""
        ...


class Tabulated(msgspec.Struct, frozen=True):
    """Goodput by type, spread and size, as long as the model and the sizes asked for hold."""

    models: tuple[GoodputModel | None, ...]
    """[T]"""
    sizes: int
    values: Floats
    """[T, 2, K + 1]"""


class Memory(msgspec.Struct):
    """Kept between rounds: the population, and the tables."""

    jobs: tuple[JobId, ...] = ()
    nodes: tuple[NodeId, ...] = ()
    population: Any = None
    tables: dict[JobId, Tabulated] = msgspec.field(default_factory=dict)
    rounds: int = 0
    fitness: float = 0.0
    """The fitness of the last plan."""
    scaling: pollux_scaling.History = msgspec.field(default_factory=pollux_scaling.History)
    reports: dict[JobId, GoodputProfile] = msgspec.field(default_factory=dict)
    """The reports that the last round was decided by, of those that can be kept."""
    facts: "PolluxFacts | None" = None
    """The same as facts, once they were asked for."""


class Report(msgspec.Struct, frozen=True, array_like=True):
    """A job's goodput function, with theta_sys or the form of aggregation for its throughput."""

    throughput: ThroughputParams | None
    noise_scale: float
    initial: int
    total_max: int
    per_gpu_max: int
    per_gpu_min: int
    fixed: int | None
    accumulate_alone: bool
    gpus_seen: int
    shared: SharedThroughput | None = None

    @property
    def profile(self) -> GoodputProfile:
        limits = BatchLimits(
            initial=self.initial, total_max=self.total_max, per_gpu_max=self.per_gpu_max,
            per_gpu_min=self.per_gpu_min, fixed=self.fixed,
            accumulate_alone=self.accumulate_alone,
        )  # fmt: skip
        throughput = self.throughput or self.shared
        assert throughput is not None  # One of both was kept.
        model = GoodputModel(throughput, self.noise_scale, limits)
        return GoodputProfile(model, self.gpus_seen)


class PolluxFacts(msgspec.Struct, frozen=True):
    """Reports by job, of the first `REPORTS_KEPT_MAX` jobs."""

    reports: dict[JobId, Report]


REPORTS_KEPT_MAX: Final = 1000
"""So many fit into a policy's facts, whatever the lengths of ids and numbers."""
Steps = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Growth = Annotated[float, msgspec.Meta(ge=1, le=limits.TRACE_GPUS_MAX)]


@register("pollux")
class Pollux:
    """Jobs get the GPUs, from one to many, with which all make most progress, as they report."""

    elastic = True
    """Jobs may run on any number of GPUs between their bounds."""
    adaptive = True
    """Jobs tune their own batch."""
    divisible = True
    """Unless it scales the cluster: machines are added for all tenants."""
    honours = frozenset[Rule]({"min_run_s", "gpu_types"})

    def __init__(
        self,
        p: float = -1,
        round_s: Period = 60,
        delay_s: Seconds = 30,
        gpus_max: Count = 64,
        growth: Growth = 2,
        avoid_interference: bool = True,
        steps: Steps = STEPS,
        seed: Steps = 0,
        scale: bool = False,
        scale_up: AtLeast0 = 2 / 3,
        scale_to: AtLeast0 = 1 / 2,
        scale_down: AtLeast0 = 0.0,
        scale_nodes_max: Steps = 0,
    ) -> None:
        if not 0 <= scale_down < scale_to < scale_up:
            raise ConfigRejected(
                f"pollux scales down below {scale_down}, to {scale_to}, up above {scale_up}: "
                "give 0 <= scale_down < scale_to < scale_up"
            )
        self.p, self.round_s, self.delay_s = p, round_s, delay_s
        self.gpus_max, self.growth, self.avoid_interference = gpus_max, growth, avoid_interference
        self.steps, self.seed = steps, seed
        self.scale, self.scale_up, self.scale_to = scale, scale_up, scale_to
        self.scale_down, self.scale_nodes_max = scale_down, scale_nodes_max
        self.divisible = not scale

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
        kept: Memory = memory if memory is not None else Memory()
        tick_s = floor(view.now_s / self.round_s) * self.round_s
        next_s = tick_s + self.round_s if view.jobs else inf
        if tick_s != view.now_s:
            return Plan(next_decision_s=next_s), kept
        jobs = [
            _reported(job, kept) for job in sorted(view.jobs.values(), key=lambda job: job.number)
        ]
        if not jobs:
            return Plan(next_decision_s=next_s), Memory(rounds=kept.rounds, scaling=kept.scaling)
        problem, tables = self.problem(view, jobs, kept.tables)
        population = _adapt(kept, problem, jobs, view)
        found = search(problem, population, self.seed * 1_000_003 + kept.rounds, self.steps)
        best = found.best(problem.wait_worth)
        total = float(found.rest[best] + found.waiting[best] * problem.wait_worth)
        matrix = found.population[best]
        desired, scaling = None, kept.scaling
        if self.scale:
            candidates = [
                pollux_scaling.Candidate(
                    tables[job.id].models[0], self._largest(job, self.gpus_max), matrix[j]
                )
                for j, job in enumerate(jobs)
            ]
            desired, scaling = pollux_scaling.desired_nodes(
                view.cluster, candidates, kept.scaling,
                self.scale_down, self.scale_to, self.scale_up, self.scale_nodes_max,
            )  # fmt: skip
        memory = Memory(
            tuple(job.id for job in jobs),
            tuple(node.id for node in view.cluster.nodes),
            found.population,
            tables,
            kept.rounds + 1,
            fitness_of_worth(total, len(jobs), self.p) if len(jobs) else 0.0,
            scaling,
            _kept_reports(jobs),
        )
        return Plan(_changes(jobs, matrix), next_decision_s=next_s, desired_nodes=desired), memory

    # The round in arrays -----------------------------------------------------------------------

    def problem(
        self, view: View, jobs: Sequence[JobView], tables: Mapping[JobId, Tabulated]
    ) -> tuple[Problem, dict[JobId, Tabulated]]:
        """Return the search's input, and the tables to keep for the next round."""
        cluster = view.cluster
        types = cluster.gpu_types
        kinds = {name: index for index, name in enumerate(types)}
        fair_nodes, fair_gpus = fair_share(cluster.gpus, len(jobs), cluster.node_gpus_max)
        sizes = [self._largest(job, cluster.gpus) for job in jobs]
        widest = max(sizes)
        new_tables: dict[JobId, Tabulated] = {}
        moved = np.full((len(jobs), len(types), 2, widest + 1), -inf)
        stay, base = np.zeros(len(jobs)), np.zeros((len(jobs), len(cluster.nodes)), dtype=np.int64)
        for j, (job, most) in enumerate(zip(jobs, sizes, strict=True)):
            table = _tabulate(job, types, max(most, fair_gpus), tables.get(job.id))
            new_tables[job.id] = table
            fair = _fair_goodput(table, view, types, fair_nodes, fair_gpus)
            speedups = table.values[:, :, : most + 1] / fair if fair > 0 else table.values * 0.0
            speedups = speedups[:, :, : most + 1]
            factor = 1.0
            if job.allocation:
                age_s = view.now_s - job.submitted_s
                delay_s = self.delay_s if job.restart_s is None else job.restart_s
                factor = realloc_factor(age_s, job.restarts, delay_s)
                for node, gpus in job.allocation:
                    base[j, node] = gpus
                kind = kinds.get(cluster.nodes[job.allocation[0][0]].gpu_type, 0)
                held = min(job.held_gpus, most)
                spread = 1 if len(job.allocation) > 1 else 0
                stay[j] = worth(speedups[kind, spread, held], self.p)
            terms = worth(speedups * factor, self.p)
            moved[j, :, :, : most + 1] = np.where(speedups > 0, terms, -inf)
        return Problem(
            free=_free(view, jobs),
            types=np.array([kinds.get(n.gpu_type, 0) for n in cluster.nodes], dtype=np.int64),
            worth=moved,
            stay=stay,
            wait=_waiting_order(jobs, view.now_s),
            base=base,
            gpus_min=np.array([job.gpus_min for job in jobs], dtype=np.int64),
            gpus_max=np.array(sizes, dtype=np.int64),
            pinned=np.array([self._pinned(job, view) for job in jobs]),
            wait_worth=float(worth(0.0, self.p)),
            avoid=self.avoid_interference,
        ), new_tables

    def _largest(self, job: JobView, gpus: int) -> int:
        profile = _report(job)
        most = min(job.gpus_max, self.gpus_max, gpus)
        if profile is not None:
            most = min(most, max(1, floor(self.growth * profile.gpus_seen)))
            if profile.model is not None:
                most = min(most, profile.model.limits.gpus_max)
        return max(most, job.held_gpus, job.gpus_min)

    def _pinned(self, job: JobView, view: View) -> bool:
        return view.rules.protects(job, view.now_s)

    # A new process ------------------------------------------------------------------------------

    facts = PolluxFacts

    def durable(self, memory: Memory) -> PolluxFacts:
        if memory.facts is None:
            reports = {id: _fact(profile) for id, profile in memory.reports.items()}
            memory.facts = PolluxFacts(reports)
        return memory.facts

    def restored(self, facts: PolluxFacts) -> Memory:
        return Memory(reports={id: report.profile for id, report in facts.reports.items()})

    def explain(self, view: View, memory: Any) -> list[Pending]:
        tick_s = (floor(view.now_s / self.round_s) + 1) * self.round_s
        free = sum(view.free)
        waiting = [job for job in view.jobs.values() if not job.allocation]
        waiting.sort(key=lambda job: (job.attained_gpu_s(view.now_s), job.number))
        return [
            Pending(
                job.id,
                "round" if free >= job.gpus_min else "capacity",
                f"{number_of(job.gpus_min, 'GPU')}, {free} idle",
                tick_s,
                f"decided at rounds; number {place} of the waiting by attained service",
            )
            for place, job in enumerate(waiting, 1)
        ]


def _report(job: JobView) -> AdaptiveProfile | None:
    """A job whose model knows nothing of goodput counts as one that has not reported yet."""
    return job.profile if hasattr(job.profile, "gpus_seen") else None


def _reported(job: JobView, kept: Memory) -> JobView:
    """The job with the report that is known from before a restart, until it reports again."""
    known = kept.reports.get(job.id)
    profile = _report(job)
    if known is None or profile is None or profile.model is not None:
        return job
    return msgspec.structs.replace(job, profile=known)


def _kept_reports(jobs: Sequence[JobView]) -> dict[JobId, GoodputProfile]:
    kept: dict[JobId, GoodputProfile] = {}
    for job in jobs:
        profile = _report(job)
        if profile is None or (model := profile.model) is None:
            continue
        if isinstance(model.throughput, ThroughputParams | SharedThroughput):
            kept[job.id] = GoodputProfile(model, profile.gpus_seen)
            if len(kept) == REPORTS_KEPT_MAX:
                break
    return kept


def _fact(profile: GoodputProfile) -> Report:
    model = profile.model
    assert model is not None
    theta = model.throughput
    shared = theta if isinstance(theta, SharedThroughput) else None
    limits = model.limits
    return Report(
        theta if isinstance(theta, ThroughputParams) else None, model.noise_scale,
        limits.initial, limits.total_max, limits.per_gpu_max, limits.per_gpu_min, limits.fixed,
        limits.accumulate_alone, profile.gpus_seen, shared,
    )  # fmt: skip


def _tabulate(job: JobView, types: Sequence[str], sizes: int, known: Tabulated | None) -> Tabulated:
    profile = _report(job)
    models = tuple(profile.model_on(name) if profile is not None else None for name in types)
    if (
        known is not None
        and len(known.models) == len(models)
        and all(was is now for was, now in zip(known.models, models, strict=True))
        and known.sizes >= sizes
    ):
        return known
    values = np.zeros((len(types), 2, sizes + 1))
    for index, (name, model) in enumerate(zip(types, models, strict=True)):
        speed = job.speeds.get(name, 0.0) if job.speeds else 1.0
        if speed <= 0:
            continue
        if model is None:
            # Not measured yet: believed to scale perfectly.
            values[index] = np.arange(sizes + 1) * speed
        else:
            values[index] = model.goodput_table(sizes, speed)
    return Tabulated(models, sizes, values)


def _fair_goodput(
    table: Tabulated, view: View, types: Sequence[str], nodes: int, gpus: int
) -> float:
    """Return the goodput of the fair share a_f; where types differ, the average over the cluster's
    GPUs."""
    spread = 1 if nodes > 1 else 0
    fair = table.values[:, spread, gpus]
    if not np.any(fair > 0):
        # More than the job can use: its fair share is the most that it can.
        fair = table.values.max(axis=(1, 2))
    if len(types) == 1:
        return float(fair[0])
    counts = np.array(
        [sum(n.gpus for n in view.cluster.nodes if n.gpu_type == name) for name in types]
    )
    return float(fair @ counts / max(1, counts.sum()))


def _free(view: View, jobs: Sequence[JobView]) -> Ints:
    """GPUs of each machine that are idle or held by these jobs."""
    free = np.array(view.free, dtype=np.int64)
    for job in jobs:
        for node, gpus in job.allocation:
            free[node] += gpus
    return free


def _waiting_order(jobs: Sequence[JobView], now_s: float) -> Floats:
    """Far below any other difference: running jobs would wait last, then least service first."""
    order = sorted(
        range(len(jobs)),
        key=lambda j: (not jobs[j].allocation, jobs[j].attained_gpu_s(now_s), jobs[j].number),
    )
    ties = np.zeros(len(jobs))
    running = sum(1 for job in jobs if job.allocation)
    for place, j in enumerate(order):
        ties[j] = 1e-6 * (max(0, place - running + 1) / len(jobs) - 1.0)
    return ties


def _adapt(kept: Memory, problem: Problem, jobs: Sequence[JobView], view: View) -> Ints:
    """The population for this round: what runs now, and the last round's members on the jobs and
    machines that are still there. A member's job that no longer fits waits."""
    members = np.zeros((POPULATION, *problem.base.shape), dtype=np.int64)
    members[:] = problem.base
    if kept.population is None:
        return members
    old_job = {job_id: index for index, job_id in enumerate(kept.jobs)}
    old_node = {node_id: index for index, node_id in enumerate(kept.nodes)}
    node_map = [
        (new, old_node[node.id])
        for new, node in enumerate(view.cluster.nodes)
        if node.id in old_node
    ]
    new_nodes, old_nodes = ([pair[side] for pair in node_map] for side in (0, 1))
    for m in range(1, POPULATION):
        free = problem.free - problem.base[problem.pinned].sum(axis=0)
        taken = np.zeros(free.size, dtype=bool)
        for j in map(int, np.flatnonzero(problem.pinned)):
            if problem.avoid and np.count_nonzero(problem.base[j]) > 1:
                taken |= problem.base[j] > 0
        for j, job in enumerate(jobs):
            if problem.pinned[j]:
                continue
            row = np.zeros(free.size, dtype=np.int64)
            if job.id in old_job:
                row[new_nodes] = kept.population[m][old_job[job.id]][old_nodes]
            members[m, j] = _allowed(row, j, problem, free, taken)
            free -= members[m, j]
            if problem.avoid and np.count_nonzero(members[m, j]) > 1:
                taken |= members[m, j] > 0
    return members


def _allowed(row: Ints, j: int, problem: Problem, free: Ints, taken: Any) -> Ints:
    size, spread = int(row.sum()), np.count_nonzero(row) > 1
    if (
        size == 0
        or np.any(row > free)
        or not problem.gpus_min[j] <= size <= problem.gpus_max[j]
        or (spread and problem.avoid and np.any(taken[row > 0]))
        or len(set(problem.types[row > 0])) > 1
    ):
        return np.zeros_like(row)
    return row


def _changes(jobs: Sequence[JobView], matrix: Ints) -> dict[JobId, Allocation]:
    changes: dict[JobId, Allocation] = {}
    for job, row in zip(jobs, matrix, strict=True):
        allocation = tuple((int(n), int(row[n])) for n in np.flatnonzero(row)) or NOTHING
        if allocation != job.allocation:
            changes[job.id] = allocation
    return changes
