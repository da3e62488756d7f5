"""The order in which a job's training takes the examples of its data set.

Pure: the seed is an argument. Every pass over the data set is a permutation of its own. A position
is a number of examples, not of iterations: a job may change its batch or its number of replicas
between two iterations, and still takes every example once a pass. An iteration may begin in one
pass and end in the next, so that each has its whole batch.
"""

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.errors import Rejected


class ExampleOrder:
    """Permutations of `size` examples, drawn by `seed` and the number of the pass."""

    def __init__(self, size: int, seed: int = 0) -> None:
        """Raises Rejected for an empty data set."""
        if size < 1:
            raise Rejected(f"the data set has {size} examples; give one with at least 1")
        self.size, self.seed = size, seed
        self._drawn: tuple[int, NDArray[np.int64]] | None = None

    def take(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the `count` examples that follow on the first `position` of all passes."""
        parts = []
        while count:
            number, index = divmod(position, self.size)
            part = self._permutation(number)[index : index + count]
            parts.append(part)
            position, count = position + part.size, count - part.size
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def share(
        self, position: int, rank: int, replicas: int, passes: tuple[int, ...]
    ) -> list[list[int]]:
        """Return the examples of one replica's backward passes in the iteration that begins at
        `position`. All replicas have passes of the same sizes."""
        own = sum(passes)
        mine = self.take(position + rank * own, own)
        ends = np.cumsum(passes)[:-1]
        return [part.tolist() for part in np.split(mine, ends)]

    def _permutation(self, number: int) -> NDArray[np.int64]:
        if self._drawn is None or self._drawn[0] != number:
            drawn = np.random.default_rng((self.seed, number)).permutation(self.size)
            self._drawn = number, drawn
        return self._drawn[1]
