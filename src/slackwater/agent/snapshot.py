"""A bucket whose updates do not wait for this worker: its parameters are copied out, whole.

In a job that is not synchronous others go on while this worker computes, so what it reads must be a
copy of its own. A buffer is written again only by the second update after its own, and says so: the
copy is good if the version is the same before and after. What was applied is copied with it, so
that a bare region can be filled without any push being applied twice or lost.

A read from afar may last for many updates. So the aggregator leaves what a push led to in the slot
that it came in, where nothing overtakes it (common/domains/slots/serving.py). Where that is not
there, at the begin and after a move, the newest parameters are read as above.
"""

import asyncio
import struct
import threading
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slackwater.agent.attachment import Array, slot_array
from slackwater.agent.region_access import InPlace, Staged, Staging, Tell, bytes_of, halves
from slackwater.common.base import limits
from slackwater.common.base.errors import DeadlineExceeded, Unavailable
from slackwater.common.domains.slots.layout import PARAMETER_BYTES, WANTED, WORD, Geometry
from slackwater.common.domains.slots.region import (
    LOCATION_EPOCH,
    OWNER,
    TRANSFER,
    VERSION,
    owner_word,
)
from slackwater.common.domains.slots.rows import nbytes
from slackwater.common.domains.slots.rules import Floats
from slackwater.common.domains.slots.serving import served_word
from slackwater.common.transport.base import Channel, RemoteRegion, Scattering
from slackwater.schemas.base import JobId
from slackwater.schemas.tensors import DType

_VERSION_OFFSET: Final = VERSION * WORD
_SERVED_WANTED: Final = struct.Struct("<2Q")
"""The served word and the one that asks for it, side by side in a rank's block."""
_EPOCH_OFFSET: Final = LOCATION_EPOCH * WORD
ROWS_AT_ONCE: Final = 1024
"""Rows that are read from afar between two looks at the version."""


class Snapshots(Staging):
    """Two copies that alternate by this worker's iterations. The gradient and what comes in are for
    regions that are not mapped; memory that is never touched is none."""

    def __init__(self, elements: int, dtype: DType) -> None:
        self.gradient: Array = slot_array(elements, dtype)
        self.parameters = [np.zeros(elements, np.float32) for _ in range(2)]
        self.applied: list[tuple[int, ...]] = [(), ()]
        """The newest iteration of each rank that the copy contains."""
        self.taken = -1
        """The newest of this worker's iterations after which a copy was made: it stays as it is."""
        self.lock = threading.Lock()
        """The program's thread copies, the Agent's may want to seed another region."""
        self.fetching = asyncio.Lock()
        self.reads = 0
        """Reads of parameters over a network."""
        self.torn = 0
        """Reads that an update overtook, and that were repeated."""
        self._incoming = np.zeros(elements, np.float32)

    @property
    def incoming(self) -> Floats:
        """Where parameters arrive that may yet turn out to be torn, or too late."""
        return self._incoming

    def arrived(self, version: int, applied: tuple[int, ...]) -> None:
        """Make `incoming`, which is whole now, a version to read, unless it came too late."""
        with self.lock:
            if self.taken >= version:
                return
            own = version & 1
            self.parameters[own], self._incoming = self._incoming, self.parameters[own]
            self.applied[own], self.taken = applied, version


def reads_of(stagings: Iterable[object]) -> tuple[int, int]:
    """Count how often parameters were read over a network into these, and how many of these reads
    an update overtook."""
    copies = [each for each in stagings if isinstance(each, Snapshots)]
    return sum(each.reads for each in copies), sum(each.torn for each in copies)


class Snapshot(InPlace):
    """The region is mapped here. The copy is made when the program first asks for parameters after
    an iteration, by its own thread: it would only wait meanwhile."""

    def __init__(
        self, remote: RemoteRegion, job: JobId, bucket: int, rank: int, copies: Snapshots
    ) -> None:
        super().__init__(remote, job, bucket, rank)
        self._copies = copies
        self._block[WANTED] = 0
        # Views of our own outlive `close`.
        self._applied = [self._region.applied_words(parity) for parity in range(2)]

    def parameters(self, version: int) -> Floats:
        with self._copies.lock:
            if self._copies.taken < version:
                self._take(version)
        return self._copies.parameters[version & 1]

    def look_again(self, version: int, owner: str) -> bool:
        """Make the copy of `version` anew, of what is newest now. False: the bucket is not this
        aggregator's, or is being moved. Raises DeadlineExceeded."""
        copies = self._copies
        with copies.lock:
            copies.taken = min(copies.taken, version - 1)
            self._take(version)
        return self.is_of(owner)

    def is_of(self, owner: str) -> bool:
        """Say whether the bucket is this aggregator's, and is not being moved."""
        region = self._region
        return region.owner == owner_word(owner) and not region.transfer

    def _take(self, version: int) -> None:
        """Raises DeadlineExceeded after more tries than there can be reasons for."""
        copies, own = self._copies, version & 1
        for _ in range(limits.SNAPSHOTS_MAX):
            newest = int(self._version[0])
            np.copyto(copies.parameters[own], self._parameters[newest & 1])
            copies.applied[own] = tuple(self._applied[newest & 1].tolist())
            if int(self._version[0]) == newest:
                copies.taken = version
                return
        raise DeadlineExceeded(
            f"bucket {self._region.bucket.index}: {limits.SNAPSHOTS_MAX} updates came, each while "
            "its parameters were being copied"
        )


def _parts(count: int, row_bytes: int) -> list[slice]:
    """Divide rows into what is read at once."""
    step = max(1, min(ROWS_AT_ONCE, limits.TRANSFER_BYTES // row_bytes))
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]


class StagedSnapshot(Staged):
    """The region is read from afar."""

    in_pieces = False  # A push is a version by itself: it is whole at once.
    rings_early = True
    _found = 0
    """The newest push that was there when this process came: nothing is left for it, or to be
    trusted."""
    width = 0
    """The rows' width, of a sparse table: its parameters are not read whole."""
    _read_bytes = 0
    _rows_there = -1
    """The region's word for the push that is in the slot; -1: it is not known here."""

    @classmethod
    async def attach(
        cls,
        channel: Channel,
        remote: RemoteRegion,
        geometry: Geometry,
        rank: int,
        staging: Staging,
    ) -> "Staged":
        """Raises Unavailable, AccessRefused."""
        made = await super().attach(channel, remote, geometry, rank, staging)
        # A former life of this rank may have begun to write its next push over a copy.
        words = _SERVED_WANTED.pack(0, 1)
        await channel.write(memoryview(words), remote, geometry.served_offset(rank))
        assert isinstance(made, cls)
        made._found = made.pushed
        return made

    def _count_bytes(self) -> None:
        if not self.width:
            return super()._count_bytes()
        self._bytes_pushed += nbytes(self.gradient, self.rows, self.width)
        self._bytes_pulled += self._read_bytes
        self._read_bytes = 0

    async def _write_gradient(self, tell: Tell | None) -> None:
        assert tell is None, "it goes as a whole"
        if not self.width:
            return await super()._write_gradient(None)
        geometry, rank, word = self._geometry, self._rank, self.rows
        pushed = bytes_of(self.gradient)[: nbytes(self.gradient, word, self.width)]
        if pushed:
            await self._send(pushed, geometry.gradient_offset(rank), None)
        if self._rows_there != word:
            said = memoryview(word.to_bytes(WORD, "little"))
            await self.channel.write(said, self._remote, geometry.rows_offset(rank))
            self._rows_there = word

    async def read_rows(self, numbers: NDArray[np.int64], out: Floats, owner: str) -> bool:
        """Read rows of a sparse table into `out`, [n, width]: each as it was in a version that is
        not older than this call. False: the bucket is not this aggregator's, or is being moved.
        Raises Unavailable, AccessRefused."""
        async with self.link.moving():
            return await self._read_parts(numbers, out, owner)

    async def _read_parts(self, numbers: NDArray[np.int64], out: Floats, owner: str) -> bool:
        pending, tries = _parts(len(numbers), 4 * self.width), 0
        version = (await self._place())[0]
        while pending:
            some = pending.pop()
            await self._read_some(numbers[some], out[some], version)
            before, (version, is_owner, transfer) = version, await self._place()
            if is_owner != owner_word(owner) or transfer:
                return False
            if version != before:
                tries += 1
                pending += halves(some)
            if tries > limits.SNAPSHOTS_MAX:
                raise Unavailable(f"{tries} updates came, each while rows were being read")
        self._read_bytes += out.nbytes
        return True

    async def _read_some(self, numbers: NDArray[np.int64], out: Floats, version: int) -> None:
        step, into = PARAMETER_BYTES * self.width, bytes_of(out.reshape(-1))
        offsets = (numbers * step + self._geometry.parameters_offset(version)).tolist()
        async with self.link.pulling(len(into)):
            if isinstance(self.channel, Scattering) and step <= limits.TRANSFER_BYTES:
                await self.channel.read_scattered(self._remote, offsets, step, into)
                return
            for at, offset in enumerate(offsets):
                row = into[at * step : (at + 1) * step]
                await self.channel.read(self._remote, offset, row)

    async def _place(self) -> tuple[int, int, int]:
        """Read the version, the owner, and the aggregator that it is being moved to."""
        words = np.zeros(TRANSFER - VERSION + 1, np.uint64)
        await self.channel.read(self._remote, VERSION * WORD, bytes_of(words))
        return int(words[0]), int(words[OWNER - VERSION]), int(words[-1])

    async def fetch(self, version: int) -> None:
        """Read the newest parameters, unless those of `version` were read where the bucket was
        before. Raises Unavailable, AccessRefused."""
        if self.width:
            return await self.read_words()
        copies = self.staging
        assert isinstance(copies, Snapshots)
        async with copies.fetching, self.link.moving():
            if copies.taken < version and not await self._take_served(version, copies):
                await self._take(version, copies)
        await self.read_words()

    async def look_again(self, version: int, owner: str) -> bool:
        """Read the newest parameters into the place of those of `version`. False: the bucket is not
        this aggregator's, or is being moved. Raises Unavailable, AccessRefused."""
        copies = self.staging
        assert isinstance(copies, Snapshots)
        async with copies.fetching, self.link.moving():
            with copies.lock:
                copies.taken = min(copies.taken, version - 1)
            await self._take(version, copies)
        _, is_owner, transfer = await self._place()
        if is_owner == owner_word(owner) and not transfer:
            return True
        with copies.lock:  # It is read again where the bucket is then.
            copies.taken = min(copies.taken, version - 1)
        return False

    async def _take_served(self, version: int, copies: Snapshots) -> bool:
        """Tell whether what this rank's iteration `version` led to was there for it. All is asked
        for at once, as a question waits behind others' gradients: what a word vouches for stays as
        it is until this rank writes, so that the word may be read at any time."""
        geometry, rank = self._geometry, self._rank
        if version <= self._found:
            return False
        words = bytearray(WORD * geometry.workers)
        _, _, epoch, served = await asyncio.gather(
            self._bring(geometry.gradient_offset(rank), bytes_of(copies.incoming)),
            self.channel.read(
                self._remote, geometry.served_applied_offset(rank), memoryview(words)
            ),
            self._word(_EPOCH_OFFSET),
            self._word(geometry.served_offset(rank)),
        )
        copies.reads += 1
        if served != served_word(epoch, version):
            return False
        copies.arrived(version, struct.unpack(f"<{geometry.workers}Q", words))
        return True

    async def _take(self, version: int, copies: Snapshots) -> None:
        geometry = self._geometry
        into = bytes_of(copies.incoming)
        for _ in range(limits.SNAPSHOTS_MAX):
            newest = await self._word(_VERSION_OFFSET)
            await self._bring(geometry.parameters_offset(newest), into)
            applied = await self._applied(newest)
            copies.reads += 1
            if await self._word(_VERSION_OFFSET) == newest:
                copies.arrived(version, applied)
                return
            copies.torn += 1
        raise Unavailable(f"{limits.SNAPSHOTS_MAX} updates came, each while one was being read")

    async def _word(self, offset: int) -> int:
        word = bytearray(WORD)
        await self.channel.read(self._remote, offset, memoryview(word))
        return int.from_bytes(word, "little")

    async def _applied(self, version: int) -> tuple[int, ...]:
        return await self._words_at(self._geometry.applied_offset(0, version))
