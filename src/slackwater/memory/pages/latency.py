"""How long requests took, by what they waited for: histograms that compiled code adds to.

Buckets grow by a quarter of a power of two, from 1 us to a minute, so that a percentile is right to
a fifth of itself. Each thread has a histogram of its own, and an addition is one increment.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slackwater.common.native.compiled import kernel
from slackwater.schemas.memory import LatencyCause, LatencyInfo

CAUSES: Final[tuple[LatencyCause, ...]] = ("hit", "late", "lender", "disk", "write")
HIT: Final = 0
LATE: Final = 1
LENDER: Final = 2
DISK: Final = 3
WRITE: Final = 4
_FIRST: Final = 10
"""Below 2**10 ns all is one bucket."""
_LAST: Final = 36
_PARTS: Final = 4
BUCKETS: Final = (_LAST - _FIRST) * _PARTS + 2
"""The last one has no bound."""
WINDOW_S: Final = 10.0
_LOOKS: Final = 64
Histogram = NDArray[np.int64]


@kernel()
def bucket(ns):
    if ns < 1 << _FIRST:
        return 0
    part, octave = math.frexp(np.float64(ns))
    at = (octave - 1 - _FIRST) * _PARTS + int((part - 0.5) * 2 * _PARTS) + 1
    return min(at, BUCKETS - 1)


@kernel()
def add(histogram, cause, ns, count):
    histogram[cause, bucket(ns)] += count


def histogram() -> Histogram:
    return np.zeros((len(CAUSES), BUCKETS), np.int64)


def bound_ns(bucket: int) -> float:
    """Return the bound that times in this bucket are below; times in the last bucket may be
    longer."""
    octave, part = divmod(min(bucket, BUCKETS - 2), _PARTS)
    return float(2 ** (_FIRST + octave) * (_PARTS + part) / _PARTS)


def percentile_us(counts: Sequence[int], share: float) -> float:
    """Return the bound of the bucket that holds the request which a `share` of all are not slower
    than; 0: there are no requests."""
    wanted = math.ceil(share * sum(counts))
    seen = 0
    for at, count in enumerate(counts):
        seen += count
        if count and seen >= wanted:
            return bound_ns(at) / 1e3
    return 0.0


def infos(counted: Histogram) -> tuple[LatencyInfo, ...]:
    """Summarise the causes that occurred."""
    return tuple(
        LatencyInfo(
            cause=cause,
            requests=sum(counts),
            p50_us=percentile_us(counts, 0.5),
            p99_us=percentile_us(counts, 0.99),
        )
        for cause, counts in zip(CAUSES, counted.tolist(), strict=True)
        if any(counts)
    )


class Latencies:
    """Holds a device's latencies: the event loop's histogram, and those of its connections."""

    def __init__(self) -> None:
        self.loop = histogram()
        self._ended = histogram()
        self._open: dict[int, Histogram] = {}
        self._lock = threading.Lock()
        self._looks: deque[tuple[float, Histogram]] = deque([(-math.inf, histogram())], _LOOKS)

    def open(self) -> Histogram:
        """Add a histogram for a connection's thread."""
        made = histogram()
        with self._lock:
            self._open[id(made)] = made
        return made

    def close(self, one: Histogram) -> None:
        """Keep the counts of a thread that has ended."""
        with self._lock:
            self._ended += self._open.pop(id(one))

    def total(self) -> Histogram:
        """Sum up since the device began."""
        with self._lock:
            return self.loop + self._ended + sum(self._open.values())

    def recent(self, now_s: float) -> Histogram:
        """Return the last WINDOW_S and a little more, as precisely as calls are frequent."""
        total, looks = self.total(), self._looks
        while len(looks) > 1 and now_s - looks[1][0] >= WINDOW_S:
            looks.popleft()
        before = looks[0][1]
        if now_s - looks[-1][0] >= WINDOW_S / (_LOOKS - 2):
            looks.append((now_s, total))
        return total - before
