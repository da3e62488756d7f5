"""Attachment of a worker to a bucket's region, wherever that is: a slot, parameters, words."""

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from slackwater.agent.link_times import Link
from slackwater.agent.state_copies import Part
from slackwater.common.domains.slots.gradient_squares import BucketSquares
from slackwater.common.domains.slots.packed import slot_length
from slackwater.common.domains.slots.rules import Floats
from slackwater.common.domains.slots.sizes import Size, Sizes
from slackwater.schemas.tensors import DType

Array = NDArray[Any]
ELEMENT: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.uint8),
}
"""bfloat16 travels as its bits, which numpy has no type for; int8 as it is packed (packed.py)."""


def slot_array(elements: int, dtype: DType) -> Array:
    """Return zeroed memory for a gradient as it travels, flat."""
    return np.zeros(slot_length(elements, dtype), ELEMENT[dtype])


OWN: Final = -1
"""Stands for the slot of the rank that this process is."""
Seeds = Sequence[Sequence[Floats]]
"""For each of the optimiser's states, the bucket's tensors of it."""


class Attached(Protocol):
    link: Link
    """The counter of its transfers, for whoever attached it; in place nothing travels."""
    lanes: tuple[int, ...]
    """The slots that a push fills."""
    rows: int
    """The word of the push in the slot: how many rows of a sparse table it is (slots/rows.py)."""

    @property
    def gradient(self) -> Array:
        """The slot, flat."""
        ...

    def slot(self, lane: int) -> Array:
        """Return a slot, flat, by its number in the region or OWN."""
        ...

    @property
    def pushed(self) -> int:
        """The region's word: the iteration that the slot holds whole."""
        ...

    async def all_pushed(self) -> Sequence[int]:
        """Return every rank's pushed word. Raises Unavailable, AccessRefused."""
        ...

    def parameters(self, version: int) -> Floats: ...

    def keeps(self, old: "Attached", iteration: int) -> bool:
        """Say whether the slot holds what `old`'s does, if that is `iteration` whole or in part."""
        ...

    @property
    def sizes(self) -> Sizes:
        """How many workers count, as of the last version that was delivered, of an elastic job."""
        ...

    def squares(self, version: int) -> BucketSquares | None:
        """Return the sums of squares of the version's gradients, from its delivery until this rank
        has pushed the next one; None: they are not known."""
        ...

    async def write_size(self, size: Size) -> None:
        """Say for this job's rank 0 how many workers count from a version on. Raises Unavailable,
        AccessRefused."""
        ...

    async def seed(self, version: int, tensors: Sequence[Floats], states: Seeds = ()) -> None:
        """Fill the region's buffers of `version`."""
        ...

    async def seed_states(self, version: int, parts: Sequence[Part]) -> None:
        """Write parts of the optimiser's states into the region's buffers of `version`. Raises
        Unavailable, AccessRefused."""
        ...

    def close(self) -> None: ...
