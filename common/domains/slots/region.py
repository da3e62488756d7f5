"""A bucket's region: a header that explains itself, slots, buffers. Both ends work in it in place.

A worker writes its slot, its hyper-parameters, then its pushed word; the aggregator folds into the
buffers that `version` does not select and then writes the version word: the single commit point.
Each word is stored by one aligned 8-byte store, and everything it vouches for was stored before it
(x86-64 keeps stores in order; a doorbell through the kernel is a barrier anyway).

The region says what it is (job, bucket, tensors, epochs), so that an aggregator which gets the
memory back after a kill -9 knows what it holds. The magic is written last: a region whose maker was
killed in the middle does not open.

Who owns it is a word, too: `owner` names the aggregator, `transfer` the one it is being moved to
(ARCHITECTURE.md, The slot protocol; services/aggregator/migration.py has the protocol and the
argument).
"""

import functools
import hashlib
import secrets
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.gradient_squares import (
    SQUARES,
    BucketSquares,
    FoldSquares,
    SquaresWords,
)
from slackwater.common.domains.slots.layout import (
    HEADER_BYTES,
    HYPER_BYTES,
    RANK_STRIDE,
    RANKS_OFFSET,
    WORD,
    WORD_STRIDE,
    WORDS_OFFSET,
    Geometry,
    bucket_plan,
    element_count,
    own_tensors,
    pages,
)
from slackwater.common.domains.slots.packed import slot_length
from slackwater.common.domains.slots.rows import Lacking
from slackwater.common.domains.slots.rules import STORED_DTYPES, Floats, Hyper
from slackwater.common.domains.slots.sizes import SIZES, Sizes
from slackwater.schemas.base import Record
from slackwater.schemas.placement import BucketLayout, JobPlan, Tensors
from slackwater.schemas.tensors import TensorSpec

if TYPE_CHECKING:
    from slackwater.common.domains.slots.gpu_kernels import FoldKernels

Buffer = memoryview | bytearray
Words = NDArray[np.uint64]
FoldSpan = Callable[[int, int, Floats, FoldSquares | None], bool]
"""Folds elements [lo, hi) by a step's scalars; whether every value is finite."""

MAGIC: Final = b"SLKWATER"
FORMAT_VERSION: Final = 1
_IDENTITY = struct.Struct("<8sIIQQ16s")
"""Magic, format version, the record's CRC-32, its offset, its length, the bucket's identity."""
ORDER_OFFSET: Final = 512
ORDER_BYTES_MAX: Final = 3072
_ORDER = struct.Struct("<II")
"""The order's CRC-32 and its length; it lies in page 0, after the identity."""


def _word_index(number: int) -> int:
    return (WORDS_OFFSET + number * WORD_STRIDE) // WORD


def _hyper_words(words: Words) -> Words:
    """Each rank's hyper-parameters, (rank, word)."""
    ranks = words[RANKS_OFFSET // WORD :]
    return ranks.reshape(-1, RANK_STRIDE // WORD)[:, : HYPER_BYTES // WORD]


LAYOUT_EPOCH: Final = _word_index(0)
VERSION: Final = _word_index(1)
LOCATION_EPOCH: Final = _word_index(2)
OWNER: Final = _word_index(3)
TRANSFER: Final = _word_index(4)
INITIALIZED: Final = _word_index(5)
STATE_SINCE: Final = _word_index(6)
FOLDS: Final = _word_index(7)
TASK_CPU_NS: Final = _word_index(8)
COPIED_BYTES: Final = _word_index(9)
COUNTED: Final = _word_index(10)


class RegionRecord(Record, kw_only=True, frozen=True):
    """The description of a region: the msgpack at its end."""

    plan: JobPlan
    """The job's, with the bucket's own update rule."""
    bucket: BucketLayout
    tensors: Tensors
    """The bucket's own."""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(RegionRecord)


@functools.lru_cache(1024)
def owner_word(aggregator: str) -> int:
    """An aggregator's id as a word; even (see `transfer`), never 0."""
    digest = hashlib.blake2b(aggregator.encode(), digest_size=WORD).digest()
    return int.from_bytes(digest, "little") & ~1 | 2


class SlotRegion:
    """A region in a writable buffer, which it does not own. Views are views: no copies."""

    def __init__(self, buffer: Buffer, record: RegionRecord, identity: bytes) -> None:
        self.record = record
        self.identity = identity
        """Random, 16 bytes: differs between two regions of one bucket, moves with its bytes."""
        self.geometry = Geometry.of(record.plan, record.bucket)
        # A view of our own: whoever maps the memory may release theirs while a fold works in it.
        self._buffer: memoryview | None = memoryview(buffer)
        self._words: Words = np.frombuffer(buffer, np.uint64, HEADER_BYTES // WORD)
        self._hypers = _hyper_words(self._words)
        self._pushed = self._pushed_words()
        self._applied = tuple(
            slice(self.geometry.applied_offset(0, parity) // WORD, None, RANK_STRIDE // WORD)
            for parity in range(2)
        )
        self.sizes = Sizes(self._words[SIZES], record.plan.active)
        self.squares = SquaresWords(self._words[SQUARES])
        self.measured: BucketSquares | None = None
        """The sums of the fold that is about to be committed."""
        self.look()
        self.prepared: dict[tuple[int, int | None, int], FoldSpan] = {}
        """Prepared spans of a fold (folding.py): by the buffers' parity, whose push it is, and how
        many ranks count."""
        self.step: tuple[bytes, int, int, Floats] | None = None
        """The scalars of the last one, and what they were computed from."""
        self.accepted = b""
        """The ranks' hyper-parameters of the last one."""
        self.lacking: Lacking | None = None

    # Making and opening ---------------------------------------------------------------------------

    @staticmethod
    def nbytes_of(plan: JobPlan, bucket: BucketLayout, tensors: Sequence[TensorSpec]) -> int:
        """The size to make a buffer of, its record included. `tensors`: the bucket's own."""
        record = _record(plan, bucket, tensors)
        return Geometry.of(record.plan, bucket).nbytes + pages(len(_encode(record)))

    @classmethod
    def format(
        cls,
        buffer: Buffer,
        plan: JobPlan,
        bucket: BucketLayout,
        tensors: Sequence[TensorSpec],
        location_epoch: int,
        owner: str = "",
    ) -> "SlotRegion":
        """Make a fresh, uninitialised region in zeroed memory. `tensors`: the bucket's own, or the
        job's whole list. Raises Rejected when the tensors are not the bucket's."""
        record = _record(plan, bucket, tensors)
        own, plan = record.tensors, record.plan
        if len(own) != bucket.count or sum(map(element_count, own)) != bucket.elements:
            raise Rejected(
                f"job {plan.job}, bucket {bucket.index}: its tensors do not have the "
                f"{bucket.elements} elements that its layout says"
            )
        encoded = _encode(record)
        offset = Geometry.of(plan, bucket).nbytes
        if len(buffer) < offset + len(encoded):
            raise Rejected(
                f"job {plan.job}, bucket {bucket.index}: {len(buffer)} bytes of memory, "
                f"{offset + pages(len(encoded))} are needed"
            )
        buffer[offset : offset + len(encoded)] = encoded
        identity = secrets.token_bytes(16)
        region = cls(buffer, record, identity)
        region._set(LAYOUT_EPOCH, plan.layout_epoch)
        region._set(LOCATION_EPOCH, location_epoch)
        region._set(OWNER, owner_word(owner) if owner else 0)
        head = _IDENTITY.pack(
            MAGIC, FORMAT_VERSION, zlib.crc32(encoded), offset, len(encoded), identity
        )
        buffer[WORD : len(head)] = head[WORD:]
        buffer[:WORD] = head[:WORD]
        return region

    @classmethod
    def open(cls, buffer: Buffer) -> "SlotRegion":
        """Raises Rejected when it is not a region, half-formatted, damaged or another release's."""
        if len(buffer) < HEADER_BYTES:
            raise Rejected(f"{len(buffer)} bytes are not a region: it has at least {HEADER_BYTES}")
        magic, version, checksum, offset, length, identity = _IDENTITY.unpack_from(buffer)
        if magic != MAGIC:
            raise Rejected("no region, or one whose maker was killed before it was complete")
        if version != FORMAT_VERSION:
            raise Rejected(f"region format {version}, this release knows {FORMAT_VERSION}")
        if offset + length > len(buffer):
            raise Rejected(
                f"a region of {len(buffer)} bytes whose record ends at {offset + length}"
            )
        encoded = bytes(buffer[offset : offset + length])
        if zlib.crc32(encoded) != checksum:
            raise Rejected("a region whose record is damaged: its checksum differs")
        try:
            record = _decoder.decode(encoded)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Rejected(f"a region whose record does not decode: {error}") from error
        if Geometry.of(record.plan, record.bucket).nbytes != offset:
            raise Rejected("a region whose record does not fit its size")
        return cls(buffer, record, identity)

    def release(self) -> None:
        """Drop our views: the buffer's owner can unmap it."""
        self._words = np.zeros(HEADER_BYTES // WORD, np.uint64)
        self._hypers, self._pushed = _hyper_words(self._words), self._pushed_words()
        self.sizes = Sizes(self._words[SIZES], self.record.plan.active)
        self.squares = SquaresWords(self._words[SQUARES])
        self.prepared.clear()
        self._buffer = None

    # Words ----------------------------------------------------------------------------------------

    def _get(self, index: int) -> int:
        return int(self._words[index])

    def _set(self, index: int, value: int) -> None:
        self._words[index] = value

    @property
    def layout_epoch(self) -> int:
        return self._get(LAYOUT_EPOCH)

    @property
    def version(self) -> int:
        """Complete: `parameters(version)` and `state(version, i)` are valid."""
        return self._get(VERSION)

    @version.setter
    def version(self, value: int) -> None:
        self._set(VERSION, value)

    @property
    def location_epoch(self) -> int:
        return self._get(LOCATION_EPOCH)

    @location_epoch.setter
    def location_epoch(self, value: int) -> None:
        self._set(LOCATION_EPOCH, value)

    @property
    def owner(self) -> int:
        return self._get(OWNER)

    @owner.setter
    def owner(self, value: int) -> None:
        self._set(OWNER, value)

    @property
    def transfer(self) -> int:
        """0, or the word of the aggregator that it is being moved to; its lowest bit is set when
        the bytes are copied, so that two memories exist for a while."""
        return self._get(TRANSFER)

    @transfer.setter
    def transfer(self, value: int) -> None:
        self._set(TRANSFER, value)

    @property
    def initialized(self) -> bool:
        return self._get(INITIALIZED) == 1

    @property
    def state_since(self) -> int:
        """The version at which the optimiser's state was fresh: bias corrections count from it. It
        is below 0 where the state had updates before the job began."""
        since = self._get(STATE_SINCE)
        return since - 2**64 if since >= 2**63 else since

    @property
    def folds(self) -> int:
        return self._get(FOLDS)

    @folds.setter
    def folds(self, value: int) -> None:
        self._set(FOLDS, value)

    @property
    def task_cpu_ns(self) -> int:
        """The profiled CPU time of the bucket's task, 0: not known yet. It moves with it."""
        return self._get(TASK_CPU_NS)

    @task_cpu_ns.setter
    def task_cpu_ns(self, value: int) -> None:
        self._set(TASK_CPU_NS, value)

    @property
    def copied_bytes(self) -> int:
        """Bytes that migrations between hosts copied; a handover on one host copies none."""
        return self._get(COPIED_BYTES)

    @copied_bytes.setter
    def copied_bytes(self, value: int) -> None:
        self._set(COPIED_BYTES, value)

    @property
    def counted(self) -> int:
        """The entry in its aggregator's ledger that its counters went into, or were about to; 0:
        it was never dropped."""
        return self._get(COUNTED)

    @counted.setter
    def counted(self, value: int) -> None:
        self._set(COUNTED, value)

    @property
    def order(self) -> bytes:
        """Return the last argument of `set_order`; empty: there was none, or only half of it was
        written."""
        assert self._buffer is not None, "the region was released"
        checksum, length = _ORDER.unpack_from(self._buffer, ORDER_OFFSET)
        first = ORDER_OFFSET + _ORDER.size
        order = bytes(self._buffer[first : first + min(length, ORDER_BYTES_MAX)])
        return order if zlib.crc32(order) == checksum else b""

    def set_order(self, order: bytes) -> None:
        """Remember, beyond our life, where the region is being copied to. Raises Rejected."""
        assert self._buffer is not None, "the region was released"
        if len(order) > ORDER_BYTES_MAX:
            raise Rejected(f"an order of {len(order)} bytes, at most {ORDER_BYTES_MAX} fit")
        start = ORDER_OFFSET + _ORDER.size
        self._buffer[start : start + len(order)] = order
        _ORDER.pack_into(self._buffer, ORDER_OFFSET, zlib.crc32(order), len(order))

    @property
    def active_now(self) -> int:
        """How many ranks count in the next version, from rank 0 on: all, but of an elastic job. One
        of virtual ranks changes its number a version late: those who leave or join hear of it."""
        plan = self.record.plan
        if plan.virtual:
            return max(self.sizes.at(self.version + 1).workers, self.sizes.newest.workers)
        return self.sizes.newest.workers if plan.active else plan.workers

    def look(self) -> int:
        """Note how many slots the next version is folded of: `active`. Returns how many ranks count
        in it: they have a slot each, or fill those of virtual ranks."""
        ranks, plan = self.active_now, self.record.plan
        self.active = plan.workers if plan.virtual else ranks
        return ranks

    def initialize(self, version: int, updates: int = 0, *, spare: bool = False) -> None:
        """The parameters of `version` are in place; the states are fresh (zero), or have had so
        many updates. `spare`: they stand in, and the region stays bare."""
        self._set(STATE_SINCE, (version - updates) % 2**64)
        self._set(VERSION, version)
        self._set(INITIALIZED, not spare)
        self.lacking = None

    # A rank's block -------------------------------------------------------------------------------

    def pushed(self, rank: int) -> int:
        """The iteration of the rank's newest push."""
        return self._get(self.geometry.pushed_offset(rank) // WORD)

    def set_pushed(self, rank: int, iteration: int) -> None:
        """Last of all: the slot and the hyper-parameters are written."""
        self._set(self.geometry.pushed_offset(rank) // WORD, iteration)

    def all_pushed(self) -> list[int]:
        """Every rank's pushed word."""
        words: list[int] = self._pushed.tolist()
        return words

    def _pushed_words(self) -> Words:
        every = slice(self.geometry.pushed_offset(0) // WORD, None, RANK_STRIDE // WORD)
        return self._words[every][: self.geometry.workers]

    def version_word(self) -> Words:
        """A view of it, for a party that outlives this object."""
        return self._words[VERSION : VERSION + 1]

    def applied_words(self, version: int) -> Words:
        """A view of what `set_applied` wrote."""
        return self._words[self._applied[version & 1]][: self.geometry.workers]

    def applied(self) -> list[int]:
        """Return the newest iteration of each rank that `version` contains. Jobs whose updates are
        not synchronous keep it; in others the version says it."""
        words: list[int] = self.applied_words(self.version).tolist()
        return words

    def set_applied(self, version: int, iterations: Sequence[int]) -> None:
        """Note the newest iteration of each rank that `version` will contain, before the version
        word makes it count."""
        self.applied_words(version)[:] = iterations

    def hyper(self, rank: int) -> Hyper:
        first = self.geometry.hyper_offset(rank) // WORD
        return Hyper.unpack(self._words[first : first + WORD].tobytes())

    def rank_block(self, rank: int) -> memoryview:
        """The rank's 64-bit words, for the one who writes them with every push: `set_pushed` and
        the counters cost more than a small tensor's copy."""
        assert self._buffer is not None, "the region was released"
        first = self.geometry.hyper_offset(rank)
        return self._buffer[first : first + RANK_STRIDE].cast("Q")

    def hyper_blocks(self, ranks: Sequence[int]) -> bytes:
        """Return the blocks that `set_hyper` wrote for consecutive ranks."""
        return self._hypers[ranks[0] : ranks[-1] + 1].tobytes()

    def set_hyper(self, rank: int, hyper: Hyper) -> None:
        first = self.geometry.hyper_offset(rank) // WORD
        self._words[first : first + WORD] = np.frombuffer(hyper.pack(), np.uint64)

    def bytes_pushed(self, rank: int) -> int:
        return self._get(self.geometry.counters_offset(rank) // WORD)

    def bytes_pulled(self, rank: int) -> int:
        return self._get(self.geometry.counters_offset(rank) // WORD + 1)

    def bytes_moved(self) -> tuple[int, int]:
        """(in, out): pushed by all ranks and copied by migrations, pulled by all ranks."""
        ranks = range(self.geometry.workers)
        pushed = sum(self.bytes_pushed(rank) for rank in ranks) + self.copied_bytes
        return pushed, sum(self.bytes_pulled(rank) for rank in ranks)

    def count_anew(self) -> None:
        """Start the counters at zero: theirs went elsewhere."""
        for rank in range(self.geometry.workers):
            first = self.geometry.counters_offset(rank) // WORD
            self._words[first : first + 2] = 0
        self.copied_bytes = 0
        self.counted = 0  # Last: until then they do not count.

    # Views ----------------------------------------------------------------------------------------

    @property
    def kernels(self) -> "FoldKernels | None":
        """Return the kernels that fold it; None: this CPU folds. (gpu_region.py has slots and
        buffers on a device.)"""
        return None

    def to_host(self, array: NDArray[np.generic]) -> NDArray[np.generic]:
        """A part of a slot or buffer as numpy has it."""
        return array

    def _floats(self, offset: int) -> Floats:
        assert self._buffer is not None, "the region was released"
        return np.frombuffer(self._buffer, np.float32, self.geometry.elements, offset)

    def gradient(self, rank: int) -> NDArray[np.generic]:
        """The rank's slot: float32, float16, bfloat16 as uint16, or int8 as it is packed."""
        assert self._buffer is not None, "the region was released"
        geometry = self.geometry
        dtype = STORED_DTYPES[geometry.dtype]
        count = slot_length(geometry.elements, geometry.dtype)
        return np.frombuffer(self._buffer, dtype, count, geometry.gradient_offset(rank))

    def slots(self, dtype: type[np.generic]) -> NDArray[np.generic]:
        """All gradient slots as one array, `slot_stride` bytes apart."""
        assert self._buffer is not None, "the region was released"
        geometry = self.geometry
        count = geometry.workers * geometry.slot_stride // np.dtype(dtype).itemsize
        return np.frombuffer(self._buffer, dtype, count, geometry.slots_offset)

    def parameters(self, version: int) -> Floats:
        return self._floats(self.geometry.parameters_offset(version))

    def state(self, version: int, index: int) -> Floats:
        return self._floats(self.geometry.state_offset(version, index))

    # Properties -----------------------------------------------------------------------------------

    @property
    def plan(self) -> JobPlan:
        return self.record.plan

    @property
    def bucket(self) -> BucketLayout:
        return self.record.bucket

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.record.tensors


def _record(plan: JobPlan, bucket: BucketLayout, tensors: Sequence[TensorSpec]) -> RegionRecord:
    own = own_tensors(bucket, tuple(tensors))
    return RegionRecord(plan=bucket_plan(plan, own), bucket=bucket, tensors=own)
