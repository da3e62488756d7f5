"""Track an array's pages in local memory: those to write back, and those that go first.

Pure. The processor's accessed bits of another process cannot be read, so the order is that of
arrival, with one exception, Leap's eager eviction (section 3.3): a page that a scan has read and
left behind goes before all others, and so a scan does not push out what is used again and again.
"""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np


class Residency:
    def __init__(self, pages: int, capacity: int) -> None:
        self.capacity = capacity
        self._resident = np.zeros(pages, np.bool_)
        self._dirty = np.zeros(pages, np.bool_)
        self._order: OrderedDict[int, None] = OrderedDict()
        self._consumed: OrderedDict[int, None] = OrderedDict()
        """A part of `_order`."""

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, page: int) -> bool:
        return bool(self._resident[page])

    def add(self, page: int, *, dirty: bool) -> None:
        self._resident[page] = True
        self._dirty[page] = dirty
        self._order[page] = None

    def soil(self, page: int) -> None:
        """It was written, and is in use: it is not what a scan left behind."""
        self._dirty[page] = True
        self._consumed.pop(page, None)

    def clean(self, page: int) -> None:
        """Its bytes were copied out under protection."""
        self._dirty[page] = False

    def dirty(self, page: int) -> bool:
        return bool(self._dirty[page])

    def dirty_pages(self) -> list[int]:
        found: list[int] = np.flatnonzero(self._dirty).tolist()
        return found

    def consume(self, pages: Iterable[int]) -> None:
        """A scan has passed these."""
        for page in pages:
            if self._resident[page]:
                self._consumed[page] = None

    def excess(self, more: int) -> int:
        """Pages that must go before `more` come."""
        return max(0, len(self._order) + more - self.capacity)

    def victims(self, count: int) -> list[int]:
        """The next to go, at most so many; they stay until `remove`."""
        found: list[int] = []
        for page in self._consumed:
            if len(found) == count:
                return found
            found.append(page)
        for page in self._order:
            if len(found) >= count:
                break
            if page not in self._consumed:
                found.append(page)
        return found

    def remove(self, page: int) -> None:
        self._resident[page] = False
        self._dirty[page] = False
        del self._order[page]
        self._consumed.pop(page, None)
