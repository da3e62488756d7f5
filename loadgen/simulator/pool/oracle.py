"""The paper's assignment problem, solved exactly: an oracle for small cases (AutoPS, appendix C).

The appendix minimises the largest loss of any job over p_tn (task t is on aggregator n), each task
on one aggregator, none filled beyond its cycle. Cycles, iterations and floors make that non-linear,
but all of them come from few values: a cycle is some job's D, an iteration is that cycle over a
whole number. So each aggregator chooses its cycle and each job its iteration from a list, products
of choices become variables of their own, and what is left is a mixed-integer linear programme for
HiGHS (scipy.optimize.milp). As docs/readings.md says, k_jn is at least 1 and e_t is slot time.

`fewest` asks the question that the heuristic answers: how few aggregators hold all tasks, every
loss below the limit. Ten tasks and four aggregators take it a second or so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from slackwater.common.base.errors import Rejected
from slackwater.services.controller.policies.scheme import executions, loss, stretched_s
from slackwater.services.controller.policies.view import EPSILON

TASKS_MAX = 16


@dataclass(frozen=True, slots=True)
class Job:
    """D_j and the slot times e_t of its tasks."""

    iteration_s: float
    slots_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Optimum:
    """`places` by job, then by task; `loss` is the largest of all jobs."""

    loss: float
    places: tuple[tuple[int, ...], ...]


class _Programme:
    """Variables are numbered as they are named; rows are `low <= sum <= high`."""

    def __init__(self) -> None:
        self.variables: dict[tuple[object, ...], int] = {}
        self.costs: list[float] = []
        self.whole: list[int] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []

    def variable(self, *name: object, cost: float = 0.0, whole: bool = True) -> int:
        index = self.variables.setdefault(name, len(self.costs))
        if index == len(self.costs):
            self.costs.append(cost)
            self.whole.append(int(whole))
        return index

    def row(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        sums: dict[int, float] = {}
        for index, factor in terms:
            sums[index] = sums.get(index, 0.0) + factor
        self._rows.append((sums, low, high))

    def solve(self) -> np.ndarray | None:
        """The variables' values; None: there is no solution."""
        row, column, value = [], [], []
        for number, (sums, _, _) in enumerate(self._rows):
            for index, factor in sums.items():
                row.append(number)
                column.append(index)
                value.append(factor)
        shape = (len(self._rows), len(self.costs))
        found = milp(
            np.array(self.costs),
            integrality=np.array(self.whole),
            bounds=Bounds(0.0, 1.0),
            constraints=LinearConstraint(
                csr_array((value, (row, column)), shape=shape),
                [low for _, low, _ in self._rows],
                [high for _, _, high in self._rows],
            ),
        )
        return None if found.x is None else np.round(found.x, 6)


def least_loss(jobs: Sequence[Job], aggregators: int, limit: float = inf) -> Optimum | None:
    """The appendix's optimum over that many aggregators, of those assignments in which every job
    loses less than `limit`; None: there is none."""
    count = sum(len(job.slots_s) for job in jobs)
    if count > TASKS_MAX:
        raise Rejected(f"{count} tasks; the exact programme is for at most {TASKS_MAX}")
    cycles = sorted({job.iteration_s for job in jobs})
    programme = _Programme()
    worst = programme.variable("worst", cost=1.0, whole=False)
    lists = [
        sorted(
            d
            for d in {stretched_s(c, j.iteration_s) for c in cycles if c >= j.iteration_s}
            if loss(j.iteration_s, d) < limit - EPSILON
        )
        for j in jobs
    ]
    _choices(programme, jobs, aggregators, cycles, lists, worst)
    _iterations(programme, jobs, aggregators, cycles, lists)
    _capacity(programme, jobs, aggregators, cycles, lists)
    values = programme.solve()
    if values is None:
        return None
    where = programme.variables
    return Optimum(
        float(values[worst]),
        tuple(
            tuple(
                next(n for n in range(aggregators) if values[where["p", j, t, n]] > 0.5)
                for t in range(len(job.slots_s))
            )
            for j, job in enumerate(jobs)
        ),
    )


def fewest(jobs: Sequence[Job], limit: float) -> tuple[int, Optimum]:
    """The fewest aggregators on which no job loses `limit`, and the best assignment to them."""
    for aggregators in range(1, sum(len(job.slots_s) for job in jobs) + 1):
        found = least_loss(jobs, aggregators, limit)
        if found is not None:
            return aggregators, found
    raise Rejected("a task is longer than its job's iteration: no number of aggregators holds it")


def _choices(
    programme: _Programme,
    jobs: Sequence[Job],
    aggregators: int,
    cycles: list[float],
    lists: list[list[float]],
    worst: int,
) -> None:
    """Each task on one aggregator, one cycle each (that of its longest job), one iteration a job;
    the objective is the largest loss."""
    variable = programme.variable
    for j, job in enumerate(jobs):
        for t in range(len(job.slots_s)):
            programme.row([(variable("p", j, t, n), 1.0) for n in range(aggregators)], 1.0, 1.0)
            for n in range(aggregators):
                terms = [(variable("z", n, c), 1.0) for c in cycles if c >= job.iteration_s]
                programme.row([*terms, (variable("p", j, t, n), -1.0)], 0.0, inf)
        programme.row([(variable("y", j, d), 1.0) for d in lists[j]], 1.0, 1.0)
        terms = [(variable("y", j, d), -loss(job.iteration_s, d)) for d in lists[j]]
        programme.row([(worst, 1.0), *terms], 0.0, inf)
    for n in range(aggregators):
        programme.row([(variable("z", n, c), 1.0) for c in cycles], 0.0, 1.0)
        for c in cycles:
            present = [
                (variable("p", j, t, n), 1.0)
                for j, job in enumerate(jobs)
                if job.iteration_s == c
                for t in range(len(job.slots_s))
            ]
            programme.row([*present, (variable("z", n, c), -1.0)], 0.0, inf)


def _iterations(
    programme: _Programme,
    jobs: Sequence[Job],
    aggregators: int,
    cycles: list[float],
    lists: list[list[float]],
) -> None:
    """d_j is the longest of C_n / floor(C_n / D_j) over the job's aggregators, no less and no
    more: a longer one would need fewer executions, and nobody may buy room that way."""
    variable = programme.variable
    for j, job in enumerate(jobs):
        reasons: dict[float, list[tuple[int, float]]] = {d: [] for d in lists[j]}
        for n in range(aggregators):
            for c in (c for c in cycles if c >= job.iteration_s):
                d = stretched_s(c, job.iteration_s)
                here = variable("q", j, n, c)  # A task of j is on n, whose cycle is c.
                programme.row([(variable("z", n, c), 1.0), (here, -1.0)], 0.0, inf)
                tasks = [(variable("p", j, t, n), 1.0) for t in range(len(job.slots_s))]
                programme.row([*tasks, (here, -1.0)], 0.0, inf)
                longer = [(variable("y", j, other), 1.0) for other in lists[j] if other >= d]
                for task, _ in tasks:
                    terms = [*longer, (task, -1.0), (variable("z", n, c), -1.0)]
                    programme.row(terms, -1.0, inf)
                if d in reasons:
                    reasons[d].append((here, 1.0))
        for d, terms in reasons.items():
            programme.row([*terms, (variable("y", j, d), -1.0)], 0.0, inf)


def _capacity(
    programme: _Programme,
    jobs: Sequence[Job],
    aggregators: int,
    cycles: list[float],
    lists: list[list[float]],
) -> None:
    """W_n <= C_n, where a task on n counts k times for the cycle of n and the iteration of its
    job: one variable for each such triple, at least what all three together say."""
    variable = programme.variable
    for n in range(aggregators):
        terms = [(variable("z", n, c), c) for c in cycles]
        for j, job in enumerate(jobs):
            for t, slot_s in enumerate(job.slots_s):
                for c in (c for c in cycles if c >= job.iteration_s):
                    for d in lists[j]:
                        both = variable("w", j, t, n, c, d, whole=False)
                        chosen = (
                            (variable("p", j, t, n), -1.0),
                            (variable("z", n, c), -1.0),
                            (variable("y", j, d), -1.0),
                        )
                        programme.row([(both, 1.0), *chosen], -2.0, inf)
                        terms.append((both, -slot_s * executions(c, d)))
        programme.row(terms, -1e-9, inf)
