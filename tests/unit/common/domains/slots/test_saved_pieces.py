"""Distances of pieces, and which of them are saved."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.domains.slots.saved_pieces import (
    PIECE_ELEMENTS,
    bins_of,
    chosen,
    distances,
    histogram,
    pieces_of,
    spans_of,
    threshold,
)
from slackwater.schemas.checkpoints import BINS


def test_a_piece_is_as_far_as_its_elements_are() -> None:
    saved = np.zeros(2 * PIECE_ELEMENTS + 7, np.float32)
    now = saved.copy()
    now[0], now[1], now[-1] = 3.0, 4.0, 0.5
    found = distances(now, saved)
    assert found.tolist() == [5.0, 0.0, 0.5]
    assert spans_of(np.array([0, 2]), now.size).tolist() == [
        [0, PIECE_ELEMENTS],
        [2 * PIECE_ELEMENTS, now.size],
    ]


def test_what_was_never_saved_comes_first_and_what_did_not_change_never() -> None:
    found = np.array([np.inf, 0.0, 1e-30, 1.0, 1e30, 0.0])
    bins = bins_of(found)
    assert bins[0] == BINS - 1
    assert bins[1] == bins[5] == 0
    assert 0 < bins[2] < bins[3] < bins[4] < BINS - 1
    assert chosen(found, BINS - 1, 1.0).tolist() == [0]
    assert chosen(found, 0, 1.0).tolist() == [0, 2, 3, 4], "bin 0 is never saved again"
    assert distances(np.ones(5, np.float32), None).tolist() == [np.inf]


@given(
    st.lists(st.floats(0.0, 1e6), min_size=1, max_size=300),
    st.integers(1, 6),
    st.floats(0.01, 1.0),
)
@settings(max_examples=300)
def test_a_histogram_selects_what_sorting_all_would_to_within_a_bin(
    found: list[float], aggregators: int, fraction: float
) -> None:
    """Several aggregators, each with its own pieces; the reference sorts all of them."""
    shares = [np.array(found[each::aggregators]) for each in range(aggregators)]
    total = sum(histogram(each) for each in shares)
    above, share = threshold(total.tolist(), fraction)
    taken = [each[chosen(each, above, share)] for each in shares]
    count = sum(map(len, taken))
    changed = sum(each > 0.0 for each in found)
    wanted = min(fraction * len(found), changed)
    assert wanted - 1e-6 <= count <= wanted + aggregators
    sorted_all = np.sort(found)[::-1]
    least = sorted_all[max(0, int(np.ceil(wanted)) - 1)]
    for each in taken:
        assert (bins_of(each) >= bins_of(np.array([least]))[0]).all()


def test_every_element_is_in_one_piece() -> None:
    for elements in (1, PIECE_ELEMENTS, PIECE_ELEMENTS + 1, 5 * PIECE_ELEMENTS - 1):
        spans = spans_of(np.arange(pieces_of(elements)), elements)
        assert spans[0, 0] == 0
        assert spans[-1, 1] == elements
        assert (spans[1:, 0] == spans[:-1, 1]).all()
