"""How long an iteration lasts: what comes back counts, one pause does not."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.domains.models.iterations import PART_MIN, mean_s, quieter_half_s, quietest_s

durations = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=200)


@pytest.mark.parametrize("count", [20, 40, 100, 1000])
def test_a_stall_in_every_seventh_iteration_counts_in_full(count: int) -> None:
    stalling = ([0.134] * 6 + [0.334]) * (count // 7 + 1)
    true_s = sum(stalling[:count]) / count
    assert mean_s(stalling[:count]) == pytest.approx(true_s)
    assert 1.0 - 0.134 / mean_s(stalling) == pytest.approx(1.0 - 0.134 / 0.163, abs=0.01)


@pytest.mark.parametrize("count", [20, 100])
def test_one_pause_however_long_changes_nothing(count: int) -> None:
    paused = [0.134] * (count - 1) + [60.0]
    assert mean_s(paused) == pytest.approx(0.134)


@given(durations)
def test_the_mean_is_never_above_the_plain_one_and_never_below_the_least(
    durations_s: list[float],
) -> None:
    found = mean_s(durations_s)
    plain = sum(durations_s) / len(durations_s)
    assert min(durations_s) * (1 - 1e-9) <= found <= plain * (1 + 1e-9)


def test_noise_in_less_than_half_of_the_iterations_leaves_the_quietest_part_as_it_was() -> None:
    for seed in range(200):
        random = Random(seed)
        count = random.randint(4 * PART_MIN, 400)
        noisy = random.randint(1, count // 2)
        first = random.randint(0, count - noisy)
        durations_s = [0.2] * count
        for index in range(first, first + noisy):
            durations_s[index] *= random.uniform(1.0, 5.0)
        assert quietest_s(durations_s) == pytest.approx(0.2), seed


def test_the_quieter_half_of_a_stalling_job_stalls_and_that_of_a_burst_is_quiet() -> None:
    stalling = ([0.134] * 6 + [0.334]) * 8
    assert quieter_half_s(stalling[:50]) == pytest.approx((22 * 0.134 + 3 * 0.334) / 25)
    assert quieter_half_s([0.134] * 30 + [0.3] * 20) == pytest.approx(0.134)
    assert quieter_half_s([1.0]) == 1.0


def test_of_few_iterations_the_quietest_part_is_all_of_them() -> None:
    assert quietest_s([1.0, 2.0, 3.0]) == pytest.approx(2.0)
    assert quietest_s([2.0] * PART_MIN + [1.0] * PART_MIN) == pytest.approx(1.0)
