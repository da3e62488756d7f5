"""Latencies in buckets that grow by about a per cent each: any number of them in bounded memory."""

from math import log2
from typing import Final

import numpy as np

_PER_OCTAVE: Final = 64
_BUCKETS: Final = 40 * _PER_OCTAVE
"""Up to 2**40 ns: eighteen minutes."""


class Latencies:
    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, np.int64)

    def add(self, took_ns: int) -> None:
        bucket = int(log2(max(1, took_ns)) * _PER_OCTAVE)
        self._counts[min(bucket, _BUCKETS - 1)] += 1

    def __len__(self) -> int:
        return int(self._counts.sum())

    def percentile_us(self, percent: float) -> float:
        """The middle of the bucket that holds it; 0 where nothing was added."""
        total = len(self)
        if total == 0:
            return 0.0
        bucket = int(np.searchsorted(np.cumsum(self._counts), percent / 100.0 * total))
        return float(2.0 ** ((bucket + 0.5) / _PER_OCTAVE) / 1e3)
