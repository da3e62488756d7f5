"""Connections that break, and programs that die, in the middle of pushes, pulls and handovers.

Nothing is applied by halves: whatever was cut is recovered, with the bits of a replay, or reported
within its deadline.
"""

import asyncio
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.aggregator.wire import Wire

from slackwater.common.base import limits
from slackwater.common.base.errors import DeadlineExceeded

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]
PROGRAM = Path(__file__).with_name("worker_program.py")
RESETS = 150
KILLS = 5


async def keep_moving(lab: Any, job: Any, rng: random.Random) -> None:
    """One bucket after the other to the other aggregator, for ever."""
    while True:
        bucket = rng.randrange(len(job.places))
        here = job.places[bucket].aggregator
        there = next(home for home in lab.director.homes if home != here)
        await lab.director.move(job, bucket, there)


async def test_resets_in_mid_transfer_change_no_bit(
    lab: Any, wires: list[Wire], training: Any, check_result: Any
) -> None:
    """150 connections reset, control and data, of Agents and of handovers, while bytes flow."""
    rng = random.Random(3)
    run = training(transport="tcp")
    run.start()
    await run.until(2)
    job = lab.director.jobs["j1"]
    moving = asyncio.ensure_future(keep_moving(lab, job, rng))
    resets = busy = 0
    while resets < RESETS:
        before = [wire.carried for wire in wires]
        await asyncio.sleep(rng.uniform(0.01, 0.05))
        assert not moving.done(), moving
        run.check()
        wire = rng.choice(wires)
        if wire.links:
            wire.reset(rng.randrange(len(wire.links)))
            resets += 1
            busy += wire.carried > before[wires.index(wire)]
    await run.until(min(run.done.values()) + 3)
    moving.cancel()
    await asyncio.gather(moving, return_exceptions=True)
    assert busy > RESETS / 2, "most of them were in use"
    assert sum(place.location_epoch for place in job.places) > 5
    iterations = await run.finish()
    await lab.settle(job)
    await check_result(run, iterations)


async def test_a_network_that_is_gone_for_long_is_found_again(
    lab: Any, wires: list[Wire], training: Any, check_result: Any
) -> None:
    """Longer than a channel can be resumed: the pushes that were under way are made anew over
    fresh channels, by whoever had not been answered."""
    run = training(transport="tcp")
    run.start()
    await run.until(3)
    for wire in wires:
        wire.cut()
    await asyncio.sleep(limits.RESUME_S + 1.5)
    stood = max(run.done.values())
    for wire in wires:
        wire.refuses = False
    await run.until(stood + 3)
    iterations = await run.finish(more=10)
    await check_result(run, iterations)


async def test_a_network_that_never_comes_back_is_reported(
    lab: Any, wires: list[Wire], training: Any
) -> None:
    """Every worker's wait ends at its deadline, and says for what and where."""
    run = training(transport="tcp", deadline_s=10.0)
    run.start()
    await run.until(3)
    for wire in wires:
        wire.cut()
    with pytest.raises(DeadlineExceeded, match=r"aggregator a\d \(not connected after \d+ attem"):
        await run.until(10_000)
    for thread in run._threads:
        await asyncio.to_thread(thread.join, 30.0)
        assert not thread.is_alive()
    assert len(run.failures) == 2


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_program_killed_in_mid_push_goes_on(
    lab: Any, training: Any, transport: str, tmp_path: Path
) -> None:
    """kill -9 of a worker at seeded instants: a half-written slot is never folded, and the program
    that is started again, and asks for the parameters first, trains on to the bits of a replay."""
    rng = random.Random(transport)
    await lab.aggregators("a1", "a2", transport=transport)
    last = 10_000_000

    async def start(rank: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAM), lab.supervisor.url, str(rank), str(last), transport,
            str(tmp_path / f"{rank}.npz"),
        )  # fmt: skip

    programs = [await start(0), await start(1)]
    try:
        version = 0
        for _ in range(KILLS):
            version = await trained_beyond(lab, version + 1)
            await asyncio.sleep(rng.uniform(0.0, 0.15))
            programs[1].send_signal(signal.SIGKILL)
            await programs[1].wait()
            programs[1] = await start(1)
        version = await trained_beyond(lab, version + 1)
        for program in programs:  # Both again, to end at the same iteration.
            program.send_signal(signal.SIGKILL)
            await program.wait()
        last = version + 20
        programs = [await start(0), await start(1)]
        assert [await asyncio.wait_for(p.wait(), 60) for p in programs] == [0, 0]
    finally:
        for program in programs:
            if program.returncode is None:
                program.kill()
                await program.wait()
    reference = training()
    for name in reference.sizes:
        expected = reference.expected(name, last)
        for rank in range(2):
            got = np.load(tmp_path / f"{rank}.npz")[name]
            assert (got.view(np.uint32) == expected.view(np.uint32)).all(), (name, rank)


async def trained_beyond(lab: Any, version: int) -> int:
    """Until every bucket has that version; the oldest one's."""
    async with asyncio.timeout(60.0):
        while True:
            job = lab.director.jobs.get("j1")
            if job is not None and job.hosted:
                held = [
                    each.version
                    for home in lab.director.homes
                    for each in (await lab.director.held(home, job)).values()
                ]
                if held and min(held) >= version:
                    return min(held)
            await asyncio.sleep(0.02)
