"""Ranks that end early, die or hang in real processes: the others say who, where and why.

A few seconds each: an Agent asks after two seconds of waiting.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

TRAIN = """
import sys, time
import numpy as np
from slackwater import Agent

agent = Agent(tensors={"w": (64,)}, deadline_s=60.0)
for iteration in range(agent.iteration, 20):
    if agent.rank == 1 and iteration == 13:
        print("the data ends here")
        {what}
    agent.step({"w": np.ones(64, np.float32)})
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    async with EmbeddedCluster(ClusterOptions(controllers=1, aggregators=2)) as cluster:
        yield cluster.url


def script(folder: Path, what: str) -> str:
    path = folder / "train.py"
    path.write_text(TRAIN.replace("{what}", what))
    return str(path)


def submitted(id: str, program: str) -> JobSpec:
    return JobSpec(id=id, workers=2, iterations=20, program=("python", program))


async def until(client: Client, id: str, what: str) -> JobRecord:
    for _ in range(600):
        record = await client.job(id)
        if what in record.reason or record.state in TERMINAL_STATES:
            return record
        await asyncio.sleep(0.1)
    raise AssertionError(f"{id}: {record}")


async def test_uneven_data_ends_the_wait_and_names_who_ended(url: str, tmp_path: Path) -> None:
    async with connect(url) as client:
        await client.submit(submitted("uneven", script(tmp_path, "sys.exit(0)")))
        record = await until(client, "uneven", "nothing")
        assert record.state == "failed"
        assert record.reason.startswith("rank 0 on w1 ended with exit code 1: ")
        assert (
            "rank 1 ended after iteration 13 of 20; rank 0 waits at iteration 14" in record.reason
        )
        assert record.results == {"1": ""}, "a script that says nothing has no result"


async def test_a_hung_rank_is_named_and_left_alone(url: str, tmp_path: Path) -> None:
    async with connect(url) as client:
        await client.submit(submitted("hung", script(tmp_path, "time.sleep(1000)")))
        record = await until(client, "hung", "rank 1 has not pushed")
        assert record.state == "running"
        assert "though its process was heard " in record.reason
        assert " s ago (iteration 13" in record.reason
        assert "rank 0 waits at iteration 14" in record.reason
        await client.cancel("hung")


def started_by_hand(folder: Path, program: str, url: str, rank: int) -> "subprocess.Popen[bytes]":
    """Start a rank as torchrun does."""
    said = {"SLACKWATER_URL": url, "SLACKWATER_JOB": "hand", "WORLD_SIZE": "2", "RANK": str(rank)}
    return subprocess.Popen([sys.executable, program], cwd=folder, env={**os.environ, **said})


async def test_a_rank_that_is_killed_by_hand_is_named(url: str, tmp_path: Path) -> None:
    """No worker service watches its process: its Agent is not heard any more."""
    program = script(tmp_path, "open('there', 'w').close(); time.sleep(1000)")
    ranks = [started_by_hand(tmp_path, program, url, rank) for rank in range(2)]
    try:
        for _ in range(600):
            if (tmp_path / "there").exists():
                break
            await asyncio.sleep(0.05)
        ranks[1].send_signal(signal.SIGKILL)
        async with connect(url) as client:
            record = await until(client, "hand", "rank 1 is silent since")
        assert record.state == "running"
        assert "(iteration 13); rank 0 waits at iteration 14" in record.reason
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(30)
