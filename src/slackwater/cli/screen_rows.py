"""The tables of the full-screen `top`: their columns, what is sorted by, what a filter looks at.

Pure: rows come as the dashboard has them (web/rows.py).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from slackwater.console import durations, figures
from slackwater.console.sizes import human
from slackwater.console.tables import NOTHING, natural

Row = dict[str, Any]
_ORDER: Final = (
    "running", "starting", "stopping", "pending", "paused", "failed", "completed", "cancelled",
)  # fmt: skip
_COLORS: Final = {
    "running": "green", "up": "green", "in use": "green", "starting": "yellow",
    "stopping": "yellow", "cordoned": "yellow", "draining": "yellow", "paused": "yellow",
    "failed": "red", "silent": "red", "late": "red", "completed": "cyan",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Column:
    """`show`: the cell's text; `by`: what is sorted by; `right`: aligned to the right; `wide`:
    left out on narrow terminals."""

    key: str
    title: str
    show: Callable[[Row, float], str]
    by: Callable[[Row, float], Any]
    right: bool = False
    wide: bool = False


def _of(
    key: str,
    title: str,
    show: Callable[[Any], str] = lambda value: str(value) if value not in (None, "") else NOTHING,
    **more: Any,
) -> Column:
    return Column(
        key, title, lambda row, now_s: show(row.get(key)), lambda row, now_s: row.get(key), **more
    )


def _age(row: Row, now_s: float) -> float:
    return max(0.0, float(row["finished_s"] or now_s) - float(row["submitted_s"]))


def _place(row: Row) -> float:
    """Sort jobs as `slackwater jobs` does: those that run, that wait, that ended last."""
    return _ORDER.index(row["state"]) * 1e12 - float(row["finished_s"] or -row["submitted_s"])


def _progress(row: Row, _: float) -> str:
    if row.get("iteration") is None:
        return NOTHING
    total = f"/{row['iterations']:,}" if row["iterations"] else ""
    return f"{row['iteration']:,}{total}"


def _node_state(row: Row) -> str:
    return "silent" if not row["alive"] else "cordoned" if row["cordoned"] else "up"


def _pool_state(row: Row) -> str:
    if not row["alive"]:
        return "silent"
    return row["drain"] or ("in use" if row["cluster"] else "free")


def _slabs(key: str, title: str) -> Column:
    """Return a column of the bytes of so many slabs."""

    def nbytes(row: Row) -> int:
        return int(row[key] * row["slab_bytes"])

    return Column(
        key, title, lambda row, _: _bytes(nbytes(row)), lambda row, _: nbytes(row), right=True
    )


def _from_others(row: Row) -> float | None:
    """Return the part of the pages read that came from lenders; None: none was read."""
    return row["read_remote_pages"] / row["read_pages"] if row["read_pages"] else None


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{max(0.0, value):.1%}"


def _bytes(value: float | None) -> str:
    return NOTHING if value is None else human(int(value))


JOBS: Final = (
    _of("id", "JOB"),
    Column("state", "STATE", lambda row, _: row["state"], lambda row, _: _place(row)),
    Column("age", "AGE", lambda row, now_s: figures.lasted(_age(row, now_s)), _age, right=True),
    Column("iteration", "PROGRESS", _progress, lambda row, _: row.get("iteration"), right=True),
    _of("speed", "SPEED", lambda value: figures.speed(value or 0.0), right=True),
    _of("loss", "LOSS", _percent, right=True),
    _of("eta_s", "ETA", lambda s: NOTHING if s is None else figures.lasted(s), right=True),
    Column(
        "has", "GPUS", lambda row, _: f"{row['has']}/{row['gpus']}" if row["gpus"] else NOTHING,
        lambda row, _: row["has"], right=True,
    ),
    _of("tenant", "TENANT", wide=True),
    Column(
        "nodes", "ON", lambda row, _: " ".join(f"{n}:{k}" for n, k in row["nodes"]) or NOTHING,
        lambda row, _: str(row["nodes"]), wide=True,
    ),
    _of("reason", "WHY"),
)  # fmt: skip
NODES: Final = (
    _of("id", "NODE"),
    Column("state", "STATE", lambda row, _: _node_state(row), lambda row, _: _node_state(row)),
    Column(
        "gpus", "GPUS", lambda row, _: f"{row['gpus_used']}/{row['gpus']}",
        lambda row, _: row["gpus_used"], right=True,
    ),
    Column(
        "slots", "SLOTS", lambda row, _: f"{row['slots_used']}/{row['slots']}",
        lambda row, _: row["slots_used"], right=True,
    ),
    _of("jobs", "JOBS", right=True),
    _of("cores", "CORES", lambda value: f"{value:g}" if value else NOTHING, right=True),
    _of("memory_bytes", "MEMORY", lambda value: _bytes(value or None), right=True),
    _of("gpu_types", "TYPES", lambda types: ", ".join(types) or NOTHING, wide=True),
    _of("faults", "FAULTS", lambda faults: "; ".join(faults) or NOTHING),
)  # fmt: skip
AGGREGATORS: Final = (
    _of("id", "AGGREGATOR"),
    Column("state", "STATE", lambda row, _: _pool_state(row), lambda row, _: _pool_state(row)),
    _of("cluster", "CLUSTER"),
    _of("jobs", "JOBS", right=True),
    _of("busy", "BUSY", _percent, right=True),
    _of("moved_bytes_s", "TRAFFIC/S", _bytes, right=True),
    _of("held_bytes", "HOLDS", _bytes, right=True),
    _of("node", "NODE", wide=True),
    _of("temporary_for", "MEASURES"),
)
LENDERS: Final = (
    _of("id", "LENDER"),
    _of("node", "NODE"),
    _of("lending", "LENDS", lambda lends: "yes" if lends else "no"),
    _slabs("lent_slabs", "LENT"),
    _slabs("free_slabs", "FREE"),
    _of("used_bytes", "USED", _bytes, right=True),
    _of("total_bytes", "TOTAL", _bytes, right=True),
    _of("devices", "DEVICES", right=True),
    _of("pressure", "PRESSURE", right=True),
)
DEVICES: Final = (
    _of("id", "DEVICE"),
    _of("state", "STATE"),
    _of("node", "NODE"),
    _of("size_bytes", "SIZE", _bytes, right=True),
    Column(
        "mapped", "MAPPED", lambda row, _: f"{row['mapped_spans']}/{row['spans']}",
        lambda row, _: row["mapped_spans"], right=True,
    ),
    _of("lenders", "LENDERS", right=True),
    Column(
        "remote", "FROM OTHERS", lambda row, _: _percent(_from_others(row)),
        lambda row, _: _from_others(row), right=True,
    ),
    _of("resilience", "RESILIENCE", wide=True),
    _of("reason", "WHY"),
)  # fmt: skip
EVENTS: Final = (
    Column(
        "at_s", "TIME", lambda row, now_s: durations.clock(row["at_s"], now_s),
        lambda row, _: int(row["id"]),
    ),
    _of("kind", "ABOUT", wide=True),
    _of("text", "WHAT HAPPENED"),
)  # fmt: skip


def color(text: str) -> str:
    """Return the color of a state; empty: the terminal's own."""
    return _COLORS.get(text, "")


def matches(cells: Iterable[str], words: str) -> bool:
    """Say whether each of the words is in one of the row's cells."""
    text = " ".join(cells).lower()
    return all(word in text for word in words.lower().split())


def arranged(
    rows: Iterable[Row],
    columns: Iterable[Column],
    *,
    sort: str,
    descending: bool,
    words: str,
    now_s: float,
) -> list[Row]:
    """Return the rows that match, sorted; what is not known comes last."""
    columns = list(columns)
    by = next(column.by for column in columns if column.key == sort)
    found = [
        row
        for row in rows
        if not words or matches((column.show(row, now_s) for column in columns), words)
    ]
    known = [row for row in found if by(row, now_s) is not None]
    unknown = [row for row in found if by(row, now_s) is None]
    known.sort(key=lambda row: natural(row["id"]))
    known.sort(key=lambda row: _comparable(by(row, now_s)), reverse=descending)
    return known + sorted(unknown, key=lambda row: natural(row["id"]))


def _comparable(value: Any) -> Any:
    return natural(value) if isinstance(value, str) else value
