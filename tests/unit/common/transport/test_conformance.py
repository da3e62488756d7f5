"""Duties of every transport, each test run over every transport and event loop."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slackwater.common.base import limits
from slackwater.common.base.errors import (
    AccessRefused,
    DecodeRejected,
    Rejected,
    Retryable,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.transport.region import Region

Make = Callable[..., Any]


def seen(region: Region) -> memoryview:
    """The bytes that its owner has, wherever they are."""
    whole = region.whole()
    if whole is region:
        return region.buffer
    copied = memoryview(bytes(whole.buffer))
    whole.close()
    return copied


def pattern(nbytes: int, seed: int = 1) -> memoryview:
    return memoryview(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)).cast("B")


async def test_hello_is_seen_by_both_sides_and_by_the_doorkeeper(party: Make) -> None:
    seen: list[bytes] = []
    async with party(accept=seen.append) as listener:
        near, far = await listener.connect(b"agent 7")
        assert (near.hello, far.hello, seen) == (b"agent 7", b"agent 7", [b"agent 7"])
        assert not near.closed
        assert not far.closed
        await near.close()


@pytest.mark.parametrize("error", [AccessRefused("wrong token"), DecodeRejected("no hello")])
async def test_a_refused_hello_is_an_access_refused_with_its_reason(
    party: Make, error: Exception
) -> None:
    def refuse(_hello: bytes) -> None:
        raise error

    async with party(accept=refuse) as listener:
        with pytest.raises(AccessRefused, match=str(error)):
            await listener.connect()
        assert listener.channels.empty()


async def test_a_doorkeeper_that_fails_is_reported_and_nobody_gets_in(party: Make) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def fail(_hello: bytes) -> None:
        raise KeyError("a bug")

    async with party(accept=fail) as listener:
        with pytest.raises(Unavailable, match="could not look"):
            await listener.connect()
        assert [type(context["exception"]) for context in reported] == [KeyError]
        assert listener.channels.empty()


async def test_hello_longer_than_a_frame_is_rejected_at_the_caller(party: Make) -> None:
    async with party() as listener:
        with pytest.raises(Rejected, match="at most"):
            await listener.connect(b"x" * (limits.FRAME_BYTES_MAX + 1))
        near, far = await listener.connect(b"x" * limits.FRAME_BYTES_MAX)
        assert len(far.hello) == limits.FRAME_BYTES_MAX
        await near.close()


async def test_nobody_there_is_unavailable(party: Make) -> None:
    async with party() as listener:
        address = listener.listener.address
        await listener.listener.close()
        with pytest.raises(Unavailable):
            await listener.fabric.connect(address, b"", deadline_s=5)


async def test_frames_arrive_whole_and_in_order_both_ways(party: Make) -> None:
    frames = [b"", b"a", bytes(range(256)), b"x" * limits.FRAME_BYTES_MAX] + [
        str(n).encode() for n in range(500)
    ]
    async with party() as listener:
        near, far = await listener.connect()
        for frame in frames:
            near.send(frame)
            far.send(frame[::-1])
        assert [await far.receive() for _ in frames] == frames
        assert [await near.receive() for _ in frames] == [frame[::-1] for frame in frames]
        with pytest.raises(Rejected, match="write bulk bytes"):
            near.send(b"x" * (limits.FRAME_BYTES_MAX + 1))
        await near.close()


async def test_a_full_send_queue_refuses_and_recovers_when_the_peer_receives(party: Make) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        sent = limits.SEND_QUEUE_FRAMES
        for number in range(sent):
            near.send(number.to_bytes(4, "big"))
        with pytest.raises(Unavailable, match="does not receive"):
            near.send(b"one too many")
        got = [int.from_bytes(await far.receive(), "big") for _ in range(sent)]
        assert got == list(range(sent))
        await settle(near)
        near.send(b"there is room again")
        assert await far.receive() == b"there is room again"
        await near.close()


async def settle(channel: Any) -> None:
    """Wait (bounded) until the peer's progress has come back, by a round trip that follows it."""
    with pytest.raises(AccessRefused):
        await channel.open(b"no such key")


async def test_a_receive_that_is_cancelled_loses_no_frame(party: Make) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        first = asyncio.create_task(far.receive())
        second = asyncio.create_task(far.receive())
        await asyncio.sleep(0)
        first.cancel()
        near.send(b"one")
        assert await asyncio.wait_for(second, 5) == b"one"
        with pytest.raises(asyncio.CancelledError):
            await first
        await near.close()


@pytest.mark.parametrize("nbytes", [1, 4096, 3 * 1024 * 1024 + 7])
async def test_write_and_read_move_exactly_the_range(
    party: Make, make_region: Make, nbytes: int
) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        region = make_region(b"\xee" * (nbytes + 200))
        remote = await near.open(far.grant(region))
        assert remote.nbytes == nbytes + 200
        data = pattern(nbytes)
        await near.write(data, remote, 100)
        assert seen(region)[100 : 100 + nbytes] == data
        assert bytes(seen(region)[:100]) == bytes(seen(region)[-100:]) == b"\xee" * 100
        back = memoryview(bytearray(nbytes))
        await near.read(remote, 100, back)
        assert back == data
        await near.close()
        region.close()


async def test_the_accepted_end_opens_writes_and_reads_too(party: Make, make_region: Make) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        region = make_region(bytes(8192))
        remote = await far.open(near.grant(region))
        await far.write(memoryview(b"pull"), remote, 8188)
        assert bytes(seen(region)[8188:]) == b"pull"
        back = memoryview(bytearray(4))
        await far.read(remote, 8188, back)
        assert bytes(back) == b"pull"
        await near.close()
        region.close()


async def test_arrays_of_numbers_can_be_written_and_gaps_are_refused(
    party: Make, make_region: Make
) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        region = make_region(bytes(4096))
        remote = await near.open(far.grant(region))
        numbers = np.arange(16, dtype=np.float32)
        await near.write(memoryview(numbers), remote, 64)
        assert np.array_equal(np.frombuffer(seen(region), np.float32, 16, 64), numbers)
        back = np.zeros((4, 4), np.float32)
        await near.read(remote, 64, memoryview(back))
        assert np.array_equal(back.ravel(), numbers)
        with pytest.raises(Rejected, match="gaps"):
            await near.write(memoryview(numbers)[::2], remote, 0)
        await near.write(memoryview(b""), remote, 4096)
        await near.close()
        region.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 65), (64, 1), (60, 5), (2**63, 1)])
async def test_out_of_bounds_is_refused_and_moves_nothing(
    party: Make, make_region: Make, offset: int, nbytes: int
) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        region = make_region(b"\x11" * 64)
        remote = await near.open(far.grant(region))
        with pytest.raises(AccessRefused):
            await near.write(memoryview(b"\x22" * nbytes), remote, offset)
        back = memoryview(bytearray(b"\x33" * nbytes))
        with pytest.raises(AccessRefused):
            await near.read(remote, offset, back)
        assert bytes(seen(region)) == b"\x11" * 64
        assert bytes(back) == b"\x33" * nbytes
        assert not near.closed
        await near.close()
        region.close()


async def test_keys_are_long_random_and_of_one_channel_only(party: Make, make_region: Make) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        other_near, _other_far = await listener.connect()
        region = make_region(bytes(64))
        keys = [far.grant(region) for _ in range(3)]
        assert len(set(keys)) == 3
        assert all(16 <= len(key) <= 64 for key in keys)
        for stranger, key in [(near, b""), (near, bytes(32)), (other_near, keys[0])]:
            with pytest.raises(AccessRefused, match="granted"):
                await stranger.open(key)
        remote = await near.open(keys[0])
        with pytest.raises(AccessRefused, match="another channel"):
            await other_near.write(memoryview(b"x"), remote, 0)
        assert bytes(seen(region)) == bytes(64)
        await near.close()
        await other_near.close()
        region.close()


async def test_a_revoked_key_opens_nothing_and_an_opened_region_is_refused(
    party: Make, make_region: Make
) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        region = make_region(bytes(64))
        key, kept = far.grant(region), far.grant(region)
        remote = await near.open(key)
        far.revoke(key)
        far.revoke(b"never granted")
        with pytest.raises(AccessRefused):
            await near.open(key)
        with pytest.raises(AccessRefused):
            await near.write(memoryview(b"x"), remote, 0)
        with pytest.raises(AccessRefused):
            await near.read(remote, 0, memoryview(bytearray(1)))
        assert bytes(seen(region)) == bytes(64)
        await near.write(memoryview(b"x"), await near.open(kept), 0)
        assert seen(region)[0] == ord("x")
        await near.close()
        region.close()


async def test_a_closed_region_is_neither_granted_nor_opened(
    party: Make, make_region: Make
) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        region = make_region(bytes(64))
        key = far.grant(region)
        region.close()
        with pytest.raises(AccessRefused):
            await near.open(key)
        with pytest.raises(Rejected, match="closed"):
            far.grant(region)
        await near.close()


async def test_a_closed_remote_region_is_refused_here(party: Make, make_region: Make) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        region = make_region(bytes(64))
        remote = await near.open(far.grant(region))
        remote.close()
        remote.close()
        with pytest.raises(AccessRefused, match="closed here"):
            await near.write(memoryview(b"x"), remote, 0)
        await near.close()
        region.close()


async def test_a_frame_comes_after_every_write_that_returned(
    party: Make, make_region: Make
) -> None:
    """The doorbell's promise: whoever receives the frame finds the bytes."""
    async with party() as listener:
        near, far = await listener.connect()
        region = make_region(bytes(2 * 1024 * 1024))
        remote = await near.open(far.grant(region))

        async def ring() -> None:
            for turn in range(1, 20):
                await near.write(memoryview(bytes([turn]) * region.nbytes), remote, 0)
                near.send(bytes([turn]))
                await near.receive()

        async def answer() -> None:
            for turn in range(1, 20):
                assert await far.receive() == bytes([turn])
                found = np.frombuffer(seen(region), np.uint8)
                assert (found == turn).all()
                far.send(b"")

        await asyncio.wait_for(asyncio.gather(ring(), answer()), 30)
        await near.close()
        region.close()


async def test_many_operations_at_once(party: Make, make_region: Make) -> None:
    """Writes at depth 200 and reads among them each land where they belong."""
    pages, page = 200, 4096
    async with party() as listener:
        near, far = await listener.connect()
        region = make_region(bytes(pages * page))
        remote = await near.open(far.grant(region))
        data = pattern(pages * page, seed=3)

        async def one(number: int) -> None:
            place = slice(number * page, (number + 1) * page)
            await near.write(data[place], remote, place.start)
            back = memoryview(bytearray(page))
            await near.read(remote, place.start, back)
            assert back == data[place]

        await asyncio.gather(*(one(number) for number in range(pages)))
        assert seen(region) == data
        await near.close()
        region.close()


async def test_a_cancelled_read_leaves_the_buffer_alone_afterwards(
    party: Make, make_region: Make
) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        region = make_region(b"\x44" * (8 * 1024 * 1024))
        remote = await near.open(far.grant(region))
        buffer = memoryview(bytearray(region.nbytes))
        reading = asyncio.create_task(near.read(remote, 0, buffer))
        await asyncio.sleep(0.0005)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        buffer[:] = bytes(len(buffer))
        back = memoryview(bytearray(10))
        for _ in range(20):
            await near.read(remote, 0, back)
        assert bytes(back) == b"\x44" * 10
        assert bytes(buffer) == bytes(len(buffer))
        await near.close()
        region.close()


@pytest.mark.parametrize("nbytes", [5, 3 * 1024 * 1024 + 1])
async def test_handover_gives_the_bytes_label_and_note(
    party: Make, make_region: Make, nbytes: int
) -> None:
    async with party() as listener:
        near, _far = await listener.connect()
        data = pattern(nbytes, seed=5)
        region = make_region(bytes(data), label="job-1/bucket-2")
        await near.handover(region, b"\x00note")
        region.close()
        [(taken, note)] = listener.received
        assert (taken.label, note, taken.nbytes) == ("job-1/bucket-2", b"\x00note", nbytes)
        assert taken.buffer == data
        taken.buffer[0:1] = b"!"
        await near.close()


async def test_a_handover_of_parts_leaves_the_rest_zero(party: Make, make_region: Make) -> None:
    """Where the memory itself is handed over, all of it arrives."""
    async with party() as listener:
        near, _far = await listener.connect()
        data = bytes(pattern(700_000, seed=6))
        region = make_region(data)
        parts = ((0, 4096), (300_001, 290_000), (699_999, 1))
        await near.handover(region, b"", None, parts)
        region.close()
        [(taken, _)] = listener.received
        expected = bytearray(len(data))
        for first, nbytes in parts:
            expected[first : first + nbytes] = data[first : first + nbytes]
        assert bytes(taken.buffer) in (bytes(expected), data)
        await near.close()


async def test_a_refused_handover_says_why_and_keeps_the_givers_bytes(
    party: Make, make_region: Make
) -> None:
    async def refuse(region: Region, _note: bytes) -> None:
        raise Rejected(f"region {region.label} is not expected here")

    async with party(on_handover=refuse) as listener:
        near, far = await listener.connect()
        region = make_region(b"mine", label="bucket-9")
        with pytest.raises(Rejected, match="bucket-9 is not expected"):
            await near.handover(region, b"")
        assert bytes(seen(region)) == b"mine"
        with pytest.raises(Rejected, match="on_handover"):
            await far.handover(region, b"")
        region.close()
        with pytest.raises(Rejected, match="closed"):
            await near.handover(region, b"")
        assert not near.closed
        await near.close()


class Account:
    """The room that peers have asked for and not given back."""

    def __init__(self, refusal: SlackwaterError | None = None) -> None:
        self.asked: list[tuple[bytes, int]] = []
        self.taken = 0
        self._refusal = refusal

    def prepare(self, hello: bytes, nbytes: int) -> Callable[[], None]:
        self.asked.append((hello, nbytes))
        if self._refusal is not None:
            raise self._refusal
        self.taken += nbytes

        def give_back() -> None:
            self.taken -= nbytes

        return give_back


@pytest.mark.parametrize("refusal", [AccessRefused("not you"), Unavailable("no room")])
async def test_a_peer_that_may_not_hand_over_is_refused_before_memory_is_taken(
    party: Make, make_region: Make, refusal: SlackwaterError
) -> None:
    account = Account(refusal)
    async with party(on_prepare=account.prepare) as listener:
        near, _ = await listener.connect(b"me")
        region = make_region(bytes(5000))
        with pytest.raises(type(refusal) if isinstance(refusal, Unavailable) else Rejected):
            await near.handover(region, b"")
        assert account.asked == [(b"me", region.nbytes)]
        assert not listener.received
        assert not near.closed
        region.close()
        await near.close()


@pytest.mark.parametrize("outcome", ["taken", "refused", "cut"])
async def test_the_room_of_a_handover_is_given_back_once(
    party: Make, make_region: Make, outcome: str
) -> None:
    """Before the program is given the region, which it counts itself; or when it will not come."""
    account = Account()
    taken_then: list[int] = []
    closing: list[asyncio.Task[None]] = []

    async def take(region: Region, _note: bytes) -> None:
        taken_then.append(account.taken)
        if outcome == "refused":
            raise Rejected("not this one")
        if outcome == "cut":
            closing.append(asyncio.create_task(listener.channels.get_nowait().close()))
            await asyncio.sleep(60)
        region.close()

    async with party(on_handover=take, on_prepare=account.prepare) as listener:
        near = await listener.fabric.connect(listener.listener.address, b"", deadline_s=5)
        while listener.channels.empty():  # noqa: ASYNC110 (kept by the listener's task)
            await asyncio.sleep(0.001)
        region = make_region(bytes(5000))
        if outcome == "taken":
            await near.handover(region, b"")
        else:
            with pytest.raises((Rejected, Unavailable)):
                await near.handover(region, b"")
        await asyncio.gather(*closing)
        assert taken_then == [0]
        assert account.taken == 0
        region.close()
        await near.close()


async def test_the_connecting_side_takes_a_handover_if_it_says_so(
    party: Make, make_region: Make
) -> None:
    taken: list[Region] = []

    async def take(region: Region, _note: bytes) -> None:
        taken.append(region)

    async with party() as listener:
        near = await listener.fabric.connect(
            listener.listener.address, b"", deadline_s=5, on_handover=take
        )
        far = await listener.channels.get()
        region = make_region(b"yours")
        await far.handover(region, b"")
        region.close()
        assert bytes(taken[0].buffer) == b"yours"
        taken[0].close()
        await near.close()


async def test_what_was_sent_before_close_arrives_and_then_unavailable(party: Make) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        for n in range(300):
            near.send(b"%d" % n)
        await near.close()
        await near.close()
        assert [await asyncio.wait_for(far.receive(), 5) for _ in range(300)] == [
            b"%d" % n for n in range(300)
        ]
        with pytest.raises(Unavailable):
            await asyncio.wait_for(far.receive(), 5)
        assert near.closed
        assert far.closed
        await far.close()


async def test_after_the_end_every_operation_is_unavailable(party: Make, make_region: Make) -> None:
    async with party() as listener:
        near, far = await listener.connect()
        region = make_region(bytes(64))
        remote = await near.open(far.grant(region))
        waiting = asyncio.create_task(near.receive())
        await asyncio.sleep(0)
        await far.close()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(waiting, 5)
        byte = memoryview(bytearray(1))
        with pytest.raises(Unavailable):
            near.send(b"")
        with pytest.raises(Unavailable):
            near.grant(region)
        near.revoke(b"key")
        for work in (
            near.open(b"key"),
            near.write(byte, remote, 0),
            near.read(remote, 0, byte),
            near.handover(region, b""),
            near.receive(),
        ):
            with pytest.raises(Unavailable):
                await work
        await near.close()
        region.close()


async def test_operations_under_way_end_when_the_peer_closes(
    party: Make, make_region: Make
) -> None:
    """Mid-write, mid-read, mid-handover: each ends, done or Unavailable, none hangs."""
    entered = asyncio.Event()

    async def never(_region: Region, _note: bytes) -> None:
        entered.set()
        await asyncio.sleep(3600)

    async with party(on_handover=never) as listener:
        near, far = await listener.connect()
        region = make_region(bytes(24 * 1024 * 1024))
        remote = await near.open(far.grant(region))
        buffer = memoryview(bytearray(region.nbytes))
        small = make_region(b"small")
        tasks = [
            asyncio.create_task(near.handover(small, b"")),
            asyncio.create_task(near.write(buffer, remote, 0)),
            asyncio.create_task(near.read(remote, 0, memoryview(bytearray(region.nbytes)))),
        ]
        await asyncio.wait_for(entered.wait(), 5)
        await far.close()
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert isinstance(outcomes[0], Unavailable)
        assert all(o is None or isinstance(o, Unavailable) for o in outcomes), outcomes
        assert not listener.received
        await near.close()
        region.close()
        small.close()


async def test_the_listeners_end_is_its_channels_end(party: Make) -> None:
    async with party() as listener:
        ends = [await listener.connect() for _ in range(3)]
        await listener.listener.close()
        for near, far in ends:
            with pytest.raises(Unavailable):
                await asyncio.wait_for(near.receive(), 5)
            assert near.closed
            assert far.closed
            await near.close()


async def test_a_task_of_a_channel_that_fails_ends_it_by_name(party: Make) -> None:
    """A mapping that is never answered would be waited for until its deadline, and hide a bug."""

    async def broken() -> None:
        raise ValueError("a bug")

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with party() as listener:
        near, far = await listener.connect()
        near._tasks.spawn(broken(), "mending")
        with pytest.raises(Unavailable, match=r"mending failed: ValueError\('a bug'\)"):
            await asyncio.wait_for(near.receive(), 5)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(far.receive(), 5)


async def test_a_handler_that_fails_loses_its_channel_only(party: Make) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with party() as listener:
        good, _ = await listener.connect()
        keep = listener._keep

        async def fail(_channel: Any) -> None:
            raise ValueError("a bug")

        listener.listener._accepted._on_channel = fail
        bad = await listener.fabric.connect(listener.listener.address, b"", deadline_s=5)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(bad.receive(), 5)
        listener.listener._accepted._on_channel = keep
        assert [str(context["exception"]) for context in reported] == ["a bug"]
        assert not good.closed
        await good.close()
        await bad.close()


async def test_a_used_address_is_refused(party: Make) -> None:
    async with party() as listener:
        with pytest.raises(Rejected, match="listen"):
            await listener.fabric.listen(
                listener.listener.address, listener.accept, listener._keep, listener._take
            )


async def test_too_many_channels_is_retryable(party: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHANNELS_MAX", 2)
    async with party() as listener:
        first, _ = await listener.connect()
        second, far = await listener.connect()
        with pytest.raises(Retryable, match="channels are open"):
            await listener.connect()
        await far.close()
        third, _ = await listener.connect()
        for channel in (first, second, third):
            await channel.close()


async def test_no_task_is_left_behind(party: Make) -> None:
    before = asyncio.all_tasks()
    async with party() as listener:
        pairs = [await listener.connect() for _ in range(5)]
        for number, (near, far) in enumerate(pairs):
            await (near if number % 2 else far).close()
        for near, far in pairs:
            await near.close()
            await far.close()
    assert asyncio.all_tasks() == before
