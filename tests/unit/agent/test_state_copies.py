"""Copies of the optimiser's states: all ranks' parts are the whole, in time and within memory."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slackwater.agent.state_copies import PART_ELEMENTS, Part, StateCopies


def read(copies: StateCopies, version: int, ranks: int) -> int:
    """Read what is due; return the number of elements."""
    due = copies.due(ranks)
    for first, end in due:
        copies.keep(Part(first, end, version, (np.zeros(end - first, np.float32),)), since=0)
    return sum(end - first for first, end in due)


@given(
    elements=st.integers(1, 9 * PART_ELEMENTS),
    ranks=st.integers(1, 5),
    every=st.integers(1, 12),
    bucket=st.integers(0, 9),
)
def test_the_ranks_parts_are_the_whole_and_none_is_older_than_the_period(
    elements: int, ranks: int, every: int, bucket: int
) -> None:
    held = [StateCopies(bucket, elements, rank, every) for rank in range(ranks)]
    for version in range(1, 3 * every + 2):
        most = max(read(copies, version, ranks) for copies in held)
        shares = -(-elements // PART_ELEMENTS) / ranks
        assert most <= (shares / every + 2) * PART_ELEMENTS, "an even part in each iteration"
    parts = sorted(part for copies in held for part in copies.parts)
    assert parts[0].first == 0
    assert [part.end for part in parts[:-1]] == [part.first for part in parts[1:]]
    assert parts[-1].end == elements
    assert all(3 * every + 1 - part.version <= every for part in parts)


@given(before=st.integers(1, 5), after=st.integers(1, 5), bucket=st.integers(0, 9))
def test_shares_follow_the_number_of_ranks(before: int, after: int, bucket: int) -> None:
    elements = 7 * PART_ELEMENTS + 5
    held = [StateCopies(bucket, elements, rank, 2) for rank in range(5)]
    for version in range(1, 12):
        ranks = before if version < 6 else after
        for copies in held:
            read(copies, version, ranks)
    parts = sorted((part.first, part.end) for copies in held for part in copies.parts)
    assert len(parts) == 8, "each is kept once: a share that is another's now is forgotten"


def test_an_older_copy_replaces_none() -> None:
    copies = StateCopies(0, 10, 0, 1)
    new, old = (Part(0, 10, version, (np.ones(10, np.float32),)) for version in (9, 8))
    copies.keep(new, since=3)
    copies.keep(old, since=2)
    assert copies.parts == [new]
    assert copies.since == 3


def test_a_rank_that_does_not_count_keeps_none() -> None:
    copies = StateCopies(0, 3 * PART_ELEMENTS, 1, 1)
    read(copies, 1, 2)
    assert copies.parts
    assert copies.due(1) == []
    assert copies.parts == []
    assert not StateCopies(0, 10, 0, 0).kept
