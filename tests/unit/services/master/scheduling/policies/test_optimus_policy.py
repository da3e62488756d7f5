"""Optimus with an oracle: greedy marginal gains against every split of the GPUs."""

from itertools import product

import msgspec
import pytest

from slackwater.common.base.errors import Rejected
from slackwater.schemas.base import JobId, NodeId
from slackwater.services.master.scheduling.policies.optimus import Optimus
from slackwater.services.master.scheduling.validation import validate
from slackwater.services.master.scheduling.view import (
    Allocation,
    ClusterView,
    JobView,
    NodeView,
    View,
)


class Oracle(msgspec.Struct):
    """Amdahl's law: `serial` of an iteration does not scale."""

    remaining_iterations: float
    serial: float = 0.0

    def iteration_s(self, gpus: int) -> float:
        return self.serial + (1 - self.serial) / gpus


def job(number: int, oracle: Oracle | None, allocation: Allocation = (), most: int = 8) -> JobView:
    return JobView(
        id=JobId(f"j{number}"), number=number, submitted_s=0.0, gpus=1, gpus_min=1, gpus_max=most,
        allocation=allocation, profile=oracle,
    )  # fmt: skip


def view(jobs: list[JobView], sizes: list[int], now_s: float = 60.0) -> View:
    free = list(sizes)
    for each in jobs:
        for node, gpus in each.allocation:
            free[node] -= gpus
    nodes = tuple(NodeView(i, NodeId(f"n{i}"), gpus) for i, gpus in enumerate(sizes))
    cluster = ClusterView(nodes, sum(sizes), node_gpus_max=max(sizes))
    return View(now_s, cluster, {each.id: each for each in jobs}, free)


def sizes_of(plan: object, jobs: list[JobView]) -> list[int]:
    allocations = plan.allocations  # type: ignore[attr-defined]  # A Plan.
    return [sum(g for _, g in allocations.get(j.id, j.allocation)) for j in jobs]


@pytest.mark.parametrize(
    "oracles",
    [
        [Oracle(100), Oracle(100), Oracle(100)],
        [Oracle(1000), Oracle(10, 0.5), Oracle(100, 0.1)],
        [Oracle(50, 0.9), Oracle(70, 0.2), Oracle(400, 0.05)],
    ],
)
def test_sizes_minimise_the_sum_of_remaining_times(oracles: list[Oracle]) -> None:
    """Iteration times are convex, so the greedy gains end at the best of all splits."""
    jobs = [job(n, oracle) for n, oracle in enumerate(oracles)]
    plan, _ = Optimus().allocate(view(jobs, [4, 4]), None)

    def total(sizes: tuple[int, ...]) -> float:
        return sum(
            o.iteration_s(k) * o.remaining_iterations for o, k in zip(oracles, sizes, strict=True)
        )

    best = min(total(s) for s in product(range(1, 9), repeat=3) if sum(s) <= 8)
    assert total(tuple(sizes_of(plan, jobs))) == pytest.approx(best)


def test_who_came_first_gets_the_one_gpu() -> None:
    jobs = [job(n, Oracle(100)) for n in range(3)]
    plan, _ = Optimus().allocate(view(jobs, [2]), None)
    assert sizes_of(plan, jobs) == [1, 1, 0]
    reasons = Optimus().explain(view([jobs[2]], [0, 0]), None)
    assert [(r.job, r.rule, r.until_s) for r in reasons] == [(JobId("j2"), "capacity", 120.0)]


def test_whose_size_stays_keeps_its_gpus() -> None:
    jobs = [job(0, Oracle(100), ((0, 2),), most=2), job(1, Oracle(100), most=4)]
    plan, _ = Optimus().allocate(view(jobs, [4, 4]), None)
    assert plan.allocations == {JobId("j1"): ((1, 4),)}


def test_large_jobs_take_the_emptiest_machines() -> None:
    jobs = [job(0, Oracle(1.0), most=1), job(1, Oracle(1e6), most=7)]
    now = view(jobs, [4, 4])
    plan, _ = Optimus().allocate(now, None)
    validate(plan, now)
    assert plan.allocations == {JobId("j0"): ((0, 1),), JobId("j1"): ((0, 3), (1, 4))}


def test_a_gpu_that_saves_nothing_stays_idle() -> None:
    plan, _ = Optimus().allocate(view([job(0, Oracle(100, 1.0))], [4]), None)
    assert plan.allocations == {JobId("j0"): ((0, 1),)}


def test_between_rounds_nothing_happens() -> None:
    plan, memory = Optimus().allocate(view([job(0, Oracle(1))], [4], now_s=61.0), None)
    assert (plan.allocations, plan.next_decision_s) == ({}, 120.0)
    assert memory is not None


def test_without_an_oracle_it_refuses() -> None:
    with pytest.raises(Rejected, match="job j0"):
        Optimus().allocate(view([job(0, None)], [4]), None)
