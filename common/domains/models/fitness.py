"""The value of an allocation to a cluster: Pollux's fitness (Qiao, thesis, section 3.4.2).

    FITNESS_p = (1/J sum_j SPEEDUP_j^p)^(1/p)                      (eq. 3.11)
    SPEEDUP_j = best goodput with A_j / best goodput with a_f      (eq. 3.12)

a_f is an exclusive 1/J share of the cluster, rounded up to whole GPUs, on as few machines as hold
it. Every speedup is raised by 1e-3 before the power mean, or a single waiting job would make every
allocation worth 0 for p <= 0. A job that would be moved has its speedup multiplied by

    REALLOC_FACTOR = max(0, (T - R delta) / (T + delta))

with its age T, its past re-allocations R and the delay delta; a job without GPUs has nothing to
lose and is exempt.
"""

from math import ceil

import numpy as np
from numpy.typing import ArrayLike

WAITING = 1e-3
"""Added to every speedup: the worth of a job without GPUs."""


def power_mean(speedups: ArrayLike, p: float) -> float:
    """FITNESS_p; p = 0 is the geometric mean."""
    values = np.asarray(speedups, dtype=np.float64) + WAITING
    if p == 0:
        return float(np.exp(np.mean(np.log(values))))
    return float(np.mean(values**p) ** (1.0 / p))


def worth(speedups: ArrayLike, p: float) -> np.ndarray:
    """A term per job whose sum grows with FITNESS_p: what a search may add up job by job."""
    values = np.asarray(speedups, dtype=np.float64) + WAITING
    if p == 0:
        return np.log(values)
    return values**p if p > 0 else -(values**p)


def fitness_of_worth(total: float, jobs: int, p: float) -> float:
    """FITNESS_p from the sum of `worth` over all jobs."""
    mean = total / jobs
    if p == 0:
        return float(np.exp(mean))
    return float((mean if p > 0 else -mean) ** (1.0 / p))


def realloc_factor(age_s: float, reallocations: int, delay_s: float) -> float:
    """Return the factor that remains of a speedup if the job is moved once more, its past rate
    going on for ever."""
    if age_s + delay_s <= 0:
        return 1.0
    return max(0.0, (age_s - reallocations * delay_s) / (age_s + delay_s))


def fair_share(cluster_gpus: int, jobs: int, node_gpus: int) -> tuple[int, int]:
    """a_f as (machines, GPUs)."""
    gpus = max(1, ceil(cluster_gpus / max(1, jobs)))
    return max(1, ceil(gpus / max(1, node_gpus))), gpus
