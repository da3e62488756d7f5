"""Pieces of a bucket, and how far each is from what was saved of it last.

SCAR saves a fraction of the parameters at a time, those that changed most since they were saved
(Qiao 2021, section 5.4.2). The paper's coordinator collects all distances and selects the largest.
Here it collects a histogram of their binary logarithms, and answers with a bin: that is a top-k to
within one bin, of 64 numbers instead of all, and the rest is taken from that bin.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slackwater.common.domains.slots.rules import Floats
from slackwater.schemas.checkpoints import BINS

PIECE_ELEMENTS: Final = 4096
"""Elements that are saved, or not, together."""
_HALF: Final = BINS // 2
Distances = NDArray[np.float64]


def pieces_of(elements: int) -> int:
    return -(-elements // PIECE_ELEMENTS)


def distances(now: Floats, saved: Floats | None) -> Distances:
    """Return each piece's Euclidean distance from what was saved; infinite where nothing was."""
    count = pieces_of(now.size)
    if saved is None:
        return np.full(count, np.inf)
    squares = np.square(now - saved, dtype=np.float64)
    sums: Distances = np.add.reduceat(squares, np.arange(count) * PIECE_ELEMENTS)
    return np.sqrt(sums)


def bins_of(found: Distances) -> NDArray[np.int64]:
    """Return each distance's bin: 0 for none at all, the last for an infinite one."""
    _, exponents = np.frexp(found)
    bins = np.clip(exponents.astype(np.int64) + _HALF, 1, BINS - 2)
    bins[found == 0.0] = 0
    bins[~np.isfinite(found)] = BINS - 1
    return bins


def histogram(found: Distances) -> NDArray[np.int64]:
    """Return the number of pieces in each bin; BINS numbers."""
    return np.bincount(bins_of(found), minlength=BINS)


def threshold(histogram: Sequence[int], fraction: float) -> tuple[int, float]:
    """Return the bin above which all pieces are saved, and the share of that bin that is saved,
    too, so that this fraction of all is; never bin 0, whose pieces did not change. `histogram`:
    pieces by bin."""
    wanted = fraction * sum(histogram)
    taken = 0
    for number in range(BINS - 1, 0, -1):
        count = histogram[number]
        if taken + count >= wanted:
            return number, (wanted - taken) / count if count else 0.0
        taken += count
    return 0, 0.0


def chosen(found: Distances, above: int, share: float) -> NDArray[np.int64]:
    """Return the numbers of the pieces to save, ascending: those in higher bins, and this share of
    the bin itself, the farthest first. What did not change is never saved again."""
    bins = bins_of(found)
    within = np.flatnonzero(bins == above) if above else np.empty(0, np.int64)
    farthest = within[np.argsort(-found[within], kind="stable")]
    count = int(np.ceil(share * within.size))
    picked: NDArray[np.int64] = np.sort(
        np.concatenate([np.flatnonzero(bins > max(above, 0)), farthest[:count]])
    )
    return picked


def spans_of(numbers: NDArray[np.int64], elements: int) -> NDArray[np.int64]:
    """Return [first, end) of each piece; (n, 2)."""
    first = numbers * PIECE_ELEMENTS
    return np.stack([first, np.minimum(first + PIECE_ELEMENTS, elements)], axis=1)
