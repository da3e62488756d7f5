"""Memory accesses of programs, as requests of whole pages: seeded streams without an end.

    sequential   one page after the other, again and again
    strided      every `stride`-th page, beginning one further each time round
    random       any page, all alike
    zipf         a few pages much more often than the others
    etc, sys     a key-value store's GETs and SETs of items that lie side by side

ETC and SYS are Facebook's, as Gu's dissertation has them (2.7.3.2). ETC: 5 % SETs, keys of 16
bytes, nine values in ten even between 16 and 512 bytes. SYS: 25 % SETs, keys of 16 to 20 bytes
(four in ten) or 20 to 45, values of 320 to 500 bytes (80 %), less (8 %) or up to 10,000 (12 %). Of
ETC's other values nothing is said; here they are 512 to 4,096 bytes. Nor is it said how popular
items are; here by Zipf's law with exponent 0.99, as is usual (YCSB), over items in random order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.errors import ConfigRejected
from slackwater.memory.store import PAGE_BYTES

Ints = NDArray[np.int64]
ZIPF_EXPONENT: Final = 0.99
STRIDE: Final = 7
WRITES: Final = 0.3
"""Share of writes, where the workload does not say it."""
ITEMS_MAX: Final = 20_000_000


@dataclass(frozen=True, slots=True)
class Requests:
    """Request i touches `count[i]` pages from `first[i]` on; `write[i]`: changes them."""

    first: Ints
    count: Ints
    write: NDArray[np.bool_]


class Workload:
    """`pages` of address space; `batch` goes on where the last one ended."""

    def __init__(self, name: str, pages: int, rng: np.random.Generator) -> None:
        assert pages > 0, pages
        self.name = name
        self.pages = pages
        self._rng = rng
        self._at = 0

    def batch(self, count: int) -> Requests:
        first = self._next(count)
        return Requests(first, np.ones(count, np.int64), self._rng.random(count) < WRITES)

    def _next(self, count: int) -> Ints:
        found = (self._at + np.arange(count)) % self.pages
        self._at = (self._at + count) % self.pages
        return found


class Strided(Workload):
    def _next(self, count: int) -> Ints:
        """The k-th page of a round is k * stride on; a round ends at the last page."""
        rounds = -(-self.pages // STRIDE)
        number = self._at + np.arange(count)
        self._at += count
        start, step = number // rounds % STRIDE, number % rounds
        return np.asarray((start + step * STRIDE) % self.pages)


class Even(Workload):
    def _next(self, count: int) -> Ints:
        return self._rng.integers(0, self.pages, count)


class Zipf(Workload):
    def __init__(self, name: str, pages: int, rng: np.random.Generator) -> None:
        super().__init__(name, pages, rng)
        self._order = rng.permutation(pages)
        self._sums = _zipf_sums(pages)

    def _next(self, count: int) -> Ints:
        return np.asarray(self._order[_ranks(self._sums, self._rng.random(count))])


class Items(Workload):
    """Items of a key-value store, side by side over all of the pages."""

    def __init__(
        self, name: str, pages: int, rng: np.random.Generator, sizes: Ints, sets: float
    ) -> None:
        super().__init__(name, pages, rng)
        ends = np.cumsum(sizes)
        ends = ends[ends <= pages * PAGE_BYTES]
        begins = np.concatenate([[0], ends[:-1]])
        self._first = begins // PAGE_BYTES
        self._count = (ends - 1) // PAGE_BYTES - self._first + 1
        self._order = rng.permutation(len(ends))
        self._sums = _zipf_sums(len(ends))
        self._sets = sets

    @property
    def items(self) -> int:
        return len(self._first)

    def batch(self, count: int) -> Requests:
        chosen = self._order[_ranks(self._sums, self._rng.random(count))]
        write = self._rng.random(count) < self._sets
        return Requests(self._first[chosen], self._count[chosen], write)


def etc(name: str, pages: int, rng: np.random.Generator) -> Items:
    number = min(ITEMS_MAX, pages * PAGE_BYTES // 200 + 1)
    values = np.where(
        rng.random(number) < 0.9,
        rng.integers(16, 513, number),
        rng.integers(512, 4097, number),
    )
    return Items(name, pages, rng, 16 + values, 0.05)


def sys(name: str, pages: int, rng: np.random.Generator) -> Items:
    number = min(ITEMS_MAX, pages * PAGE_BYTES // 400 + 1)
    keys = np.where(
        rng.random(number) < 0.4, rng.integers(16, 21, number), rng.integers(20, 46, number)
    )
    kind = rng.random(number)
    small, large = rng.integers(16, 320, number), rng.integers(500, 10_001, number)
    values = np.where(
        kind < 0.8, rng.integers(320, 501, number), np.where(kind < 0.88, small, large)
    )
    return Items(name, pages, rng, keys + values, 0.25)


WORKLOADS: Final[dict[str, Callable[[str, int, np.random.Generator], Workload]]] = {
    "sequential": Workload, "strided": Strided, "random": Even, "zipf": Zipf, "etc": etc,
    "sys": sys,
}  # fmt: skip


def workload(name: str, pages: int, seed: int) -> Workload:
    """Raises ConfigRejected for a name that is none."""
    if name not in WORKLOADS:
        raise ConfigRejected(f"workload {name!r}: take one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name](name, pages, np.random.default_rng(seed))


def _zipf_sums(count: int) -> NDArray[np.float64]:
    weights = np.arange(1, count + 1, dtype=np.float64) ** -ZIPF_EXPONENT
    sums = np.cumsum(weights)
    return np.asarray(sums / sums[-1])


def _ranks(sums: NDArray[np.float64], drawn: NDArray[np.float64]) -> Ints:
    return np.minimum(np.searchsorted(sums, drawn), len(sums) - 1)
