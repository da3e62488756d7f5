"""Programs that adapt their batch, as jobs: aggregators add up their gradients, the policy hears
how well they train, and they go on with other GPUs.

Real processes: a cluster, and programs that import torch and train until a first fit: half a
minute each.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.faults.gpu_nodes import GpuNodes, gpu_nodes

from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobSpec

pytest.importorskip("torch", reason="PyTorch is not installed (make setup-torch)")

pytestmark = [pytest.mark.live, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

PROGRAM = Path(__file__).parents[2] / "unit" / "torch" / "adaptive_program.py"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[GpuNodes]:
    settings = {"round_s": "5", "delay_s": "1"}
    master = {"gpu_policy": "pollux", "gpu_policy_settings": settings}
    async with gpu_nodes(1, 2, master=master) as made:
        yield made


def logs(nodes: GpuNodes, job: str) -> list[str]:
    folder = nodes.state_dir("w1") / "jobs" / job
    return [path.read_text() for path in sorted(folder.glob("rank*.log"))]


async def ended(nodes: GpuNodes, spec: JobSpec) -> list[str]:
    await nodes.client.submit(spec)
    async with asyncio.timeout(240):
        while (record := await nodes.client.job(spec.id)).state not in TERMINAL_STATES:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    printed = logs(nodes, spec.id)
    assert record.state == "completed", (record.reason, printed)
    return printed


def results(result: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads(Path(f"{result}.{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("way", ["ddp", "wrapper"])
async def test_workers_of_aggregators_measure_decide_and_train_alike(
    nodes: GpuNodes, way: str, tmp_path: Path
) -> None:
    """By the hook of an ordinary DDP script, and by the wrapped optimiser."""
    spec = JobSpec(
        id=f"adapts-{way}", workers=2, gpus=2,
        program=("python", str(PROGRAM), way, str(tmp_path / "result")),
    )  # fmt: skip
    printed = await ended(nodes, spec)
    if way == "ddp":
        assert "aggregators add up the gradients of" in printed[0]
    first, second = results(tmp_path / "result", 2)
    assert first["decisions"] == second["decisions"]
    assert first["weights"] == second["weights"]
    assert first["examples"] != second["examples"]
    assert first["folded"] == second["folded"] == (way == "wrapper"), "noise is summed in folds"
    grown = max(batch for batch, _ in first["decisions"].values())
    assert grown > 16, "it may shrink again where the machine's times change"


async def test_pollux_gives_a_job_more_gpus_by_what_it_measured_and_it_goes_on(
    nodes: GpuNodes, tmp_path: Path
) -> None:
    """It begins on one GPU. Its report earns it the second one: it saves, and both new processes
    go on with what the first one had learned."""
    spec = JobSpec(
        id="grows", workers=2, gpus=2, gpus_min=1, gpus_max=2, adaptive=True,
        program=("python", str(PROGRAM), "ddp", str(tmp_path / "result")),
        env={"CHECKPOINT": str(tmp_path / "state"), "GPUS_WANTED": "2"},
    )  # fmt: skip
    await ended(nodes, spec)
    first, second = results(tmp_path / "result", 2)
    assert first["began"] > 0
    assert first["began"] == second["began"]
    assert first["decisions"] == second["decisions"]
    assert first["weights"] == second["weights"]
    points = (await nodes.client.job_info("grows")).history
    assert any(point.progress_epochs and point.batch >= 16 for point in points), points
