"""Parts of Harmony's reproduction: cells of simulated runs, and the best grouping."""

from itertools import product
from random import Random

import pytest

from slackwater.common.domains.models.group import Subtasks, weighted
from slackwater.common.domains.models.group import utilization as group_utilization
from slackwater.loadgen.reproduce.harmony import Found, Runs, two_rows
from slackwater.loadgen.reproduce.harmony_cells import best_utilization, cell, greedy_part


def test_isolated_jobs_have_their_machines_to_themselves() -> None:
    found = cell("isolated")
    assert found.jobs == pytest.approx(found.groups)
    assert found.machines == pytest.approx(16.0)
    assert 0.0 < found.cpu < 1.0
    assert 0.0 < found.network < 1.0


def test_jobs_by_turns_use_more_of_both_resources_than_isolated_ones() -> None:
    ours, alone = cell("harmony"), cell("isolated")
    assert ours.jobs > 2 * ours.groups
    assert ours.cpu > 1.3 * alone.cpu
    assert ours.network > 1.3 * alone.network
    assert ours.jct_s < alone.jct_s


def test_memory_bounds_groups_and_turns_help_naive_sets() -> None:
    bounded = cell("harmony", settings=("harmony.memory_gb=32",))
    assert bounded.jobs < cell("harmony").jobs
    naive = cell("naive-colocation")
    ordered = cell("naive-colocation", settings=("naive-colocation.ordered=true",))
    assert ordered.makespan_s < naive.makespan_s


def test_wrong_profiles_change_the_groups_and_not_the_jobs() -> None:
    exact, wrong = cell("harmony"), cell("harmony", settings=("subtasks.error=0.3",))
    assert wrong.jct_s != exact.jct_s
    assert cell("harmony", settings=("subtasks.error=0.0",)) == exact
    alone = cell("isolated", settings=("subtasks.error=0.3",))
    assert alone == cell("isolated")


def test_a_jobs_machines_can_be_chosen() -> None:
    assert cell("isolated", trace="generate:harmony,machines=8").machines == pytest.approx(8.0)
    fewest = cell("isolated", trace="generate:harmony,machines=0").machines
    assert 1.0 < fewest < 16.0


def by_brute_force(jobs: list[Subtasks], machines: int) -> float:
    """Each job in one of the groups or in none, each group with each number of machines."""
    best = 0.0
    for where in product(range(len(jobs) + 1), repeat=len(jobs)):
        groups = [
            [job for job, at in zip(jobs, where, strict=True) if at == which]
            for which in range(1, len(jobs) + 1)
        ]
        groups = [group for group in groups if group]
        for counts in product(range(1, machines + 1), repeat=len(groups)):
            if sum(counts) <= machines:
                used = sum(
                    count * weighted(group_utilization(group, count))
                    for group, count in zip(groups, counts, strict=True)
                )
                best = max(best, used / machines)
    return best


@pytest.mark.parametrize("seed", range(4))
def test_the_best_grouping_is_the_best_of_all(seed: int) -> None:
    rng = Random(seed)
    jobs = [Subtasks(rng.uniform(10, 120), rng.uniform(10, 120), 16) for _ in range(3)]
    assert best_utilization(jobs, 5) == pytest.approx(by_brute_force(jobs, 5))
    assert 0.7 < greedy_part(jobs, 5) <= 1.0 + 1e-9


def test_rows_say_what_was_published_beside_what_was_found() -> None:
    rows = two_rows("x", Found((2.0, 2.2), (1.0, 1.2)), (2.11, 1.60))
    assert [row.met for row in rows] == ["yes", "**no**"]
    assert rows[0].ours == "2.10 (by seed 2.00, 2.20)"


def test_runs_are_made_once() -> None:
    runs = Runs(1)
    assert runs.cells("isolated")[0] is runs.cells("isolated")[0]
    assert runs.speed("isolated").means == (1.0, 1.0)
