"""Sizes worth giving a job: the worked curves, and the rules against a slow look at every size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.speedup import SpeedupCurve, linear_curve

FIRST = [0, 1, 1.9, 2.6, 3.1, 3.4, 3.55, 3.6, 3.61]
SECOND = [0, 1, 1.5, 1.8, 2, 2.1, 2.15, 2.17, 2.18]

curves = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12).map(lambda x: [0.0, *x])


def test_the_worked_curves() -> None:
    assert SpeedupCurve(FIRST).hell().at(8)[0] == 4
    assert SpeedupCurve(SECOND).hell().at(8)[0] == 2
    assert SpeedupCurve(FIRST).knee(0.05).at(8)[0] == 5
    assert SpeedupCurve(SECOND).knee(0.05).at(8)[0] == 4


def test_knee_does_not_divide_what_a_step_over_a_hump_saves() -> None:
    """Two nodes save 9 %, so 4.5 % each: the step counts whole, and those after it are reached."""
    curve = SpeedupCurve([0, 1, 0.6, 1.1, 1.5, 1.9])
    assert curve.knee(0.05).at(5)[0] == 5


def test_knee_passes_over_sizes_that_beat_no_smaller_one() -> None:
    """A server that is charged makes two nodes slower than one."""
    curve = SpeedupCurve([0, 1, 0.6, 1.2, 1.8, 2.4, 3])
    assert curve.knee(0.05).at(6)[0] == 6
    assert [curve.knee(0.05).at(w)[0] for w in range(7)] == [0, 1, 1, 3, 4, 5, 6]


@given(x=curves, budget=st.integers(0, 14))
def test_hell_is_the_least_of_service_over_efficiency(x: list[float], budget: int) -> None:
    curve = SpeedupCurve(x)
    size = curve.hell().at(budget)[0]
    options = range(1, min(budget, len(x) - 1) + 1)
    if not options:
        assert size == 0
        return

    def cost(w: int) -> float:
        service_s = 1.0 / x[w]
        efficiency = (1.0 / x[1]) / service_s / w
        return service_s / efficiency

    assert cost(size) <= min(cost(w) for w in options) * (1 + 1e-6)


@given(x=curves, budget=st.integers(1, 14), held=st.integers(0, 12), beat=st.floats(0, 12))
def test_more_is_the_fewest_that_beat(x: list[float], budget: int, held: int, beat: float) -> None:
    slow = next((w - held for w in range(held + 1, len(x)) if x[w] > beat), 0)
    assert SpeedupCurve(x).more(held, beat) == slow


@given(x=curves, least=st.integers(1, 6), most=st.integers(1, 16), nodes=st.integers(1, 14))
def test_bounds_are_kept(x: list[float], least: int, most: int, nodes: int) -> None:
    curve = SpeedupCurve(x).bounded(least, most, nodes)
    for table in (curve.hell(), curve.knee(0.01), curve.fastest(), curve.everything()):
        for budget in range(nodes + 3):
            size, cost = table.at(budget)
            assert size == 0 or least <= size <= min(most, nodes, budget)
            assert (size == 0) == (cost == float("inf"))


def test_a_linear_curve_counts_in_seconds_on_what_is_asked_for() -> None:
    assert linear_curve(8, 4).service_s(100.0, 4) == pytest.approx(100.0)
    assert linear_curve(8, 4).service_s(100.0, 8) == pytest.approx(50.0)
    assert linear_curve(8, 4).service_s(100.0, 0) == float("inf")


def test_nonsense_is_refused() -> None:
    for values in ([1.0, 2.0], [0.0], [0.0, -1.0], [0.0, float("nan")]):
        with pytest.raises(Rejected, match=r"X\("):
            SpeedupCurve(values)
