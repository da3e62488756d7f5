"""Keep what a dashboard shows, and tell what of it changed since a version. Pure.

Entries have a kind (jobs, nodes, ...) and an id. Each change has the next version. A page says
which version it has seen, and is given the newest state of what changed since: however slow it is,
nothing waits for it, and it misses nothing that is still so.
"""

from collections.abc import Mapping
from typing import Any, Final

GONE_MAX: Final = 10_000
"""Removed entries that are remembered; a page that has not heard for longer is given everything."""


class Board:
    """Entries by kind and id; a value is anything that becomes JSON."""

    def __init__(self) -> None:
        self.version = 0
        self._oldest = 0
        """Removals before this version are not remembered."""
        self._entries: dict[str, dict[str, tuple[int, Any]]] = {}
        """Kind -> id -> (version of its last change, value), the latest change last."""
        self._gone: dict[tuple[str, str], int] = {}

    def put(self, kind: str, id: str, value: Any) -> None:
        entries = self._entries.setdefault(kind, {})
        known = entries.get(id)
        if known is not None and known[1] == value:
            return
        self.version += 1
        entries.pop(id, None)
        entries[id] = (self.version, value)
        self._gone.pop((kind, id), None)

    def remove(self, kind: str, id: str) -> None:
        if self._entries.get(kind, {}).pop(id, None) is None:
            return
        self.version += 1
        self._gone[kind, id] = self.version
        if len(self._gone) > GONE_MAX:
            self._oldest = self._gone.pop(next(iter(self._gone)))

    def forget(self, kind: str, id: str) -> None:
        """Remove an entry without a word: pages forget the oldest of that kind by themselves."""
        self._entries.get(kind, {}).pop(id, None)

    def replace(self, kind: str, values: Mapping[str, Any]) -> None:
        """Make these the entries of that kind."""
        for id in self._entries.get(kind, {}).keys() - values.keys():
            self.remove(kind, id)
        for id, value in values.items():
            self.put(kind, id, value)

    def get(self, kind: str, id: str) -> Any:
        """Return the value; None: there is none."""
        known = self._entries.get(kind, {}).get(id)
        return None if known is None else known[1]

    def kind(self, kind: str) -> dict[str, Any]:
        return {id: value for id, (_, value) in self._entries.get(kind, {}).items()}

    def knows(self, version: int) -> bool:
        """Tell whether `since` can say what changed after that version."""
        return self._oldest <= version <= self.version

    def since(self, version: int) -> dict[str, dict[str, Any]]:
        """Return what changed after that version: kind -> id -> value, None where it is removed.
        From 0 on: everything."""
        changed: dict[str, dict[str, Any]] = {}
        for kind, entries in self._entries.items():
            for id, (at, value) in reversed(entries.items()):
                if at <= version:
                    break
                changed.setdefault(kind, {})[id] = value
        if version:
            for (kind, id), at in reversed(self._gone.items()):
                if at <= version:
                    break
                changed.setdefault(kind, {})[id] = None
        return changed
