"""Plans of reads and writes: which members are asked for fragments, and when enough answered. Pure:
no time, no bytes.

Hydra (FAST'22), section 4.1. A read asks k + delta members and takes whichever k answer first; one
that fails, or whose fragment is damaged or of another write, is an erasure, and somebody else is
asked in its place. A write counts once k members have it; the caller goes on then, the page is held
until all k + r have answered.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class ReadPlan:
    """The plan of one batch of pages. `able`: members that can be asked, the preferred ones
    first."""

    def __init__(
        self, able: Sequence[int], pages: int, needed: int, width: int, extra: int
    ) -> None:
        assert needed >= 1, needed
        assert pages >= 1, pages
        self.good: NDArray[np.bool_] = np.zeros((width, pages), np.bool_)
        """[member, page]: the member's fragment of the page is here, and right."""
        self._count: NDArray[np.int64] = np.zeros(pages, np.int64)
        self._needed = self._short = needed
        """The fragments that the page which lacks most still lacks."""
        self._extra = extra
        self._left = list(able)
        self._asked: set[int] = set()

    @property
    def enough(self) -> NDArray[np.bool_]:
        """By page: it can be made whole."""
        whole: NDArray[np.bool_] = self._count >= self._needed
        return whole

    @property
    def done(self) -> bool:
        return self._short <= 0

    @property
    def hopeless(self) -> bool:
        """Some page lacks fragments, and nobody is left who could have one."""
        return not self.done and not self._asked and not self._left

    def begin(self) -> list[int]:
        """Members to ask first."""
        return self._ask(self._needed + self._extra)

    def answered(self, member: int, good: NDArray[np.bool_]) -> list[int]:
        """`good[i]`: its fragment of page i is right. Members to ask now."""
        assert member in self._asked, member
        self._asked.remove(member)
        self.good[member] = good
        self._count += good
        self._short = self._needed - int(self._count.min())
        return self._ask(self._short - len(self._asked))

    def failed(self, member: int) -> list[int]:
        return self.answered(member, np.zeros(self.good.shape[1], np.bool_))

    def _ask(self, count: int) -> list[int]:
        chosen = self._left[: max(0, count)]
        del self._left[: len(chosen)]
        self._asked.update(chosen)
        return chosen

    def groups(self) -> list[tuple[list[int], NDArray[np.int64]]]:
        """(the first `needed` good members, the pages that have just these): one decoding each."""
        first = self.good[:, 0]
        if first.sum() == self._needed and (first == self.good.T).all():
            return [(np.flatnonzero(first).tolist(), np.arange(len(self._count)))]
        rank = np.cumsum(self.good, axis=0)
        chosen = (self.good & (rank <= self._needed)).T
        kinds, which = np.unique(chosen, axis=0, return_inverse=True)
        return [
            (np.flatnonzero(kind).tolist(), np.flatnonzero(which.reshape(-1) == number))
            for number, kind in enumerate(kinds)
        ]


class WritePlan:
    """The plan of one batch, sent to `members`."""

    def __init__(self, members: Sequence[int], needed: int) -> None:
        self.arrived: set[int] = set()
        self._waiting = set(members)
        self._needed = needed

    def answered(self, member: int, arrived: bool) -> None:
        assert member in self._waiting, member
        self._waiting.remove(member)
        if arrived:
            self.arrived.add(member)

    @property
    def acknowledged(self) -> bool:
        """The caller may go on."""
        return len(self.arrived) >= self._needed

    @property
    def lost(self) -> bool:
        """It never will."""
        return len(self.arrived) + len(self._waiting) < self._needed

    @property
    def settled(self) -> bool:
        """Everybody has answered."""
        return not self._waiting
