"""A region explains itself, and opens only when it is whole."""

import mmap
import os
import struct

import numpy as np
import pytest
from tests.regions import count

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.layout import HEADER_BYTES, plan_buckets, tensor_at
from slackwater.common.domains.slots.region import SlotRegion, owner_word
from slackwater.common.domains.slots.rules import Hyper
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import JobPlan
from slackwater.schemas.tensors import TensorSpec, UpdateRule

TENSORS = (
    TensorSpec(name="weight", shape=(30, 7)),
    TensorSpec(name="bias", shape=(30,)),
    TensorSpec(name="large", shape=(600, 1000)),
)
BUCKETS = plan_buckets(TENSORS)
PLAN = JobPlan(
    job=JobId("j1"),
    workers=3,
    gradient_dtype="bfloat16",
    update=UpdateRule(name="adam", learning_rate=0.5),
    layout_epoch=4,
    token="secret",
)


def make(fd: int = -1) -> tuple[mmap.mmap, SlotRegion]:
    memory = mmap.mmap(fd, SlotRegion.nbytes_of(PLAN, BUCKETS[0], TENSORS[:2]))
    view = memoryview(memory)
    return memory, SlotRegion.format(view, PLAN, BUCKETS[0], TENSORS, 9, owner="a1")


def test_what_was_formatted_opens_with_all_that_an_aggregator_must_know() -> None:
    memory, made = make()
    made.set_pushed(2, 17)
    made.set_hyper(1, Hyper(0.25, weight_decay=0.5))
    made.gradient(1)[:] = 3
    made.state(5, 1)[:] = 2.5
    made.initialize(6)
    opened = SlotRegion.open(memoryview(memory))
    assert (opened.plan, opened.bucket, opened.tensors) == (PLAN, BUCKETS[0], TENSORS[:2])
    assert (opened.layout_epoch, opened.location_epoch, opened.version) == (4, 9, 6)
    assert opened.initialized
    assert opened.owner == owner_word("a1") != owner_word("a2")
    assert opened.identity == made.identity
    assert opened.all_pushed() == [0, 0, 17]
    assert opened.version_word().tolist() == [6]
    assert opened.hyper(1) == Hyper(0.25, weight_decay=0.5)
    assert (opened.gradient(1) == 3).all()
    assert (opened.gradient(0) == 0).all()
    assert (opened.state(1, 1) == 2.5).all()


def test_each_number_of_a_region_is_kept_for_whoever_opens_it_next() -> None:
    memory, made = make()
    names = (
        "version", "location_epoch", "owner", "transfer", "folds", "task_cpu_ns", "copied_bytes",
        "counted",
    )  # fmt: skip
    for number, name in enumerate(names, 3):
        setattr(made, name, number)
    opened = SlotRegion.open(memoryview(memory))
    assert [getattr(opened, name) for name in names] == list(range(3, 3 + len(names)))


def test_counters_begin_anew_for_every_rank() -> None:
    _, region = make()
    for rank in range(3):
        count(region, rank, pushed=4, pulled=5)
    region.copied_bytes, region.counted = 6, 7
    assert region.bytes_moved() == (18, 15)
    region.count_anew()
    assert (region.bytes_moved(), region.counted) == ((0, 0), 0)


@pytest.mark.parametrize("missing", [1, 100])
def test_memory_that_does_not_hold_what_a_region_says_of_itself_is_refused(missing: int) -> None:
    memory, made = make()
    _version, _checksum, offset, length = struct.unpack_from("<8xIIQQ", memory)
    assert offset == made.geometry.nbytes
    used = offset + length
    with pytest.raises(Rejected, match="bytes of memory"):
        SlotRegion.format(memoryview(bytearray(used - missing)), PLAN, BUCKETS[0], TENSORS[:2], 9)
    SlotRegion.format(memoryview(bytearray(used)), PLAN, BUCKETS[0], TENSORS[:2], 9)


def test_two_regions_of_one_bucket_can_be_told_apart() -> None:
    assert make()[1].identity != make()[1].identity


def test_elements_have_names() -> None:
    _, region = make()
    found = [tensor_at(region.tensors, e) for e in (0, 209, 210, 239)]
    assert found == ["weight", "weight", "bias", "bias"]
    with pytest.raises(IndexError):
        tensor_at(region.tensors, 240)


def test_a_mapping_of_the_same_memory_sees_words_and_counters() -> None:
    """The worker's end and the aggregator's end are two mappings."""
    fd = os.memfd_create("region")
    os.ftruncate(fd, SlotRegion.nbytes_of(PLAN, BUCKETS[0], TENSORS[:2]))
    memory, ours = make(fd)
    theirs = SlotRegion.open(memoryview(mmap.mmap(fd, len(memory))))
    os.close(fd)
    count(theirs, 0, pushed=480)
    count(theirs, 2, pushed=20)
    count(theirs, 1, pulled=960)
    ours.copied_bytes = 5
    assert ours.bytes_moved() == (505, 960)
    assert (ours.bytes_pushed(2), ours.bytes_pulled(1)) == (20, 960)
    theirs.set_pushed(1, 3)
    assert ours.pushed(1) == 3
    at = ours.geometry.pushed_offset(1)
    assert struct.unpack_from("<Q", memory, at) == (3,)


@pytest.mark.parametrize(
    ("offset", "nbytes", "says"),
    [
        (0, b"\0" * 8, "no region"),
        (8, b"\x63\0\0\0", "format 99"),
        (12, b"\xff\xff\xff\xff", "checksum"),
        (24, struct.pack("<Q", 2**40), "record ends"),
    ],
)
def test_a_damaged_region_does_not_open(offset: int, nbytes: bytes, says: str) -> None:
    memory, _ = make()
    memory[offset : offset + len(nbytes)] = nbytes
    with pytest.raises(Rejected, match=says):
        SlotRegion.open(memoryview(memory))


def test_a_half_formatted_region_does_not_open() -> None:
    """Its maker was killed before the last store, the magic."""
    memory, _ = make()
    fresh = mmap.mmap(-1, len(memory))
    fresh[8:] = memory[8:]
    with pytest.raises(Rejected, match="killed before it was complete"):
        SlotRegion.open(memoryview(fresh))
    with pytest.raises(Rejected, match="not a region"):
        SlotRegion.open(memoryview(bytearray(100)))


def test_tensors_that_are_not_the_buckets_are_refused() -> None:
    memory = bytearray(10**6)
    with pytest.raises(Rejected, match="240 elements"):
        SlotRegion.format(memory, PLAN, BUCKETS[0], TENSORS[1:], 0)


def test_too_little_memory_is_refused_with_both_sizes() -> None:
    with pytest.raises(Rejected, match=r"20000 bytes of memory, \d+ are needed"):
        SlotRegion.format(bytearray(20_000), PLAN, BUCKETS[0], TENSORS, 0)


def test_views_are_the_memory_itself() -> None:
    memory, region = make()
    region.parameters(3)[10] = 1.5
    assert np.frombuffer(memory, np.float32)[region.geometry.parameters_offset(3) // 4 + 10] == 1.5


def test_an_order_outlives_its_writer_unless_it_is_torn() -> None:
    memory, region = make()
    assert region.order == b""
    region.set_order(b"copy to a2")
    opened = SlotRegion.open(memoryview(memory))
    assert opened.order == b"copy to a2"
    memory[512 + 8] ^= 1
    assert opened.order == b""
    with pytest.raises(Rejected, match="5000 bytes"):
        region.set_order(b"x" * 5000)


def test_what_is_shorter_than_a_header_is_refused_by_its_size() -> None:
    with pytest.raises(Rejected, match=f"{HEADER_BYTES - 1} bytes are not a region"):
        SlotRegion.open(memoryview(bytearray(HEADER_BYTES - 1)))
    with pytest.raises(Rejected, match="no region, or one whose maker was killed"):
        SlotRegion.open(memoryview(bytearray(HEADER_BYTES)))
