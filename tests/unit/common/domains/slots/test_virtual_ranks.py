"""Virtual ranks: which process computes them, and what they draw, as functions of small numbers."""

from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.domains.slots.virtual import assigned, by_process, process_of, seed_of
from slackwater.schemas.base import WORKERS_MAX

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
