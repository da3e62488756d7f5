"""Fits THROUGHPUT of shared aggregators (shared_throughput.py) to what was measured.

The error of theta_sys' fit (fitting.py) is minimised, squared: the logarithm of each time's
factor, with the same bounds and pulls. What was never tried counts as free: without two numbers of
workers neither share nor incast is known.
"""

from collections.abc import Sequence
from math import inf

import numpy as np
import scipy  # Its parts are loaded when they are used.

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.fitting import (
    FLOOR,
    GAMMA_MAX,
    GAMMA_PULL,
    RETROGRESSION_PULL,
    Observation,
)
from slackwater.common.domains.models.shared_throughput import UNKNOWN, Carried, SharedThroughput
from slackwater.common.domains.models.throughput import Floats, overlap_s

_AG, _BG, _AS, _SERVE, _INCAST, _GAMMA = range(6)


def fit_shared(
    observations: Sequence[Observation],
    carried: Carried = UNKNOWN,
    guess: SharedThroughput | None = None,
) -> SharedThroughput:
    """Return the form that explains the observations best; each says its aggregators. A guess (the
    last fit of the same job) saves time. Raises Rejected for times that cannot be."""
    if not observations:
        raise Rejected("there is nothing to fit: measure at least one iteration")
    data = np.array(observations, dtype=np.float64)
    if not np.all(data[:, 4] > 0):
        raise Rejected("an observation's iteration_s is not positive; leave it out")
    if not np.all(data[:, 6] >= 1):
        raise Rejected("an observation has no aggregators; give those that had its tensors")
    unit_s, unit_m = float(np.median(data[:, 4])), float(np.median(data[:, 2]))
    data[:, 2] /= unit_m
    data[:, 4:6] /= unit_s
    link_s = 2.0 * carried.nbytes / carried.link_bytes_s / unit_s if carried.link_bytes_s else 0.0
    low, high, start = _bounds(data, link_s)
    if guess is not None:
        serve_s = carried.nbytes / guess.share_bytes_s
        last = np.array([*guess[:3], serve_s, guess.incast_s, guess.gamma]) / unit_s
        last[_BG] *= unit_m
        last[_GAMMA] = guess.gamma
        start = np.clip(np.where(last > FLOOR, last, start), low, high)
    result = scipy.optimize.least_squares(
        _errors, start, args=(data, link_s), bounds=(low - FLOOR / 2, high + FLOOR / 2),
        x_scale="jac", ftol=FLOOR, xtol=FLOOR, max_nfev=200,
    )  # fmt: skip
    values = np.clip(result.x, low, high)
    values[:_GAMMA][values[:_GAMMA] <= FLOOR] = 0.0
    values[:_GAMMA] *= unit_s
    values[_BG] /= unit_m
    alpha_s, beta_s, sync_s, serve_s, incast_s, gamma = map(float, values)
    share = carried.nbytes / serve_s if serve_s else inf
    now = int(observations[-1].aggregators)
    return SharedThroughput(alpha_s, beta_s, sync_s, share, incast_s, gamma, carried, now, now)


def _bounds(data: Floats, link_s: float) -> tuple[Floats, Floats, Floats]:
    """Lowest, highest and first value of each parameter, in units."""
    workers, per_gpu, steps = data[:, 1], data[:, 2], data[:, 3]
    iteration, grad, count = data[:, 4], data[:, 5], data[:, 6]
    compute = np.where(grad > 0, grad, iteration / (steps + 1))
    sync = max(float(np.median(np.maximum(iteration - compute * (steps + 1), 0.0))), 0.1)
    constant = float(np.mean(compute)) / 2
    serve = sync / 2 / float(np.median(workers / count))
    low = np.array([FLOOR] * 5 + [1.0])
    high = np.array([np.inf] * 5 + [GAMMA_MAX])
    slope = float(np.mean(compute / per_gpu)) / 2
    start = np.array([constant, slope, sync / 2, serve, sync / 10, 1.0 + 1e-3])
    fixed: dict[int, float] = {}
    if np.ptp(per_gpu) == 0:
        fixed[_AG] = constant
    if np.ptp(workers) == 0:
        fixed[_INCAST] = FLOOR
    if np.ptp(workers / count) == 0:
        fixed[_SERVE] = FLOOR
    for index, value in fixed.items():
        low[index] = high[index] = start[index] = value
    return low, high, start


def _errors(x: Floats, data: Floats, link_s: float) -> Floats:
    """Logarithms of the factors by which T_iter and T_grad are missed, and the two pulls."""
    workers, per_gpu, steps = data[:, 1], data[:, 2], data[:, 3]
    grad_s = x[_AG] + x[_BG] * per_gpu
    served_s = np.maximum(link_s, x[_SERVE] * workers / data[:, 6])
    sync_s = x[_AS] + served_s + x[_INCAST] * (workers - 1)
    iteration_s = steps * grad_s + overlap_s(grad_s, sync_s, x[_GAMMA])
    apart = data[:, 5] > 0
    return np.concatenate((
        np.log(iteration_s / data[:, 4]),
        np.log(grad_s[apart] / data[apart, 5]),
        (GAMMA_PULL * (x[_GAMMA] - 1.0), RETROGRESSION_PULL * x[_INCAST]),
    ))  # fmt: skip
