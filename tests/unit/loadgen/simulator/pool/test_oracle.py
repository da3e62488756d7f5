"""The exact programme against every assignment tried out; the heuristic against the programme."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.simulator.pool.oracle import Job, fewest, least_loss
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


def by_trying(jobs: list[Job], aggregators: int) -> float | None:
    """The least largest loss of all assignments that fit, from the definitions."""
    tasks = [(j, e) for j, job in enumerate(jobs) for e in job.slots_s]
    best: float | None = None
    for places in product(range(aggregators), repeat=len(tasks)):
        cycles = {
            n: max(jobs[j].iteration_s for (j, _), m in zip(tasks, places, strict=True) if m == n)
            for n in set(places)
        }
        durations = [
            max(
                stretched_s(cycles[n], job.iteration_s)
                for (i, _), n in zip(tasks, places, strict=True)
                if i == j
            )
            for j, job in enumerate(jobs)
        ]
        used = dict.fromkeys(cycles, 0.0)
        for (j, e), n in zip(tasks, places, strict=True):
            used[n] += executions(cycles[n], durations[j]) * e
        if all(used[n] <= cycles[n] + 1e-9 for n in used):
            lost = max(loss(job.iteration_s, d) for job, d in zip(jobs, durations, strict=True))
            best = lost if best is None else min(best, lost)
    return best


jobs_of = st.lists(
    st.builds(
        Job,
        st.sampled_from([4.0, 5.0, 8.5, 12.0]),
        st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0]), min_size=1, max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=3,
)


def test_5_and_12_on_one_aggregator_lose_17_percent_and_on_two_nothing() -> None:
    jobs = [Job(5.0, (1.0,)), Job(12.0, (3.0,))]
    one, two = least_loss(jobs, 1), least_loss(jobs, 2)
    assert one is not None
    assert two is not None
    assert one.loss == pytest.approx(1 / 6, abs=1e-5)
    assert two.loss == pytest.approx(0.0, abs=1e-6)
    assert two.places[0] != two.places[1]
    assert fewest(jobs, LIMIT)[0] == 2


def test_what_fits_nowhere_has_no_optimum() -> None:
    assert least_loss([Job(4.0, (3.0, 3.0))], 1) is None
    with pytest.raises(Rejected, match="no number of aggregators"):
        fewest([Job(4.0, (5.0,))], LIMIT)
    with pytest.raises(Rejected, match="at most 16"):
        least_loss([Job(4.0, (0.1,) * 17)], 1)


@settings(max_examples=25)
@given(jobs_of, st.integers(1, 3))
def test_the_programme_finds_what_trying_everything_finds(
    jobs: list[Job], aggregators: int
) -> None:
    found, tried = least_loss(jobs, aggregators), by_trying(jobs, aggregators)
    assert (found is None) == (tried is None)
    if found is not None and tried is not None:
        assert found.loss == pytest.approx(tried, abs=1e-5)


def heuristic(jobs: list[Job]) -> tuple[int, float]:
    """Jobs as they come, by the scheme: (aggregators, the largest loss)."""
    cluster = ClusterView((), (), 1.0, 99, LIMIT)
    for index, job in enumerate(jobs):
        open_ = (None,) * len(job.slots_s)
        newcomer = JobView(JobId(f"j{index}"), 2, job.iteration_s, job.slots_s, open_)
        placed, new = place_tasks(cluster, newcomer)
        names = {f"new#{k}": f"a{len(cluster.aggregators) + k}" for k in range(new)}
        homes = tuple(AggregatorId(names.get(placed[t], placed[t])) for t in sorted(placed))
        fresh = tuple(AggregatorView(AggregatorId(name), 1.0) for name in names.values())
        cluster = replace(
            cluster,
            aggregators=cluster.aggregators + fresh,
            jobs=(*cluster.jobs, replace(newcomer, places=homes)),
        )
    packing = Packing(cluster)
    assert all(packing.free_s(a.id)[0] >= -1e-9 for a in cluster.aggregators)
    durations_s = packing.durations_s()
    losses = [loss(j.iteration_s, durations_s[j.id]) for j in cluster.jobs]
    return len(cluster.aggregators), max(losses)


@settings(max_examples=25)
@given(jobs_of)
def test_the_heuristic_is_feasible_and_never_better_than_the_optimum(jobs: list[Job]) -> None:
    """Under the same constraints: neither with fewer aggregators nor, on as many, with less loss;
    and at most one aggregator above."""
    used, lost = heuristic(jobs)
    least, _ = fewest(jobs, LIMIT)
    assert least <= used <= least + 1
    optimum = least_loss(jobs, used)
    assert optimum is not None
    assert optimum.loss <= lost + 1e-6
    assert lost < LIMIT
