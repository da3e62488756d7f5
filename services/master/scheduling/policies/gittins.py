"""The Gittins index of a job from the attained services at which earlier jobs completed.

Tiresias, Pseudocode 1: G(a) = sup over Delta of P(S - a <= Delta | S > a) / E[min(S - a, Delta) |
S > a], S drawn from history. Discretized (section 3.3.2.3), Delta is the quantum of the job's
queue, counted from what it has attained: no supremum. Beyond every sample the index is 0.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf


class Distribution:
    """Samples of total service, sorted, with prefix sums: an index costs two bisections."""

    __slots__ = ("_prefix", "samples")

    def __init__(self, samples: Sequence[float]) -> None:
        self.samples = sorted(samples)
        self._prefix = [0.0, *accumulate(self.samples)]

    def index(self, attained: float, quantum: float) -> float:
        """G(a) for a fixed quantum (inf: until completion)."""
        samples, count = self.samples, len(self.samples)
        first = bisect_right(samples, attained)
        alive = count - first
        if alive == 0:
            return 0.0
        last = count if quantum == inf else bisect_right(samples, attained + quantum)
        finished = last - first
        spent = self._prefix[last] - self._prefix[first] - attained * finished
        if last < count:
            spent += quantum * (count - last)
        return finished / spent

    def supremum(self, attained: float) -> float:
        """G(a) over all quanta: the supremum is reached at a sample."""
        samples, count = self.samples, len(self.samples)
        first = bisect_right(samples, attained)
        best = 0.0
        for last in range(first, count):
            quantum = samples[last] - attained
            inside = last - first + 1
            spent = self._prefix[last + 1] - self._prefix[first] - attained * inside
            best = max(best, inside / (spent + quantum * (count - last - 1)))
        return best
