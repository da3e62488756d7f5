"""Tensors that share a bucket, and offsets of a region's parts."""

from itertools import pairwise
from math import prod
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base import limits
from slackwater.common.domains.slots.layout import (
    HEADER_BYTES,
    PAGE,
    TINY_MAX,
    TINY_PART,
    Geometry,
    bucket_plan,
    bucket_tensors,
    plan_buckets,
    rule_names,
)
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rules import RULES
from slackwater.loadgen import models
from slackwater.schemas.base import WORKERS_MAX, JobId
from slackwater.schemas.placement import JobPlan
from slackwater.schemas.tensors import TensorSpec, UpdateRule, first_difference

PLAN = JobPlan(
    job=JobId("j1"), workers=2, gradient_dtype="float32", update=UpdateRule(), layout_epoch=0,
    token="00" * 16,
)  # fmt: skip

shapes = st.lists(st.integers(1, 700), min_size=1, max_size=2)
tensor_lists = st.lists(shapes, min_size=1, max_size=30).map(
    lambda every: tuple(
        TensorSpec(name=f"t{index}", shape=tuple(shape)) for index, shape in enumerate(every)
    )
)


@given(tensor_lists, st.integers(1, 200_000))
def test_every_tensor_is_in_one_bucket_and_only_small_ones_share(
    tensors: tuple[TensorSpec, ...], bucket_bytes: int
) -> None:
    buckets = plan_buckets(tensors, bucket_bytes)
    covered = [tensor for bucket in buckets for tensor in bucket_tensors(bucket, tensors)]
    assert tuple(covered) == tensors
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        own = bucket_tensors(bucket, tensors)
        assert bucket.elements == sum(prod(tensor.shape) for tensor in own)
        if prod(own[0].shape) * 4 >= bucket_bytes:
            assert bucket.count <= 1 + TINY_MAX
            assert all(prod(tensor.shape) * 4 * TINY_PART <= bucket_bytes for tensor in own[1:])
        elif bucket.count > 1:
            assert bucket.elements * 4 <= bucket_bytes
            assert all(prod(tensor.shape) * 4 < bucket_bytes for tensor in own)
    for left, right in pairwise(buckets):
        first = prod(bucket_tensors(right, tensors)[0].shape)
        assert (left.elements + first) * 4 > bucket_bytes, "a bucket was closed too early"


def test_a_bias_goes_with_its_weight_so_that_round_robin_deals_weights_evenly() -> None:
    """Regression: fc6, fc7 and fc8 of AlexNet, biases between them, all fell to one server."""
    tensors = models.tensors("alexnet", 0.3)
    buckets = plan_buckets(tensors)
    turn = {
        bucket_tensors(bucket, tensors)[0].name: bucket.index % 2
        for bucket in buckets
        if bucket.elements > 1_000_000
    }
    assert len(turn) == 3
    assert len(set(turn.values())) == 2, turn


def test_vgg19_large_tensors_have_buckets_of_their_own() -> None:
    tensors = models.tensors("vgg19", 1.0)
    buckets = plan_buckets(tensors)
    large = {t.name for t in tensors if prod(t.shape) * 4 >= limits.BUCKET_BYTES}
    firsts = {bucket_tensors(bucket, tensors)[0].name for bucket in buckets}
    assert len(large) > 10
    assert large <= firsts


@given(
    st.integers(1, 100_000),
    st.integers(1, WORKERS_MAX),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.sampled_from(sorted(RULES)),
)
def test_parts_are_page_aligned_and_never_overlap(
    elements: int, workers: int, dtype: str, rule: str
) -> None:
    geometry = Geometry(elements, workers, dtype, RULES[rule].states)  # type: ignore[arg-type]
    parts = [(0, HEADER_BYTES)]
    parts += [(geometry.gradient_offset(r), geometry.gradient_bytes) for r in range(workers)]
    parts += [(geometry.parameters_offset(v), geometry.parameter_bytes) for v in (0, 1)]
    parts += [
        (geometry.state_offset(v, i), geometry.parameter_bytes)
        for i in range(geometry.states)
        for v in (0, 1)
    ]
    parts.sort()
    for (start, nbytes), (after, _) in zip(parts, [*parts[1:], (geometry.nbytes, 0)], strict=True):
        assert start % PAGE == 0
        assert start + nbytes <= after
    words = [
        offset
        for rank in range(workers)
        for offset in (
            geometry.pushed_offset(rank),
            geometry.counters_offset(rank),
            geometry.counters_offset(rank) + 8,
        )
    ]
    assert len(set(words)) == 3 * workers
    assert all(offset % 8 == 0 and offset < HEADER_BYTES for offset in words)
    with pytest.raises(IndexError):
        geometry.gradient_offset(workers)


def test_version_selects_the_buffer() -> None:
    geometry = Geometry(10, 2, "float32", 1)
    assert geometry.parameters_offset(4) == geometry.parameters_offset(0)
    assert geometry.parameters_offset(5) == geometry.parameters_offset(1)
    assert geometry.parameters_offset(4) != geometry.parameters_offset(5)
    assert geometry.state_offset(6, 0) != geometry.state_offset(7, 0)


def test_a_large_tensor_is_divided_and_the_tiny_ones_stay_with_its_end() -> None:
    """Parts begin at pages of their regions whatever the gradients' dtype; undivided ones stay as
    they are; a layout that fits no such division is not taken for one."""
    tensors = (
        TensorSpec(name="small", shape=(70_000,)),
        TensorSpec(name="fc", shape=(3_000, 1_000)),
        TensorSpec(name="bias", shape=(1_000,)),
        TensorSpec(name="next", shape=(600_000,)),
    )
    buckets = plan_buckets(tensors, divide_bytes=5_000_000)
    assert [(b.first, b.count, b.elements, b.start) for b in buckets] == [
        (0, 1, 70_000, 0),
        (1, 1, 1_048_576, 0),
        (1, 1, 1_048_576, 1_048_576),
        (1, 2, 3_000_000 - 2 * 1_048_576 + 1_000, 2 * 1_048_576),
        (3, 1, 600_000, 0),
    ]
    assert [b.index for b in buckets] == list(range(5))
    own = [bucket_tensors(bucket, tensors) for bucket in buckets]
    assert [t.shape for t in own[3]] == [(902_848,), (1_000,)]
    assert [t.name for t in own[1]] == ["fc"]
    assert sum(prod(t.shape) for each in own for t in each) == sum(prod(t.shape) for t in tensors)
    wrong = msgspec.structs.replace(buckets[1], elements=1_000_000)
    assert bucket_tensors(wrong, tensors) == tensors[1:2]
    assert plan_buckets(tensors, divide_bytes=64_000_000) == plan_buckets(tensors)


def test_tensors_of_different_rules_never_share_and_a_region_keeps_its_own_states() -> None:
    tensors = (
        TensorSpec(name="a", shape=(3,)),
        TensorSpec(name="b", shape=(3,), update=UpdateRule(name="adagrad")),
        TensorSpec(name="c", shape=(3,), update=UpdateRule(name="nonnegative")),
        TensorSpec(name="d", shape=(3,), update=UpdateRule(name="nonnegative")),
    )
    buckets = plan_buckets(tensors)
    assert [bucket.count for bucket in buckets] == [1, 1, 2]
    assert rule_names(PLAN, tensors) == ["adagrad", "nonnegative", "sgd"]
    found = []
    for bucket in buckets:
        own = bucket_tensors(bucket, tensors)
        memory = bytearray(SlotRegion.nbytes_of(PLAN, bucket, own))
        made = SlotRegion.format(memory, PLAN, bucket, tensors, 0)
        opened = SlotRegion.open(memory)
        assert opened.plan == made.plan == bucket_plan(PLAN, own)
        found.append((opened.plan.update.name, opened.geometry.states))
    assert found == [("sgd", 0), ("adagrad", 1), ("nonnegative", 0)]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"group": 1}, "tensor 0, w, has another group in the job's list"),
        ({"update": UpdateRule(name="nonnegative")}, "tensor 0, w, has another update"),
        ({"shape": (2, 3)}, "tensor 0 is w [2, 3], but w [3, 2] in the job's list"),
    ],
)
def test_ranks_that_describe_a_tensor_differently_are_told_in_what(
    other: dict[str, Any], named: str
) -> None:
    mine = TensorSpec(name="w", shape=(3, 2))
    assert first_difference((mine,), (mine,)) == ""
    assert named in first_difference((mine,), (msgspec.structs.replace(mine, **other),))


def test_a_tensor_has_no_rule_that_is_all_of_a_jobs() -> None:
    with pytest.raises(ValueError, match="the rule sum is of all tensors of a job"):
        TensorSpec(name="w", shape=(1,), update=UpdateRule(name="sum"))
