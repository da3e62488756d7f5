"""`slackwater drain` against a live cluster: a job trains on while its aggregator is emptied."""

import asyncio
import sys

import msgspec
import pytest

from slackwater.common.base.errors import Rejected
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import connect
from slackwater.loadgen.replay.workload import emulated
from slackwater.schemas.cluster import AggregatorInfo, DrainProgress

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]
OPTIONS = ClusterOptions(
    controllers=1,
    aggregators=3,
    cpu_share=0.1,
    profiler={"profile_iterations": 3, "window_iterations": 10},
)


async def drain(url: str, *arguments: str) -> tuple[int, DrainProgress]:
    command = [sys.executable, "-m", "slackwater.cli.main", "drain", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, "--url", url, "--json", stdout=asyncio.subprocess.PIPE
    )
    text, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, msgspec.json.decode(text, type=DrainProgress)


async def test_a_drained_aggregator_is_empty_and_the_job_ends_as_if_nothing_had_been() -> None:
    async with EmbeddedCluster(OPTIONS) as cluster, connect(cluster.url) as client:
        spec = emulated(
            "j1", "alexnet", workers=1, servers=2, iterations=40, compute_s=0.1, bytes_scale=0.02,
            seed=0,
        )  # fmt: skip
        await client.submit(spec)

        async def held() -> dict[str, AggregatorInfo]:
            return {
                info.record.id: info
                for info in await client.aggregators()
                if info.heartbeat is not None and info.heartbeat.buckets
            }

        while not (homes := await held()):  # noqa: ASYNC110 (told by another program)
            await asyncio.sleep(0.2)
        leaving = min(homes)
        with pytest.raises(Rejected, match=f"{leaving} is alive: `slackwater drain"):
            await client.lost(leaving)
        with pytest.raises(Rejected, match="there is no aggregator a9"):
            await client.lost("a9")
        code, progress = await drain(cluster.url, leaving, "--id", "o1", "--within", "60", "--wait")
        assert (code, progress.drain.state, progress.left) == (0, "drained", ())
        again = await client.drain(leaving, "o1", 60.0)
        assert again.drain == progress.drain
        while (record := await client.job("j1")).state == "running":  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        assert leaving not in await held()
        assert record.state == "completed", record.reason
        assert not record.optimizer_state_lost
        assert [await client.restore(leaving) for _ in range(2)] == [True, False]
