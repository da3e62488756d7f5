"""BLOCK_STATUS: which parts of a range hold data. Pure.

A page that was never written, or was let go, is a hole in the backup file and reads as zeros; so
clients that copy or check a device pass over it.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.store import PAGE_BYTES

EXTENTS_MAX: Final = 1024
"""Extents of one answer; it may end before the range does."""


def extents(
    offset: int, length: int, allocated: NDArray[np.bool_], *, one: bool
) -> list[tuple[int, int]]:
    """(bytes, HOLE | ZERO or 0), neighbours different. `allocated`: by page, from the one of
    `offset` on, maybe not to the end of the range; at least one. `one`: the first extent alone."""
    edges = np.flatnonzero(np.diff(allocated)) + 1
    starts = [0, *edges.tolist()][: 1 if one else EXTENTS_MAX]
    ends = [*edges.tolist(), len(allocated)]
    base = offset // PAGE_BYTES * PAGE_BYTES
    found = []
    for start, end in zip(starts, ends, strict=False):
        first = max(offset, base + start * PAGE_BYTES)
        stop = min(offset + length, base + end * PAGE_BYTES)
        found.append((stop - first, 0 if allocated[start] else nbd.HOLE | nbd.ZERO))
    return found
