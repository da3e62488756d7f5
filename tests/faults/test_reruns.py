"""kill -9 of the master, the controller and the worker service while a job is run again and again:
each run trains from the beginning, with its own processes, and to the last bit.

Real processes and bytes. Each test takes half a minute: a run imports numpy, registers and is
profiled, and each of them is disturbed.
"""

import asyncio
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from slackwater.common.base import limits
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.replay.proof import mismatch
from slackwater.loadgen.replay.workload import emulated
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]
VICTIMS = ("master-m1", "controller-c1", "worker-w1")
RUNS = 3


async def ended(client: Client, id: str) -> JobRecord:
    for _ in range(1000):
        if (record := await client.job(id)).state in TERMINAL_STATES:
            return record
        await asyncio.sleep(0.1)
    raise AssertionError(f"job {id} does not end: {record}")


async def test_a_job_runs_again_and_again_under_kills() -> None:
    """Every other run is cancelled in the middle, so that processes have to be ended and tensors
    dropped. The order to run again is given right before and after a kill, and repeated."""
    options = ClusterOptions(
        controllers=1, aggregators=2, restarts_max=1000, restart_wait_s_max=0.05
    )
    rng = random.Random(14)
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "test") as bare:
        client = Client(bare.bus, bare.clock, budget_s=limits.RETRY_BUDGET_S)
        spec = emulated(
            "j", "alexnet", workers=2, servers=1, iterations=60, compute_s=0.02,
            bytes_scale=0.004, seed=7,
        )  # fmt: skip
        await client.submit(spec)
        for run in range(1, RUNS + 1):
            if run % 2:
                await asyncio.sleep(rng.uniform(0.5, 3.0))
                await client.cancel("j")
            else:
                record = await ended(client, "j")
                assert (record.state, mismatch(record)) == ("completed", None), record.reason
            cluster.supervisor.kill(rng.choice(VICTIMS), signal.SIGKILL)
            again = asyncio.ensure_future(client.rerun("j", run))
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            cluster.supervisor.kill(rng.choice(VICTIMS), signal.SIGKILL)
            first, second = await again, await client.rerun("j", run)
            assert (first.run, second.run) == (run, run)
            assert second.state in ("pending", "running", "completed")
        record = await ended(client, "j")
        assert (record.state, mismatch(record)) == ("completed", None), record.reason
        assert record.run == RUNS


POINTS = ("persist.before", "persist.after", "reply.before", "request.before")
SCRIPT = """echo "$SLACKWATER_RANK" >> "$0"; echo '{"x": 1}' > "$SLACKWATER_RESULT\""""


async def test_a_master_that_is_killed_within_a_rerun_begins_it_once(tmp_path: Path) -> None:
    """It dies before and after it stores the next run, before it answers, and before it orders the
    start. Then the order is there or is given again; each rank has one process in each run."""
    options = ClusterOptions(
        controllers=1, aggregators=1, restarts_max=1000, restart_wait_s_max=0.05
    )
    ran = tmp_path / "ran"
    program = ("/bin/sh", "-c", SCRIPT, str(ran))
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "test") as bare:
        client = Client(bare.bus, bare.clock, budget_s=limits.RETRY_BUDGET_S)
        await client.submit(JobSpec(id="j", workers=2, program=program))
        for run, point in enumerate(POINTS, 1):
            assert (await ended(client, "j")).results.keys() == {"0", "1"}
            await settled(client, "j")
            cluster.supervisor.arm("master-m1", f"master.{point}=kill@1")
            cluster.supervisor.kill("master-m1", signal.SIGKILL)
            record = await client.rerun("j", run)
            assert record.run == run
            assert (await client.rerun("j", run)).run == run
        assert (await ended(client, "j")).state == "completed"
        assert Counter(ran.read_text().split()) == {"0": len(POINTS) + 1, "1": len(POINTS) + 1}
        restarts = {unit.name: unit.restarts for unit in cluster.supervisor.status()}
        assert restarts["master-m1"] >= 2 * len(POINTS), "a point was not reached"
        await client.delete("j")
        assert await client.jobs() == ()
        assert await client.submit(JobSpec(id="j", workers=1, program=program)) is None
        assert (await ended(client, "j")).results.keys() == {"0"}


async def settled(client: Client, id: str) -> None:
    """All who knew of its last run have let it go."""
    for _ in range(600):
        if (await client.job(id)).released:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"job {id} is not let go: {await client.job(id)}")
