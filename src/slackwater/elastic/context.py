"""A task's way to the tables, as the program has it."""

import time
from collections.abc import Callable
from typing import Any

from slackwater.elastic.cache import TableCache


class Context:
    """A task's way to the tables."""

    def __init__(
        self,
        cache: TableCache,
        executor: int,
        version: int,
        executors: int,
        now_s: Callable[[], float] = time.monotonic,
        was_read: Callable[[], None] = lambda: None,
    ) -> None:
        """`was_read` is called after each read: the task computes now."""
        self._cache, self._now_s, self._was_read = cache, now_s, was_read
        self.read_s = 0.0
        """Seconds that it has read tables, or waited for them."""
        self.has_read = False
        self.executor = executor
        """The number of the executor that runs the task."""
        self.executors = executors
        self.version = version
        """Tasks that had completed when this one was dispatched: what they added is in what `get`
        returns; what others added since may be."""

    def get(self, table: str, rows: Any = None) -> Any:
        """Return a copy of the table, [rows, width] of float32 (int32 of one of counts), or of the
        rows that are named. Raises Rejected."""
        began_s = self._now_s()
        try:
            found = self._cache.get(table, rows, self.version)
            self.has_read = True
            self._was_read()
            return found
        finally:
            self.read_s += self._now_s() - began_s

    def update(self, table: str, delta: Any, rows: Any = None) -> None:
        """Add `delta` to the table, or to the rows that are named. Raises Rejected for a wrong
        shape, a row that is not there, and what is not finite."""
        self._cache.update(table, delta, rows)
