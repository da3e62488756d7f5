"""Bytes moved by dropped regions are counted once, whenever the aggregator is killed."""

import os

import pytest
from tests.regions import count

from slackwater.common.domains.slots.layout import PAGE, plan_buckets
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.transport.region import Region
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import JobPlan
from slackwater.schemas.tensors import TensorSpec, UpdateRule
from slackwater.services.aggregator.ledger import NAME, Ledger

TENSORS = (TensorSpec(name="w", shape=(10,)),)
PLAN = JobPlan(
    job=JobId("j1"),
    workers=2,
    gradient_dtype="float32",
    update=UpdateRule(),
    layout_epoch=0,
    token="",
)


def region(pushed: int, pulled: int) -> SlotRegion:
    bucket = plan_buckets(TENSORS)[0]
    memory = bytearray(SlotRegion.nbytes_of(PLAN, bucket, TENSORS))
    made = SlotRegion.format(memory, PLAN, bucket, TENSORS, 0)
    count(made, 0, pushed=pushed)
    count(made, 1, pulled=pulled)
    return made


def again(ledger: Ledger) -> Ledger:
    """After a kill: all that is left is the memory."""
    after = Ledger()
    after.adopt(os.dup(ledger.fileno()))
    assert after.kept
    return after


def test_totals_outlive_the_process() -> None:
    ledger = Ledger()
    ledger.add(region(5, 50))
    assert ledger.totals == (5, 50), "before anybody keeps it, too"
    ledger.fileno()
    ledger.add(region(2, 20))
    after = again(ledger)
    assert after.totals == (7, 70)
    after.add(region(1, 10))
    assert again(after).totals == (8, 80)
    after.close()
    assert after.totals == (8, 80)


def test_a_region_that_is_found_again_is_not_counted_twice() -> None:
    """The kill came after the entry and before the store let the region go."""
    ledger, dropped = Ledger(), region(5, 50)
    ledger.fileno()
    ledger.add(dropped)
    ledger.add(dropped)
    after = again(ledger)
    assert after.has(dropped)
    dropped.count_anew()
    assert (dropped.bytes_moved(), dropped.counted) == ((0, 0), 0)
    count(dropped, 0, pushed=3)
    after.add(dropped)
    assert after.totals == (8, 50)


def test_an_entry_that_was_not_committed_leaves_the_regions_own_counters() -> None:
    """The kill came between the region's word and the ledger's."""
    ledger, dropped = Ledger(), region(5, 50)
    dropped.counted = 1
    assert not ledger.has(dropped)
    ledger.add(dropped)
    assert ledger.totals == (5, 50)


def test_what_is_no_ledger_is_refused() -> None:
    with pytest.raises(ValueError, match=f"it has {PAGE}"):
        Ledger().adopt(os.dup(Region.create(8, NAME).fileno()))


def test_closing_lets_the_descriptor_go_and_keeps_the_totals() -> None:
    ledger = Ledger()
    descriptor = ledger.fileno()
    ledger.add(region(5, 50))
    ledger.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert ledger.totals == (5, 50)
    ledger.close()  # Nothing is left to be closed.
