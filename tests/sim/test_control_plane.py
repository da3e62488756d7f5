"""The whole control plane in virtual time: jobs come and go, and whoever may die, dies."""

import asyncio
import random

import pytest
from tests.sim.plane import SHARE, all_done, check_settled, job, plane, settle

from slackwater.common.bus.faults import SeededFaults
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.store.memory import SeededStoreFaults
from slackwater.schemas.cluster import AllocationEvent
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.placement import (
    MigrationEvent,
)
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.shell import definition as master_definition

# Scenarios --------------------------------------------------------------------------------------


def test_a_job_is_profiled_on_what_it_asked_for_keeps_it_alone_and_gives_all_back() -> None:
    async def main() -> None:
        async with plane(1, 4) as made:
            made.spawn(made.run_job(job("v1", 1.0, [0.02, 0.01, 0.005], iterations=60), 2.0))
            await settle(made, 40.0)
            assert made.facts("v1") == [
                "pending", "running", "placed", "located", "measured", "assigned", "steady",
            ]  # fmt: skip
            assert made.facts("v1").count("steady") == 1
            assert made.allocated() == {"a0", "a1"}  # Figure 10: a lone job keeps its 2 servers.
            check_settled(made)
            await all_done(made, 1, 120.0)
            await settle(made)
            assert made.allocated() == set()
            check_settled(made)

    run_simulated(main())


def test_two_jobs_of_one_model_share_two_aggregators() -> None:
    """Figure 8: the second job's temporary aggregators are given back, its buckets migrate."""

    async def main() -> None:
        async with plane(2, 6) as made:
            for number in range(2):
                arrival = job(f"v{number}", 1.0, [0.015, 0.01, 0.005], iterations=120)
                made.spawn(made.run_job(arrival, 2.0 + 20.0 * number))
            await settle(made, 80.0)
            assert len(made.allocated()) == 2
            check_settled(made)
            causes = {m.cause for _, _, m in made.events if isinstance(m, MigrationEvent)}
            assert causes == {"profiled"}
            await all_done(made, 2, 200.0)
            await settle(made)
            check_settled(made)

    run_simulated(main())


def test_figure_10_an_alexnet_that_slows_is_reverted_and_gets_an_aggregator_of_its_own() -> None:
    """VGG19 runs on two; AlexNet is assigned there, somebody loses over 10 % for a window, the
    newest assignment is undone, a new aggregator is added, and released at AlexNet's exit."""

    async def main() -> list[str]:
        async with plane(3, 8) as made:
            vgg = job("vgg", 1.0, [0.018, 0.008, 0.006], iterations=400)
            alex = job("alex", 0.13, [0.004, 0.003, 0.0025, 0.0015], iterations=700)
            made.spawn(made.run_job(vgg, 2.0))
            made.spawn(made.run_job(alex, 30.0))
            await settle(made, 110.0)
            check_settled(made)
            assert made.allocated() >= {"a0", "a1"}
            await all_done(made, 2, 600.0)
            await settle(made)
            check_settled(made)
            shown = []
            for _, _, message in made.events:
                if isinstance(message, JobEvent) and message.fact in ("reverted", "completed"):
                    shown.append(f"{message.job} {message.fact}")
                elif isinstance(message, MigrationEvent):
                    shown.append(f"{message.job} {message.fact} {message.cause}")
                elif isinstance(message, AllocationEvent):
                    shown.append(f"{message.fact} {message.in_use}")
            return shown

    assert run_simulated(main()) == [
        "allocated 1", "allocated 2",  # VGG19's temporary ones, kept below.
        "adopted 2", "adopted 2",  # VGG19 keeps them.
        "allocated 3", "allocated 4",  # AlexNet's.
        "alex started profiled", "alex finished profiled", "released 3", "released 2",
        "alex reverted",
        "allocated 3", "alex started reverted", "alex finished reverted",
        "alex completed", "released 2",
        "vgg completed", "released 1", "released 0",
    ]  # fmt: skip


def test_with_one_aggregator_a_job_that_never_iterates_does_not_keep_another_from_training() -> (
    None
):
    async def main() -> None:
        async with plane(6, 1, hung_after_s=20.0, unprofiled_after_s=5.0) as made:
            hung = job("hung", 1e6, [0.015, 0.01], servers=1)  # A rank stands in a debugger.
            made.spawn(made.run_job(hung, 2.0))
            second = job("second", 1.0, [0.015, 0.01], iterations=20, servers=1)
            made.spawn(made.run_job(second, 6.0))
            await settle(made, 150.0)
            assert "unprofiled" in made.facts("hung")
            assert "completed" in made.facts("second")
            assert made.allocated() == {"a0"}

    run_simulated(main())


def test_the_static_policy_gives_every_job_its_own_servers_and_moves_nothing() -> None:
    async def main() -> None:
        async with plane(4, 6, policy="static") as made:
            for number in range(2):
                arrival = job(f"v{number}", 1.0, [0.015, 0.01, 0.005], iterations=60)
                made.spawn(made.run_job(arrival, 2.0))
            await settle(made, 40.0)
            assert len(made.allocated()) == 4
            await all_done(made, 2, 200.0)
            assert not [m for _, _, m in made.events if isinstance(m, MigrationEvent)]
            await settle(made)
            check_settled(made)

    run_simulated(main())


def test_the_control_with_one_aggregator_packs_everybody_there() -> None:
    """Without room the jobs share what there is, unprofiled: the limit breaks, nobody waits."""

    async def main() -> None:
        async with plane(5, 1, aggregators_max=1, unprofiled_after_s=2.0) as made:
            for number in range(3):
                arrival = job(f"v{number}", 1.0, [0.015, 0.01, 0.005], iterations=80)
                made.spawn(made.run_job(arrival, 2.0 + 10.0 * number))
            await settle(made, 50.0)
            assert {m.iteration > 5 for m in made.models.values()} == {True}
            assert made.allocated() == {"a0"}
            await all_done(made, 3, 300.0)
            await settle(made)
            check_settled(made)

    run_simulated(main())


# Faults -----------------------------------------------------------------------------------------


async def _storm(seed: int, memory_lost: float, harsh: bool = False) -> int:
    """Jobs come and go while messages are lost, repeated and delayed, the store times out, and
    every kind of service is killed and started again; with a probability, an aggregator's memory
    goes with it. Harsh: several at once, and jobs that slow each other. Returns the reverts."""
    rng = random.Random(f"storm/{seed}/{harsh}")
    faults = SeededFaults(rng, drop=0.02, duplicate=0.05, delay_s_max=0.02)
    store = SeededStoreFaults(rng, unanswered=0.01, delay_s_max=0.01)
    duty = (0.2, 0.7) if harsh else (0.1, 0.4)
    jobs, kills = (8, 14) if harsh else (6, 10)
    if harsh:
        faults.drop, faults.delay_s_max = 0.05, 0.05
    async with plane(seed, 8, clusters=2, faults=faults, store=store, aggregators_max=6) as made:
        for number in range(jobs):
            compute_s = rng.choice([0.5, 1.0, 2.0])
            busy_s = rng.uniform(*duty) * SHARE * compute_s
            costs_s = [busy_s * part for part in (0.5, 0.2, 0.2, 0.1)]
            arrival = job(
                f"{rng.choice('xyz')}{number}", compute_s, costs_s, rng.choice([200, 400])
            )
            made.spawn(made.run_job(arrival, rng.uniform(1.0, 60.0)))
        for _ in range(kills):
            await asyncio.sleep(rng.uniform(2.0, 20.0))
            victims = rng.sample(sorted(made.running), rng.choice([1, 2, 3]) if harsh else 1)
            for name in victims:
                await made.kill(name)
                if name in made.aggregators and rng.random() < memory_lost:
                    made.aggregators[name].regions.clear()
            await asyncio.sleep(rng.choice([0.2, 0.2, 3.0, 40.0]))
            for name in victims:
                made.start(name)
        await all_done(made, jobs, 6000.0)
        faults.drop = faults.duplicate = 0.0
        await settle(made, 120.0)
        check_settled(made)
        assert made.master is not None
        for record in made.master.state.jobs.values():
            assert record.record.state == "completed", record.record
        return sum(isinstance(m, JobEvent) and m.fact == "reverted" for _, _, m in made.events)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 3))]
)
def test_no_bucket_allocation_or_job_is_lost_whoever_is_killed(seed: int) -> None:
    run_simulated(_storm(seed, memory_lost=0.0))


@pytest.mark.parametrize(
    "seed", [100, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(101, 103))]
)
def test_lost_memory_begins_anew_and_every_job_ends(seed: int) -> None:
    run_simulated(_storm(seed, memory_lost=0.5))


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(2), marks=pytest.mark.slow),
        pytest.param(range(2, 8), marks=pytest.mark.nightly),
    ],
    ids=str,
)
@pytest.mark.timeout(300)
def test_a_harsher_storm_with_reverts_breaks_nothing_either(seeds: range) -> None:
    reverts = sum(run_simulated(_storm(seed, memory_lost=0.2, harsh=True)) for seed in seeds)
    assert reverts > 0


def test_a_standby_master_leads_when_the_leader_is_killed() -> None:
    """Its first write fences the old one; jobs that ran never noticed."""

    async def main() -> None:
        async with plane(6, 4) as made:
            standby = MasterConfig(id="m1")
            made.definitions["standby"] = lambda world: master_definition(standby, world)
            made.start("standby")
            made.spawn(made.run_job(job("v1", 1.0, [0.02, 0.01], iterations=60), 2.0))
            await settle(made, 20.0)
            await made.kill("master")
            made.spawn(made.run_job(job("v2", 1.0, [0.02, 0.01], iterations=60), 1.0))
            await all_done(made, 2, 300.0)
            await settle(made)
            assert made.master is not None
            assert made.master.state.epoch == 2
            check_settled(made)

    run_simulated(main())
