"""The engine's accounts: restarts, lost work, quotas, priorities, types, sharing, refusals."""

from collections.abc import Mapping
from typing import Any

import pytest
from tests.sim.submissions import submission

from slackwater.common.base.errors import Fatal, Rejected
from slackwater.loadgen.simulator.gpu.audit import audit
from slackwater.loadgen.simulator.gpu.cluster import Cluster, parse_nodes
from slackwater.loadgen.simulator.gpu.engine import Costs, Engine, Result, Scaling, Settings
from slackwater.loadgen.simulator.gpu.eventlog import event_log
from slackwater.loadgen.simulator.gpu.failures import Failures
from slackwater.loadgen.simulator.gpu.interference import Slowdowns
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.simulator.gpu.jobmodels.interleaved import InterleavedModel
from slackwater.loadgen.simulator.gpu.workload import Submission, refuse_unfit, workload
from slackwater.loadgen.traces.record import TraceJob
from slackwater.services.master.scheduling.policies.colocation import Colocated
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.view import Plan, Rules, View


def job(number: int, submit_s: float, gpus: int, duration_s: float, **more: Any) -> Submission:
    return submission(number, submit_s=submit_s, gpus=gpus, duration_s=duration_s, **more)


def run(
    policy: str, jobs: list[Submission], nodes: str, world: Settings | None = None,
    options: Mapping[str, str] | None = None,
) -> Result:  # fmt: skip
    engine = Engine(
        jobs, Cluster(parse_nodes(nodes)), make(policy, options), FixedModel(), world or Settings()
    )
    return engine.run()


def ends(result: Result) -> list[float]:
    return [outcome.end_s for outcome in result.outcomes]


def test_restart_costs_time_and_is_accounted_for() -> None:
    """The long job runs 10 s, is preempted for 5 s, pays 30 s to restart and has 90 s left."""
    jobs = [job(0, 0, 1, 100), job(1, 10, 1, 5)]
    result = run("srtf", jobs, "1x1", Settings(costs=Costs(restart_s=30)))
    assert ends(result) == [10 + 5 + 30 + 90, 15]
    long = result.outcomes[0]
    assert (long.preemptions, long.restarts, long.wasted_gpu_s) == (1, 1, 30)
    assert [(s.start_s, s.end_s, s.why) for s in result.segments if s.number == 0] == [
        (0, 10, "preempted"), (15, 135, "completed"),
    ]  # fmt: skip


def test_restart_by_model() -> None:
    costs = Costs(start_s=2, restart_s=30, restart_by_model_s={"bert": 120})
    jobs = [job(0, 0, 1, 100, model="bert"), job(1, 12, 1, 5)]
    assert ends(run("srtf", jobs, "1x1", Settings(costs=costs))) == [12 + 7 + 120 + 90, 19]


def test_a_lost_machine_costs_the_work_since_the_last_checkpoint() -> None:
    """The machine fails at some instant t of the seed; with checkpoints every 60 s what is lost
    is what came after the last one."""
    failures = Failures(mtbf_s=500, repair_s=100, checkpoint_s=60, seed=3)
    lost_s, back_s = next(failures.outages(0))
    assert lost_s % 60 > 0
    assert lost_s < 900
    result = run("fifo", [job(0, 0, 1, 900)], "1x1", Settings(failures=failures))
    first = result.segments[0]
    assert (first.end_s, first.why, first.work_after) == (lost_s, "node-lost", lost_s // 60 * 60)
    assert result.segments[1].start_s == back_s
    assert result.outcomes[0].wasted_gpu_s >= lost_s % 60
    assert audit(event_log(result, "fifo", "fixed", [(1, "")], exact=True)) == []


def test_quota_owner_takes_back_what_was_borrowed() -> None:
    """Tenant b borrows the idle half, and loses it when a asks."""
    jobs = [
        job(0, 0, 4, 1000, tenant="b"), job(1, 0, 4, 1000, tenant="b"),
        job(2, 100, 4, 50, tenant="a"),
    ]  # fmt: skip
    rules = Rules(quotas={"a": 4, "b": 4})
    result = run("best-effort", jobs, "2x4", Settings(rules=rules))
    assert ends(result)[2] == 150, "the owner does not wait"
    assert result.outcomes[0].preemptions + result.outcomes[1].preemptions == 1
    strict = Settings(rules=Rules(quotas={"a": 4, "b": 4}, borrowing=False))
    assert sorted(ends(run("best-effort", jobs, "2x4", strict))) == [150, 1000, 2000]


def test_minimum_run_time_delays_preemption() -> None:
    jobs = [job(0, 0, 1, 1000), job(1, 10, 1, 5)]
    result = run("srtf", jobs, "1x1", Settings(rules=Rules(min_run_s=60)))
    assert ends(result) == [1005, 65]


def test_priorities_come_first() -> None:
    jobs = [job(0, 0, 1, 100), job(1, 10, 1, 50, priority=1)]
    for policy in ("srtf", "tiresias-las", "gandiva"):
        assert ends(run(policy, jobs, "1x1"))[1] <= 110
    assert ends(run("tiresias-las", jobs, "1x1")) == [150, 60]


def test_gpu_types() -> None:
    """A job runs at its type's speed, on one type only, and not on a type it does not name."""
    speeds = {"fast": 2.0, "slow": 1.0}
    jobs = [
        job(0, 0, 4, 100, gpu_types=speeds), job(1, 0, 4, 100, gpu_types=speeds),
        job(2, 0, 2, 10, gpu_types={"fast": 2.0}),
    ]  # fmt: skip
    result = run("tiresias-las", jobs, "1x4:fast,1x4:slow")
    assert ends(result) == [50, 100, 55]
    assert audit(event_log(result, "x", "fixed", [(4, "fast"), (4, "slow")], exact=False)) == []


def test_spread_and_interference_slow_jobs_down() -> None:
    """A skewed job of 4 GPUs that two machines of 2 would hold, but gets three smaller ones; and
    distributed jobs that meet on a machine."""
    world = Settings(slowdowns=Slowdowns(spread=1.0))
    skewed = [job(0, 0, 4, 100, skew=0.8)]
    assert ends(run("fifo", skewed, "1x2,2x1", world)) == [180], "at 1 / 1.8 of its speed"
    assert ends(run("fifo", skewed, "2x2", world)) == [100]
    met = [job(0, 0, 4, 100), job(1, 0, 4, 100)]
    slow = Settings(slowdowns=Slowdowns(interference=0.5))
    assert ends(run("fifo", met, "4x2", slow)) == [100, 100], "on machines of their own"
    assert ends(run("fifo", met, "1x3,1x2,1x3", slow)) == [200, 200], "they meet on a machine"


def test_a_neighbour_on_the_network_speeds_up_when_a_job_ends() -> None:
    """It stayed slowed until something else changed about it."""
    slow = Settings(slowdowns=Slowdowns(interference=0.5))
    jobs = [job(0, 0, 4, 50), job(1, 0, 4, 100)]
    assert ends(run("fifo", jobs, "1x3,1x2,1x3", slow)) == [100, 150]


def test_jobs_that_never_fit_are_refused_by_name() -> None:
    with pytest.raises(Rejected, match="job j0 asks for 9 GPUs of one type and the cluster has 8"):
        refuse_unfit([job(0, 0, 9, 1)], {"": 8}, {}, True)
    with pytest.raises(Rejected, match=r"job j0 .* cluster has 4 that it can use"):
        refuse_unfit([job(0, 0, 6, 1, gpu_types={"a": 1.0})], {"a": 4, "b": 8}, {}, True)
    with pytest.raises(Rejected, match="tenant 'x' is limited to 2 without borrowing"):
        refuse_unfit([job(0, 0, 4, 1, tenant="x")], {"": 8}, {"x": 2}, False)
    rows = [TraceJob(id="a", submit_s=0, gpus=1), TraceJob(id="a", submit_s=1, gpus=1)]
    with pytest.raises(Rejected, match="two jobs are called 'a'"):
        workload(rows)


class Idle:
    """A policy that never starts anything."""

    def allocate(self, view: View, memory: object) -> tuple[Plan, object]:
        return Plan(), memory

    def explain(self, view: View, memory: object) -> list[Any]:
        return []


def test_a_policy_that_leaves_jobs_waiting_is_an_error() -> None:
    with pytest.raises(Fatal, match="leaves 1 jobs waiting for ever, j0 among them"):
        Engine([job(0, 0, 1, 1)], Cluster.counted(1), Idle(), FixedModel()).run()


class Growing(Idle):
    """Starts whoever fits, and asks for one machine per waiting job."""

    def allocate(self, view: View, memory: object) -> tuple[Plan, object]:
        plan, memory = make("best-effort").allocate(view, None)
        wanted = max(1, sum(j.gpus for j in view.jobs.values()))
        return Plan(plan.allocations, desired_nodes=wanted), memory


def test_the_cluster_grows_and_shrinks_as_the_policy_asks() -> None:
    jobs = [job(0, 0, 1, 100), job(1, 0, 1, 100), job(2, 0, 1, 100)]
    cluster = Cluster([(1, "")] * 3, up=1)
    world = Settings(scaling=Scaling(1, 3, provision_s=10))
    result = Engine(jobs, cluster, Growing(), FixedModel(), world).run()
    assert sorted(ends(result)) == [100, 110, 110]
    assert result.capacity_gpu_s == 10 * 1 + 100 * 3, "a busy machine is not taken away"


GPU_BOUND, CPU_BOUND = (0.8, 0.1, 0.1), (0.3, 0.6, 0.1)


def test_co_located_jobs_interleave_their_stages() -> None:
    """A GPU-bound and a CPU-bound job on one GPU: slots of .8, .1 and .3 s, so that both take 1.2
    times as long as alone and nobody waits; two purely GPU-bound ones would gain nothing."""
    sharing = Colocated(make("fifo"), ways=3)

    def finish(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[list[float], Result]:
        jobs = [
            job(i, 0, 1, 1000, stages_s=stages, iteration_s=1.0) for i, stages in enumerate((a, b))
        ]
        result = Engine(jobs, Cluster.counted(1), sharing, InterleavedModel()).run()
        log = event_log(result, "fifo", "interleaved", [(1, "")], exact=False)
        assert audit(log) == []
        return ends(result), result

    together, result = finish(GPU_BOUND, CPU_BOUND)
    assert together == [1201, 1201]
    assert {s.group for s in result.segments} == {"share-0"}
    assert finish((1.0, 0, 0), (1.0, 0, 0))[0] == [1000, 2000]


def test_who_leaves_a_group_speeds_up_those_who_stay() -> None:
    jobs = [
        job(0, 0, 1, 1000, stages_s=GPU_BOUND, iteration_s=1.0),
        job(1, 0, 1, 100, stages_s=CPU_BOUND, iteration_s=1.0),
    ]
    engine = Engine(jobs, Cluster.counted(1), Colocated(make("srsf")), InterleavedModel())
    first, second = ends(engine.run())
    assert second == pytest.approx(120, abs=1)
    assert first == pytest.approx(120 + 900, abs=2)
