"""Heartbeats tell how busy the machine is, and which part of that is the aggregator's own."""

import asyncio
import os
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


async def test_what_others_do_on_the_machine_is_told_apart_from_ones_own(lab: Any) -> None:
    """Two seconds and more: what is told is measured over a while. A process that spins is other
    work; the aggregator itself has nothing to do."""
    await lab.aggregators("a1", telemetry_s=0.5)
    spinning = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        async with asyncio.timeout(60.0):
            while True:
                beat = lab.director.beats.get("a1")
                if beat is not None and beat.host_cpu - beat.own_cpu > 0.5:
                    break
                await asyncio.sleep(0.05)
    finally:
        spinning.kill()
        await spinning.wait()
    assert beat.host_cores == os.cpu_count()
    assert beat.host_cpu <= beat.host_cores + 1e-6
    assert 0.0 <= beat.own_cpu < 0.5
