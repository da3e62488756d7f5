"""A running cluster under HELL: an asynchronous job begins with one GPU, is measured there, and is
given the number that its times are worth, while it trains (Lin et al. 2018, section IV).

Several seconds: each worker is a Python process of its own, and 40 iterations come first.
"""

import asyncio
from pathlib import Path

import pytest

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.gpus import held
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(180), pytest.mark.asyncio]

TRAIN = """
import sys, time
from pathlib import Path
import numpy as np
from slackwater import Agent

folder = Path(sys.argv[1])
with Agent(tensors={"w": (1000,)}, deadline_s=100.0) as agent:
    (folder / f"rank{agent.rank}.{time.monotonic_ns()}").touch()
    while not (folder / "over").exists():
        time.sleep(0.05)
        agent.step({"w": np.ones(1000, np.float32)})
"""


def processes(folder: Path) -> int:
    """Count the processes that rank 0 has had."""
    return len(list(folder.glob("rank0.*")))


async def until_it_holds(client: Client, id: str, gpus: int) -> JobRecord:
    for _ in range(1200):
        record = await client.job(id)
        assert record.state not in TERMINAL_STATES, record.reason
        settled = record.state == "running" and not record.resizing
        if settled and held(record.allocation) == gpus:
            return record
        await asyncio.sleep(0.05)
    raise AssertionError(f"{id} never holds {gpus} GPUs: {record}")


async def test_hell_gives_a_job_that_computes_all_gpus_once_it_is_measured(tmp_path: Path) -> None:
    options = ClusterOptions(
        controllers=1, aggregators=1, gpus_per_node=3, master={"gpu_policy": "hell"}
    )
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    spec = JobSpec(
        id="sized", workers=1, gpus=1, gpus_min=1, gpus_max=3, adaptive=True, iterations=100_000,
        consistency="asynchronous", program=("python", str(program), str(tmp_path)),
    )  # fmt: skip
    async with EmbeddedCluster(options) as cluster, connect(cluster.url) as client:
        await client.submit(spec)
        first = await until_it_holds(client, "sized", 1)
        assert first.steps is None
        grown = await until_it_holds(client, "sized", 3)
        (tmp_path / "over").touch()
    assert grown.steps is not None
    assert grown.steps.workers == 1, "it was measured alone"
    assert grown.steps.worker_s > grown.steps.server_s
    assert grown.attempt == first.attempt, "it was not stopped"
    assert processes(tmp_path) == 1
