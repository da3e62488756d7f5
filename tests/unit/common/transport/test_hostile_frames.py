"""Lengths that lie, records cut at every byte, a byte now and then: on the sockets of shm and tcp,
before and after the greeting. Each ends its own connection, while another job's channel on the same
listener moves frames and bytes all the time.
"""

import asyncio
import contextlib
import gc
import random
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.unit.common.transport.conftest import open_files
from tests.waiting import soon

from slackwater.common.base import limits
from slackwater.common.base.retry import retry
from slackwater.common.transport import wire
from slackwater.common.transport.base import Channel, Fabric, Listener
from slackwater.common.transport.host import split_identity
from slackwater.common.transport.region import Region
from slackwater.common.transport.shm import ShmFabric
from slackwater.common.transport.tcp import TcpFabric
from slackwater.common.transport.tcp_channel import TcpTuning

GREET_S = 1.0
STALL_S = 0.4
AT_ONCE = 24
"""Hostile connections; more would not be greeted in time on a busy machine."""
HELLO = wire.pack(wire.HELLO, handle=wire.VERSION, offset=1, body=b"hostile")
FRAME = wire.pack(wire.FRAME, body=b"a frame of the control stream")
WRITE = wire.pack(wire.WRITE, handle=1, number=1, body=b"bytes for a region")
LENGTHS = (2**31, 2**32 - 1, 2**63, 2**64 - 1)


@pytest.fixture(params=["shm", "tcp"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(limits, "CONNECT_S", GREET_S)
    return str(request.param)


class Raw:
    """A peer that speaks bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def say(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.sock, data)

    async def record(self) -> tuple[wire.Header, bytes]:
        raw = b""
        while len(raw) < wire.HEADER_BYTES:
            raw += await self._more(wire.HEADER_BYTES - len(raw))
        header = wire.Header._make(wire.HEADER.unpack(raw))
        body = b""
        while len(body) < header.length:
            body += await self._more(header.length - len(body))
        return header, body

    async def _more(self, count: int) -> bytes:
        data = await self._loop.sock_recv(self.sock, count)
        assert data, "the other side closed"
        return data

    async def ended(self) -> bool:
        """TimeoutError when the other side does not close within its deadlines."""
        try:
            async with asyncio.timeout(5.0):
                while await self._loop.sock_recv(self.sock, 65536):
                    continue
        except ConnectionError:
            return True
        return True


class Place:
    """A listener; one channel of an honest job that is busy; and any number of hostile ones."""

    listener: Listener
    moved = 0
    """Round trips of the honest channel."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.far: dict[bytes, Channel] = {}
        tuning = TcpTuning(greet_s=limits.CONNECT_S, stall_s=STALL_S)
        self.fabric: Fabric = ShmFabric() if kind == "shm" else TcpFabric(tuning)

    async def keep(self, channel: Channel) -> None:
        self.far[channel.hello] = channel
        if self.kind == "shm":  # It has no setting for that.
            channel._tick_s = STALL_S / 8  # type: ignore[attr-defined]
            channel._watch.cancel()  # type: ignore[attr-defined]
            channel._tick()  # type: ignore[attr-defined]

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[Raw]:
        loop = asyncio.get_running_loop()
        family = socket.AF_UNIX if self.kind == "shm" else socket.AF_INET
        with socket.socket(family) as sock:
            sock.setblocking(False)
            if self.kind == "shm":
                await loop.sock_connect(sock, split_identity(self.listener.address)[1])
            else:
                port = int(self.listener.address.rpartition(":")[2])
                await loop.sock_connect(sock, ("127.0.0.1", port))
            yield Raw(sock)

    @asynccontextmanager
    async def greeted(self) -> AsyncIterator[list[Raw]]:
        """The connections of a hostile channel past its greeting: control, and tcp's data."""
        async with self.raw() as control, self.raw() as data, self.raw() as theirs:
            await control.say(HELLO)
            header, session = await control.record()
            assert header.kind == wire.WELCOME
            if self.kind == "tcp":
                for handle, stream in enumerate((data, theirs)):
                    await stream.say(wire.pack(wire.JOIN, handle=handle, body=session))
                    assert (await stream.record())[0].kind == wire.WELCOME
            yield [control, data] if self.kind == "tcp" else [control]

    async def progress(self) -> None:
        """The honest channel still moves, or AssertionError."""
        before = self.moved
        async with asyncio.timeout(5.0):
            while self.moved < before + 3:  # noqa: ASYNC110 (counted by another task)
                await asyncio.sleep(0.001)


@asynccontextmanager
async def place(kind: str, folder: Path) -> AsyncIterator[Place]:
    made = Place(kind)

    async def refuse(_region: Region, _note: bytes) -> None:
        raise AssertionError("nobody hands over here")

    address = str(folder / "s") if kind == "shm" else "127.0.0.1:0"
    made.listener = await made.fabric.listen(address, lambda _hello: None, made.keep, refuse)
    try:
        async with busy(made):
            yield made
    finally:
        await made.listener.close()


@asynccontextmanager
async def busy(made: Place) -> AsyncIterator[None]:
    """The honest channel moves frames and bytes in the block, and is seen to at its end."""
    connect = partial(made.fabric.connect, made.listener.address, b"honest", deadline_s=5)
    # The listener's short deadline is the honest one's, too: a busy machine may miss it.
    near = await retry(connect, budget_s=10.0, rng=random.Random(1))
    while b"honest" not in made.far:  # noqa: ASYNC110 (kept by the listener's task)
        await asyncio.sleep(0.001)
    far = made.far[b"honest"]
    region = Region.create(64 * 1024, "honest")
    remote = await near.open(far.grant(region))

    async def work() -> None:
        back = memoryview(bytearray(region.nbytes))
        while True:
            made.moved += 1
            data = memoryview(bytes([made.moved & 0xFF]) * region.nbytes)
            near.send(b"frame %d" % made.moved)
            await near.write(data, remote, 0)
            await near.read(remote, 0, back)
            assert back == data
            assert await far.receive() == b"frame %d" % made.moved
            await asyncio.sleep(0)

    working = asyncio.create_task(work())
    try:
        yield
        await made.progress()
        assert not working.done()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await near.close()
        region.close()


def memfds() -> int:
    """Descriptors of regions that this process has open."""
    return sum("memfd" in link for link in open_files().values())


def headers(length: int, *kinds: int) -> list[bytes]:
    return [wire.HEADER.pack(kind, wire.VERSION, 1, 1, length) for kind in kinds]


async def test_a_length_that_lies_ends_a_greeting(kind: str, tmp_path: Path) -> None:
    """Nothing is allocated on its word; what follows is not read."""
    async with place(kind, tmp_path) as here:
        for length in LENGTHS:
            for first in headers(length, wire.HELLO, wire.JOIN, wire.RESUME, wire.FRAME, 0, 255):
                async with here.raw() as raw:
                    await raw.say(first + b"x" * 100)
                    assert await raw.ended()
            await here.progress()


async def test_a_length_that_lies_ends_its_channel(kind: str, tmp_path: Path) -> None:
    """This holds for any kind of record, on the control stream and on tcp's data streams."""
    async with place(kind, tmp_path) as here:
        for length in LENGTHS:
            for record in headers(length, *range(wire.RETURNED + 2)):
                async with here.greeted() as connections:
                    await connections[-1].say(record)
                    for connection in connections:
                        assert await connection.ended()
            await here.progress()


async def test_a_first_record_without_a_body_ends_its_connection(kind: str, tmp_path: Path) -> None:
    """Save an empty hello: shm greets it; tcp waits for its data streams, as long as it waits for
    any."""
    async with place(kind, tmp_path) as here:
        for first in headers(0, *range(wire.RETURNED + 2)):
            async with here.raw() as raw:
                await raw.say(first)
                if first == wire.HEADER.pack(wire.HELLO, wire.VERSION, 1, 1, 0):
                    assert (await raw.record())[0].kind == wire.WELCOME
                if kind == "tcp" or first[0] != wire.HELLO:
                    assert await raw.ended()
        await here.progress()


async def test_later_records_without_a_body_harm_nobody(kind: str, tmp_path: Path) -> None:
    """An empty frame is one, a goodbye ends the channel; the others are answered, or end it."""
    async with place(kind, tmp_path) as here:
        for record in headers(0, *range(wire.RETURNED + 2)):
            async with here.greeted() as connections:
                for connection in connections:
                    await connection.say(record)
        await here.progress()


@pytest.mark.parametrize("last", ["goodbye", "malformed"])
async def test_nothing_behind_the_end_of_a_channel_is_served(
    kind: str, last: str, tmp_path: Path
) -> None:
    """The record that ends the channel and requests for room come in one segment: no region is made
    for a channel that is over, which nobody would ever close."""
    ends = wire.pack(wire.GOODBYE) if last == "goodbye" else wire.pack(255)
    room = b"".join(wire.pack(wire.PREPARE, number=4096, offset=n) for n in range(16))
    async with place(kind, tmp_path) as here:
        before = memfds()
        for _ in range(3):
            async with here.greeted() as connections:
                await connections[0].say(ends + room)
                assert await connections[0].ended()
        await here.progress()
        assert memfds() == before


async def test_a_first_record_cut_at_every_byte(kind: str, tmp_path: Path) -> None:
    """The peer dies after so many bytes, or lives and says no more: each connection ends by its
    deadline, all of them at once beside the honest channel."""
    async with place(kind, tmp_path) as here:

        async def cut(count: int, *, dies: bool) -> None:
            async with here.raw() as raw:
                await raw.say(HELLO[:count])
                if not dies:
                    assert await raw.ended()

        cuts = [cut(count, dies=dies) for count in range(len(HELLO)) for dies in (True, False)]
        for first in range(0, len(cuts), AT_ONCE):
            await asyncio.gather(*cuts[first : first + AT_ONCE])
            await here.progress()
        assert set(here.far) == {b"honest"}, "no cut hello became a channel"


async def test_a_later_record_cut_at_every_byte(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in the middle of a channel: of a frame, and of a write on a data stream."""
    monkeypatch.setattr(limits, "CONNECT_S", 20.0)  # Greetings, here, are to succeed.
    async with place(kind, tmp_path) as here:

        async def cut(record: bytes, count: int, which: int, *, dies: bool) -> None:
            async with here.greeted() as connections:
                await connections[which].say(record[:count])
                if not dies:
                    for connection in connections:
                        assert await connection.ended()

        records = [(FRAME, 0)] + [(WRITE, 1)] * (kind == "tcp")
        cuts = [
            cut(record, count, which, dies=dies)
            for record, which in records
            for count in range(1, len(record))  # After none, the channel is idle, and stays.
            for dies in (True, False)
        ]
        for first in range(0, len(cuts), AT_ONCE):
            await asyncio.gather(*cuts[first : first + AT_ONCE])
            await here.progress()


@pytest.mark.parametrize("when", ["greeting", "channel"])
async def test_a_byte_now_and_then_is_no_progress(kind: str, when: str, tmp_path: Path) -> None:
    """The peer sends at the pace of one byte a second against the real deadlines: each byte comes
    within them, the record does not."""

    async def dribble(connection: Raw, record: bytes) -> None:
        for byte in record:
            await connection.say(bytes([byte]))
            await asyncio.sleep(min(GREET_S, STALL_S) / 10)
        raise AssertionError("the whole record was taken")

    async def until_ended(connection: Raw, others: list[Raw], record: bytes) -> None:
        dribbling = asyncio.create_task(dribble(connection, record))
        for each in (connection, *others):
            assert await each.ended()
        dribbling.cancel()
        with pytest.raises((ConnectionError, asyncio.CancelledError)):
            await dribbling

    async with place(kind, tmp_path) as here:
        if when == "greeting":
            async with here.raw() as raw:
                await until_ended(raw, [], HELLO)
        else:
            async with here.greeted() as connections:
                await until_ended(connections[-1], connections[:-1], [FRAME, WRITE][kind == "tcp"])


# Many of all kinds --------------------------------------------------------------------------------

FRAMES_OF_A_PEER = 60
NUMBERS = (0, 1, 2, 63, 64, 1 << 16, (1 << 31) - 1, (1 << 32) - 1)


def any_record(rng: random.Random) -> bytes:
    """Return a record of any kind, with any numbers, whose length is seldom a lie."""
    body = rng.choice((b"", rng.randbytes(16), rng.randbytes(32), rng.randbytes(300)))
    length = rng.choice(LENGTHS) if rng.random() < 0.02 else len(body)
    kind, handle = rng.randrange(30), rng.choice(NUMBERS)
    offset, number = rng.choice((*NUMBERS, *LENGTHS[2:])), rng.choice(NUMBERS)
    return wire.HEADER.pack(kind, handle, offset, number, length) + body


async def storm(made: Place, rng: random.Random, frames: int) -> int:
    """Send so many frames, a few dozen on each connection, and return how many were."""
    sent = 0

    async def one(control: Raw) -> int:
        """Send until the other side closes, and read what it answers, so that it never waits."""
        done = 0
        for _ in range(FRAMES_OF_A_PEER // 10):
            await control.say(b"".join(any_record(rng) for _ in range(10)))
            done += 10
            with contextlib.suppress(BlockingIOError):
                while control.sock.recv(65536):
                    continue
                return done
        return done

    while sent < frames:
        with contextlib.suppress(ConnectionError, AssertionError, TimeoutError):
            async with asyncio.timeout(5.0):
                if rng.random() < 0.2:  # Without a greeting.
                    async with made.raw() as stranger:
                        sent += await one(stranger)
                    continue
                async with made.greeted() as streams:
                    sent += await one(rng.choice(streams))
    return sent


@pytest.mark.parametrize(
    "frames",
    [
        10_000,
        pytest.param(1_000_000, marks=[pytest.mark.nightly, pytest.mark.timeout(1700)]),
    ],
)
async def test_frames_of_all_kinds_leave_nothing(kind: str, frames: int, tmp_path: Path) -> None:
    """No descriptor, no thread, and memory within 64 MB."""
    rng, process = random.Random(f"{kind}/{frames}"), psutil.Process()
    async with place(kind, tmp_path) as made:
        await storm(made, rng, frames // 10)
        await asyncio.sleep(1.2 * limits.RESUME_S)  # Streams that broke may resume for so long.
        files, threads = len(open_files()), threading.active_count()
        resident = process.memory_info().rss
        assert await storm(made, rng, frames) >= frames
        await soon(
            lambda: len(open_files()) <= files and threading.active_count() <= threads,
            within_s=4 * limits.RESUME_S,
        )
        gc.collect()
        assert process.memory_info().rss - resident < 64 * 1024 * 1024
        await made.progress()
