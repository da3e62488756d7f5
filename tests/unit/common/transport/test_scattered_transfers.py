"""Abilities of some channels: many pieces of a region as one operation, regions that are opened
without asking, room that is made before anything is handed over."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest

from slackwater.common.base import limits
from slackwater.common.base.errors import AccessRefused, Rejected, Unavailable
from slackwater.common.transport.base import (
    Channel,
    Fabric,
    Offering,
    RemoteRegion,
    Reserving,
    Scattering,
)
from slackwater.common.transport.memory import MemoryFabric, MemoryNetwork
from slackwater.common.transport.region import Region
from slackwater.common.transport.tcp import TcpFabric

PIECE = 512
PIECES = 400


@pytest.fixture(params=["tcp", "memory"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator["Opened"]:
    """Yield (channel, remote region, the region itself)."""
    region = Region.create(PIECE * PIECES, "pieces")
    keys: list[bytes] = []

    async def serve(channel: Channel) -> None:
        keys.append(channel.grant(region))
        channel.send(keys[-1])

    async def none(region: Region, note: bytes) -> None:
        region.close()

    fabric: Fabric = TcpFabric() if request.param == "tcp" else MemoryFabric(MemoryNetwork())
    listener = await fabric.listen("127.0.0.1:0", lambda hello: None, serve, none)
    channel = await fabric.connect(listener.address, b"", deadline_s=5.0)
    remote = await channel.open(await channel.receive())
    yield channel, remote, region
    await channel.close()
    await listener.close()
    region.close()


Opened = tuple[Channel, RemoteRegion, Region]


async def test_pieces_land_and_come_back_in_their_order(opened: Opened) -> None:
    channel, remote, region = opened
    assert isinstance(channel, Scattering)
    rng = random.Random(3)
    offsets = [number * PIECE for number in rng.sample(range(PIECES), 150)]
    data = rng.randbytes(len(offsets) * PIECE)
    await channel.write_scattered(memoryview(data), remote, offsets, PIECE)
    for i, offset in enumerate(offsets):
        assert region.buffer[offset : offset + PIECE] == data[i * PIECE : (i + 1) * PIECE]
    back = bytearray(len(data))
    await channel.read_scattered(remote, offsets, PIECE, memoryview(back))
    assert bytes(back) == data


async def test_a_piece_outside_the_region_refuses_all_of_them(opened: Opened) -> None:
    channel, remote, region = opened
    assert isinstance(channel, Scattering)
    with pytest.raises(AccessRefused):
        await channel.write_scattered(
            memoryview(b"x" * 2 * PIECE), remote, [0, PIECE * PIECES - 1], PIECE
        )
    assert bytes(region.buffer[:PIECE]) == bytes(PIECE), "nothing was sent"


async def test_a_buffer_of_another_size_is_refused(opened: Opened) -> None:
    channel, remote, _ = opened
    assert isinstance(channel, Scattering)
    with pytest.raises(Rejected):
        await channel.read_scattered(remote, [0, 512], PIECE, memoryview(bytearray(PIECE)))


class Ends:
    """Both ends of a channel in memory, and the regions that were handed over."""

    async def __aenter__(self) -> "Ends":
        self.taken: list[Region] = []
        self.rooms = 0
        arrived: asyncio.Queue[Channel] = asyncio.Queue()

        async def take(region: Region, note: bytes) -> None:
            self.taken.append(region)

        def prepare(hello: bytes, nbytes: int) -> Callable[[], None]:
            self.rooms += 1
            return self._returned

        fabric = MemoryFabric(MemoryNetwork(latency_s=0.001))
        self.listener = await fabric.listen("", lambda _: None, arrived.put, take, prepare)
        self.near = await fabric.connect(self.listener.address, b"", deadline_s=5.0)
        self.far = await arrived.get()
        self.region = Region.create(8192, "r")
        return self

    def _returned(self) -> None:
        self.rooms -= 1

    async def __aexit__(self, *_: object) -> None:
        await self.near.close()
        await self.listener.close()
        for region in (self.region, *self.taken):
            region.close()


async def test_an_offer_in_memory_can_be_taken_back_and_too_many_are_asked_for() -> None:
    async with Ends() as both:
        near, far = both.near, both.far
        assert isinstance(far, Offering)
        taken = far.offer(both.region)
        far.revoke(taken)
        keys = [far.offer(both.region) for _ in range(limits.OFFERS_MAX + 3)]
        far.send(b"behind them")
        assert await near.receive() == b"behind them"
        with pytest.raises(AccessRefused):
            await near.open(taken)
        opened = [await near.open(key) for key in keys]
        await near.write(memoryview(b"here"), opened[0], 0)
        assert bytes(both.region.buffer[:4]) == b"here"
        late = far.offer(both.region)
        await near.close()
        with pytest.raises(Unavailable):
            await near.open(late)


async def test_room_in_memory_is_used_once_or_given_back() -> None:
    async with Ends() as both:
        near = both.near
        assert isinstance(near, Reserving)
        both.region.buffer[:3] = b"abc"
        first, second = await near.make_room(both.region), await near.make_room(both.region)
        assert both.rooms == 2
        near.give_back(second)
        await near.hand_over_into(first, both.region, b"note", None, ((0, 2),))
        (taken,) = both.taken
        assert bytes(taken.buffer[:3]) == b"ab\0"
        assert both.rooms == 0
        with pytest.raises(AccessRefused):
            await near.hand_over_into(first, both.region, b"note", None, None)
        third = asyncio.ensure_future(near.make_room(both.region))
        await asyncio.sleep(0.0015)
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
        assert both.rooms == 0, "nobody knows its number"
        await near.make_room(both.region)
        await near.close()
        await asyncio.sleep(0.005)
        assert both.rooms == 0, "the channel has ended"
