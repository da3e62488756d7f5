"""When a bucket may leave for another host: what fits between a flip and the next push."""

import pytest

from slackwater.schemas.base import JobId
from slackwater.services.aggregator.departure import UNTIMED_BYTES, Departures

MB = 1_000_000
RATE = 100 * MB
KEYS = [(JobId("j1"), index) for index in range(4)]


def with_gaps(span_s: float, now_s: float = 10.0) -> Departures:
    """Each bucket's gap was measured, and a version of each has just flipped."""
    departures = Departures(RATE)
    for key in KEYS:
        departures.flipped(key, now_s - 1.0)
        departures.pushed(key, now_s - 1.0 + span_s)
        departures.flipped(key, now_s)
    return departures


def test_what_ends_before_the_next_push_leaves_and_the_rest_waits_for_its_flip() -> None:
    """Gaps of .5 s carry 50 MB: 20 and 20, and not another 20."""
    departures = with_gaps(0.5)
    for key in KEYS[:2]:
        assert departures.may_leave(key, 20 * MB, 10.0)
        departures.began(key, 20 * MB, 10.0)
    assert not departures.may_leave(KEYS[2], 20 * MB, 10.0)
    assert departures.may_leave(KEYS[3], 9 * MB, 10.0)
    for key in KEYS[:2]:
        departures.ended(key, 10.4, copied=True)
    assert not departures.may_leave(KEYS[2], 20 * MB, 10.4), "its next push is too near"
    departures.pushed(KEYS[2], 10.5)
    departures.flipped(KEYS[2], 10.6)
    assert departures.may_leave(KEYS[2], 20 * MB, 10.6)


def test_what_fits_into_no_gap_goes_alone_and_begins_at_a_flip() -> None:
    departures = with_gaps(0.5)
    assert not departures.may_leave(KEYS[0], 200 * MB, 10.3)
    departures.began(KEYS[1], MB, 10.0)
    assert not departures.may_leave(KEYS[0], 200 * MB, 10.0)
    departures.ended(KEYS[1], 10.01, copied=True)
    assert departures.may_leave(KEYS[0], 200 * MB, 10.01)


def test_a_job_that_rests_holds_nothing_up() -> None:
    """No push has come for long: there is no flip to wait for."""
    departures = with_gaps(0.5)
    assert not departures.may_leave(KEYS[0], 200 * MB, 10.3)
    rests_s = departures.rests_at_s(KEYS[0])
    assert 10.5 < rests_s < 12.5
    assert departures.may_leave(KEYS[0], 200 * MB, rests_s)


@pytest.mark.parametrize("nbytes", [1, UNTIMED_BYTES + 1])
def test_where_no_gap_is_known_a_little_leaves_at_a_time(nbytes: int) -> None:
    departures = Departures()
    assert departures.may_leave(KEYS[0], nbytes, 1.0)
    departures.began(KEYS[0], nbytes, 1.0)
    assert departures.may_leave(KEYS[1], UNTIMED_BYTES - 1, 1.0) == (nbytes == 1)
    departures.ended(KEYS[0], 1.1, copied=False)
    assert departures.may_leave(KEYS[1], UNTIMED_BYTES * 9, 1.1)


def test_the_rate_is_what_copies_took_and_never_above_the_cap() -> None:
    departures = Departures(RATE)
    for nbytes, took_s, at_most in ((50 * MB, 1.0, RATE), (50 * MB, 0.01, RATE)):
        before = departures.bytes_s
        departures.began(KEYS[0], nbytes, 0.0)
        departures.began(KEYS[1], nbytes, took_s / 2)
        departures.ended(KEYS[0], took_s / 2, copied=True)
        departures.ended(KEYS[1], took_s, copied=True)
        seen = 2 * nbytes / took_s
        assert departures.bytes_s == min(at_most, (before + seen) / 2)
    departures.began(KEYS[0], 1000, 0.0)
    departures.ended(KEYS[0], 100.0, copied=True)
    assert departures.bytes_s == RATE, "a small one says nothing"
    slow = Departures()
    slow.began(KEYS[0], 10 * MB, 0.0)
    slow.ended(KEYS[0], 10.0, copied=True)
    assert slow.bytes_s < 256 * 1024 * 1024
