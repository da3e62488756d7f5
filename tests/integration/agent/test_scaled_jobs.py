"""Jobs that change their number of workers while they train: real processes, shm and tcp.

Several seconds each: every worker that joins is a Python process of its own.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.folding import replay
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.tensors import UpdateRule
from slackwater.services.master.gangs import processes

pytestmark = [pytest.mark.live, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

SIZES = {"w": 700_000, "b": 33}
TRAIN = """
import json, os, sys, time
import numpy as np
from slackwater import Agent

folder = sys.argv[1]
transport = "tcp" if os.environ.get("ONLY_TCP") else None
agent = Agent(tensors={"w": (700_000,), "b": (33,)}, deadline_s=100.0, transport=transport)
log = open(f"{folder}/rank{agent.rank}.{os.getpid()}", "w")

def last():
    try:
        return int(open(f"{folder}/last").read())
    except (OSError, ValueError):
        return 10**9

while agent.iteration < last():
    number = agent.gradients + agent.rank
    log.write(f"{agent.iteration + 1} {agent.workers}\\n")
    log.flush()
    rng = np.random.default_rng(number)
    agent.step({
        "w": np.full(700_000, rng.standard_normal(), np.float32),
        "b": rng.standard_normal(33, np.float32),
    })
    time.sleep(0.01)
sums = {name: agent.pull(name).tobytes().hex()[:200] for name in ("w", "b")}
agent.close(sums)
"""
UPDATE = UpdateRule(name="momentum", learning_rate=0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    options = ClusterOptions(controllers=1, aggregators=2, transport="auto")
    async with EmbeddedCluster(options) as cluster:
        yield cluster


def spec(id: str, folder: Path, **changes: Any) -> JobSpec:
    program = folder / "train.py"
    program.write_text(TRAIN)
    return JobSpec(
        id=id, workers=2, workers_min=1, workers_max=4, iterations=1000, update=UPDATE,
        program=("python", str(program), str(folder)), **changes,
    )  # fmt: skip


async def until(client: Client, id: str, workers: int) -> JobRecord:
    """Wait until so many count."""
    for _ in range(900):
        record = await client.job(id)
        assert record.state not in TERMINAL_STATES, record.reason
        if record.state == "running" and not record.resizing and processes(record) == workers:
            return record
        await asyncio.sleep(0.05)
    raise AssertionError(f"{id}: {record}")


def iterations(folder: Path, rank: int = 0) -> dict[int, int]:
    """Iteration -> the number of workers that the rank saw."""
    found: dict[int, int] = {}
    for path in sorted(folder.glob(f"rank{rank}.*"), key=lambda path: path.stat().st_mtime):
        for line in path.read_text().splitlines():
            iteration, workers = map(int, line.split())
            found[iteration] = workers
    return found


def processes_of(folder: Path) -> set[str]:
    """List the processes that rank 0 has had."""
    return {path.name for path in folder.glob("rank0.*")}


async def trained(folder: Path, more: int) -> None:
    """Wait for so many more iterations."""
    end = len(iterations(folder)) + more
    for _ in range(600):
        if len(iterations(folder)) >= end:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{folder} stands still")


async def ended(client: Client, id: str, folder: Path) -> dict[str, str]:
    last = max(iterations(folder)) + 40
    (folder / "last.new").write_text(str(last))
    (folder / "last.new").rename(folder / "last")
    for _ in range(900):
        record = await client.job(id)
        if record.state in TERMINAL_STATES:
            assert record.state == "completed", record.reason
            found: dict[str, str] = json.loads(record.results["0"])
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"{id}: {record}")


def expected(sizes: dict[int, int]) -> dict[str, str]:
    """Replay the job alone: what its parameters must be, given who counted when."""
    begun, small, large = 0, [], []
    for workers in sizes.values():
        rngs = [np.random.default_rng(begun + rank) for rank in range(workers)]
        large.append([np.full(25, rng.standard_normal(), np.float32) for rng in rngs])
        small.append([rng.standard_normal(33, np.float32) for rng in rngs])
        begun += workers
    first = np.zeros(25, np.float32), np.zeros(33, np.float32)
    return {
        "w": replay(UPDATE, "float32", first[0], large).tobytes().hex()[:200],
        "b": replay(UPDATE, "float32", first[1], small).tobytes().hex()[:200],
    }


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_two_three_one_two_workers_lose_no_iteration(
    cluster: EmbeddedCluster, tmp_path: Path, transport: str
) -> None:
    id = f"scaled-{transport}"
    async with connect(cluster.url) as client:
        env = {} if transport == "shm" else {"ONLY_TCP": "1"}
        await client.submit(spec(id, tmp_path, env=env))
        await until(client, id, 2)
        await trained(tmp_path, 10)
        pids = processes_of(tmp_path)
        for workers in (3, 1, 2):
            await client.scale(id, workers)
            await until(client, id, workers)
            await trained(tmp_path, 10)
        results = await ended(client, id, tmp_path)
    sizes = iterations(tmp_path)
    assert len(pids) == 1
    assert processes_of(tmp_path) == pids, "rank 0 kept its process"
    assert list(sizes) == list(range(1, len(sizes) + 1)), "no iteration was lost or repeated"
    assert set(sizes.values()) == {1, 2, 3}
    assert results == expected(sizes)


async def test_a_paused_job_goes_on_with_another_number_of_workers(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    async with connect(cluster.url) as client:
        await client.submit(spec("paused", tmp_path))
        await until(client, "paused", 2)
        await trained(tmp_path, 10)
        for workers in (1, 4):
            await client.pause("paused")
            record = await client.scale("paused", workers)
            assert record.workers == workers
            await client.resume("paused")
            await until(client, "paused", workers)
            await trained(tmp_path, 10)
        await ended(client, "paused", tmp_path)
    sizes = iterations(tmp_path)
    assert list(sizes) == list(range(1, len(sizes) + 1)), "no iteration was lost"
    assert set(sizes.values()) == {1, 2, 4}


async def test_what_cannot_be_is_refused_with_a_reason(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    async with connect(cluster.url) as client:
        await client.submit(spec("refused", tmp_path, tenant="t"))
        for workers in (5, 64):
            with pytest.raises(Rejected, match=f"{workers} workers: job refused can have 1 to 4"):
                await client.scale("refused", workers)
        with pytest.raises(Rejected, match="there is no job none"):
            await client.scale("none", 2)
        await client.cancel("refused")
        with pytest.raises(Rejected, match="job refused was cancelled"):
            await client.scale("refused", 3)
