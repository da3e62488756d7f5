"""How much a training example is worth: Pollux's statistical efficiency (Qiao, thesis, 3.3.1).

    EFFICIENCY(M) = (phi + M0) / (phi + M)      (eq. 3.3)

phi is the (pre-conditioned) gradient noise scale: the variance of an example's gradient over the
squared length of the true one (eq. 3.2, appendix A.1). It takes 1 + phi / M iterations of M
examples to make the same progress, whatever M.

**Two estimators of phi.** With several gradients of one iteration (K replicas or s accumulation
steps) the lengths of the small and of the averaged gradient tell noise and signal apart
(McCandlish et al., appendix A.1). With one gradient an iteration, two consecutive ones are differed
(section 3.3.1): their noise is independent and the signal nearly the same. The callers pass
pre-conditioned gradients' lengths and smooth both moments over iterations, never phi itself, which
is a quotient of noisy numbers.
"""

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from slackwater.common.domains.models.throughput import Floats


def efficiency(noise_scale: float, batch_initial: float, batch: ArrayLike) -> Floats:
    """Progress per example with `batch`, relative to `batch_initial` (M0). An infinite noise scale
    means that examples never become redundant: 1."""
    batch = np.asarray(batch, dtype=np.float64)
    if noise_scale == inf:
        return np.ones_like(batch)
    return (noise_scale + batch_initial) / (noise_scale + batch)


class GradientMoments(NamedTuple):
    """Moments of the pre-conditioned gradient of a batch of M0 examples."""

    sqr: float
    """Squared length of the true gradient |Pg|^2."""
    var: float
    """Variance of the mean gradient of M0 examples: tr(P Sigma P') / M0."""

    def noise_scale(self, batch_initial: float) -> float:
        """phi. Moments of no signal count as pure noise; of neither as pure signal."""
        sqr, var = max(self.sqr, 0.0), max(self.var, 0.0)
        if sqr == 0.0:
            return inf if var > 0.0 else 0.0
        return batch_initial * var / sqr


def moments_of_replicas(
    small_sqr: float, large_sqr: float, batch_small: float, batch_large: float, batch_initial: float
) -> GradientMoments:
    """From the mean squared length of the gradients of `batch_small` examples and that of their
    average over `batch_large`: E|g_b|^2 = |g|^2 + tr(Sigma) / b at both sizes."""
    sqr = (batch_large * large_sqr - batch_small * small_sqr) / (batch_large - batch_small)
    trace = (small_sqr - large_sqr) / (1.0 / batch_small - 1.0 / batch_large)
    return GradientMoments(sqr, trace / batch_initial)


def moments_of_differences(
    mean_sqr: float, difference_sqr: float, batch: float, batch_initial: float
) -> GradientMoments:
    """From consecutive gradients of `batch` examples: the mean of their squared lengths and the
    squared length of their difference, which is twice the noise of one."""
    noise = difference_sqr / 2.0
    return GradientMoments(mean_sqr - noise, noise * batch / batch_initial)
