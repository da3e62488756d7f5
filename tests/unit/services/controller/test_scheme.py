"""The assignment scheme: the readings' numbers, figure 5, and a slow re-computation that must
agree."""

from dataclasses import dataclass, field, replace
from itertools import product
from math import floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.schemas.base import AggregatorId, JobId
from slackwater.services.controller.policies.scheme import (
    Packing,
    executions,
    loss,
    place_tasks,
    stretched_s,
)
from slackwater.services.controller.policies.view import AggregatorView, ClusterView, JobView

LIMIT = 0.1


def job(
    name: str,
    iteration_s: float,
    tasks_s: list[float],
    places: list[str | None] | None = None,
    excluded: tuple[str, ...] = (),
    servers: int = 2,
) -> JobView:
    return JobView(
        id=JobId(name),
        servers=servers,
        iteration_s=iteration_s,
        task_cpu_s=tuple(tasks_s),
        places=tuple(places or [None] * len(tasks_s)),  # type: ignore[arg-type]
        excluded=frozenset(map(AggregatorId, excluded)),
    )


def view(
    aggregators: dict[str, float], jobs: list[JobView], share: float = 1.0, new_max: int = 99
) -> ClusterView:
    return ClusterView(
        aggregators=tuple(
            AggregatorView(AggregatorId(name), share, usable)
            for name, usable in aggregators.items()
        ),
        jobs=tuple(jobs),
        new_share=share,
        new_max=new_max,
        loss_limit=LIMIT,
    )


def test_a_job_of_5_in_a_cycle_of_12_iterates_at_6_and_loses_17_percent() -> None:
    """Section 3.3.1's example: two executions per cycle of 12, so one every 6."""
    assert stretched_s(12.0, 5.0) == 6.0
    assert executions(12.0, 6.0) == 2
    assert loss(5.0, 6.0) == pytest.approx(1 / 6)
    placed, new = place_tasks(
        view({"a": 1.0}, [job("j1", 5.0, [1.0], ["a"])]), job("j2", 12.0, [3.0])
    )
    assert (placed, new) == ({0: "new#0"}, 1)


@pytest.mark.parametrize(
    ("ratio", "allowed"), [(1.0, True), (1.11, True), (1.12, False), (2.0, True), (2.2, True),
                           (2.23, False), (3.33, True), (3.34, False)],
)  # fmt: skip
def test_loss_stays_below_the_limit_only_close_above_an_integer(
    ratio: float, allowed: bool
) -> None:
    """1 - floor(r) / r is under 10 % only where r is at most 11 % above an integer."""
    assert (loss(1.0, stretched_s(ratio, 1.0)) < LIMIT) == allowed


def test_figure_5_two_jobs_share_a_cycle_of_12() -> None:
    """J1 (6, 2) runs twice in J2's cycle (12, 3): 12 - 2 * 2 - 3 = 5 are left free."""
    j1 = job("j1", 6.0, [2.0], ["a"])
    packing = Packing(view({"a": 1.0}, [j1]))
    assert packing.free_s("a") == (4.0, 6.0)
    estimate = packing.estimate("a", JobId("j2"), 12.0)
    assert (estimate.free_s, estimate.executions, estimate.loss_max) == (8.0, 1, 0.0)
    packing.assign(JobId("j2"), 12.0, 3.0, "a")
    assert packing.free_s("a") == (5.0, 12.0)
    assert packing.durations_s() == {"j1": 6.0, "j2": 12.0}


def test_a_task_needs_its_slots_of_every_execution_in_the_cycle() -> None:
    """The paper's line 17 forgets the factor: a task of 3 that runs four times in a cycle of 12
    with 11 free does not fit, one of 2.7 does."""
    long = job("long", 12.0, [1.0], ["a"])
    assert place_tasks(view({"a": 1.0}, [long]), job("k", 3.0, [3.0]))[0] == {0: "new#0"}
    assert place_tasks(view({"a": 1.0}, [long]), job("k", 3.0, [2.7]))[0] == {0: "a"}


def test_a_job_stretched_elsewhere_still_counts_one_execution() -> None:
    """j iterates at 11 because of b; on a, with a cycle of 10, floor(10 / 11) would count 0."""
    j = job("j", 10.0, [6.0, 1.0], ["a", "b"])
    slow = job("slow", 11.0, [1.0], ["b"])
    packing = Packing(view({"a": 1.0, "b": 1.0}, [j, slow]))
    assert packing.durations_s()["j"] == 11.0
    assert packing.free_s("a") == (4.0, 10.0)


def test_best_fit_takes_the_least_sufficient_and_ties_go_to_the_lowest_id() -> None:
    shared = [job("x", 10.0, [2.0, 5.0, 5.0], ["a", "b", "c"])]
    aggregators = {"c": 1.0, "b": 1.0, "a": 1.0}
    assert place_tasks(view(aggregators, shared), job("k", 10.0, [4.0]))[0] == {0: "b"}
    assert place_tasks(view(aggregators, shared), job("k", 10.0, [6.0]))[0] == {0: "a"}
    excluded = job("k", 10.0, [4.0], excluded=("b",))
    assert place_tasks(view(aggregators, shared), excluded)[0] == {0: "c"}


def test_a_smaller_usable_fraction_spreads_what_best_fit_would_pack() -> None:
    shared = [job("x", 10.0, [3.0], ["a"])]
    assert place_tasks(view({"a": 1.0}, shared), job("k", 10.0, [5.0]))[0] == {0: "a"}
    assert place_tasks(view({"a": 0.67}, shared), job("k", 10.0, [5.0]))[0] == {0: "new#0"}


def test_a_share_of_a_core_stretches_the_slots() -> None:
    """1 CPU second occupies a slot of 10 s where the aggregator has a tenth of a core."""
    assert place_tasks(view({}, [], share=0.1), job("k", 20.0, [1.0, 1.0]))[1] == 1
    assert place_tasks(view({}, [], share=0.1), job("k", 19.0, [1.0, 1.0]))[1] == 2


# The slow, obvious scheme -----------------------------------------------------------------------


@dataclass
class Reference:
    """Every figure from its definition, over a plain list of (job, aggregator, e_t)."""

    limit: float
    iteration_s: dict[str, float]
    usable: dict[str, float]
    tasks: list[tuple[str, str, float]] = field(default_factory=list)

    def cycle(self, n: str) -> float:
        return max((self.iteration_s[j] for j, m, _ in self.tasks if m == n), default=0.0)

    def duration(self, j: str) -> float:
        cycles = [self.cycle(n) for n in {m for i, m, _ in self.tasks if i == j}]
        return max(c / max(1, floor(c / self.iteration_s[j] * (1 + 1e-9))) for c in cycles)

    def executions(self, j: str, n: str) -> int:
        return max(1, floor(self.cycle(n) / self.duration(j) * (1 + 1e-9)))

    def used(self, n: str) -> float:
        return sum(self.executions(j, n) * e for j, m, e in self.tasks if m == n)

    def loss(self, n: str) -> float:
        present = {j for j, m, _ in self.tasks if m == n}
        return max(1 - self.iteration_s[j] / self.duration(j) for j in present)

    def best_fit(self, k: str, e: float, candidates: list[str]) -> str | None:
        best: tuple[float, str] | None = None
        for n in candidates:
            self.tasks.append((k, n, e))
            allowed = self.loss(n) < self.limit - 1e-9
            free = self.usable[n] * self.cycle(n) - self.used(n)
            before = free + self.executions(k, n) * e
            fits = self.executions(k, n) * e * (1 - 1e-9) <= before
            self.tasks.pop()
            if allowed and fits and (best is None or before < best[0] * (1 - 1e-12)):
                best = (before, n)
        return best[1] if best else None

    def place(self, k: str, tasks: list[float], candidates: list[str]) -> dict[int, str]:
        placed = {}
        for t in sorted(range(len(tasks)), key=lambda t: (-tasks[t], t)):
            n = self.best_fit(k, tasks[t], candidates)
            if n is None:
                n = f"new#{sum(c.startswith('new#') for c in candidates)}"
                candidates.append(n)
                self.usable[n] = 1.0
            self.tasks.append((k, n, tasks[t]))
            placed[t] = n
        return placed


def reference(cluster: ClusterView, newcomer: JobView) -> dict[int, str]:
    known = Reference(
        cluster.loss_limit,
        {j.id: j.iteration_s for j in (*cluster.jobs, newcomer)},
        {a.id: a.usable for a in cluster.aggregators},
    )
    for j in cluster.jobs:
        for e, n in zip(j.task_cpu_s, j.places, strict=True):
            assert n is not None
            known.tasks.append((j.id, n, e))
    candidates = sorted(a.id for a in cluster.aggregators if a.id not in newcomer.excluded)
    return known.place(newcomer.id, list(newcomer.task_cpu_s), list(candidates))


# Eighths are exact in binary, so that the two computations cannot part over a last bit.
eighths = st.integers(1, 40).map(lambda n: n / 8)
durations = st.sampled_from([4.0, 5.0, 6.0, 8.0, 8.5, 12.0, 13.0, 24.0])


@st.composite
def clusters(draw: st.DrawFn) -> tuple[ClusterView, JobView]:
    names = [f"a{n}" for n in range(draw(st.integers(0, 4)))]
    cluster = view({n: draw(st.sampled_from([1.0, 0.75])) for n in names}, [])
    for index in range(draw(st.integers(0, 4)) if names else 0):
        tasks = draw(st.lists(eighths, min_size=1, max_size=5))
        arrival = job(f"j{index}", draw(durations), tasks)
        placed, _ = place_tasks(cluster, arrival)
        if any(place.startswith("new#") for place in placed.values()):
            continue
        resident = replace(
            arrival, places=tuple(AggregatorId(placed[t]) for t in range(len(tasks)))
        )
        cluster = replace(cluster, jobs=(*cluster.jobs, resident))
    tasks = draw(st.lists(eighths, min_size=1, max_size=8))
    excluded = tuple(n for n in names if draw(st.booleans()) and draw(st.booleans()))
    return cluster, job("k", draw(durations), tasks, excluded=excluded)


@settings(max_examples=300)
@given(clusters())
def test_the_incremental_scheme_equals_the_obvious_one(case: tuple[ClusterView, JobView]) -> None:
    cluster, newcomer = case
    assert place_tasks(cluster, newcomer)[0] == reference(cluster, newcomer)


@settings(max_examples=200)
@given(clusters())
def test_no_assignment_overfills_a_cycle_or_breaks_the_limit(
    case: tuple[ClusterView, JobView],
) -> None:
    """Except a single task longer than its job's own iteration, on an aggregator of its own."""
    cluster, newcomer = case
    placed, new = place_tasks(cluster, newcomer)
    grown = view(
        {a.id: a.usable for a in cluster.aggregators} | {f"new#{k}": 1.0 for k in range(new)}, []
    )
    packing = Packing(grown)
    for j in cluster.jobs:
        packing.put(j)
    packing.put(replace(newcomer, places=tuple(AggregatorId(placed[t]) for t in sorted(placed))))
    placed_jobs = {j.id: j.cpu_by_place_s() for j in cluster.jobs}
    placed_jobs[newcomer.id] = dict.fromkeys(placed.values(), 0.0)
    for j in (*cluster.jobs, newcomer):
        for name in placed_jobs[j.id]:
            assert loss(j.iteration_s, packing.stretch_s(j.id, name)) < LIMIT
    for aggregator in grown.aggregators:
        free_s, _ = packing.free_s(aggregator.id)
        tasks = [t for t, n in placed.items() if n == aggregator.id]
        alone = aggregator.id.startswith("new#") and len(tasks) == 1
        assert free_s >= -1e-6 or (alone and newcomer.task_cpu_s[tasks[0]] > newcomer.iteration_s)


# The appendix's integer programme on small cases --------------------------------------------------


def aggregators_needed(jobs: list[JobView]) -> int:
    """By brute force: the fewest aggregators that hold all tasks within cycles and loss limit."""
    tasks = [(j.id, e) for j in jobs for e in j.task_cpu_s]
    for count in range(1, len(tasks) + 1):
        names = [f"n{n}" for n in range(count)]
        for places in product(names, repeat=len(tasks)):
            if places[0] != "n0":
                break  # By symmetry the first task may always be on the first.
            known = Reference(LIMIT, {j.id: j.iteration_s for j in jobs}, dict.fromkeys(names, 1.0))
            known.tasks = [(j, n, e) for (j, e), n in zip(tasks, places, strict=True)]
            used = set(places)
            if all(known.used(n) <= known.cycle(n) and known.loss(n) < LIMIT for n in used):
                return count
    raise AssertionError("one aggregator per task always works")


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([4.0, 8.0, 8.5, 12.0]),
            st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0]), min_size=1, max_size=2),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_the_heuristic_is_at_most_one_aggregator_above_the_integer_programme(
    shapes: list[tuple[float, list[float]]],
) -> None:
    cluster = view({}, [])
    jobs = [job(f"j{n}", duration, tasks) for n, (duration, tasks) in enumerate(shapes)]
    for newcomer in jobs:
        placed, new = place_tasks(cluster, newcomer)
        start = len(cluster.aggregators)
        names = {f"new#{k}": f"a{start + k}" for k in range(new)}
        places = tuple(AggregatorId(names.get(placed[t], placed[t])) for t in sorted(placed))
        cluster = replace(
            cluster,
            aggregators=cluster.aggregators
            + tuple(AggregatorView(AggregatorId(name), 1.0) for name in names.values()),
            jobs=(*cluster.jobs, replace(newcomer, places=places)),
        )
    optimum = aggregators_needed(jobs)
    assert optimum <= len(cluster.aggregators) <= optimum + 1
