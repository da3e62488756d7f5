"""Histograms of plain numbers: cheap to add to, read when somebody scrapes."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

LATENCY_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0,
)  # fmt: skip
"""Bounds from a request that is answered at once to one that misses its deadline."""
LOSS_RATIO: Final = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
"""Parts of a job's speed. Below 0 it ran faster than profiled."""


class Histogram:
    """Counts values by the least of `bounds` that is not below them; one more counts the rest."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.sum += value
        self.counts[bisect_left(self.bounds, value)] += 1

    @property
    def count(self) -> int:
        return sum(self.counts)
