"""Sums of squares of a bucket's gradients: what a fold adds up, and where its region keeps them.

The gradient noise scale (Qiao, thesis, section 3.3.1 and appendix A.1) is told from the squared
lengths of the workers' gradients and of their mean: a fold has both in its hands, so that they cost
no pass of their own. Lengths are those of pre-conditioned gradients: as they are for rules without
second moments; else each element's square is weighted by 1 / (v + floor), with the second moment v
from before this update, corrected for its bias. The floor is FLOOR_PART of the bucket's mean v:
without one, elements that hardly ever have a gradient would be the whole sum. The weight is
approximate, to .2 %, and does not depend on the gradients that it weighs.

A region keeps the sums of two versions, which alternate like its parameters: whoever reads a
version's parameters finds its sums until it has pushed twice more. The word of the version is
written last, and cleared first.
"""

from math import fsum, isfinite
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.domains.slots.layout import WORD, WORD_STRIDE, WORDS_OFFSET

Sums = NDArray[np.float64]
FLOOR, EACH, MEAN, SECOND, SUMS = range(5)
"""Places in what a kernel is given: the floor goes in; the squares of all workers' gradients, those
of their mean, and the second moments of the new state are added to. And their number."""
FLOOR_PART: Final = 0.01
FLOOR_MIN: Final = 1e-30
"""Smaller floors tell nothing: their weights do not fit a float32."""

_LINE: Final = 13
"""The cache line in the page of words at which the first entry lies; the other is in the next."""
SQUARES_OFFSET: Final = WORDS_OFFSET + _LINE * WORD_STRIDE
_SECOND_ENTRY: Final = WORD_STRIDE // WORD
_ENTRY_WORDS: Final = 5
SQUARES_WORDS: Final = _SECOND_ENTRY + _ENTRY_WORDS
"""Words from the begin of the first entry to the end of the second one."""
SQUARES: Final = slice(SQUARES_OFFSET // WORD, SQUARES_OFFSET // WORD + SQUARES_WORDS)
"""Where they are among a region's words."""


class BucketSquares(NamedTuple):
    """The sums of one version of one bucket."""

    workers: int
    """How many gradients there were; 0: the squares are not known, the moments are."""
    each: float
    """The workers' squared lengths, added up."""
    mean: float
    """The squared length of the mean gradient."""
    second: float
    """The second moments of the version's state, added up; 0: its rule has none."""


class FoldSquares:
    """The sums of one fold, which several threads may add to. `floor`: of the second moments,
    where the rule has them."""

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self._found: list[list[float]] = []

    def begin(self) -> Sums:
        """Return what a kernel adds to."""
        sums = np.zeros(SUMS)
        sums[FLOOR] = self.floor
        return sums

    def add(self, sums: Sums) -> None:
        self._found.append(sums.tolist())

    def totals(self, workers: int, scale: float, mean_scale: float) -> BucketSquares:
        """Return the sums, the same whatever the order in which they were added: both by `scale`,
        the mean's by `mean_scale` besides."""
        each, mean, second = (fsum(part[at] for part in self._found) for at in (EACH, MEAN, SECOND))
        each, mean = each * scale, mean * scale * mean_scale
        known = isfinite(each) and isfinite(mean) and scale > 0.0
        return (
            BucketSquares(workers, each, mean, second)
            if known
            else BucketSquares(0, 0.0, 0.0, second)
        )


class SquaresWords:
    """The entries, in a region that is mapped here or in a copy of its words."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        """`words`: SQUARES_WORDS from SQUARES_OFFSET on."""
        self._words, self._floats = words, words.view(np.float64)

    def at(self, version: int) -> BucketSquares | None:
        """Return the sums of a version; None: they are not here."""
        first = (version & 1) * _SECOND_ENTRY
        if version == 0 or int(self._words[first]) != version:
            return None
        workers = int(self._words[first + 1])
        each, mean, second = self._floats[first + 2 : first + _ENTRY_WORDS].tolist()
        if int(self._words[first]) != version:
            return None
        return BucketSquares(workers, each, mean, second)

    def write(self, version: int, squares: BucketSquares) -> None:
        """Keep the sums of a version that is about to be committed."""
        first = (version & 1) * _SECOND_ENTRY
        self._words[first] = 0
        self._words[first + 1] = squares.workers
        self._floats[first + 2 : first + _ENTRY_WORDS] = squares[1:]
        self._words[first] = version
