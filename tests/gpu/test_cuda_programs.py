"""PyTorch programs whose models are on a GPU, with aggregators that have it and that have not: the
same bits in every way. Real processes, two ranks on one GPU."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio
from tests.gpu.conftest import no_gpu

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobSpec

pytest.importorskip("torch", reason="PyTorch is not installed (make setup-torch)")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.live,
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="module"),
]
PROGRAM = Path(__file__).with_name("cuda_program.py")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["host", "cuda"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Client, Path]]:
    if why := no_gpu():
        pytest.skip(f"no GPU here: {why}")
    device = {"device": "cuda"} if request.param == "cuda" else {}
    state_dir = Path(tempfile.mkdtemp(prefix="slw-"))
    options = ClusterOptions(
        aggregators=2, controllers=1, gpus_per_node=0, aggregator=device, state_dir=state_dir
    )
    async with EmbeddedCluster(options) as made, connect(made.url) as client:
        yield client, state_dir / "worker-w1" / "jobs"


async def digests(
    cluster: tuple[Client, Path],
    way: str,
    aggregate: Literal["auto", "on", "off"] = "auto",
    workers: int = 2,
) -> list[str]:
    client, folder = cluster
    spec = JobSpec(
        id=f"{way}-{aggregate}-{workers}", workers=workers, aggregate=aggregate,
        program=("python", str(PROGRAM), way), folder=os.fspath(PROGRAM.parent),
    )  # fmt: skip
    await client.submit(spec)
    for _ in range(600):
        if (record := await client.job(spec.id)).state in TERMINAL_STATES:
            break
        await asyncio.sleep(0.1)
    logs = [(folder / spec.id / f"rank{rank}.log").read_text() for rank in range(workers)]
    assert record.state == "completed", (record.reason, logs)
    return [log.partition("ended at ")[2].split()[0] for log in logs]


async def test_unadapted_ddp_ends_at_gloos_bits(cluster: tuple[Client, Path]) -> None:
    plain = await digests(cluster, "ddp", "off")
    assert plain == await digests(cluster, "ddp", "on")


async def test_a_wrapped_optimiser_ends_at_one_result_wherever_its_gradients_lie(
    cluster: tuple[Client, Path],
) -> None:
    found = {digest for way in ("wrapper", "device") for digest in await digests(cluster, way)}
    assert len(found) == 1


async def test_a_clipping_optimiser_in_the_program_is_the_same_on_all_workers(
    cluster: tuple[Client, Path],
) -> None:
    assert len(set(await digests(cluster, "gradients"))) == 1


async def test_virtual_ranks_end_at_one_result_with_any_number_of_workers(
    cluster: tuple[Client, Path],
) -> None:
    found = [
        digest
        for workers in (1, 2, 4)
        for digest in await digests(cluster, "elastic", workers=workers)
    ]
    assert len(set(found)) == 1
