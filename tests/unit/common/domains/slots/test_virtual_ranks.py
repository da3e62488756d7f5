"""Virtual ranks: which process computes them, and what they draw, as functions of small numbers."""

from hypothesis import given
from hypothesis import strategies as st

from slackwater.agent.sizing import Sizing
from slackwater.common.domains.slots.layout import plan_buckets
from slackwater.common.domains.slots.live import live_parts
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.sizes import Size
from slackwater.common.domains.slots.virtual import assigned, by_process, process_of, seed_of
from slackwater.schemas.base import WORKERS_MAX, JobId
from slackwater.schemas.placement import JobPlan
from slackwater.schemas.tensors import TensorSpec, UpdateRule

SIZES = st.integers(1, WORKERS_MAX).flatmap(
    lambda virtual: st.tuples(st.just(virtual), st.integers(1, virtual))
)


@given(SIZES)
def test_every_virtual_rank_is_computed_once_in_order_and_evenly(sizes: tuple[int, int]) -> None:
    """Concatenated over the processes the parts are 0, 1, ..., V - 1; none is more than one longer
    than another, and none is empty."""
    virtual, workers = sizes
    parts = [assigned(virtual, workers, rank) for rank in range(workers)]
    assert [each for part in parts for each in part] == list(range(virtual))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1
    for rank, part in enumerate(parts):
        assert {process_of(each, virtual, workers) for each in part} == {rank}


@given(SIZES, st.integers(0, 10))
def test_processes_that_do_not_count_compute_nothing(sizes: tuple[int, int], beyond: int) -> None:
    virtual, workers = sizes
    assert len(assigned(virtual, workers, workers + beyond)) == 0


@given(SIZES, st.data())
def test_a_process_has_pushed_what_all_its_virtual_ranks_have(
    sizes: tuple[int, int], data: st.DataObject
) -> None:
    virtual, workers = sizes
    words = data.draw(st.lists(st.integers(0, 3), min_size=virtual, max_size=virtual))
    for rank, word in enumerate(by_process(words, workers)):
        assert word == min(words[each] for each in assigned(virtual, workers, rank))


def test_seeds_of_different_places_differ_and_stay_as_they_are() -> None:
    """The bits of recorded runs follow from them: a change would make old journals unreplayable."""
    seeds = {seed_of(seed, rank, i) for seed in range(5) for rank in range(8) for i in range(50)}
    assert len(seeds) == 5 * 8 * 50
    assert seed_of(1, 11) != seed_of(11, 1) != seed_of(1, 1, 1)
    assert seed_of(7, 2, 40) == 2090313863660255277


def region_of(virtual: bool) -> SlotRegion:
    tensors = (TensorSpec(name="w", shape=(3000,)),)
    (bucket,) = plan_buckets(tensors)
    plan = JobPlan(
        job=JobId("j1"), workers=4, active=2, virtual=virtual, gradient_dtype="float32",
        update=UpdateRule(), layout_epoch=1, token="t",
    )  # fmt: skip
    buffer = bytearray(SlotRegion.nbytes_of(plan, bucket, tensors))
    return SlotRegion.format(buffer, plan, bucket, tensors, 0)


def test_a_region_of_virtual_ranks_is_folded_of_all_slots_whoever_counts() -> None:
    """A rank that leaves counts to its last iteration, one that joins hears the version before."""
    slots = region_of(virtual=True)
    slots.initialize(0)
    assert (slots.look(), slots.active) == (2, 4)
    slots.sizes.write(Size(2, 3, 0))  # Version 1 is still computed by two.
    assert (slots.look(), slots.active) == (3, 4)
    slots.version = 1
    slots.sizes.write(Size(3, 1, 0))
    assert (slots.look(), slots.active) == (3, 4)
    slots.version = 2
    assert (slots.look(), slots.active) == (1, 4)


def test_a_new_attempt_has_one_size_from_the_beginning() -> None:
    """Decisions of the attempt before do not count any more, even for later iterations."""
    sizes = region_of(virtual=True).sizes
    assert sizes.attempt == -1
    sizes.write(Size(9, 3, 0))
    sizes.write(Size(11, 4, 0))
    assert [offset for offset, _ in sizes.begin(Size(10, 2, 0), 5)]
    assert (sizes.attempt, sizes.newest, sizes.at(12)) == (5, Size(10, 2, 0), Size(10, 2, 0))


def test_a_copy_to_another_host_brings_the_parameters_before_the_newest_too() -> None:
    """A process that is killed as its bucket moves computes with them when it is started again."""
    for virtual, buffers in ((False, 1), (True, 2)):
        slots = region_of(virtual)
        slots.initialize(7)
        sent = {offset for offset, _ in live_parts(slots, 1 << 20, slots.all_pushed())}
        offsets = {slots.geometry.parameters_offset(version) for version in (6, 7)}
        assert len(sent & offsets) == buffers
        assert slots.geometry.parameters_offset(7) in sent


def test_another_number_counts_one_iteration_after_it_is_known() -> None:
    """In a job of virtual ranks; while one change is under way, the next one waits."""
    sizing = Sizing(2, ahead=True)
    sizing.found(region_of(virtual=True).sizes, 0, 0, bare=False)
    sizing.wanted = 4
    assert sizing.decide(5)
    assert (sizing.at(5).workers, sizing.at(6).workers, sizing.announced) == (2, 4, 5)
    assert sizing.written_with(5) == sizing.newest
    sizing.wanted = 1
    assert not sizing.decide(5)
    assert sizing.decide(6)
    assert [sizing.at(iteration).workers for iteration in (5, 6, 7)] == [2, 4, 1]


def test_a_rank_0_that_was_started_again_decides_beyond_what_it_may_have_pushed() -> None:
    """Its former life may have pushed for version 5, which others can have before it writes."""
    sizing = Sizing(2, ahead=True)
    sizing.found(region_of(virtual=True).sizes, 4, 0, bare=False)
    sizing.wanted = 1
    assert sizing.decide(5)
    assert [sizing.at(iteration).workers for iteration in (5, 6, 7)] == [2, 2, 1]
