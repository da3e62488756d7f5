"""A bucket's region as a process uses it that computes several virtual ranks.

Each virtual rank has a slot of its own in the region; `lanes` says which of them this process fills
in an iteration. A push writes all of them, then the pushed word of each. A word that stands from a
former life of the process says nothing: the iteration is pushed again, to the same bits.
"""

import asyncio
from collections.abc import Callable

import numpy as np

from slackwater.agent.attachment import Array, Attached
from slackwater.agent.region_access import InPlace, Staged, Staging, bytes_of
from slackwater.common.domains.slots.layout import (
    BYTES_PULLED,
    BYTES_PUSHED,
    PUSHED,
    WORD,
    Geometry,
)
from slackwater.common.domains.slots.rules import Hyper
from slackwater.common.domains.slots.sizes import Size
from slackwater.common.transport.base import Channel, RemoteRegion
from slackwater.schemas.base import JobId
from slackwater.schemas.tensors import DType


class VirtualInPlace(InPlace):
    """The region is mapped here."""

    def __init__(self, remote: RemoteRegion, job: JobId, bucket: int, rank: int) -> None:
        """Raises Rejected when it is not a region of this bucket."""
        super().__init__(remote, job, bucket, rank)
        every = range(self._region.geometry.workers)
        self._slots: list[Array] = [self._region.gradient(lane) for lane in every]
        self._blocks = [self._region.rank_block(lane) for lane in every]
        self._hypers: dict[int, Hyper] = {}

    @property
    def pushed(self) -> int:
        return 0

    def slot(self, lane: int) -> Array:
        return self._slots[max(lane, 0)]

    def keeps(self, old: Attached, iteration: int) -> bool:
        return old is self

    def mark(self, iteration: int, hyper: Hyper) -> None:
        """Say for each virtual rank that its slot is written. Saying it twice changes nothing."""
        for lane in self.lanes:
            block = self._blocks[lane]
            if block[PUSHED] == iteration:
                continue
            if self._hypers.get(lane) != hyper:
                self._region.set_hyper(lane, hyper)
                self._hypers[lane] = hyper
            block[BYTES_PUSHED] += self._gradient.nbytes
            if lane == self.lanes[0]:
                block[BYTES_PULLED] += self._parameters[0].nbytes
            block[PUSHED] = iteration

    async def begin_sizes(self, size: Size, attempt: int) -> None:
        """Say for this attempt's rank 0 how many processes count from a version on."""
        self.sizes.begin(size, attempt)

    def close(self) -> None:
        self._blocks = []
        super().close()


class VirtualStaging(Staging):
    """Local memory for a bucket whose region cannot be mapped, with a slot for each virtual rank
    that this process has had at a time: the first is there, others are made when they are needed.
    """

    def __init__(self, elements: int, dtype: DType) -> None:
        super().__init__(elements, dtype)
        self._more: list[Array] = []

    def place(self, number: int) -> Array:
        """Return the number-th local slot."""
        while len(self._more) < number:
            self._more.append(np.empty(len(self.gradient), self.gradient.dtype))
        return self._more[number - 1] if number else self.gradient


class VirtualStaged(Staged):
    """The region is written and read from afar."""

    in_pieces = False  # All virtual ranks of a process are told of at once.

    @classmethod
    async def attach(
        cls,
        channel: Channel,
        remote: RemoteRegion,
        geometry: Geometry,
        rank: int,
        staging: Staging,
    ) -> "VirtualStaged":
        """Raises Unavailable, AccessRefused."""
        made = await super().attach(channel, remote, geometry, rank, staging)
        assert isinstance(made, VirtualStaged)
        made._pushed = 0
        return made

    def slot(self, lane: int) -> Array:
        staging = self.staging
        assert isinstance(staging, VirtualStaging)
        return staging.place(self.lanes.index(lane) if lane in self.lanes else 0)

    async def push(
        self,
        iteration: int,
        hyper: Hyper,
        handle: int,
        *,
        again: bool,
        early: Callable[[], None] = lambda: None,
    ) -> None:
        """Write all slots and hyper-parameters, then the words. Raises Unavailable,
        AccessRefused."""
        if self._pushed == iteration and not again:
            return
        write, geometry, remote = self.channel.write, self._geometry, self._remote
        packed = memoryview(hyper.pack())
        for lane in self.lanes:
            gradient = bytes_of(self.slot(lane))
            async with self.link.pushing(len(gradient)):
                await asyncio.gather(
                    write(gradient, remote, geometry.gradient_offset(lane)),
                    write(packed, remote, geometry.hyper_offset(lane)),
                )
        word = memoryview(iteration.to_bytes(WORD, "little"))
        for lane in self.lanes:
            await write(word, remote, geometry.pushed_offset(lane))
        self._pushed = iteration

    async def begin_sizes(self, size: Size, attempt: int) -> None:
        """Say for this attempt's rank 0 how many processes count from a version on. Raises
        Unavailable, AccessRefused."""
        async with self._sizing:
            for offset, word in self.sizes.begin(size, attempt):
                await self.channel.write(bytes_of(word), self._remote, offset)
