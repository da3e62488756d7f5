"""kill -9 of ranks, of the worker service and of the master, at random moments: ranks join again
where the job is, and the result is that of an undisturbed run.

Real processes and bytes. Each test takes ten to thirty seconds: a rank that is started again
imports numpy, registers and attaches anew, again and again.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slackwater.common.base import limits
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.replay.proof import mismatch
from slackwater.loadgen.replay.workload import emulated
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.services.worker.processes import RankFiles

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

Running = tuple[EmbeddedCluster, Client]


@asynccontextmanager
async def running(transport: str = "") -> AsyncIterator[Running]:
    options = ClusterOptions(
        controllers=1, aggregators=2, restarts_max=1000, restart_wait_s_max=0.05,
        **({"transport": transport} if transport else {}),
    )  # fmt: skip
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "test") as client:
        yield cluster, Client(client.bus, client.clock, budget_s=limits.RETRY_BUDGET_S)


def job(id: str, iterations: int, **fields: Any) -> JobSpec:
    spec = emulated(
        id, "alexnet", workers=2, servers=1, iterations=iterations, compute_s=0.02,
        bytes_scale=0.004, seed=7,
    )  # fmt: skip
    return msgspec.structs.replace(spec, restarts=1000, **fields)


def ranks_of(cluster: EmbeddedCluster, id: str, restarts: dict[str, int]) -> list[int]:
    """The process groups of the job's ranks that run."""
    state_dir = Path(cluster.supervisor.state_dir) / "worker-w1"
    files = [RankFiles(state_dir, id, rank, restarts.get(str(rank), 0)) for rank in range(2)]
    found = [each.identity() for each in files]
    return [one.pid for one in found if one is not None and one.alive()]


async def ended(client: Client, id: str) -> JobRecord:
    for _ in range(1500):
        if (record := await client.job(id)).state in TERMINAL_STATES:
            return record
        await asyncio.sleep(0.1)
    raise AssertionError(f"job {id} does not end: {record}")


async def kill_ranks(
    cluster: EmbeddedCluster, client: Client, id: str, seed: int, kills: int, services: list[str]
) -> int:
    """Kill -9 ranks, and now and then a service while one is being started again; how many."""
    rng, killed = random.Random(seed), 0
    while killed < kills:
        await asyncio.sleep(rng.uniform(0.2, 1.2))
        record = await client.job(id)
        if record.state in TERMINAL_STATES:
            break
        groups = ranks_of(cluster, id, record.restarts)
        if not groups:
            continue
        with contextlib.suppress(ProcessLookupError):  # It ended by itself meanwhile.
            os.killpg(rng.choice(groups), signal.SIGKILL)
            killed += 1
        if services and rng.random() < 0.5:
            await asyncio.sleep(rng.uniform(0.0, 0.6))
            cluster.supervisor.kill(rng.choice(services), signal.SIGKILL)
    return killed


@pytest.mark.parametrize(
    ("transport", "services"),
    [
        pytest.param("", [], marks=pytest.mark.nightly),
        ("tcp", []),
        ("", ["worker-w1", "master-m1"]),
    ],
    ids=["shm", "tcp", "with-services"],
)
async def test_a_synchronous_job_ends_at_the_bits_of_an_undisturbed_one(
    transport: str, services: list[str]
) -> None:
    async with running(transport) as (cluster, client):
        spec = job("sync", iterations=400)
        await client.submit(spec)
        killed = await kill_ranks(cluster, client, "sync", 3, 8, services)
        record = await ended(client, "sync")
        assert record.state == "completed", record.reason
        assert killed >= 4
        assert sum(record.restarts.values()) == killed, record.restarts
        assert mismatch(record) is None
        assert not record.optimizer_state_lost


@pytest.mark.parametrize(
    ("consistency", "staleness", "transport"),
    [("asynchronous", 0, ""), ("stale-synchronous", 2, ""), ("asynchronous", 0, "tcp")],
)
async def test_each_push_of_the_other_modes_counts_exactly_once(
    consistency: str, staleness: int, transport: str
) -> None:
    """Each rank ends after exactly its iterations, and the job's updates are all ranks' pushes."""
    async with running(transport) as (cluster, client):
        iterations = 250
        spec = job("other", iterations=iterations, consistency=consistency, staleness=staleness)
        await client.submit(spec)
        killed = await kill_ranks(cluster, client, "other", 5, 5, [])
        record = await ended(client, "other")
        assert record.state == "completed", record.reason
        assert killed >= 2
        assert sum(record.restarts.values()) == killed
        results = [msgspec.json.decode(text) for text in record.results.values()]
        assert [result["iterations"] for result in results] == [iterations] * 2


async def test_without_restarts_the_first_death_ends_the_job_in_plain_words() -> None:
    async with running() as (cluster, client):
        await client.submit(msgspec.structs.replace(job("once", 2000), restarts=0))
        groups: list[int] = []
        for _ in range(600):
            if groups := ranks_of(cluster, "once", {}):
                break
            await asyncio.sleep(0.05)
        os.killpg(groups[0], signal.SIGKILL)
        record = await ended(client, "once")
        assert record.state == "failed"
        assert "on w1 ended, and its exit code is not known: it was killed" in record.reason
