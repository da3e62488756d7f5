"""Workloads played against a device over real lenders, every page checked."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from slackwater.common.base.errors import ConfigRejected
from slackwater.loadgen.memory.play import PlayOptions, play_device

MIB = 1024 * 1024
Make = Callable[..., Any]


async def test_a_mix_plays_on_while_slabs_are_taken_back(cluster: Make) -> None:
    async with cluster("shm") as c:
        await c.lend(2)
        assembly = await c.export(4 * MIB)
        options = PlayOptions(workload="sys", pages=1024, seconds=0.7, depth=8, check=True)
        first = await play_device(assembly.options.socket, options)
        await c.mapped(4)
        for machine in c.machines:  # Together they have room for two; both may be chosen.
            machine.others_bytes = machine.total_bytes * 3 // 4
        again = await play_device(assembly.options.socket, options)
        async with asyncio.timeout(30.0):
            while "unmapped" not in c.facts:  # noqa: ASYNC110 (a lender looks when it looks)
                await asyncio.sleep(0.05)
        for result in (first, again):
            assert result.requests > 10
            assert result.checked_pages >= result.reads
            assert result.read_us["p50"] > 0


async def test_more_than_the_device_has_is_refused(cluster: Make) -> None:
    async with cluster("shm") as c:
        assembly = await c.export(4 * MIB)
        options = PlayOptions(workload="random", pages=1025)
        with pytest.raises(ConfigRejected, match="4198400 are asked for"):
            await play_device(assembly.options.socket, options)
