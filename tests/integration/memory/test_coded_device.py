"""8 + 2 and two copies through real lenders and a real device: losses are not felt, and what is
lost is put back; damage never reaches a client."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slackwater.memory.control.core import DeviceCore
from slackwater.memory.pages.device import Device
from slackwater.memory.pages.table import page_range
from slackwater.memory.resilience.hydra import Hydra
from slackwater.memory.store import PAGE_BYTES

Make = Callable[..., Any]
PAGES = 512
SPAN_PAGES = 1985
"""Pages of a span of 8 + 2 in slabs of 1 MiB."""


def strategy(device: Device) -> Hydra:
    assert isinstance(device.resilience, Hydra)
    return device.resilience


async def fill(c: Any, name: str, pages: int = PAGES) -> tuple[Any, bytes]:
    """A device whose only span is in remote memory, and what is in it."""
    assembly = await c.export(pages * PAGE_BYTES, resilience=name)
    device = assembly.device
    data = np.random.default_rng(3).integers(0, 256, pages * PAGE_BYTES, np.uint8).tobytes()
    every = page_range(0, pages)
    width = device.resilience.width
    await device.write_pages(every, memoryview(data))
    await c.until(lambda: sum(m is not None for m in device.members(0)) == width)
    await c.mapped(1)
    await device.write_pages(every, memoryview(data))
    await c.until(lambda: device.present_pages(0) == pages)
    await device.flush()  # So that no read finds its page among the held buffers.
    return assembly, data


def whole(core: DeviceCore, span: int) -> int:
    """Members that have the fragments of all pages."""
    return sum(member.usable and member.whole for member in core.spans.of(span))


async def read(device: Device, pages: int = PAGES) -> bytes:
    target = bytearray(pages * PAGE_BYTES)
    await device.read_pages(page_range(0, pages), memoryview(target))
    return bytes(target)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_pages_travel_as_fragments(cluster: Make, kind: str) -> None:
    async with cluster(kind) as c:
        await c.lend(10, slabs=1)
        assembly, data = await fill(c, "8+2")
        device = assembly.device
        assert len({slab.lender for slab in device.members(0)}) == 10
        before = device.remote_read_pages
        assert await read(device) == data
        assert device.remote_read_pages - before == PAGES
        assert strategy(device).erasures == 0


async def test_any_two_lenders_gone_and_no_byte_from_disk(cluster: Make) -> None:
    """All 45 pairs on real slabs: the device reads from the eight that are left."""
    async with cluster("shm") as c:
        await c.lend(10, slabs=1)
        assembly, data = await fill(c, "8+2", 64)
        device = assembly.device
        members = device._members[0]
        for pair in itertools.combinations(range(10), 2):
            device._members[0] = [None if i in pair else m for i, m in enumerate(members)]
            before = device.remote_read_pages
            assert await read(device, 64) == data
            assert device.remote_read_pages - before == 64
        device._members[0] = members


async def test_damage_is_made_up_for_and_too_much_comes_from_disk(cluster: Make) -> None:
    async with cluster("shm") as c:
        await c.lend(10, slabs=1)
        assembly, data = await fill(c, "8+2", 64)
        device, hydra = assembly.device, strategy(assembly.device)
        slot = hydra.slot_bytes

        def damage(index: int) -> None:
            mapped = device.members(0)[index].mapped
            mapped[5 * slot + 40] ^= 1

        damage(0)
        damage(7)
        assert await read(device, 64) == data
        assert (hydra.erasures, hydra.lost_pages) == (2, 0)
        damage(3)
        assert await read(device, 64) == data
        assert hydra.lost_pages == 1
        assert device.present_pages(0) == 63


async def test_three_lenders_that_evict_at_once_take_no_page(cluster: Make) -> None:
    """Each evicts two slabs, members of two spans. The device keeps what it needs until others have
    it: no page ever has fewer than eight fragments, and none is taken by force."""
    async with cluster("tcp") as c:
        await c.lend(10, slabs=2)
        assembly = await c.export(2 * SPAN_PAGES * PAGE_BYTES, resilience="8+2")
        device, core = assembly.device, assembly.core
        pages = np.concatenate((page_range(0, 64), page_range(SPAN_PAGES, 64)))
        data = np.random.default_rng(3).integers(0, 256, 128 * PAGE_BYTES, np.uint8).tobytes()

        async def check() -> None:
            target = bytearray(len(data))
            await device.read_pages(pages, memoryview(target))
            assert target == data

        for _ in range(2):
            await device.write_pages(pages, memoryview(data))
            await c.until(lambda: all(whole(core, span) == 10 for span in (0, 1)))
        await c.until(lambda: device.present_pages(0) + device.present_pages(1) == 128)
        await device.flush()
        await c.lend(6, slabs=0)  # Where members can be made again.
        for machine in c.machines[10:]:
            machine.total_bytes = c.machines[0].total_bytes
        await c.until(lambda: all(len(s.core.having("free")) == 2 for s in c.lenders[10:]))
        fewest, step = [10], core.step

        def watched(event: Any, now_s: float) -> Any:
            effects = step(event, now_s)
            fewest.append(min(whole(core, 0), whole(core, 1)))
            return effects

        core.step = watched
        for machine in c.machines[:3]:
            machine.others_bytes = machine.total_bytes
        gone = {f"s{number}" for number in (1, 2, 3)}

        def moved() -> bool:
            left = {m.lender for m in core.spans.all()}
            return not left & gone and whole(core, 0) == whole(core, 1) == 10

        async with asyncio.timeout(30):
            while not moved():
                await check()
                await asyncio.sleep(0.005)
        await check()
        assert min(fewest) == 8
        assert strategy(device).lost_pages == 0
        assert core.departed["lost"] == 0, "none was taken by force"


@pytest.mark.parametrize(("kind", "name"), [("shm", "8+2"), ("tcp", "8+2"), ("tcp", "2-copies")])
async def test_an_evicted_member_is_made_again_elsewhere(
    cluster: Make, kind: str, name: str
) -> None:
    """One lender retreats; its fragments come to another, reads never see the disk."""
    async with cluster(kind) as c:
        width = 10 if name == "8+2" else 2
        await c.lend(width + 1, slabs=1)
        assembly, data = await fill(c, name, 128)
        device = assembly.device
        leaving = device.members(0)[1]
        at = int(leaving.lender.removeprefix("s")) - 1
        before = device.remote_read_pages
        c.machines[at].others_bytes = c.machines[at].total_bytes
        reads = 0

        def restored() -> bool:
            slab = device.members(0)[1]
            return slab is not None and slab is not leaving

        async with asyncio.timeout(20):
            while not restored() or assembly.lenders.regenerator.regenerated_pages < 128:
                assert await read(device, 128) == data
                reads += 1
                await asyncio.sleep(0.005)
        assert device.remote_read_pages - before == 128 * reads
        assert strategy(device).lost_pages == 0
        members = device._members[0]
        lost = (0, 2) if width > 2 else (0,)  # So what was made again is needed.
        device._members[0] = [None if i in lost else m for i, m in enumerate(members)]
        assert await read(device, 128) == data
        assert strategy(device).lost_pages == 0
        device._members[0] = members
