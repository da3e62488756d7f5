"""Copies of one bucket, beside folds of it."""

import numpy as np
import pytest

from slackwater.common.domains.slots.region import SlotRegion
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import BucketLayout, JobPlan
from slackwater.schemas.tensors import TensorSpec, UpdateRule
from slackwater.services.aggregator.copying import Copying
from slackwater.services.aggregator.early_fold import Parts

TENSORS = (TensorSpec(name="w", shape=(64,)),)
LAYOUT = BucketLayout(index=0, first=0, count=1, elements=64)
PLAN = JobPlan(
    job=JobId("j"), workers=2, gradient_dtype="float32", update=UpdateRule(name="momentum"),
    layout_epoch=1, token="",
)  # fmt: skip


def at(version: int) -> SlotRegion:
    """Version v has v in all parameters, -v in all states, and the one before likewise."""
    memory = bytearray(SlotRegion.nbytes_of(PLAN, LAYOUT, TENSORS))
    slots = SlotRegion.format(memory, PLAN, LAYOUT, TENSORS, 0)
    for each in (version - 1, version):
        slots.parameters(each)[:] = each
        slots.state(each, 0)[:] = -each
    slots.initialize(version)
    return slots


def copied(copying: Copying) -> int | None:
    """Return the version of a copy, by its content; None: there is none."""
    copy = copying.copy
    if copy is None:
        return None
    value = int(copy.parameters[0])
    assert (copy.parameters == value).all()
    assert (copy.states[0] == -value).all()
    assert copy.about.version == value
    return value


@pytest.mark.parametrize(("wanted", "found"), [(8, 8), (7, 7), (6, None), (9, None), (None, 8)])
def test_a_bucket_that_stands_still_has_its_version_and_the_one_before(
    wanted: int | None, found: int | None
) -> None:
    copying = Copying("r", 1, wanted)
    copying.look(at(8), Parts(2, 64), 0)
    assert copied(copying) == found


def test_the_version_before_is_not_taken_of_a_bucket_that_came_after_it() -> None:
    """Bytes from another host, or from a worker, have filled one of its two buffers."""
    for came_at, found in ((7, 7), (8, None)):
        copying = Copying("r", 1, 7)
        copying.look(at(8), Parts(2, 64), came_at)
        assert copied(copying) == found


def test_the_version_before_is_not_taken_once_the_next_one_begins() -> None:
    """Its buffers are what the next version is folded into."""
    slots, parts = at(8), Parts(2, 64)
    slots.set_pushed(1, 9)
    copying = Copying("r", 1, 7)
    copying.look(slots, parts, 0)
    assert copied(copying) is None
    slots.set_pushed(1, 8)
    parts.arrived(0, 32)
    parts.arrived(1, 32)
    assert parts.ready(9, [8, 8]) is not None, "the first half of the next version may be folded"
    copying.look(slots, parts, 0)
    assert copied(copying) is None
    parts.take()
    copying.look(slots, parts, 0)
    assert copied(copying) == 7


def test_a_copy_that_was_overtaken_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 10 was folded into the buffers of version 8 while they were copied."""
    slots = at(8)
    copying = Copying("r", 1, 8)
    original = SlotRegion.parameters

    def overtaken(self: SlotRegion, version: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        self.version = 10
        return original(self, version)

    monkeypatch.setattr(SlotRegion, "parameters", overtaken)
    copying.look(slots, Parts(2, 64), 0)
    assert copying.copy is None


def test_the_thread_that_commits_takes_exactly_the_version_that_is_wanted() -> None:
    copying = Copying("r", 1, 8)
    for version in (7, 8, 9):
        copying.committed(at(version))
        assert copied(copying) == (None if version < 8 else 8)


def test_a_bare_region_has_nothing_to_copy() -> None:
    memory = bytearray(SlotRegion.nbytes_of(PLAN, LAYOUT, TENSORS))
    copying = Copying("r", 1, None)
    copying.look(SlotRegion.format(memory, PLAN, LAYOUT, TENSORS, 0), Parts(2, 64), 0)
    assert copying.copy is None
