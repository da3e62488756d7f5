"""Copies of the optimiser's states that a worker keeps, in case an aggregator's host is lost.

Parameters lie with every worker after each pull; the states (momenta, Adam's moments) lie with the
aggregator alone. So each rank copies a part of them from afar, a little after each version, and
all ranks' parts together are the whole: a rank's memory grows by 1/W of the states, and what it
reads in an iteration by 1/(W x every) of them. After a loss parts of several ages fill the region:
a perturbation that training works off in a few iterations (SCAR: Qiao 2021, section 5.4).

Pure, but for the memory that it keeps. A region that is mapped here needs no copy: the mapping
outlives its aggregator.
"""

from typing import Final, NamedTuple

from slackwater.common.domains.slots.rules import Floats

PART_ELEMENTS: Final = 64 * 1024
"""Elements of a part, of each state: what one read brings."""
_GOLDEN: Final = 0.618
"""Its multiples spread evenly over an interval."""


class Part(NamedTuple):
    """A part of a bucket's states: elements [first, end), as of a version."""

    first: int
    end: int
    version: int
    states: tuple[Floats, ...]
    """float32, `end - first` elements each, in the order of the rule (rules.py)."""


class StateCopies:
    """One bucket's, of one rank."""

    def __init__(self, bucket: int, elements: int, rank: int, every: int) -> None:
        """`bucket`: its index, by which small ones are dealt out; `every`: iterations within which
        all of the rank's parts are read once; 0: none is ever read."""
        self.since = 0
        """The version at which the states were fresh, as the region said it last."""
        self._bucket, self._elements, self._rank, self._every = bucket, elements, rank, every
        self._parts: dict[int, Part] = {}
        self._ranks = 0
        self._mine = range(0)
        """The numbers of this rank's parts."""
        self._next = 0
        self._credit = bucket * _GOLDEN % 1.0
        """Parts that may be read, and fractions: so that small buckets are read in turns."""

    def due(self, ranks: int) -> list[tuple[int, int]]:
        """Return the parts to be read after this version, [first, end) each, where so many `ranks`
        share the bucket. Parts that are another's share now are forgotten."""
        if ranks != self._ranks:
            self._share(ranks)
        mine = self._mine
        self._credit += len(mine) / self._every
        now, self._credit = int(self._credit), self._credit % 1.0
        numbers = [mine[(self._next + each) % len(mine)] for each in range(now)]
        self._next += now
        return [self._bounds(number) for number in numbers]

    def _share(self, ranks: int) -> None:
        """Take this rank's share of the parts, where so many have one."""
        count = -(-self._elements // PART_ELEMENTS)
        first = (self._rank - self._bucket) % ranks
        self._ranks = ranks
        self._mine = range(first, count, ranks) if self._rank < ranks else range(0)
        self._parts = {number: part for number, part in self._parts.items() if number in self._mine}

    def _bounds(self, number: int) -> tuple[int, int]:
        return number * PART_ELEMENTS, min(self._elements, (number + 1) * PART_ELEMENTS)

    def keep(self, part: Part, since: int) -> None:
        """Take a part that was read whole, with the version at which states were fresh. One of an
        older version than that which is here is dropped."""
        number = part.first // PART_ELEMENTS
        before = self._parts.get(number)
        if before is None or before.version <= part.version:
            self._parts[number], self.since = part, since

    @property
    def kept(self) -> bool:
        """Say whether parts are ever due."""
        return self._every > 0

    @property
    def parts(self) -> list[Part]:
        """Return the parts that are here, by their place."""
        return [part for _, part in sorted(self._parts.items())]
