"""Pollux as a policy: rounds, exploration, restarts, fairness, types, scaling, reasons."""

from math import inf

import msgspec
import numpy as np
import pytest

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.domains.models.fitness import power_mean
from slackwater.common.domains.models.goodput import BatchLimits, GoodputModel, GoodputProfile
from slackwater.common.domains.models.throughput import ThroughputParams
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.scheduling import POLICY_FACTS_BYTES_MAX
from slackwater.services.master.scheduling.policies.pollux import (
    REPORTS_KEPT_MAX,
    Memory,
    Pollux,
    _kept_reports,
)
from slackwater.services.master.scheduling.policies.pollux_scaling import (
    Candidate,
    History,
    desired_nodes,
)
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.scheduler import Scheduler
from slackwater.services.master.scheduling.validation import validate
from slackwater.services.master.scheduling.view import (
    Allocation,
    ClusterView,
    JobView,
    NodeView,
    Plan,
    Rules,
    View,
)

THETA = ThroughputParams(0.05, 0.001, 0.02, 0.002, 0.06, 0.002, 2.0)
FREE = Rules()
LIMITS = BatchLimits(initial=128, total_max=8192, per_gpu_max=256, per_gpu_min=16)


def model(noise_scale: float = 2000.0, theta: ThroughputParams = THETA) -> GoodputModel:
    return GoodputModel(theta, noise_scale, LIMITS)


def job(
    number: int, allocation: Allocation = (), profile: GoodputProfile | None = None, **more: object
) -> JobView:
    fields: dict[str, object] = {
        "id": JobId(f"j{number}"), "number": number, "submitted_s": 0.0, "gpus": 1, "gpus_min": 1,
        "gpus_max": 64, "allocation": allocation,
        "profile": profile if profile is not None else GoodputProfile(model(), 64),
    }  # fmt: skip
    return JobView(**(fields | more))  # type: ignore[arg-type]  # The fields' types vary.


def view(
    jobs: list[JobView], sizes: list[int], now_s: float = 600.0, types: tuple[str, ...] = (),
    rules: Rules = FREE,
) -> View:  # fmt: skip
    free = list(sizes)
    for each in jobs:
        for node, gpus in each.allocation:
            free[node] -= gpus
    kinds = types or ("",) * len(sizes)
    nodes = tuple(NodeView(i, NodeId(f"n{i}"), g, kinds[i]) for i, g in enumerate(sizes))
    cluster = ClusterView(nodes, sum(sizes), tuple(sorted(set(kinds))), max(sizes, default=0))
    return View(now_s, cluster, {each.id: each for each in jobs}, free, None, rules)


def sizes_of(plan: Plan, jobs: list[JobView]) -> list[int]:
    allocations = {each.id: plan.allocations.get(each.id, each.allocation) for each in jobs}
    return [sum(gpus for _, gpus in allocations[each.id]) for each in jobs]


def test_it_decides_at_rounds_only() -> None:
    policy = Pollux()
    plan, memory = policy.allocate(view([job(0)], [4], now_s=601.0), None)
    assert (plan.allocations, plan.next_decision_s) == ({}, 660.0)
    plan, _ = policy.allocate(view([job(0)], [4], now_s=660.0), memory)
    assert plan.allocations
    assert plan.next_decision_s == 720.0
    assert policy.allocate(view([], [4], now_s=720.0), memory)[0].next_decision_s == inf


def test_a_new_job_gets_one_gpu_and_never_more_than_twice_what_it_was_measured_on() -> None:
    fresh, seen = job(0, profile=GoodputProfile()), job(1, profile=GoodputProfile(model(), 3))
    plan, _ = Pollux().allocate(view([fresh, seen], [4, 4, 4, 4]), None)
    assert sizes_of(plan, [fresh, seen]) == [1, 6]


def test_the_fitness_of_the_plan_is_the_power_mean_of_its_speedups() -> None:
    """Two equal jobs on eight GPUs: four each is the fair share, a speedup of 1."""
    jobs = [job(0), job(1)]
    plan, memory = Pollux().allocate(view(jobs, [4, 4]), None)
    assert sizes_of(plan, jobs) == [4, 4]
    assert isinstance(memory, Memory)
    assert memory.fitness == pytest.approx(power_mean([1.0, 1.0], -1))


def test_the_knob_trades_goodput_for_fairness() -> None:
    """With two jobs that scale well and two that scale worse, p = 1 favours the first, p = -10
    evens speedups out."""
    good, worse = model(1e6), model(1e6, THETA._replace(alpha_local_s=0.1, alpha_node_s=0.4))
    jobs = [job(n, profile=GoodputProfile(good if n < 2 else worse, 64)) for n in range(4)]
    taken = []
    for p in (1.0, -1.0, -10.0):
        plan, _ = Pollux(p=p).allocate(view(jobs, [16]), None)
        taken.append(sum(sizes_of(plan, jobs)[:2]))
    assert taken[0] > taken[1] >= taken[2]


def test_a_small_gain_is_not_worth_a_restart() -> None:
    """Three jobs run on 4, 4 and 3 of 12 GPUs and restarted often: one free GPU moves nobody."""
    allocations = [((0, 4),), ((1, 4),), ((2, 3),)]
    often = [job(n, a, restarts=8, since_s=500.0) for n, a in enumerate(allocations)]
    assert not Pollux().allocate(view(often, [4, 4, 4]), None)[0].allocations
    never = [job(n, a) for n, a in enumerate(allocations)]
    plan, _ = Pollux(delay_s=0).allocate(view(never, [4, 4, 4]), None)
    assert sizes_of(plan, never) == [4, 4, 4]


def test_a_move_costs_what_the_jobs_own_restart_costs() -> None:
    """Thirty seconds for all let a job that restarts in five minutes move as freely as another."""
    jobs = [job(i, ((0, 1),), restart_s=cost) for i, cost in enumerate((None, 30.0, 5.0, 300.0))]
    problem, _ = Pollux(delay_s=30).problem(view(jobs, [8]), jobs, {})
    terms = [float(problem.worth[j, 0, 0, 2]) for j in range(4)]
    assert terms[3] < terms[0] == terms[1] < terms[2]
    # realloc_factor of a job of 600 s that was never moved.
    gains = Pollux(p=1, delay_s=30).problem(view(jobs, [8]), jobs, {})[0].worth[:, 0, 0, 2]
    assert gains[3] / gains[2] == pytest.approx(605 / 900, rel=0.01)


def test_waiting_jobs_are_exempt_from_the_restart_factor() -> None:
    """A preempted job with many restarts is worth as much as if it were new."""
    waiting = job(0, restarts=50)
    plan, memory = Pollux().allocate(view([waiting], [2]), None)
    assert sizes_of(plan, [waiting]) == [2]
    assert memory.fitness == pytest.approx(1.001)


def test_who_waits_least_served_comes_first_but_preempts_nobody() -> None:
    """Two GPUs run two old jobs, four others wait: nobody is taken off; a GPU that falls free goes
    to the one with least service."""
    running = [job(0, ((0, 1),), attained_gpu_s_then=9e5), job(1, ((0, 1),))]
    waiting = [job(n, attained_gpu_s_then=s) for n, s in ((2, 50.0), (3, 7.0), (4, 90.0))]
    plan, memory = Pollux().allocate(view(running + waiting, [2]), None)
    assert not plan.allocations
    plan, _ = Pollux().allocate(view(running[:1] + waiting, [2], now_s=660.0), memory)
    assert list(plan.allocations) == [JobId("j3")]


def test_protected_jobs_stay() -> None:
    """Within its minimum run time a job is not moved, however unfair that is."""
    greedy = job(0, ((0, 4), (1, 4)), since_s=580.0)
    jobs = [greedy, job(1), job(2)]
    plan, _ = Pollux().allocate(view(jobs, [4, 4], rules=Rules(min_run_s=60)), None)
    assert not plan.allocations
    plan, _ = Pollux().allocate(view(jobs, [4, 4]), None)
    assert min(sizes_of(plan, jobs)) >= 1


def test_distributed_jobs_do_not_meet() -> None:
    """Three jobs on six machines of two GPUs grow over machines; none shares one with another."""
    jobs = [job(n, profile=GoodputProfile(model(1e6), 64)) for n in range(3)]
    plan, _ = Pollux().allocate(view(jobs, [2] * 6), None)
    spread = [a for a in plan.allocations.values() if len(a) > 1]
    assert spread
    nodes = [node for allocation in spread for node, _ in allocation]
    assert len(nodes) == len(set(nodes))


def test_a_non_adaptive_job_is_placed_by_its_throughput() -> None:
    fixed = BatchLimits(initial=256, total_max=256, per_gpu_max=256, per_gpu_min=64, fixed=256)
    rigid = job(0, profile=GoodputProfile(GoodputModel(THETA, 0.0, fixed), 64))
    plan, _ = Pollux().allocate(view([rigid], [4, 4]), None)
    assert sizes_of(plan, [rigid]) == [4]


def test_each_job_takes_the_type_on_which_it_is_relatively_fastest() -> None:
    """One job is four times as fast on the new GPUs, the other just as fast on the old ones."""
    quick = job(0, speeds={"old": 1.0, "new": 4.0})
    plain = job(1, speeds={"old": 1.0, "new": 1.0})
    types = ("old", "old", "new", "new")
    plan, _ = Pollux().allocate(view([quick, plain], [4] * 4, types=types), None)
    validate(plan, view([quick, plain], [4] * 4, types=types))
    assert {node for node, _ in plan.allocations[quick.id]} <= {2, 3}
    assert {node for node, _ in plan.allocations[plain.id]} <= {0, 1}
    only_old = job(2, speeds={"old": 1.0})
    plan, _ = Pollux().allocate(view([only_old], [4, 4], types=("new", "old")), None)
    assert [node for node, _ in plan.allocations[only_old.id]] == [1]


def test_a_lost_machine_and_vanished_jobs_between_rounds() -> None:
    """The kept population is brought onto what is left."""
    jobs = [job(n) for n in range(6)]
    policy = Pollux()
    plan, memory = policy.allocate(view(jobs, [4, 4, 4]), None)
    moved = [each.moved(plan.allocations.get(each.id, ()), 600.0) for each in jobs]
    left = [
        each if all(node != 1 for node, _ in each.allocation) else each.moved((), 630.0)
        for each in moved[:4]
    ]
    now = view(left, [4, 0, 4], now_s=660.0)
    plan, memory = policy.allocate(now, memory)
    validate(plan, now)
    assert all(size >= 1 for size in sizes_of(plan, left))
    assert memory.population.shape == (4, 4, 3)


def test_a_job_that_reports_no_goodput_counts_as_scaling_perfectly() -> None:
    other = job(0, profile=GoodputProfile(), gpus_max=4)
    unknown = msgspec.structs.replace(other, profile=None)
    plan, _ = Pollux().allocate(view([unknown], [4]), None)
    assert sizes_of(plan, [unknown]) == [4]


def test_the_reports_of_a_round_are_facts_and_stand_in_until_jobs_report_again() -> None:
    """A job that waits has no agent: forgotten, it would count as new, and as scaling perfectly."""
    told = [job(0, ((0, 1),)), job(1, profile=GoodputProfile(model(7.0), 4))]
    scheduler = Scheduler(Pollux())
    scheduler.decide(view(told, [2, 2]))
    facts = scheduler.durable()
    again = Scheduler(Pollux())
    again.restore(facts)
    assert again.durable() == facts
    silent = [job(n, each.allocation, GoodputProfile()) for n, each in enumerate(told)]
    now = view(silent, [2, 2], now_s=630.0)
    again.decide(now)
    again.decide(msgspec.structs.replace(now, now_s=660.0))
    assert again.durable() == facts, "the round was decided by what was known"
    anew = job(0, profile=GoodputProfile(model(9.0), 8))
    again.decide(view([anew], [2, 2], now_s=720.0))
    assert again.durable() not in (b"", facts)


def test_facts_of_any_number_of_jobs_fit_into_a_record() -> None:
    jobs = [
        job(n, id=JobId(f"{n:063d}"), profile=GoodputProfile(model(1e300), 2**53))
        for n in range(REPORTS_KEPT_MAX + 50)
    ]
    memory = Memory(reports=_kept_reports(jobs))
    facts = msgspec.msgpack.encode(Pollux().durable(memory))
    assert len(memory.reports) == REPORTS_KEPT_MAX
    assert len(facts) < POLICY_FACTS_BYTES_MAX


def test_pending_jobs_are_told_why() -> None:
    jobs = [job(0, ((0, 1),)), job(1), job(2, attained_gpu_s_then=5.0)]
    policy = Pollux()
    plan, memory = policy.allocate(view(jobs, [1]), None)
    assert not plan.allocations
    reasons = policy.explain(view(jobs, [1]), memory)
    assert [(r.job, r.rule, r.until_s) for r in reasons] == [
        (JobId("j1"), "capacity", 660.0), (JobId("j2"), "capacity", 660.0)
    ]  # fmt: skip
    assert "number 2" in reasons[1].text


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [("growth", "0.5", ">= 1"), ("round_s", "0", "round_s"), ("scale_to", "0.9", "scales")],
)
def test_senseless_knobs_are_refused(option: str, value: str, match: str) -> None:
    with pytest.raises(ConfigRejected, match=match):
        make("pollux", {option: value})


# Scaling the cluster


def cluster(up: int, of: int) -> ClusterView:
    nodes = tuple(NodeView(i, NodeId(f"n{i}"), 4 if i < up else 0) for i in range(of))
    return ClusterView(nodes, 4 * up, node_gpus_max=4)


def scaled(noise_scale: float, up: int, growth: int = 64, down: float = 0.0) -> int:
    """Machines wanted once five rounds have seen the same cluster."""
    row = np.array([4] * up + [0] * (16 - up))
    candidate = Candidate(model(noise_scale), min(growth, 64), row)
    history, wanted = History(), 0
    for _ in range(5):
        wanted, history = desired_nodes(cluster(up, 16), [candidate], history, down, 0.5, 2 / 3)
    return wanted


def test_a_cluster_grows_while_its_gpus_are_worth_it() -> None:
    """The more noise, the more a larger batch is worth, the more machines."""
    assert scaled(100.0, 1) <= scaled(3000.0, 1) <= scaled(1e6, 1)
    assert scaled(1e6, 1) > 1
    assert scaled(100.0, 4) == 4


def test_a_cluster_grows_no_further_than_its_jobs_may() -> None:
    assert scaled(1e6, 1, growth=8) == 2


def test_a_cluster_shrinks_only_if_asked_to() -> None:
    assert scaled(10.0, 8) == 8
    assert scaled(10.0, 8, down=0.35) < 8


def test_one_round_is_no_reason_to_buy_machines() -> None:
    row = np.array([4] + [0] * 15)
    wanted, _ = desired_nodes(
        cluster(1, 16), [Candidate(None, 64, row)], History(), 0.0, 0.5, 2 / 3
    )
    assert wanted == 1
