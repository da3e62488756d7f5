"""Many pieces of a region as one operation, where a channel offers it."""

import random

import pytest

from slackwater.common.base.errors import AccessRefused, Rejected
from slackwater.common.transport.base import Channel, RemoteRegion, Scattering
from slackwater.common.transport.region import Region
from slackwater.common.transport.tcp import TcpFabric

PIECE = 512
PIECES = 400


@pytest.fixture
async def opened():  # type: ignore[no-untyped-def]
    """(channel, remote region, the region itself), over tcp."""
    region = Region.create(PIECE * PIECES, "pieces")
    keys: list[bytes] = []

    async def serve(channel: Channel) -> None:
        keys.append(channel.grant(region))
        channel.send(keys[-1])

    async def none(region: Region, note: bytes) -> None:
        region.close()

    fabric = TcpFabric()
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
