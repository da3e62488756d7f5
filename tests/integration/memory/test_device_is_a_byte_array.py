"""A device against a plain byte array: whatever is asked in one burst, of whatever length and
alignment, over each transport and resilience mode, while lenders come and go."""

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from slackwater.common.transport import transfers
from slackwater.loadgen.memory.nbd_client import Ask, NbdClient
from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.pages import kernels as k
from slackwater.memory.store import PAGE_BYTES

MIB = 1024 * 1024
KIB = 1024
SIZE = 4 * MIB
CLIENTS = 4
TOUCHES = 8
DEADLINE_S = 30.0
"""A round that takes so long hangs."""
LENGTHS = (
    1, 100, 511, 512, 1024, 4095, 4096, 4097, 8192, 12_345, 20_480, 65_535, 65_536, 65_537,
    69_632, 131_072, 140_000, 266_240,
)  # fmt: skip
SWAPPED = (*4 * (4096,), 65_536, 65_536)
GAPS = (0, 0, 0, 1, 511, 512, 4096, 5000)
KINDS = (*6 * (nbd.WRITE,), *3 * (nbd.READ,), nbd.WRITE_ZEROES, nbd.TRIM)
Make = Callable[..., Any]


def burst(rng: random.Random) -> list[Ask]:
    """Requests in any order that share no byte, but many a page: what they come to together does
    not depend on the order in which they are carried out."""
    asks: list[Ask] = []
    swaps = rng.random() < 0.3  # Whole pages alone, and many of them.
    at = rng.randrange(SIZE // 512) * 512 if rng.random() < 0.7 else rng.randrange(SIZE)
    for _ in range(128 if swaps else rng.choice((2, 3, 8, 24))):
        at += rng.choice(GAPS)
        if swaps or rng.random() < 0.5:
            at = -(-at // PAGE_BYTES) * PAGE_BYTES
        length = min(rng.choice(SWAPPED if swaps else LENGTHS), SIZE - at)
        if length < 1:
            break
        kind = rng.choice(KINDS)
        data = rng.randbytes(length) if kind == nbd.WRITE else b""
        changes = kind != nbd.READ
        flags = nbd.FUA if changes and rng.random() < 0.05 else 0
        asks.append(Ask(kind, at, length, data, flags))
        at += length
    if rng.random() < 0.1:
        asks.append(Ask(nbd.FLUSH, 0, 0))
    rng.shuffle(asks)
    return asks


def applied(truth: bytearray, ask: Ask) -> None:
    begin, end = ask.offset, ask.offset + ask.length
    if ask.kind == nbd.WRITE:
        truth[begin:end] = ask.data
    elif ask.kind == nbd.WRITE_ZEROES:
        truth[begin:end] = bytes(ask.length)
    elif ask.kind == nbd.TRIM:  # It lets whole pages go.
        begin, end = -(-begin // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES
        truth[begin:end] = bytes(max(0, end - begin))


def described(ask: Ask) -> str:
    name = {nbd.WRITE: "write", nbd.READ: "read", nbd.TRIM: "trim", nbd.FLUSH: "flush"}
    return f"{name.get(ask.kind, 'zeroes')} {ask.offset}+{ask.length}"


def differing(found: bytes, wanted: bytes) -> str:
    wrong = [i for i in range(len(wanted)) if found[i] != wanted[i]]
    return f"{len(wrong)} bytes differ, from {wrong[0]} to {wrong[-1]}"


class Run:
    """Clients whose bursts are under way together, and the byte array."""

    def __init__(self, c: Any, seed: int, clients: Sequence[NbdClient]) -> None:
        self.c, self.rng, self.clients = c, random.Random(seed), clients
        self.truth = bytearray(SIZE)
        self.asked = 0

    async def round(self) -> None:
        asks = burst(self.rng)
        shares = [asks[i :: len(self.clients)] for i in range(len(self.clients))]
        if self.rng.random() < 0.5:
            shares = [asks]
        async with asyncio.timeout(DEADLINE_S):
            told = await asyncio.gather(
                *(client.burst(share) for client, share in zip(self.clients, shares, strict=False))
            )
        together = ", ".join(map(described, asks))
        for share, outcomes in zip(shares, told, strict=True):
            for ask, outcome in zip(share, outcomes, strict=True):
                assert isinstance(outcome, bytes), (described(ask), outcome, together)
                if ask.kind == nbd.READ:
                    wanted = self.truth[ask.offset : ask.offset + ask.length]
                    if outcome != wanted:
                        raise AssertionError(
                            f"{described(ask)}: {differing(outcome, wanted)}, in {together}"
                        )
        for ask in asks:
            applied(self.truth, ask)
        self.asked += len(asks)
        for ask in self.rng.sample(asks, min(2, len(asks))):
            await self.check(ask.offset, ask.length)

    async def check(self, offset: int, length: int) -> None:
        if length:
            async with asyncio.timeout(DEADLINE_S):
                found = await self.clients[0].read(offset, length)
            wanted = self.truth[offset : offset + length]
            if found != wanted:
                raise AssertionError(f"read {offset}+{length}: {differing(found, wanted)}")

    async def check_all(self) -> None:
        for offset in range(0, SIZE, MIB):
            await self.check(offset, MIB)

    async def fault(self) -> None:
        """A lender takes everything back, dies, or has room again."""
        number = self.rng.randrange(len(self.c.lenders))
        machine = self.c.machines[number]
        what = self.rng.choice(("evict", "evict", "lose", "lend", "lend"))
        if what == "lose":
            for session in tuple(self.c.lenders[number].sessions._sessions.values()):
                session.channel.lose("a test")
        else:
            machine.others_bytes = machine.total_bytes if what == "evict" else 0

    async def play(self, rounds: int, faults_every: int) -> None:
        for number in range(rounds):
            if faults_every and number % faults_every == faults_every - 1:
                await self.fault()
            await self.round()
        await self.check_all()
        for client in self.clients:
            await client.flush()
        assert self.c.assembly.options.backup.read_bytes() == self.truth
        words = self.c.assembly.device.table.words
        await self.c.until(lambda: words[k.TAIL] == words[k.HEAD])  # No entry is held for ever.


async def touched(c: Any, client: NbdClient) -> None:
    """Until all spans are mapped: one for which lenders had no slab is asked for when it is hot
    again."""
    spans = len(c.assembly.device.table.state)
    for attempt in range(TOUCHES):
        await client.write(0, bytes(SIZE))
        try:
            await c.mapped(spans, 3.0)
            return
        except TimeoutError:
            if attempt == TOUCHES - 1:
                raise


async def compare(
    cluster: Make, kind: str, resilience: str, lenders: int, seed: int, rounds: int, faults: int
) -> None:
    async with cluster(kind) as c:
        width = {"disk": 1, "8+2": 10, "2-copies": 2}[resilience]
        await c.lend(lenders, slabs=1 + 5 * width // lenders)
        assembly = await c.export(SIZE, resilience=resilience)
        clients = [await NbdClient.connect(assembly.options.socket) for _ in range(CLIENTS)]
        run = Run(c, seed, clients)
        try:
            await touched(c, clients[0])
            await run.play(rounds, faults)
        finally:
            for client in clients:
                await client.close()


SYSTEMS = pytest.mark.parametrize(
    ("kind", "resilience", "lenders"),
    [
        ("shm", "disk", 2),
        ("tcp", "disk", 9),
        ("shm", "8+2", 11),
        ("tcp", "8+2", 11),
        ("shm", "2-copies", 4),
        ("tcp", "2-copies", 2),
    ],
)


@pytest.fixture(autouse=True)
def all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel uses all its streams, as it does under more load than these tests have time for:
    what was asked later may be answered first."""
    monkeypatch.setattr(transfers, "_FULL_BYTES", 1)


@SYSTEMS
async def test_a_device_is_a_byte_array(
    cluster: Make, kind: str, resilience: str, lenders: int
) -> None:
    """Some hundred requests: a second or two for each system, the lenders' start included."""
    await compare(cluster, kind, resilience, lenders, seed=1, rounds=40, faults=8)


EACH_TIME = [("shm", "8+2", 0), ("tcp", "2-copies", 0)]
"""The others are of `make nightly`."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "resilience", "seed"),
    [
        pytest.param(
            *system,
            seed,
            marks=pytest.mark.slow if (*system, seed) in EACH_TIME else pytest.mark.nightly,
        )
        for system in itertools.product(("shm", "tcp"), ("disk", "8+2", "2-copies"))
        for seed in range(8)
    ],
)
async def test_a_device_stays_a_byte_array(
    cluster: Make, kind: str, resilience: str, seed: int
) -> None:
    """Thousands of requests, half a minute for each seed and system, on 2 to 16 lenders."""
    least = 10 if resilience == "8+2" else 2
    lenders = random.Random(seed).randint(least, 16)
    await compare(cluster, kind, resilience, lenders, seed=seed + 2, rounds=600, faults=10)


async def test_an_unaligned_write_keeps_its_bytes_before_a_large_one(cluster: Make) -> None:
    """The large write's payload is streamed through the buffer in which the small one's lies."""
    async with cluster("shm") as c:
        await c.lend(1)
        assembly = await c.export(1 * MIB)
        client = await NbdClient.connect(assembly.options.socket)
        await client.write(0, bytes(MIB))
        await c.mapped(1)
        for number in range(1, 9):
            small, large = bytes([number]) * 512, bytes([100 + number]) * (256 * KIB)
            outcomes = await client.burst(
                [
                    Ask(nbd.WRITE, 512, len(small), small),
                    Ask(nbd.WRITE, 64 * KIB, len(large), large),
                ]
            )
            assert outcomes == [b"", b""]
            assert await client.read(0, 1536) == bytes(512) + small + bytes(512)
            assert await client.read(64 * KIB, len(large)) == large
        await client.close()
