"""A program that really trains, on an emulated pool: it is refused, unless it asked to be there."""

import asyncio
import sys

import msgspec
import pytest

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec

# A whole cluster and a few Python processes: seconds.
pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]
TRAINS = (
    "import numpy as np\n"
    "from slackwater import Agent\n"
    "with Agent(tensors={'w': (4,)}) as agent:\n"
    "    agent.step({'w': np.ones(4, np.float32)})\n"
    "    agent.close({'iteration': agent.iteration})\n"
)


async def ended(client: Client, id: str) -> JobRecord:
    async with asyncio.timeout(60.0):
        while True:
            record = await client.job(id)
            if record.state in TERMINAL_STATES:
                return record
            await asyncio.sleep(0.1)


async def test_it_is_refused_with_what_it_costs_and_let_in_when_it_asks() -> None:
    options = ClusterOptions(controllers=1, aggregators=1, cpu_share=0.1)
    asks = JobSpec(
        id="asks", program=(sys.executable, "-c", TRAINS), iterations=1, fractional_share=True
    )
    refused = msgspec.structs.replace(asks, id="refused", fractional_share=False)
    alone = JobSpec(id="alone", program=("true",))  # It does not aggregate.
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "test") as client:
        for spec in (refused, alone, asks):
            await client.submit(spec)
        record = await ended(client, "refused")
        assert record.state == "failed"
        assert "the aggregators of this cluster have 0.1 of a core each" in record.reason
        assert "takes 10.0 times as long as on a whole core" in record.reason
        assert "`slackwater submit --allow-fractional-share`" in record.reason
        assert (await ended(client, "alone")).state == "completed"
        record = await ended(client, "asks")
        assert record.state == "completed", record.reason
        assert '"iteration":1' in record.results["0"].replace(" ", "")
