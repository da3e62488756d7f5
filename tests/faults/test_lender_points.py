"""A lender is killed, delayed or fails at each of its failpoints while a device is used.

A checker remembers every page: each is right, or its read fails. A kill takes the lender's process
alone, and its memory is kept; it is found again, or given up, and never lent twice.
"""

import asyncio
import contextlib
import signal
import time
from pathlib import Path

import pytest
from tests.faults.test_memory_kills import LENDERS, Run, lenders

from slackwater.common.base import failpoints
from slackwater.common.base.errors import SlackwaterError
from slackwater.common.embedded import Supervisor
from slackwater.common.shell.client import connect
from slackwater.schemas import subjects
from slackwater.schemas.base import Ok
from slackwater.schemas.memory import SetLending

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(1700)]

ELSEWHERE = ("request.", "publish.", "clear.")
"""A lender sends no commands, and tells no facts under this load. A slab is cleared to be lent once
more where a device returns it by itself: tests/integration/memory/test_returned_memory.py."""
PASSED_S = 20.0
SHOWS_S = 1.5
AT_FIRST = ("epoch.", "recover.", "drain.", "make.", "lend.", "free.", "put.", "witness.")


def faults() -> list[str]:
    found = []
    for name in failpoints.names():
        service, _, point = name.partition(".")
        if service != "slabd" or point.startswith(ELSEWHERE):
            continue
        at = 1 if point.startswith(AT_FIRST) else 2
        found.append(f"{name}=kill@{at}")
        if point != "drain.before":
            found.append(f"{name}=delay(0.5)@{at}")
        if failpoints.failure(name) is not None:
            found.append(f"{name}=error@{at}")
    return found


def restarts(supervisor: Supervisor, unit: str) -> int:
    return {each.name: each.restarts for each in supervisor.status()}[unit]


async def evicted(run: Run, unit: str, from_others: bool) -> None:
    """Have the device give slabs back: those of the lender, or all others', so that it maps new
    ones there."""
    for name in LENDERS:
        if (name != unit) == from_others:
            await run._evict(name)


async def drained_and_back(url: str, unit: str) -> None:
    """Have the lender store and delete its one record."""
    with contextlib.suppress(SlackwaterError):  # It may be dead at present.
        async with connect(url, "operator") as client:
            for lending in (False, True):
                subject = subjects.command("slabd", unit, "lending")
                await client.ask(subject, SetLending(lending=lending), Ok)


async def passed(run: Run, unit: str, armed: str) -> bool:
    """Arm a point of the lender's next life, and have it give and take slabs until it has passed
    it, as its end shows; what only delays it or fails has its time."""
    supervisor = run.supervisor
    await supervisor.until_ready(unit)
    before = restarts(supervisor, unit)
    supervisor.arm(unit, armed)
    if "make." in armed or "lend." in armed:
        supervisor.drop_fds(unit)  # Else it has all the memory that it may have, and lends it.
    supervisor.kill(unit, signal.SIGKILL)
    until_s = time.monotonic() + (PASSED_S if "=kill@" in armed else SHOWS_S)
    while time.monotonic() < until_s and restarts(supervisor, unit) < before + 2:
        await asyncio.sleep(0.3)
        if "drain." in armed:
            supervisor.kill(unit, signal.SIGTERM)
        await evicted(run, unit, "lend." in armed)
        if "lend." not in armed:  # A lender that is drained lends nothing for a while.
            await drained_and_back(supervisor.url, unit)
        run.watch()
    await supervisor.until_ready(unit)
    return "=kill@" not in armed or restarts(supervisor, unit) >= before + 2


async def test_each_point_of_a_lender(tmp_path: Path) -> None:
    async with lenders(tmp_path) as supervisor:
        run, missed = Run(tmp_path, supervisor, seed=11), list[str]()
        try:
            await run.begin()
            await asyncio.sleep(8.0)
            for number, armed in enumerate(faults()):
                if not await passed(run, LENDERS[number % len(LENDERS)], armed):
                    missed.append(armed)
            await run.finish()
        finally:
            await run.end()
    assert not missed, "not passed, so that nothing is proved of them"
    assert run.checker.reads > 1000
