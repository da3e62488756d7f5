"""A bucket as the program's thread sees it, with slots that are plain arrays."""

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from slackwater.agent.attachment import Array, Attached
from slackwater.agent.virtual_agent import VirtualAgent
from slackwater.agent.worker_bucket import (
    WorkerBucket,
    check_gradient,
    read_tensors,
    unfit,
)
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.frames import PushRefused
from slackwater.common.domains.slots.packed import pack, packed_bytes, unpack
from slackwater.common.domains.slots.rules import Floats
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import BucketLayout, JobPlan
from slackwater.schemas.tensors import TensorSpec, UpdateRule

SPECS = (TensorSpec(name="w", shape=(2, 3)), TensorSpec(name="b", shape=()))


class Arrays:
    """Slots without a region."""

    def __init__(self, pushed: int = 0) -> None:
        self.gradient: Array = np.zeros(7, np.float32)
        self.pushed = pushed
        self._parameters = [np.zeros(7, np.float32), np.ones(7, np.float32)]

        self.lanes: tuple[int, ...] = ()

    def slot(self, lane: int) -> Array:
        return self.gradient

    def parameters(self, version: int) -> Floats:
        return self._parameters[version & 1]

    def keeps(self, old: Attached, iteration: int) -> bool:
        return old is self or (iteration > 0 and self.pushed == iteration)

    async def seed(self, version: int, tensors: Sequence[Floats]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def made_bucket(slots: Arrays) -> WorkerBucket:
    made = WorkerBucket(BucketLayout(index=0, first=0, count=2, elements=7), SPECS, UpdateRule())
    made.adopt(slots)
    made.version = 0
    return made


W = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.asarray(9.0, np.float32)


def test_an_iteration_is_whole_when_its_last_tensor_is_in_the_slot() -> None:
    slots = Arrays()
    bucket = made_bucket(slots)
    bucket.put(1, B)
    assert (bucket.iteration, bucket.begun, bucket.settled) == (0, True, True)
    bucket.put(0, W)
    assert (bucket.iteration, bucket.settled) == (1, False)
    assert slots.gradient.tolist() == [0, 1, 2, 3, 4, 5, 9]
    bucket.version = 1
    assert bucket.settled


def test_a_slot_that_moves_takes_along_what_was_begun() -> None:
    """One tensor was copied in, the other is being produced in a view of the old slot."""
    old, new = Arrays(), Arrays()
    bucket = made_bucket(old)
    bucket.put(0, W)
    view = bucket.handed_out_views[1] = bucket.gradients[1]
    bucket.adopt(new)
    view[...] = 9.0
    bucket.put(1, None)
    assert new.gradient.tolist() == [0, 1, 2, 3, 4, 5, 9]


def test_a_region_that_is_still_the_same_is_not_written_again() -> None:
    """A retry rings again and never resends: the fold may be reading the slot."""
    bucket = made_bucket(Arrays())
    bucket.put(0, W)
    bucket.put(1, B)
    same = Arrays(pushed=1)
    bucket.adopt(same)
    assert same.gradient.tolist() == [0.0] * 7
    bare = Arrays(pushed=0)
    bucket.slots.gradient[:] = [0, 1, 2, 3, 4, 5, 9]  # type: ignore[union-attr]
    bucket.adopt(bare)
    assert bare.gradient.tolist() == [0, 1, 2, 3, 4, 5, 9]


def test_a_copy_of_before_a_part_was_pushed_gets_that_part() -> None:
    """The bucket was copied when iteration 1 was applied. A tensor of iteration 2 came into the old
    slot before the new one was attached: the copy, whose word says 1, has the one before it."""
    bucket = made_bucket(Arrays())
    bucket.put(0, W)
    bucket.put(1, B)
    bucket.version = 1
    moved = Arrays(pushed=1)
    moved.gradient[:] = [0, 1, 2, 3, 4, 5, 9]
    bucket.put(0, W + 10)
    bucket.adopt(moved)
    bucket.put(1, B + 10)
    assert moved.gradient.tolist() == [10, 11, 12, 13, 14, 15, 19]


def test_after_a_refusal_only_the_named_tensor_is_missing() -> None:
    bucket = made_bucket(Arrays())
    bucket.put(0, W)
    bucket.put(1, B)
    bucket.refused = PushRefused(
        handle=0, iteration=1, job="j", tensor="b", worker=3, why="its gradient contains nan"
    )
    assert bucket.settled
    error = bucket.take_refusal(3)
    assert error is not None
    assert (error.tensor, error.worker, error.iteration) == ("b", 3, 1)
    assert bucket.take_refusal(3) is None
    bucket.put(1, B)
    assert bucket.iteration == 1


def test_parameters_are_shaped_and_cannot_be_written() -> None:
    slots = Arrays()
    bucket = made_bucket(slots)
    bucket.source, bucket.version = slots, 1
    assert bucket.parameters(0).shape == (2, 3)
    assert bucket.parameters(1).shape == ()
    assert bucket.parameters(0).sum() == 6.0
    with pytest.raises(ValueError, match="read-only"):
        bucket.parameters(0)[0, 0] = 1.0


def test_a_layout_of_another_size_is_refused() -> None:
    with pytest.raises(Rejected, match="bucket 4 has 8 elements, its tensors 7"):
        WorkerBucket(BucketLayout(index=4, first=0, count=2, elements=8), SPECS, UpdateRule())


def test_gradients_of_two_bytes() -> None:
    spec = TensorSpec(name="w", shape=(2,))
    assert check_gradient(np.zeros(2, np.float16), spec, "float16") == ""
    assert check_gradient(np.zeros(2, np.uint16), spec, "bfloat16") == ""
    assert "bfloat16 as its bits" in check_gradient(np.zeros(2, np.float32), spec, "bfloat16")


def test_gradients_of_eight_bits_are_packed_once_all_are_there() -> None:
    slots = Arrays()
    slots.gradient = np.zeros(packed_bytes(7), np.uint8)
    layout = BucketLayout(index=0, first=0, count=2, elements=7)
    bucket = WorkerBucket(layout, SPECS, UpdateRule(), dtype="int8")
    bucket.adopt(slots)
    bucket.version = 0
    bucket.put(1, B)
    view = bucket.gradients[0]
    view[...] = W
    assert not slots.gradient.any(), "all share a power of two"
    moved = Arrays()
    moved.gradient = np.zeros(packed_bytes(7), np.uint8)
    bucket.adopt(moved)
    bucket.put(0, None)
    assert unpack(moved.gradient).tolist() == [0, 1, 2, 3, 4, 5, 9]
    assert (bucket.iteration, bucket.bytes_of(0), bucket.bytes_of(1)) == (1, 7, 2)
    assert check_gradient(W, SPECS[0], "int8") == "", "they are packed here"


def test_each_virtual_rank_packs_its_own_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process computes three, one after another, in one room."""
    monkeypatch.delenv("SLACKWATER_JOB", raising=False)
    rng, expected = np.random.default_rng(0), np.zeros(57, np.float32)
    with VirtualAgent(
        virtual_ranks=3, tensors={"a": np.zeros(50, np.float32), "b": np.zeros(7, np.float32)},
        gradient_dtype="int8", update=UpdateRule(name="sgd", learning_rate=0.5),
    ) as agent:  # fmt: skip
        for iteration in range(1, 4):
            total = np.zeros(57, np.float32)
            for _ in agent.begin(iteration):
                gradient = rng.standard_normal(57).astype(np.float32)
                agent.gradient_buffer("a")[...] = gradient[:50]
                agent.push("a")
                agent.push("b", gradient[50:])
                total = total + unpack(pack(gradient))
            agent.wait()
            expected = expected - np.float32(0.5) * (total * np.float32(1 / 3))
            got = np.concatenate([agent.pull("a"), agent.pull("b")])
            np.testing.assert_array_equal(got, expected)


def test_gradients_of_eight_bits_are_neither_sparse_nor_on_a_device() -> None:
    layout = BucketLayout(index=0, first=0, count=1, elements=6)
    table = (TensorSpec(name="t", shape=(2, 3), sparse=True),)
    with pytest.raises(Rejected, match="tensor t: rows of a sparse table are not sent as int8"):
        WorkerBucket(layout, table, UpdateRule(), dtype="int8")
    plan = JobPlan(
        job=JobId("j"), workers=1, gradient_dtype="int8", update=UpdateRule(), layout_epoch=0,
        token="",
    )  # fmt: skip
    assert unfit(plan, None, None, on_device=False) == ""
    assert "gradients on a device are not sent as int8" in unfit(plan, None, None, on_device=True)


def test_tensors_are_arrays_or_shapes() -> None:
    specs, values = read_tensors({"w": W, "b": (), "v": [4, 2]})
    assert [spec.shape for spec in specs] == [(2, 3), (), (4, 2)]
    assert list(values) == ["w"]
    with pytest.raises(Rejected, match="tensor w: its initial values are not all finite"):
        read_tensors({"w": np.full(3, np.nan, np.float32)})


def test_importing_the_package_loads_neither_numpy_nor_the_bus() -> None:
    code = "import sys, slackwater; print('numpy' in sys.modules, 'nats' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", "False"]
