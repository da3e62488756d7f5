"""The data streams of tcp, which compiled code asks on and serves: records in any pieces, memory
that is taken back in the middle of one, peers that answer what nobody asked."""

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base import limits
from slackwater.common.base.errors import AccessRefused, SlackwaterError, Unavailable
from slackwater.common.transport import wire
from slackwater.common.transport.base import Channel
from slackwater.common.transport.initiator_stream import InitiatorEnd
from slackwater.common.transport.region import Region
from slackwater.common.transport.target_stream import Served, ServingEnd
from slackwater.common.transport.tcp import TcpFabric
from slackwater.common.transport.transfers import Transfers

NBYTES = 200_000
FAR = NBYTES - 100


@dataclass
class End:
    """A serving end, its peer's socket, and how it ended."""

    served: Served
    region: Region
    handle: int
    peer: socket.socket
    serving: ServingEnd
    lost: list[Exception | None] = field(default_factory=list)


@contextmanager
def serving_end(rest: bytes = b"") -> Iterator[End]:
    ours, peer = socket.socketpair()
    region = Region.create(NBYTES, "served")
    region.buffer[:] = bytes(range(250)) * (NBYTES // 250)
    served = Served()
    served.begin()
    lost: list[Exception | None] = []
    serving = ServingEnd(ours, rest, 0, served, lambda _end, error: lost.append(error))
    end = End(served, region, served.add(region), peer, serving, lost)
    try:
        yield end
    finally:
        serving.close()
        served.close()
        region.close()
        peer.close()


async def receive(sock: socket.socket, count: int) -> bytes:
    sock.setblocking(False)
    data = b""
    while len(data) < count:
        more = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


async def record(sock: socket.socket) -> tuple[wire.Header, bytes]:
    header = wire.Header._make(wire.HEADER.unpack(await receive(sock, wire.HEADER_BYTES)))
    return header, await receive(sock, header.length)


def read_request(handle: int, number: int, offset: int, count: int) -> bytes:
    body = wire.WORD.pack(count)
    return wire.pack(wire.READ, handle=handle, number=number, offset=offset, body=body)


REQUESTS = st.lists(
    st.tuples(
        st.booleans(),
        st.sampled_from([0, 1, 2]),
        st.integers(0, NBYTES + 50),
        st.sampled_from([1, 40, 4096, 33_000, 70_000]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None)
@given(REQUESTS, st.lists(st.integers(1, 90_000), min_size=1, max_size=5))
def test_requests_in_any_pieces_are_answered_as_if_whole(
    requests: list[tuple[bool, int, int, int]], pieces: list[int]
) -> None:
    """Against a model of the region: good and bad handles and ranges, small and large bodies."""

    async def run() -> None:
        with serving_end() as end:
            model = bytearray(end.region.buffer)
            wire_bytes, expected = b"", []
            for number, (writes, handle_shift, offset, count) in enumerate(requests, 1):
                handle = end.handle + handle_shift
                body = bytes([number]) * count
                good = handle == end.handle and offset + count <= NBYTES
                if writes:
                    wire_bytes += wire.pack(
                        wire.WRITE, handle=handle, number=number, offset=offset, body=body
                    )
                    if good:
                        model[offset : offset + count] = body
                    expected.append((wire.ACK if good else wire.REFUSED, number, b""))
                else:
                    wire_bytes += read_request(handle, number, offset, count)
                    answer = bytes(model[offset : offset + count]) if good else b""
                    expected.append((wire.DATA if good else wire.REFUSED, number, answer))

            async def send() -> None:
                left, turn = wire_bytes, 0
                while left:
                    size = pieces[turn % len(pieces)]
                    await asyncio.get_running_loop().sock_sendall(end.peer, left[:size])
                    left, turn = left[size:], turn + 1

            end.peer.setblocking(False)
            sending = asyncio.create_task(send())
            for kind, number, answer in expected:
                header, body = await asyncio.wait_for(record(end.peer), 10)
                assert (header.kind, header.number) == (kind, number)
                assert kind == wire.REFUSED or body == answer
            await sending
            assert end.region.buffer == model
            assert not end.lost

    asyncio.run(run())


async def test_what_came_with_the_greeting_is_served() -> None:
    with serving_end(read_request(1, 7, 5, 10)) as end:
        assert end.handle == 1
        header, body = await asyncio.wait_for(record(end.peer), 5)
        assert (header.kind, header.number, body) == (wire.DATA, 7, bytes(range(5, 15)))


async def test_a_region_taken_back_in_the_middle_of_a_write_is_not_touched_again() -> None:
    """The rest of the body is swallowed, the answer says why, and the stream goes on."""
    with serving_end() as end:
        body = b"\xff" * 100_000
        request = wire.pack(wire.WRITE, handle=end.handle, number=1, offset=0, body=body)
        other = Region.create(64, "other")
        handle = end.served.add(other)
        loop = asyncio.get_running_loop()
        end.peer.setblocking(False)
        await loop.sock_sendall(end.peer, request[:50_000])
        async with asyncio.timeout(5):
            while end.region.buffer[49_000] != 0xFF:  # noqa: ASYNC110 (no event: that is the point)
                await asyncio.sleep(0.001)
        end.region.close()
        fresh = Region.create(NBYTES, "in its place")
        await loop.sock_sendall(end.peer, request[50_000:])
        header, why = await asyncio.wait_for(record(end.peer), 5)
        assert isinstance(wire.refusal(header, why), AccessRefused)
        assert b"gone" in why
        again = wire.pack(wire.WRITE, handle=handle, number=2, offset=0, body=b"alive")
        await loop.sock_sendall(end.peer, again)
        assert (await asyncio.wait_for(record(end.peer), 5))[0].kind == wire.ACK
        assert bytes(other.buffer[:5]) == b"alive"
        assert bytes(fresh.buffer) == bytes(NBYTES)
        fresh.close()
        other.close()


async def test_a_read_whose_region_is_taken_back_ends_its_stream() -> None:
    """The part that the peer has got is not a whole answer, and cannot become one."""
    with serving_end() as end:
        big = Region.create(limits.CHUNK_BYTES, "big")
        handle = end.served.add(big)
        end.peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        end.peer.sendall(read_request(handle, 1, 0, limits.CHUNK_BYTES))
        await receive(end.peer, 1000)
        end.served.remove(handle)
        with pytest.raises((EOFError, ConnectionError)):
            await asyncio.wait_for(receive(end.peer, limits.CHUNK_BYTES), 5)
        assert len(end.lost) == 1
        assert not isinstance(end.lost[0], SlackwaterError), "the peer did nothing wrong"
        big.close()


async def test_a_write_that_is_sent_again_is_acknowledged_and_not_applied() -> None:
    with serving_end() as end:
        request = wire.pack(wire.WRITE, handle=end.handle, number=9, offset=0, body=b"first")
        end.peer.sendall(request)
        assert (await record(end.peer))[0].kind == wire.ACK
        end.region.buffer[:5] = b"owner"
        end.peer.sendall(request)
        assert (await record(end.peer))[0].kind == wire.ACK
        assert bytes(end.region.buffer[:5]) == b"owner"


async def test_handles_of_taken_back_regions_are_not_given_again_soon() -> None:
    served = Served()
    served.begin()
    region = Region.create(64, "r")
    handles = []
    for _ in range(50):
        handles.append(served.add(region))
        served.remove(handles[-1])
    assert len(set(handles)) == 50
    region.close()


# Answers ------------------------------------------------------------------------------------------


ACK = wire.pack(wire.ACK, number=1)
BAD_ANSWERS = {
    "unknown kind": wire.pack(77, number=1),
    "a request": read_request(1, 1, 0, 5),
    "of nothing": wire.pack(wire.ACK),
    "unasked": wire.pack(wire.ACK, number=2),
    "twice": ACK + ACK,
    "data for a write": wire.pack(wire.DATA, number=1, body=b"12345"),
    "an acknowledgement with a body": wire.pack(wire.ACK, number=1, body=b"12345"),
    "short data": wire.pack(wire.DATA, number=3, body=b"1234"),
    "long data": wire.HEADER.pack(wire.DATA, 0, 3, 0, 2**62),
    "an acknowledged read": wire.pack(wire.ACK, number=3),
    "a long reason": wire.HEADER.pack(wire.REFUSED, 1, 1, 0, wire.REASON_BYTES_MAX + 1),
    "a negative reason": wire.HEADER.pack(wire.REFUSED, 1, 1, 0, 2**64 - 1),
}


@asynccontextmanager
async def asking_end() -> AsyncIterator[tuple[Transfers, socket.socket, list[Exception | None]]]:
    ours, peer = socket.socketpair()
    ours.setblocking(False)
    transfers = Transfers([0], part_bytes=1 << 20, credit_bytes=1 << 22)
    lost: list[Exception | None] = []
    end = InitiatorEnd(ours, b"", 0, transfers, lambda _end, error: lost.append(error))
    transfers.attach(end)
    try:
        yield transfers, peer, lost
    finally:
        end.close()
        peer.close()


@pytest.mark.parametrize("what", BAD_ANSWERS)
async def test_an_answer_that_may_not_be_ends_the_stream_and_fills_no_buffer(what: str) -> None:
    async with asking_end() as (transfers, peer, lost):
        target = bytearray(5)
        writing = asyncio.create_task(transfers.run(wire.WRITE, 1, 0, memoryview(b"hello")))
        await asyncio.sleep(0.01)
        gone = asyncio.create_task(transfers.run(wire.WRITE, 1, 0, memoryview(b"12345")))
        await asyncio.sleep(0.01)
        reading = asyncio.create_task(transfers.run(wire.READ, 1, 0, memoryview(target)))
        await asyncio.sleep(0.01)
        assert set(transfers._parts) == {1, 2, 3}
        peer.sendall(wire.pack(wire.ACK, number=2))
        await asyncio.wait_for(gone, 5)
        peer.sendall(BAD_ANSWERS[what])
        async with asyncio.timeout(5):
            while not lost:  # noqa: ASYNC110 (told to the channel, which is not here)
                await asyncio.sleep(0.001)
        assert isinstance(lost[0], SlackwaterError)
        transfers.lose("the channel ended")
        for task in (writing, reading):
            if what != "twice" or task is reading:
                with pytest.raises(Unavailable):
                    await asyncio.wait_for(task, 5)
        await asyncio.gather(writing, return_exceptions=True)
        assert target == bytes(5)


async def test_answers_out_of_order_and_in_pieces_complete_what_they_answer() -> None:
    async with asking_end() as (transfers, peer, lost):
        targets = [bytearray(size) for size in (3, 50_000, 7, 300_000)]
        tasks = [
            asyncio.create_task(transfers.run(wire.READ, 1, 0, memoryview(target)))
            for target in targets
        ]
        await asyncio.sleep(0.01)
        answers = b"".join(
            wire.pack(wire.DATA, number=n, body=bytes([n]) * len(targets[n - 1]))
            for n in (3, 1, 4, 2)
        )
        rng = random.Random(5)
        peer.setblocking(False)
        while answers:
            size = rng.choice([1, 31, 33, 4096, 100_000])
            await asyncio.get_running_loop().sock_sendall(peer, answers[:size])
            answers = answers[size:]
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*tasks), 5)
        for number, target in enumerate(targets, 1):
            assert target == bytes([number]) * len(target)
        assert not lost


# Whole channels -----------------------------------------------------------------------------------


@asynccontextmanager
async def owner_in_a_thread(region: Region) -> AsyncIterator[tuple[str, asyncio.AbstractEventLoop]]:
    """An owner of a region with an event loop of its own: its address, and the loop."""
    started: asyncio.Future[tuple[str, asyncio.AbstractEventLoop]] = (
        asyncio.get_running_loop().create_future()
    )
    home = asyncio.get_running_loop()
    over = asyncio.Event()

    async def live() -> None:
        async def on_channel(channel: Channel) -> None:
            channel.send(channel.grant(region))

        async def take(given: Region, _note: bytes) -> None:
            given.close()

        listener = await TcpFabric().listen("127.0.0.1:0", lambda _hello: None, on_channel, take)
        loop = asyncio.get_running_loop()
        home.call_soon_threadsafe(started.set_result, (listener.address, loop))
        await over.wait()
        await listener.close()

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    address, loop = await started
    try:
        yield address, loop
    finally:
        loop.call_soon_threadsafe(over.set)
        await asyncio.to_thread(thread.join)


async def test_the_owners_program_takes_no_part_in_writes_and_reads() -> None:
    """Its loop stands still meanwhile."""
    region = Region.create(1 << 20, "still")
    async with owner_in_a_thread(region) as (address, loop):
        channel = await TcpFabric().connect(address, b"", deadline_s=10)
        remote = await channel.open(await channel.receive())
        await channel.write(memoryview(b"begin"), remote, 0)
        stands, goes_on = threading.Event(), threading.Event()

        def stand_still() -> None:
            stands.set()
            goes_on.wait(30)

        loop.call_soon_threadsafe(stand_still)
        await asyncio.to_thread(stands.wait)
        data, back = memoryview(bytearray(b"\x77" * (1 << 20))), memoryview(bytearray(1 << 20))
        async with asyncio.timeout(20):
            for _ in range(10):
                await channel.write(data, remote, 0)
                await channel.read(remote, 0, back)
        assert not goes_on.is_set()
        assert back == data == region.buffer
        goes_on.set()
        await channel.close()
    region.close()


async def test_one_task_that_reads_on_and_on_leaves_turns_to_others() -> None:
    region = Region.create(8192, "busy")
    async with owner_in_a_thread(region) as (address, _loop):
        channel = await TcpFabric().connect(address, b"", deadline_s=10)
        remote = await channel.open(await channel.receive())
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        page = memoryview(bytearray(4096))
        for _ in range(400):
            await channel.read(remote, 0, page)
        task.cancel()
        assert turns >= 400 // (limits.SETTLES_MAX + 1)
        await channel.close()
    region.close()
