"""An aggregator whose memory is lost with it, in a whole cluster: the controller begins its buckets
anew elsewhere, and the job ends with the undisturbed run's bits, its Adam's states included."""

import asyncio
import signal
from contextlib import aclosing

import pytest
from tests.faults.test_crash_loop import under_way, workload

from slackwater.common.base import codec
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import connect
from slackwater.loadgen.replay import session
from slackwater.loadgen.replay.proof import mismatch
from slackwater.schemas import subjects
from slackwater.schemas.job_events import JobEvent

# Twenty seconds: a cluster's start, and a job of 300 iterations: it trains when they are lost.
pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


async def test_a_job_ends_with_the_undisturbed_bits_after_its_aggregators_were_lost() -> None:
    """Workers are on their host, and have had the regions mapped. They are lost one by one."""
    options = ClusterOptions(controllers=1, aggregators=4, cpu_share=0.15, transport="auto")
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "test") as client:
        replay = asyncio.ensure_future(
            session.replay(client, workload(300), lambda timeline, now_s: None)
        )
        await under_way(client)
        pool = [info.record for info in await client.aggregators()]
        homes = [record.id for record in pool if record.cluster is not None]
        assert homes
        for id in homes:
            cluster.supervisor.drop_fds(f"aggregator-{id}")
            cluster.supervisor.kill(f"aggregator-{id}", signal.SIGKILL)
            await cluster.supervisor.until_ready(f"aggregator-{id}")
            await asyncio.sleep(1.0)
        await replay
        record = await client.job("j")
        pattern = subjects.events("job", "j", "optimizer-state-recovered")
        async with aclosing(client.history.read([pattern])) as told:
            recovered = [codec.decode(fact.payload, JobEvent) async for fact in told]
    assert record.state == "completed", record.reason
    assert mismatch(record) is None
    assert not record.optimizer_state_lost
    assert recovered, "its regions were lost while it trained"
    assert all(fact.detail["behind"] == "0" for fact in recovered)
