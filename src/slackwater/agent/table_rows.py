"""A sparse table as a worker uses it: rows are pushed and read, wherever its blocks are."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.agent.worker_bucket import WorkerBucket
from slackwater.common.domains.slots.layout import block_count
from slackwater.common.domains.slots.rows import Numbers, Spread
from slackwater.common.domains.slots.rules import Floats
from slackwater.schemas.tensors import TensorSpec

RowNumbers = NDArray[np.int64]
ReadBlock = Callable[[WorkerBucket, RowNumbers, Floats], None]
"""Fills an array with a block's rows, as it numbers them."""


class RowUpdates(NamedTuple):
    """Updates of some rows of a table."""

    rows: RowNumbers
    """[n], none twice."""
    values: Floats
    """[n, width]."""


def placed(values: Floats) -> Floats:
    """Return a table's first values in the order in which its blocks have the rows."""
    blocks = block_count(*values.shape)
    if blocks == 1 or not values.any():
        return values
    spread = np.empty_like(values)
    spread[Spread(len(values), blocks)(np.arange(len(values)))] = values
    return spread


class SparseTable:
    """`blocks`: its buckets, in the order of their rows."""

    def __init__(self, spec: TensorSpec, blocks: list[WorkerBucket]) -> None:
        self.shape = spec.shape
        self.blocks = tuple(blocks)
        width = spec.shape[-1]
        self._bounds = np.array(
            [block.layout.start // width for block in blocks] + [spec.shape[0]], np.int64
        )
        self.spread = Spread(spec.shape[0], len(blocks))

    def parts(self, updates: RowUpdates) -> Iterator[tuple[WorkerBucket, Numbers, Floats]]:
        """Divide updates among the blocks: for each its rows, ascending, as it numbers them, and
        what is added to them; none perhaps."""
        places, values = self.spread(updates.rows), updates.values
        if (places[1:] <= places[:-1]).any():
            order = np.argsort(places)
            places, values = places[order], values[order]
        if len(self.blocks) == 1:
            yield self.blocks[0], places.astype(np.uint32), values
            return
        cuts = np.searchsorted(places, self._bounds)
        for at, block in enumerate(self.blocks):
            some = slice(cuts[at], cuts[at + 1])
            yield block, (places[some] - self._bounds[at]).astype(np.uint32), values[some]

    def read(self, rows: RowNumbers, read: ReadBlock) -> Floats:
        """Return rows, [n, width], in this order. Raises what `read` raises."""
        places = self.spread(rows)
        out = np.empty((len(rows), self.shape[-1]), np.float32)
        if len(self.blocks) == 1:
            read(self.blocks[0], places, out)
            return out
        which = np.searchsorted(self._bounds, places, side="right") - 1
        for at, block in enumerate(self.blocks):
            some = np.flatnonzero(which == at)
            if len(some):
                found = np.empty((len(some), self.shape[-1]), np.float32)
                read(block, places[some] - self._bounds[at], found)
                out[some] = found
        return out
