"""Replication: the code whose every fragment is the whole page. What Hydra is compared with.

Two copies survive one loss for twice the memory; 8 + 2 survives two for 1.25 times (FAST'22,
section 1). The same strategy (hydra.py) reads and writes both, so that only the code differs.
"""

from collections.abc import Sequence

import numpy as np

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected
from slackwater.memory.resilience.coding import Bytes, Parities, Recipe
from slackwater.memory.store import PAGE_BYTES


class Copies:
    """Implements coding.Code."""

    needed = 1
    fragment_bytes = PAGE_BYTES

    def __init__(self, copies: int) -> None:
        """Raises ConfigRejected."""
        if not 2 <= copies <= limits.SPAN_MEMBERS_MAX:
            raise ConfigRejected(
                f"replication with {copies} copies: between 2 and {limits.SPAN_MEMBERS_MAX}"
            )
        self.width = copies

    def encode(self, pages: Bytes) -> Bytes:
        return np.broadcast_to(pages, (self.width, *pages.shape))

    def decode(self, chosen: Sequence[int], fragments: Bytes) -> Bytes:
        assert len(chosen) == 1, chosen
        pages: Bytes = fragments[0]
        return pages

    def rebuild(self, index: int, chosen: Sequence[int], fragments: Bytes) -> Bytes:
        return self.decode(chosen, fragments)

    def recipe(self, chosen: Sequence[int]) -> Recipe:
        assert len(chosen) == 1, chosen
        return Recipe(np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8), 0)

    def parities(self) -> Parities:
        return Parities(np.zeros(0, np.uint8), 0)
