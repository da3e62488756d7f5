"""A push of some rows of a sparse table: they stand in the slot, instead of all elements.

    n words of 4 bytes    the rows' numbers within the bucket, ascending
    then                  the rows behind one another, in the gradients' dtype

A word of the rank's block says how many rows there are, plus one; 0: the slot holds all elements.

A fold of rows writes these alone into the buffers that the version does not select. Those lack what
the update before changed: that is copied first. So an update costs what it touches, and what the
last one did. Where it is not known what the buffers lack (after a kill, a move, a refused push, an
update of all elements), all is copied once.

A sparse table is divided into blocks of whole rows, each a bucket (layout.py). Where there are
several, a fixed permutation spreads the rows over them: those that a host loses are then any rows,
and what is often used is everywhere.
"""

from collections.abc import Sequence
from math import gcd
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.schemas.tensors import TensorSpec

Numbers = NDArray[np.uint32]
NUMBER_BYTES: Final = 4
ALL: Final = 0
"""The word of a push of all elements."""
NO_ROWS: Final = np.empty(0, np.uint32)
_GOLDEN: Final = 0.618


class Lacking(NamedTuple):
    """The rows that a region's other buffers lack of those of a version."""

    version: int
    location_epoch: int
    """Another aggregator may have written them where the bucket was meanwhile."""
    rows: Numbers


def width_of(tensors: Sequence[TensorSpec]) -> int:
    """Return the width of the rows of a bucket's table; 0: it is not of a sparse one."""
    return tensors[0].shape[-1] if len(tensors) == 1 and tensors[0].sparse else 0


def fits(count: int, width: int, slot: NDArray[np.generic]) -> bool:
    """Say whether there is room for so many rows in a slot."""
    return count * (NUMBER_BYTES + width * slot.itemsize) <= slot.nbytes


def write(slot: NDArray[np.generic], rows: Numbers, width: int) -> tuple[int, NDArray[np.generic]]:
    """Write the numbers of rows, which fit, ascending. Returns their word, and the place for their
    values, [n, width] of the slot's dtype."""
    whole, index = slot.view(np.uint8), NUMBER_BYTES * len(rows)
    whole[:index].view(np.uint32)[:] = rows
    values = whole[index : index + len(rows) * width * slot.itemsize].view(slot.dtype)
    return len(rows) + 1, values.reshape(-1, width)


def read(slot: NDArray[np.generic], word: int, width: int) -> tuple[Numbers, NDArray[np.generic]]:
    """Return a copy of the rows' numbers, which their writer cannot change any more, and a view of
    their values, flat. Raises ValueError for more than there is room for."""
    count = word - 1
    if not 0 <= count <= slot.size or not fits(count, width, slot):
        raise ValueError(f"a push of {count} rows, for which its slot has no room")
    whole, index = slot.view(np.uint8), NUMBER_BYTES * count
    values = whole[index : index + count * width * slot.itemsize]
    return whole[:index].view(np.uint32).copy(), values.view(slot.dtype)


def nbytes(slot: NDArray[np.generic], word: int, width: int) -> int:
    """Return how many bytes of a slot a push is."""
    return slot.nbytes if word == ALL else (word - 1) * (NUMBER_BYTES + width * slot.itemsize)


def fault(rows: Numbers, count: int) -> str:
    """Say why these cannot be rows of a bucket that has so many; empty: they can."""
    if not len(rows):
        return ""
    if (rows[1:] <= rows[:-1]).any():
        return "rows of the push are not in order, or twice in it"
    if rows[-1] >= count:
        return f"the push has row {rows[-1]}, its bucket has {count}"
    return ""


class Spread:
    """Where a table's rows are among those of its blocks, one behind the other."""

    def __init__(self, rows: int, blocks: int) -> None:
        self._rows, self._factor = rows, 1
        if blocks > 1:
            self._factor = max(1, round(rows * _GOLDEN))
            while gcd(self._factor, rows) > 1:
                self._factor += 1

    def __call__(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return rows if self._factor == 1 else rows * self._factor % self._rows
