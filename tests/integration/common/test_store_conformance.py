"""One suite for every `Store`: what a service may build its truth on, over JetStream and memory."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from slackwater.common.base import codec, limits
from slackwater.common.base.errors import Rejected
from slackwater.common.bus.nats import NatsBus
from slackwater.common.store.base import EPOCH_KEY, Bucket, Entry, SequenceConflict, Store
from slackwater.common.store.memory import MemoryStorage
from slackwater.common.store.nats import NatsStore
from slackwater.common.store.witness import Mark
from slackwater.schemas.service import LeaseRecord

Connect = Callable[[str], Awaitable[Store]]


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.live)])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Makes clients of one store."""
    storage, buses = MemoryStorage(), []
    url = request.getfixturevalue("nats_url") if request.param == "nats" else ""

    async def make(name: str) -> Store:
        if not url:
            return storage.connect(name)
        buses.append(await NatsBus.connect(url, name))
        return NatsStore(buses[-1])

    yield make
    for bus in buses:
        await bus.close()


@pytest.fixture
async def bucket(connect: Connect, unique: str) -> Bucket:
    return await (await connect("writer")).bucket(unique)


# Entries -----------------------------------------------------------------------------------------


async def test_a_new_bucket_is_empty(bucket: Bucket, unique: str) -> None:
    assert bucket.name == unique
    assert (await bucket.load())[:2] == ({}, 0)
    assert await bucket.last_sequence() == 0
    assert await bucket.get("a") is None


async def test_what_is_put_is_there(bucket: Bucket) -> None:
    assert await bucket.put("a", b"1", expected_last=0) == 1
    assert await bucket.put("b", b"2", expected_last=1) == 2
    assert await bucket.put("a", b"\x00\xff\r\n", expected_last=2) == 3
    assert await bucket.get("a") == Entry("a", b"\x00\xff\r\n", 3)
    assert (await bucket.load())[:2] == (
        {"a": Entry("a", b"\x00\xff\r\n", 3), "b": Entry("b", b"2", 2)},
        3,
    )


async def test_the_newest_mark_is_found(bucket: Bucket) -> None:
    """With a deletion, too; a write without one leaves the mark before it."""
    first, second = Mark(1, 1, 1, "0" * 32), Mark(1, 2, 0, "f" * 32)
    assert (await bucket.load()).mark is None
    await bucket.put("a", b"1", expected_last=0, mark=first)
    assert (await bucket.load()).mark == first
    await bucket.delete("a", expected_last=1, mark=second)
    assert (await bucket.load()).mark == second
    await bucket.put("b", b"1", expected_last=2)
    assert (await bucket.load()).mark == second


async def test_what_is_deleted_is_gone_and_counts(bucket: Bucket) -> None:
    await bucket.put("a", b"1", expected_last=0)
    await bucket.put("b", b"2", expected_last=1)
    assert await bucket.delete("a", expected_last=2) == 3
    assert await bucket.get("a") is None
    assert (await bucket.load())[:2] == ({"b": Entry("b", b"2", 2)}, 3)
    assert await bucket.put("a", b"3", expected_last=3) == 4
    assert await bucket.get("a") == Entry("a", b"3", 4)


async def test_an_empty_value_is_a_value(bucket: Bucket) -> None:
    await bucket.put("a", b"", expected_last=0)
    assert await bucket.get("a") == Entry("a", b"", 1)


async def test_reopening_finds_everything(connect: Connect, bucket: Bucket, unique: str) -> None:
    await bucket.put("a", b"1", expected_last=0)
    other = await (await connect("reader")).bucket(unique)
    assert (await other.load())[:2] == ({"a": Entry("a", b"1", 1)}, 1)


async def test_buckets_do_not_share_a_sequence(connect: Connect, unique: str) -> None:
    store = await connect("writer")
    one, two = await store.bucket(f"{unique}_1"), await store.bucket(f"{unique}_2")
    await one.put("a", b"1", expected_last=0)
    assert await two.put("a", b"2", expected_last=0) == 1
    assert await one.get("a") == Entry("a", b"1", 1)


async def test_a_value_too_large_is_rejected(bucket: Bucket) -> None:
    await bucket.put("a", bytes(limits.RECORD_BYTES_MAX), expected_last=0)
    with pytest.raises(Rejected, match="key a: 262145 bytes are over"):
        await bucket.put("a", bytes(limits.RECORD_BYTES_MAX + 1), expected_last=1)
    assert await bucket.last_sequence() == 1


async def test_a_large_bucket_loads_whole(bucket: Bucket) -> None:
    """More entries and more bytes than one read asks for."""
    count = limits.STORE_READ_MAX * 2 + 7
    value = bytes(12 * 1024)
    await asyncio.gather(*(bucket.put(f"k{n}", value, expected_last=n) for n in range(count)))
    entries, last, *_ = await bucket.load()
    assert last == count
    assert [entry.sequence for entry in entries.values()] == list(range(1, count + 1))


# Fencing -----------------------------------------------------------------------------------------


async def test_a_deposed_writer_cannot_write_an_untouched_key(
    connect: Connect, bucket: Bucket, unique: str
) -> None:
    """The expectation is the bucket's, not the key's: after the new writer's first record every
    write of the old one fails, whatever it writes."""
    await bucket.put("a", b"old", expected_last=0)
    new = await (await connect("new writer")).bucket(unique)
    await new.put(EPOCH_KEY, b"2", expected_last=await new.last_sequence())
    for attempt in (
        bucket.put("a", b"late", expected_last=1),
        bucket.put("untouched", b"late", expected_last=1),
        bucket.delete("a", expected_last=1),
    ):
        with pytest.raises(SequenceConflict) as caught:
            await attempt
        assert (caught.value.expected, caught.value.last) == (1, 2)
    assert (await bucket.load())[0].keys() == {"a", EPOCH_KEY}
    assert await bucket.get("a") == Entry("a", b"old", 1)


async def test_the_fence_stops_a_pipelining_writer(
    connect: Connect, bucket: Bucket, unique: str
) -> None:
    """The old writer has two writes in flight when the new one's epoch record comes between them:
    its second one then finds the sequence it expects, and is stopped by the fence alone."""
    epoch = await bucket.put(EPOCH_KEY, b"1", expected_last=0)
    assert await bucket.put("a", b"old", expected_last=1, fence=epoch) == 2
    new = await (await connect("new writer")).bucket(unique)
    await new.put(EPOCH_KEY, b"2", expected_last=2)
    with pytest.raises(SequenceConflict) as caught:
        await bucket.put("a", b"late", expected_last=3, fence=epoch)
    assert caught.value.last == 3
    with pytest.raises(SequenceConflict):
        await bucket.delete("a", expected_last=3, fence=epoch)
    assert await new.put("a", b"new", expected_last=3, fence=3) == 4
    assert await new.delete("a", expected_last=4, fence=3) == 5


async def test_a_fence_without_a_record_refuses(bucket: Bucket) -> None:
    with pytest.raises(SequenceConflict):
        await bucket.put("a", b"1", expected_last=0, fence=7)
    assert (await bucket.load())[:2] == ({}, 0)


# Pipelining --------------------------------------------------------------------------------------


async def test_writes_in_flight_are_applied_in_order(bucket: Bucket) -> None:
    """More than fit in flight at once: the rest wait their turn, in order."""
    count = limits.STORE_IN_FLIGHT_MAX * 2
    sequences = await asyncio.gather(
        *(bucket.put(f"k{n % 10}", b"%d" % n, expected_last=n) for n in range(count))
    )
    assert sequences == list(range(1, count + 1))
    entries, last, *_ = await bucket.load()
    assert last == count
    assert {entry.value for entry in entries.values()} == {
        b"%d" % n for n in range(count - 10, count)
    }


async def test_a_refused_write_refuses_those_behind_it(bucket: Bucket) -> None:
    """The third of ten is not what the bucket expects: nothing after it is applied."""
    expected = [0, 1, 7, *range(3, 10)]
    results = await asyncio.gather(
        *(bucket.put(f"k{n}", b"x", expected_last=last) for n, last in enumerate(expected)),
        return_exceptions=True,
    )
    assert results[:2] == [1, 2]
    assert all(isinstance(result, SequenceConflict) for result in results[2:])
    assert (await bucket.load())[0].keys() == {"k0", "k1"}


async def test_one_of_two_writers_wins_each_sequence(
    connect: Connect, bucket: Bucket, unique: str
) -> None:
    other = await (await connect("other")).bucket(unique)
    won = {"one": 0, "other": 0}

    async def write(name: str, where: Bucket) -> None:
        for _ in range(30):
            last = await where.last_sequence()
            try:
                await where.put(name, b"%d" % won[name], expected_last=last)
            except SequenceConflict:
                continue
            won[name] += 1

    await asyncio.gather(write("one", bucket), write("other", other))
    assert await bucket.last_sequence() == sum(won.values())


# Reading while it changes -------------------------------------------------------------------------


async def test_load_is_one_moment_of_a_changing_bucket(
    connect: Connect, bucket: Bucket, unique: str
) -> None:
    """A writer changes eight keys without pause; whatever load() returns is a state, entries and
    last sequence together, that the bucket really had."""
    reader = await (await connect("reader")).bucket(unique)
    states: dict[int, dict[str, bytes]] = {0: {}}
    stop = False

    async def write() -> None:
        rng, last, state = random.Random(5), 0, {}
        while not stop:
            key = f"k{rng.randrange(8)}"
            if key in state and rng.random() < 0.3:
                last = await bucket.delete(key, expected_last=last)
                del state[key]
            else:
                state[key] = b"%d" % last
                last = await bucket.put(key, state[key], expected_last=last)
            states[last] = dict(state)

    writer = asyncio.create_task(write())
    found = [await reader.load() for _ in range(40)]
    stop = True
    await writer
    for entries, last, _ in found:
        assert {key: entry.value for key, entry in entries.items()} == states[last]
    assert len({each.last for each in found}) > 5, "the writer stood still: the test says nothing"


async def test_watch_gives_what_is_there_and_then_every_change(
    connect: Connect, bucket: Bucket, unique: str
) -> None:
    await bucket.put("a", b"1", expected_last=0)
    await bucket.put("b", b"2", expected_last=1)
    await bucket.delete("a", expected_last=2)
    reader = await (await connect("reader")).bucket(unique)
    async with asyncio.timeout(5.0), aclosing(reader.watch()) as entries:  # type: ignore[type-var]
        assert await anext(entries) == Entry("b", b"2", 2)
        await bucket.put("c", b"3", expected_last=3)
        assert await anext(entries) == Entry("c", b"3", 4)
        await bucket.put("b", b"4", expected_last=4)
        assert await anext(entries) == Entry("b", b"4", 5)
        await bucket.delete("c", expected_last=5)
        assert await anext(entries) == Entry("c", None, 6)


async def test_any_order_of_operations_equals_a_dictionary(connect: Connect, unique: str) -> None:
    """Random puts, deletes and reads, right and wrong expectations, against a plain dictionary."""
    bucket = await (await connect("writer")).bucket(unique)
    rng, model, last = random.Random(11), dict[str, Entry](), 0
    refused = 0
    for number in range(300):
        operation = rng.choice(["put", "put", "delete", "get", "load"])
        key, expected = f"k{rng.randrange(4)}", max(0, last + rng.choice([0, 0, 0, -1, 1]))
        if operation == "get":
            assert await bucket.get(key) == model.get(key)
            continue
        if operation == "load":
            assert (await bucket.load())[:2] == (model, last)
            continue
        value = b"%d" % number if operation == "put" else None
        try:
            if value is None:
                written = await bucket.delete(key, expected_last=expected)
            else:
                written = await bucket.put(key, value, expected_last=expected)
        except SequenceConflict as conflict:
            refused += 1
            written = conflict.last
        if expected != last:
            assert written == last, "refused, and told the real last sequence"
            continue
        last += 1
        assert written == last
        model.pop(key, None)
        if value is not None:
            model[key] = Entry(key, value, last)
    assert 30 < refused < 200


# Leases ------------------------------------------------------------------------------------------


async def test_a_lease_has_one_owner(connect: Connect, unique: str) -> None:
    store, other = await connect("one"), await connect("other")
    lease = await store.lease(unique, "master", "one", 5.0)
    assert lease is not None
    assert lease.owner == "one"
    assert await other.lease(unique, "master", "other", 5.0) is None
    assert await lease.renew()
    assert await lease.renew()
    assert await other.lease(unique, "slave", "other", 5.0) is not None


async def test_its_owner_may_take_a_lease_again(connect: Connect, unique: str) -> None:
    """A process that starts anew under its name within the time to live."""
    store = await connect("one")
    before = await store.lease(unique, "master", "one", 5.0)
    again = await store.lease(unique, "master", "one", 5.0)
    assert before is not None
    assert again is not None
    assert await again.renew()


async def test_a_released_lease_is_free_at_once(connect: Connect, unique: str) -> None:
    store, other = await connect("one"), await connect("other")
    lease = await store.lease(unique, "master", "one", 5.0)
    assert lease is not None
    await lease.release()
    taken = await other.lease(unique, "master", "other", 5.0)
    assert taken is not None
    assert not await lease.renew()
    await lease.release()
    assert await taken.renew(), "the former owner cannot release what is another's"


async def test_a_lease_ends_by_itself_and_is_lost(connect: Connect, unique: str) -> None:
    store, other = await connect("one"), await connect("other")
    lease = await store.lease(unique, "master", "one", 1.0)
    assert lease is not None
    taken = None
    async with asyncio.timeout(10.0):
        while taken is None:
            taken = await other.lease(unique, "master", "other", 1.0)
            await asyncio.sleep(0.05)
    assert not await lease.renew()
    assert await taken.renew()


async def test_renewing_keeps_a_lease_beyond_its_time(connect: Connect, unique: str) -> None:
    store, other = await connect("one"), await connect("other")
    lease = await store.lease(unique, "master", "one", 1.0)
    assert lease is not None
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 2.5
    while loop.time() < end_s:
        assert await lease.renew()
        assert await other.lease(unique, "master", "other", 1.0) is None
        await asyncio.sleep(0.1)


async def test_an_expired_lease_stays_lost(connect: Connect, unique: str) -> None:
    """A lease that no other took is lost all the same, because one could have."""
    lease = await (await connect("one")).lease(unique, "master", "one", 1.0)
    assert lease is not None
    other = await (await connect("other")).bucket(unique)
    async with asyncio.timeout(10.0):
        while await other.get("master") is not None:  # noqa: ASYNC110 (expiry is what we await)
            await asyncio.sleep(0.05)
    assert not await lease.renew()


async def test_too_short_a_lease_is_rejected(connect: Connect, unique: str) -> None:
    with pytest.raises(Rejected, match=r"time to live of 0\.5 s"):
        await (await connect("one")).lease(unique, "master", "one", 0.5)


async def test_a_lease_moves_no_other_bucket(connect: Connect, unique: str) -> None:
    store = await connect("one")
    bucket = await store.bucket(unique)
    await bucket.put("a", b"1", expected_last=0)
    lease = await store.lease(f"{unique}_leases", "master", "one", 1.0)
    assert lease is not None
    await lease.renew()
    await lease.release()
    assert await bucket.put("b", b"2", expected_last=1) == 2


async def test_a_lease_is_a_record_like_all_others(connect: Connect, unique: str) -> None:
    """Read by its type; the bare name that 0.1.0 wrote is its owner's too, who renews it."""
    one, other = await connect("one"), await connect("other")
    first = await one.lease(unique, "master", "m1", 2.0)
    assert first is not None
    bucket = await one.bucket(unique)
    found = await bucket.get("master")
    assert found is not None
    assert found.value is not None
    assert codec.decode_record(found.value, LeaseRecord, "master") == (LeaseRecord(owner="m1"), 0)
    await bucket.put("master", b"m1", expected_last=await bucket.last_sequence())
    assert await other.lease(unique, "master", "m2", 2.0) is None
    again = await other.lease(unique, "master", "m1", 2.0)
    assert again is not None
    assert await again.renew()


async def test_a_damaged_lease_is_nobodys(connect: Connect, unique: str) -> None:
    store = await connect("one")
    await store.lease(unique, "master", "m1", 2.0)
    bucket = await store.bucket(unique)
    found = await bucket.get("master")
    assert found is not None
    assert found.value is not None
    damaged = found.value[:-1] + b"?"
    await bucket.put("master", damaged, expected_last=await bucket.last_sequence())
    assert await store.lease(unique, "master", "m?", 2.0) is None
    assert await store.lease(unique, "master", "m1", 2.0) is None
