"""A list of bounded length that covers all that was ever added to it.

When it is full every second entry goes, and from then on one of twice as many additions is kept:
what is left is as far apart everywhere.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Thinned(Generic[T]):
    """At most `most` entries, oldest first; an even number."""

    __slots__ = ("_entries", "_every", "_most", "_seen")

    def __init__(self, most: int) -> None:
        assert most > 0
        assert most % 2 == 0
        self._most, self._every, self._seen = most, 1, 0
        self._entries: list[T] = []

    def add(self, entry: T) -> None:
        if self._seen % self._every == 0:
            if len(self._entries) == self._most:
                del self._entries[1::2]
                self._every *= 2
            self._entries.append(entry)
        self._seen += 1

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
