"""A copy to another host brings exactly what the next fold reads."""

from typing import Any

import numpy as np
import pytest

from slackwater.common.domains.slots import folding
from slackwater.common.domains.slots.layout import HEADER_BYTES, plan_buckets
from slackwater.common.domains.slots.live import live_parts
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rules import Hyper
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import JobPlan
from slackwater.schemas.tensors import TensorSpec, UpdateRule

ELEMENTS = 3000
TENSORS = (TensorSpec(name="w", shape=(ELEMENTS,)),)
(BUCKET,) = plan_buckets(TENSORS)


def region(rule: str, consistency: str = "synchronous") -> tuple[bytearray, SlotRegion]:
    plan = JobPlan(
        job=JobId("j1"), workers=2, gradient_dtype="float32",
        update=UpdateRule(name=rule, learning_rate=0.1),  # type: ignore[arg-type]
        consistency=consistency, layout_epoch=1, token="t",  # type: ignore[arg-type]
    )  # fmt: skip
    buffer = bytearray(SlotRegion.nbytes_of(plan, BUCKET, TENSORS))
    return buffer, SlotRegion.format(buffer, plan, BUCKET, TENSORS, 0)


def push(slots: SlotRegion, rank: int, iteration: int) -> None:
    rng = np.random.default_rng([rank, iteration])
    slots.gradient(rank)[:] = rng.standard_normal(ELEMENTS, np.float32)
    slots.set_hyper(rank, Hyper.of(slots.plan.update))
    slots.set_pushed(rank, iteration)


def arrived(buffer: bytearray, slots: SlotRegion) -> tuple[bytearray, SlotRegion]:
    """The region at the other end."""
    copy = bytearray(len(buffer))
    for first, nbytes in live_parts(slots, len(buffer), slots.all_pushed()):
        copy[first : first + nbytes] = buffer[first : first + nbytes]
    return copy, SlotRegion.open(copy)


def fold(slots: SlotRegion, alone: int | None = None) -> None:
    assert folding.fold(slots, lambda: None, None, None, alone, 0)
    folding.commit(slots, alone)


def bits(slots: SlotRegion) -> list[Any]:
    version = slots.version
    arrays = [slots.parameters(version)]
    arrays += [slots.state(version, index) for index in range(slots.geometry.states)]
    return [array.view(np.uint32).tolist() for array in arrays]


@pytest.mark.parametrize(("rule", "states"), [("sgd", 0), ("momentum", 1), ("adam", 2)])
@pytest.mark.parametrize("iterations", [1, 2])
def test_the_next_versions_are_the_same_at_the_other_end(
    rule: str, states: int, iterations: int
) -> None:
    """For either parity one buffer of parameters and one of each state are all that is sent."""
    buffer, slots = region(rule)
    slots.parameters(0)[:] = np.linspace(-1, 1, ELEMENTS)
    slots.initialize(0)
    for iteration in range(1, iterations + 1):
        for rank in range(2):
            push(slots, rank, iteration)
        fold(slots)
    parts = live_parts(slots, len(buffer), slots.all_pushed())
    record = len(buffer) - slots.geometry.nbytes
    assert sum(n for _, n in parts) == HEADER_BYTES + (1 + states) * 4 * ELEMENTS + record
    _copy, there = arrived(buffer, slots)
    for iteration in range(iterations + 1, iterations + 4):
        for end in (slots, there):
            for rank in range(2):
                push(end, rank, iteration)
            fold(end)
        assert bits(slots) == bits(there)


def test_a_push_that_waits_goes_along_and_others_do_not() -> None:
    """Its worker need not push again: the word at the other end says that it is there."""
    buffer, slots = region("sgd")
    slots.initialize(0)
    push(slots, 1, 1)
    _copy, there = arrived(buffer, slots)
    assert there.all_pushed() == [0, 1]
    assert (there.gradient(1) == slots.gradient(1)).all()
    for end in (slots, there):
        push(end, 0, 1)
        fold(end)
    assert bits(slots) == bits(there)
    assert not arrived(buffer, slots)[1].gradient(1).any(), "it is in a version now"


def test_an_asynchronous_push_that_waits_goes_along() -> None:
    buffer, slots = region("sgd", "asynchronous")
    slots.initialize(0)
    push(slots, 0, 1)
    fold(slots, alone=0)
    push(slots, 1, 1)
    _copy, there = arrived(buffer, slots)
    assert not there.gradient(0).any()
    for end in (slots, there):
        fold(end, alone=1)
    assert bits(slots) == bits(there)
    assert there.applied() == [1, 1]


def test_a_bare_region_is_header_and_record() -> None:
    buffer, slots = region("adam")
    parts = live_parts(slots, len(buffer), slots.all_pushed())
    assert [first for first, _ in parts] == [0, slots.geometry.nbytes]
    assert not arrived(buffer, slots)[1].initialized
