"""A bus server whose files were cut off, damaged or replaced: nothing that was acknowledged is
missing without a word. A writer that lives writes it back; one that starts says what is lost, and
waits for an operator."""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from tests.ports import free_port
from tests.waiting import soon

from slackwater.common.base.codec import encode_record
from slackwater.common.base.errors import RecordsMissing, RolledBack
from slackwater.common.bus.nats import NatsBus
from slackwater.common.bus.server import NatsServer
from slackwater.common.shell.definition import ServiceDefinition
from slackwater.common.shell.own_buckets import OwnBuckets
from slackwater.common.shell.peers import Peers
from slackwater.common.shell.world import World, live_world
from slackwater.common.store.accepted import accept
from slackwater.common.store.rebuilding import rebuild
from slackwater.common.store.snapshots import remove, streams
from slackwater.schemas.service import LeaseRecord

pytestmark = [pytest.mark.live, pytest.mark.timeout(60)]

BUCKET: Final = "jobs"
COUNT: Final = 60
CASES: Final = [0, 1, 2, 3, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(4, 25))]
"""With two ends of the server and four damages, 200 in all."""


class Life:
    """A life of the only writer of the bucket."""

    def __init__(self, world: World) -> None:
        async def say_nothing(_effect: object) -> None: ...

        definition = ServiceDefinition(
            service="master",
            id="main",
            core=None,  # type: ignore[arg-type]
            buckets={BUCKET: LeaseRecord},
        )
        self.world = world
        self.durable: list[Any] = []
        self.failures: list[BaseException] = []
        peers = Peers("device", "d1", world.bus, world.clock, say_nothing)  # It has none.
        self.own = OwnBuckets(
            definition, world, "master.main", "a test", peers, self.durable.append,
            self.failures.append,
        )  # fmt: skip
        self.written: dict[str, bytes] = {}

    @classmethod
    @asynccontextmanager
    async def begun(cls, server: NatsServer, folder: Path) -> AsyncIterator["Life"]:
        """A life whose buckets are not taken over yet."""
        async with live_world(server.url, "master-main", state_dir=str(folder)) as world:
            life = cls(world)
            try:
                yield life
            finally:
                life.own.close()

    async def take(self) -> dict[str, bytes]:
        """Take the bucket over; return its records. Raises RecordsMissing."""
        recovery = await self.own.take()
        await self.own.open()
        return recovery.contents[BUCKET]

    async def write(self, rng: random.Random, count: int) -> None:
        """Write, overwrite and delete; return once all is durable, or the writer failed."""
        for _ in range(count):
            key = f"r{rng.randrange(40)}"
            value = None
            if key not in self.written or rng.random() < 0.8:
                owner = str(rng.random()) + "x" * rng.randrange(200)
                value = encode_record(LeaseRecord(owner=owner), 1)
            if value is None:
                del self.written[key]
            else:
                self.written[key] = value
            self.own.writers[BUCKET].write(key, value, key)
        await soon(self.settled)

    def settled(self) -> bool:
        return bool(self.failures) or not self.own.writers[BUCKET].waiting


def flip(files: list[Path], rng: random.Random) -> None:
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(files: list[Path], rng: random.Random) -> None:
    path = rng.choice(files)
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def blocks(server: NatsServer) -> list[Path]:
    found = sorted(server.state_dir.glob(f"jetstream/*/streams/KV_{BUCKET}/msgs/*.blk"))
    return [path for path in found if path.stat().st_size]


class Older:
    """The server's folder as it was some writes ago."""

    def __init__(self, server: NatsServer) -> None:
        self._folder = server.state_dir / "jetstream"
        self._copy = server.state_dir.with_name("older")

    def keep(self) -> None:
        shutil.copytree(self._folder, self._copy)

    def back(self) -> None:
        shutil.rmtree(self._folder)
        shutil.copytree(self._copy, self._folder)


@asynccontextmanager
async def damaged(
    tmp_path: Path, how: str, killed: bool, rng: random.Random
) -> AsyncIterator[tuple[NatsServer, Life, Callable[[], None]]]:
    """A server, a life that wrote COUNT records, and what ends, damages and starts the server."""
    server = NatsServer(tmp_path / "nats", port=free_port())
    older = Older(server)
    server.start()

    def strike() -> None:
        server.kill() if killed else server.stop()
        match how:
            case "flip":
                flip(blocks(server), rng)
            case "cut":
                cut(blocks(server), rng)
            case "older":
                older.back()
            case "emptied":
                shutil.rmtree(server.state_dir / "jetstream")
        server.start()

    try:
        async with Life.begun(server, tmp_path / "state") as life:
            assert await life.take() == {}
            await life.write(rng, COUNT // 2)
            older.keep()
            await life.write(rng, COUNT // 2)
            yield server, life, strike
    finally:
        server.stop()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
@pytest.mark.parametrize("how", ["flip", "cut", "older", "emptied"])
async def test_a_writer_that_starts_says_what_is_lost(
    how: str, killed: bool, case: int, tmp_path: Path
) -> None:
    rng = random.Random(f"{case}{how}{killed}")
    async with damaged(tmp_path, how, killed, rng) as (server, before, strike):
        before.own.close()
        await asyncio.to_thread(strike)
        async with Life.begun(server, tmp_path / "state") as life:
            why = ""
            try:
                found = await life.take()
            except RecordsMissing as error:
                why = str(error)
            if not why:
                assert found == before.written, "records are missing, and nobody said so"
                assert how in ("flip", "cut"), "the damage was beside the records"
                return
            assert f"bucket {BUCKET}: " in why
            assert f"slackwater bus accept {BUCKET}" in why
            assert isinstance(life.world.bus, NatsBus)
            await rebuild(life.world.bus, BUCKET)
            accepted = await accept(life.world.store, BUCKET, "a test", 1.0)
            assert len(await life.take()) == accepted.count
            await life.write(rng, 5)
            assert life.failures == []


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
@pytest.mark.parametrize("how", ["flip", "cut", "older", "emptied"])
async def test_a_writer_that_lives_writes_back_what_is_lost(
    how: str, killed: bool, case: int, tmp_path: Path
) -> None:
    """At its next write, or at the next look; nothing is missing afterwards."""
    rng = random.Random(f"{case}{how}{killed}")
    async with damaged(tmp_path, how, killed, rng) as (server, life, strike):
        await asyncio.to_thread(strike)
        await soon(lambda: life.world.bus.connected)
        if rng.random() < 0.5:
            await life.write(rng, 3)
        lost = next((each for each in life.failures if isinstance(each, RolledBack)), None)
        assert len(life.failures) == (lost is not None), life.failures
        if lost is None:
            try:
                await life.own.look()
            except RolledBack as error:
                lost = error
        unkept = lost is not None and not await written_back(life, lost)
        life.own.close()
        async with Life.begun(server, tmp_path / "state") as after:
            if unkept:
                with pytest.raises(RecordsMissing, match="missing: "):
                    await after.take()
            else:
                assert await after.take() == life.written


async def written_back(life: Life, lost: RolledBack) -> bool:
    """False: the server takes records into a damaged file, acknowledges them and has them not."""
    try:
        told = await life.own.write_back(lost)
    except RolledBack as error:
        if not isinstance(error.__cause__, RecordsMissing):
            raise
        return False
    assert "were written back from memory" in str(told)
    return True


async def test_a_rebuilding_that_was_cut_short_is_ended_by_the_next(tmp_path: Path) -> None:
    """The bucket was removed, and the records are in the second one alone."""
    with NatsServer(tmp_path / "nats") as server:
        async with Life.begun(server, tmp_path / "state") as life:
            await life.take()
            await life.write(random.Random(1), COUNT)
            life.own.close()
            bus, store = life.world.bus, life.world.store
            assert isinstance(bus, NatsBus)
            second, last = await store.bucket(f"rescued_{BUCKET}"), 0
            for key, value in {**life.written, "_whole": b""}.items():
                last = await second.put(key, value, expected_last=last)
            await remove(bus, f"KV_{BUCKET}")
            await rebuild(bus, BUCKET)
            assert (await (await store.bucket(BUCKET)).load()).records == life.written
            assert await streams(bus) == [f"KV_{BUCKET}"]
