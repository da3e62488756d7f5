"""The estimate of the gradient noise scale: unbiased moments, an interval, and when to say nothing
(Qiao, thesis, 3.3.1 and appendix A.1)."""

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.domains.models.gradient_noise import (
    NEGATIVE_PART_MAX,
    WINDOW,
    GradientSquares,
    NoiseScale,
)

DIMENSIONS = 100


def drawn(
    rng: np.random.Generator, phi: float, workers: int, batch: float, iterations: int
) -> list[GradientSquares]:
    """Gradients of known mean (length 1) and covariance (trace phi, uneven)."""
    signal = rng.standard_normal(DIMENSIONS)
    signal /= np.linalg.norm(signal)
    shape = rng.gamma(0.5, 1, DIMENSIONS)
    deviation = np.sqrt(shape / shape.sum() * phi / batch)
    told = []
    for _ in range(iterations):
        each = signal + rng.standard_normal((workers, DIMENSIONS)) * deviation
        lengths = float((each**2).sum(1).mean()), float((each.mean(0) ** 2).sum())
        told.append(GradientSquares(*lengths, workers))
    return told


@pytest.mark.parametrize(("workers", "batch"), [(2, 64), (4, 16), (8, 16)])
def test_both_moments_are_unbiased(workers: int, batch: int) -> None:
    """Means over 2,000 iterations, of |G|^2 = 1 and a trace of 50."""
    told = drawn(np.random.default_rng(1), 50.0, workers, batch, 2000)
    moments = np.array([each.moments(batch) for each in told])
    error = moments.std(0) / np.sqrt(len(moments))
    assert moments[:, 0].mean() == pytest.approx(1.0, abs=4 * error[0])
    assert moments[:, 1].mean() == pytest.approx(50.0, abs=4 * error[1])


@given(
    small=st.floats(1e-6, 1e6), part=st.floats(0.0, 1.0),
    workers=st.integers(2, 64), batch=st.floats(1, 1e5),
)  # fmt: skip
def test_moments_give_both_lengths_back(
    small: float, part: float, workers: int, batch: float
) -> None:
    """E|g_b|^2 = |G|^2 + tr(Sigma) / b, of one worker and of all."""
    sqr, trace = GradientSquares(small, small * part, workers).moments(batch)
    assert sqr + trace / batch == pytest.approx(small, rel=1e-9)
    assert sqr + trace / (workers * batch) == pytest.approx(
        small * part, rel=1e-6, abs=1e-9 * small
    )


def test_the_scale_is_found_and_its_interval_contains_it() -> None:
    """A scale of 100 by 20 iterations of 4 x 16 examples, of 100 runs."""
    found, within = [], 0
    for seed in range(100):
        scale = NoiseScale()
        for each in drawn(np.random.default_rng(seed), 100.0, 4, 16, 60):
            assert scale.add(each, 16)
        estimate = scale.estimate
        assert estimate is not None
        assert estimate.low <= estimate.phi <= estimate.high
        found.append(estimate.phi)
        within += estimate.low <= 100.0 <= estimate.high
    assert np.median(found) == pytest.approx(100.0, rel=0.1)
    assert 0.78 <= within / 100 <= 0.97


def test_no_more_is_claimed_than_the_window_can_tell() -> None:
    """Without any signal the scale is cut at the examples of a window, or not known."""
    scale = NoiseScale()
    assert scale.estimate is None
    noise = drawn(np.random.default_rng(3), 1e9, 2, 10, 500)
    known = 0
    for each in noise:
        scale.add(each, 10)
        if (estimate := scale.estimate) is not None:
            known += 1
            assert estimate.phi <= WINDOW * 20 * 1.001
    assert known < 400


def test_a_signal_that_is_negative_in_more_than_a_third_is_not_known() -> None:
    scale = NoiseScale(smoothing=0.0)  # So that each iteration is its own mean.
    good, bad = GradientSquares(2.0, 1.5, 2), GradientSquares(2.0, 0.5, 2)
    for _ in range(WINDOW):
        scale.add(good, 8)
    assert scale.estimate is not None
    for count in range(1, WINDOW):
        scale.add(bad, 8)
        assert (scale.estimate is None) == (count > NEGATIVE_PART_MAX * WINDOW)


def test_one_iteration_has_no_interval() -> None:
    scale = NoiseScale()
    scale.add(GradientSquares(2.0, 1.5, 2), 8)
    estimate = scale.estimate
    assert estimate is not None
    assert (estimate.low, estimate.high) == (0.0, inf)
    assert estimate.phi == pytest.approx(8.0)  # |G|^2 = 1, tr(Sigma) = 8.


def test_what_tells_nothing_is_left_out() -> None:
    """An iteration without lengths, as of a lone worker, or whose lengths overflowed."""
    scale = NoiseScale()
    assert not scale.add(None, 8)
    assert not scale.add(GradientSquares(inf, 1.0, 2), 8)
    assert not scale.add(GradientSquares(1e300, 1e299, 2), 8)
    assert scale.estimate is None
    with pytest.raises(ValueError, match="1 gradients of 8 examples"):
        scale.add(GradientSquares(1.0, 1.0, 1), 8)
    with pytest.raises(ValueError, match="2 gradients of 0 examples"):
        scale.add(GradientSquares(1.0, 1.0, 2), 0)
