"""Totals of bytes moved by regions that were dropped here: two numbers that a kill does not forget.

They lie in a memfd of their own, which the supervisor keeps as it keeps regions. A region that is
dropped carries the number of its entry, and the ledger's own number commits it: so each region is
counted once, whenever the kill comes. Before the number, the region's own counters stand; after it,
those of a region that is found again begin anew.
"""

from typing import Final

import numpy as np

from slackwater.common.domains.slots.layout import PAGE, WORD
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.transport.region import Region

NAME: Final = "counters"
"""In the descriptor store: a region's name has dots."""
_NUMBER: Final = 0
_TOTALS: Final = (8, 16)
"""Words: the number of the newest entry, and by its parity the totals (in, out), a line each."""


class Ledger:
    def __init__(self) -> None:
        self.kept = False
        """Whether the supervisor has it."""
        self._region: Region | None = None
        self._words = np.zeros(PAGE // WORD, np.uint64)

    def adopt(self, fd: int) -> None:
        """Go on with what a former life left. Raises ValueError when that is not a ledger."""
        region = Region.adopt(fd, NAME)
        if region.nbytes < PAGE:
            region.close()
            raise ValueError(f"{region.nbytes} bytes are not a ledger: it has {PAGE}")
        self._use(region)
        self.kept = True

    def fileno(self) -> int:
        """To be kept. Raises MemoryError."""
        if self._region is None:
            before, region = self._words, Region.create(PAGE, NAME)
            self._use(region)
            self._words[:] = before
        assert self._region is not None
        return self._region.fileno()

    def _use(self, region: Region) -> None:
        self._region = region
        self._words = np.frombuffer(region.buffer, np.uint64, PAGE // WORD)

    @property
    def number(self) -> int:
        return int(self._words[_NUMBER])

    @property
    def totals(self) -> tuple[int, int]:
        """Bytes (in, out)."""
        first = _TOTALS[self.number & 1]
        return int(self._words[first]), int(self._words[first + 1])

    def has(self, slots: SlotRegion) -> bool:
        """Say whether the region's counters are among the totals."""
        return 0 < slots.counted <= self.number

    def add(self, slots: SlotRegion) -> None:
        """Once, however often it is dropped."""
        if self.has(slots):
            return
        number, (bytes_in, bytes_out), more = self.number + 1, self.totals, slots.bytes_moved()
        slots.counted = number
        first = _TOTALS[number & 1]
        self._words[first] = bytes_in + more[0]
        self._words[first + 1] = bytes_out + more[1]
        self._words[_NUMBER] = number

    def close(self) -> None:
        """The process ends; the supervisor keeps it."""
        if self._region is not None:
            self._words = self._words.copy()
            self._region.close()
            self._region = None
