"""Memory that a device maps, and gives back, or loses: nobody else ever has it."""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from tests.integration.memory import conftest

from slackwater.common.base import codec
from slackwater.common.base.errors import AccessRefused
from slackwater.common.domains.memory import frames, trailer
from slackwater.common.transport.negotiate import live_fabrics
from slackwater.schemas.base import NodeId
from slackwater.schemas.memory import (
    DeviceHello,
    DeviceId,
    EvictSlabs,
    MapSlab,
    NotMapped,
    SlabMapped,
    UnmapSlab,
)
from slackwater.services.slabd.events import MemorySampled

Make = Callable[..., Any]
SLAB_BYTES = 64 * 1024


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "SLAB_BYTES", SLAB_BYTES)


class Borrower:
    """A device that keeps every mapping that it was ever given."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.slab: SlabMapped | None = None

    @classmethod
    async def connect(cls, c: Any, id: str) -> "Borrower":
        [(kind, address)] = c.lenders[0].heartbeat(0.0).addresses
        hello = DeviceHello(
            device=DeviceId(id), node=NodeId("n"), incarnation=1, token=conftest.TOKEN
        )
        fabric = live_fabrics(kind)[kind]
        return cls(await fabric.connect(address, codec.encode(hello), deadline_s=10.0))

    async def hear(self, kind: type[Any]) -> Any:
        """The next message of this kind, whatever else comes before."""
        async with asyncio.timeout(10):
            while True:
                message = frames.to_device(await self.channel.receive())
                if isinstance(message, kind):
                    return message

    async def map(self) -> Any:
        """The region, once the lender has a slab."""
        while True:
            self.channel.send(frames.pack(MapSlab(request=1, span=0, secret=os.urandom(8).hex())))
            answer = await self.hear((SlabMapped, NotMapped))  # type: ignore[arg-type]
            if isinstance(answer, SlabMapped):
                self.slab = answer
                return await self.channel.open(answer.key)
            await asyncio.sleep(0.0005)

    def unmap(self) -> None:
        assert self.slab is not None
        unmap = UnmapSlab(slab=self.slab.slab, generation=self.slab.generation)
        self.channel.send(frames.pack(unmap))


@asynccontextmanager
async def lent_to(c: Any, *ids: str) -> AsyncIterator[list[Borrower]]:
    """Devices of a lender with one slab."""
    await c.lend(1, slabs=1, evict_s=0.05)
    hands = [await Borrower.connect(c, id) for id in ids]
    try:
        yield hands
    finally:
        for hand in hands:
            await hand.channel.close()


def words_of(region: Any) -> Any:
    return np.frombuffer(region.view, np.int64)


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes that a lender counts as its own memory, at each look."""
    seen: list[int] = []
    monkeypatch.setattr(
        conftest.Machine,
        "sample",
        lambda self, own: seen.append(own) or MemorySampled(self.total_bytes, self.others_bytes),
    )
    return seen


async def test_memory_that_was_returned_is_never_lent_again(
    cluster: Make, owned: list[int]
) -> None:
    """A thousand times from hand to hand, each of them reading and writing on through mappings of
    what it gave back: none sees a byte of the next one's, nor of the one before."""
    async with cluster("shm") as c, lent_to(c, "d1", "d2") as hands:
        kept: deque[tuple[int, Any]] = deque(maxlen=5)
        places = slice(0, None, 512)
        for turn in range(1, 1001):
            mine = words_of(await hands[turn % 2].map())
            data = mine[: SLAB_BYTES // 8][places]
            assert not data.any()
            data[:] = turn
            for former, other in kept:
                theirs = other[: SLAB_BYTES // 8][places]
                assert not theirs.any() or (theirs == former).all()
                theirs[:] = former
            assert (data == turn).all()
            assert trailer.fence_state(int(mine[SLAB_BYTES // 8])) == trailer.LENT
            hands[turn % 2].unmap()
            kept.append((turn, mine))
        await c.until(lambda: len(c.lenders[0].core.having("free")) == 1)
        assert max(owned) <= SLAB_BYTES + trailer.TRAILER_BYTES
        assert len(c.lenders[0].core.slabs) == 1


async def test_memory_that_was_taken_by_force_is_never_lent_again(cluster: Make) -> None:
    """The device neither answers EVICT nor unmaps; another one has the next slab."""
    async with cluster("shm") as c, lent_to(c, "d1", "d2") as (stubborn, other):
        old = words_of(await stubborn.map())
        old[:8] = 7
        c.machines[0].others_bytes = c.machines[0].total_bytes
        await stubborn.hear(EvictSlabs)
        await c.until(lambda: not c.lenders[0].core.slabs)
        assert trailer.fence_state(int(old[SLAB_BYTES // 8])) == trailer.REVOKED
        assert not old[:8].any(), "its pages are the machine's"
        c.machines[0].others_bytes = 0
        new = words_of(await other.map())
        new[:8] = 9
        assert not old[:8].any()
        old[:16] = 7
        assert (new[:8] == 9).all()
        assert not new[8:16].any()


async def test_memory_behind_a_key_is_zeroed_and_lent_again(cluster: Make) -> None:
    """Over tcp nobody maps it: with the key the way to it is gone."""
    async with cluster("tcp") as c, lent_to(c, "d1", "d2") as (first, second):
        memory = next(iter(c.lenders[0].slabs.regions.values()))
        old = await first.map()
        await first.channel.write(memoryview(b"secret"), old, 100)
        first.unmap()
        new = await second.map()
        assert next(iter(c.lenders[0].slabs.regions.values())) is memory
        found = bytearray(4096)
        await second.channel.read(new, 0, memoryview(found))
        assert not any(found)
        with pytest.raises(AccessRefused):
            await first.channel.read(old, 0, memoryview(found))
