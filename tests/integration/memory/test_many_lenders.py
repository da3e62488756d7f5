"""A device over tcp whose spans lie at many lenders: a connection asks each of them itself."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.integration.memory.conftest import SLAB_BYTES

from slackwater.common.base import limits
from slackwater.loadgen.memory.checker import PAGE_BYTES, Checker
from slackwater.loadgen.memory.nbd_client import NbdClient
from slackwater.memory.nbd import connection
from slackwater.memory.nbd import state as s
from slackwater.memory.nbd.lane_set import LaneSet
from slackwater.memory.pages.table import counters
from slackwater.memory.service.assembly import DeviceAssembly

SPAN_PAGES = SLAB_BYTES // PAGE_BYTES
Make = Callable[..., Any]


class Spread:
    """One client of a device of one span a lender; of each span a few pages are used."""

    def __init__(self, assembly: DeviceAssembly, client: NbdClient, count: int) -> None:
        self.assembly, self.client, self.checker = assembly, client, Checker()
        self.pages = [span * SPAN_PAGES + page for span in range(count) for page in range(4)]

    @classmethod
    async def make(cls, c: Any, count: int) -> "Spread":
        """Each lender has one of the spans, and the pages of it that are used."""
        await c.lend(count, slabs=1)
        assembly = await c.export(count * SLAB_BYTES, prefetch=0)
        spread = cls(assembly, await NbdClient.connect(assembly.options.socket), count)
        await spread.write_all()
        await c.mapped(count)
        lent = [len(lender.core.having("lent")) for lender in c.lenders]
        assert lent == [1] * count
        await spread.write_all()
        await spread.until_stored(c)
        return spread

    async def until_stored(self, c: Any) -> None:
        """Until then reads find pages in the ring and ask no lender."""
        await self.client.flush()
        await c.until(lambda: not self.assembly.device.table.pending.any())

    async def write_all(self) -> None:
        for page in self.pages:
            generation, data = self.checker.begin(page)
            await self.client.write(page * PAGE_BYTES, data)
            self.checker.acknowledged(page, generation)

    async def read_all(self) -> None:
        for page in self.pages:
            self.checker.check(page, await self.client.read(page * PAGE_BYTES, PAGE_BYTES))

    async def until_lanes(self, count: int) -> None:
        """Each is asked for by a read that has none."""
        async with asyncio.timeout(10):
            while len(self.lanes()) < count:
                await self.read_all()

    def lanes(self) -> list[int]:
        """Requests so far, of each lane that is up."""
        [client] = self.assembly.front._connections
        words = client.state.lanes.words
        return words[words[:, s.STATE] == s.UP, s.TAIL].tolist()

    def counts(self) -> tuple[int, int, int, int]:
        """Pages read and written on lanes, requests of lanes, pages that the event loop read."""
        seen, others = self.seen(), int(self.assembly.device.remote_read_pages)
        return seen["read_lane_pages"], seen["written_lane_pages"], sum(self.lanes()), others

    def seen(self) -> dict[str, int]:
        return counters(self.assembly.device.table)


async def test_every_one_of_sixteen_lenders_is_asked_on_a_lane(cluster: Make) -> None:
    """No read and no write goes the slow way through the event loop, whichever lender has it."""
    count = 16
    async with cluster("tcp") as c:
        spread = await Spread.make(c, count)
        await spread.until_lanes(count)
        pages, rounds = len(spread.pages), []
        for _ in range(6):
            before = spread.counts()
            await spread.write_all()
            await spread.until_stored(c)
            await spread.read_all()
            after = spread.counts()
            rounds.append(tuple(now - was for now, was in zip(after, before, strict=True)))
        assert rounds == [(pages, pages, 2 * pages, 0)] * 6
        assert min(spread.lanes()) > 0
        await spread.client.close()


async def test_lanes_that_are_too_few_go_to_the_lenders_that_are_used(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least used one makes room; what has no lane is served all the same."""
    monkeypatch.setattr(connection, "LaneSet", lambda device: LaneSet(device, most=3))
    monkeypatch.setattr("slackwater.common.base.limits.LANE_PAUSE_S", 0.05)
    async with cluster("tcp") as c:
        spread = await Spread.make(c, 6)
        await spread.until_lanes(3)
        for wanted in (spread.pages[:12], spread.pages[12:]):  # Three lenders, then the others.
            spread.pages, by_lanes = wanted, 0
            async with asyncio.timeout(10):
                while by_lanes < len(wanted):
                    before = spread.seen()["read_lane_pages"]
                    await spread.read_all()
                    by_lanes = spread.seen()["read_lane_pages"] - before
            assert len(spread.lanes()) == 3
        await spread.client.close()


def test_lanes_that_nobody_asked_for_cost_no_memory() -> None:
    """Buffers of all of them would be hundreds of MiB, resident where memory is locked."""
    state = s.make_connection(0, 2**30, PAGE_BYTES, chunked=True)
    held = sum(part.nbytes for part in state.lanes if isinstance(part, np.ndarray))
    assert held < 8 * 1024 * 1024
    assert not state.lanes.shared[s.USED]


def test_each_client_of_a_device_may_have_a_lane_to_a_lender() -> None:
    assert limits.NBD_CONNECTIONS_MAX <= limits.LANES_MAX
