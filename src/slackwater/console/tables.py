"""Columns of plain text, for people and for pipes.

Piped, everything is there: whole ids, one line a row. On a terminal a row fits its width; a note
at the end of a row (why a job waits) takes the room that its empty cells leave, and squeezes no
column.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size

GAP: Final = "  "
NOTE_MIN: Final = 16
"""A note that has less room is left out."""
NAME_MIN: Final = 12
"""Columns that the first column keeps of a name on a narrow terminal."""
NOTHING: Final = "-"


@dataclass(frozen=True, slots=True)
class Row:
    cells: tuple[str, ...]
    note: str = ""


def lines(
    heads: Sequence[str], rows: Sequence[Row], width: int | None = None, *, note: str = ""
) -> list[str]:
    """Lay out the table, heads first. `note`: the head of the rows' notes, where they have some.
    `width`: columns of the terminal; None: cut nothing."""
    cells = [[_one_line(cell) or NOTHING for cell in row.cells] for row in rows]
    notes = [_one_line(row.note) for row in rows]
    if width is not None:
        return _fitted(list(heads), cells, notes, width)
    if note:
        heads = [*heads, note]
        cells = [[*row, text or NOTHING] for row, text in zip(cells, notes, strict=True)]
    return _aligned([list(heads), *cells])


def show(text: Sequence[str]) -> None:
    """Print to stdout as it is."""
    sys.stdout.write("".join(line + "\n" for line in text))


def natural(id: str) -> list[tuple[int, int, str]]:
    """Make a sort key by which a2 comes before a10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", id)
    return [(0, int(p), "") if p.isascii() and p.isdigit() else (1, 0, p) for p in parts]


def cut(text: str, width: int) -> str:
    """Cut to at most `width` cells of a terminal; a cut text ends with an ellipsis."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…" if width > 0 else ""


def _fitted(heads: list[str], cells: list[list[str]], notes: list[str], width: int) -> list[str]:
    used = [n for n in range(len(heads)) if n == 0 or any(row[n] != NOTHING for row in cells)]
    heads, cells = [heads[n] for n in used], [[row[n] for n in used] for row in cells]
    widths = _widths([heads, *cells])
    too_wide = sum(widths) + len(GAP) * (len(widths) - 1) - width
    if too_wide > 0:
        widths[0] = max(NAME_MIN, widths[0] - too_wide)
    found = [cut(_padded(heads, widths), width)]
    for row, note in zip(cells, notes, strict=True):
        row = [cut(row[0], widths[0]), *row[1:]]
        if note:
            while len(row) > 1 and row[-1] == NOTHING:
                row.pop()
        line = _padded(row, widths)
        room = width - cell_len(line) - len(GAP)
        if note and room >= min(NOTE_MIN, cell_len(note)):
            line += GAP + cut(note, room)
        found.append(cut(line.rstrip(), width))
    return found


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = _widths(rows)
    return [_padded(row, widths).rstrip() for row in rows]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]


def _padded(row: Sequence[str], widths: Sequence[int]) -> str:
    pairs = zip(row, widths, strict=False)  # A row may end early.
    return GAP.join(set_cell_size(cell, max(width, cell_len(cell))) for cell, width in pairs)


def _one_line(text: str) -> str:
    """Replace by a blank what would break a line, or control a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
