"""How a report's files are written, in one place: JSON for scripts, tables as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec


def write_json(path: Path, value: Any) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def table_text(
    header: Sequence[str], rows: Iterable[Iterable[object]], digits: int | None = None
) -> str:
    """CSV. Whole numbers have no decimal point; others have at most so many decimal places."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_cell(value, digits) for value in row] for row in rows)
    return out.getvalue()


def _cell(value: object, digits: int | None) -> object:
    if not isinstance(value, float):
        return value
    if value.is_integer():
        return int(value)
    return value if digits is None else round(value, digits)
