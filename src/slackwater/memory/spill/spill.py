"""Blobs that do not fit: in memory while there is room, then in remote memory, then on disk.

One interface for every part that must put something aside: `put`, `get`, `drop` by key. Each tier
is bounded. What has not been used for the longest time goes down to make room; a blob for which no
tier has room is refused, and nothing else is lost for it. What comes back is compared with its
checksum. For bytes that a program addresses, see array.py.
"""

import asyncio
import itertools
import os
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected, Rejected, SlackwaterError, Unavailable
from slackwater.memory.store import PAGE_BYTES, Pages, PageStore

_BATCH: Final = 1024
"""Pages of one request to a store."""


class Tier(Protocol):
    """Keeps blobs under numbers; a number is put once and then dropped."""

    @property
    def name(self) -> str: ...

    def room(self, nbytes: int) -> bool: ...

    def fits(self, nbytes: int) -> bool:
        """When it is empty."""
        ...

    async def put(self, number: int, blob: bytes) -> None:
        """There is room. Raises OSError, SlackwaterError: it is not kept."""
        ...

    async def get(self, number: int) -> bytes: ...

    async def drop(self, number: int) -> None: ...


class MemoryTier:
    name = "memory"

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._used = 0
        self._blobs: dict[int, bytes] = {}

    def room(self, nbytes: int) -> bool:
        return self._used + nbytes <= self._nbytes

    def fits(self, nbytes: int) -> bool:
        return nbytes <= self._nbytes

    async def put(self, number: int, blob: bytes) -> None:
        self._blobs[number] = blob
        self._used += len(blob)

    async def get(self, number: int) -> bytes:
        return self._blobs[number]

    async def drop(self, number: int) -> None:
        self._used -= len(self._blobs.pop(number))


class RemoteTier:
    """In the pages of a store; a blob takes whole pages, which need not follow one another."""

    name = "remote"

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._free = list(range(store.page_count - 1, -1, -1))
        self._blobs: dict[int, tuple[Pages, int]] = {}

    def room(self, nbytes: int) -> bool:
        return -(-nbytes // PAGE_BYTES) <= len(self._free)

    def fits(self, nbytes: int) -> bool:
        return -(-nbytes // PAGE_BYTES) <= self._store.page_count

    async def put(self, number: int, blob: bytes) -> None:
        count = -(-len(blob) // PAGE_BYTES)
        taken = [self._free.pop() for _ in range(count)]
        pages = np.array(sorted(taken), np.int64)
        padded = blob.ljust(count * PAGE_BYTES, b"\0")
        try:
            for at in range(0, count, _BATCH):
                part = memoryview(padded)[at * PAGE_BYTES : (at + _BATCH) * PAGE_BYTES]
                await self._store.write_pages(pages[at : at + _BATCH], part)
        except BaseException:
            self._free += taken
            raise
        self._blobs[number] = pages, len(blob)

    async def get(self, number: int) -> bytes:
        pages, nbytes = self._blobs[number]
        data = bytearray(len(pages) * PAGE_BYTES)
        for at in range(0, len(pages), _BATCH):
            part = memoryview(data)[at * PAGE_BYTES : (at + _BATCH) * PAGE_BYTES]
            await self._store.read_pages(pages[at : at + _BATCH], part)
        return bytes(data[:nbytes])

    async def drop(self, number: int) -> None:
        pages, _ = self._blobs.pop(number)
        self._free += pages.tolist()


class DiskTier:
    """A file a blob. The folder is its own: it is empty at the start."""

    name = "disk"

    def __init__(self, folder: Path, nbytes: int) -> None:
        """Raises ConfigRejected."""
        self._folder = folder
        self._nbytes = nbytes
        self._used = 0
        self._sizes: dict[int, int] = {}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise ConfigRejected(f"spill folder {folder} is not empty: give one of its own")
        except OSError as error:
            raise ConfigRejected(f"spill folder {folder}: {error.strerror}") from error

    def room(self, nbytes: int) -> bool:
        return self._used + nbytes <= self._nbytes

    def fits(self, nbytes: int) -> bool:
        return nbytes <= self._nbytes

    async def put(self, number: int, blob: bytes) -> None:
        path = self._path(number)
        try:
            await asyncio.to_thread(path.write_bytes, blob)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._sizes[number] = len(blob)
        self._used += len(blob)

    async def get(self, number: int) -> bytes:
        return await asyncio.to_thread(self._path(number).read_bytes)

    async def drop(self, number: int) -> None:
        self._used -= self._sizes.pop(number)
        await asyncio.to_thread(os.unlink, self._path(number))

    def _path(self, number: int) -> Path:
        return self._folder / f"blob-{number}"


@dataclass(slots=True)
class _Blob:
    number: int
    tier: int
    nbytes: int
    checksum: int


class SpillStore:
    """Tiers, the fastest first. On one event loop; calls take turns."""

    def __init__(self, tiers: Sequence[Tier], blobs_max: int = limits.SPILL_BLOBS_MAX) -> None:
        """Raises ConfigRejected."""
        if not tiers:
            raise ConfigRejected("a spill store needs at least one tier")
        self._tiers = tuple(tiers)
        self._blobs_max = blobs_max
        self._blobs: dict[str, _Blob] = {}
        self._orders: list[OrderedDict[int, _Blob]] = [OrderedDict() for _ in tiers]
        """The blobs of each tier, the one used longest ago first."""
        self._numbers = itertools.count()
        self._turn = asyncio.Lock()

    def __contains__(self, key: str) -> bool:
        return key in self._blobs

    def __len__(self) -> int:
        return len(self._blobs)

    def tier(self, key: str) -> str:
        """The name of that which has it. Raises KeyError."""
        return self._tiers[self._blobs[key].tier].name

    def figures(self) -> dict[str, int]:
        """How much is where: `memory_blobs`, `memory_bytes` and so on."""
        found: dict[str, int] = {}
        for tier, order in zip(self._tiers, self._orders, strict=True):
            found[f"{tier.name}_blobs"] = len(order)
            found[f"{tier.name}_bytes"] = sum(blob.nbytes for blob in order.values())
        return found

    async def put(self, key: str, blob: bytes | bytearray | memoryview) -> None:
        """Keep a copy in place of what the key had. Raises Rejected when no tier has room or takes
        it: then everything is as it was."""
        async with self._turn:
            old = self._blobs.get(key)
            if old is None and len(self._blobs) >= self._blobs_max:
                raise Rejected(f"{self._blobs_max} blobs are kept already: drop some")
            data = bytes(blob)
            made = _Blob(next(self._numbers), -1, len(data), zlib.crc32(data))
            await self._place(made, data, 0)
            self._blobs[key] = made
            if old is not None:
                await self._forget(old)

    async def get(self, key: str) -> bytes:
        """Raises KeyError; Unavailable when its tier cannot give it, or gives other bytes."""
        async with self._turn:
            blob = self._blobs[key]
            data = await self._read(blob)
            self._orders[blob.tier].move_to_end(blob.number)
            if blob.tier and self._tiers[0].room(blob.nbytes):
                await self._forget(blob)
                await self._keep(blob, data, 0)
            return data

    async def drop(self, key: str) -> None:
        """Nothing happens if there is none."""
        async with self._turn:
            blob = self._blobs.pop(key, None)
            if blob is not None:
                await self._forget(blob)

    async def _place(self, blob: _Blob, data: bytes, first: int) -> None:
        """In the first tier from `first` on that takes it, after others have gone down for it."""
        whys = []
        for index in range(first, len(self._tiers)):
            tier = self._tiers[index]
            if not tier.fits(blob.nbytes):
                whys.append(f"{tier.name}: larger than the tier")
                continue
            try:
                while not tier.room(blob.nbytes):
                    await self._sink(index)
                await self._keep(blob, data, index)
                return
            except (SlackwaterError, OSError) as error:
                whys.append(f"{tier.name}: {error}")
        raise Rejected(f"no room for a blob of {blob.nbytes} bytes ({'; '.join(whys)})")

    async def _sink(self, index: int) -> None:
        """Move down the blobs that a tier has not used for the longest time. Raises Rejected,
        Unavailable."""
        if index + 1 == len(self._tiers):
            raise Rejected("full")
        blob = next(iter(self._orders[index].values()))
        data = await self._read(blob)
        number = blob.number
        await self._place(blob, data, index + 1)
        del self._orders[index][number]
        await self._tiers[index].drop(number)

    async def _keep(self, blob: _Blob, data: bytes, index: int) -> None:
        await self._tiers[index].put(blob.number, data)
        blob.tier = index
        self._orders[index][blob.number] = blob

    async def _read(self, blob: _Blob) -> bytes:
        tier = self._tiers[blob.tier]
        try:
            data = await tier.get(blob.number)
        except OSError as error:
            raise Unavailable(f"spilled to {tier.name}: {error}") from error
        if len(data) != blob.nbytes or zlib.crc32(data) != blob.checksum:
            raise Unavailable(f"spilled to {tier.name}: it came back damaged")
        return data

    async def _forget(self, blob: _Blob) -> None:
        del self._orders[blob.tier][blob.number]
        await self._tiers[blob.tier].drop(blob.number)
