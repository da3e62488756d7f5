"""Elastic programs that take turns share the memory that they asked for; a disk that is full ends
one of them, and no other.

Real processes and bytes. Each takes ten to thirty seconds: memory moves once the programs have been
measured for as long as the worker service does that.
"""

import asyncio
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from tests.faults.test_elastic_programs import ended, running
from tests.faults.test_turns import until_running

from slackwater.common.shell.client import Client
from slackwater.schemas.cluster import PermitUse
from slackwater.schemas.jobs import JobRecord, JobSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]
PROGRAM = Path(__file__).with_name("turns_memory.py")
MB = 1_000_000
SHORT_BYTES, PLENTY_BYTES = 100 * MB, 300 * MB
"""Half of the data of the one do not fit; the other uses a third of what it asked for."""


def holds(folder: Path, id: str, memory_bytes: int, iterations: int, **env: str) -> JobSpec:
    return JobSpec(
        id=id, workers=1, program=(sys.executable, str(PROGRAM)), by_turns=True, restarts=1,
        folder=str(folder), consistency="asynchronous", memory_bytes=memory_bytes,
        iterations=iterations, env={"ITERATIONS": str(iterations), **env},
    )  # fmt: skip


def counted(record: JobRecord, iterations: int) -> None:
    assert record.state == "completed", record.reason
    result = msgspec.json.decode(record.results["0"])
    assert (result["least"], result["most"]) == (iterations, iterations)


async def told(client: Client, id: str) -> PermitUse | None:
    return next((each for each in (await client.job_info(id)).turns if each.memory_bytes), None)


async def test_memory_goes_to_the_job_that_waits_for_its_data(tmp_path: Path) -> None:
    """Also where the worker service is killed meanwhile, which begins anew with what was asked."""
    async with running() as (cluster, client):
        await client.submit(holds(tmp_path, "plenty", PLENTY_BYTES, 10**6))
        await client.submit(holds(tmp_path, "short", SHORT_BYTES, 600, READS_S="0.03"))
        await until_running(cluster, client, "short")
        worker = next(u.name for u in cluster.supervisor.status() if u.name.startswith("worker"))
        cluster.supervisor.kill(worker, signal.SIGKILL)
        had = dict[str, int]()
        for _ in range(900):
            for id in ("short", "plenty"):
                if (use := await told(client, id)) is not None:
                    had[id] = use.memory_bytes
            if had.get("short", 0) > SHORT_BYTES and had.get("plenty", 0) < PLENTY_BYTES:
                break
            await asyncio.sleep(0.1)
        assert had["short"] > SHORT_BYTES
        assert PLENTY_BYTES / 2 <= had["plenty"] < PLENTY_BYTES
        assert sum(had.values()) <= SHORT_BYTES + PLENTY_BYTES
        counted(await ended(client, "short"), 600)
        await client.cancel("plenty")
        assert (await ended(client, "plenty")).state == "cancelled"


async def test_a_disk_that_is_full_ends_the_job_that_needs_it_and_no_other(tmp_path: Path) -> None:
    async with running() as (_, client):
        await client.submit(holds(tmp_path, "full", 1, 50, FILE_BYTES=str(MB)))
        await client.submit(holds(tmp_path, "other", PLENTY_BYTES, 50))
        record = await ended(client, "full")
        assert record.state == "failed"
        assert "cannot be written: File too large; make room there" in record.reason
        counted(await ended(client, "other"), 50)
