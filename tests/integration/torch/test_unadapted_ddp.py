"""DistributedDataParallel scripts that nobody adapted: aggregators add their gradients up, and
every loss and weight is what gloo gives, bit for bit.

Real processes. Twenty jobs of two ranks, two to four seconds each: the ranks are forked from a
process that has imported torch already.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.faults.gpu_nodes import GpuNodes, gpu_nodes

from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec

pytest.importorskip("torch", reason="PyTorch is not installed (make setup-torch)")

pytestmark = [pytest.mark.live, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

PROGRAM = Path(__file__).with_name("ddp_program.py")
SERVED = ("clipping", "accumulating", "uneven", "unused", "overflowing", "static")
NOT_SERVED = {
    "own_hook": "the program registers a communication hook of its own",
    "doubles": "its parameters are float64: they must be of one type, float32, float16, bfloat16",
    "two_models": "it is the second model that this program wraps",
    "sparse": "it has sparse gradients; aggregators take dense ones",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[GpuNodes]:
    async with gpu_nodes(1, 2) as made:
        yield made


async def ended(nodes: GpuNodes, case: str, aggregate: str, program: Path = PROGRAM) -> JobRecord:
    spec = JobSpec(
        id=f"{case.replace('_', '-')}-{aggregate}", workers=2, gpus=2, aggregate=aggregate,
        program=("python", str(program), case),
    )  # fmt: skip
    await nodes.client.submit(spec)
    for _ in range(1200):
        if (record := await nodes.client.job(spec.id)).state in TERMINAL_STATES:
            return record
        await asyncio.sleep(0.05)
    await nodes.client.cancel(spec.id)
    raise AssertionError(printed(nodes, record))


def printed(nodes: GpuNodes, record: JobRecord) -> list[str]:
    folder = nodes.state_dir("w1") / "jobs" / record.spec.id
    return [(folder / f"rank{rank}.log").read_text() for rank in range(2)]


def digests(logs: list[str]) -> list[str]:
    return [log.partition("ended at ")[2].split()[0] for log in logs]


async def both_ways(
    nodes: GpuNodes, case: str, program: Path = PROGRAM
) -> tuple[list[str], list[str]]:
    records = [await ended(nodes, case, way, program) for way in ("auto", "off")]
    shared, plain = (printed(nodes, record) for record in records)
    for record, logs in zip(records, (shared, plain), strict=True):
        assert record.state == "completed", (record.reason, logs)
    assert digests(shared) == digests(plain)
    assert not any("slackwater" in log for log in plain)
    return shared, plain


@pytest.mark.parametrize("case", SERVED)
async def test_losses_and_weights_are_those_of_gloo(nodes: GpuNodes, case: str) -> None:
    shared, _ = await both_ways(nodes, case)
    assert "aggregators add up the gradients of" in shared[0]
    progress = (await nodes.client.job_info(f"{case}-auto")).progress
    assert progress is not None
    assert progress.iteration >= 4


@pytest.mark.parametrize("case", NOT_SERVED)
async def test_what_no_hook_can_serve_is_said_and_trains_plainly(
    nodes: GpuNodes, case: str
) -> None:
    shared, _ = await both_ways(nodes, case)
    for log in shared:
        assert f"slackwater: plain DistributedDataParallel: {NOT_SERVED[case]}" in log


async def test_a_model_that_is_freed_after_its_group_does_not_hang(nodes: GpuNodes) -> None:
    """Plain torch 2.13 does: the thread that frees the group waits for one that waits for it."""
    record = await ended(nodes, "group_first", "auto")
    assert record.state == "completed", record.reason


async def test_a_job_that_insists_fails_where_no_hook_can_serve(nodes: GpuNodes) -> None:
    record = await ended(nodes, "doubles", "on")
    assert record.state == "failed"
    assert "--aggregate on: its parameters are float64" in record.reason
