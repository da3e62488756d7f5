"""A program that maps a region can lock it, and live on when the aggregator is killed: its own job
waits, the others are served at once."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

HOLD = """
import fcntl, os, sys
files = [os.open(path, os.O_RDWR) for path in sys.argv[1:]]
for file in files:
    fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def regions_of(pid: int, job: str) -> list[str]:
    """Descriptors of a job's memory in another process."""
    folder = Path(f"/proc/{pid}/fd")
    return [str(each) for each in folder.iterdir() if os.readlink(each).startswith(f"/memfd:{job}")]


@contextmanager
def locked(paths: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", HOLD, *paths]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        yield holder


async def test_a_region_that_is_locked_keeps_no_other_job_from_its_aggregator(
    lab: Any, training: Any, check_result: Any
) -> None:
    """kill -9 while another process holds locks on one job's regions. Its bytes wait for it: that
    job goes on where it was when the locks are gone, to the same bits."""
    await lab.aggregators("a1")
    jobs = ("held", "free")  # Counters of moved bytes do not tell them apart.
    runs = {job: training(job=job, pace_s=0.01, transport="shm", lossy=True) for job in jobs}
    for run in runs.values():
        run.start()
    for run in runs.values():
        await run.until(5)
    regions = regions_of(lab.supervisor.units["a1"].pid, "held.")
    assert len(regions) == len(lab.director.jobs["held"].buckets)
    with locked(regions) as holder:
        lab.supervisor.kill("a1", signal.SIGKILL)
        await lab.restarted("a1", 1)
        await runs["free"].until(runs["free"].done[0] + 10)
        (beat,) = await lab.director.fresh_beats()
        assert (beat.regions_locked, beat.jobs) == (len(regions), 1)
        waiting = await lab.director.held("a1", lab.director.jobs["held"])
        assert len(waiting) == len(regions)
        assert all(each.moving for each in waiting.values())
        log = (lab.supervisor.run_dir / "a1.log").read_text()
        assert f'"by_process":{holder.pid},' in log, "an operator is told whom to end"
        holder.communicate()
    await runs["held"].until(max(runs["held"].done.values()) + 5)
    async with asyncio.timeout(10.0):
        while (await lab.director.fresh_beats())[0].regions_locked:
            continue
    for run in runs.values():
        await check_result(run, await run.finish())
