"""The bounds of rework: published forms by their numbers, and trials that never break them."""

from math import log, sqrt
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.rework import (
    SLOWEST,
    Move,
    Perturbation,
    best_interval,
    contraction_of,
    endless_rework_bound,
    recovery_rework,
    rework_bound,
)

CURVATURES = (1.0, 0.5, 0.2, 0.1)
CONTRACTION = 0.9
"""Gradient descent with a step of 1 contracts each axis by 1 - curvature."""


def test_one_perturbation_by_equation_5_6() -> None:
    assert rework_bound(0.9, 1.0, [Perturbation(20, 0.1)]) == pytest.approx(5.697, abs=5e-4)


def test_two_perturbations_by_equation_5_6() -> None:
    two = [Perturbation(10, 0.05), Perturbation(30, 0.05)]
    assert rework_bound(0.9, 2.0, two) == pytest.approx(4.819, abs=5e-4)


def test_a_late_perturbation_costs_what_it_undoes() -> None:
    """0.5^-2000 is beyond a float; its logarithm is not."""
    bound = rework_bound(0.5, 1.0, [Perturbation(2000, 0.5)])
    assert bound == pytest.approx(1999.0)
    assert rework_bound(0.5, 1.0, [Perturbation(2000, 0.0)]) == 0.0


def test_perturbations_without_end_by_equation_b_2() -> None:
    assert endless_rework_bound(0.9, 1.0, 0.001, 0.05) == pytest.approx(1.798, abs=5e-4)


def norm(vector: list[float]) -> float:
    return sqrt(sum(each * each for each in vector))


def iterations_to(start: list[float], within: float, at: int, change: list[float]) -> int:
    """Descend a quadratic programme of four dimensions, perturbed once."""
    w, count = list(start), 0
    while count <= at or norm(w) >= within:
        w = [each * (1.0 - curve) for each, curve in zip(w, CURVATURES, strict=True)]
        count += 1
        if count == at:
            w = [each + more for each, more in zip(w, change, strict=True)]
    return count


def test_a_thousand_quadratic_trials_never_break_the_bound() -> None:
    """The undisturbed run is along the slowest axis, where it contracts by c alone (figure 5.3).
    Counts are whole: the bound is held to one iteration."""
    random = Random(1)
    start = [0.0, 0.0, 0.0, 1.0]
    within = CONTRACTION**100
    undisturbed = log(norm(start) / within) / -log(CONTRACTION)
    rework = []
    for _ in range(1000):
        at, size = random.randrange(1, 80), 10 ** random.uniform(-5, 0)
        change = [size * random.gauss(0.0, 1.0) for _ in range(4)]
        bound = rework_bound(CONTRACTION, norm(start), [Perturbation(at, norm(change))])
        rework.append(iterations_to(start, within, at, change) - undisturbed)
        assert rework[-1] <= bound + 1.0
    assert max(rework) > 10.0, "some were large"


@given(
    c=st.floats(0.05, 0.999), age=st.floats(0.0, 1e5), lost=st.floats(0.01, 1.0),
    more=st.floats(0.0, 1e3),
)  # fmt: skip
def test_recovery_costs_no_more_than_all_iterations_and_grows_with_age_and_loss(
    c: float, age: float, lost: float, more: float
) -> None:
    rework = recovery_rework(c, age, lost)
    assert -1e-9 <= rework <= age * (1 + 1e-9) + 1e-9
    assert rework <= recovery_rework(c, age + more, lost) + 1e-6 * (1 + age)
    assert rework <= recovery_rework(c, age, min(1.0, lost * 1.5)) + 1e-9 * (1 + age)
    assert recovery_rework(c, age, 1.0) == pytest.approx(age, abs=1e-6, rel=1e-6)


@given(
    iteration_s=st.floats(1e-3, 1.0), checkpoint_s=st.floats(0.5, 100.0),
    failures_per_h=st.floats(0.01, 10.0),
)  # fmt: skip
def test_the_interval_is_youngs_where_all_is_lost(
    iteration_s: float, checkpoint_s: float, failures_per_h: float
) -> None:
    rate = failures_per_h / 3600.0
    young_s = sqrt(2.0 * checkpoint_s / rate)
    found = best_interval(0.99, iteration_s, checkpoint_s, rate)
    assert found.period_s == pytest.approx(max(young_s, iteration_s), rel=1e-3)


@given(c=st.floats(0.5, 0.9999), lost=st.floats(0.05, 1.0))
def test_no_other_interval_is_cheaper(c: float, lost: float) -> None:
    found = best_interval(c, 0.1, 2.0, 1.0 / 600.0, lost)
    full = best_interval(c, 0.1, 2.0, 1.0 / 600.0)
    assert found.overhead <= full.overhead * (1 + 1e-9)
    assert found.period_s >= full.period_s * (1 - 1e-3), "the less is lost, the rarer"


@given(
    c=st.floats(0.5, 0.9999), size=st.floats(1e-6, 1e6),
    stretches=st.lists(st.integers(1, 60), min_size=3, max_size=8),
)  # fmt: skip
def test_a_contraction_is_found_in_how_far_training_moves(
    c: float, size: float, stretches: list[int]
) -> None:
    moves, at = [], 10
    for each in stretches:
        moves.append(Move(at, at + each, size * c**at * (1.0 - c**each)))
        at += each
    found = contraction_of(moves)
    assert found is not None
    assert 1.0 - found == pytest.approx(1.0 - c, rel=0.01)


def test_training_that_wanders_contracts_not_at_all_and_of_two_moves_nothing_is_said() -> None:
    wanders = [Move(at, at + 10, 2.0) for at in range(0, 80, 10)]
    assert contraction_of(wanders) == pytest.approx(SLOWEST, abs=1e-6)
    assert contraction_of(wanders[:2]) is None
    assert contraction_of([Move(0, 10, 0.0)] * 5) is None, "it stands still"


def test_a_contraction_of_descent_on_a_quadratic_is_that_of_its_slowest_axis() -> None:
    """At the begin, fast axes move, too: the newest moves alone tell."""
    w, moves = np.array([1.0, 1.0, 1.0, 1.0]), []
    factors = 1.0 - np.array(CURVATURES)
    for at in range(0, 160, 20):
        moved = w * factors**20
        moves.append(Move(at, at + 20, norm(list(w - moved))))
        w = moved
    found = contraction_of(moves[-5:])
    assert found == pytest.approx(CONTRACTION, abs=1e-3)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: rework_bound(1.0, 1.0, []), "contraction 1.0"),
        (lambda: rework_bound(0.9, 0.0, []), "distance 0.0"),
        (lambda: rework_bound(0.9, 1.0, [Perturbation(-1, 0.1)]), "perturbation -1:0.1"),
        (lambda: rework_bound(0.9, 1.0, [Perturbation(3, float("nan"))]), "perturbation 3:nan"),
        (lambda: endless_rework_bound(0.9, 1.0, 0.01, 0.05), "accuracy 0.05"),
        (lambda: endless_rework_bound(0.9, 0.01, 0.01, 0.5), "distance 0.01"),
        (lambda: endless_rework_bound(0.9, 1.0, -1.0, 0.5), "perturbation -1.0"),
        (lambda: best_interval(0.9, 0.0, 1.0, 1.0), "iteration_s 0.0"),
        (lambda: best_interval(0.9, 1.0, float("inf"), 1.0), "checkpoint_s inf"),
        (lambda: best_interval(0.9, 1.0, 1.0, 1.0, lost=0.0), "lost 0.0"),
        (lambda: best_interval(0.9, 1.0, 1.0, 1.0, recovery_s=-1.0), "recovery_s -1.0"),
    ],
)
def test_what_has_no_answer_is_refused_by_name(call: object, named: str) -> None:
    assert callable(call)
    with pytest.raises(Rejected, match=named):
        call()
