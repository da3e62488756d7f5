"""Jobs that their aggregators save, in a whole cluster: begun again, killed, robbed of memory."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.faults.test_crash_loop import under_way, workload

from slackwater.common.base import codec
from slackwater.common.base.checkpoint_folder import newest_of_buckets
from slackwater.common.base.errors import SlackwaterError
from slackwater.common.domains.slots.saved_bucket import SavedJob
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.replay.proof import mismatch
from slackwater.schemas import subjects
from slackwater.schemas.checkpoints import CheckpointProgress
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_states import JobState
from slackwater.schemas.jobs import JobRecord, JobSpec

# Five to fifteen seconds each: a cluster's start, and a job of 120 iterations once or twice.
pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

SPEC: JobSpec = workload().jobs[0].spec


@asynccontextmanager
async def cluster_of(
    aggregators: int,
    environment: dict[str, dict[str, str]] | None = None,
    controller: dict[str, Any] | None = None,
    **aggregator: Any,
) -> AsyncIterator[tuple[EmbeddedCluster, Client]]:
    options = ClusterOptions(
        controllers=1, aggregators=aggregators, cpu_share=0.15, transport="auto",
        environment=environment or {}, aggregator=aggregator, controller=controller or {},
    )  # fmt: skip
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "test") as client:
        yield cluster, client


async def reaches(client: Client, id: str, state: JobState) -> JobRecord:
    async with asyncio.timeout(90.0):
        while (record := await client.job(id)).state != state:
            assert not record.finished_s, record.reason
            await asyncio.sleep(0.1)
        return record


async def saved(client: Client, id: str, folder: Path, request: str) -> CheckpointProgress:
    """Order a checkpoint, and ask until it is over: of services that are killed meanwhile, too."""
    async with asyncio.timeout(60.0):
        while True:
            try:
                made = await client.checkpoint(id, request, str(folder))
            except SlackwaterError:
                continue
            if made.phase in ("done", "failed"):
                return made
            await asyncio.sleep(0.05)


async def both_ended(client: Client, folder: Path) -> tuple[JobRecord, JobRecord]:
    """Return the job at its end, and another that began from what the folder has."""
    first = await reaches(client, SPEC.id, "completed")
    await client.submit(msgspec.structs.replace(SPEC, id="again", start_from=str(folder)))
    return first, await reaches(client, "again", "completed")


async def facts_of(client: Client, id: str, fact: str) -> list[JobEvent]:
    async with aclosing(client.history.read([subjects.events("job", id, fact)])) as told:
        return [codec.decode(each.payload, JobEvent) async for each in told]


async def test_a_job_begun_from_a_checkpoint_ends_with_the_same_bits(tmp_path: Path) -> None:
    """It is saved three times while it trains; a second one begins with the last."""
    async with cluster_of(4) as (_, client):
        await client.submit(SPEC)
        await under_way(client)
        made = [await saved(client, SPEC.id, tmp_path, f"r{number}") for number in range(3)]
        first, second = await both_ended(client, tmp_path)
    assert [each.phase for each in made] == ["done"] * 3, made
    iterations = [each.iteration for each in made]
    assert 0 < iterations[0] < iterations[2] < SPEC.iterations, iterations
    assert mismatch(first) is None
    assert mismatch(second) is None, "its states are as at the checkpoint, to the bit"
    parts = newest_of_buckets(tmp_path)
    assert (parts[0].iteration, len(parts)) == (iterations[2], made[2].buckets)


async def test_a_job_whose_buckets_are_on_a_device_is_saved_and_begun_from_there(
    tmp_path: Path,
) -> None:
    """A device that plays a GPU: copies come from it, and regions on it are filled."""
    async with cluster_of(2, device="fake") as (_, client):
        await client.submit(SPEC)
        await under_way(client)
        made = await saved(client, SPEC.id, tmp_path, "r")
        first, second = await both_ended(client, tmp_path)
    assert (made.phase, 0 < made.iteration < SPEC.iterations) == ("done", True), made
    assert mismatch(first) is None
    assert mismatch(second) is None


@pytest.mark.slow  # Half a minute: two jobs each, and every aggregator is killed.
@pytest.mark.parametrize("point", ["aggregator.checkpoint.before", "aggregator.checkpoint.after"])
async def test_aggregators_that_are_killed_while_they_save_lose_nothing(
    tmp_path: Path, point: str
) -> None:
    """Each is killed at its second file: the same order is done in the end, the job's bits are
    right, and what the folder counts is whole."""
    armed = {"SLACKWATER_FAILPOINTS": f"{point}=kill@2"}
    async with cluster_of(3, {f"aggregator-a{n}": armed for n in (1, 2, 3)}) as (_, client):
        await client.submit(SPEC)
        await under_way(client)
        made = await saved(client, SPEC.id, tmp_path, "r")
        first, second = await both_ended(client, tmp_path)
    assert made.phase == "done", made
    assert mismatch(first) is None
    assert mismatch(second) is None


async def test_a_paused_job_whose_aggregators_are_lost_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    """No worker has its parameters, and no aggregator: the folder has."""
    spec = msgspec.structs.replace(SPEC, save_to=str(tmp_path), save_every_s=0.5)
    async with cluster_of(3) as (cluster, client):
        await client.submit(spec)
        await under_way(client)
        await client.pause(spec.id)
        await reaches(client, spec.id, "paused")
        last = await saved(client, spec.id, tmp_path, "as-it-stands")
        pool = [info.record for info in await client.aggregators()]
        homes = [record.id for record in pool if record.cluster is not None]
        for id in homes:
            cluster.supervisor.drop_fds(f"aggregator-{id}")
            cluster.supervisor.kill(f"aggregator-{id}", signal.SIGKILL)
            await cluster.supervisor.until_ready(f"aggregator-{id}")
        await asyncio.sleep(1.0)
        await client.resume(spec.id)
        record = await reaches(client, spec.id, "completed")
        told = await facts_of(client, spec.id, "restored")
    assert homes
    assert last.phase == "done", last
    assert told, "its regions were lost"
    assert all(fact.detail["behind"] == "0" for fact in told), told
    assert mismatch(record) is None


def updates_in(folder: Path) -> list[Path]:
    """Parts that are durable."""
    return [made.with_suffix(".npz") for made in sorted(folder.glob("update-*.json"))]


async def test_parts_of_a_job_are_saved_as_bfloat16(tmp_path: Path) -> None:
    """Twice as many pieces, of half as many bytes each; another job begins with them."""
    spec = msgspec.structs.replace(
        SPEC, iterations=100_000, save_to=str(tmp_path), save_every_s=1.0, save_fraction=0.25,
        save_dtype="bfloat16",
    )  # fmt: skip
    async with cluster_of(3) as (_, client):
        await client.submit(spec)
        for _ in range(600):
            if len(updates_in(tmp_path)) >= 3:
                break
            await asyncio.sleep(0.1)
        await client.pause(spec.id)
        await reaches(client, spec.id, "paused")
        newest = SavedJob(tmp_path).version
        begun = msgspec.structs.replace(SPEC, id="begun", start_from=str(tmp_path))
        await client.submit(begun)
        record = await reaches(client, "begun", "completed")
        await client.cancel(spec.id)
    assert 0 < newest <= begun.iterations
    assert set(record.results) == {str(rank) for rank in range(begun.workers)}
    for update in updates_in(tmp_path):
        with np.load(update) as arrays:
            assert {arrays[name].dtype for name in arrays if name[:5] in ("param", "state")} == {
                np.dtype(np.uint16)
            }


async def test_a_job_that_leaves_it_to_its_controller_is_saved_ever_more_rarely(
    tmp_path: Path,
) -> None:
    """Aggregators tell how far parameters went, a save takes little time beside a month without a
    failure: each interval is twice the one before."""
    spec = msgspec.structs.replace(
        SPEC, iterations=100_000, save_to=str(tmp_path), save_every_s=0.0
    )
    async with cluster_of(3, controller={"save_every_min_s": 0.2}) as (_, client):
        await client.submit(spec)
        async with asyncio.timeout(60.0):
            told: list[JobEvent] = []
            while len(told) < 3:
                await asyncio.sleep(0.2)
                told = await facts_of(client, spec.id, "save-interval")
        await client.cancel(spec.id)
    every = [float(fact.detail["why"].split()[2]) for fact in told[:3]]
    assert every == pytest.approx([0.4, 0.8, 1.6])
    assert newest_of_buckets(tmp_path)[0].iteration > 0
