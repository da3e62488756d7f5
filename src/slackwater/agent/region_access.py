"""A bucket's region as one worker uses it: in place where it can be mapped, else by copies.

Both give the program a gradient slot and parameters as flat arrays. `InPlace` (shm) hands out the
region itself: a push is one copy into the slot or none, a pull copies nothing. `Staged` (tcp) keeps
the slot and two parameter buffers here, writes and reads the region from afar, and keeps the
gradient until its version has come, so that it can be written again elsewhere.

A rank's counters grow when its push is marked, by the gradient's bytes and by those of the
parameters that the same ring asks for: at that time the region stands still, so that no migration
can leave a count behind.
"""

import asyncio
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slackwater.agent.attachment import ELEMENT, OWN, Array, Attached, Seeds
from slackwater.agent.link_times import Link
from slackwater.agent.state_copies import Part
from slackwater.common.base import limits
from slackwater.common.base.errors import DeadlineExceeded, Rejected
from slackwater.common.domains.slots.frames import encode_part
from slackwater.common.domains.slots.gradient_squares import (
    SQUARES_OFFSET,
    SQUARES_WORDS,
    BucketSquares,
    SquaresWords,
)
from slackwater.common.domains.slots.layout import (
    BYTES_PULLED,
    BYTES_PUSHED,
    PUSHED,
    RANK_STRIDE,
    ROWS,
    WORD,
    Geometry,
    pages,
    slot_bytes,
)
from slackwater.common.domains.slots.packed import slot_length
from slackwater.common.domains.slots.region import STATE_SINCE, VERSION, SlotRegion
from slackwater.common.domains.slots.rows import ALL, nbytes, width_of
from slackwater.common.domains.slots.rules import Floats, Hyper
from slackwater.common.domains.slots.sizes import SIZES_OFFSET, SIZES_WORDS, Size, Sizes
from slackwater.common.transport.base import Channel, RemoteRegion
from slackwater.common.transport.gpu import copy_into
from slackwater.common.transport.pacing import paced
from slackwater.common.transport.region import Region
from slackwater.schemas.base import JobId
from slackwater.schemas.tensors import DType

_WORDS: Final = struct.Struct("<3Q")
"""Pushed iteration, bytes pushed, bytes pulled: side by side in a rank's block."""


STATE_BYTES: Final = 4
"""Bytes of a state's element, a float32."""
PIECE_BYTES: Final = limits.CHUNK_BYTES
"""Bytes that are folded at a time."""
Tell = Callable[[int], None]
"""Called with the number of the slot's elements that have arrived. Raises Unavailable."""


class InPlace:
    """A region that is mapped here."""

    lanes: tuple[int, ...] = (OWN,)
    rows = ALL

    def __init__(self, remote: RemoteRegion, job: JobId, bucket: int, rank: int) -> None:
        """Raises Rejected when it is not a region of this bucket."""
        assert remote.view is not None
        self.link = Link()
        self._remote = remote
        self._region = region = SlotRegion.open(remote.view)
        if (region.plan.job, region.bucket.index) != (job, bucket) or rank >= region.plan.workers:
            raise Rejected(
                f"a region of job {region.plan.job}, bucket {region.bucket.index}, was granted "
                f"for job {job}, bucket {bucket}, rank {rank}"
            )
        self._rank = rank
        self._block = region.rank_block(rank)
        self._hyper: Hyper | None = None
        self._gradient = region.gradient(rank)
        self._parameters = [region.parameters(0), region.parameters(1)]
        # A view of our own, which outlives `close`.
        self._version = region.version_word()
        self._width = width_of(region.tensors)

    @property
    def gradient(self) -> Array:
        return self._gradient

    def slot(self, lane: int) -> Array:
        return self._gradient

    @property
    def pushed(self) -> int:
        return self._region.pushed(self._rank)

    async def all_pushed(self) -> Sequence[int]:
        return self._region.all_pushed()

    @property
    def sizes(self) -> Sizes:
        return self._region.sizes

    def squares(self, version: int) -> BucketSquares | None:
        return self._region.squares.at(version)

    async def write_size(self, size: Size) -> None:
        self._region.sizes.write(size)

    def parameters(self, version: int) -> Floats:
        return self._parameters[version & 1]

    def keeps(self, old: Attached, iteration: int) -> bool:
        return old is self or (iteration > 0 and self.pushed == iteration)

    def mark(self, iteration: int, hyper: Hyper) -> None:
        """The slot is written: say so. Saying it twice changes nothing."""
        block = self._block
        if block[PUSHED] == iteration:
            return
        if hyper != self._hyper:
            self._region.set_hyper(self._rank, hyper)
            self._hyper = hyper
        block[ROWS] = self.rows
        block[BYTES_PUSHED] += nbytes(self._gradient, self.rows, self._width)
        if not self._width:  # Else rows are read, whenever the program wants some.
            block[BYTES_PULLED] += self._parameters[0].nbytes
        block[PUSHED] = iteration

    def read_rows(self, numbers: NDArray[np.int64], out: Floats) -> None:
        """Copy rows of a sparse table to `out`, [n, width]: each as it was in a version that is not
        older than this call. Raises DeadlineExceeded."""
        width, word = self._width, self._version
        pending, tries = [slice(0, len(numbers))], 0
        while pending:
            some = pending.pop()
            version = int(word[0])
            table = self._parameters[version & 1].reshape(-1, width)
            np.take(table, numbers[some], axis=0, out=out[some], mode="clip")
            if int(word[0]) != version:
                tries += 1
                pending += halves(some)
            if tries > limits.SNAPSHOTS_MAX:
                raise DeadlineExceeded(
                    f"bucket {self._region.bucket.index}: updates came while each of {tries} parts "
                    "of its rows was being copied"
                )
        self._block[BYTES_PULLED] += out.nbytes

    async def seed(self, version: int, tensors: Sequence[Floats], states: Seeds = ()) -> None:
        target = self._parameters[version & 1]
        await asyncio.to_thread(_join, tensors, target)
        for index, state in enumerate(states[: self._region.geometry.states]):
            await asyncio.to_thread(_join, state, self._region.state(version, index))

    async def seed_states(self, version: int, parts: Sequence[Part]) -> None:
        """Write parts of the optimiser's states into the buffers of `version`."""
        for part in parts:
            for index, state in enumerate(part.states):
                into = self._region.state(version, index)[part.first : part.end]
                await asyncio.to_thread(np.copyto, into, state)

    def kept_states(self, version: int | None) -> tuple[int, list[Floats]] | None:
        """Return the states as of `version` (None: the newest) in a region whose aggregator is
        gone, in place, and how many updates they have had; None: they are not there. An aggregator
        that was killed in mid-fold has written to the other buffers."""
        region = self._region
        newest = region.version
        version = newest if version is None else version
        if not region.initialized or newest - version not in (0, 1):
            return None
        states = [region.state(version, index) for index in range(region.geometry.states)]
        return version - region.state_since, states

    def states(self, version: int | None) -> tuple[int, list[Floats]] | None:
        """Return how many updates the optimiser's states have had, and copies of them as of
        `version` (None: of the newest); None: the region does not hold them, or they changed."""
        region = self._region
        newest = region.version
        copies = [region.state(newest, index).copy() for index in range(region.geometry.states)]
        still = region.version == newest and version in (None, newest)
        return (newest - region.state_since, copies) if still else None

    def close(self) -> None:
        """The mapping goes when the last view of it does: ours, or one that the program has."""
        self._block = memoryview(bytearray(RANK_STRIDE)).cast("Q")  # A reader may still count.
        self._region.release()
        self._remote.close()


class Staging:
    """Local memory for a bucket whose region cannot be mapped. Outlives attachments. It lies in a
    region of its own, which an RDMA device registers once and then reads and writes itself."""

    def __init__(self, elements: int, dtype: DType) -> None:
        # A window can show pages.
        first, step = pages(slot_bytes(elements, dtype)), pages(4 * elements)
        region = Region.create(first + 2 * step, "staging")
        weakref.finalize(self, region.close)
        count = slot_length(elements, dtype)
        self.gradient: Array = np.frombuffer(region.buffer, ELEMENT[dtype], count)
        self.parameters = [
            np.frombuffer(region.buffer, np.float32, elements, first + parity * step)
            for parity in range(2)
        ]


class Staged:
    """A region that is written and read from afar."""

    in_pieces = True
    """Parts of a version that are there can be folded before the rest."""
    rows = ALL
    rings_early = False
    """The doorbell follows the pushed word without waiting for its answer, which others' gradients
    may hold up. It may overtake the word and say nothing; so it is rung again after the answer."""
    lanes: tuple[int, ...] = (OWN,)

    def __init__(
        self,
        channel: Channel,
        remote: RemoteRegion,
        geometry: Geometry,
        rank: int,
        staging: Staging,
        words: bytes,
    ) -> None:
        self.channel = channel
        self.staging = staging
        self.link = Link()
        self._remote, self._geometry, self._rank = remote, geometry, rank
        self._size_words = np.zeros(SIZES_WORDS, np.uint64)
        self.sizes = Sizes(self._size_words, geometry.active)
        self._square_words = np.zeros(SQUARES_WORDS, np.uint64)
        self._squares = SquaresWords(self._square_words)
        self._sizing = asyncio.Lock()
        self._pushed, self._bytes_pushed, self._bytes_pulled = _WORDS.unpack(words)

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
        if remote.nbytes < geometry.nbytes:
            raise Rejected(f"a region of {remote.nbytes} bytes, {geometry.nbytes} were expected")
        words = bytearray(_WORDS.size)
        await channel.read(remote, geometry.pushed_offset(rank), memoryview(words))
        made = cls(channel, remote, geometry, rank, staging, bytes(words))
        await made.read_words()
        return made

    async def read_words(self) -> None:
        """Read how many workers count, and the sums of squares, where the job has these. Raises
        Unavailable, AccessRefused."""
        if self._geometry.active:
            await self.channel.read(self._remote, SIZES_OFFSET, bytes_of(self._size_words))
        if self._geometry.noise:
            await self.channel.read(self._remote, SQUARES_OFFSET, bytes_of(self._square_words))

    def squares(self, version: int) -> BucketSquares | None:
        return self._squares.at(version)

    async def write_size(self, size: Size) -> None:
        async with self._sizing:  # Once it is found written, it is there.
            for offset, word in self.sizes.write(size):
                await self.channel.write(bytes_of(word), self._remote, offset)

    @property
    def gradient(self) -> Array:
        return self.staging.gradient

    def slot(self, lane: int) -> Array:
        return self.staging.gradient

    @property
    def pushed(self) -> int:
        return int(self._pushed)

    async def all_pushed(self) -> Sequence[int]:
        return await self._words_at(self._geometry.pushed_offset(0))

    async def _words_at(self, first: int) -> tuple[int, ...]:
        """Return each rank's word, rank 0's at `first`, by one read over all ranks' blocks."""
        words = bytearray(RANK_STRIDE * (self._geometry.workers - 1) + WORD)
        await self.channel.read(self._remote, first, memoryview(words))
        return tuple(
            int.from_bytes(words[at : at + WORD], "little")
            for at in range(0, len(words), RANK_STRIDE)
        )

    def parameters(self, version: int) -> Floats:
        return self.staging.parameters[version & 1]

    def keeps(self, old: Attached, iteration: int) -> bool:
        return isinstance(old, Staged) and old.staging is self.staging

    async def push(
        self,
        iteration: int,
        hyper: Hyper,
        handle: int,
        *,
        again: bool,
        early: Callable[[], None] = lambda: None,
    ) -> None:
        """Write hyper-parameters and slot, then the word; nothing if the word says so already,
        unless what it vouches for was refused (`again`). A large slot goes in pieces, of which the
        aggregator is told as they are there. `early` is called once the word is on its way. Raises
        Unavailable, AccessRefused."""
        if self._pushed == iteration and not again:
            return
        write, geometry, rank = self.channel.write, self._geometry, self._rank
        gradient = self.staging.gradient
        hypers = write(memoryview(hyper.pack()), self._remote, geometry.hyper_offset(rank))
        whole = self._geometry.dtype == "int8"  # The powers of two come last.
        if self.in_pieces and not whole and gradient.nbytes > PIECE_BYTES:
            await hypers  # First: whoever is told of a piece may fold it.
            await self._write_gradient(
                lambda elements: self.channel.send(encode_part(handle, iteration, elements))
            )
        else:
            await asyncio.gather(self._write_gradient(None), hypers)
        self._count_bytes()
        words = _WORDS.pack(iteration, self._bytes_pushed, self._bytes_pulled)
        marked = asyncio.ensure_future(
            write(memoryview(words), self._remote, geometry.pushed_offset(rank))
        )
        try:
            await asyncio.sleep(0)  # It is on its way: a doorbell now follows it.
            early()
        finally:
            await marked
        self._pushed = iteration

    def _count_bytes(self) -> None:
        self._bytes_pushed += self.staging.gradient.nbytes
        self._bytes_pulled += self.staging.parameters[0].nbytes

    async def _write_gradient(self, tell: Tell | None) -> None:
        offset = self._geometry.gradient_offset(self._rank)
        await self._send(bytes_of(self.staging.gradient), offset, tell)

    async def fetch(self, version: int) -> None:
        """Read the parameters of `version`. Raises Unavailable, AccessRefused."""
        into = bytes_of(self.staging.parameters[version & 1])
        offset = self._geometry.parameters_offset(version)
        await asyncio.gather(self._bring(offset, into), self.read_words())

    async def _send(self, gradient: memoryview, offset: int, tell: Tell | None) -> None:
        async with self.link.pushing(len(gradient)):
            if tell is None or self.link.pace is not None:
                await paced(
                    gradient, self.link.pace,
                    lambda at, piece: self.channel.write(piece, self._remote, offset + at),
                )  # fmt: skip
            else:
                await self._send_pieces(gradient, offset, tell)

    async def _send_pieces(self, gradient: memoryview, offset: int, tell: Tell) -> None:
        """All at once: the channel sends them in this order. The last one is told by its ring."""
        firsts = range(0, len(gradient), PIECE_BYTES)
        pieces = [gradient[first : first + PIECE_BYTES] for first in firsts]
        writes = [
            asyncio.ensure_future(self.channel.write(piece, self._remote, offset + first))
            for first, piece in zip(firsts, pieces, strict=True)
        ]
        try:
            for first, written in zip(firsts[1:], writes, strict=False):
                await written
                tell(first // self.staging.gradient.itemsize)
            await writes[-1]
        finally:
            for written in writes:
                written.cancel()
            await asyncio.gather(*writes, return_exceptions=True)

    async def _bring(self, offset: int, parameters: memoryview) -> None:
        async with self.link.pulling(len(parameters)):
            await paced(
                parameters, self.link.pull_pace,
                lambda at, piece: self.channel.read(self._remote, offset + at, piece),
            )  # fmt: skip

    async def seed(self, version: int, tensors: Sequence[Floats], states: Seeds = ()) -> None:
        geometry = self._geometry
        flat = np.empty(geometry.elements, np.float32)
        await asyncio.to_thread(_join, tensors, flat)
        await self.channel.write(bytes_of(flat), self._remote, geometry.parameters_offset(version))
        for index, state in enumerate(states[: geometry.states]):
            await asyncio.to_thread(_join, state, flat)
            offset = geometry.state_offset(version, index)
            await self.channel.write(bytes_of(flat), self._remote, offset)

    async def seed_states(self, version: int, parts: Sequence[Part]) -> None:
        """Write parts of the optimiser's states into the buffers of `version`. Raises Unavailable,
        AccessRefused."""
        for part in parts:
            for index, state in enumerate(part.states):
                offset = self._state_offset(version, index, part.first)
                await self.channel.write(bytes_of(state), self._remote, offset)

    @property
    def ranks(self) -> int:
        """How many ranks count, as of the last version that was delivered."""
        geometry = self._geometry
        return self.sizes.newest.workers if geometry.active else geometry.workers

    @property
    def fixed(self) -> bool:
        """Say whether no version is complete without this rank's push."""
        return not self._geometry.active

    async def read_part(
        self, first: int, end: int, version: int | None, still: Callable[[], bool]
    ) -> tuple[Part, int] | None:
        """Read elements [first, end) of each of the optimiser's states as of `version` (None: as of
        the newest), and the version at which they were fresh. None: another fold may have
        overwritten them meanwhile; `still` says of `version` that the one after the next cannot
        have begun. Raises Unavailable, AccessRefused."""
        geometry = self._geometry
        wanted = await self._signed(VERSION) if version is None else version
        states = tuple(np.empty(end - first, np.float32) for _ in range(geometry.states))
        reads = [
            self.channel.read(self._remote, self._state_offset(wanted, index, first), into)
            for index, into in enumerate(map(bytes_of, states))
        ]
        since, _ = await asyncio.gather(self._signed(STATE_SINCE), asyncio.gather(*reads))
        if await self._signed(VERSION) == wanted or (version is not None and still()):
            return Part(first, end, wanted, states), since
        return None

    async def _signed(self, index: int) -> int:
        """Read a word of the header."""
        word = np.zeros(1, np.int64)
        await self.channel.read(self._remote, index * WORD, bytes_of(word))
        return int(word[0])

    def _state_offset(self, version: int, index: int, element: int) -> int:
        return self._geometry.state_offset(version, index) + STATE_BYTES * element

    async def states(self, version: int | None) -> tuple[int, list[Floats]] | None:
        """Return what `InPlace.states` does. Raises Unavailable, AccessRefused."""
        found = await self.read_part(0, self._geometry.elements, version, lambda: False)
        if found is None:
            return None
        part, since = found
        return part.version - since, list(part.states)

    def close(self) -> None:
        self._remote.close()


def halves(part: slice) -> tuple[slice, ...]:
    """Divide what could not be read at once."""
    middle = (part.start + part.stop) // 2
    if middle == part.start:
        return (part,)
    return slice(part.start, middle), slice(middle, part.stop)


def bytes_of(array: Array) -> memoryview:
    return array.view(np.uint8).data


def _join(tensors: Sequence[Floats], into: Floats) -> None:
    first = 0
    for tensor in tensors:
        copy_into(into[first : first + tensor.size], tensor.reshape(-1))
        first += tensor.size
