"""Say how many workers count in each version of an elastic job's bucket: words of its region.

Ranks 0 to n - 1 count. Rank 0 alone says how many that are, and from which version on: it writes so
before it pushes its gradient for that version. So the word is settled before a fold could need it,
travels with the bucket when that moves, and outlives whoever is killed. Rank 0 tells all buckets of
its job the same, so that an iteration has the same workers in each of them.

Two entries alternate: the newest one, and the one before, for whoever is an iteration behind. Each
also says how many gradients all versions before it had together: by that a data loader goes on.
Within an entry the number is written first, then the word that makes it count.

In a job of virtual ranks a third word names the attempt of the job whose rank 0 has begun to write
here: until it is theirs, ranks of a later attempt do not know yet how many they are.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.domains.slots.layout import WORD, WORD_STRIDE, WORDS_OFFSET

_LINE: Final = 11
"""The cache line in the page of words at which the first entry lies; the other is in the next."""
SIZES_OFFSET: Final = WORDS_OFFSET + _LINE * WORD_STRIDE
_SECOND: Final = WORD_STRIDE // WORD
SIZES_WORDS: Final = _SECOND + 2
"""Words from the begin of the first entry to the end of the second one."""
SIZES: Final = slice(SIZES_OFFSET // WORD, SIZES_OFFSET // WORD + SIZES_WORDS)
"""Where they are among a region's words."""
_WORKERS_BITS: Final = 8
_ATTEMPT: Final = 2


class Size(NamedTuple):
    """From version `since` on `workers` count; the versions before it had `before` gradients."""

    since: int
    workers: int
    before: int

    def gradients(self, version: int) -> int:
        """Count the gradients of all versions up to this one, which is at least since - 1."""
        return self.before + (version + 1 - self.since) * self.workers

    def then(self, since: int, workers: int) -> "Size":
        """Return what follows it from that version on."""
        return Size(since, workers, self.gradients(since - 1))


class Sizes:
    """The entries, in a region that is mapped here or in a copy of its words."""

    def __init__(self, words: NDArray[np.uint64], workers: int) -> None:
        """`words`: SIZES_WORDS from SIZES_OFFSET on; `workers` count where they say nothing."""
        self._words = words
        self._first = Size(1, workers, 0)

    def _entry(self, at: int) -> Size | None:
        word, before = int(self._words[at]), int(self._words[at + 1])
        if not word:
            return None
        return Size(word >> _WORKERS_BITS, word & ((1 << _WORKERS_BITS) - 1), before)

    @property
    def newest(self) -> Size:
        found = [size for at in (0, _SECOND) if (size := self._entry(at))]
        return max(found, default=self._first)

    def at(self, version: int) -> Size:
        """Return the one that holds for a version that is the newest, or one before it."""
        both = (self._entry(0), self._entry(_SECOND))
        held = [size for size in both if size is not None and size.since <= version]
        return max(held, default=self._first)

    @property
    def attempt(self) -> int:
        """Return the attempt of the last `begin`; -1: there was none."""
        return int(self._words[_ATTEMPT]) - 1

    def begin(self, size: Size, attempt: int) -> list[tuple[int, NDArray[np.uint64]]]:
        """Make the size the only one, since the job has begun anew. Returns what `write` does."""
        said = ((1, size.before), (0, _word(size)), (_SECOND, 0), (_ATTEMPT, attempt + 1))
        for at, word in said:
            self._words[at] = word
        return [self._written(at) for at, _ in said]

    def _written(self, at: int) -> tuple[int, NDArray[np.uint64]]:
        return SIZES_OFFSET + at * WORD, self._words[at : at + 1]

    def write(self, size: Size) -> list[tuple[int, NDArray[np.uint64]]]:
        """Make it the newest, unless it is or a later one is there. Returns (offset, word) of what
        was written, in this order, for whoever has a copy of the words."""
        both = [self._entry(0), self._entry(_SECOND)]
        since = [entry.since if entry is not None else 0 for entry in both]
        if size in both or max(since) > size.since:
            return []
        at = since.index(size.since) if size.since in since else since.index(min(since))
        at *= _SECOND
        self._words[at + 1] = size.before
        self._words[at] = _word(size)
        return [self._written(at + 1), self._written(at)]


def _word(size: Size) -> int:
    return size.since << _WORKERS_BITS | size.workers
