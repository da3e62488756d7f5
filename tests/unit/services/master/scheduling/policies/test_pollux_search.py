"""Pollux's search against every allocation there is, and its rules at every size."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.domains.models.fitness import worth
from slackwater.services.master.scheduling.policies.pollux_search import POPULATION, Problem, search


def make_problem(
    rng: np.random.Generator, jobs: int, sizes: list[int], *, p: float = -1.0, avoid: bool = True,
    kinds: int = 1, with_base: bool = True,
) -> Problem:  # fmt: skip
    """Random concave speedups; some jobs run already on a random allocation that is allowed."""
    free = np.array(sizes)
    types = np.arange(len(sizes)) % kinds
    most = max(1, int(free.sum()))
    terms = np.full((jobs, kinds, 2, most + 1), -np.inf)
    stay = np.zeros(jobs)
    base = np.zeros((jobs, len(sizes)), dtype=np.int64)
    left, owner = free.copy(), np.full(len(sizes), -1)
    for j in range(jobs):
        scale = np.repeat(rng.uniform(0.2, 1.0, (kinds, 1, 1)), 2, axis=1)
        scale[:, 1] *= rng.uniform(0.4, 1.0)
        speedups = scale * np.arange(most + 1) ** rng.uniform(0.3, 1.0)
        terms[j] = np.where(speedups > 0, worth(speedups * rng.uniform(0.5, 1.0), p), -np.inf)
        terms[j, :, 1, 1] = -np.inf
        if with_base and rng.random() < 0.6:
            kind = int(rng.integers(kinds))
            row = np.where(types == kind, rng.integers(0, 3, len(sizes)), 0)
            row *= rng.random(len(sizes)) < 0.5
            row = np.minimum(row, left)
            spread = np.count_nonzero(row) > 1
            if row.sum() and not (avoid and spread and np.any(owner[row > 0] >= 0)):
                base[j], left = row, left - row
                if spread:
                    owner[row > 0] = j
                stay[j] = float(worth(speedups[kind, int(spread), row.sum()], p))
    return Problem(
        free=free, types=types, worth=terms, stay=stay, wait=np.zeros(jobs), base=base,
        gpus_min=np.ones(jobs, dtype=np.int64), gpus_max=np.full(jobs, most),
        pinned=np.zeros(jobs, dtype=np.bool_), wait_worth=float(worth(0.0, p)), avoid=avoid,
    )  # fmt: skip


def start(problem: Problem) -> np.ndarray:
    return np.repeat(problem.base[None], POPULATION, axis=0)


def terms_of(problem: Problem, matrix: np.ndarray) -> tuple[int, float]:
    """Slow and obvious: (waiting jobs, the others' terms), or -inf if a rule is broken."""
    waiting, rest = 0, 0.0
    distributed = np.zeros(matrix.shape[1], dtype=int)
    if np.any(matrix.sum(axis=0) > problem.free):
        return 0, -np.inf
    for j, row in enumerate(matrix):
        used = np.flatnonzero(row)
        if not used.size:
            waiting += 1
            rest += problem.wait[j]
            continue
        if not problem.gpus_min[j] <= row.sum() <= problem.gpus_max[j]:
            return 0, -np.inf
        if len(set(problem.types[used])) > 1:
            return 0, -np.inf
        if used.size > 1:
            distributed[used] += 1
        if np.array_equal(row, problem.base[j]):
            rest += problem.stay[j]
        else:
            rest += problem.worth[j, problem.types[used[0]], int(used.size > 1), row.sum()]
    if problem.avoid and np.any(distributed > 1):
        return 0, -np.inf
    return waiting, rest


def best_of_all(problem: Problem) -> float:
    rows = list(product(*(range(n + 1) for n in problem.free)))
    best = -np.inf
    for choice in product(rows, repeat=len(problem.base)):
        matrix = np.array(choice)
        if np.all(matrix.sum(axis=0) <= problem.free):
            waiting, rest = terms_of(problem, matrix)
            best = max(best, rest + waiting * problem.wait_worth)
    return best


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("avoid", [True, False])
def test_small_cases_are_solved_to_optimality(seed: int, avoid: bool) -> None:
    """Three jobs on two machines of three GPUs: the best of all 4,096 matrices is found."""
    rng = np.random.default_rng(seed)
    p = (-1.0, 0.0, 1.0)[seed % 3]
    problem = make_problem(rng, 3, [3, 3], p=p, avoid=avoid, kinds=1 + seed % 2)
    found = search(problem, start(problem), seed)
    best = found.best(problem.wait_worth)
    waiting, rest = terms_of(problem, found.population[best])
    assert (waiting, rest) == (found.waiting[best], pytest.approx(found.rest[best]))
    assert rest + waiting * problem.wait_worth == pytest.approx(best_of_all(problem), rel=1e-9)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    jobs=st.integers(1, 30),
    sizes=st.lists(st.integers(0, 8), min_size=1, max_size=8),
    p=st.sampled_from([-10.0, -1.0, 0.0, 1.0]),
    avoid=st.booleans(),
    kinds=st.integers(1, 2),
)
def test_every_member_keeps_the_rules_and_its_accounts(
    seed: int, jobs: int, sizes: list[int], p: float, avoid: bool, kinds: int
) -> None:
    """Capacity, one type a job, at most one distributed job a machine; sums are what they claim."""
    rng = np.random.default_rng(seed)
    problem = make_problem(rng, jobs, sizes, p=p, avoid=avoid, kinds=kinds)
    found = search(problem, start(problem), seed, steps=50)
    before = terms_of(problem, problem.base)
    for matrix, waiting, rest in zip(found.population, found.waiting, found.rest, strict=True):
        counted = terms_of(problem, matrix)
        assert counted[0] == waiting
        assert counted[1] == pytest.approx(rest, rel=1e-6, abs=1e-6)
        then, now = (r + w * problem.wait_worth for w, r in (before, (waiting, rest)))
        assert now >= then - 1e-9 * (1 + abs(then))
        assert waiting <= before[0] or p >= 0


def test_the_same_seed_gives_the_same_population() -> None:
    problem = make_problem(np.random.default_rng(1), 20, [4] * 6)
    one, two = (search(problem, start(problem), 7).population for _ in range(2))
    assert np.array_equal(one, two)


def test_pinned_jobs_stay_where_they_are() -> None:
    problem = make_problem(np.random.default_rng(6), 12, [8] * 4)
    running = problem.base.sum(axis=1) > 0
    assert running.sum() >= 2
    pinned = problem._replace(pinned=running)
    for matrix in search(pinned, start(pinned), 3).population:
        assert np.array_equal(matrix[running], problem.base[running])


def test_gangs_are_whole() -> None:
    """A job of exactly three GPUs never gets one, two or four."""
    problem = make_problem(np.random.default_rng(2), 6, [4, 4], with_base=False)
    sizes = np.full(6, 3)
    rigid = problem._replace(gpus_min=sizes, gpus_max=sizes)
    for matrix in search(rigid, start(rigid), 3).population:
        assert set(matrix.sum(axis=1)) <= {0, 3}
        assert (matrix.sum(axis=1) == 3).sum() == 2


def test_waiting_does_not_swamp_the_rest() -> None:
    """With p = -10 a waiting job weighs 10^30; who runs is still arranged well."""
    rng = np.random.default_rng(11)
    problem = make_problem(rng, 6, [2, 2], p=-10.0, with_base=False)
    found = search(problem, start(problem), 1)
    best = found.best(problem.wait_worth)
    assert found.waiting[best] == 2
    # Each runs on one GPU, so the best four terms are the optimum.
    singles = np.sort(problem.worth[:, 0, 0, 1])[-4:]
    assert found.rest[best] == pytest.approx(singles.sum())


def test_an_empty_queue_and_an_empty_cluster() -> None:
    nobody = make_problem(np.random.default_rng(0), 0, [4])
    assert search(nobody, start(nobody), 0).population.shape == (POPULATION, 0, 1)
    nowhere = make_problem(np.random.default_rng(0), 3, [0, 0])
    assert search(nowhere, start(nowhere), 0).waiting.tolist() == [3] * POPULATION
