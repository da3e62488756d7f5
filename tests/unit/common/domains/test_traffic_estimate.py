"""A rank's traffic is told by the way that says most of it."""

import pytest

from slackwater.common.domains.traffic.estimate import estimate
from slackwater.common.domains.traffic.recurring import Recurrence
from slackwater.schemas.traffic import SIZES_MAX


def flow(*messages: int, both_ways: bool = False, iterations: float = 20.0) -> Recurrence:
    return Recurrence(sum(messages), iterations, 0.1, messages, both_ways)


CALLS = {1: [8, 700_000, 8, 100_000] * 20, 2: [8, 200_000] * 20}


def test_nothing_that_recurs_says_nothing() -> None:
    assert estimate([], {}, []) is None
    assert estimate([], {1: list(range(1, 30))}, []) is None


def test_calls_are_exact_and_go_before_pauses() -> None:
    found = estimate([flow(800_016), flow(200_008)], CALLS, [])
    assert found is not None
    assert (found.by, found.kind, found.sizes_bytes) == (
        "calls", "tensors", (700_000, 200_000, 100_000),
    )  # fmt: skip
    assert found.bytes_per_iteration == 1_000_000
    assert found.skew == pytest.approx(0.7)
    assert found.iterations == 20


def test_a_socket_whose_calls_do_not_come_again_leaves_the_say_to_pauses() -> None:
    calls = {**CALLS, 3: [100_000 + n for n in range(40)]}
    found = estimate([flow(600_000, 200_000), flow(200_000)], calls, [])
    assert found is not None
    assert (found.by, found.skew) == ("pauses", 0.6)
    assert found.bytes_per_iteration == 1_000_000


def test_headers_of_gloo_go_before_the_calls_that_send_its_pieces() -> None:
    found = estimate([flow(1_000, 999_000, both_ways=True)], CALLS, [600_000, 400_000] * 5)
    assert found is not None
    assert (found.by, found.kind, found.sizes_bytes) == ("gloo", "buckets", (600_000, 400_000))
    assert (found.skew, found.iterations) == (0.6, 20)


@pytest.mark.parametrize("calls", [{}, CALLS])
def test_a_ring_has_no_skew_by_its_pieces(calls: dict[int, list[int]]) -> None:
    found = estimate([flow(700_000, 300_000, both_ways=True)], calls, [])
    assert found is not None
    assert (found.skew, found.kind) == (0.0, "messages")
    assert found.bytes_per_iteration == 1_000_000


def test_a_connection_of_few_bytes_is_not_training() -> None:
    found = estimate([flow(700_000, 300_000), flow(5_000, both_ways=True)], {}, [])
    assert found is not None
    assert found.skew == 0.7


def test_many_sizes_are_counted_and_the_largest_told() -> None:
    found = estimate([flow(*range(1_000, 1_200))], {}, [])
    assert found is not None
    assert (found.sizes, len(found.sizes_bytes)) == (200, SIZES_MAX)
    assert found.sizes_bytes[0] == 1_199
