"""Jobs that share a node by turns: whatever befalls one of them, the others go on, and are right.

Real processes and bytes. Each takes ten to twenty seconds: several jobs import numpy and train.
"""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from tests.faults.test_elastic_programs import check, ended, hosts_of, program, running

from slackwater.common.embedded import EmbeddedCluster
from slackwater.common.shell.client import Client
from slackwater.schemas.jobs import JobRecord, JobSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]
PROGRAM = Path(__file__).with_name("turns_program.py")
ITERATIONS = 60


def trains(id: str, workers: int = 2, **env: str) -> JobSpec:
    return JobSpec(
        id=id, workers=workers, program=(sys.executable, str(PROGRAM)), by_turns=True,
        restarts=20, env={"ITERATIONS": str(ITERATIONS), **env}, iterations=ITERATIONS,
    )  # fmt: skip


def trained(record: JobRecord) -> None:
    assert record.state == "completed", record.reason
    assert msgspec.json.decode(record.results["0"]) == {"w": float(ITERATIONS)}


async def late(client: Client, id: str) -> int:
    return sum(each.late for each in (await client.job_info(id)).turns)


async def until_running(cluster: EmbeddedCluster, client: Client, id: str) -> list[int]:
    for _ in range(600):
        if hosts := hosts_of(cluster, await client.job(id)):
            return hosts
        await asyncio.sleep(0.05)
    raise AssertionError(f"{id} does not run")


@pytest.mark.parametrize("transport", ["", "tcp"])
async def test_jobs_by_turns_are_right_whatever_is_killed(tmp_path: Path, transport: str) -> None:
    async with running(transport) as (cluster, client):
        await client.submit(program(tmp_path, 200, by_turns=True))
        await client.submit(trains("left"))
        await client.submit(trains("right", workers=1))
        hosts = await until_running(cluster, client, "left")
        await asyncio.sleep(1.0)
        os.killpg(hosts[-1], signal.SIGKILL)
        await asyncio.sleep(0.5)
        worker = next(u.name for u in cluster.supervisor.status() if u.name.startswith("worker"))
        cluster.supervisor.kill(worker, signal.SIGKILL)
        trained(await ended(client, "left"))
        trained(await ended(client, "right"))
        check(await ended(client), 200)


async def test_a_job_that_never_gives_its_permit_back_stops_no_other(tmp_path: Path) -> None:
    async with running("tcp") as (_, client):
        await client.submit(trains("stuck", STUCK="1"))
        for _ in range(600):  # It trains, and then keeps the permit of its last iteration.
            progress = (await client.job_info("stuck")).progress
            if progress is not None and progress.iteration >= ITERATIONS:
                break
            await asyncio.sleep(0.1)
        await client.submit(trains("other"))
        trained(await ended(client, "other", within_s=60.0))
        for _ in range(100):
            if await late(client, "stuck"):
                break
            await asyncio.sleep(0.1)
        assert await late(client, "stuck") > 0
        assert (await client.job("stuck")).state == "running"
        await client.cancel("stuck")
        assert (await ended(client, "stuck")).state == "cancelled"


async def test_what_a_job_had_of_its_node_is_shown(tmp_path: Path) -> None:
    """Over tcp bytes move; both jobs compute one after another, so that they wait."""
    async with running("tcp") as (_, client):
        for id in ("left", "right"):
            await client.submit(trains(id))
        seen = {}
        for _ in range(600):
            for id in ("left", "right"):
                for turns in (await client.job_info(id)).turns:
                    if turns.computed_s and turns.moved_s and turns.waited_s:
                        seen[id] = turns
            if len(seen) == 2:
                break
            await asyncio.sleep(0.1)
        assert set(seen) == {"left", "right"}
        for id in ("left", "right"):
            trained(await ended(client, id))


WRONG = {
    "nan": "its gradient contains nan",
    "memory": "Unable to allocate 8.00 GiB",
    "killed": "SIGKILL|Killed|code -9",
}


async def test_what_befalls_three_of_four_costs_the_fourth_no_iteration(tmp_path: Path) -> None:
    async with running("tcp") as (_, client):
        await client.submit(trains("right", workers=1))
        for what in WRONG:
            spec = trains(what, workers=1, GOES_WRONG=what)
            await client.submit(msgspec.structs.replace(spec, restarts=0))
        for what, said in WRONG.items():
            record = await ended(client, what)
            assert record.state == "failed", what
            assert re.search(said, record.reason), record.reason
        record = await ended(client, "right")
        trained(record)
        assert not record.restarts
        info = await client.job_info("right")
        assert info.progress is not None
        assert info.progress.iteration == ITERATIONS
