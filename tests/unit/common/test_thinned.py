"""A thinned list is bounded, and covers all that was added, as far apart everywhere."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.thinned import Thinned


@given(st.integers(1, 3000), st.integers(2, 64))
def test_what_is_left_covers_all_evenly(additions: int, half: int) -> None:
    kept = Thinned[int](2 * half)
    for number in range(additions):
        kept.add(number)
    entries = list(kept)
    assert 1 <= len(kept) <= 2 * half
    assert entries[0] == 0
    gaps = {after - before for before, after in pairwise(entries)}
    assert len(gaps) <= 1
    assert additions - entries[-1] <= max(gaps, default=1)
