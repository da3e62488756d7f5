"""One transport is forced on a whole embedded cluster: on the jobs' Agents and on handovers."""

import asyncio

import pytest

from slackwater.common.domains.facts.timeline import Timeline
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.replay import session
from slackwater.loadgen.replay.proof import mismatch
from slackwater.loadgen.replay.workload import PlannedJob, Workload, emulated

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

BYTES_SCALE = 0.004
COMPUTE_S = 0.03
# Some 12 s of training: what is asked of a running job is done before it ends.
ITERATIONS = 360


def workload(jobs: int, iterations: int) -> Workload:
    """Small AlexNets, "2s-2w"."""
    planned = tuple(
        PlannedJob(
            at_s=number * 0.5,
            compute_s=COMPUTE_S,
            spec=emulated(
                f"job{number}",
                "alexnet",
                workers=2,
                servers=2,
                iterations=iterations,
                compute_s=COMPUTE_S,
                bytes_scale=BYTES_SCALE,
                seed=23 + number,
            ),
        )
        for number in range(jobs)
    )
    return Workload(name="forced", jobs=planned, bytes_scale=BYTES_SCALE, time_scale=1.0, seed=23)


def ignore(timeline: Timeline, now_s: float) -> None:
    """No display."""


async def kinds_offered(client: Client) -> set[tuple[str, ...]]:
    """Tell which kinds of addresses there are, once every aggregator was heard."""
    async with asyncio.timeout(60.0):
        while True:
            beats = [info.heartbeat for info in await client.aggregators()]
            if beats and all(beats):
                return {tuple(kind for kind, _ in beat.addresses) for beat in beats if beat}
            await asyncio.sleep(0.1)


async def drain_one(client: Client) -> None:
    """Drain an aggregator that trains a job already."""
    async with asyncio.timeout(60.0):
        while True:
            for info in await client.aggregators():
                beat = info.heartbeat
                if beat is not None and beat.buckets and beat.bytes_in:
                    await client.drain(info.record.id, "leave", 60.0)
                    return
            await asyncio.sleep(0.1)


async def test_jobs_train_and_migrate_over_tcp_alone() -> None:
    """Buckets move between aggregators that offer nothing else, and nothing is lost on the way."""
    options = ClusterOptions(
        controllers=1,
        aggregators=5,
        cpu_share=0.15,
        transport="tcp",
        profiler={"window_iterations": 20, "profile_iterations": 8},
    )
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "test") as client:
        draining = asyncio.ensure_future(drain_one(client))
        timeline = await session.replay(client, workload(2, ITERATIONS), ignore)
        await draining
        assert await kinds_offered(client) == {("tcp",)}
        records = [await client.job(id) for id in timeline.tracks]
    assert [record.state for record in records] == ["completed"] * 2, [r.reason for r in records]
    assert [mismatch(record) for record in records] == [None] * 2
    assert all(track.profile is not None for track in timeline.tracks.values())
    moved = [m for m in timeline.migrations.values() if m.fact == "finished" and m.copied]
    assert moved, timeline.migrations


async def test_both_are_offered_and_what_the_worker_service_is_told_reaches_the_agents() -> None:
    """The Agent of a job's process refuses a transport that nobody knows; the job says why."""
    options = ClusterOptions(
        controllers=1,
        aggregators=2,
        environment={"worker-w1": {"SLACKWATER_TRANSPORT": "carrier-pigeon"}},
    )
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "test") as client:
        assert await kinds_offered(client) == {("shm", "tcp")}
        timeline = await session.replay(client, workload(1, 1), ignore)
        record = await client.job("job0")
    assert timeline.tracks["job0"].state == record.state == "failed"
    assert (
        "SLACKWATER_TRANSPORT 'carrier-pigeon': choose shm, verbs, tls, tcp or auto"
        in record.reason
    )
