"""DiLoCo on a live cluster: a worker that is killed, one that lags, one that joins.

Some seconds each: every worker is a process that imports torch, or is forked from one that has.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from slackwater.client import AsyncClient
from slackwater.common.embedded.cluster import ClusterOptions, EmbeddedCluster
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.tensors import DType

pytest.importorskip("torch", reason="PyTorch is not installed (make setup-torch)")

pytestmark = [pytest.mark.live, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]
LEARNED = 10.0
PROGRAM = Path(__file__).with_name("diloco_program.py")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncClient]:
    options = ClusterOptions(controllers=1, aggregators=1, nodes=1)
    async with EmbeddedCluster(options) as cluster, AsyncClient.connect(cluster.url) as found:
        yield found


async def begun(
    client: AsyncClient,
    id: str,
    folder: Path,
    exchanges: int,
    *arguments: object,
    dtype: DType = "float32",
    **more: Any,
) -> None:
    words = map(str, (*arguments, folder))
    program = ("python", str(PROGRAM), str(exchanges), *words)
    env = {"DTYPE": dtype}
    await client.submit(JobSpec(id=id, program=program, workers=2, servers=1, env=env, **more))


async def ended(client: AsyncClient, id: str, folder: Path) -> list[dict[str, Any]]:
    """Return what each rank told."""
    async with asyncio.timeout(120):
        while (record := await client.job(id)).state not in TERMINAL_STATES:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert record.state == "completed", record.reason
    return results(folder)


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result-*.json"))]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
async def test_a_worker_that_is_killed_goes_on_from_the_last_exchange(
    client: AsyncClient, tmp_path: Path, dtype: DType
) -> None:
    id = f"killed-{dtype}"
    await begun(client, id, tmp_path, 12, 1, 22, 0.01, restarts=1, dtype=dtype)
    found = await ended(client, id, tmp_path)
    assert len(found) == 2
    assert found[0]["digest"] == found[1]["digest"], "both end with the job's parameters"
    assert found[0]["loss"] < LEARNED, "a network that learned nothing has 20"
    assert (tmp_path / "killed").exists()
    assert sum((await client.job(id)).restarts.values()) == 1


async def test_nobody_waits_for_one_that_lags(client: AsyncClient, tmp_path: Path) -> None:
    await begun(client, "lags", tmp_path, 10, -1, 0, 0.15, consistency="asynchronous")
    found = await ended(client, "lags", tmp_path)
    assert found[0]["ended_s"] < found[1]["ended_s"] - 1.0, "the fast one was done long before"
    assert found[1]["loss"] < LEARNED


@pytest.mark.parametrize("dtype", ["float32", "int8"])
async def test_a_worker_joins_at_the_others_exchange(
    client: AsyncClient, tmp_path: Path, dtype: DType
) -> None:
    folder, id = tmp_path, f"grows-{dtype}"
    bounds = {"workers_min": 1, "workers_max": 3}
    await begun(client, id, folder, 250, -1, 0, 0.01, dtype=dtype, **bounds)

    async def until(look: Any) -> JobRecord:
        async with asyncio.timeout(90):
            while not look(record := await client.job(id)):
                assert record.state not in TERMINAL_STATES, record.reason
                await asyncio.sleep(0.05)
        return record

    await until(lambda _: (folder / "steps-1").exists())
    await client.scale(id, 3)
    await until(lambda _: (folder / "steps-2").exists())
    steps = [int((folder / f"steps-{rank}").read_text() or 0) for rank in (0, 2)]
    assert steps[1] > 4, "it begins where the others are, and not at its own first step"
    found = await ended(client, id, folder)
    assert len({each["digest"] for each in found}) == 1
    assert len(found) == 3
