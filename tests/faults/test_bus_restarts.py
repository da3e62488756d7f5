"""kill -9 of the bus, again and again, under a job with GPUs: its programs, which reach the bus by
the relay of their worker service alone, train on and go on reporting.

Real processes, some twenty seconds: the embedded cluster starts the bus again by itself.
"""

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from tests.faults.gpu_nodes import gpu_nodes
from tests.waiting import soon

from slackwater.common.base import codec
from slackwater.common.bus.base import Delivery
from slackwater.schemas import subjects
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.telemetry import GoodputReport, IterationsObserved

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

KILLS = 4
TRAIN = """
import time
from pathlib import Path
import numpy as np
from slackwater import Agent, BatchLimits, GoodputReporter

over = Path("over")
limits = BatchLimits(initial=32, total_max=1024, per_gpu_max=128)
with (
    Agent(tensors={"w": (64,)}, deadline_s=60.0) as agent,
    GoodputReporter(limits, report_s=0.2) as goodput,
):
    while agent.iteration < (int(over.read_text()) if over.exists() else 10**6):
        agent.step({"w": np.ones(64, np.float32)})
        goodput.saw_iteration(0.01, per_gpu=16, grad_s=0.008)
        time.sleep(0.01)
"""


async def test_agents_and_reporters_of_goodput_go_on_without_a_bus(tmp_path: Path) -> None:
    """No process is started again, and both kinds of report are heard after each kill."""
    (tmp_path / "train.py").write_text(TRAIN)
    heard: list[GoodputReport] = []
    done = 0

    async def hear(delivery: Delivery) -> None:
        heard.append(codec.decode(delivery.payload, GoodputReport))

    async def count(delivery: Delivery) -> None:
        nonlocal done
        seen = codec.decode(delivery.payload, IterationsObserved)
        done = max(done, seen.first_iteration + len(seen.durations_s))

    async with gpu_nodes(2, 1, worker={"environment": ["PYTHONPATH"]}) as nodes:
        bus = nodes.client.bus
        await bus.subscribe(subjects.telemetries("job", "j", "goodput"), hear)
        await bus.subscribe(subjects.telemetries("job", "j", "iterations"), count)
        await nodes.client.submit(
            JobSpec(
                id="j", workers=2, gpus=2, iterations=10**6, folder=str(tmp_path),
                program=(sys.executable, "train.py"),
            )
        )  # fmt: skip
        await soon(lambda: heard and done, "it trains and reports", 60.0)
        before = nodes.running("j")
        assert len(before) == 2
        for _ in range(KILLS):
            reports, iterations = len(heard), done
            nodes.cluster.supervisor.kill("nats", signal.SIGKILL)
            await soon(
                lambda n=reports, i=iterations: len(heard) > n + 2 and done > i + 20,
                "it is heard again", 60.0,
            )  # fmt: skip
        assert nodes.running("j") == before
        # Far enough ahead for both ranks to read it before they are there.
        (tmp_path / "new").write_text(str(done + 400))
        (tmp_path / "new").rename(tmp_path / "over")
        async with asyncio.timeout(60):
            while (record := await nodes.client.job("j")).state == "running":  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert record.state == "completed", record.reason
        assert not record.restarts
        assert not record.attempt
