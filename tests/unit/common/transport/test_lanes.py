"""Lanes of a tcp channel: they reach what it has opened, end with it, and harm nobody but
themselves when they break or stall."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected, Unavailable
from slackwater.common.transport import wire
from slackwater.common.transport.base import Channel, Lane, Laned
from slackwater.common.transport.region import Region
from slackwater.common.transport.shm import ShmFabric
from slackwater.common.transport.tcp import TcpFabric
from slackwater.common.transport.tcp_channel import TcpChannel, TcpTuning

NBYTES = 64 * 1024
QUICK = TcpTuning(greet_s=0.4, resume_s=0.6, resume_eof_s=0.2, stall_s=0.4)


class Pair:
    near: TcpChannel
    far: Channel
    region: Region
    key: bytes
    handle: int


@asynccontextmanager
async def pair(tuning: TcpTuning | None = None) -> AsyncIterator[Pair]:
    """A channel whose far end has granted a region."""
    made = Pair()
    channels: asyncio.Queue[Channel] = asyncio.Queue()

    async def keep(channel: Channel) -> None:
        channels.put_nowait(channel)

    async def refuse(region: Region, note: bytes) -> None:
        raise Rejected("none is wanted")

    fabric = TcpFabric(tuning)
    listener = await fabric.listen("127.0.0.1:0", lambda _hello: None, keep, refuse)
    near = await fabric.connect(listener.address, b"hi", deadline_s=5)
    assert isinstance(near, TcpChannel)
    made.near, made.far = near, await channels.get()
    made.region = Region.create(NBYTES, "lent")
    made.region.buffer[:] = bytes(range(256)) * (NBYTES // 256)
    made.key = made.far.grant(made.region)
    opened = await near.open(made.key)
    made.handle = near.lane_handle(opened)
    try:
        yield made
    finally:
        await near.close()
        await listener.close()
        made.region.close()


async def say(lane: Lane, data: bytes) -> None:
    sock = socket.socket(fileno=lane.fileno())
    try:
        await asyncio.get_running_loop().sock_sendall(sock, data)
    finally:
        sock.detach()


async def hear(lane: Lane, count: int) -> bytes:
    """Fewer bytes than `count`: it has ended."""
    sock = socket.socket(fileno=lane.fileno())
    data = b""
    try:
        async with asyncio.timeout(5):
            while len(data) < count:
                part = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
                if not part:
                    break
                data += part
    except ConnectionError:
        return data
    finally:
        sock.detach()
    return data


async def record(lane: Lane) -> tuple[wire.Header, bytes]:
    header = wire.Header._make(wire.HEADER.unpack(await hear(lane, wire.HEADER_BYTES)))
    return header, await hear(lane, header.length)


def read(handle: int, number: int, offset: int, count: int) -> bytes:
    return wire.pack(
        wire.READ, handle=handle, number=number, offset=offset, body=wire.WORD.pack(count)
    )


async def test_a_lane_reads_and_writes_what_the_channel_has_opened() -> None:
    async with pair() as p:
        lane = await p.near.lane()
        await say(lane, read(p.handle, 1, 256, 512) + read(p.handle, 2, 0, 40_000))
        header, body = await record(lane)
        assert (header.kind, header.number, body) == (wire.DATA, 1, bytes(range(256)) * 2)
        header, body = await record(lane)
        assert (header.number, body) == (2, bytes(p.region.buffer[:40_000]))
        await say(lane, wire.pack(wire.WRITE, handle=p.handle, number=3, offset=8, body=b"new"))
        header, _ = await record(lane)
        assert (header.kind, header.number) == (wire.ACK, 3)
        assert p.region.buffer[8:11] == b"new"
        lane.close()


async def test_writes_on_lanes_are_numbered_apart() -> None:
    """A write whose number was used on the channel, or on another lane, is none that was sent
    again: it is applied."""
    async with pair() as p:
        opened = await p.near.open(p.key)
        await p.near.write(memoryview(b"a"), opened, 0)
        for data in (b"b", b"c"):
            lane = await p.near.lane()
            for number in (1, 2):
                frame = wire.pack(wire.WRITE, handle=p.handle, number=number, offset=number)
                frame = frame[: wire.HEADER_BYTES - 8] + wire.WORD.pack(1) + data
                await say(lane, frame)
                await record(lane)
            assert p.region.buffer[:3] == b"a" + data + data
            lane.close()


async def test_a_channel_that_ends_ends_its_lanes() -> None:
    for which in ("near", "far", "lost"):
        async with pair() as p:
            lanes = [await p.near.lane() for _ in range(3)]
            await say(lanes[0], read(p.handle, 1, 0, 8))
            await record(lanes[0])
            if which == "lost":
                p.near.lose("a test")
            else:
                await getattr(p, which).close()
            assert [await hear(lane, 1) for lane in lanes] == [b"", b"", b""]
            for lane in lanes:
                lane.close()
                lane.close()
            with pytest.raises(Unavailable):
                await p.near.lane()


async def test_lanes_are_bounded_and_their_places_are_given_again() -> None:
    async with pair() as p:
        lanes = [await p.near.lane() for _ in range(limits.LANES_MAX)]
        with pytest.raises(Unavailable, match="lanes are open"):
            await p.near.lane()
        lanes.pop().close()
        lanes.append(await p.near.lane())
        await say(lanes[-1], read(p.handle, 1, 0, 8))
        assert (await record(lanes[-1]))[1] == bytes(range(8))
        for lane in lanes:
            lane.close()


async def test_a_lane_that_breaks_or_stalls_ends_alone() -> None:
    async with pair(QUICK) as p:
        broken, stalled, well = [await p.near.lane() for _ in range(3)]
        await say(broken, read(p.handle, 1, 0, 8))
        await record(broken)
        broken.close()
        await say(stalled, read(p.handle, 1, 0, 8)[:-1])
        assert await hear(stalled, 1) == b""
        await say(well, read(p.handle, 1, 0, 8))
        assert (await record(well))[1] == bytes(range(8))
        assert not p.near.closed
        assert not p.far.closed
        stalled.close()
        well.close()


async def test_a_region_that_is_taken_back_is_refused_on_lanes() -> None:
    async with pair() as p:
        lane = await p.near.lane()
        await say(lane, read(p.handle, 1, 0, 8))
        await record(lane)
        p.far.revoke(p.key)
        await say(lane, read(p.handle, 2, 0, 8))
        header, why = await record(lane)
        assert (header.kind, header.number) == (wire.REFUSED, 2)
        assert b"revoked" in why
        lane.close()


@pytest.mark.parametrize(
    "bad",
    [
        wire.pack(wire.FRAME, body=b"x"),
        wire.pack(wire.READ, handle=1, number=1, body=b"short"),
        read(1, 1, 0, limits.CHUNK_BYTES + 1),
        wire.HEADER.pack(wire.WRITE, 1, 1, 0, limits.CHUNK_BYTES + 1),
        bytes(wire.HEADER_BYTES),
    ],
    ids=["frame", "short-read", "long-read", "long-write", "zeros"],
)
async def test_a_bad_record_on_a_lane_ends_the_channel(bad: bytes) -> None:
    async with pair() as p:
        lane = await p.near.lane()
        await say(lane, bad)
        assert await hear(lane, 1) == b""
        with pytest.raises(Unavailable):
            await p.far.receive()
        lane.close()


@pytest.mark.parametrize("beyond", [limits.LANES_MAX, 2**32 - 2 - limits.STREAMS])
async def test_a_lane_beyond_the_last_is_turned_away(beyond: int) -> None:
    async with pair() as p:
        assert p.near._redial is not None
        with pytest.raises(Unavailable):
            await p.near._redial(p.near.streams + 1 + beyond, 0)
        assert not p.far.closed


async def test_who_was_connected_to_asks_for_no_lane_and_shm_has_none() -> None:
    async with pair() as p:
        assert isinstance(p.far, Laned)
        with pytest.raises(Rejected, match="connected to"):
            await p.far.lane()
    assert not isinstance(ShmFabric, Laned)
