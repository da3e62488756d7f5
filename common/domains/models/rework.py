"""The rework cost of faults in iterative training (SCAR: Qiao, thesis, chapter 5, appendix B).

Training that contracts, |f(w) - w*| <= c |w - w*|, works off a perturbation of its parameters by
itself, in some more iterations: the rework. Recovery from a checkpoint is such a perturbation, and
a smaller one where only what was lost is read back (section 5.4.1). Pure; distances are norms of
parameters, all in the same unit.
"""

from collections.abc import Callable, Iterable, Sequence
from math import exp, inf, log, log1p, sqrt
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.errors import Rejected

_Numbers = NDArray[np.float64]
_ITERATIONS_MAX: Final = 1e9
_GRID: Final = 100
_LOOKS: Final = 4
"""Looks at a grid, each at a fiftieth of the one before."""
_MOMENTS: Final = (np.arange(64) + 0.5) / 64
"""Moments of a period at which a failure may come."""
MOVES_MIN: Final = 3
SLOWEST: Final = 1.0 - 1e-7
"""The contraction of training of which none is seen."""


class Perturbation(NamedTuple):
    """The expected norm of what a fault changed, and after which iteration."""

    iteration: int
    norm: float


def rework_bound(
    contraction: float, distance: float, perturbations: Iterable[Perturbation]
) -> float:
    """Return at most how many iterations more it takes to any accuracy (theorem 5.3.1, eq. 5.6).

    `contraction`: c; `distance`: |w(0) - w*|. Raises Rejected.
    """
    _check(contraction, distance)
    rate = -log(contraction)
    logarithms = [0.0]
    for iteration, norm in perturbations:
        if iteration < 0 or not 0.0 <= norm < inf:
            raise Rejected(
                f"perturbation {iteration}:{norm}: give an iteration from 0 on and a norm that is "
                "finite and not negative"
            )
        if norm:
            logarithms.append(iteration * rate + log(norm) - log(distance))
    return float(np.logaddexp.reduce(logarithms)) / rate


def endless_rework_bound(
    contraction: float, distance: float, perturbation: float, accuracy: float
) -> float:
    """Return at most how many iterations more it takes to |w - w*| < `accuracy`, where each
    iteration is perturbed by a norm of `perturbation` at most (eq. B.2).

    Raises Rejected, also where no accuracy as good as that is ever reached.
    """
    _check(contraction, distance)
    if not 0.0 <= perturbation < inf:
        raise Rejected(f"perturbation {perturbation}: give a norm that is finite, not negative")
    floor = contraction / (1.0 - contraction) * perturbation
    if not accuracy > floor:
        raise Rejected(
            f"accuracy {accuracy}: perturbations of {perturbation} in every iteration leave an "
            f"error of {floor:.6g} that cannot be reduced; give more than that"
        )
    if not distance > floor:
        raise Rejected(
            f"distance {distance}: training begins within the error of {floor:.6g} that cannot be "
            "reduced; give more than that"
        )
    return log((1.0 - floor / distance) / (1.0 - floor / accuracy)) / -log(contraction)


def recovery_rework(contraction: float, iterations: float, lost: float) -> float:
    """Return at most the rework of reading the part `lost` of all parameters back from a checkpoint
    so many iterations old, in expectation, the part being drawn at random.

    Going back k iterations perturbs by at most (c^-k - 1) of the error that is left, and a part p
    by sqrt(p) of that (theorem 5.4.2); eq. 5.6 is then the same at any time. It is k for all of
    them: full recovery repeats every iteration.
    """
    return float(_reworks(contraction, np.array([iterations]), lost)[0])


def _reworks(contraction: float, ages: _Numbers, lost: float) -> _Numbers:
    rate, part = -log(contraction), sqrt(lost)
    kept = log1p(-part) if part < 1.0 else -inf
    return np.asarray(np.logaddexp(kept, log(part) + ages * rate) / rate, np.float64)


class Interval(NamedTuple):
    """A period of checkpoints, and what it costs."""

    period_s: float
    iterations: float
    """Iterations in a period."""
    overhead: float
    """The part of all time that goes into checkpoints, rework and recovery."""
    rework_s: float
    """Seconds of rework to be expected after a failure, at most."""


def best_interval(
    contraction: float,
    iteration_s: float,
    checkpoint_s: float,
    failures_per_s: float,
    lost: float = 1.0,
    recovery_s: float = 0.0,
) -> Interval:
    """Return the period of full checkpoints that costs least time in all: checkpoints of
    `checkpoint_s` each, and at `failures_per_s` the recovery and half a period's rework on average.

    With `lost` 1, all parameters, it is Young's sqrt(2 checkpoint_s / failures_per_s). Raises
    Rejected.
    """
    _check(contraction, 1.0)
    for name, value in (
        ("iteration_s", iteration_s), ("checkpoint_s", checkpoint_s),
        ("failures_per_s", failures_per_s),
    ):  # fmt: skip
        if not 0.0 < value < inf:
            raise Rejected(f"{name} {value}: give a finite number above 0")
    if not 0.0 < lost <= 1.0:
        raise Rejected(f"lost {lost}: give the part of the parameters that a failure takes, in 0-1")
    if not 0.0 <= recovery_s < inf:
        raise Rejected(f"recovery_s {recovery_s}: give seconds, 0 or more")

    def rework_s(iterations: _Numbers) -> _Numbers:
        return iteration_s * _mean_rework(contraction, iterations, lost)

    def cost(iterations: _Numbers) -> _Numbers:
        saving = checkpoint_s / (iterations * iteration_s)
        return saving + failures_per_s * (recovery_s + rework_s(iterations))

    best = np.exp([_least(lambda x: cost(np.exp(x)), 0.0, log(_ITERATIONS_MAX))])
    return Interval(
        *(float(each[0]) for each in (best * iteration_s, best, cost(best), rework_s(best)))
    )


def _least(cost: Callable[[_Numbers], _Numbers], low: float, high: float) -> float:
    """Return where a cost of one valley is least, by ever finer grids. Without scipy, which
    services do not load."""
    for _ in range(_LOOKS):
        grid = np.linspace(low, high, _GRID + 1)
        at = int(cost(grid).argmin())
        low, high = grid[max(0, at - 1)], grid[min(_GRID, at + 1)]
    return float(grid[at])


def _mean_rework(contraction: float, iterations: _Numbers, lost: float) -> _Numbers:
    """Average over failures at any moment of periods of so many iterations."""
    ages = np.multiply.outer(iterations, _MOMENTS)
    return np.asarray(_reworks(contraction, ages, lost).mean(axis=-1), np.float64)


class Move(NamedTuple):
    """How far parameters went between two iterations: the norm of their difference."""

    first: int
    last: int
    norm: float


def contraction_of(moves: Sequence[Move]) -> float | None:
    """Estimate c from how far training moved in some stretches of iterations; None: of too few.

    Along the axis that contracts slowest, from i to i + n it moves by A c^i (1 - c^n). The c is
    returned for which the moves agree best about A. Training that only wanders, by the noise of its
    gradients, moves by as much in the end as at the begin: it is `SLOWEST`.
    """
    known = [move for move in moves if move.last > move.first and 0.0 < move.norm < inf]
    if len(known) < MOVES_MIN:
        return None
    first, last, norms = np.array(known, np.float64).T

    def disagreement(x: _Numbers) -> _Numbers:
        """Return how unlike the moves' A are, where x is the logarithm of 1 - c."""
        rates = np.log1p(-np.exp(x))[:, None]
        sizes = np.log(norms) - first * rates - np.log(-np.expm1((last - first) * rates))
        return np.asarray(sizes.var(axis=1), np.float64)

    return 1.0 - exp(_least(disagreement, log(1.0 - SLOWEST), log(0.99)))


def _check(contraction: float, distance: float) -> None:
    if not 0.0 < contraction < 1.0:
        raise Rejected(
            f"contraction {contraction}: give c between 0 and 1, the factor by which an iteration "
            "shortens the distance from the optimum"
        )
    if not 0.0 < distance < inf:
        raise Rejected(f"distance {distance}: give a finite number above 0")
