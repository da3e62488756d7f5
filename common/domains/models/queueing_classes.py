"""Mean value analysis with workers that differ: Lin et al. (2018), eqs. 1 to 3, a class each.

A population is a set of workers, since each worker has one task. What task k finds on its arrival
is the network without it (the arrival theorem), so

    T_k = S_k + gamma S_k N + (1 - gamma) (sum_j S_j N_j - 1/2 sum_j S_j rho_j)

needs four totals per station of the set without k: tasks N, service waiting for (sum S_j N_j), the
utilisation rho, and sum S_j rho_j.

The server is first come, first served. With one service time for all workers the network has a
product form, and gamma = 1 is exact. With different ones it has none: a task then waits for the
services that it finds, T_k = S_k + sum_j S_j N_j, which is an approximation (Reiser, 1979) and the
same number where they are equal. Random cases were within 2 % of simulations of the network, the
worst found 8 % below; S_k (1 + N) in its place was up to 68 % above.

`by_subsets` keeps the totals for all 2^K sets, walked by size, all sets of a size at once.
`bard_schweitzer` takes the network without k as the network itself minus
task k, and solves for the fixed point.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.errors import Fatal
from slackwater.common.domains.models.queueing_stations import (
    LINKS,
    SERVER,
    STATIONS,
    Floats,
    Sharing,
)

_TASKS, _SERVICE_S, _BUSY, _BUSY_S = range(4)
TOLERANCE: Final = 1e-12
DAMPING: Final = 0.5
ITERATIONS_MAX: Final = 20_000


def by_subsets(
    worker_s: Floats, visits_s: Floats, gamma: Sharing, contention: float = 0.0
) -> Floats:
    """Throughput of each worker; exact for gamma = 1 and one service time at the server.
    `visits_s[k]` are worker k's times at the stations. `contention`: the part by which each task
    that one finds there slows a station down; 0 in the papers."""
    workers = len(worker_s)
    masks = np.arange(1 << workers, dtype=np.int64)
    sizes = np.zeros(len(masks), dtype=np.int64)
    for k in range(workers):
        sizes += masks >> k & 1
    totals = np.zeros((len(masks), 4, STATIONS))
    rates = np.zeros(workers)
    for size in range(1, workers + 1):
        layer = masks[sizes == size]
        for k in range(workers):
            sets = layer[(layer >> k & 1).astype(bool)]
            found = totals[sets ^ (1 << k)]
            response_s = _response_s(visits_s[k], found, gamma)
            response_s *= 1.0 + contention * found[:, _TASKS]
            rate = 1.0 / (worker_s[k] + response_s.sum(axis=1))
            totals[sets] += _contribution(rate, response_s, visits_s[k])
            if size == workers:
                rates[k] = rate[0]
    return rates


def bard_schweitzer(worker_s: Floats, visits_s: Floats, gamma: Sharing) -> Floats:
    """Throughput of each worker, approximately: the network without k is itself minus task k."""
    workers = len(worker_s)
    alone_s = worker_s + visits_s.sum(axis=1)
    parts = _contribution(1.0 / alone_s, visits_s, visits_s)
    rates = 1.0 / alone_s
    for _ in range(ITERATIONS_MAX):
        found = parts.sum(axis=0)[None] - parts
        response_s = _response_s(visits_s, np.maximum(found, 0.0), gamma)
        moved = 1.0 / (worker_s + response_s.sum(axis=1))
        parts += DAMPING * (_contribution(moved, response_s, visits_s) - parts)
        if np.abs(moved - rates).max() <= TOLERANCE * moved.max():
            settled: Floats = moved
            return settled
        rates = moved
    raise Fatal(
        f"no steady state of {workers} workers within {ITERATIONS_MAX} iterations; a sharing "
        "function g that jumps has none: give a continuous one"
    )


def _response_s(visits_s: Floats, found: NDArray[np.float64], gamma: Sharing) -> Floats:
    """Response times (sets, stations) of a task that finds these totals."""
    response_s = visits_s * (1.0 + found[:, _TASKS])
    overlap = np.clip(gamma(found[:, _BUSY, LINKS]), 0.0, 1.0)
    links_s = np.broadcast_to(visits_s, response_s.shape)[:, LINKS]
    in_turn_s = links_s + found[:, _SERVICE_S, LINKS] - 0.5 * found[:, _BUSY_S, LINKS]
    response_s[:, LINKS] = overlap * response_s[:, LINKS] + (1.0 - overlap) * in_turn_s
    served_s = np.broadcast_to(visits_s, response_s.shape)[:, SERVER]
    response_s[:, SERVER] = served_s + found[:, _SERVICE_S, SERVER]
    return response_s


def _contribution(rate: Floats, response_s: Floats, visits_s: Floats) -> Floats:
    """Return a task's share in the four totals of each set that it is in."""
    tasks = rate[:, None] * response_s
    busy = rate[:, None] * visits_s
    return np.stack([tasks, visits_s * tasks, busy, visits_s * busy], axis=1)
