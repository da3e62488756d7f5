"""The few random draws that the workloads share. Randomness is always an argument."""

from collections.abc import Iterator
from math import exp, isfinite, log
from random import Random

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected


def log_uniform(rng: Random, low: float, high: float) -> float:
    """A value whose logarithm is uniform: every decade is equally likely."""
    return exp(rng.uniform(log(low), log(high)))


def poisson_arrivals(rng: Random, mean_gap_s: float) -> Iterator[float]:
    """Times of a Poisson process, its first arrival at 0. A gap of 0: all at once.

    One unit-mean draw per arrival, scaled: with one seed another rate moves the same arrivals.
    """
    at_s = 0.0
    while True:
        yield at_s
        at_s += rng.expovariate(1.0) * mean_gap_s


def require_count(name: str, value: int) -> None:
    if not 1 <= value <= limits.TRACE_JOBS_MAX:
        raise Rejected(f"{name} is {value}; give 1 to {limits.TRACE_JOBS_MAX}")


def require_positive(name: str, value: float, allow_zero: bool = False) -> None:
    if not isfinite(value) or value < 0.0 or (value == 0.0 and not allow_zero):
        raise Rejected(
            f"{name} is {value}; give a finite number {'from' if allow_zero else 'above'} 0"
        )
