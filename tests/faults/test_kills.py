"""kill -9 of any service, again and again, while jobs train: nothing is lost, nothing doubled.

Real processes, a real nats-server, real bytes. Two jobs share aggregators, and new ones take their
places, while a victim is killed at KILLS seeded instants (as soon as it is up again), or at named
points: in mid-fold, in mid-TENSOR_COPY, between persisting and replying. At the end every job has
applied exactly its iterations, and its parameters are, bit for bit, those of a single-process
replay: what the unkilled run would have.
"""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.integration.agent.test_forced_transport import drain_one

from slackwater.common.base import limits
from slackwater.common.domains.facts.timeline import Timeline
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.replay import session
from slackwater.loadgen.replay.proof import mismatch
from slackwater.loadgen.replay.workload import PlannedJob, Workload, emulated

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

KILLS = 20
AGGREGATORS = 6
Running = tuple[EmbeddedCluster, Client]
COMPUTE_S = 0.04
BYTES_SCALE = 0.004


def workload(iterations: int, *, jobs: int = 2, seed: int = 11, name: str = "job") -> Workload:
    """Small AlexNets, "2s-2w": 16 tensors each, one of them (fc6) most of the bytes."""
    return Workload(
        name="kills",
        jobs=tuple(
            PlannedJob(
                at_s=number * 1.0,
                compute_s=COMPUTE_S,
                spec=emulated(
                    f"{name}{number}",
                    "alexnet",
                    workers=2,
                    servers=2,
                    iterations=iterations,
                    compute_s=COMPUTE_S,
                    bytes_scale=BYTES_SCALE,
                    seed=seed + number,
                ),
            )
            for number in range(jobs)
        ),
        bytes_scale=BYTES_SCALE,
        time_scale=1.0,
        seed=seed,
    )


@asynccontextmanager
async def running() -> AsyncIterator[Running]:
    options = ClusterOptions(
        controllers=1,
        aggregators=AGGREGATORS,
        cpu_share=0.15,
        restarts_max=10 * KILLS,
        restart_wait_s_max=0.05,
        profiler={"window_iterations": 20, "profile_iterations": 8},
    )
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "test") as client:
        # A request that dies with its server is asked again when no answer came in time.
        yield cluster, Client(client.bus, client.clock, budget_s=limits.RETRY_BUDGET_S)


def ignore(timeline: Timeline, now_s: float) -> None:
    """No display."""


async def ended_well(client: Client, timeline: Timeline) -> None:
    records = [await client.job(id) for id in timeline.tracks]
    assert [record.state for record in records] == ["completed"] * len(records), [
        record.reason for record in records
    ]
    assert [mismatch(record) for record in records] == [None] * len(records)
    assert not any(record.optimizer_state_lost for record in records)


async def kill_again_and_again(cluster: EmbeddedCluster, names: list[str], seed: int) -> None:
    """Kill one of `names` at KILLS seeded instants, each time once it is up."""
    rng = random.Random(seed)
    await asyncio.sleep(1.0)  # The jobs are on their way.
    for _ in range(KILLS):
        name = rng.choice(names)
        await until_up(cluster, name)
        await asyncio.sleep(rng.uniform(0.0, 0.4))
        cluster.supervisor.kill(name, signal.SIGKILL)


async def one_after_the_other(client: Client, name: str, killing: "asyncio.Future[None]") -> int:
    """Jobs, as long as there is killing, each right to the bit; how many."""
    count = 0
    while count == 0 or not killing.done():
        job = workload(100, jobs=1, seed=11 + count, name=f"{name}-{count}-")
        await ended_well(client, await session.replay(client, job, ignore))
        count += 1
    return count


async def until_up(cluster: EmbeddedCluster, name: str) -> None:
    for _ in range(1500):
        if {unit.name: unit.state for unit in cluster.supervisor.status()}[name] == "ready":
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{name} did not come back")


VICTIMS = {
    "master": ["master-m1"],
    "controller": ["controller-c1"],
    "nats": ["nats"],
    "aggregators": [f"aggregator-a{n}" for n in range(1, AGGREGATORS + 1)],
    "profiler and worker": ["profiler-p1", "worker-w1"],
}


@pytest.mark.parametrize("victim", VICTIMS)
async def test_killed_at_seeded_instants(victim: str) -> None:
    """The jobs go on, the victim comes back from its records, the result is right to the bit."""
    async with running() as (cluster, client), asyncio.TaskGroup() as tasks:
        killing = tasks.create_task(kill_again_and_again(cluster, VICTIMS[victim], seed=5))
        for name in ("left", "right"):
            tasks.create_task(one_after_the_other(client, name, killing))


def all_aggregators(armed: str) -> dict[str, str]:
    return {f"aggregator-a{n}": armed for n in range(1, AGGREGATORS + 1)}


POINTS = {
    "fold": [
        all_aggregators("aggregator.fold.mid=kill@random(1)"),
        all_aggregators("aggregator.fold.after=kill@random(2)"),
    ],
    # An aggregator is drained meanwhile: the scheme alone may leave the jobs where they are.
    "copy.before": [all_aggregators("aggregator.copy.before=kill@1")],
    "copy.mid": [all_aggregators("aggregator.copy.mid=kill@1")],
    "copy.after": [all_aggregators("aggregator.copy.after=kill@1")],
    "control": [
        {
            "master-m1": "master.persist.after=kill@3",
            "controller-c1": "controller.persist.after=kill@2",
        },
        {
            "master-m1": "master.reply.before=kill@2",
            "controller-c1": "controller.request.after=kill@3",
        },
        {
            "controller-c1": "controller.persist.before=kill@4",
            "master-m1": "master.reply.after=kill@2",
        },
    ],
}


NIGHTLY = ("copy.before", "copy.after", "control")
"""Others kill real processes at these each time: test_aggregator_kills.py, test_reruns.py and
test_kills_lose_nothing.py. Here each takes a minute."""


@pytest.mark.parametrize(
    "where",
    [pytest.param(where, marks=[pytest.mark.nightly] * (where in NIGHTLY)) for where in POINTS],
)
async def test_killed_at_named_points(where: str) -> None:
    """Each armed service dies at its point, once; the jobs end right all the same."""
    async with running() as (cluster, client):
        for number, points in enumerate(POINTS[where]):
            await arm(cluster, points)
            before = restarts(cluster)
            jobs = workload(150, name=f"point{number}-")
            async with asyncio.TaskGroup() as tasks:
                if where.startswith("copy"):
                    tasks.create_task(drain_one(client))
                timeline = await session.replay(client, jobs, ignore)
            after = restarts(cluster)
            assert any(after[name] > before[name] for name in points), points
            await ended_well(client, timeline)


async def arm(cluster: EmbeddedCluster, points: dict[str, str]) -> None:
    """Failpoints of units, for one life each."""
    for name, armed in points.items():
        cluster.supervisor.arm(name, armed)
        cluster.supervisor.kill(name, signal.SIGKILL)
    await asyncio.sleep(0.05)  # Dead, and not yet up again.
    for name in points:
        await until_up(cluster, name)


def restarts(cluster: EmbeddedCluster) -> dict[str, int]:
    return {unit.name: unit.restarts for unit in cluster.supervisor.status()}


async def test_submissions_resume_after_the_master_was_killed() -> None:
    """Submissions acknowledged before the kill are there after it, and new jobs are accepted."""
    async with running() as (cluster, client):
        accepted = []
        for number in range(12):
            if number % 4 == 3:
                cluster.supervisor.kill("master-m1", signal.SIGKILL)
            spec = emulated(
                f"s{number}", "alexnet", workers=1, servers=1, iterations=1, compute_s=0.0,
                bytes_scale=1e-6, seed=number,
            )  # fmt: skip
            await Client(client.bus, client.clock, budget_s=20.0).submit(spec)
            accepted.append(spec.id)
        known = {record.spec.id for record in await client.jobs()}
        assert set(accepted) <= known
