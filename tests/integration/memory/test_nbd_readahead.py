"""Leap in front of a device over tcp, through its NBD server: scans hit, and nothing is stale."""

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from slackwater.common.base.errors import ConfigRejected
from slackwater.loadgen.memory.checker import PAGE_BYTES, content
from slackwater.loadgen.memory.nbd_client import NbdClient
from slackwater.memory.pages.table import counters
from slackwater.memory.service.assembly import DeviceAssembly

MIB = 1024 * 1024
PAGES = 1024
Make = Callable[..., Any]


async def prepared(c: Any, **options: Any) -> tuple[DeviceAssembly, NbdClient]:
    """Every page is in remote memory alone, with the first generation of its bytes."""
    await c.lend(2)
    assembly = await c.export(PAGES * PAGE_BYTES, **options)
    client = await NbdClient.connect(assembly.options.socket)
    await client.write(0, bytes(PAGES * PAGE_BYTES))
    await c.mapped(4)
    for first in range(0, PAGES, 64):
        data = b"".join(content(page, 1) for page in range(first, first + 64))
        await client.write(first * PAGE_BYTES, data)
    await client.flush()
    await c.until(lambda: not assembly.device.table.pending.any())
    return assembly, client


async def scan(client: NbdClient, pages: Iterable[int], count: int = 1) -> None:
    for page in pages:
        data = await client.read(page * PAGE_BYTES, count * PAGE_BYTES)
        assert data == b"".join(content(page + i, 1) for i in range(count)), page


def rates(assembly: DeviceAssembly) -> tuple[float, float]:
    """Hit rate and accuracy, as `memory top` computes them."""
    beat = assembly.status.heartbeat(0.0)
    hits = beat.prefetch_hit_pages
    return hits / (hits + beat.read_waited_pages), hits / max(1, beat.prefetched_pages)


@pytest.mark.parametrize(
    ("pages", "count"),
    [
        (range(PAGES), 1),
        (range(PAGES - 1, -1, -1), 1),
        ([page for first in range(7) for page in range(first, PAGES, 7)], 1),
        (range(0, PAGES, 4), 4),
        (range(0, PAGES, 6), 2),
    ],
    ids=["sequential", "backwards", "stride-7", "sequential-16k", "stride-6-of-8k"],
)
async def test_scans_over_tcp_hit_more_than_95_percent(
    cluster: Make, pages: Iterable[int], count: int
) -> None:
    async with cluster("tcp") as c:
        assembly, client = await prepared(c)
        await scan(client, pages, count)
        coverage, accuracy = rates(assembly)
        assert coverage > 0.95, counters(assembly.device.table)
        assert accuracy > 0.95
        await client.close()


@pytest.mark.parametrize("scans", [2, 4, 8])
async def test_scans_that_take_turns_on_one_connection_hit(cluster: Make, scans: int) -> None:
    """Scan as several programs do that swap. Every second scan goes backwards."""
    async with cluster("tcp") as c:
        assembly, client = await prepared(c)
        count = PAGES // scans
        await scan(client, (
            first + (i if first // count % 2 else count - 1 - i)
            for i in range(count)
            for first in range(0, PAGES, count)
        ))  # fmt: skip
        assert rates(assembly)[0] > 0.95, counters(assembly.device.table)
        await client.close()


async def test_random_order_prefetches_next_to_nothing(cluster: Make) -> None:
    async with cluster("tcp") as c:
        assembly, client = await prepared(c)
        order = list(range(PAGES))
        random.Random(3).shuffle(order)
        await scan(client, order)
        beat = assembly.status.heartbeat(0.0)
        assert beat.prefetched_pages < PAGES // 50
        assert beat.read_waited_pages > PAGES * 0.98
        await client.close()


@pytest.mark.parametrize(("kind", "prefetch"), [("shm", 8), ("tcp", 0)])
async def test_mapped_memory_and_devices_without_it_prefetch_nothing(
    cluster: Make, kind: str, prefetch: int
) -> None:
    async with cluster(kind) as c:
        assembly, client = await prepared(c, prefetch=prefetch)
        await scan(client, range(PAGES))
        assert assembly.status.heartbeat(0.0).prefetched_pages == 0
        assert assembly.status.heartbeat(0.0).read_remote_pages >= PAGES
        await client.close()


async def test_two_clients_that_scan_are_followed_apart(cluster: Make) -> None:
    async with cluster("tcp") as c:
        assembly, one = await prepared(c)
        other = await NbdClient.connect(assembly.options.socket)
        await asyncio.gather(
            scan(one, range(0, PAGES // 2)), scan(other, range(PAGES - 1, PAGES // 2 - 1, -1))
        )
        assert rates(assembly)[0] > 0.95
        await one.close()
        await other.close()


async def test_scans_see_every_write_trim_and_eviction(cluster: Make) -> None:
    """One client scans, another changes pages just ahead of it, lets them go, zeroes them, and
    lenders take their slabs back. A read gives what the page held when it began, or anything that
    was written to it since: several changes may be answered while one read waits."""
    rng = random.Random(11)
    held = {page: [content(page, 1)] for page in range(PAGES)}
    answered = dict.fromkeys(range(PAGES), 0)
    async with cluster("tcp") as c:
        assembly, client = await prepared(c)
        changer = await NbdClient.connect(assembly.options.socket)
        at = 0
        stop = False

        async def change() -> None:
            generation = 2
            while not stop:
                page = (at + rng.randrange(0, 24)) % PAGES
                what = rng.random()
                new = content(page, generation) if what < 0.7 else bytes(PAGE_BYTES)
                held[page].append(new)
                if what < 0.7:
                    await changer.write(page * PAGE_BYTES, new)
                elif what < 0.85:
                    await changer.trim(page * PAGE_BYTES, PAGE_BYTES)
                else:
                    await changer.zero(page * PAGE_BYTES, PAGE_BYTES)
                answered[page] = len(held[page]) - 1
                generation += 1

        async def evict() -> None:
            while not stop:
                machine = rng.choice(c.machines)
                machine.others_bytes = machine.total_bytes
                await asyncio.sleep(0.1)
                machine.others_bytes = 0
                await asyncio.sleep(0.2)

        changing = [asyncio.ensure_future(change()), asyncio.ensure_future(evict())]
        for _ in range(3):
            for at in range(PAGES):
                first = answered[at]
                data = await client.read(at * PAGE_BYTES, PAGE_BYTES)
                assert data in held[at][first:], at
        stop = True
        await asyncio.gather(*changing)
        seen = counters(assembly.device.table)
        assert seen["prefetch_hit_pages"] > 100
        assert seen["prefetch_changed_pages"] > 10
        assert "unmapped" in c.facts
        await client.close()
        await changer.close()


async def test_a_window_out_of_range_is_refused(cluster: Make) -> None:
    async with cluster("tcp") as c:
        with pytest.raises(ConfigRejected, match="prefetch 65"):
            await c.export(MIB, prefetch=65)
