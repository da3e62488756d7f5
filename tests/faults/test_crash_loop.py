"""Aggregators that are killed before they are up, for longer than anybody waits for a silent one:
their supervisor has their memory all the while, so a job's optimiser state outlives it."""

import asyncio
import signal

import pytest

from slackwater.common.domains.facts.timeline import Timeline
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.replay import session
from slackwater.loadgen.replay.proof import mismatch
from slackwater.loadgen.replay.workload import PlannedJob, Workload, emulated
from slackwater.schemas.tensors import UpdateRule

# Slow: three times as long as a controller waits for a silent aggregator, and a cluster's start.
pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(180)]

LOOP_S = 20.0
REHOST_AFTER_S = 6.5
COMPUTE_S = 0.05
BYTES_SCALE = 0.004


def workload(iterations: int = 120) -> Workload:
    spec = emulated(
        "j",
        "alexnet",
        workers=2,
        servers=2,
        iterations=iterations,
        compute_s=COMPUTE_S,
        bytes_scale=BYTES_SCALE,
        seed=3,
        update=UpdateRule(name="adam", learning_rate=0.001),
    )
    return Workload(
        name="crash-loop",
        jobs=(PlannedJob(at_s=0.0, compute_s=COMPUTE_S, spec=spec),),
        bytes_scale=BYTES_SCALE,
        time_scale=1.0,
        seed=3,
    )


async def under_way(client: Client) -> None:
    """Some iterations are done, so that there is state to lose."""
    async with asyncio.timeout(90.0):
        while True:
            for record in await client.jobs("running"):
                progress = (await client.job_info(record.spec.id)).progress
                if progress is not None and progress.iteration:
                    await asyncio.sleep(4.0)
                    return
            await asyncio.sleep(0.2)


async def crash_loop(cluster: EmbeddedCluster, client: Client) -> set[str]:
    """End every life before its first heartbeat. Returns what the job's record says meanwhile."""
    loop = asyncio.get_running_loop()
    until_s, reasons = loop.time() + LOOP_S, set[str]()
    pool = [info.record for info in await client.aggregators()]
    victims = [f"aggregator-{record.id}" for record in pool if record.cluster is not None]
    assert len(victims) < len(pool), "there are others, where its buckets could begin anew"

    async def kill() -> None:
        """Kill on a clock of its own: while an answer is late, a life would reach its heartbeat."""
        while loop.time() < until_s:
            for name in victims:
                cluster.supervisor.kill(name, signal.SIGKILL)
            await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(kill())
        while loop.time() < until_s:
            await asyncio.sleep(0.3)
            reasons.add((await client.job("j")).reason)
    return reasons


async def test_a_crash_loop_costs_no_optimizer_state() -> None:
    options = ClusterOptions(
        controllers=1,
        aggregators=4,
        cpu_share=0.15,
        restarts_max=1000,
        restart_wait_s_max=0.05,
        controller={"rehost_after_s": REHOST_AFTER_S},
    )
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "test") as client:
        replay = asyncio.ensure_future(
            session.replay(client, workload(), lambda timeline, now_s: None)
        )
        await under_way(client)
        reasons = await crash_loop(cluster, client)
        timeline: Timeline = await replay
        assert list(timeline.tracks) == ["j"]
        record = await client.job("j")
    assert record.state == "completed", record.reason
    assert mismatch(record) is None
    assert not record.optimizer_state_lost
    assert any("which is being restarted" in reason for reason in reasons), reasons
