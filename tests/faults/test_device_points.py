"""A device is killed, delayed or fails at each of its failpoints while it is used.

What a flush has covered is there after a kill, each other page is right or its read fails.
"""

import asyncio
import contextlib
import time
from pathlib import Path

import pytest
from tests.faults.test_memory_kills import LENDERS, Run, lenders

from slackwater.common.base import failpoints
from slackwater.common.base.errors import SlackwaterError
from slackwater.loadgen.memory.checker import PAGE_BYTES

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(1700)]

PASSED_S = 30.0
SHOWS_S = 2.0


def faults() -> list[str]:
    found = []
    for name in failpoints.OWN_POINTS:
        if name.startswith("device."):
            found += [f"{name}=kill@2", f"{name}=delay(0.5)@2"]
            if failpoints.failure(name) is not None:
                found.append(f"{name}=error@2")
    return found


async def used(run: Run, seconds: float) -> bool:
    """Write, flush, let go and have slabs taken away, until the device has ended; return whether it
    has."""
    client, until_s, number = run.client, time.monotonic() + seconds, 0
    assert client is not None
    assert run.device.process is not None
    while time.monotonic() < until_s and run.device.process.poll() is None:
        number += 1
        await run._evict(LENDERS[number % len(LENDERS)])
        with contextlib.suppress(OSError, SlackwaterError):  # It may end, or its file may fail.
            covered = run.checker.snapshot()
            await client.flush()
            run.checker.flushed(covered)
            page = number % 64
            if page not in run.busy:
                generation, _ = run.checker.begin(page, discard=True)
                await client.trim(page * PAGE_BYTES, PAGE_BYTES)
                run.checker.acknowledged(page, generation)
        await asyncio.sleep(0.2)
    return run.device.process.poll() is not None


async def test_each_point_of_a_device(tmp_path: Path) -> None:
    async with lenders(tmp_path) as supervisor:
        run, missed = Run(tmp_path, supervisor, seed=13), list[str]()
        run.ends_with += (OSError,)  # A file that fails takes no more.
        try:
            await run.begin()
            await asyncio.sleep(5.0)
            for armed in faults():
                run.device.armed = armed
                await run.device_dies()
                kills = "=kill@" in armed
                if await used(run, PASSED_S if kills else SHOWS_S) != kills:
                    missed.append(armed)
                run.device.armed = ""
                await run.device_dies()
            await run.finish()
        finally:
            await run.end()
    assert not missed, "these did not end it, or did"
    assert run.checker.reads > 1000
