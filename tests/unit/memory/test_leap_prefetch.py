"""Leap: trends against counting every window, windows against the paper's rule, golden scans."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.memory.prefetch.prefetch import Leap, find_trend, majority, window_size

small = st.integers(-3, 3)


@given(st.lists(small, max_size=40))
def test_majority_is_what_counting_says(values: list[int]) -> None:
    common = [value for value, n in Counter(values).items() if n > len(values) / 2]
    assert majority(values) == (common[0] if common else None)


@given(st.lists(small, max_size=40), st.sampled_from([8, 16, 32]), st.sampled_from([2, 4, 8]))
def test_the_trend_is_the_majority_of_the_smallest_window_that_has_one(
    deltas: list[int], history: int, split: int
) -> None:
    expected = None
    for window in (history // split * 2**i for i in range(10)):
        if window > history or window > len(deltas):
            break
        found = [v for v, n in Counter(deltas[:window]).items() if n >= window // 2 + 1]
        if found:
            expected = found[0]
            break
    assert find_trend(deltas, history, split) == expected


@given(st.integers(0, 40), st.booleans(), st.sampled_from([0, 1, 2, 4, 8]))
def test_a_window_is_a_power_of_two_that_fits_its_hits(hits: int, follows: bool, last: int) -> None:
    """RoundUp(hits + 1) to a power of two, at most 8, at least half of the last one."""
    powers = [1, 2, 4, 8]
    rounded = next((p for p in powers if p >= hits + 1), 8) if hits else int(follows)
    assert window_size(hits, follows, last) == max(rounded, last // 2)


def test_the_papers_example_finds_minus_three_then_plus_two() -> None:
    """0x48 45 42 3F 3C 02 04 06 08 0A 0C 10 39 12 14 16, history 8, windows 4 and 8."""
    pages = [0x48, 0x45, 0x42, 0x3F, 0x3C, 0x02, 0x04, 0x06, 0x08, 0x0A, 0x0C, 0x10, 0x39,
             0x12, 0x14, 0x16]  # fmt: skip
    deltas = [b - a for a, b in itertools.pairwise(pages)]
    assert find_trend(deltas[3::-1], 8, 2) == -3  # At t3.
    assert find_trend(deltas[6::-1], 8, 2) is None  # At t7 the old trend is over, none is new yet.
    assert find_trend(deltas[7::-1], 8, 2) == 2  # At t8.
    assert find_trend(deltas[14:6:-1], 8, 2) == 2  # At t15, through the noise of 0x39.


def scan(leap: Leap, pages: list[int], stream: str = "a") -> list[tuple[int, ...]]:
    return [leap.access(stream, page) for page in pages]


def test_a_sequential_scan_opens_the_window_step_by_step() -> None:
    answers = scan(Leap(1000), list(range(24)))
    assert [len(answer) for answer in answers if answer] == [1, 2, 2, 4, 4, 8, 8]
    assert answers[4] == (5,)
    assert answers[18] == tuple(range(22 + 4, 34))
    assert sorted(page for answer in answers for page in answer) == list(range(5, 42 - 8))


@pytest.mark.parametrize("stride", [1, 7, -1, -10, 64])
def test_scans_hit_more_than_95_percent_and_fetch_little_in_vain(stride: int) -> None:
    leap = Leap(200_000)
    start = 0 if stride > 0 else 199_999
    scan(leap, [start + i * stride for i in range(2000)])
    assert leap.counters.hit_rate > 0.99
    assert leap.counters.accuracy > 0.99


def test_streams_that_interleave_do_not_disturb_one_another() -> None:
    leap = Leap(100_000)
    for i in range(1000):
        leap.access("up", i)
        leap.access("down", 90_000 - 3 * i)
    assert leap.counters.hit_rate > 0.98
    assert (leap.trend("up"), leap.trend("down")) == (1, -3)


def test_random_pages_fetch_nothing() -> None:
    leap = Leap(1_000_000)
    rng = random.Random(5)
    answers = scan(leap, [rng.randrange(1_000_000) for _ in range(3000)])
    assert not any(answers)


def test_a_scan_that_turns_random_stops_within_four_decisions() -> None:
    """Windows of 4, 2, 1 along the last trend, then none: suspended, not cut off."""
    leap = Leap(1_000_000)
    scan(leap, list(range(100)))
    rng = random.Random(6)
    answers = scan(leap, [rng.randrange(1000, 900_000) for _ in range(50)])
    assert [len(answer) for answer in answers[:3]] == [4, 2, 1]
    assert not any(answers[3:])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=200))
def test_counters_agree_with_a_ledger(accesses: list[tuple[int, int]]) -> None:
    """Every prefetched page is in the space, and is used, dropped or still waiting."""
    leap = Leap(61, history=8, split=4, unused_max=6, streams_max=2)
    ready: set[int] = set()
    hits = 0
    for stream, page in accesses:
        was = leap.unused(page)
        answer = leap.access(stream, page)
        hits += was
        assert all(0 <= p < 61 for p in answer)
        assert len(answer) == len(set(answer)) <= 8
        ready |= set(answer)
        assert not leap.unused(page) or page in answer
    c = leap.counters
    waiting = sum(leap.unused(page) for page in range(61))
    assert (c.accesses, c.hits) == (len(accesses), hits)
    assert c.prefetched == c.hits + c.dropped + waiting
    assert waiting <= 6


def test_resident_pages_are_passed_over() -> None:
    leap = Leap(1000)
    for page in range(40):
        for ahead in leap.access(0, page, lambda pages: [p for p in pages if p % 2]):
            assert ahead % 2


def test_evicted_pages_are_misses_when_they_are_asked_for() -> None:
    leap = Leap(1000)
    scan(leap, list(range(40)))
    assert leap.unused(41)
    leap.drop([41, 999])
    assert leap.counters.dropped == 1
    before = leap.counters.hits
    leap.access("a", 41)
    assert leap.counters.hits == before
