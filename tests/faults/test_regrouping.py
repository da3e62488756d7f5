"""Jobs that take turns are measured, and one goes where it uses nodes better while it trains.

Real processes and bytes. Three programs import numpy and train on two nodes for forty seconds: so
long it takes to measure them, to move one, and to see that no task of it was lost.
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.faults.test_elastic_programs import ended, running

from slackwater.common.shell.client import Client
from slackwater.schemas.job_requests import JobInfo
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.services.master.gangs import ranks_at

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]
PROGRAM = Path(__file__).with_name("turns_elastic.py")
ITERATIONS = 200


def program(id: str, folder: Path) -> JobSpec:
    env = {"ITERATIONS": str(ITERATIONS), "COMPUTES_S": "0.06", "VALUES": "100000"}
    return JobSpec(
        id=id, workers=1, program=(sys.executable, str(PROGRAM)), by_turns=True, restarts=20,
        env=env, consistency="asynchronous", folder=str(folder),
    )  # fmt: skip


def trained(record: JobRecord) -> None:
    assert record.state == "completed", record.reason
    result = msgspec.json.decode(record.results["0"])
    assert (result["least"], result["most"]) == (2.0 * ITERATIONS, 2.0 * ITERATIONS)


async def until(client: Client, ids: list[str], holds: Callable[[list[JobInfo]], bool]) -> None:
    for _ in range(600):
        found = [await client.job_info(id) for id in ids]
        if holds(found):
            return
        await asyncio.sleep(0.1)
    raise AssertionError([(info.job.spec.id, info.job.state, info.group) for info in found])


def nodes(info: JobInfo) -> set[str]:
    return set(ranks_at(info.job))


@pytest.mark.slow
async def test_a_job_goes_to_a_node_that_is_free_again_and_loses_no_task(tmp_path: Path) -> None:
    async with running("tcp", nodes=2) as (_, client):
        for id in ("first", "other", "second"):
            await client.submit(program(id, tmp_path))
            await until(client, [id], lambda found: found[0].job.state == "running")
        both = ["first", "second"]
        await until(
            client,
            both,
            lambda found: all(
                info.group is not None and info.group.state == "running" and nodes(info) == {"w1"}
                for info in found
            ),
        )
        await client.cancel("other")
        await until(
            client,
            both,
            lambda found: (
                sum(info.job.reallocations for info in found) == 1
                and all(info.job.state == "running" for info in found)
                and nodes(found[0]) != nodes(found[1])
            ),
        )
        for id in both:
            trained(await ended(client, id))
