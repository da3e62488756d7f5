"""A burst of arrivals at a real master over a real nats-server, killed in its midst."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slackwater.common.bus.server import NatsServer
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.job_requests import JobList, ListJobs
from slackwater.schemas.jobs import JobSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

JOBS = 300


Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path, own_nats_server: NatsServer) -> Iterator[Start]:
    config = tmp_path / "master.toml"
    config.write_text(f'id = "m1"\nurl = "{own_nats_server.url}"\n')
    command = [sys.executable, "-m", "slackwater.services.master", "--config", str(config)]
    begun: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        begun.append(subprocess.Popen(command))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait(20)


async def test_a_burst_at_a_master_that_is_killed_loses_no_job_and_stores_none_twice(
    own_nats_server: NatsServer, start: Start
) -> None:
    """A client that has no answer, or is told to come again, submits the same id once more."""
    first, url = start(), own_nats_server.url
    acknowledged = 0
    async with connect(url, "a") as one, connect(url, "b") as other:
        clients = [Client(each.bus, each.clock, budget_s=60.0) for each in (one, other)]
        await clients[0].jobs()

        async def submit(number: int) -> None:
            nonlocal acknowledged
            await clients[number % 2].submit(JobSpec(id=f"j{number}", program=("train",)))
            acknowledged += 1
            if acknowledged == JOBS // 3:
                first.kill()
                start()

        await asyncio.gather(*(submit(number) for number in range(JOBS)))
        assert acknowledged == JOBS
        reply = await clients[0].master("list", ListJobs(), JobList)
    assert reply.total == JOBS
    assert {record.spec.id for record in reply.jobs} == {f"j{number}" for number in range(JOBS)}
    assert all(record.state == "pending" for record in reply.jobs)
