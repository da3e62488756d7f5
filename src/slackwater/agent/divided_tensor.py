"""A tensor that lies in several buckets, as one array.

Each bucket has a region of its own, so that a part of the tensor can be moved while the rest is
folded (docs/adr/0015-migration-between-two-pushes.md). The program sees one array all the same: a
window on which the parts' memory is mapped a second time, each behind the one before. A part that
has moved is shown anew when the program asks next, in the program's own thread.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slackwater.agent.attachment import Array
from slackwater.agent.worker_bucket import WorkerBucket
from slackwater.common.domains.slots.rules import Floats
from slackwater.common.transport.mapping import Window
from slackwater.schemas.tensors import TensorSpec

Piece = tuple[WorkerBucket, int, int]
"""A bucket that begins with elements [first, end) of the tensor."""


class Divided:
    """`buckets` in the order of the tensor's elements; each begins with its part of it."""

    def __init__(self, spec: TensorSpec, buckets: Sequence[WorkerBucket]) -> None:
        self.spec = spec
        self.buckets = tuple(buckets)
        ends = accumulate((prod(bucket.tensors[0].shape) for bucket in buckets), initial=0)
        self.pieces: tuple[Piece, ...] = tuple(
            (bucket, *bounds) for bucket, bounds in zip(buckets, pairwise(ends), strict=True)
        )
        self._gradient: _View | None = None
        self._parameters: list[_View | None] = [None, None]

    def gradient(self) -> Array:
        """The slots' parts; each bucket remembers which views it handed out."""
        parts = []
        for bucket in self.buckets:
            bucket.handed_out_views[0] = part = bucket.gradients[0]
            parts.append(part)
        if self._gradient is None:
            self._gradient = _View(parts)
        gradient: Array = self._gradient.of(parts, parts).reshape(self.spec.shape)
        return gradient

    def parameters(self) -> Floats:
        """Return the parameters of the newest version of each part: valid as long as a bucket's
        are."""
        parts = [bucket.buffer(0) for bucket in self.buckets]
        version = self.buckets[0].version
        if any(bucket.version != version for bucket in self.buckets):  # A part's push was refused.
            return np.concatenate(parts).reshape(self.spec.shape)
        view = self._parameters[version & 1]
        if view is None:
            view = self._parameters[version & 1] = _View(parts)
        owners = [bucket.source for bucket in self.buckets]
        parameters: Floats = view.of(owners, parts).reshape(self.spec.shape)
        return parameters


def divided_tensors(
    specs: Sequence[TensorSpec], buckets: Sequence[WorkerBucket]
) -> dict[str, Divided]:
    """Return the tensors that lie in several buckets, by name."""
    parts: dict[str, list[WorkerBucket]] = {}
    for bucket in buckets:
        parts.setdefault(bucket.tensors[0].name, []).append(bucket)
    return {
        spec.name: Divided(spec, parts[spec.name])
        for spec in specs
        if len(parts.get(spec.name, ())) > 1
    }


class _View:
    """A window, and whose memory it shows."""

    def __init__(self, parts: Sequence[NDArray[Any]]) -> None:
        self._window = Window([part.nbytes for part in parts])
        self._owners: list[object] = [None] * len(parts)
        self._flat = self._window.bytes.view(parts[0].dtype)

    def of(self, owners: Sequence[object], parts: Sequence[NDArray[Any]]) -> Any:
        """The parts behind one another; `owners` differ when the memory does."""
        for piece, (owner, part) in enumerate(zip(owners, parts, strict=True)):
            if self._owners[piece] is not owner:
                self._window.show(piece, part)
                self._owners[piece] = owner
        return self._flat[:]
