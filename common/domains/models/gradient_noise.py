"""The gradient noise scale as a running job sees it: lengths of gradients, and what they tell.

phi = tr(Sigma) / |G|^2, in examples (Qiao, thesis, eq. 3.2, section 3.3.1, appendix A.1). An
iteration's gradients of K workers give both moments without bias (efficiency.py), and with much
noise. Both are smoothed over about 20 iterations, phi itself never: it is a quotient of noisy
numbers, and its interval is a quotient's (Fieller 1954).

A window of n iterations of B examples tells no phi that is much larger than n B: the noise of its
mean gradient is as long as the gradient itself then. phi is cut there. Where the estimate of |G|^2
is negative in more than a third of the window, nothing is known at all.
"""

from collections import deque
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Final, NamedTuple

from slackwater.common.domains.models.efficiency import GradientMoments, moments_of_replicas

SMOOTHING: Final = 0.95
"""Follows a falling loss within about 20 iterations."""
WINDOW: Final = 20
NEGATIVE_PART_MAX: Final = 1 / 3
QUANTILE: Final = 1.645
"""The normal distribution's: intervals have 90 %."""


@dataclass(frozen=True, slots=True)
class GradientSquares:
    """One iteration's gradients, all of the job's tensors together (Qiao, thesis, appendix A.1).
    Those of steps that one worker accumulates are told in the same way."""

    each_sq: float
    """The mean, over workers, of the squared length of a worker's gradient."""
    mean_sq: float
    """The squared length of the workers' mean gradient."""
    workers: int
    """How many gradients there were: 2 or more."""

    def moments(self, batch: float) -> GradientMoments:
        """Return |G|^2 and tr(Sigma), both without bias, of gradients of `batch` examples each."""
        return moments_of_replicas(self.each_sq, self.mean_sq, batch, self.workers * batch, 1.0)


class NoiseEstimate(NamedTuple):
    """The noise scale, in examples."""

    phi: float
    low: float
    high: float
    """Ends of the 90 % interval; `high` is infinite where no signal is certain."""
    sqr: float
    """|G|^2, smoothed."""
    trace: float
    """tr(Sigma), smoothed."""


class NoiseScale:
    """The estimate of a job that tells each iteration's lengths."""

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        self._keep = smoothing
        self._negative: deque[bool] = deque(maxlen=WINDOW)
        self._weight = self._weight_sqr = self._examples = 0.0
        self._sums = [0.0] * 5
        """Weighted sums: sqr, trace, and the products sqr sqr, trace trace, sqr trace."""

    def add(self, squares: GradientSquares | None, batch: float) -> bool:
        """Add an iteration in which each worker's gradient was of `batch` examples. False: it told
        nothing (None, or lengths that overflowed), and is left out. Raises ValueError."""
        if squares is None:
            return False
        if squares.workers < 2 or batch <= 0:
            raise ValueError(
                f"{squares.workers} gradients of {batch} examples: noise is told from 2 gradients "
                "or more, of at least one example; leave the iteration out"
            )
        sqr, trace = squares.moments(batch)
        if not (isfinite(sqr * sqr) and isfinite(trace * trace)):
            return False
        keep, take = self._keep, 1.0 - self._keep
        told = (sqr, trace, sqr * sqr, trace * trace, sqr * trace)
        self._sums = [keep * old + take * new for old, new in zip(self._sums, told, strict=True)]
        self._weight = keep * self._weight + take
        self._weight_sqr = keep * keep * self._weight_sqr + take * take
        self._examples = keep * self._examples + squares.workers * batch
        self._negative.append(self._sums[0] <= 0.0)
        return True

    @property
    def estimate(self) -> NoiseEstimate | None:
        """Return the estimate; None: it is not known."""
        seen = self._negative
        if not seen or sum(seen) > NEGATIVE_PART_MAX * len(seen):
            return None
        sqr, trace, *products = (each / self._weight for each in self._sums)
        iterations = self._weight**2 / self._weight_sqr
        low, high = _interval(sqr, trace, products, iterations)
        phi = self._examples if sqr <= 0.0 else min(max(trace, 0.0) / sqr, self._examples)
        return NoiseEstimate(phi, min(low, phi), max(high, phi), sqr, trace)


def _interval(
    sqr: float, trace: float, products: list[float], iterations: float
) -> tuple[float, float]:
    """Return Fieller's interval of trace / sqr, both means of so many iterations: all phi for which
    trace - phi sqr is not certainly another number than 0."""
    if iterations < 2.0:
        return 0.0, inf
    part = QUANTILE**2 / (iterations - 1.0)
    aa, bb = (
        part * (product - mean**2) for product, mean in zip(products, (sqr, trace), strict=False)
    )
    ab = part * (products[2] - sqr * trace)
    a, b, c = sqr**2 - aa, sqr * trace - ab, trace**2 - bb
    root = sqrt(max(b * b - a * c, 0.0))
    if a <= 0.0 or sqr <= 0.0:  # The signal may be nothing.
        return 0.0, inf
    return max((b - root) / a, 0.0), (b + root) / a
