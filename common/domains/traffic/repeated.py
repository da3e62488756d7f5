"""Find what comes again in a sequence of sizes: send calls of a job, or its collectives.

Sizes that a program says itself are exact, so that two iterations are equal number by number.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

ITERATIONS_MIN: Final = 3
COVERED: Final = 0.5
"""The part of the sequence, from its end, that has to repeat: what came before is a warm-up."""


class Repeated(NamedTuple):
    sizes: tuple[int, ...]
    """One iteration's sizes, in order."""
    times: float
    """How often they came in succession, up to the end."""


def repeated(sizes: Sequence[int]) -> Repeated | None:
    """Return the shortest sequence whose repetitions `sizes` ends with, in any phase; None: there
    is none that comes ITERATIONS_MIN times and makes up half of all."""
    backwards = list(reversed(sizes))
    for period in range(1, len(backwards) // ITERATIONS_MIN + 1):
        equal = period
        while equal < len(backwards) and backwards[equal] == backwards[equal - period]:
            equal += 1
        if equal >= max(ITERATIONS_MIN * period, COVERED * len(backwards)):
            return Repeated(tuple(reversed(backwards[:period])), equal / period)
    return None
