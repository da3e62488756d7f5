"""The bucket's writer, against a server that loses, delays and refuses in every order."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from slackwater.common.base.errors import DeadlineExceeded, Deposed, RolledBack, Unavailable
from slackwater.common.shell.marker import Marker
from slackwater.common.shell.persister import BucketWriter
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.common.store.base import EPOCH_KEY, Bucket, Entry, SequenceConflict
from slackwater.common.store.memory import SeededStoreFaults
from slackwater.common.store.witness import Content, Mark, digest_of
from slackwater.common.store.witness_file import MemoryWitness, Noted


class Owned:
    """A writer that has taken its bucket over, and what it told."""

    def __init__(
        self, sim: SimWorld, bucket: Bucket, fence: int, witness: MemoryWitness | None = None
    ) -> None:
        self.durable: list[Any] = []
        self.failures: list[BaseException] = []
        self.bucket = bucket
        self.told: list[Mark] = []
        self.witness = witness or MemoryWitness()

        async def tell(_bucket: str, mark: Mark) -> None:
            self.told.append(mark)

        self.writer = BucketWriter(
            bucket, fence, sim.clock, Random(0), self.durable.append, self.failures.append,
            Marker("b", {}, 1, self.witness, tell),
        )  # fmt: skip

    @classmethod
    async def take(
        cls, sim: SimWorld, wrap: Any = None, witness: MemoryWitness | None = None
    ) -> "Owned":
        bucket = await sim.client("owner").store.bucket("b")
        fence = await bucket.put(EPOCH_KEY, b"epoch", expected_last=await bucket.last_sequence())
        return cls(sim, wrap(bucket) if wrap else bucket, fence, witness)

    async def settle(self) -> None:
        async with asyncio.timeout(500.0):
            while self.writer.waiting and not self.failures:  # noqa: ASYNC110 (virtual time)
                await asyncio.sleep(0.01)


class Losing:
    """A bucket whose server loses something at a time, and takes nothing from then on."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    async def put(self, key: str, value: bytes, **options: int) -> int:
        if self.lost:
            raise DeadlineExceeded("gone")
        return await self._bucket.put(key, value, **options)


@pytest.mark.parametrize("seed", range(10))
def test_every_write_becomes_durable_once_and_in_order(seed: int) -> None:
    async def main() -> None:
        sim = SimWorld(seed)
        owned = await Owned.take(sim)
        sim.storage.faults = SeededStoreFaults(Random(seed), 0.1, 0.1, 0.3)
        model: dict[str, bytes] = {}
        rng = Random(seed)
        for number in range(200):
            key = f"k{rng.randrange(40)}"
            value = None if rng.random() < 0.2 and key in model else str(number).encode()
            owned.writer.write(key, value, number)
            if value is None:
                del model[key]
            else:
                model[key] = value
            assert owned.writer.waiting + len(owned.durable) == number + 1
            if rng.random() < 0.1:
                await asyncio.sleep(rng.uniform(0.0, 1.0))
        await owned.settle()
        assert owned.failures == []
        assert sorted(owned.durable) == list(range(200))
        entries, last, *_ = await owned.bucket.load()
        assert {k: e.value for k, e in entries.items() if k != EPOCH_KEY} == model
        assert last == 201  # Not one write more than there were.
        assert owned.told[-1] == (await owned.witness.read()).mark == Content(model).mark(1, last)
        assert owned.told == sorted(owned.told), "each newer than the one before"
        assert (await owned.witness.read()).digests == {
            key: f"{digest_of(key, value):032x}" for key, value in model.items()
        }
        assert (await owned.bucket.load()).mark == owned.told[-1]

    run_simulated(main())


def test_one_group_of_writes_is_noted_at_a_time() -> None:
    """A witness that lags may not be overtaken: what is told durable later would be told first."""

    class Slow(MemoryWitness):
        at_once = 0
        most = 0

        async def add(self, writes: Sequence[Noted], mark: Mark) -> None:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            await asyncio.sleep(0.5)
            await super().add(writes, mark)
            self.at_once -= 1

    async def main() -> None:
        sim = SimWorld(1)
        slow = Slow()
        owned = await Owned.take(sim, witness=slow)
        for number in range(5):
            owned.writer.write(f"k{number}", b"v", number)
            await asyncio.sleep(0.1)
            assert owned.writer.waiting + len(owned.durable) == number + 1
        await owned.settle()
        assert slow.most == 1
        assert owned.durable == list(range(5))

    run_simulated(main())


class Straggler:
    """A bucket whose chosen write times out, and arrives at the server only after its repetition
    was begun: as a message that sat in some buffer."""

    def __init__(self, bucket: Bucket, late: bytes) -> None:
        self._bucket = bucket
        self._late = late
        self.strays: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    async def put(self, key: str, value: bytes, **options: int) -> int:
        if value == self._late:
            self._late = b"none"
            self.strays.append((key, value, options))
            raise DeadlineExceeded("too late")
        if self.strays:
            stray_key, stray_value, stray_options = self.strays.pop()
            try:
                await self._bucket.put(stray_key, stray_value, **stray_options)
            except SequenceConflict:
                self.strays.append("refused")
        return await self._bucket.put(key, value, **options)


@pytest.mark.parametrize("late", range(10))
def test_a_late_copy_of_a_lost_write_does_no_harm(late: int) -> None:
    async def main() -> None:
        sim = SimWorld(late)
        owned = await Owned.take(sim, lambda bucket: Straggler(bucket, b"%d" % late))
        for number in range(10):
            owned.writer.write(f"k{number % 3}", b"%d" % number, number)
        await owned.settle()
        assert owned.failures == []
        entries, last, *_ = await owned.bucket.load()
        assert last == 11
        assert {key: entry.value for key, entry in entries.items() if key != EPOCH_KEY} == {
            "k0": b"9",
            "k1": b"7",
            "k2": b"8",
        }

    run_simulated(main())


def test_nothing_of_a_deposed_writer_in_flight_slips_in() -> None:
    """The new writer's epoch record moves the sequence to what the second of the old one's writes
    expects: only the fence keeps it out."""

    async def main() -> None:
        sim = SimWorld(2)
        owned = await Owned.take(sim)
        other = await sim.client("other").store.bucket("b")
        await other.put(EPOCH_KEY, b"newer", expected_last=1)
        for number in range(20):
            owned.writer.write(f"k{number}", b"x", number)
        await owned.settle()
        assert isinstance(owned.failures[0], Deposed)
        assert "another instance has taken it over" in str(owned.failures[0])
        assert owned.durable == []
        assert set((await other.load())[0]) == {EPOCH_KEY}

    run_simulated(main())


def test_a_server_that_lost_records_is_not_believed() -> None:
    """Its directory was replaced by an older copy: the last sequence is behind what it said."""

    class Older(Losing):
        async def last_sequence(self) -> int:
            return 1 if self.lost else await self._bucket.last_sequence()

    async def main() -> None:
        older: Any = None

        def wrap(bucket: Bucket) -> Any:
            nonlocal older
            older = Older(bucket)
            return older

        owned = await Owned.take(SimWorld(3), wrap)
        owned.writer.write("a", b"1", 1)
        await owned.settle()
        older.lost = True
        owned.writer.write("a", b"2", 2)
        await owned.settle()
        assert isinstance(owned.failures[0], RolledBack)
        assert "its last write is 1, but 2 was stored" in str(owned.failures[0])

    run_simulated(main())


def test_a_store_that_stays_away_ends_the_writer_within_its_budget() -> None:
    async def main() -> None:
        sim = SimWorld(4)
        owned = await Owned.take(sim)
        sim.storage.stop()
        owned.writer.write("a", b"1", 1)
        await owned.settle()
        assert isinstance(owned.failures[0], Unavailable)
        assert owned.durable == []
        assert sim.clock.now_s() < 1_000_000 + 70.0

    run_simulated(main())


def test_a_store_that_comes_back_gets_all_that_waited() -> None:
    async def main() -> None:
        sim = SimWorld(5)
        owned = await Owned.take(sim)
        sim.storage.stop()
        for number in range(1000):
            owned.writer.write("a", b"%d" % number, number)
        await asyncio.sleep(20.0)
        assert owned.writer.in_doubt
        sim.storage.start()
        await owned.settle()
        assert owned.failures == []
        assert owned.durable == list(range(1000))
        assert await owned.bucket.get("a") == Entry("a", b"999", 1001)
        assert owned.writer.in_doubt == ""

    run_simulated(main())


def test_a_step_that_fails_when_its_record_is_durable_ends_the_writer() -> None:
    """It was an exception of a task that nobody looked at: the service went on without the step."""

    def broken(ticket: Any) -> None:
        raise ValueError("injected")

    async def main() -> None:
        owned = await Owned.take(SimWorld(1))
        owned.writer._on_durable = broken
        owned.writer.write("a", b"1", 1)
        async with asyncio.timeout(60.0):
            while not owned.failures:  # noqa: ASYNC110 (virtual time)
                await asyncio.sleep(0.01)
        assert str(owned.failures[0]) == "injected"

    run_simulated(main())


@pytest.mark.parametrize("left", [None, 1], ids=["no epoch", "an older epoch"])
def test_a_server_whose_epoch_is_gone_or_older_was_rolled_back(left: int | None) -> None:
    class Emptied(Losing):
        async def get(self, key: str) -> Entry | None:
            found = await self._bucket.get(key)
            if not self.lost or found is None:
                return found
            return None if left is None else replace(found, sequence=found.sequence - left)

    async def main() -> None:
        emptied: Any = None

        def wrap(bucket: Bucket) -> Any:
            nonlocal emptied
            emptied = Emptied(bucket)
            return emptied

        owned = await Owned.take(SimWorld(3), wrap)
        emptied.lost = True
        owned.writer.write("a", b"1", 1)
        await owned.settle()
        assert isinstance(owned.failures[0], RolledBack)
        assert "its epoch record is gone, or an older one" in str(owned.failures[0])

    run_simulated(main())
