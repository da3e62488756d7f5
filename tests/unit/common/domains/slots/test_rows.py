"""Pushes of some rows of a sparse table: the format, and the fold beside one of all elements."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.domains.slots import rows as module
from slackwater.common.domains.slots.folding import blame, commit, fold
from slackwater.common.domains.slots.layout import (
    BLOCK_BYTES,
    BLOCKS_MAX,
    ROWS,
    block_count,
    bucket_tensors,
    plan_buckets,
)
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rows import Spread
from slackwater.common.domains.slots.rules import Floats, Hyper
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import BucketLayout, JobPlan
from slackwater.schemas.tensors import TensorSpec, UpdateRule

COUNT, WIDTH = 12, 3


def a_region(rule: str = "sgd", *, sparse: bool = True) -> SlotRegion:
    plan = JobPlan(
        job=JobId("a"), workers=2, gradient_dtype="float32",
        update=UpdateRule(name=rule, learning_rate=0.5), consistency="asynchronous", staleness=0,
        layout_epoch=0, token="",
    )  # fmt: skip
    elements = COUNT * WIDTH
    layout = BucketLayout(index=0, first=0, count=1, elements=elements)
    tensors = (TensorSpec(name="t", shape=(COUNT, WIDTH), sparse=sparse),)
    region = SlotRegion.format(
        bytearray(SlotRegion.nbytes_of(plan, layout, tensors)), plan, layout, tensors, 0
    )
    region.parameters(0)[:] = np.arange(elements, dtype=np.float32)
    region.initialize(0)
    for rank in range(2):
        region.set_hyper(rank, Hyper.of(plan.update))
    return region


def push(region: SlotRegion, rank: int, rows: list[int], values: Floats) -> None:
    word, place = module.write(region.gradient(rank), np.array(rows, np.uint32), WIDTH)
    place[:] = values
    region.rank_block(rank)[ROWS] = word


def ones(count: int) -> Floats:
    return np.ones((count, WIDTH), np.float32)


STEP = st.tuples(
    st.integers(0, 1),
    st.lists(st.integers(0, COUNT - 1), unique=True, max_size=8).map(sorted),
    st.sampled_from(["", "", "", "killed", "moved", "refused", "whole"]),
)


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "nonnegative"])
@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEP, min_size=1, max_size=12))
def test_rows_count_as_in_a_push_of_all_elements(
    rule: str, steps: list[tuple[int, list[int], str]]
) -> None:
    region, plain = a_region(rule), a_region(rule)
    rng = np.random.default_rng(1)
    for rank, rows, how in steps:
        _disturb(region, how, rank)
        values = rng.normal(size=(len(rows), WIDTH)).astype(np.float32)
        whole = np.zeros((COUNT, WIDTH), np.float32)
        whole[rows] = values
        if how == "whole":
            region.gradient(rank)[:] = whole.reshape(-1)
            region.rank_block(rank)[ROWS] = module.ALL
        else:
            push(region, rank, rows, values)
        plain.gradient(rank)[:] = whole.reshape(-1)
        assert fold(region, alone=rank)
        assert fold(plain, alone=rank)
        version = commit(region, rank)
        assert version == commit(plain, rank)
        assert region.parameters(version).tobytes() == plain.parameters(version).tobytes()
        if rule == "adagrad":
            assert region.state(version, 0).tobytes() == plain.state(version, 0).tobytes()


def _disturb(region: SlotRegion, how: str, rank: int) -> None:
    """Leave the other buffers as a fold does that was not committed."""
    if how == "refused":
        push(region, rank, [1, 3], np.full((2, WIDTH), np.nan, np.float32))
        assert not fold(region, alone=rank)
    if how not in ("killed", "moved"):
        return
    other = region.version + 1
    region.parameters(other)[:] = -7.0
    if region.geometry.states:
        region.state(other, 0)[:] = -7.0
    if how == "killed":
        region.lacking = None  # Another process: it knows nothing.
    else:
        region.location_epoch += 1  # Another aggregator had it.


def test_an_update_writes_what_it_touches_and_what_the_last_one_did() -> None:
    region = a_region()
    for rows in ([1], [4, 5]):
        push(region, 0, rows, ones(len(rows)))
        assert fold(region, alone=0)
        commit(region, 0)
    other = region.parameters(region.version + 1)
    other[:] = -7.0
    push(region, 0, [9], ones(1))
    assert fold(region, alone=0)
    written = np.flatnonzero((other.reshape(COUNT, WIDTH) != -7.0).all(1))
    assert written.tolist() == [4, 5, 9]


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([4, 3], "not in order"),
        ([4, 4], "twice in it"),
        ([0, 12], "has row 12, its bucket has 12"),
        ([2**32 - 1], "its bucket has 12"),
    ],
)
def test_rows_that_are_not_there_are_refused(rows: list[int], why: str) -> None:
    region = a_region()
    push(region, 1, rows, ones(len(rows)))
    before = region.parameters(0).copy()
    assert not fold(region, alone=1)
    refusal = blame(region, alone=1)
    assert why in refusal.why
    assert (refusal.worker, refusal.tensor) == (1, "t")
    assert region.parameters(0).tobytes() == before.tobytes()


@pytest.mark.parametrize("word", [2**63, 2**64 - 1, 11, 12, COUNT * WIDTH + 2])
def test_a_word_that_no_push_can_have_is_refused(word: int) -> None:
    region = a_region()
    region.rank_block(0)[ROWS] = word
    assert not fold(region, alone=0)
    assert "no room" in blame(region, alone=0).why


@pytest.mark.parametrize(("rule", "sparse"), [("adam", True), ("momentum", True), ("sgd", False)])
def test_a_table_that_knows_no_rows_refuses_them(rule: str, sparse: bool) -> None:
    region = a_region(rule, sparse=sparse)
    push(region, 0, [0], ones(1))
    assert not fold(region, alone=0)
    assert f"a sparse table by {rule} has no use" in blame(region, alone=0).why


def test_what_is_not_finite_is_named_by_its_value() -> None:
    region = a_region()
    values = ones(2)
    values[1, 2] = np.inf
    push(region, 0, [4, 7], values)
    assert not fold(region, alone=0)
    assert blame(region, alone=0).why == "its gradient contains inf"


def test_a_sum_that_overflows_is_named() -> None:
    region = a_region()
    region.parameters(0)[5 * WIDTH] = 3e38
    push(region, 0, [5], np.full((1, WIDTH), -3e38, np.float32))
    assert not fold(region, alone=0)
    assert "the update overflows: gradient 3e+38, parameter 3e+38" in blame(region, alone=0).why


@given(rows=st.integers(1, 3_000_000), width=st.integers(1, 2000))
def test_blocks_are_whole_rows_and_cover_the_table(rows: int, width: int) -> None:
    dense = TensorSpec(name="a", shape=(2, 3))
    tensors = (dense, TensorSpec(name="t", shape=(rows, width), sparse=True), dense)
    buckets = plan_buckets(tensors)
    blocks = [each for each in buckets if each.first <= 1 < each.first + each.count]
    assert all(each.count == 1 for each in blocks), "nothing else is in a block"
    assert len(blocks) == block_count(rows, width) <= BLOCKS_MAX
    assert len(blocks) == 1 or rows * width * 4 > BLOCK_BYTES
    assert [each.index for each in buckets] == [*range(len(buckets))]
    at = 0
    for block in blocks:
        assert block.start == at
        at += block.elements
        (own,) = bucket_tensors(block, tensors)
        assert own.sparse
        assert own.shape == (block.elements // width, width)
    assert at == rows * width


@given(rows=st.integers(1, 400), blocks=st.integers(1, 8))
def test_rows_are_permuted_where_there_are_several_blocks(rows: int, blocks: int) -> None:
    places = Spread(rows, blocks)(np.arange(rows))
    assert sorted(places) == [*range(rows)]
    if blocks == 1:
        assert (places == np.arange(rows)).all()


def test_neighbours_go_to_different_blocks() -> None:
    places = Spread(80_000, 8)(np.arange(800)) // 10_000
    assert np.bincount(places, minlength=8).tolist() == pytest.approx([100] * 8, abs=2)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2, 2)])
def test_a_sparse_tensor_is_a_table(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="give rows, width"):
        TensorSpec(name="t", shape=shape, sparse=True)
