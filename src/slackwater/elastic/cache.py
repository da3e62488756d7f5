"""Tables as a host's process has them: values read, and updates that were not sent yet.

All executors of a process share both (Qiao 2021, section 4.3.2). A value is tagged with the version
of the order that it was fetched for, and serves orders up to that one. A task also reads what it
and the process's others have added since (read my writes), sent or not: what was sent is added to
the cached values, too, which may be older. Only the aggregators can say what AdaGrad makes of an
update: in such a table, that is seen once it was sent.

A table is fetched and sent whole, or by rows if it is sparse: then each row has a tag, and memory
is taken by what is read and added to.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from slackwater.agent.table_rows import RowNumbers, RowUpdates
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.rules import Floats
from slackwater.elastic.app import EXACT_MAX, Table

_MARKED_PART: Final = 8
"""Rows of which this part was touched are sorted by marking them."""
Rows = NDArray[np.int64] | None
Update = Floats | RowUpdates
"""An array as large as its table, or rows."""


class TableCache:
    """`read`: fetches a table's present values; `read_rows`: those of some rows, none twice, of a
    sparse one. Both return arrays that are ours."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        read: Callable[[str], Floats],
        read_rows: Callable[[str, RowNumbers], Floats],
    ) -> None:
        self._tables = tables
        self._cached: dict[str, _Cached] = {
            name: _ByRows(table, name, read_rows) if table.sparse else _Whole(table, name, read)
            for name, table in tables.items()
        }
        self.gets = 0

    @property
    def fetches(self) -> int:
        """Count the gets that had to read a table, or rows of it."""
        return sum(cached.fetches for cached in self._cached.values())

    def has(self, version: int) -> bool:
        """Say whether everything is here that an order of this version may read."""
        return all(cached.has(version) for cached in self._cached.values())

    def get(self, name: str, rows: Any, version: int) -> Any:
        """Return a copy of a table, or of some of its rows, as an order of this version may read
        it. Raises Rejected."""
        table = self._table(name)
        at = _rows(name, table, rows)
        self.gets += 1
        return presented(name, table, self._cached[name].values(at, version))

    def update(self, name: str, delta: Any, rows: Any) -> None:
        """Add to a table, or to some of its rows; one that is named twice is added to twice. It
        counts once the task is complete. Raises Rejected."""
        table = self._table(name)
        if rows is not None and table.rule.of_all:
            raise Rejected(f"table {name}: {table.rule} takes updates of all rows; name none")
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
        if given.dtype.kind == "f":
            if not np.isfinite(added).all():
                raise Rejected(f"table {name}: an update with NaN or infinity")
            if table.dtype == "int32" and (added != np.rint(added)).any():
                raise Rejected(f"table {name}: its numbers are whole, the update's are not")
        self._cached[name].add(at, added)

    def _table(self, name: str) -> Table:
        try:
            return self._tables[name]
        except KeyError:
            raise Rejected(
                f"unknown table {name!r}; the program has {', '.join(self._tables)}"
            ) from None

    def complete(self) -> None:
        """Let the task's updates count: it is done."""
        for cached in self._cached.values():
            cached.complete()

    def discard(self) -> None:
        """Forget what the task added: it failed."""
        for cached in self._cached.values():
            cached.discard()

    def put_aside(self) -> None:
        """Keep what the running task added apart: another one runs while it waits."""
        for cached in self._cached.values():
            cached.put_aside()

    def take_back(self) -> None:
        """Go on with what the task added that was put aside last: the other one has ended."""
        for cached in self._cached.values():
            cached.take_back()

    @property
    def log(self) -> Mapping[str, Update]:
        """The updates of tasks that are done, and were not sent."""
        logs = {name: cached.log for name, cached in self._cached.items()}
        return {name: log for name, log in logs.items() if log is not None}

    @property
    def counts(self) -> Mapping[str, int]:
        """How many updates the log of a table has, where its rule asks."""
        return {
            name: cached.count
            for name, cached in self._cached.items()
            if cached.log is not None and self._tables[name].rule.of_all
        }

    def sent(self) -> None:
        """Note that the log has been applied: it stays this process's own writes, wherever older
        values are cached."""
        for cached in self._cached.values():
            cached.sent()

    def clear(self) -> None:
        """Fetch everything anew: an executor came, whose own writes may be newer than the values
        that are here."""
        for cached in self._cached.values():
            cached.clear()


class _Cached(Protocol):
    """One table's values, its log, and what the running task added to it."""

    fetches: int
    count: int
    """Updates in the log."""

    def has(self, version: int) -> bool: ...

    def values(self, at: Rows, version: int) -> Floats: ...

    def add(self, at: Rows, added: Floats) -> None: ...

    def complete(self) -> None: ...

    def discard(self) -> None: ...

    def put_aside(self) -> None: ...

    def take_back(self) -> None: ...

    @property
    def log(self) -> Update | None: ...

    def sent(self) -> None: ...

    def clear(self) -> None: ...


class _Whole:
    def __init__(self, table: Table, name: str, read: Callable[[str], Floats]) -> None:
        self._shape, self._rule, self._name, self._read = table.shape, table.rule, name, read
        self._tag = -1
        self._values: Floats | None = None
        self.log: Floats | None = None
        self._own: Floats | None = None
        self.count = self._own_count = 0
        self._aside: list[tuple[Floats | None, int]] = []
        self.fetches = 0

    def has(self, version: int) -> bool:
        return self._values is not None and self._tag >= version

    def values(self, at: Rows, version: int) -> Floats:
        if self._values is None or self._tag < version:
            self.fetches += 1
            values = self._read(self._name)
            if self._values is None or self._tag < version:  # No other task read it meanwhile.
                self._values, self._tag = values, version
        found = self._values.copy() if at is None else self._values[at]
        if self._rule.shows:
            for added, count in ((self.log, self.count), (self._own, self._own_count)):
                if added is not None:
                    found = self._rule.after(found, added if at is None else added[at], count)
        return found

    def add(self, at: Rows, added: Floats) -> None:
        self._own_count += 1
        if at is None:
            self._own = added.copy() if self._own is None else self._own + added
            return
        if self._own is None:
            self._own = np.zeros(self._shape, np.float32)
        np.add.at(self._own, at, added)

    def complete(self) -> None:
        if self._own is not None:
            self.log = self._own if self.log is None else self.log + self._own
            self.count += self._own_count
        self.discard()

    def discard(self) -> None:
        self._own, self._own_count = None, 0

    def put_aside(self) -> None:
        self._aside.append((self._own, self._own_count))
        self.discard()

    def take_back(self) -> None:
        self._own, self._own_count = self._aside.pop()

    def sent(self) -> None:
        if self.log is not None and not self._rule.shows:
            self._values = None
        elif self.log is not None and self._values is not None:
            self._values = self._rule.after(self._values, self.log, self.count)
        self.log, self.count = None, 0

    def clear(self) -> None:
        self._values = None


def _is_ascending(rows: RowNumbers) -> bool:
    """Say whether none is there twice, and all are in order."""
    return bool((rows[1:] > rows[:-1]).all())


def _place(rows: RowNumbers) -> RowNumbers | slice:
    """Return rows as what indexes them: a slice, which costs no gathering, if they are a run."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and _is_ascending(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


class _Sums:
    """Sums of updates, by row. Memory that is never touched is none."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.values = np.zeros(shape, np.float32)
        self._added: list[RowNumbers] = []

    @property
    def rows(self) -> RowNumbers:
        """The rows that were added to, ascending."""
        if len(self._added) > 1:
            self._added = [self._all_added()]
        return self._added[0] if self._added else np.empty(0, np.int64)

    def _all_added(self) -> RowNumbers:
        if sum(map(len, self._added)) * _MARKED_PART < len(self.values):
            return np.unique(np.concatenate(self._added))
        marks = np.zeros(len(self.values), np.bool_)
        for rows in self._added:
            marks[_place(rows)] = True
        return np.flatnonzero(marks)

    def add(self, rows: RowNumbers, added: Floats) -> None:
        """Add to rows, of which one may be named twice."""
        if _is_ascending(rows):
            self.values[_place(rows)] += added
            self._added.append(rows)
        else:
            np.add.at(self.values, rows, added)
            self._added.append(np.unique(rows))

    def clear(self) -> None:
        """Begin anew."""
        self.values[_place(self.rows)] = 0.0
        self._added = []


class _ByRows:
    count = 0  # A rule that asks is not one of sparse tables.

    def __init__(self, table: Table, name: str, read: Callable[[str, RowNumbers], Floats]) -> None:
        shape, self._rule = table.shape, table.rule
        self._name, self._read, self._every = name, read, np.arange(shape[0])
        self._values = np.zeros(shape, np.float32)
        self._tags = np.full(shape[0], -1)
        self._log, self._own = _Sums(shape), _Sums(shape)
        self._aside: list[_Sums] = []
        self._spare: list[_Sums] = []
        """Sums of nothing."""
        self.fetches = 0

    def has(self, version: int) -> bool:
        return bool((self._tags >= version).all())

    def values(self, at: Rows, version: int) -> Floats:
        rows = self._every if at is None else at
        place = _place(rows)
        stale = self._tags[place] < version
        if stale.any():
            self._fetch(rows[stale], version)
        found = self._values[place]
        for sums in (self._log, self._own):
            if self._rule.shows and len(sums.rows):
                found = self._rule.after(found, sums.values[place], 1)
        return found.copy() if found.base is not None else found

    def _fetch(self, rows: RowNumbers, version: int) -> None:
        old = rows if _is_ascending(rows) else np.unique(rows)
        place = _place(old)
        self.fetches += 1
        values = self._read(self._name, old)
        if (newer := self._tags[place] >= version).any():  # Another task read them meanwhile.
            place, values = old[~newer], values[~newer]
        self._values[place] = values
        self._tags[place] = version

    def add(self, at: Rows, added: Floats) -> None:
        self._own.add(self._every if at is None else at, added)

    def complete(self) -> None:
        if len(rows := self._own.rows):
            self._log.add(rows, self._own.values[_place(rows)])
            self._own.clear()

    def discard(self) -> None:
        self._own.clear()

    def put_aside(self) -> None:
        self._aside.append(self._own)
        self._own = self._spare.pop() if self._spare else _Sums(self._values.shape)

    def take_back(self) -> None:
        self._spare.append(self._own)
        self._own = self._aside.pop()

    @property
    def log(self) -> RowUpdates | None:
        rows = self._log.rows
        return RowUpdates(rows, self._log.values[_place(rows)]) if len(rows) else None

    def sent(self) -> None:
        place = _place(self._log.rows)
        if self._rule.shows:
            added = self._log.values[place]
            self._values[place] = self._rule.after(self._values[place], added, 1)
        else:
            self._tags[place] = -1
        self._log.clear()

    def clear(self) -> None:
        self._tags[:] = -1


def presented(name: str, table: Table, values: Floats) -> Any:
    """Return values in the table's dtype. Raises Rejected for counts that are not exact."""
    if table.dtype != "int32":
        return values
    if max(values.max(initial=0.0), -values.min(initial=0.0)) >= EXACT_MAX:
        raise Rejected(
            f"table {name}: a count of 2^24 or more is not exact; divide it into several rows"
        )
    return values.astype(np.int32)  # They are whole: so were all updates.


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
