"""Gradients in 8 bits: against arithmetic with fractions, and the compiled packing against it."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from slackwater.common.domains.slots.elements import pack_blocks, sum_packed
from slackwater.common.domains.slots.folding import blame, commit, fold, replay
from slackwater.common.domains.slots.gradient_squares import EACH
from slackwater.common.domains.slots.layout import plan_buckets
from slackwater.common.domains.slots.packed import (
    BLOCK,
    Floats,
    Packed,
    elements_of,
    pack,
    packed_bytes,
    unpack,
)
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rules import Hyper
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import JobPlan
from slackwater.schemas.tensors import TensorSpec, UpdateRule

LEAST = Fraction(2) ** -100
any_float = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = st_np.arrays(np.float32, st.integers(1, 100), elements=any_float)
weird = st_np.arrays(np.float32, st.integers(1, 70), elements=st.floats(width=32))


def slowly(block: Floats) -> list[Fraction]:
    """Round a block's values to what 8 bits and a power of two can say, by the definition."""
    values = [Fraction(float(value)) for value in block]
    largest = max(map(abs, values))
    if largest < LEAST:
        return [Fraction(0)] * len(values)
    power = 0
    while Fraction(2) ** (power + 1) <= largest:
        power += 1
    while Fraction(2) ** power > largest:
        power -= 1
    unit = Fraction(2) ** (power - 6)
    return [unit * max(-127, min(127, round(value / unit))) for value in values]


@given(arrays)
@example(np.float32([2**-100, 2**-101, -(2**-107)]))
@example(np.float32([3.4028235e38, -1.0]))
@example(np.float32([1.0, 127.5 / 64, 0.5 / 64, 1.5 / 64, -2.5 / 64]))
def test_each_value_is_the_nearest_one_that_its_block_can_say(values: Floats) -> None:
    got = [Fraction(float(value)) for value in unpack(pack(values))]
    expected = [
        value
        for first in range(0, len(values), BLOCK)
        for value in slowly(values[first : first + BLOCK])
    ]
    assert got == expected


@given(weird)
def test_the_compiled_packing_gives_the_same_bytes(values: Floats) -> None:
    packed = np.full(packed_bytes(len(values)), 99, np.uint8)
    pack_blocks(values, packed)
    expected = pack(values)
    for block in range(-(-len(values) // BLOCK)):
        at = slice(block * BLOCK, min((block + 1) * BLOCK, len(values)))
        assert packed[len(values) + block] == expected[len(values) + block]
        assert (packed[at] == expected[at]).all()
        got, whole = unpack(packed)[at], np.isfinite(values[at]).all()
        assert (np.isinf(got) == ~np.isfinite(values[at])).all()
        assert whole or not got[np.isfinite(got)].any()


@given(arrays)
def test_what_was_packed_stays_as_it_is(values: Floats) -> None:
    once = unpack(pack(values))
    assert (unpack(pack(once)) == once).all()


@given(arrays)
def test_an_error_is_small_beside_the_largest_of_its_block(values: Floats) -> None:
    errors = np.abs(unpack(pack(values)).astype(np.float64) - values.astype(np.float64))
    for first in range(0, len(values), BLOCK):
        block = np.abs(values[first : first + BLOCK].astype(np.float64))
        assert errors[first : first + BLOCK].max() <= max(block.max() / 128, 2.0**-100)


@pytest.mark.parametrize("elements", [1, 31, 32, 33, 64, 65, 1000])
def test_the_size_says_how_many_elements(elements: int) -> None:
    assert elements_of(packed_bytes(elements)) == elements
    assert packed_bytes(elements) == elements + -(-elements // 32)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_sums_of_squares_are_those_of_what_was_packed(workers: int) -> None:
    rng = np.random.default_rng(workers)
    values = [unpack(pack(rng.standard_normal(40_003).astype(np.float32))) for _ in range(workers)]
    slots, stride = _side_by_side([pack(each) for each in values])
    g, sums = np.empty(40_003, np.float32), np.zeros(8)
    each = np.empty(40_003, np.float32)
    inverse = np.float32(1 / workers)
    sum_packed(slots, stride, workers, 40_003, 0, inverse, g, None, sums)
    expected = sum(float((value.astype(np.float64) ** 2).sum()) for value in values)
    assert sums[EACH] == pytest.approx(expected, rel=1e-5)
    sum_packed(slots, stride, workers, 40_003, 0, inverse, g, each, sums)
    np.testing.assert_allclose(each, sum(value**2 for value in values), rtol=1e-5)


def _side_by_side(packed: list[Packed]) -> tuple[Packed, int]:
    stride = -(-packed[0].size // 4096) * 4096
    slots = np.zeros(stride * len(packed), np.uint8)
    for rank, each in enumerate(packed):
        slots[rank * stride : rank * stride + each.size] = each
    return slots, stride


TENSORS = (TensorSpec(name="weight", shape=(50, 4)), TensorSpec(name="bias", shape=(9,)))
UPDATE = UpdateRule(name="nesterov", learning_rate=0.7, momentum=0.9)


def region(workers: int) -> SlotRegion:
    plan = JobPlan(
        job=JobId("j1"), workers=workers, gradient_dtype="int8", update=UPDATE, layout_epoch=0,
        token="",
    )  # fmt: skip
    bucket = plan_buckets(TENSORS)[0]
    made = SlotRegion.format(
        bytearray(SlotRegion.nbytes_of(plan, bucket, TENSORS)), plan, bucket, TENSORS, 0
    )
    made.initialize(0)
    for rank in range(workers):
        made.set_hyper(rank, Hyper.of(UPDATE))
    return made


@pytest.mark.parametrize("chunk", [7, 100, 10**6])
def test_a_region_folds_what_workers_packed(chunk: int) -> None:
    rng, made, iterations = np.random.default_rng(5), region(3), []
    for version in range(1, 5):
        packed = [pack(rng.standard_normal(209).astype(np.float32)) for _ in range(3)]
        for rank, each in enumerate(packed):
            made.gradient(rank)[:] = each
        iterations.append(packed)
        assert fold(made, None, chunk)
        assert commit(made) == version
    expected = replay(UPDATE, "int8", np.zeros(209, np.float32), iterations)
    assert (made.parameters(made.version) == expected).all()


def test_a_value_that_is_not_finite_is_found_and_its_worker_named() -> None:
    made = region(2)
    for rank in range(2):
        values = np.ones(209, np.float32)
        values[205] = np.inf if rank else 1.0
        made.gradient(rank)[:] = pack(values)
    assert not fold(made)
    refusal = blame(made)
    assert refusal == ("bias", 1, "its gradient contains inf"), "weight is in the same block"
