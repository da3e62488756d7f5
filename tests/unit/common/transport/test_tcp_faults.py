"""tcp when connections break, stall or lie: what was begun is completed, or ends with Unavailable.

A proxy between the two ends resets, holds back or refuses connections. The first connection of a
channel through it is its control stream, then come the data streams.
"""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from tests.waiting import soon

from slackwater.common.base import limits
from slackwater.common.base.errors import AccessRefused, Rejected, SlackwaterError, Unavailable
from slackwater.common.transport import wire
from slackwater.common.transport.base import Channel, Reserving
from slackwater.common.transport.region import Region
from slackwater.common.transport.tcp import TcpFabric
from slackwater.common.transport.tcp_channel import TcpTuning

FAST = TcpTuning(greet_s=0.4, resume_s=0.6, resume_eof_s=0.2, stall_s=0.8)
PATIENT = TcpTuning(
    part_bytes=64 * 1024, credit_bytes=1024 * 1024, resume_s=20.0, resume_eof_s=20.0
)
"""Deadlines by which a break is mended: on a busy machine later than those of production."""

LINKS = 2 + limits.STREAMS
"""Connections of a channel: control, data streams of the connecting side, one of the accepting."""


class Proxy:
    """Forwards connections to a port; `links` are those that are up, oldest first."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.links: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self.accepted = 0
        self.refuse = False
        self.flow = asyncio.Event()
        self.flow.set()
        self.answers = asyncio.Event()
        """While set, data from the port's owner comes through."""
        self.answers.set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> "Proxy":
        self._server = await asyncio.start_server(self._link, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        self.accepted += 1
        if self.refuse:
            reset(writer)
            return
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        link = (writer, up_writer)
        self.links.append(link)
        pumps = [
            asyncio.create_task(self._pump(reader, up_writer, self.flow)),
            asyncio.create_task(self._pump(up_reader, writer, self.answers)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for end in link:
                end.close()
            if link in self.links:
                self.links.remove(link)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flow: asyncio.Event
    ) -> None:
        try:
            while data := await reader.read(65536):
                await flow.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            return

    def reset(self, index: int) -> None:
        for end in self.links.pop(index):
            reset(end)

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.01)


def reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Both:
    """A listener, the proxy before it, and one channel through it."""

    listener: Any
    proxy: Proxy
    near: Channel
    far: Channel
    taken: list[Region]


@asynccontextmanager
async def through_a_proxy(tuning: TcpTuning = FAST) -> AsyncIterator[Both]:
    both = Both()
    both.taken = []
    arrived: asyncio.Queue[Channel] = asyncio.Queue()

    async def take(region: Region, _note: bytes) -> None:
        both.taken.append(region)

    async def keep(channel: Channel) -> None:
        arrived.put_nowait(channel)

    fabric = TcpFabric(tuning)
    both.listener = await fabric.listen("127.0.0.1:0", lambda _hello: None, keep, take)
    both.proxy = await Proxy(int(both.listener.address.rpartition(":")[2])).start()
    both.near = await fabric.connect(both.proxy.address, b"", deadline_s=5)
    both.far = await arrived.get()
    try:
        yield both
    finally:
        await both.near.close()
        await both.listener.close()
        await both.proxy.close()
        for region in both.taken:
            region.close()


@pytest.mark.parametrize("which", [[1], [2], [1, 2], [0], [0, 1, 2, 3]])
async def test_transfers_complete_though_streams_are_reset(which: list[int]) -> None:
    """Streams break again and again while 24 MiB are written and read back."""
    async with through_a_proxy(PATIENT) as both:
        region = Region.create(6 * 1024 * 1024, "r")
        remote = await both.near.open(both.far.grant(region))
        data = memoryview(np.random.default_rng(1).integers(0, 256, region.nbytes, np.uint8))
        back = memoryview(bytearray(region.nbytes))

        async def work() -> None:
            for turn in range(4):
                region.buffer[:] = bytes(region.nbytes)
                await both.near.write(data, remote, 0)
                assert region.buffer == data, turn
                await both.near.read(remote, 0, back)
                assert back == data

        working = asyncio.create_task(work())
        breaks = 0
        while not working.done() and breaks < 8:
            await asyncio.sleep(0.02)
            if len(both.proxy.links) == LINKS:
                for index in sorted(which, reverse=True):
                    both.proxy.reset(index)
                breaks += 1
        await asyncio.wait_for(working, 30)
        assert breaks > 0
        assert not both.near.closed
        region.close()


@pytest.mark.parametrize("which", [[0], [0, 1, 2, 3]])
async def test_frames_come_once_and_in_order_though_the_control_stream_is_reset(
    which: list[int],
) -> None:
    async with through_a_proxy(PATIENT) as both:
        count = 3000

        async def send(channel: Channel) -> None:
            for number in range(count):
                while True:
                    try:
                        channel.send(number.to_bytes(4, "big") * 50)
                        break
                    except Unavailable:
                        assert not channel.closed
                        await asyncio.sleep(0.01)
                if number % 100 == 0:
                    await asyncio.sleep(0.005)

        async def receive(channel: Channel) -> list[int]:
            return [int.from_bytes((await channel.receive())[:4], "big") for _ in range(count)]

        async def break_now_and_then() -> None:
            for _ in range(6):
                await asyncio.sleep(0.03)
                await soon(lambda: len(both.proxy.links) == LINKS, within_s=20.0)
                for index in sorted(which, reverse=True):
                    both.proxy.reset(index)

        *_, there, back, _ = await asyncio.wait_for(
            asyncio.gather(
                send(both.near),
                send(both.far),
                receive(both.far),
                receive(both.near),
                break_now_and_then(),
            ),
            30,
        )
        assert there == list(range(count))
        assert back == list(range(count))


async def test_requests_and_handovers_survive_a_reset() -> None:
    async with through_a_proxy(PATIENT) as both:
        region = Region.create(5 * 1024 * 1024, "moved")
        region.buffer[:] = b"\x5a" * region.nbytes
        giving = asyncio.create_task(both.near.handover(region, b"note"))
        for _ in range(3):
            await asyncio.sleep(0.01)
            for index in reversed(range(len(both.proxy.links))):
                both.proxy.reset(index)
        await asyncio.wait_for(giving, 20)
        assert bytes(both.taken[0].buffer) == bytes(region.buffer)
        assert len(both.taken) == 1
        region.close()


async def test_an_answered_write_is_never_applied_twice() -> None:
    """The acknowledgement is lost with its stream; the owner changes the bytes meanwhile; the write
    that is sent again must not undo that."""
    async with through_a_proxy(PATIENT) as both:
        region = Region.create(4096, "r")
        remote = await both.near.open(both.far.grant(region))
        both.proxy.answers.clear()
        writing = asyncio.create_task(both.near.write(memoryview(b"new"), remote, 0))
        await soon(lambda: bytes(region.buffer[:3]) == b"new")
        region.buffer[:3] = b"own"
        both.proxy.reset(1)
        both.proxy.answers.set()
        await asyncio.wait_for(writing, 10)
        assert bytes(region.buffer[:3]) == b"own"
        region.close()


async def test_a_peer_that_does_not_come_back_is_unavailable_on_both_sides() -> None:
    async with through_a_proxy() as both:
        region = Region.create(4 * 1024 * 1024, "r")
        remote = await both.near.open(both.far.grant(region))
        waiting = [
            asyncio.create_task(both.near.receive()),
            asyncio.create_task(both.far.receive()),
        ]
        both.proxy.flow.clear()
        waiting += [
            asyncio.create_task(both.near.write(memoryview(bytearray(region.nbytes)), remote, 0)),
            asyncio.create_task(both.near.read(remote, 0, memoryview(bytearray(100)))),
            asyncio.create_task(both.near.handover(region, b"")),
            asyncio.create_task(both.near.open(b"key")),
        ]
        await asyncio.sleep(0.05)
        both.proxy.refuse = True
        for index in reversed(range(LINKS)):
            both.proxy.reset(index)
        outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes), outcomes
        assert both.near.closed
        assert both.far.closed
        assert both.proxy.accepted > 2 * LINKS  # It was tried.
        region.close()


async def test_a_peer_that_stalls_in_the_middle_is_unavailable() -> None:
    """Nothing breaks, nothing moves: the watch ends the channel."""
    async with through_a_proxy() as both:
        region = Region.create(8 * 1024 * 1024, "r")
        remote = await both.near.open(both.far.grant(region))
        both.proxy.flow.clear()
        with pytest.raises(Unavailable, match="no progress"):
            await asyncio.wait_for(
                both.near.write(memoryview(bytearray(region.nbytes)), remote, 0), 10
            )
        both.proxy.flow.set()
        region.close()


async def test_an_idle_channel_is_not_stalled() -> None:
    async with through_a_proxy() as both:
        await asyncio.sleep(FAST.stall_s * 1.6)
        both.near.send(b"still here")
        assert await both.far.receive() == b"still here"


async def test_revocation_ends_a_write_that_is_under_way() -> None:
    async with through_a_proxy(PATIENT) as both:
        region = Region.create(6 * 1024 * 1024, "r")
        key = both.far.grant(region)
        remote = await both.near.open(key)
        data = memoryview(bytearray(b"\x01" * region.nbytes))
        writing = asyncio.create_task(both.near.write(data, remote, 0))
        await soon(lambda: region.buffer[0] == 1)
        both.far.revoke(key)
        with pytest.raises(AccessRefused):
            await asyncio.wait_for(writing, 10)
        assert region.buffer[-1] == 0
        assert not both.near.closed
        region.close()


async def test_a_region_that_its_owner_closes_is_refused_without_harm() -> None:
    async with through_a_proxy(PATIENT) as both:
        region = Region.create(4096, "r")
        remote = await both.near.open(both.far.grant(region))
        region.close()
        with pytest.raises(AccessRefused, match="gone"):
            await both.near.write(memoryview(b"x"), remote, 0)
        with pytest.raises(AccessRefused, match="gone"):
            await both.near.read(remote, 0, memoryview(bytearray(1)))
        both.near.send(b"the channel lives")
        assert await both.far.receive() == b"the channel lives"


async def test_a_handover_that_is_cancelled_leaves_no_room_taken() -> None:
    async with through_a_proxy(PATIENT) as both:
        region = Region.create(8 * 1024 * 1024, "r")
        for _ in range(limits.HANDOVERS_MAX + 2):
            both.proxy.flow.clear()
            giving = asyncio.create_task(both.near.handover(region, b""))
            both.proxy.flow.set()
            await soon(lambda: bool(both.far._rooms) or bool(both.taken))  # type: ignore[attr-defined]
            giving.cancel()
            await asyncio.gather(giving, return_exceptions=True)
            await soon(lambda: not both.far._rooms)  # type: ignore[attr-defined]
        with pytest.raises(Rejected, match="huge"):
            await both.near._ask(wire.PREPARE, number=2**62, body=b"huge")  # type: ignore[attr-defined]
        region.close()


async def test_room_that_comes_for_a_giver_who_is_gone_is_given_back() -> None:
    """The giver is cancelled while the peer's answer is on its way."""
    async with through_a_proxy(PATIENT) as both:
        region = Region.create(4096, "r")
        both.proxy.answers.clear()
        giving = asyncio.create_task(both.near.handover(region, b""))
        await soon(lambda: bool(both.far._rooms))  # type: ignore[attr-defined]
        giving.cancel()
        await asyncio.gather(giving, return_exceptions=True)
        both.proxy.answers.set()
        await soon(lambda: not both.far._rooms)  # type: ignore[attr-defined]
        assert not both.near.closed
        region.close()


async def test_room_that_was_made_before_is_used_once_or_given_back() -> None:
    """Its pages are there before anything is sent; what goes into it is what a handover sends."""
    async with through_a_proxy(PATIENT) as both:
        near, far = both.near, both.far
        assert isinstance(near, Reserving)
        region = Region.create(5 * 1024 * 1024, "r")
        region.buffer[:3] = b"abc"
        first, second = await near.make_room(region), await near.make_room(region)
        assert len(far._rooms) == 2  # type: ignore[attr-defined]
        near.give_back(second)
        await near.hand_over_into(first, region, b"note", None, ((0, 2),))
        (taken,) = both.taken
        assert (bytes(taken.buffer[:3]), taken.nbytes) == (b"ab\0", region.nbytes)
        assert os.fstat(taken.fileno()).st_blocks * 512 >= region.nbytes
        assert not far._rooms  # type: ignore[attr-defined]
        region.close()


# Hostile peers ------------------------------------------------------------------------------------


class Raw:
    """A peer that speaks bytes."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> "Raw":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        await asyncio.gather(self.writer.wait_closed(), return_exceptions=True)

    async def record(self) -> tuple[wire.Header, bytes]:
        raw = await self.reader.readexactly(wire.HEADER_BYTES)
        header = wire.Header._make(wire.HEADER.unpack(raw))
        return header, await self.reader.readexactly(header.length)

    async def ended(self, limit_s: float = 5.0) -> bool:
        """True when the other side closes, TimeoutError when it does not within the limit."""
        try:
            async with asyncio.timeout(limit_s):
                while await self.reader.read(65536):
                    continue
        except ConnectionError:
            return True
        return True


def port_of(both: Both) -> int:
    return int(both.listener.address.rpartition(":")[2])


HELLO = wire.pack(wire.HELLO, handle=wire.VERSION, offset=1, body=b"hi")


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: slackwater\r\n\r\n" * 4,
        bytes(200),
        b"\xff" * 200,
        wire.HEADER.pack(wire.HELLO, wire.VERSION, 0, 0, limits.FRAME_BYTES_MAX + 1),
        wire.HEADER.pack(wire.HELLO, wire.VERSION, 0, 0, 2**64 - 1),
        wire.pack(wire.WRITE, handle=1, number=1, body=b"data before a hello"),
        HELLO[:10],
        HELLO[:-1],
        b"",
    ],
    ids=["http", "zeros", "ones", "long", "huge", "write", "header", "body", "silence"],
)
async def test_a_greeting_that_is_none_is_closed_and_others_live(first: bytes) -> None:
    async with through_a_proxy() as both, Raw(port_of(both)) as raw:
        raw.writer.write(first)
        assert await raw.ended()
        both.near.send(b"unharmed")
        assert await both.far.receive() == b"unharmed"


async def test_one_byte_at_a_time_is_closed_by_the_deadline() -> None:
    async with through_a_proxy() as both, Raw(port_of(both)) as raw:

        async def dribble() -> None:
            for byte in HELLO:
                raw.writer.write(bytes([byte]))
                await asyncio.sleep(FAST.greet_s / 10)

        dribbling = asyncio.create_task(dribble())
        assert await raw.ended()
        dribbling.cancel()
        await asyncio.gather(dribbling, return_exceptions=True)
        both.near.send(b"unharmed")
        assert await both.far.receive() == b"unharmed"


async def test_another_version_is_told_so() -> None:
    async with through_a_proxy() as both, Raw(port_of(both)) as raw:
        raw.writer.write(wire.pack(wire.HELLO, handle=99, body=b"hi"))
        header, body = await raw.record()
        assert header.kind == wire.REFUSED
        assert b"version 99" in body


@pytest.mark.parametrize("kind", [wire.JOIN, wire.RESUME])
async def test_an_unknown_session_is_refused(kind: int) -> None:
    async with through_a_proxy() as both, Raw(port_of(both)) as raw:
        raw.writer.write(wire.pack(kind, body=bytes(32)))
        header, body = await raw.record()
        assert isinstance(wire.refusal(header, body), AccessRefused)


async def test_a_hello_without_its_data_streams_is_given_up() -> None:
    async with through_a_proxy() as both, Raw(port_of(both)) as raw:
        raw.writer.write(HELLO)
        header, _ = await raw.record()
        assert header.kind == wire.WELCOME
        assert await raw.ended()


BAD_CONTROL = {
    "unknown kind": wire.pack(77),
    "a hello again": HELLO,
    "data on control": wire.pack(wire.WRITE, handle=1, number=1, body=b"x"),
    "huge frame": wire.HEADER.pack(wire.FRAME, 0, 0, 0, 2**40),
    "progress too far": wire.pack(wire.PROGRESS, number=5, offset=5, body=bytes(8)),
    "ordinals too far": wire.pack(wire.PROGRESS, body=wire.WORD.pack(9)),
    "short progress": wire.pack(wire.PROGRESS, body=b"123"),
    "label beyond body": wire.pack(wire.HANDOVER, handle=30, number=3, body=b"short"),
}
BAD_DATA = {
    "unknown kind": wire.pack(77),
    "frame on data": wire.pack(wire.FRAME, body=b"x"),
    "unasked data": wire.pack(wire.DATA, number=1, body=b"x" * 10),
    "empty data": wire.pack(wire.DATA, number=1),
    "unasked ack": wire.pack(wire.ACK, number=1),
    "unasked refusal": wire.pack(wire.REFUSED, handle=1, number=1, body=b"no"),
    "huge write": wire.HEADER.pack(wire.WRITE, 1, 1, 0, 2**40),
    "huge read": wire.pack(wire.READ, handle=1, number=1, body=wire.WORD.pack(2**40)),
    "read of nothing": wire.pack(wire.READ, handle=1, number=1, body=wire.WORD.pack(0)),
    "short read": wire.pack(wire.READ, handle=1, number=1, body=b"12"),
    "long reason": wire.pack(wire.REFUSED, handle=1, number=1, body=bytes(5000)),
}


@asynccontextmanager
async def joined(both: Both) -> AsyncIterator[tuple[Raw, Raw]]:
    """A hostile peer with its control and its data stream, past the greeting."""
    port = port_of(both)
    async with Raw(port) as control, Raw(port) as data, Raw(port) as ours:
        control.writer.write(HELLO)
        _, session = await control.record()
        for handle, stream in enumerate((data, ours)):
            stream.writer.write(wire.pack(wire.JOIN, handle=handle, body=session))
            header, _ = await stream.record()
            assert header.kind == wire.WELCOME
        yield control, data


@pytest.mark.parametrize("what", BAD_CONTROL)
async def test_a_bad_control_record_ends_that_channel_only(what: str) -> None:
    async with through_a_proxy(PATIENT) as both, joined(both) as (control, data):
        control.writer.write(BAD_CONTROL[what])
        assert await control.ended()
        assert await data.ended()
        both.near.send(b"unharmed")
        assert await both.far.receive() == b"unharmed"


@pytest.mark.parametrize("what", BAD_DATA)
async def test_a_bad_data_record_ends_that_channel_only(what: str) -> None:
    async with through_a_proxy(PATIENT) as both, joined(both) as (control, data):
        data.writer.write(BAD_DATA[what])
        assert await data.ended()
        assert await control.ended()
        both.near.send(b"unharmed")
        assert await both.far.receive() == b"unharmed"


@pytest.mark.parametrize("handle", [0, 1, 2**32 - 1])
async def test_a_guessed_handle_is_refused(handle: int) -> None:
    """The region is granted on this very channel, but its key was never shown."""
    async with through_a_proxy() as both:
        hidden = Region.create(4096, "hidden")
        both.far.grant(hidden)
        async with joined(both) as (_, data):
            data.writer.write(wire.pack(wire.WRITE, handle=handle, number=1, body=b"x" * 64))
            header, body = await data.record()
            assert isinstance(wire.refusal(header, body), AccessRefused)
            data.writer.write(
                wire.pack(wire.READ, handle=handle, number=2, body=wire.WORD.pack(64))
            )
            header, body = await data.record()
            assert isinstance(wire.refusal(header, body), AccessRefused)
        assert bytes(hidden.buffer) == bytes(4096)
        hidden.close()


async def test_the_owner_checks_the_range_itself() -> None:
    """A caller's own check can be left out by a hostile one."""
    async with through_a_proxy() as both:
        region = Region.create(4096, "r")
        remote = await both.near.open(both.far.grant(region))
        remote.nbytes = 2**40  # type: ignore[misc]
        for offset in (4096, 4095, 2**39):
            with pytest.raises(AccessRefused, match="4096"):
                await both.near.write(memoryview(b"xx"), remote, offset)
            with pytest.raises(AccessRefused, match="4096"):
                await both.near.read(remote, offset, memoryview(bytearray(2)))
        assert bytes(region.buffer) == bytes(4096)
        region.close()


async def test_a_record_that_never_ends_is_given_up() -> None:
    """A byte now and then on a data stream does not count as progress."""
    async with through_a_proxy() as both, joined(both) as (control, data):
        data.writer.write(wire.HEADER.pack(wire.WRITE, 1, 1, 0, 100_000))

        async def dribble() -> None:
            while True:
                data.writer.write(b"x")
                await asyncio.sleep(0.05)

        dribbling = asyncio.create_task(dribble())
        assert await control.ended()
        dribbling.cancel()
        await asyncio.gather(dribbling, return_exceptions=True)


async def test_who_asks_and_never_reads_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OUTBOX_ENTRIES_MAX", 200)
    async with through_a_proxy() as both, joined(both) as (control, _):
        control.reader._transport.pause_reading()  # type: ignore[attr-defined]
        flood = b"".join(wire.pack(wire.OPEN, offset=n, body=bytes(900)) for n in range(64))

        async def ask() -> None:
            while True:
                control.writer.write(flood)
                await control.writer.drain()

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(ask(), 10)
        both.near.send(b"unharmed")
        assert await both.far.receive() == b"unharmed"


async def test_a_frame_flood_beyond_the_credit_ends_the_channel() -> None:
    async with through_a_proxy() as both, joined(both) as (control, _):
        flood = wire.pack(wire.FRAME, body=b"x") * (limits.SEND_QUEUE_FRAMES * 2)
        control.writer.write(flood)
        assert await control.ended()
        assert not both.near.closed


async def test_greetings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GREETINGS_MAX", 3)
    async with through_a_proxy(PATIENT) as both:
        silent = [await Raw(port_of(both)).__aenter__() for _ in range(3)]
        await asyncio.sleep(0.05)
        async with Raw(port_of(both)):  # One too many: the oldest makes room for it.
            assert await silent[0].ended(PATIENT.greet_s / 2)
        for raw in silent:
            await raw.__aexit__()
        await asyncio.sleep(0.05)
        late = await TcpFabric().connect(both.listener.address, b"", deadline_s=5)
        await late.close()


async def test_connecting_to_silence_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(SlackwaterError, match=r"did not answer within 0\.2"):
            await TcpFabric().connect(f"127.0.0.1:{port}", b"", deadline_s=0.2)


async def test_connecting_to_something_else_is_unavailable() -> None:
    async def babble(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 smtp.example.org ESMTP and some more to fill a header\r\n")
        await asyncio.sleep(0.1)
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(Unavailable):
        await TcpFabric().connect(address, b"", deadline_s=5)
    server.close()
    await asyncio.sleep(0.15)


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:-1", "host:70000", "h:p"])
async def test_a_bad_address_says_what_is_wanted(address: str) -> None:
    with pytest.raises(Rejected, match="host:port"):
        await TcpFabric().connect(address, b"", deadline_s=1)
