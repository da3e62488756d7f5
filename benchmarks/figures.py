"""How benchmarks measure and print: side by side in one run, interleaved, medians, ratios.

Absolute figures depend on the machine and on who else uses it; the ratio to a peer measured in
the same run is what is compared with a goal. What cannot be measured here is a row with its reason.
"""

import contextlib
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """`ours` against `peer`, both medians in `unit`. `goal` bounds ours / peer: at least that for
    rates, at most that for times (`lower_is_better`)."""

    name: str
    ours: float
    peer: float
    unit: str
    peer_name: str
    goal: float | None = None
    lower_is_better: bool = False
    floor: float | None = None
    """What the hardware allows, in the same unit: memory's rate, or a bare socket's."""
    spread: float | None = None
    """How noisy it was: (third - first quartile) / median of our rounds."""

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.ratio <= self.goal if self.lower_is_better else self.ratio >= self.goal

    @property
    def of_floor(self) -> float | None:
        """The part of what the hardware allows that was reached."""
        if self.floor is None:
            return None
        return self.floor / self.ours if self.lower_is_better else self.ours / self.floor


@dataclass(frozen=True)
class Skipped:
    """A row that was not measured, and why."""

    name: str
    why: str


Row = Figure | Skipped


def spread(values: Sequence[float]) -> float:
    """(third - first quartile) / median."""
    if len(values) < 4:
        return (max(values) - min(values)) / statistics.median(values)
    first, _, third = statistics.quantiles(values, n=4)
    return (third - first) / statistics.median(values)


def interleaved(measures: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Every measure once a round, in turn; the median of each."""
    seen: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            seen[name].append(measure())
    return {name: statistics.median(values) for name, values in seen.items()}


def show(title: str, rows: Sequence[Row]) -> None:
    figures = [row for row in rows if isinstance(row, Figure)]
    floors = any(figure.floor is not None for figure in figures)
    noise = any(figure.spread is not None for figure in figures)
    table = Table(title=title, title_justify="left")
    columns = ["figure", "ours", "peer", "ratio", "goal", "met"]
    for column in columns + ["of floor"] * floors + ["spread"] * noise:
        table.add_column(column, justify="left" if column == "figure" else "right")
    for figure in figures:
        sign = "<=" if figure.lower_is_better else ">="
        table.add_row(
            f"{figure.name} [{figure.unit}]",
            f"{figure.ours:,.4g}",
            f"{figure.peer:,.4g} {figure.peer_name}",
            f"{figure.ratio:.3f}",
            "-" if figure.goal is None else f"{sign} {figure.goal:g}",
            {True: "yes", False: "NO", None: "-"}[figure.met],
            *([_percent(figure.of_floor)] if floors else []),
            *([_percent(figure.spread)] if noise else []),
        )
    console = Console(width=int(os.environ.get("COLUMNS", "120")))
    console.print(table)
    for row in rows:
        if isinstance(row, Skipped):
            console.print(f"skipped: {row.name}: {row.why}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def as_dict(row: Row) -> dict[str, object]:
    if isinstance(row, Skipped):
        return {"name": row.name, "skipped": row.why}
    facts: dict[str, object] = {
        "name": row.name,
        "ours": float(f"{row.ours:.4g}"),
        "peer": float(f"{row.peer:.4g}"),
        "unit": row.unit,
        "peer_name": row.peer_name,
        "ratio": round(row.ratio, 4),
        "goal": row.goal,
        "bound": "at most" if row.lower_is_better else "at least",
        "met": row.met,
    }
    if row.of_floor is not None:
        facts["of_floor"] = round(row.of_floor, 3)
    if row.spread is not None:
        facts["spread"] = round(row.spread, 3)
    return facts


def favour(nice: int = -5) -> int:
    """Let this process and all that descend from it (contenders alike) go before other work on the
    machine, where that is allowed; how many were. The kernel may group processes by session: then
    the group's nice value counts, too."""
    favoured = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            for thread in process.threads():
                os.setpriority(os.PRIO_PROCESS, thread.id, nice)
            favoured += 1
            Path(f"/proc/{process.pid}/autogroup").write_text(str(nice))
    return favoured


def write_json(path: Path, command: str, rows: Sequence[Row], note: str = "") -> None:
    """The results of one run, small enough to be committed."""
    load_before = [round(value, 2) for value in os.getloadavg()]
    report = {
        "command": command,
        "cores": os.cpu_count(),
        "load_average_at_end": load_before,
        "note": note,
        "rows": [as_dict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
