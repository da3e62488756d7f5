"""How long a job's iteration lasts, from the durations of many: its throughput, and at its best.

A loss is one of samples per second (AutoPS section 4.5), so that the mean decides, and not the
median: a job whose every seventh iteration waits for a neighbour has lost a sixth of its speed, and
its median iteration is what it always was.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

STRAGGLERS: Final = 20
"""One iteration of so many, rounded down, may be slow by accident."""
PARTS: Final = 4
PART_MIN: Final = 3
"""Iterations. A shorter part is quiet by chance."""


def mean_s(durations_s: Sequence[float]) -> float:
    """The mean, in which the slowest twentieth counts as much as the slowest of the others.

    One pause of the machine changes nothing. What comes back more often than in one iteration of
    twenty counts in full, because then the slowest of the others is slow, too."""
    ordered = sorted(durations_s)
    count, kept = len(ordered), len(ordered) - len(ordered) // STRAGGLERS
    return (sum(ordered[:kept]) + ordered[kept - 1] * (count - kept)) / count


def quietest_s(durations_s: Sequence[float]) -> float:
    """The mean of the quietest part: a quarter in succession, PART_MIN iterations at least.

    Noise only lengthens iterations. As long as it takes less than half of them in succession, a
    quarter before or after it is left. Within a part all iterations count, so that a job whose own
    iterations differ keeps its mean."""
    return _least_mean_s(durations_s, max(PART_MIN, len(durations_s) // PARTS))


def quieter_half_s(durations_s: Sequence[float]) -> float:
    """The mean of the quietest half in succession: what lasts through a window shows in it, too."""
    return _least_mean_s(durations_s, (len(durations_s) + 1) // 2)


def _least_mean_s(durations_s: Sequence[float], length: int) -> float:
    """Return the least mean of any `length` durations in succession."""
    length = min(length, len(durations_s))
    sums = [0.0, *accumulate(durations_s)]
    return min(high - low for low, high in zip(sums, sums[length:], strict=False)) / length
