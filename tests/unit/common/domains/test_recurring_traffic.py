"""Iterations, bytes and messages come out of generated flows exactly, whatever the times are."""

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slackwater.common.domains.traffic.recurring import Recurrence, flow_of, recurrence, unwrapped


def job(
    messages: list[int], iterations: int, random: Random, before: int = 0, ring: bool = False
) -> Any:
    """Return the bursts of a job: `before` bytes, then iterations of `messages`. Between messages
    it pauses for .4 to 4 ms, within one at random bytes for less than .1 ms, or rarely for 1 ms,
    and between iterations for 60 ms; it receives as much in these pauses, or in a ring all the
    time."""
    ns, at, acked, rows = 1_000_000_000, random.randrange(1 << 32), random.randrange(1 << 32), []
    for number in range(-1, iterations):
        for size in messages if number >= 0 else [before] * (before > 0):
            left = size
            while left:
                piece = min(left, random.choice((left, 1 + int(size * random.random()))))
                took = piece // 10
                begun = acked
                acked += piece if ring else 0
                rows.append((ns, ns + took, 0, at % 2**32, piece, begun % 2**32, acked % 2**32))
                at, left = at + piece, left - piece
                rare = random.random() < 0.05
                ns += took + (1_000_000 if rare else random.randrange(100_000))
            ns += random.randrange(400_000, 4_000_000)
        acked += 0 if ring else sum(messages)
        ns += random.randrange(55_000_000, 65_000_000)
    return np.array(rows, np.int64)


def found(*arguments: Any, **options: Any) -> Recurrence:
    recurring = recurrence(flow_of(job(*arguments, **options)))
    assert recurring is not None
    return recurring


SIZES = st.lists(st.integers(1_000, 8_000_000), min_size=1, max_size=24)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(sizes=SIZES, iterations=st.integers(8, 20), seed=st.integers(0, 2**32))
@example(sizes=[82_208_360, 13_421_772, 3_276_800] + [1_887_436] * 8, iterations=12, seed=1)
def test_bytes_and_iterations_are_exact(sizes: list[int], iterations: int, seed: int) -> None:
    recurring = found([20_000, *sizes], iterations, Random(seed))
    assert recurring.nbytes == 20_000 + sum(sizes)
    assert recurring.iterations == pytest.approx(iterations, abs=0.001)
    assert not recurring.both_ways


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 2**32))
def test_messages_are_those_that_were_sent(sizes: list[int], seed: int) -> None:
    sent = [20_000, *sizes]
    assert sorted(found(sent, 16, Random(seed)).messages) == sorted(sent)


def test_a_large_message_is_not_cut_where_a_full_buffer_stops_its_sender() -> None:
    """Regression: on busy cores a sender paused at the same byte of its largest message in 9 of 16
    iterations, once 4 MiB waited to be sent, and its skew came out .15 too small."""
    rows, at, ns = [], 0, 1_000_000_000
    for iteration in range(16):
        pieces = [500_000, 4_256_395, 20_552_088 - 4_256_395, 1_000_000]
        for place, size in enumerate(pieces):
            rows.append((ns, ns + 1_000, 0, at % 2**32, size, iteration, iteration))
            at += size
            stalled = place != 1 or iteration < 10
            ns += 5_000_000 if stalled else 10_000
        ns += 60_000_000
    recurring = recurrence(flow_of(np.array(rows, np.int64)))
    assert recurring is not None
    assert recurring.messages == (500_000, 20_552_088, 1_000_000)


def test_what_is_sent_before_training_does_not_count() -> None:
    recurring = found([100_000, 2_000_000], 12, Random(4), before=3_333_333)
    assert recurring.nbytes == 2_100_000
    assert recurring.iterations == pytest.approx(12, abs=0.001)


def test_a_ring_is_known_by_its_receiving_while_it_sends() -> None:
    assert found([5_000_000, 2_000_000], 12, Random(5), ring=True).both_ways


def test_an_iteration_takes_as_long_as_from_one_to_the_next() -> None:
    assert 0.055 < found([2_000_000], 12, Random(6)).iteration_s < 0.075


def test_nothing_is_found_where_nothing_comes_again() -> None:
    random = Random(7)
    rows = np.vstack([job([random.randrange(50_000, 900_000)], 1, random) for _ in range(2)])
    assert recurrence(flow_of(rows)) is None
    assert recurrence(flow_of(job([5_000], 1, random))) is None


def test_stream_numbers_wrap() -> None:
    sent = np.cumsum([0, 2**31 - 1, 5, 2**31 - 9, 2**30, 17]) + 2**32 - 3
    assert unwrapped(sent % 2**32).tolist() == (sent - sent[0]).tolist()
