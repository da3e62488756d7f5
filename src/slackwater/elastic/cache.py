"""Tables as a host's process has them: values read, and updates that were not sent yet.

All executors of a process share both (Qiao 2021, section 4.3.2). A value is tagged with the version
of the order that it was fetched for, and serves orders up to that one. A task also reads what it
and the process's others have added since (read my writes), sent or not: what was sent is added to
the cached values, too, which may be older.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.rules import Floats
from slackwater.elastic.app import EXACT_MAX, Table

Rows = NDArray[np.int64] | None
Deltas = dict[str, Floats]


class TableCache:
    """`read`: fetches a table's present values, as an array that is ours."""

    def __init__(self, tables: Mapping[str, Table], read: Callable[[str], Floats]) -> None:
        self._tables, self._read = tables, read
        self._values: dict[str, tuple[int, Floats]] = {}
        self._log: Deltas = {}
        self._own: Deltas = {}
        self.gets = self.fetches = 0

    def get(self, name: str, rows: Any, version: int) -> Any:
        """Return a copy of a table, or of some of its rows, as an order of this version may read
        it. Raises Rejected."""
        table = self._table(name)
        at = _rows(name, table, rows)
        self.gets += 1
        tag, values = self._values.get(name, (-1, None))
        if values is None or tag < version:
            self.fetches += 1
            values = self._read(name)
            self._values[name] = version, values
        found = values.copy() if at is None else values[at]
        for deltas in (self._log, self._own):
            if name in deltas:
                found += deltas[name] if at is None else deltas[name][at]
        return presented(name, table, found)

    def update(self, name: str, delta: Any, rows: Any) -> None:
        """Add to a table, or to some of its rows; one that is named twice is added to twice. It
        counts once the task is complete. Raises Rejected."""
        table = self._table(name)
        at = _rows(name, table, rows)
        shape = table.shape if at is None else (len(at), table.width)
        given = np.asarray(delta)
        if given.dtype.kind not in "fiub":
            raise Rejected(f"table {name}: an update of {given.dtype}; give real numbers")
        if given.shape != shape:
            raise Rejected(
                f"table {name}: an update of shape {given.shape}, what it goes to has {shape}"
            )
        added = given.astype(np.float32, copy=False)
        if not np.isfinite(added).all():
            raise Rejected(f"table {name}: an update with NaN or infinity")
        if table.dtype == "int32" and (added != np.rint(added)).any():
            raise Rejected(f"table {name}: its numbers are whole, the update's are not")
        into = self._own.get(name)
        if into is None:
            into = self._own[name] = np.zeros(table.shape, np.float32)
        if at is None:
            into += added
        else:
            np.add.at(into, at, added)

    def _table(self, name: str) -> Table:
        try:
            return self._tables[name]
        except KeyError:
            raise Rejected(
                f"unknown table {name!r}; the program has {', '.join(self._tables)}"
            ) from None

    def complete(self) -> None:
        """Let the task's updates count: it is done."""
        for name, added in self._own.items():
            if name in self._log:
                self._log[name] += added
            else:
                self._log[name] = added
        self._own = {}

    def discard(self) -> None:
        """Forget what the task added: it failed."""
        self._own = {}

    @property
    def log(self) -> Mapping[str, Floats]:
        """The updates of tasks that are done, and were not sent."""
        return self._log

    def sent(self) -> None:
        """Note that the log has been applied: it stays this process's own writes, wherever older
        values are cached."""
        for name, added in self._log.items():
            if name in self._values:
                self._values[name][1].__iadd__(added)
        self._log = {}

    def clear(self) -> None:
        """Fetch everything anew: an executor came, whose own writes may be newer than the values
        that are here."""
        self._values = {}


def presented(name: str, table: Table, values: Floats) -> Any:
    """Return values in the table's dtype. Raises Rejected for counts that are not exact."""
    if table.dtype != "int32":
        return values
    whole = np.rint(values)
    if np.abs(whole).max(initial=0.0) >= EXACT_MAX:
        raise Rejected(
            f"table {name}: a count of 2^24 or more is not exact; divide it into several rows"
        )
    return whole.astype(np.int32)


def _rows(name: str, table: Table, rows: Any) -> Rows:
    """Check ids of rows. Raises Rejected."""
    if rows is None:
        return None
    at = np.asarray(rows)
    if at.ndim != 1 or at.dtype.kind not in "iu":
        raise Rejected(
            f"table {name}: rows are {at.dtype} of {at.ndim} dimensions; give a list of row numbers"
        )
    at = at.astype(np.int64, copy=False)
    wrong = (at < 0) | (at >= table.rows)
    if wrong.any():
        raise Rejected(f"table {name}: row {int(at[wrong][0])}; it has {table.rows}, from 0 on")
    return at
