"""A table with a header, read row by row, whose cells are checked as they are taken.

The sheet is a cursor: `for _ in sheet.rows()` moves it, `sheet.number("duration")` takes a cell of
the current row or refuses the row by file, line, column, value and expectation. A malformed number
never becomes a default. Bounds keep NaN, infinities and absurd figures out of every policy.
"""

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from slackwater.common.base import limits
from slackwater.loadgen.traces.record import TraceRejected


class Sheet:
    """The rows of one file. `columns` None: the first row is the header."""

    def __init__(
        self,
        path: Path,
        text: str,
        columns: Sequence[str] | None = None,
        delimiter: str = ",",
    ) -> None:
        self.path = path
        self.line = 0
        self.skipped: Counter[str] = Counter()
        stream = io.StringIO(text, newline="")
        if delimiter == ",":
            self._reader = csv.reader(stream, strict=True)
        else:
            self._reader = csv.reader(stream, delimiter=delimiter, quoting=csv.QUOTE_NONE)
        self._cells: list[str] = []
        if columns is None:
            header = self._next_row()
            if header is None:
                raise TraceRejected(path, None, None, None, "a header and rows; the file is empty")
            columns = [name.strip() for name in header]
        self.columns = tuple(columns)
        self._index = {name: position for position, name in enumerate(self.columns)}
        for position, name in enumerate(self.columns):
            if self._index[name] != position:
                raise TraceRejected(path, self.line, name, None, "each column name only once")

    def __contains__(self, column: str) -> bool:
        return column in self._index

    def rows(self) -> Iterator[None]:
        """Move to each row in turn. Wholly empty lines are passed over."""
        width = len(self.columns)
        while (cells := self._next_row()) is not None:
            if len(cells) != width:
                self._refuse_width(cells, width)
            self._cells = cells
            yield

    def text(self, column: str, length_max: int = limits.TRACE_TEXT_MAX) -> str:
        """The cell without surrounding blanks; may be empty."""
        value = self._cells[self._index[column]].strip()
        if len(value) > length_max or not value.isprintable():
            self.refuse(column, f"at most {length_max} printable characters")
        return value

    def identifier(self, column: str) -> str:
        return self.text(column) or self.refuse(column, "a name that is not empty")

    def number(
        self, column: str, low: float = 0.0, high: float = limits.TRACE_SECONDS_MAX
    ) -> float:
        return self._bounded(column, low, high, f"a number from {low:g} to {high:g}")

    def _bounded(self, column: str, low: float, high: float, wanted: str) -> float:
        raw = self._cells[self._index[column]]
        try:
            value = float(raw)
        except ValueError:
            self.refuse(column, wanted)
        # NaN fails the comparison; float() would also take "1_0" and other scripts' digits.
        if not low <= value <= high or "_" in raw or not raw.isascii():
            self.refuse(column, wanted)
        return value

    def whole(self, column: str, low: int = 0, high: int = limits.TRACE_COUNT_MAX) -> int:
        """A whole number; "8.0", as data frames write it, is one."""
        wanted = f"a whole number from {low} to {high}"
        value = self._bounded(column, low, high, wanted)
        if value != int(value):
            self.refuse(column, wanted)
        return int(value)

    def gpus(self, column: str, low: int = 1) -> int:
        return self.whole(column, low, limits.TRACE_GPUS_MAX)

    def is_blank(self, column: str) -> bool:
        return not self._cells[self._index[column]].strip()

    def number_or_none(self, column: str) -> float | None:
        return None if self.is_blank(column) else self.number(column)

    def whole_or_none(self, column: str, low: int = 0) -> int | None:
        return None if self.is_blank(column) else self.whole(column, low)

    def moment(self, column: str) -> float:
        """Unix seconds of a date and time; without a zone it is taken as UTC."""
        raw = self._cells[self._index[column]].strip()
        value = unix_s(raw)
        if value is None:
            self.refuse(column, "a time such as 2017-10-09 07:02:35")
        return value

    def others(self, *known: str) -> dict[str, str]:
        """The non-empty cells of columns that the format doesn't name, for `extra`."""
        return {
            name: self.text(name, limits.TRACE_TEXT_LONG_MAX)
            for name in self.columns
            if name not in known and not self.is_blank(name)
        }

    def skip(self, reason: str) -> None:
        self.skipped[reason] += 1

    def refuse(self, column: str, expected: str) -> NoReturn:
        value = self._cells[self._index[column]]
        raise TraceRejected(self.path, self.line, column, value, expected)

    def _next_row(self) -> list[str] | None:
        """Return the next row that is not empty; `line` is the line that it starts on."""
        while True:
            self.line = self._reader.line_num + 1
            try:
                cells = next(self._reader, None)
            except csv.Error as error:
                raise TraceRejected(
                    self.path, self._reader.line_num, None, None, f"well-formed cells ({error})"
                ) from error
            if cells is None or len(cells) > 1 or (cells and cells[0].strip()):
                return cells

    def _refuse_width(self, cells: list[str], width: int) -> NoReturn:
        if len(cells) < width:
            column, value = self.columns[len(cells)], None
        else:
            column, value = f"{width + 1}", cells[width]
        raise TraceRejected(
            self.path, self.line, column, value, f"{width} columns, this row has {len(cells)}"
        )


def load(path: Path) -> tuple[str, str]:
    """The file's SHA-256 and its text. A byte-order mark is dropped."""
    try:
        size = path.stat().st_size
        if size > limits.TRACE_BYTES_MAX:
            raise TraceRejected(
                path, None, None, f"{size} bytes", f"at most {limits.TRACE_BYTES_MAX}; split it"
            )
        content = path.read_bytes()
    except OSError as error:
        why = error.strerror or str(error)
        raise TraceRejected(path, None, None, None, f"a readable trace file ({why})") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise TraceRejected(path, line, None, None, "UTF-8 text; unpack the file first") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise TraceRejected(path, line, None, None, "text, not binary data; unpack the file first")
    if not text.strip():
        raise TraceRejected(path, None, None, None, "a header and rows; the file is empty")
    return hashlib.sha256(content).hexdigest(), text


def unix_s(text: str) -> float | None:
    """Unix seconds of an ISO date or date and time (UTC unless it names a zone), else None."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
