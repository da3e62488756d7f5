"""The layout of buckets: tensors that share one, and offsets in a bucket's region. Pure arithmetic.

A tensor is the paper's unit of placement (Gu et al. 2021, section 2.2). A tensor of BUCKET_BYTES
or more is a bucket of its own; smaller neighbours share one up to that size: a region, a doorbell
and a turn of the executor each cost more than such a tensor's aggregation, and neighbours become
ready together in the backward pass. The plan depends on the tensors alone.

    page 0          identity: magic, format version, size, a checksum, the bucket's own id
    page 1          64-bit words, each on a cache line of its own
    pages 2 and 3   one block of 128 bytes a rank: hyper-parameters, pushed iteration, counters
    then            W gradient slots, two parameter buffers, two buffers of each optimiser state
    at the end      a msgpack record: the job's plan, the bucket, its tensors

Every part begins on a page. Offsets are what a remote party writes to and reads from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import msgspec

from slackwater.common.base import limits
from slackwater.common.domains.slots.packed import slot_length
from slackwater.common.domains.slots.rules import RULES
from slackwater.schemas.base import WORKERS_MAX
from slackwater.schemas.placement import BucketLayout, JobPlan
from slackwater.schemas.tensors import DType, TensorSpec

PAGE: Final = 4096
WORD: Final = 8
PARAMETER_BYTES: Final = 4
"""Parameters and optimiser states are float32 whatever the gradients' dtype."""
_NUMBER_BYTES: Final[dict[DType, int]] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}

UPDATE_PASSES: Final = 2
"""The update reads and writes parameters and state: charged like so many more workers."""
PART_BYTES: Final = 2 * 1024 * 1024
"""A tensor's parts are multiples of this: of pages, whatever the dtype of gradients, so that they
can be mapped behind one another."""
BLOCK_BYTES: Final = 32 * 1024 * 1024
BLOCKS_MAX: Final = 8
"""A sparse table is divided into blocks of about this size, and into so many at most: each update
is pushed to all of them, which costs some hundred microseconds a block."""
TINY_PART: Final = 16
"""A tensor of at most this part (1/16) of a bucket may go along with the large one before it."""
TINY_MAX: Final = 4
"""Tiny tensors that one large tensor takes along at most: a bias, or a batch-norm's scale and
shift."""

WORDS_OFFSET: Final = PAGE
WORD_STRIDE: Final = 64
RANKS_OFFSET: Final = 2 * PAGE
RANK_STRIDE: Final = 128
HYPER_BYTES: Final = 64
"""At the begin of a rank's block; pushed word, two counters, two applied words, two of what is read
from afar, and how many rows were pushed follow."""
PUSHED: Final = HYPER_BYTES // WORD
BYTES_PUSHED: Final = PUSHED + 1
BYTES_PULLED: Final = PUSHED + 2
SERVED: Final = PUSHED + 5
WANTED: Final = PUSHED + 6
ROWS: Final = PUSHED + 7
"""Words of a rank's block."""
HEADER_BYTES: Final = 4 * PAGE

assert RANKS_OFFSET + WORKERS_MAX * RANK_STRIDE <= HEADER_BYTES
assert HYPER_BYTES + 8 * WORD <= RANK_STRIDE


def tensor_at(tensors: Sequence[TensorSpec], element: int) -> str:
    """Return the name of the tensor that an element of the bucket belongs to."""
    end = 0
    for tensor in tensors:
        end += element_count(tensor)
        if element < end:
            return tensor.name
    raise IndexError(f"element {element} of {end}")


def element_count(tensor: TensorSpec) -> int:
    return prod(tensor.shape)


def plan_buckets(
    tensors: tuple[TensorSpec, ...],
    bucket_bytes: int = limits.BUCKET_BYTES,
    divide_bytes: int = 0,
) -> tuple[BucketLayout, ...]:
    """Every tensor is in exactly one bucket, in order; a bucket of several tensors has at most
    `bucket_bytes`, save that a tensor of that size or more takes the tiny ones behind it along.
    Tensors of different groups, or update rules, never share one.

    A bias goes with its weight: a bucket of its own would cost more than its sum, and dealing
    buckets round robin would put every large weight of a network on the same server.

    With `divide_bytes`, a tensor of more than that is divided into buckets of that size: each can
    be moved while the others are folded. A sparse table is divided into blocks of whole rows.
    """
    buckets: list[BucketLayout] = []
    first = elements = 0
    for position, tensor in enumerate(tensors):
        size = element_count(tensor)
        tiny = size * PARAMETER_BYTES * TINY_PART <= bucket_bytes
        large = first < position and element_count(tensors[first]) * PARAMETER_BYTES >= bucket_bytes
        joins = tiny and large and position - first <= TINY_MAX
        fits = joins or (elements + size) * PARAMETER_BYTES <= bucket_bytes
        alike = (tensor.group, tensor.update) == (tensors[first].group, tensors[first].update)
        alike &= not tensor.sparse and not tensors[first].sparse
        if elements and not (fits and alike):
            buckets.append(_bucket(len(buckets), first, position, elements))
            elements = 0
        if not elements:
            first = position
        elements += size
    if elements:
        buckets.append(_bucket(len(buckets), first, len(tensors), elements))
    buckets = _blocks(tensors, buckets)
    if not divide_bytes:
        return tuple(buckets)
    step = max(1, divide_bytes // PART_BYTES) * PART_BYTES // PARAMETER_BYTES
    return tuple(_divided(tensors, buckets, step))


def block_count(rows: int, width: int) -> int:
    """Return how many blocks a sparse table is divided into."""
    nbytes = rows * width * PARAMETER_BYTES
    blocks = max(1, min(rows, BLOCKS_MAX, -(-nbytes // BLOCK_BYTES)))
    return max(1, -(-rows // -(-rows // blocks))) if rows else 1


def _blocks(tensors: tuple[TensorSpec, ...], buckets: list[BucketLayout]) -> list[BucketLayout]:
    """Divide the buckets of sparse tables."""
    made: list[BucketLayout] = []
    for bucket in buckets:
        table = tensors[bucket.first]
        rows, width = (table.shape[0], table.shape[-1]) if table.sparse else (0, 0)
        step = -(-rows // block_count(rows, width)) * width or bucket.elements
        for start in range(0, bucket.elements, step):
            elements = min(step, bucket.elements - start)
            end = bucket.first + bucket.count
            made.append(_bucket(len(made), bucket.first, end, elements, start))
    return made


def _divided(
    tensors: tuple[TensorSpec, ...], buckets: list[BucketLayout], step: int
) -> list[BucketLayout]:
    """The first tensor of a bucket in parts of `step` elements; the last has the tiny ones too."""
    made: list[BucketLayout] = []
    for bucket in buckets:
        if tensors[bucket.first].sparse:
            made.append(msgspec.structs.replace(bucket, index=len(made)))
            continue
        whole, start = element_count(tensors[bucket.first]), 0
        while whole - start > step:
            made.append(_bucket(len(made), bucket.first, bucket.first + 1, step, start))
            start += step
        left, end = bucket.elements - start, bucket.first + bucket.count
        made.append(_bucket(len(made), bucket.first, end, left, start))
    return made


def _bucket(index: int, first: int, end: int, elements: int, start: int = 0) -> BucketLayout:
    return BucketLayout(index=index, first=first, count=end - first, elements=elements, start=start)


def bucket_tensors(bucket: BucketLayout, tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The bucket's own, out of the job's list; of one that is divided, the part as a flat one."""
    own = tensors[bucket.first : bucket.first + bucket.count]
    if not own:
        return own
    whole, part = element_count(own[0]), bucket.elements - sum(map(element_count, own[1:]))
    if own[0].sparse:
        width = own[0].shape[-1]
        if len(own) > 1 or part % width or bucket.start % width or bucket.start + part > whole:
            return own
        return (msgspec.structs.replace(own[0], shape=(part // width, width)),)
    unit = PART_BYTES // PARAMETER_BYTES
    last = bucket.start > 0 and bucket.start + part == whole
    inside = 0 < part <= whole - bucket.start and bucket.start % unit == 0
    if part == whole or not inside or not (last or part % unit == 0):
        return own  # It is whole, or the layout is not of this list.
    return (msgspec.structs.replace(own[0], shape=(part,)), *own[1:])


def bucket_plan(plan: JobPlan, tensors: Sequence[TensorSpec]) -> JobPlan:
    """Return the plan of a bucket of these tensors: the job's, with their own update rule where
    they have one."""
    own = tensors[0].update if tensors else None
    return plan if own is None else msgspec.structs.replace(plan, update=own)


def rule_names(plan: JobPlan, tensors: Sequence[TensorSpec]) -> list[str]:
    """Return the names of the update rules that a job's tensors have."""
    return sorted({(tensor.update or plan.update).name for tensor in tensors})


def own_tensors(bucket: BucketLayout, tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Return the bucket's own out of these or of the job's list, which may be as long."""
    if len(tensors) == bucket.count and sum(map(element_count, tensors)) == bucket.elements:
        return tensors
    return bucket_tensors(bucket, tensors)


def bucket_start(bucket: BucketLayout, tensors: Sequence[TensorSpec]) -> int:
    """Return the place of the bucket's first element among those of the job's whole list."""
    return sum(map(element_count, tensors[: bucket.first])) + bucket.start


def folded_bytes(parameter_bytes: int, workers: int) -> int:
    """Bytes that one fold goes through, as they are charged: the parameters' size once for each
    worker's gradient and UPDATE_PASSES times for the update, whatever its rule and dtype."""
    return parameter_bytes * (workers + UPDATE_PASSES)


def slot_bytes(elements: int, dtype: DType) -> int:
    """Return the bytes of a gradient of so many elements."""
    return slot_length(elements, dtype) * _NUMBER_BYTES[dtype]


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the parts of a region lie: all that a party needs that cannot map it."""

    elements: int
    workers: int
    dtype: DType
    states: int
    active: int = 0
    """How many of `workers` an elastic job begins with; 0: all count, always."""
    serves: bool = False
    """A slot has room for the parameters, too, and of what they are made: of a job whose updates
    are not synchronous (serving.py)."""
    noise: bool = False
    """Folds keep the sums of squares of gradients in it (gradient_squares.py)."""

    @classmethod
    def of(cls, plan: JobPlan, bucket: BucketLayout) -> "Geometry":
        states, serves = RULES[plan.update.name].states, plan.consistency != "synchronous"
        workers, dtype = plan.workers, plan.gradient_dtype
        return cls(bucket.elements, workers, dtype, states, plan.active, serves, plan.noise)

    @property
    def gradient_bytes(self) -> int:
        return slot_bytes(self.elements, self.dtype)

    @property
    def parameter_bytes(self) -> int:
        return self.elements * PARAMETER_BYTES

    @property
    def slot_stride(self) -> int:
        """From one rank's gradient slot to the next one's."""
        if not self.serves:
            return pages(self.gradient_bytes)
        return pages(max(self.gradient_bytes, self._applied_at + WORD * self.workers))

    @property
    def _applied_at(self) -> int:
        """Return where the applied words begin in a slot that holds parameters."""
        return -(-self.parameter_bytes // WORD) * WORD

    @property
    def nbytes(self) -> int:
        """Without the record at the end."""
        buffers = 2 * (1 + self.states)
        return HEADER_BYTES + self.workers * self.slot_stride + buffers * self._buffer_stride

    @property
    def _buffer_stride(self) -> int:
        return pages(self.parameter_bytes)

    @property
    def slots_offset(self) -> int:
        return HEADER_BYTES

    def gradient_offset(self, rank: int) -> int:
        self._check(rank)
        return HEADER_BYTES + rank * self.slot_stride

    def parameters_offset(self, version: int) -> int:
        return HEADER_BYTES + self.workers * self.slot_stride + (version & 1) * self._buffer_stride

    def state_offset(self, version: int, index: int) -> int:
        if not 0 <= index < self.states:
            raise IndexError(f"state {index} of {self.states}")
        after = self.parameters_offset(0) + 2 * self._buffer_stride
        return after + (2 * index + (version & 1)) * self._buffer_stride

    def hyper_offset(self, rank: int) -> int:
        self._check(rank)
        return RANKS_OFFSET + rank * RANK_STRIDE

    def pushed_offset(self, rank: int) -> int:
        """The iteration of the rank's newest push: written after its slot and its hypers."""
        return self.hyper_offset(rank) + HYPER_BYTES

    def counters_offset(self, rank: int) -> int:
        """Two words: bytes pushed, bytes pulled."""
        return self.pushed_offset(rank) + WORD

    def applied_offset(self, rank: int, version: int) -> int:
        """The newest of the rank's iterations that `version` contains. Like parameters, the words
        of two versions alternate, so that one store commits all."""
        return self.counters_offset(rank) + (2 + (version & 1)) * WORD

    def served_offset(self, rank: int) -> int:
        """Return the place of the word that vouches for the parameters in the rank's slot; the next
        word is 1 where the rank reads over a network."""
        return self.hyper_offset(rank) + SERVED * WORD

    def served_applied_offset(self, rank: int) -> int:
        """Return where the applied words lie behind the parameters in the rank's slot, one word a
        rank."""
        return self.gradient_offset(rank) + self._applied_at

    def rows_offset(self, rank: int) -> int:
        """Return the place of the word that says how many rows the rank pushed (rows.py)."""
        return self.hyper_offset(rank) + ROWS * WORD

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.workers:
            raise IndexError(f"rank {rank} of {self.workers} workers")
