"""The spill tier: blobs go down in order of use, come back as they were, or are refused whole."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slackwater.common.base.errors import ConfigRejected, Rejected, Unavailable
from slackwater.memory.spill.spill import DiskTier, MemoryTier, RemoteTier, SpillStore
from slackwater.memory.store import PAGE_BYTES, Pages


class Plain:
    """A PageStore of plain memory that can be away."""

    def __init__(self, pages: int) -> None:
        self.data = np.zeros((pages, PAGE_BYTES), np.uint8)
        self.away = False

    @property
    def page_count(self) -> int:
        return len(self.data)

    def read_now(self, pages: Pages, target: memoryview) -> int:
        return 0

    async def read_pages(self, pages: Pages, target: memoryview) -> None:
        if self.away:
            raise Unavailable("no lender answers")
        target[:] = self.data[pages].reshape(-1).data

    async def write_pages(self, pages: Pages, source: memoryview) -> None:
        if self.away:
            raise Unavailable("no lender answers")
        self.data[pages] = np.frombuffer(source, np.uint8).reshape(-1, PAGE_BYTES)

    async def discard(self, first: int, count: int) -> None:
        self.data[first : first + count] = 0

    async def flush(self) -> None:
        """It has no backup."""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[SpillStore, Plain]]:
    """Room for 10,000 bytes, 4 pages and 20,000 bytes."""

    def made(**options: int) -> tuple[SpillStore, Plain]:
        plain = Plain(4)
        disk = DiskTier(tmp_path / "spill", 20_000)
        return SpillStore([MemoryTier(10_000), RemoteTier(plain), disk], **options), plain

    return made


async def test_what_is_used_least_goes_down_tier_by_tier(make: Callable[..., object]) -> None:
    store, _ = make()  # type: ignore[misc]
    for i in range(8):
        await store.put(f"b{i}", bytes([i]) * 5000)
        if i == 1:
            assert await store.get("b0") == bytes(5000)  # So b1 goes first.
    where = {f"b{i}": store.tier(f"b{i}") for i in range(8)}
    assert where == {
        "b6": "memory", "b7": "memory", "b5": "remote", "b4": "remote",
        "b0": "disk", "b1": "disk", "b2": "disk", "b3": "disk",
    }  # fmt: skip
    with pytest.raises(Rejected, match="no room"):
        await store.put("b8", bytes(5000))
    for i in range(8):
        assert await store.get(f"b{i}") == bytes([i]) * 5000
    await store.drop("b7")
    await store.drop("b7")
    assert store.tier("b0") == "disk"
    await store.get("b0")
    assert store.tier("b0") == "memory"
    await store.put("b8", bytes(5000))


async def test_a_refused_blob_leaves_the_old_one(make: Callable[..., object]) -> None:
    store, _ = make(blobs_max=2)  # type: ignore[misc]
    await store.put("a", b"old")
    with pytest.raises(Rejected, match="larger than the tier"):
        await store.put("a", bytes(30_000))
    assert await store.get("a") == b"old"
    await store.put("a", b"new")
    assert await store.get("a") == b"new"
    await store.put("b", b"")
    with pytest.raises(Rejected, match="2 blobs"):
        await store.put("c", b"")
    with pytest.raises(KeyError):
        await store.get("c")


async def test_without_lenders_blobs_go_to_disk(make: Callable[..., object]) -> None:
    store, plain = make()  # type: ignore[misc]
    plain.away = True
    for i in range(4):
        await store.put(f"b{i}", bytes([i]) * 5000)
    assert [store.tier(f"b{i}") for i in range(4)] == ["disk", "disk", "memory", "memory"]


async def test_damage_and_absence_are_told(make: Callable[..., object], tmp_path: Path) -> None:
    store, plain = make()  # type: ignore[misc]
    for i in range(3):
        await store.put(f"b{i}", bytes([i + 1]) * 5000)
    assert store.tier("b0") == "remote"
    plain.data[:, 7] ^= 1
    with pytest.raises(Unavailable, match="damaged"):
        await store.get("b0")
    plain.away = True
    with pytest.raises(Unavailable, match="no lender"):
        await store.get("b0")
    await store.drop("b0")
    assert "b0" not in store


async def test_random_calls_agree_with_a_dictionary(make: Callable[..., object]) -> None:
    """Blobs that were taken come back; a refused one changed nothing; no room is lost."""
    store, _ = make()  # type: ignore[misc]
    rng = random.Random(8)
    kept: dict[str, bytes] = {}
    refused = 0
    for _ in range(1500):
        key = f"k{rng.randrange(12)}"
        match rng.randrange(3):
            case 0:
                blob = rng.randbytes(rng.choice([0, 10, 3000, 4096, 5000, 9000]))
                try:
                    await store.put(key, blob)
                    kept[key] = blob
                except Rejected:
                    refused += 1
            case 1:
                if key in kept:
                    assert await store.get(key) == kept[key]
                assert (key in store) == (key in kept)
            case 2:
                await store.drop(key)
                kept.pop(key, None)
    assert refused
    for key in list(kept):
        await store.drop(key)
    await store.put("all", bytes(4 * PAGE_BYTES))
    assert store.tier("all") == "remote"


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigRejected, match="not empty"):
        DiskTier(tmp_path, 1000)
    with pytest.raises(ConfigRejected, match="at least one tier"):
        SpillStore([])
