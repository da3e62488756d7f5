"""The momentum of a push follows the number of asynchronous workers (Mitliagkas et al. 2016)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from slackwater.agent.push_hyper import explicit_momentum, implicit_momentum


def test_what_asynchrony_has_of_itself_is_left_out() -> None:
    assert [implicit_momentum(k) for k in (0, 1, 2, 4)] == [0.0, 0.0, 0.5, 0.75]
    assert explicit_momentum(0.9, 1) == 0.9
    assert explicit_momentum(0.9, 2) == pytest.approx(0.4)
    assert explicit_momentum(0.9, 8) == pytest.approx(0.025)
    assert explicit_momentum(0.9, 16) == 0.0


@given(st.floats(0.0, 0.99), st.integers(1, 64), st.integers(1, 64))
def test_more_workers_never_get_more_momentum(total: float, some: int, more: int) -> None:
    fewest, most = sorted((some, more))
    assert 0.0 <= explicit_momentum(total, most) <= explicit_momentum(total, fewest) <= total


def path(workers: int, momentum: float) -> NDArray[np.float64]:
    """Return the mean parameter of f(x) = x^2 / 2 after each worker's share of updates: whoever is
    next is chosen at random, its gradient is of the parameters that it read last."""
    rng, runs, rate = np.random.default_rng(1), 4_000, 0.04
    x, moved, held = np.ones(runs), np.zeros(runs), np.ones((workers, runs))
    every, means = np.arange(runs), []
    for _ in range(160):
        who = rng.integers(0, workers, runs)
        moved = momentum * moved - rate * held[who, every]
        x = x + moved
        held[who, every] = x
        means.append(float(x.mean()))
    return np.array(means)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_asynchrony_shows_the_momentum_that_is_reckoned_with(workers: int) -> None:
    """Theorem 3: an update is, in the mean, 1 - 1/k of the one before, and 1/k of a fresh one."""
    means = path(workers, 0.0)
    moved, before = np.diff(means), means[:-1]
    foretold = implicit_momentum(workers) * moved[:-1] - 0.04 / workers * before[1:]
    assert moved[1:] == pytest.approx(foretold, abs=2e-3)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_with_its_share_a_job_overshoots_no_more_than_one_worker_with_the_total(
    workers: int,
) -> None:
    """With the total given to each push, it overshoots ever more, and at last diverges."""
    total = 0.9
    alone = path(1, total).min()
    assert path(workers, explicit_momentum(total, workers)).min() >= alone
    assert path(workers, total).min() < alone
