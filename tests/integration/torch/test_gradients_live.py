"""The wrapper with aggregate="gradients" on a live cluster: any optimiser, clipped by the global
norm, under a GradScaler that skips steps; and a rank that is killed.

Real processes: two jobs of two ranks, each of which imports torch or is forked from one that has.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.gpu_nodes import GpuNodes, gpu_nodes
from tests.integration.torch.test_unadapted_ddp import printed

from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobSpec

pytest.importorskip("torch", reason="PyTorch is not installed (make setup-torch)")

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

PROGRAM = Path(__file__).with_name("gradients_program.py")
STEPS, KILLED_AT = "24", "12"


def loss_alone() -> float:
    words = [sys.executable, str(PROGRAM), STEPS, "0"]
    alone = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    return float(alone.stdout.split()[1])


async def ended(nodes: GpuNodes, id: str, *arguments: str, restarts: int = 0) -> list[str]:
    """Return the last line of each rank."""
    program = ("python", str(PROGRAM), STEPS, *arguments)
    spec = JobSpec(id=id, workers=2, gpus=2, program=program, restarts=restarts)
    await nodes.client.submit(spec)
    async with asyncio.timeout(120):
        while (record := await nodes.client.job(id)).state not in TERMINAL_STATES:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    logs = printed(nodes, record)
    assert record.state == "completed", (record.reason, logs)
    assert sum(record.restarts.values()) == restarts
    assert not any("wrapped no model" in log for log in logs), logs
    return [log.rstrip().rpartition("\n")[2] for log in logs]


async def test_it_trains_as_alone_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    """A rank that dies takes the other one back to their checkpoint: the end is the same, to the
    bit. Regression: `checkpoint` took every wrapper's state for the aggregators'."""
    expected = await asyncio.to_thread(loss_alone)
    async with gpu_nodes(1, 2) as nodes:
        undisturbed = await ended(nodes, "undisturbed", "0")
        killed = await ended(nodes, "killed", KILLED_AT, str(tmp_path), restarts=1)
    assert undisturbed[0] == undisturbed[1] == killed[0] == killed[1]
    assert float(killed[0].split()[1]) == pytest.approx(expected, abs=1e-4)
