"""Master, controllers, profiler and aggregators as processes of their own, over a real nats-server:
a job's placement outlives kill -9 of everybody who decided it."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from slackwater.common.base.errors import Rejected
from slackwater.common.embedded.cluster import ClusterOptions, EmbeddedCluster
from slackwater.common.native import blas_threads
from slackwater.common.shell.client import Client, connect
from slackwater.schemas import subjects
from slackwater.schemas.base import Ok
from slackwater.schemas.job_requests import FinishJob, JobRegistered, RegisterJob
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import Located, LocateJob
from slackwater.schemas.tensors import TensorSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

SPEC = JobSpec(id="by-hand", workers=2, servers=2, iterations=10)
TENSORS = tuple(TensorSpec(name=f"t{n}", shape=(512, 512)) for n in range(3))


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EmbeddedCluster]:
    for name in blas_threads.VARIABLES:  # A command that ran in this process may have set them.
        monkeypatch.delenv(name, raising=False)
    options = ClusterOptions(controllers=2, aggregators=4, worker={"slots": 2})
    async with EmbeddedCluster(options, cores=2) as made:
        yield made


async def register(client: Client, rank: int, spec: JobSpec = SPEC) -> JobRegistered:
    message = RegisterJob(job=spec.id, rank=rank, tensors=TENSORS, spec=spec)
    return await client.master("register", message, JobRegistered)


async def until_told(client: Client, job: str, reason: str) -> None:
    """`slackwater job` shows this reason."""
    async with asyncio.timeout(15.0):
        while True:
            shown = (await client.job(job)).reason
            if reason in shown:
                return
            await asyncio.sleep(0.1)


def environment(cluster: EmbeddedCluster, unit: str) -> list[str]:
    pid = cluster.supervisor.units[unit].pid
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


async def check_reasons(client: Client) -> None:
    """The pool has two aggregators for each cluster, the worker node two slots."""
    for spec in (
        JobSpec(id="other", servers=2, workers=1),
        JobSpec(id="third", servers=2, workers=1),
    ):
        await register(client, 0, spec)
    await until_told(
        client, "third", "waits for aggregators: 2 aggregators asked for: 0 free in the pool"
    )
    sleep = ("python", "-c", "import time; time.sleep(60)")
    await client.submit(JobSpec(id="runs", workers=1, program=sleep))
    await client.submit(JobSpec(id="small", workers=2, program=sleep))
    await until_told(client, "small", "waits for 2 worker slots: 1 of 2 free; runs when a job ends")
    await client.submit(JobSpec(id="huge", workers=3, program=sleep))
    await until_told(client, "huge", "waits for 3 worker slots on one node: the largest has 2")
    (nameless,) = await client.tenants()
    assert (nameless.tenant, nameless.waiting, nameless.running) == ("", 2, 4)
    for id in ("huge", "small", "runs", "third", "other"):
        await client.cancel(id)


async def locate(client: Client, cluster: str) -> Located:
    subject = subjects.command("controller", cluster, "locate")
    return await client.ask(subject, LocateJob(job=SPEC.id), Located)


async def until_free(client: Client) -> None:
    """All that was allocated is given back, and nothing of the job is held."""
    async with asyncio.timeout(30.0):
        while True:
            infos = await client.aggregators()
            free = all(info.record.cluster is None for info in infos)
            if free and all(i.heartbeat and i.heartbeat.buckets == 0 for i in infos):
                return
            await asyncio.sleep(0.2)


async def test_a_placement_outlives_the_kill_of_master_controller_and_profiler(
    cluster: EmbeddedCluster,
) -> None:
    async with connect(cluster.url, "test") as client:
        patient = Client(client.bus, client.clock, budget_s=30.0)
        registered = [await register(patient, rank) for rank in (0, 1)]
        assert {each.cluster for each in registered} == {registered[0].cluster}
        home = registered[0].cluster
        before = await locate(patient, home)
        assert len({place.aggregator for place in before.places}) == 2
        assert len(before.endpoints) == 2
        await check_reasons(patient)
        assert "OMP_NUM_THREADS=1" in environment(cluster, "profiler-p1")
        assert "OMP_NUM_THREADS=1" not in environment(cluster, "worker-w1")  # Jobs inherit it.
        for unit in ("master-m1", f"controller-{home}", "profiler-p1"):
            cluster.supervisor.kill(unit, signal.SIGKILL)
        after = await locate(patient, home)
        assert after.places == before.places
        assert after.plan == before.plan
        assert (await register(patient, 1)).cluster == home
        other = (TENSORS[0], TensorSpec(name="t1", shape=(2, 2)), TENSORS[2])
        message = RegisterJob(job=SPEC.id, rank=0, tensors=other, spec=SPEC)
        with pytest.raises(Rejected, match=r"t1 \[2, 2\]"):
            await patient.master("register", message, JobRegistered)
        for rank in (0, 1):
            await patient.master("finish", FinishJob(job=SPEC.id, rank=rank), Ok)
        assert (await patient.job(SPEC.id)).state == "completed"
        await until_free(patient)
