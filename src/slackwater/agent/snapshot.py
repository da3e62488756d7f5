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

from slackwater.agent.region_access import ELEMENT, Array, InPlace, Staged, Staging, bytes_of
from slackwater.common.base import limits
from slackwater.common.base.errors import DeadlineExceeded, Unavailable
from slackwater.common.domains.slots.layout import WANTED, WORD, Geometry
from slackwater.common.domains.slots.region import LOCATION_EPOCH, VERSION, owner_word
from slackwater.common.domains.slots.rules import Floats
from slackwater.common.domains.slots.serving import served_word
from slackwater.common.transport.base import Channel, RemoteRegion
from slackwater.schemas.base import JobId

_VERSION_OFFSET: Final = VERSION * WORD
_SERVED_WANTED: Final = struct.Struct("<2Q")
"""The served word and the one that asks for it, side by side in a rank's block."""
_EPOCH_OFFSET: Final = LOCATION_EPOCH * WORD


class Snapshots(Staging):
    """Two copies that alternate by this worker's iterations. The gradient and what comes in are for
    regions that are not mapped; memory that is never touched is none."""

    def __init__(self, elements: int, dtype: str) -> None:
        self.gradient: Array = np.zeros(elements, ELEMENT[dtype])
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
        # Views of our own outlive `close`.
        self._block[WANTED] = 0
        self._version = self._region.version_word()
        self._applied = [self._region.applied_words(parity) for parity in range(2)]

    def parameters(self, version: int) -> Floats:
        with self._copies.lock:
            if self._copies.taken < version:
                self._take(version)
        return self._copies.parameters[version & 1]

    def look_again(self, version: int, owner: str) -> bool:
        """Make the copy of `version` anew, of what is newest now. False: the bucket is not this
        aggregator's, or is being moved. Raises DeadlineExceeded."""
        region, copies = self._region, self._copies
        with copies.lock:
            copies.taken = min(copies.taken, version - 1)
            self._take(version)
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


class StagedSnapshot(Staged):
    """The region is read from afar."""

    in_pieces = False  # A push is a version by itself: it is whole at once.
    rings_early = True
    _found = 0
    """The newest push that was there when this process came: nothing is left for it, or to be
    trusted."""

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

    async def fetch(self, version: int) -> None:
        """Read the newest parameters, unless those of `version` were read where the bucket was
        before. Raises Unavailable, AccessRefused."""
        copies = self.staging
        assert isinstance(copies, Snapshots)
        async with copies.fetching:
            if copies.taken < version and not await self._take_served(version, copies):
                await self._take(version, copies)
        await self.read_words()

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
