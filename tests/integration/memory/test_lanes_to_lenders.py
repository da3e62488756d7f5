"""A device over tcp whose connections ask lenders themselves: many requests are under way while
lenders vanish, take slabs back, hang, or lie; every page read is one that was written."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from slackwater.common.base.errors import Unavailable
from slackwater.common.transport.tcp import TcpFabric
from slackwater.common.transport.tcp_channel import TcpTuning
from slackwater.loadgen.memory.checker import PAGE_BYTES, Checker
from slackwater.loadgen.memory.nbd_client import NbdClient
from slackwater.memory.pages.table import counters
from slackwater.memory.service.assembly import DeviceAssembly

PAGES = 512
DEPTH = 32
Make = Callable[..., Any]


class Load:
    """One client; each of DEPTH tasks has pages of its own, and checks what it reads of them."""

    def __init__(self, assembly: DeviceAssembly, client: NbdClient, seed: int) -> None:
        self.assembly, self.client, self.checker = assembly, client, Checker()
        self.done = 0
        self._rng = random.Random(seed)
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def make(cls, c: Any, seed: int = 1, **options: Any) -> "Load":
        """Every page is in remote memory, and only there."""
        assembly = await c.export(PAGES * PAGE_BYTES, **options)
        load = cls(assembly, await NbdClient.connect(assembly.options.socket), seed)
        await load.write_all()
        await c.mapped(2)
        await load.write_all()
        await load.client.flush()
        await c.until(lambda: not assembly.device.table.pending.any())
        return load

    async def write_all(self) -> None:
        await asyncio.gather(*(self.write(page) for page in range(PAGES)))

    async def write(self, page: int) -> None:
        generation, data = self.checker.begin(page)
        await self.client.write(page * PAGE_BYTES, data)
        self.checker.acknowledged(page, generation)

    async def check(self, page: int) -> None:
        self.checker.check(page, await self.client.read(page * PAGE_BYTES, PAGE_BYTES))

    def start(self, writes: float = 0.3) -> None:
        self._tasks = [asyncio.ensure_future(self._use(n, writes)) for n in range(DEPTH)]

    async def _use(self, number: int, writes: float) -> None:
        while not self._stopped:
            page = self._rng.randrange(PAGES // DEPTH) * DEPTH + number
            await (self.write(page) if self._rng.random() < writes else self.check(page))
            self.done += 1

    async def goes_on(self, c: Any, count: int = 500) -> None:
        before = self.done
        await c.until(lambda: self.done > before + count or any(t.done() for t in self._tasks))

    async def end(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)
        for page in range(PAGES):
            await self.check(page)

    def seen(self) -> dict[str, int]:
        return counters(self.assembly.device.table)


async def test_random_reads_and_writes_take_the_lanes(cluster: Make) -> None:
    async with cluster("tcp") as c:
        await c.lend(2)
        load = await Load.make(c)
        load.start()
        await load.goes_on(c, 2000)
        await load.end()
        seen = load.seen()
        assert seen["read_lane_pages"] > 1000
        assert seen["written_lane_pages"] > 200
        beat = load.assembly.status.heartbeat(0.0)
        assert beat.read_remote_pages >= seen["read_lane_pages"]
        assert beat.written_remote_pages >= seen["written_lane_pages"]
        await load.client.close()


async def test_large_reads_take_the_lanes(cluster: Make) -> None:
    async with cluster("tcp") as c:
        await c.lend(2)
        load = await Load.make(c, prefetch=0)
        for first, count in ((0, 256), (256, 128), (100, 40), (300, 9)):
            for _ in range(3):
                data = await load.client.read(first * PAGE_BYTES, count * PAGE_BYTES)
                for i in range(count):
                    page = data[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]
                    load.checker.check(first + i, page)
        assert load.seen()["read_lane_pages"] > 500
        await load.client.close()


async def test_lenders_vanish_with_requests_under_way(cluster: Make) -> None:
    """Every channel of a lender ends at once, as when its process is killed; it is there again
    a moment later, and the slabs are claimed."""
    async with cluster("tcp") as c:
        await c.lend(2)
        load = await Load.make(c)
        load.start()
        for number in range(4):
            await load.goes_on(c)
            for session in tuple(c.lenders[number % 2].sessions._sessions.values()):
                session.channel.lose("a test")
            await c.until(lambda: "suspended" in c.facts)
            await load.goes_on(c)
            await c.mapped(2)
        await load.end()
        assert load.seen()["read_lane_pages"] > 500
        await load.client.close()


async def test_large_writes_take_the_lanes_while_lenders_vanish(cluster: Make) -> None:
    """Four writers of 512 KiB each, whose pieces are on their way when the channel ends."""
    count = PAGES // 4

    async with cluster("tcp") as c:
        await c.lend(2)
        load = await Load.make(c)

        async def use(first: int) -> None:
            while not load._stopped:
                made = [load.checker.begin(page) for page in range(first, first + count)]
                await load.client.write(first * PAGE_BYTES, b"".join(data for _, data in made))
                for i, (generation, _) in enumerate(made):
                    load.checker.acknowledged(first + i, generation)
                data = await load.client.read(first * PAGE_BYTES, count * PAGE_BYTES)
                for i in range(count):
                    load.checker.check(first + i, data[i * PAGE_BYTES : (i + 1) * PAGE_BYTES])
                load.done += 1

        load._tasks = [asyncio.ensure_future(use(first)) for first in range(0, PAGES, count)]
        for number in range(4):
            await load.goes_on(c, 20)
            for session in tuple(c.lenders[number % 2].sessions._sessions.values()):
                session.channel.lose("a test")
            await c.until(lambda: "suspended" in c.facts)
            await load.goes_on(c, 8)
            await c.mapped(2)
        await load.goes_on(c, 20)
        await load.end()
        await load.client.flush()
        await c.until(lambda: not load.assembly.device.table.pending.any())
        assert load.seen()["written_lane_pages"] > 20 * count
        await load.client.close()


async def test_slabs_are_taken_back_with_requests_under_way(cluster: Make) -> None:
    async with cluster("tcp") as c:
        await c.lend(2)
        load = await Load.make(c)
        load.start()
        for _ in range(3):
            await load.goes_on(c)
            for machine in c.machines:
                machine.others_bytes = machine.total_bytes
            await c.until(lambda: load.assembly.device.mapped_spans == 0)
            for machine in c.machines:
                machine.others_bytes = 0
            await c.mapped(2)
        await load.goes_on(c)
        await load.end()
        assert c.facts.count("unmapped") >= 6
        assert load.seen()["written_lane_pages"] > 200
        await load.client.close()


async def test_a_broken_lane_costs_no_page_and_comes_back(cluster: Make) -> None:
    """The lanes alone break; with writes on them, their channels go, too."""
    async with cluster("tcp") as c:
        await c.lend(2)
        load = await Load.make(c)
        load.start(writes=0.1)
        for _ in range(3):
            await load.goes_on(c)
            for slab in c.lenders:
                for session in tuple(slab.sessions._sessions.values()):
                    for end in tuple(session.channel._target_lanes._ends.values()):
                        end._sock.shutdown(2)
            await load.goes_on(c)
            before = load.seen()["read_lane_pages"]
            await c.until(lambda before=before: load.seen()["read_lane_pages"] > before + 50)
        await load.end()
        await load.client.close()


async def test_a_lender_that_hangs_blocks_nobody(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers do not come any more, though its connections stand: what was asked on lanes is
    asked on the channel, which is given up in its time; then the disk has every page."""
    async with cluster("tcp") as c:
        await c.lend(1)
        made = c.export

        async def export(size: int, **options: Any) -> DeviceAssembly:
            assembly = await made(size, **options)
            assembly.lenders._fabrics = {"tcp": TcpFabric(TcpTuning(stall_s=1.0))}
            return assembly

        monkeypatch.setattr(c, "export", export)
        valves: list[asyncio.Event] = []
        address = c.lenders[0].heartbeat(0.0).addresses[0][1]
        server = await asyncio.start_server(
            lambda reader, writer: pump(reader, writer, address, valves), "127.0.0.1", 0
        )
        before = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        real = c.lenders[0].heartbeat
        monkeypatch.setattr(
            c.lenders[0], "heartbeat",
            lambda now_s: msgspec.structs.replace(real(now_s), addresses=(("tcp", before),)),
        )  # fmt: skip
        load = await Load.make(c)
        load.start()
        await load.goes_on(c)
        for valve in valves:
            valve.clear()
        await c.until(lambda: load.assembly.device.mapped_spans == 0, 10.0)
        await load.goes_on(c)
        for valve in valves:
            valve.set()
        await load.end()
        await load.client.close()
        server.close()


async def pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    address: str,
    valves: list[asyncio.Event],
) -> None:
    """Forward a connection; its answers only while the valve is open."""
    host, port = address.rsplit(":", 1)
    up_reader, up_writer = await asyncio.open_connection(host, int(port))
    valve = asyncio.Event()
    valve.set()
    valves.append(valve)

    async def one(source: asyncio.StreamReader, target: asyncio.StreamWriter, gate: bool) -> None:
        try:
            while data := await source.read(65_536):
                if gate:
                    await valve.wait()
                target.write(data)
                await target.drain()
        except OSError:
            return
        finally:
            target.close()

    await asyncio.gather(one(reader, up_writer, False), one(up_reader, writer, True))


async def test_clients_come_and_go_with_writes_under_way(cluster: Make) -> None:
    """A client that is cut off in the middle leaves no entry of the ring held, and no lane open."""
    async with cluster("tcp") as c:
        await c.lend(2)
        load = await Load.make(c)
        table = load.assembly.device.table
        for number in range(20):
            other = await NbdClient.connect(load.assembly.options.socket)
            work = [
                asyncio.ensure_future(other.write(page * PAGE_BYTES, bytes(PAGE_BYTES)))
                for page in range(number, PAGES, 20)
            ]
            await work[number % len(work)]
            other._writer.transport.abort()
            await asyncio.gather(*work, return_exceptions=True)
            with pytest.raises(Unavailable):
                await other.read(0, PAGE_BYTES)
        await load.write_all()
        await load.client.flush()
        await c.until(lambda: not table.pending.any())
        await load.end()
        lanes = [
            len(session.channel._target_lanes)
            for lender in c.lenders
            for session in lender.sessions._sessions.values()
        ]
        assert sum(lanes) <= 2
        await load.client.close()
