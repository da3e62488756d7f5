"""Harmony's grouping: the worked numbers, brute force, and whole runs on the subtasks model."""

from collections.abc import Sequence
from math import inf
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.submissions import changed, submission

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.group import Subtasks, weighted
from slackwater.common.domains.models.group import utilization as group_utilization
from slackwater.loadgen.generate import generate
from slackwater.loadgen.simulator.gpu.audit import audit
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Costs, Engine, Result, Settings
from slackwater.loadgen.simulator.gpu.eventlog import event_log
from slackwater.loadgen.simulator.gpu.failures import Failures
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.simulator.gpu.jobmodels.subtasks import SubtasksModel
from slackwater.loadgen.simulator.gpu.workload import Submission, workload
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.harmony import Group, Harmony
from slackwater.services.master.scheduling.policies.harmony_grouping import (
    Grouping,
    Jobs,
    assign,
    group_count,
    schedule,
    share_machines,
    utilization,
)
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.view import JobView

FIVE = [Subtasks(c, n, 4) for c, n in ((6.0, 2.0), (2.0, 6.0), (3.0, 3.0), (8.0, 1.0), (1.0, 4.0))]

profiles = st.lists(
    st.builds(Subtasks, st.floats(1, 120), st.floats(1, 120), st.integers(1, 32)),
    min_size=1,
    max_size=14,
)


def test_the_worked_jobs_go_best_into_one_group() -> None:
    jobs = Jobs(FIVE)
    sums = [float(abs(jobs.work / 8 * n - jobs.network_s).sum()) for n in range(1, 6)]
    assert sums == pytest.approx([14, 18, 25, 32, 39])
    assert group_count(jobs, 5, 8) == 1


def test_a_group_has_as_many_machines_as_hold_its_data() -> None:
    jobs = [msgspec.structs.replace(job, nbytes=100.0) for job in FIVE]
    free = schedule(jobs, 8)
    bound = schedule(jobs, 8, memory_bytes=60.0)
    for groups, counts in ((bound.groups, bound.machines),):
        assert groups
        for group, count in zip(groups, counts, strict=True):
            assert 100.0 * len(group) <= 60.0 * count
    assert bound.utilization <= free.utilization
    assert sum(map(len, bound.groups)) <= 4
    assert schedule(jobs, 8, memory_bytes=1.0) == Grouping([], [], 0.0)


def waiting_job(number: int, profile: Subtasks) -> JobView:
    return JobView(
        id=JobId(f"j{number}"), number=number, submitted_s=0.0, gpus=1, gpus_min=1, gpus_max=9,
        profile=profile,
    )  # fmt: skip


def test_a_bunch_takes_the_place_of_a_finished_job() -> None:
    """Three jobs that together are like it, judged on the machines of its group, which are not
    those of its profile."""
    policy = Harmony()
    gone = Subtasks(12.0, 3.0, 2)
    thirds = [waiting_job(number, Subtasks(8.0, 1.0, 1)) for number in range(1, 5)]
    group = Group("harmony-0", [], 4)
    assert policy._like(gone, thirds, group) == thirds[:3]
    assert policy._like(Subtasks(12.0, 9.0, 2), thirds, group) == []


def test_the_worked_jobs_in_two_groups() -> None:
    jobs = Jobs(FIVE)
    groups = assign(jobs, 5, 2, 8)
    assert share_machines(jobs, groups, 8) == [3, 5]


@given(jobs=profiles, machines=st.integers(1, 40))
def test_the_number_of_groups_is_the_best_of_all(jobs: list[Subtasks], machines: int) -> None:
    arrays = Jobs(jobs)

    def off(n: int) -> float:
        return sum(abs(j.cpu_on_s(machines / n) - j.network_s) for j in jobs)

    found = group_count(arrays, len(jobs), machines)
    best = min(range(1, min(len(jobs), machines) + 1), key=off)
    assert off(found) == pytest.approx(off(best), rel=1e-9)


def cluster_utilization(
    groups: Sequence[tuple[Sequence[Subtasks], int]], machines: int
) -> tuple[float, float]:
    """Eq. 4.4 by the letter: (CPU, network) of all `machines`; those in no group are idle."""
    used = [(count, group_utilization(jobs, count)) for jobs, count in groups]
    cpu, network = (sum(count * part[i] for count, part in used) / machines for i in range(2))
    return cpu, network


@given(jobs=profiles, machines=st.integers(1, 40), groups=st.integers(1, 14))
def test_everybody_is_in_one_group_and_every_machine_used(
    jobs: list[Subtasks], machines: int, groups: int
) -> None:
    groups = min(groups, len(jobs), machines)
    arrays = Jobs(jobs)
    found = assign(arrays, len(jobs), groups, machines)
    assert sorted(j for group in found for j in group) == list(range(len(jobs)))
    assert all(len(group) >= len(jobs) // groups for group in found)
    shares = share_machines(arrays, found, machines)
    assert sum(shares) == machines
    assert min(shares) >= 1
    model = cluster_utilization(
        [([jobs[j] for j in group], m) for group, m in zip(found, shares, strict=True)], machines
    )
    used = utilization(arrays, found, shares, machines, (0.7, 0.3))
    assert used == pytest.approx(weighted(model))


@settings(max_examples=30)
@given(jobs=profiles, machines=st.integers(1, 40))
def test_the_schedule_is_no_worse_than_everybody_together(
    jobs: list[Subtasks], machines: int
) -> None:
    found = schedule(jobs, machines, fewer_jobs=0.0)
    together = cluster_utilization([(jobs, machines)], machines)
    untuned = schedule(jobs, machines, fewer_jobs=0.0, tune=False)
    assert found.utilization >= untuned.utilization - 1e-12
    assert found.utilization <= 1 + 1e-9
    if group_count(Jobs(jobs), len(jobs), machines) == 1:
        assert found.utilization >= weighted(together) - 1e-9


def sim_jobs(count: int, seed: int, gpus: int = 16, mean_gap_s: float = 0.0) -> list[Submission]:
    rows = generate("harmony", seed, mean_gap_s=mean_gap_s)[:count]
    jobs = workload(rows, whole_seconds=False)
    return [changed(job, gpus_min=1, gpus_max=gpus) for job in jobs]


def run(
    name: str, jobs: list[Submission], nodes: list[tuple[int, str]], world: Settings = Settings(),  # noqa: B008
    **options: str,
) -> Result:  # fmt: skip
    return Engine(jobs, Cluster(nodes), make(name, options), SubtasksModel(), world).run()


WORLDS = {
    "free": Settings(),
    "costly": Settings(costs=Costs(start_s=30, restart_s=300)),
    "failing": Settings(failures=Failures(1e6, 1e4, 3600, 2), costs=Costs(restart_s=10)),
}


@pytest.mark.parametrize("mean_gap_s", [0.0, 600.0])
@pytest.mark.parametrize("world", sorted(WORLDS))
def test_whole_runs_hold_up(world: str, mean_gap_s: float) -> None:
    """Capacity with shared machines, accounts, nobody lost or starved, equal again."""
    nodes = [(8, ""), (8, ""), (4, ""), (4, "")]
    jobs = sim_jobs(24, 1, 24, mean_gap_s)
    result = run("harmony", jobs, nodes, WORLDS[world])
    assert audit(event_log(result, "harmony", "subtasks", nodes, exact=False)) == []
    assert all(outcome.end_s < inf for outcome in result.outcomes)
    again = run("harmony", sim_jobs(24, 1, 24, mean_gap_s), nodes, WORLDS[world])
    assert again.segments == result.segments


def test_naive_colocation_holds_up() -> None:
    nodes = [(16, ""), (16, ""), (16, "")]
    jobs = [changed(j, gpus_min=16) for j in sim_jobs(20, 1, 16)]
    for ways in ("1", "2", "3"):
        result = run("naive-colocation", jobs, nodes, ways=ways)
        assert audit(event_log(result, "naive-colocation", "subtasks", nodes, exact=False)) == []
        shared = max(
            sum(o.start_s <= at_s < o.end_s for o in result.outcomes)
            for at_s in (o.start_s for o in result.outcomes)
        )
        assert shared <= 3 * int(ways)


def test_one_way_of_naive_colocation_is_isolated() -> None:
    nodes = [(16, "")] * 3
    jobs = [changed(j, gpus_min=16) for j in sim_jobs(20, 1, 16)]
    ends = [
        [o.end_s for o in result.outcomes]
        for result in (
            run("naive-colocation", jobs, nodes, ways="1"),
            run("isolated", jobs, nodes),
        )
    ]
    assert ends[0] == pytest.approx(ends[1])


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 5)),
    ],
)
def test_the_documented_jobs_gain(seed: int) -> None:
    """At least 1.4 times isolated on 16 machines a job, in JCT and in makespan."""
    jobs = sim_jobs(80, seed, 100)
    rigid = [changed(j, gpus_min=16, gpus_max=16) for j in jobs]
    figures = []
    for result in (run("isolated", rigid, [(100, "")]), run("harmony", jobs, [(100, "")])):
        ends = [o.end_s - o.job.submit_s for o in result.outcomes]
        figures.append((sum(ends) / len(ends), max(o.end_s for o in result.outcomes)))
    assert figures[0][0] >= 1.4 * figures[1][0]
    assert figures[0][1] >= 1.4 * figures[1][1]


def job(
    number: int, cpu_s: float, network_s: float, iterations: int, submit_s: float = 0.0
) -> Submission:
    return submission(
        number,
        submit_s=submit_s,
        gpus=4,
        gpus_min=1,
        gpus_max=4,
        stages_s=(cpu_s, network_s),
        iterations=iterations,
    )


def test_two_that_fit_run_together_as_fast_as_alone() -> None:
    result = run("harmony", [job(0, 6, 2, 100), job(1, 2, 6, 100)], [(4, "")])
    assert [o.end_s for o in result.outcomes] == pytest.approx([800, 800])


def test_a_finished_job_is_replaced_by_its_like_without_moving_anybody() -> None:
    """Two groups' worth of jobs; when the short one is done, the third, just like it, steps in."""
    jobs = [job(0, 6, 2, 50), job(1, 2, 6, 100), job(2, 6.1, 2, 50)]
    result = run("harmony", jobs, [(4, "")], fewer_jobs="0.0")
    moved = [s for s in result.segments if s.number == 1]
    assert result.outcomes[2].start_s == pytest.approx(result.outcomes[0].end_s)
    assert len({s.group for s in moved}) == 1


def test_an_arrival_waits_where_it_would_only_be_in_the_way() -> None:
    """A and B use everything; C raises nothing, so it waits until one of them is done."""
    jobs = [job(0, 6, 2, 100), job(1, 2, 6, 100), job(2, 3, 3, 100, submit_s=10.0)]
    result = run("harmony", jobs, [(4, "")])
    assert result.outcomes[2].start_s == pytest.approx(800)


def test_what_it_needs_is_said() -> None:
    rigid = [changed(job(0, 1, 1, 5), gpus_min=4)]
    with pytest.raises(Rejected, match="malleable"):
        run("harmony", rigid, [(4, "")])
    unknown = submission(0, gpus=1, duration_s=5, gpus_min=1, gpus_max=4)
    with pytest.raises(Rejected, match="subtasks"):
        Engine([unknown], Cluster.counted(4), make("harmony"), FixedModel()).run()


def test_every_waiting_job_has_a_reason() -> None:
    jobs = sim_jobs(40, Random(1).randrange(5), 16)
    result = run("harmony", jobs, [(16, "")], Settings(ask_why_s=(0,)))
    assert result.pending_reasons
    assert all(reason.text for _, reason in result.pending_reasons)
