"""The aggregators of an unadapted DistributedDataParallel job are emptied and killed while it
trains: its losses and weights are those of gloo all the same.

Real processes. A quarter of a minute: the job trains for five seconds, and once more over gloo.
"""

import asyncio
import signal
from pathlib import Path

import pytest

from slackwater.common.base import limits
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec

pytest.importorskip("torch", reason="PyTorch is not installed (make setup-torch)")

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

PROGRAM = Path(__file__).with_name("ddp_program.py")
STEPS = 250


async def reaches(client: Client, id: str, iteration: int) -> None:
    for _ in range(600):
        progress = (await client.job_info(id)).progress
        if progress is not None and progress.iteration >= iteration:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(await client.job(id))


async def end(client: Client, id: str) -> JobRecord:
    for _ in range(1200):
        if (record := await client.job(id)).state in TERMINAL_STATES:
            return record
        await asyncio.sleep(0.1)
    raise AssertionError(record)


async def homes(client: Client) -> set[str]:
    """Name the aggregators that have buckets."""
    found = await client.aggregators()
    return {info.record.id for info in found if info.heartbeat and info.heartbeat.buckets}


async def left(client: Client, home: str) -> set[str]:
    """Wait until that aggregator has none; return those that have some."""
    for _ in range(200):
        if home not in (found := await homes(client)):
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(found)


async def test_moves_and_kills_of_aggregators_change_no_bit() -> None:
    options = ClusterOptions(controllers=1, aggregators=3)
    async with EmbeddedCluster(options) as cluster, connect(cluster.url) as connected:
        client = Client(connected.bus, connected.clock, budget_s=limits.RETRY_BUDGET_S)
        state_dir = Path(cluster.supervisor.state_dir) / "worker-w1" / "jobs"
        ends = {}
        for way in ("on", "off"):
            spec = JobSpec(
                id=f"job-{way}", workers=2, aggregate=way, env={"STEPS": "250", "PACE_S": "0.02"},
                program=("python", str(PROGRAM), "clipping"),
            )  # fmt: skip
            await client.submit(spec)
            if way == "on":
                await reaches(client, spec.id, 20)
                home = min(await homes(client))
                await client.drain(home, "emptied", 60.0)
                await reaches(client, spec.id, 90)
                for each in await left(client, home):
                    cluster.supervisor.kill(f"aggregator-{each}", signal.SIGKILL)
                await reaches(client, spec.id, 150)
            record = await end(client, spec.id)
            assert record.state == "completed", record.reason
            logs = [(state_dir / spec.id / f"rank{rank}.log").read_text() for rank in range(2)]
            ends[way] = [log.rpartition("ended at ")[2].strip() for log in logs]
        assert ends["on"] == ends["off"]
