"""Asynchronous jobs that change their number of workers while they train: real processes, shm and
tcp. Every gradient is 1 and each update takes .5 off, so that the parameters tell how many pushes
they are made of.

Several seconds each: every worker that joins is a Python process of its own.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import groupby
from pathlib import Path

import pytest
import pytest_asyncio
from tests.integration.agent.test_scaled_jobs import (
    ended,
    iterations,
    processes_of,
    trained,
    until,
)

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.tensors import UpdateRule

pytestmark = [pytest.mark.live, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

TRAIN = """
import os, sys, time
import numpy as np
from slackwater import Agent

folder = sys.argv[1]
transport = "tcp" if os.environ.get("ONLY_TCP") else None
agent = Agent(tensors={"w": (500_000,)}, deadline_s=100.0, transport=transport)
log = open(f"{folder}/rank{agent.rank}.{os.getpid()}", "w")
ones = np.ones(500_000, np.float32)

def over():
    return os.path.exists(f"{folder}/last")

while not over():
    log.write(f"{agent.iteration + 1} {agent.workers}\\n")
    log.flush()
    agent.step({"w": ones})
    time.sleep(0.01)
whole = agent.pull("w")
assert (whole == whole[0]).all(), "a pull is one whole version"
agent.close([float(whole[0]), agent.updates, agent.iteration])
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    options = ClusterOptions(controllers=1, aggregators=2, transport="auto")
    async with EmbeddedCluster(options) as cluster:
        yield cluster


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_two_three_one_two_workers_lose_no_update(
    cluster: EmbeddedCluster, tmp_path: Path, transport: str
) -> None:
    id = f"scaled-asynchronous-{transport}"
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    spec = JobSpec(
        id=id, workers=2, workers_min=1, workers_max=4, iterations=1000,
        consistency="asynchronous", update=UpdateRule(learning_rate=0.5),
        program=("python", str(program), str(tmp_path)),
        env={} if transport == "shm" else {"ONLY_TCP": "1"},
    )  # fmt: skip
    async with connect(cluster.url) as client:
        await client.submit(spec)
        await until(client, id, 2)
        await trained(tmp_path, 10)
        pids = processes_of(tmp_path)
        await measured(client, id)
        for workers in (3, 1, 2):
            await client.scale(id, workers)
            await until(client, id, workers)
            await trained(tmp_path, 10)
        await ended(client, id, tmp_path)
        record = await client.job(id)
    assert processes_of(tmp_path) == pids, "rank 0 goes on in its process"
    seen = iterations(tmp_path)
    assert list(seen) == list(range(1, len(seen) + 1)), "rank 0 misses and repeats none"
    assert [workers for workers, _ in groupby(seen.values())] == [2, 3, 1, 2]
    told = [json.loads(result) for result in record.results.values()]
    assert all(value == -0.5 * updates for value, updates, _ in told), told
    assert max(updates for _, updates, _ in told) >= sum(own for _, _, own in told)
    assert record.steps is not None, "what was measured stays"


async def measured(client: Client, id: str) -> None:
    """Wait until the master knows the times of its iterations: a busy machine's reports are few."""
    for _ in range(900):
        if (await client.job(id)).steps is not None:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(await client.job(id))
