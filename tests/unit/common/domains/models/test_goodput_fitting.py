"""Fitting theta_sys: what was measured is explained, what was not is believed to be free."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.fitting import Observation, _objective, fit, rmsle
from slackwater.common.domains.models.throughput import (
    ThroughputParams,
)

THETA = ThroughputParams(0.05, 0.001, 0.02, 0.005, 0.1, 0.01, 2.0)
SHAPES = [(1, 1), (1, 2), (1, 4), (2, 4), (2, 8), (3, 12), (16, 64)]


def observe(theta: ThroughputParams, shapes: list[tuple[int, int]], per_gpu: tuple[int, ...],
            apart: bool = True) -> list[Observation]:  # fmt: skip
    return [
        Observation(
            nodes, gpus, m, steps, float(theta.iteration_s(nodes, gpus, m, steps)),
            float(theta.grad_s(m)) if apart else 0.0,
        )
        for nodes, gpus in shapes
        for m in per_gpu
        for steps in (0, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("unit_s", [1e-3, 1.0, 60.0])
def test_the_true_parameters_are_found(apart: bool, unit_s: float) -> None:
    """From exact times of seven shapes, whatever the model's speed."""
    theta = ThroughputParams(*(unit_s * x for x in THETA[:6]), THETA.gamma)
    observed = observe(theta, SHAPES, (50, 100, 200), apart)
    assert fit(observed) == pytest.approx(theta, rel=1e-3)


@settings(max_examples=25, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_noisy_measurements_are_explained_as_well_as_by_the_truth(seed: int) -> None:
    """With 5 % noise on random parameters no minimum is found that is worse than the truth."""
    rng = np.random.default_rng(seed)
    alphas, betas = rng.uniform(1e-2, 0.1, 3), rng.uniform(0.05, 0.5, 3)
    pairs = (float(x) for a, b in zip(alphas, alphas * betas, strict=True) for x in (a, b))
    theta = ThroughputParams(*pairs, float(rng.uniform(1.0, 4.0)))  # type: ignore[misc]  # Six.
    observed = [
        o._replace(iteration_s=o.iteration_s * float(np.exp(rng.normal(0, 0.05))))
        for o in observe(theta, SHAPES, (1, 4, 16), apart=False)
    ]
    assert rmsle(fit(observed), observed) < rmsle(theta, observed) + 0.015


def test_a_guess_explains_as_well() -> None:
    """The last fit, made before a second machine was seen, is where the next one starts."""
    before = fit(observe(THETA, SHAPES[:3], (50, 100)))
    observed = observe(THETA, SHAPES, (50, 100, 200))
    assert rmsle(before, observed) > 0.3
    assert rmsle(fit(observed, before), observed) < 0.005


def test_one_gpu_only_is_believed_to_scale_perfectly() -> None:
    """A new job has seen one GPU and one batch: half of its time is constant, syncing is free."""
    params = fit(observe(THETA, [(1, 1)], (100,))[:1])
    assert params[2:6] == (0.0, 0.0, 0.0, 0.0)
    assert params.alpha_grad_s == pytest.approx(0.075)
    assert params.beta_grad_s == pytest.approx(0.00075)


def test_a_network_is_never_believed_faster_than_a_machine() -> None:
    """Only a machine's inside was measured: the network counts as 1.1 times that."""
    params = fit(observe(THETA, [(1, 1), (1, 2), (1, 3), (1, 4)], (50, 100)))
    assert params.alpha_local_s > 0
    assert params.alpha_node_s == pytest.approx(1.1 * params.alpha_local_s)
    assert params.beta_node_s == pytest.approx(1.1 * params.beta_local_s)


def test_two_gpus_say_nothing_about_retrogression() -> None:
    params = fit(observe(THETA, [(1, 1), (1, 2), (2, 2)], (50, 100)))
    assert params.beta_local_s == params.beta_node_s == 0.0
    assert params.alpha_node_s > params.alpha_local_s > 0


def test_parameters_keep_their_bounds_on_nonsense() -> None:
    """Times that shrink with the batch can't be explained; the constraints hold anyway."""
    observed = [Observation(2, 4, m, 0, 1.0 / m, 0.5 / m) for m in (1, 10, 100)]
    params = fit(observed)
    assert all(value >= 0 for value in params[:6])
    assert 1.0 <= params.gamma <= 10.0


def test_the_gradient_is_the_derivative() -> None:
    data = np.array(observe(THETA, SHAPES, (50, 100, 200)))
    x = np.array([0.06, 0.002, 0.03, 0.004, 0.2, 0.02, 1.5])
    gradient = _objective(x, data)[1]
    for i in range(7):
        high, low = x.copy(), x.copy()
        high[i] += 1e-6
        low[i] -= 1e-6
        slope = (_objective(high, data)[0] - _objective(low, data)[0]) / 2e-6
        assert gradient[i] == pytest.approx(slope, rel=1e-4)


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(Rejected, match="measure at least one iteration"):
        fit([])
    with pytest.raises(Rejected, match="iteration_s is not positive"):
        fit([Observation(1, 1, 8, 0, 0.0)])
