"""The NIC's refusals, whatever the peer's program says of itself; each refusal costs the peer its
channel and nobody else anything."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest

from slackwater.common.base import limits
from slackwater.common.base.errors import AccessRefused, Unavailable
from slackwater.common.transport import wire
from slackwater.common.transport.region import Region
from slackwater.common.transport.tcp import split_address
from slackwater.common.transport.verbs import library as ibv
from slackwater.common.transport.verbs.queue_pair import Work

pytestmark = [pytest.mark.vm, pytest.mark.timeout(180)]
Make = Callable[..., Any]
PAGE = 4096


def region_of(label: str, byte: bytes, pages: int = 1) -> Region:
    region = Region.create(pages * PAGE, label)
    region.buffer[:] = byte * region.nbytes
    return region


async def lost(channel: Any) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(Unavailable):
            await channel.receive()
    assert channel.closed


async def still_serves(near: Any, remote: Any) -> None:
    byte = memoryview(bytearray(1))
    await near.write(memoryview(b"\x07"), remote, 0)
    await near.read(remote, 0, byte)
    assert bytes(byte) == b"\x07"


@pytest.mark.parametrize("operation", ["write", "read"])
@pytest.mark.parametrize("lie", ["wrong key", "beyond the end", "another channel's key"])
async def test_a_lying_client_is_refused_by_the_nic(party: Make, lie: str, operation: str) -> None:
    """It skips the checks on its own side. The error says which region, offset and length."""
    async with party() as listener:
        near, far = await listener.connect()
        honest_near, honest_far = await listener.connect()
        region, secret = region_of("job-1/bucket-2", b"\x11"), region_of("secret", b"\x22")
        remote = await near.open(far.grant(region))
        other = await honest_near.open(honest_far.grant(secret))
        offset = 0
        if lie == "wrong key":
            remote.rkey ^= 0x5A00
        elif lie == "beyond the end":
            remote.nbytes += PAGE
            offset = PAGE - 8
        else:
            remote.rkey, remote.address = other.rkey, other.address
        buffer = memoryview(bytearray(b"\x33" * 16))
        where = rf"bytes \[{offset}, {offset + 16}\) of the peer's region job-1/bucket-2"
        lying = {
            "write": lambda: near.write(buffer, remote, offset),
            "read": lambda: near.read(remote, offset, buffer),
        }[operation]
        with pytest.raises(AccessRefused, match=where):
            await lying()
        assert bytes(buffer) == b"\x33" * 16
        assert bytes(region.buffer) == b"\x11" * PAGE
        assert bytes(secret.buffer) == b"\x22" * PAGE
        await lost(near)
        await lost(far)
        await still_serves(honest_near, other)
        for each in (region, secret):
            each.close()


async def test_a_revoked_key_is_worthless_to_a_client_that_ignores_it(party: Make) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        region = region_of("bucket", b"\x11")
        key = far.grant(region)
        remote = await near.open(key)
        far.revoke(key)
        with pytest.raises(AccessRefused, match="refused the access"):
            await near._mover.run(ibv.WRITE, remote, 0, memoryview(b"late"))
        assert bytes(region.buffer[:4]) == b"\x11" * 4
        region.close()


async def test_a_closed_region_is_out_of_reach_although_its_pages_were_pinned(party: Make) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        region = region_of("bucket", b"\x11")
        remote = await near.open(far.grant(region))
        kept = Region.adopt(os.dup(region.fileno()), "the same memory")
        region.close()
        with pytest.raises(AccessRefused, match="refused the access"):
            await near.write(memoryview(b"late"), remote, 0)
        assert bytes(kept.buffer[:4]) == b"\x11" * 4
        kept.close()


async def test_a_registered_buffer_moves_without_a_copy(party: Make) -> None:
    """From one region into the other and back: nothing passes through staging memory."""
    async with party() as listener:
        near, far = await listener.connect()
        source, target = region_of("mine", b"\x44", 600), region_of("yours", b"\x00", 600)
        remote = await near.open(far.grant(target))
        await near.write(source.buffer, remote, 0)
        assert target.buffer == source.buffer
        source.buffer[:] = bytes(source.nbytes)
        await near.read(remote, 5, source.buffer[7:100_007])
        assert bytes(source.buffer[7:100_007]) == b"\x44" * 100_000
        assert not any(source.buffer[100_007:])
        assert near._domain._staging is None
        await near.close()
        source.close()
        target.close()


async def test_a_cancelled_read_into_a_registered_buffer_ends_before_it_returns(
    party: Make,
) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        region, mine = region_of("yours", b"\x44", 1024), region_of("mine", b"\x00", 1024)
        remote = await near.open(far.grant(region))
        reading = asyncio.create_task(near.read(remote, 0, mine.buffer))
        await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        mine.buffer[:] = bytes(mine.nbytes)
        one = memoryview(bytearray(1))
        for _ in range(20):
            await near.read(remote, 0, one)
        assert not any(mine.buffer)
        await near.close()
        region.close()
        mine.close()


@pytest.mark.parametrize(
    "word",
    [
        0,
        limits.VERBS_RING_BYTES + 1,
        0x7FFFFFFF,
        0x80000000 | 1 << 20 | 1,
        0xFFFFFFFF,
    ],
)
async def test_a_peer_that_breaks_the_rings_rules_is_let_go(party: Make, word: int) -> None:
    """Lengths of nothing and of more than there is, credit for what never came."""
    async with party() as listener:
        near, far = await listener.connect()
        honest_near, honest_far = await listener.connect()
        nothing = near._control.landing
        request = near.pair.rdma(
            ibv.WRITE_WITH_IMMEDIATE,
            (nothing.address, 0, nothing.lkey),
            near._control._peer,
            immediate=word,
        )
        near.pair.submit(Work(request))
        with pytest.raises(Unavailable, match="violates the protocol"):
            async with asyncio.timeout(10):
                await far.receive()
        await lost(near)
        honest_near.send(b"still here")
        assert await honest_far.receive() == b"still here"


def hostile_introductions() -> list[bytes]:
    hello = wire.pack(wire.HELLO, handle=wire.VERSION, body=b"hi")
    joins = [wire.pack(wire.JOIN, body=bytes(n)) for n in (0, 1, 47, 48, 49, 63, 64, 65, 5000)]
    return [
        b"GET / HTTP/1.1\r\n\r\n",
        wire.HEADER.pack(wire.HELLO, wire.VERSION, 0, 0, 2**63),
        *(hello + join for join in joins),
        hello + wire.HEADER.pack(wire.JOIN, 0, 0, 0, 2**31),
        hello + wire.pack(wire.FRAME, body=b"early"),
        hello + hello,
    ]


async def test_a_hostile_introduction_closes_its_own_connection_only(party: Make) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        loop = asyncio.get_running_loop()
        for bytes_said in hostile_introductions():
            with socket.create_connection(split_address(listener.listener.address)) as sock:
                sock.setblocking(False)
                await loop.sock_sendall(sock, bytes_said)
                async with asyncio.timeout(10):
                    with contextlib.suppress(ConnectionResetError):
                        while await loop.sock_recv(sock, PAGE):
                            pass
        near.send(b"still here")
        assert await far.receive() == b"still here"
        assert listener.channels.empty()
        await near.close()


CLIENT = """
import asyncio, sys
from slackwater.common.transport.region import Region
from slackwater.common.transport.verbs.fabric import VerbsFabric

async def main():
    channel = await VerbsFabric().connect(sys.argv[1], b"child", deadline_s=30)
    mine = Region.create(1 << 20, "mine")
    channel.send(channel.grant(mine))
    remote = await channel.open(await channel.receive())
    print("ready", flush=True)
    while True:
        await channel.write(mine.buffer, remote, 0)

asyncio.run(main())
"""


@pytest.mark.parametrize("case", ["verbs"], indirect=True)
async def test_a_killed_peer_ends_everything_that_waits_for_it(party: Make) -> None:
    """kill -9 while it writes to us and we write to it: Unavailable, soon, and nobody else's."""
    async with party() as listener:
        honest_near, honest_far = await listener.connect()
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, listener.listener.address, stdout=asyncio.subprocess.PIPE
        )
        try:
            far = await asyncio.wait_for(listener.channels.get(), 60)
            region = region_of("ours", b"\x00", 256)
            remote = await far.open(await far.receive())
            far.send(far.grant(region))
            assert child.stdout is not None
            assert await asyncio.wait_for(child.stdout.readline(), 60) == b"ready\n"
            buffer = memoryview(bytearray(1 << 20))

            async def write_on() -> None:
                while True:
                    await far.write(buffer, remote, 0)

            writing = asyncio.create_task(write_on())
            await asyncio.sleep(0.3)
            assert not writing.done()
            child.send_signal(signal.SIGKILL)
            with pytest.raises(Unavailable):
                async with asyncio.timeout(10):
                    await writing
            await lost(far)
            honest_near.send(b"still here")
            assert await honest_far.receive() == b"still here"
            region.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
            child._transport.close()  # type: ignore[attr-defined]  # Else it warns when collected.


@pytest.mark.parametrize("case", ["verbs"], indirect=True)
async def test_a_prepared_region_is_registered_before_a_peer_opens_it(party: Make) -> None:
    """The work that takes 0.1 s per GB has happened when a slab is mapped, and ends with the
    region."""
    async with party() as listener:
        near, far = await listener.connect()
        region = region_of("slab", b"\x11")
        listener.listener.prepare(region)
        known = far._domain._regions[region]
        remote = await near.open(far.grant(region))
        await still_serves(near, remote)
        assert far._domain._regions[region] is known
        region.close()
        assert region not in far._domain._regions
