"""The in-process transport under virtual time: order, latency, faults, and the same run again."""

import asyncio
import hashlib
from itertools import pairwise

import pytest

from slackwater.common.base.errors import ConfigRejected, DeadlineExceeded, Unavailable
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.transport.base import Channel
from slackwater.common.transport.memory import MemoryFabric, MemoryListener, MemoryNetwork
from slackwater.common.transport.region import Region


async def listen(
    fabric: MemoryFabric, address: str = "a"
) -> tuple[MemoryListener, "asyncio.Queue[Channel]", list[Region]]:
    arrived: asyncio.Queue[Channel] = asyncio.Queue()
    taken: list[Region] = []

    async def keep(channel: Channel) -> None:
        arrived.put_nowait(channel)

    async def take(region: Region, _note: bytes) -> None:
        taken.append(region)

    return await fabric.listen(address, lambda _hello: None, keep, take), arrived, taken


def test_every_step_of_the_way_takes_the_latency_of_virtual_time() -> None:
    async def run() -> list[float]:
        loop = asyncio.get_running_loop()
        fabric = MemoryFabric(MemoryNetwork(latency_s=2.0))
        listener, arrived, taken = await listen(fabric)
        times = [loop.time()]
        near = await fabric.connect(listener.address, b"", deadline_s=5)
        times.append(loop.time())
        far = await arrived.get()
        region = Region.create(4096, "r")
        remote = await near.open(far.grant(region))
        times.append(loop.time())
        await near.write(memoryview(b"abc"), remote, 0)
        times.append(loop.time())
        near.send(b"frame")
        await far.receive()
        times.append(loop.time())
        await near.handover(region, b"")
        times.append(loop.time())
        await near.close()
        await listener.close()
        for each in (*taken, region):
            each.close()
        return [round(later - sooner, 6) for sooner, later in pairwise(times)]

    assert run_simulated(run()) == [4.0, 4.0, 4.0, 2.0, 4.0]


def test_frames_sent_in_one_moment_arrive_in_order() -> None:
    """The event loop alone keeps no order among timers that are due together."""

    async def run() -> list[int]:
        fabric = MemoryFabric(MemoryNetwork(latency_s=0.1))
        listener, arrived, _ = await listen(fabric)
        near = await fabric.connect(listener.address, b"", deadline_s=5)
        far = await arrived.get()
        for number in range(200):
            near.send(bytes([number]))
        got = [(await far.receive())[0] for _ in range(200)]
        await near.close()
        await listener.close()
        return got

    assert run_simulated(run()) == list(range(200))


def test_one_seed_gives_one_run_and_another_seed_other_keys() -> None:
    def run(seed: int) -> str:
        digest = hashlib.sha256()

        async def work() -> None:
            fabric = MemoryFabric(MemoryNetwork(seed=seed, latency_s=0.001))
            listener, arrived, _ = await listen(fabric)
            ends = []
            for _ in range(5):
                near = await fabric.connect(listener.address, b"", deadline_s=5)
                ends.append((near, await arrived.get()))
            region = Region.create(4096, "r")

            async def talk(number: int, near: Channel, far: Channel) -> None:
                remote = await near.open(key := far.grant(region))
                await near.write(memoryview(bytes([number])), remote, number)
                near.send(key)
                digest.update(await far.receive() + bytes(region.buffer[:5]))

            await asyncio.gather(*(talk(n, *pair) for n, pair in enumerate(ends)))
            await listener.close()
            for near, _ in ends:
                await near.close()
            region.close()

        run_simulated(work())
        return digest.hexdigest()

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_cut_loses_channels_and_connects_until_it_heals() -> None:
    async def run() -> None:
        network = MemoryNetwork(latency_s=0.5)
        fabric = MemoryFabric(network)
        listener, arrived, _ = await listen(fabric)
        near = await fabric.connect("a", b"", deadline_s=5)
        far = await arrived.get()
        region = Region.create(4096, "r")
        remote = await near.open(far.grant(region))
        waiting = [
            asyncio.create_task(near.receive()),
            asyncio.create_task(far.receive()),
            asyncio.create_task(near.write(memoryview(b"x"), remote, 0)),
            asyncio.create_task(near.handover(region, b"")),
        ]
        await asyncio.sleep(0.1)
        network.cut("a")
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
        assert region.buffer[0] == 0
        with pytest.raises(Unavailable):
            await fabric.connect("a", b"", deadline_s=5)
        network.heal("a")
        again = await fabric.connect("a", b"", deadline_s=5)
        await again.close()
        await near.close()
        await listener.close()
        region.close()

    run_simulated(run())


def test_deadlines_and_addresses() -> None:
    async def run() -> None:
        fabric = MemoryFabric(MemoryNetwork(latency_s=3.0))
        listener, _, _ = await listen(fabric)
        with pytest.raises(DeadlineExceeded, match="5 s"):
            await fabric.connect("a", b"", deadline_s=5)
        with pytest.raises(ConfigRejected, match="another address"):
            await listen(fabric)
        first, _, _ = await listen(fabric, "")
        second, _, _ = await listen(fabric, "")
        assert first.address != second.address
        for each in (listener, first, second):
            await each.close()
        with pytest.raises(Unavailable):
            await fabric.connect("a", b"", deadline_s=50)

    run_simulated(run())
