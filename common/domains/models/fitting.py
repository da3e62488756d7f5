"""Fits theta_sys to what a job measured (Qiao, thesis, section 3.4.1).

Minimises the root mean squared logarithmic error of T_iter, and of T_grad where it was measured
apart, with L-BFGS-B: every alpha and beta at least 0, gamma within [1, 10]. Two pulls far weaker
than data (as in the authors' published system) settle what data leaves open: gamma towards 1, and
the retrogressions towards 0.

**Prior-driven exploration.** What was never tried counts as free, so that the scheduler tries it:

- no allocation of several GPUs on one machine: alpha_local = beta_local = 0;
- none over several machines: alpha_node, beta_node are not measured quantities. They count as 0
  until synchronising within a machine was seen, and then as 1.1 times the local ones: a network is
  never believed to be faster than the inside of a machine;
- never more than two GPUs: both betas are 0;
- a single per-GPU batch size: half of T_grad is its constant part, so that larger batches look
  better than they might be.

Times are measured in units of their median while fitting, so that a model of 7 ms and one of 7 s
are equally well conditioned. The objective and its gradient are one compiled pass.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Sequence
from math import exp, log, sqrt
from typing import NamedTuple

import numpy as np
import scipy  # Its parts are loaded when they are used.

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.throughput import Floats, ThroughputParams
from slackwater.common.native.compiled import njit

GAMMA_MAX = 10.0
NODE_OVER_LOCAL = 1.1
FLOOR = 1e-8
"""Smallest alpha and beta, in units of the median time: logarithms need more than 0."""
_ENOUGH = 1e-8
"""Relative progress of the objective at which a fit is done: far below any measurement's noise."""
GAMMA_PULL, RETROGRESSION_PULL = 1e-3, 1e-2
_AG, _BG, _AL, _BL, _AN, _BN, _GAMMA = range(7)


class Observation(NamedTuple):
    """One configuration as it was measured."""

    nodes: int
    gpus: int
    per_gpu: int
    accumulation: int
    iteration_s: float
    grad_s: float = 0.0
    """One forward and backward pass without synchronisation; 0 where it was not measured apart."""
    aggregators: int = 0
    """Aggregators that added its gradients up; 0: it synchronised in another way."""


def fit(
    observations: Sequence[Observation], guess: ThroughputParams | None = None
) -> ThroughputParams:
    """theta_sys that explains the observations best, under the priors. A guess (the last fit of the
    same job) saves most of the time."""
    if not observations:
        raise Rejected("there is nothing to fit: measure at least one iteration")
    data = np.array(observations, dtype=np.float64)
    if not np.all(data[:, 4] > 0):
        raise Rejected("an observation's iteration_s is not positive; leave it out")
    unit_s, unit_m = float(np.median(data[:, 4])), float(np.median(data[:, 2]))
    data[:, 2] /= unit_m
    data[:, 4:6] /= unit_s
    low, high, start = _bounds(data)
    if guess is not None:
        known = np.array(guess) / unit_s
        known[_BG] *= unit_m
        known[_GAMMA] = guess.gamma
        # A parameter that no measurement moved from its floor starts as without a guess.
        start = np.clip(np.where(known > FLOOR, known, start), low, high)
    result = scipy.optimize.minimize(
        _objective, start, args=(data,), jac=True, method="L-BFGS-B",
        bounds=list(zip(low, high, strict=True)), options={"ftol": _ENOUGH},
    )  # fmt: skip
    values = np.clip(result.x if np.isfinite(result.fun) else start, low, high)
    # The floor stands for zero.
    values[:_GAMMA][values[:_GAMMA] <= FLOOR] = 0.0
    values[:_GAMMA] *= unit_s
    values[_BG] /= unit_m
    params = ThroughputParams(*map(float, values))
    if not np.any(data[:, 0] > 1):
        params = params._replace(
            alpha_node_s=max(params.alpha_node_s, NODE_OVER_LOCAL * params.alpha_local_s),
            beta_node_s=max(params.beta_node_s, NODE_OVER_LOCAL * params.beta_local_s),
        )
    return params


def rmsle(params: ThroughputParams, observations: Sequence[Observation]) -> float:
    """The error of T_iter alone, as a factor's logarithm: .1 is about 10 %."""
    data = np.array(observations, dtype=np.float64)
    x = np.maximum(np.array(params), 1e-300)
    squares = [_log_times(x, row)[0] - log(row[4]) for row in data]
    return float(np.sqrt(np.mean(np.square(squares))))


def _bounds(data: Floats) -> tuple[Floats, Floats, Floats]:
    """Lowest, highest and first value of each parameter, in units."""
    nodes, gpus, per_gpu = data[:, 0], data[:, 1], data[:, 2]
    steps, iteration, grad = data[:, 3], data[:, 4], data[:, 5]
    # An iteration takes at least its accumulation steps and one more: the most T_grad can be.
    compute = np.where(grad > 0, grad, iteration / (steps + 1))
    sync = max(float(np.median(np.maximum(iteration - compute * (steps + 1), 0.0))), 0.1)
    constant = float(np.mean(compute)) / 2
    slope = float(np.mean(compute / per_gpu)) / 2
    low = np.array([FLOOR] * 6 + [1.0])
    high = np.array([np.inf] * 6 + [GAMMA_MAX])
    start = np.array([constant, slope, sync, sync / 10, sync, sync / 10, 1.0 + 1e-3])
    fixed: dict[int, float] = {}
    if np.ptp(per_gpu) == 0:
        fixed[_AG] = constant
    if not np.any((nodes == 1) & (gpus > 1)):
        fixed |= {_AL: FLOOR, _BL: FLOOR}
    if not np.any(nodes > 1):
        fixed |= {_AN: FLOOR, _BN: FLOOR}
    if not np.any(gpus > 2):
        fixed |= {_BL: FLOOR, _BN: FLOOR}
    for index, value in fixed.items():
        low[index] = high[index] = start[index] = value
    return low, high, start


@njit(cache=True)
def _log_times(x, row):
    """log T_iter and log T_grad of one observation, and their derivatives by the seven."""
    nodes, gpus, m, steps = row[0], row[1], row[2], row[3]
    grad = x[0] + x[1] * m
    d_iter, d_grad = np.zeros(7), np.zeros(7)
    d_grad[0], d_grad[1] = 1.0 / grad, m / grad
    if gpus <= 1:
        d_iter[0], d_iter[1] = d_grad[0], d_grad[1]
        return log((steps + 1.0) * grad), log(grad), d_iter, d_grad
    first = 4 if nodes > 1 else 2
    beyond = max(gpus - 2.0, 0.0)
    sync = x[first] + x[first + 1] * beyond
    gamma = x[6]
    lg, ls = log(grad), log(sync)
    top = max(lg, ls)
    eg, es = exp(gamma * (lg - top)), exp(gamma * (ls - top))
    total = eg + es
    step = exp(top + log(total) / gamma)
    time = steps * grad + step
    by_grad = (steps + step / grad * eg / total) / time
    by_sync = step / sync * es / total / time
    d_iter[0], d_iter[1] = by_grad, by_grad * m
    d_iter[first], d_iter[first + 1] = by_sync, by_sync * beyond
    slope = (eg * (lg - top) + es * (ls - top)) / (total * gamma) - log(total) / gamma**2
    d_iter[6] = step * slope / time
    return log(time), log(grad), d_iter, d_grad


@njit(cache=True)
def _objective(x, data):
    square, square_grad, measured = 0.0, 0.0, 0
    slope, slope_grad = np.zeros(7), np.zeros(7)
    for i in range(data.shape[0]):
        log_iter, log_grad, d_iter, d_grad = _log_times(x, data[i])
        error = log_iter - log(data[i, 4])
        square += error * error
        slope += error * d_iter
        if data[i, 5] > 0:
            measured += 1
            error = log_grad - log(data[i, 5])
            square_grad += error * error
            slope_grad += error * d_grad
    # The root's derivative at 0 is softened, or a perfect fit would divide by nothing.
    n = data.shape[0]
    root = sqrt(square / n + 1e-12)
    value, gradient = root, slope / (n * root)
    if measured:
        root = sqrt(square_grad / measured + 1e-12)
        value += root
        gradient += slope_grad / (measured * root)
    value += GAMMA_PULL * (x[6] - 1.0) ** 2
    gradient[6] += 2.0 * GAMMA_PULL * (x[6] - 1.0)
    for alpha in (2, 4):
        ratio = x[alpha + 1] / x[alpha]
        value += RETROGRESSION_PULL * ratio * ratio
        gradient[alpha + 1] += 2.0 * RETROGRESSION_PULL * ratio / x[alpha]
        gradient[alpha] -= 2.0 * RETROGRESSION_PULL * ratio * ratio / x[alpha]
    return value, gradient
