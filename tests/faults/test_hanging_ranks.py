"""A rank of a running job sleeps, waits for a lock or is stopped: it is named with its place.

Real processes and a real bus. Each case takes up to half a minute: a hang is one after ten seconds.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.faults.gpu_nodes import GpuNodes, gpu_nodes, hang_of

from slackwater.schemas.jobs import JobSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

NAMED_S = 30.0
TRAIN = """
import sys, threading, time
import numpy as np
from slackwater import Agent

def where_it_stands():
    print("here it stands", flush=True)
    {what}

agent = Agent(tensors={"w": (64,)}, deadline_s=300.0)
for iteration in range(agent.iteration, 100_000):
    time.sleep(0.05)
    if agent.rank == 2 and iteration == 40:
        where_it_stands()
    agent.step({"w": np.ones(64, np.float32)})
"""
WAYS = {
    "sleeps": "time.sleep(600)",
    "dead-lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "stopped": "pass",
    "one-long-iteration": "time.sleep(0.5)",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[GpuNodes]:
    async with gpu_nodes(2, 2) as made:
        yield made


async def beyond(nodes: GpuNodes, id: str, iteration: int) -> None:
    for _ in range(600):
        progress = (await nodes.client.job_info(id)).progress
        if progress is not None and progress.iteration >= iteration:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(progress)


@pytest.mark.parametrize("way", WAYS)
async def test_a_rank_that_hangs_is_named(nodes: GpuNodes, way: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("{what}", WAYS[way]))
    id = f"job-{way}"
    await nodes.client.submit(
        JobSpec(id=id, workers=4, gpus=4, iterations=100_000, program=("python", str(script)))
    )
    await beyond(nodes, id, 30)
    (stopped,) = [one for one in nodes.running(id) if one.rank == 2]
    try:
        if way == "stopped":
            os.killpg(stopped.pid, signal.SIGSTOP)
        hang = await hang_of(nodes, id, NAMED_S)
        if way == "one-long-iteration":
            assert hang is None
            await beyond(nodes, id, 60)
            return
        assert hang is not None
        assert [(one.rank, one.node) for one in hang.ranks] == [(2, stopped.node)]
        if way == "stopped":
            assert "its process was stopped by a signal" in hang.reason
        else:
            assert f"rank 2 on {stopped.node} hangs, in {script}:8 where_it_stands" in hang.reason
            assert "train.py" in hang.ranks[0].look.stack
    finally:
        if way == "stopped":
            os.killpg(stopped.pid, signal.SIGCONT)
        await nodes.client.cancel(id)


PLAIN = """
import os, pathlib, sys, time

def where_it_stands():
    time.sleep(600)

for number in range(8):
    print("step", number, flush=True)
    time.sleep(0.2)
again = pathlib.Path(sys.argv[1], os.environ["RANK"])
if not again.exists():
    again.touch()
    where_it_stands()
"""


async def test_a_program_without_an_agent_is_started_again(nodes: GpuNodes, tmp_path: Path) -> None:
    """Neither rank prints or computes for half of the timeout: it is named; then it is over."""
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    spec = JobSpec(
        id="plain", workers=2, gpus=2, program=("python", str(script), str(tmp_path)),
        hang_timeout_s=12.0,
    )  # fmt: skip
    await nodes.client.submit(spec)
    hang = await hang_of(nodes, "plain", NAMED_S)
    assert hang is not None
    assert f"hangs, in {script}:5 where_it_stands" in hang.reason
    assert "it has printed and computed nothing for" in hang.reason
    async with asyncio.timeout(60):
        while True:
            job = (await nodes.client.job_info("plain")).job
            assert job.state != "failed", job.reason
            if job.state == "completed":
                break
            await asyncio.sleep(0.2)
    assert job.attempt == 1


@pytest.mark.nightly
@pytest.mark.timeout(1200)
async def test_an_hour_of_training_raises_no_alarm(tmp_path: Path) -> None:
    """Four jobs train for fifteen minutes each, side by side; one in fifty iterations is nine times
    as long as the others."""
    script = tmp_path / "uneven.py"
    script.write_text(
        TRAIN.replace(
            "time.sleep(0.05)", "time.sleep(SHORT_S * (9 if iteration % 50 == 49 else 1))"
        )
        .replace("import sys,", "SHORT_S = 1.2\nimport sys,")
        .replace("agent.rank == 2 and iteration == 40", "False")
        .replace("{what}", "pass")
    )
    seen: dict[str, int] = {}
    async with gpu_nodes(4, 2) as nodes:
        ids = [f"hour-{number}" for number in range(4)]
        for id in ids:
            program = ("python", str(script))
            await nodes.client.submit(
                JobSpec(id=id, workers=2, gpus=2, iterations=100_000, program=program)
            )
        await asyncio.gather(*(beyond(nodes, id, 3) for id in ids))
        for _ in range(900):
            for id in ids:
                info = await nodes.client.job_info(id)
                assert (info.job.state, info.hang) == ("running", None), info.job.reason
                assert info.progress is not None
                seen[id] = info.progress.iteration
            await asyncio.sleep(1.0)
    assert min(seen.values()) > 400, seen
