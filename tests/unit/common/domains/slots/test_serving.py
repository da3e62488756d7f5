"""Parameters that a rank reads over a network: a copy in its own slot that no update overtakes."""

import random

import numpy as np
import pytest

from slackwater.common.domains.slots.folding import commit, fold
from slackwater.common.domains.slots.layout import WANTED, Geometry
from slackwater.common.domains.slots.region import SlotRegion, owner_word
from slackwater.common.domains.slots.rules import Hyper
from slackwater.common.domains.slots.serving import serve, served_copy, served_word
from slackwater.schemas.base import JobId
from slackwater.schemas.jobs import Consistency
from slackwater.schemas.placement import BucketLayout, JobPlan
from slackwater.schemas.tensors import DType, TensorSpec, UpdateRule

OWNER = owner_word("a1")


def region(
    consistency: Consistency = "asynchronous",
    dtype: DType = "float32",
    elements: int = 1024,
    workers: int = 3,
) -> SlotRegion:
    """Make a region whose gradients fill whole pages (1,024 elements), so that no room is left
    behind them."""
    plan = JobPlan(
        job=JobId("j"), workers=workers, gradient_dtype=dtype, layout_epoch=0, token="",
        update=UpdateRule(learning_rate=1.0), consistency=consistency, staleness=1,
    )  # fmt: skip
    layout = BucketLayout(index=0, first=0, count=1, elements=elements)
    tensors = (TensorSpec(name="w", shape=(elements,)),)
    buffer = bytearray(SlotRegion.nbytes_of(plan, layout, tensors))
    made = SlotRegion.format(buffer, plan, layout, tensors, 5, owner="a1")
    made.initialize(0)
    for rank in range(workers):
        made.set_hyper(rank, Hyper.of(plan.update))
    return made


def push(it: SlotRegion, rank: int, value: float = 1.0) -> None:
    """One push, applied by itself."""
    it.gradient(rank)[:] = value
    it.set_pushed(rank, it.pushed(rank) + 1)
    before = it.applied()
    assert fold(it, alone=rank)
    commit(it, rank)
    serve(it, before, OWNER)


def word(it: SlotRegion, rank: int) -> int:
    return it.rank_block(rank)[13]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_copy_stays_as_it_was_made_while_others_push(dtype: DType) -> None:
    it = region(dtype=dtype)
    it.rank_block(0)[WANTED] = 1
    push(it, 0)
    parameters, applied = served_copy(it, 0)
    assert word(it, 0) == served_word(5, 1)
    for _ in range(7):
        push(it, 1)
    assert (parameters == -1.0).all()
    assert applied.tolist() == [1, 0, 0]
    assert word(it, 1) == 0, "it did not ask"
    assert it.applied() == [1, 7, 0]


def test_a_stale_synchronous_rank_is_served_when_the_slowest_lets_it_go_on() -> None:
    it = region("stale-synchronous", workers=2)
    it.rank_block(0)[WANTED] = 1
    push(it, 0)
    assert word(it, 0) == served_word(5, 1)
    push(it, 0)
    assert word(it, 0) == served_word(5, 1), "it is held back"
    push(it, 1)
    assert word(it, 0) == served_word(5, 2)
    parameters, applied = served_copy(it, 0)
    assert (parameters == -3.0).all(), "what the other rank pushed is in it"
    assert applied.tolist() == [2, 1]


def test_who_is_not_the_owner_any_more_writes_into_no_slot() -> None:
    it = region()
    it.rank_block(0)[WANTED] = 1
    it.owner = owner_word("a2")
    push(it, 0, 2.0)
    assert word(it, 0) == 0
    assert (it.gradient(0) == 2.0).all()


def test_any_order_of_pushes_serves_each_what_its_own_led_to() -> None:
    rng = random.Random(3)
    for workers in (1, 2, 6):
        it = region(workers=workers)
        for rank in range(workers):
            it.rank_block(rank)[WANTED] = 1
        for _ in range(60):
            rank = rng.randrange(workers)
            push(it, rank)
            parameters, applied = served_copy(it, rank)
            assert (parameters == -float(it.version)).all()
            assert applied.tolist() == it.applied()
            assert word(it, rank) == served_word(5, it.pushed(rank))


@pytest.mark.parametrize("elements", [1, 3, 1024, 1025])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_slot_has_room_for_both_only_where_it_serves(elements: int, dtype: DType) -> None:
    without = Geometry(elements, 64, dtype, 0)
    served = Geometry(elements, 64, dtype, 0, serves=True)
    assert served.slot_stride - without.slot_stride <= 4 * elements + 4096
    end = served.served_applied_offset(0) + 8 * 64
    assert end <= served.gradient_offset(1)
    assert served.served_applied_offset(0) % 8 == 0
    assert without.slot_stride == -(-without.gradient_bytes // 4096) * 4096
    assert np.dtype(np.float32).itemsize * elements == served.parameter_bytes
