"""How benchmarks measure and print: side by side in one run, interleaved, medians, ratios.

Absolute figures depend on the machine and on who else uses it; the ratio to a peer measured in
the same run is what is compared with a goal. What cannot be measured here is a row with its reason.
"""

import contextlib
import json
import math
import os
import shlex
import statistics
import sys
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
    """The hardware's limit, in the same unit: memory's rate, or a bare socket's."""
    spread: float | None = None
    """How noisy it was: (third - first quartile) / median of our rounds."""
    ratios: tuple[float, ...] = ()
    """Ratios of ours to the peer's next to each other in time: noise that lasts longer than a pair
    is in both. The ratio is their median then, and a goal is met only by all of its interval."""
    unlike: str = ""
    """Why a published figure cannot be compared with ours: it has no goal then."""

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios) if self.ratios else self.ours / self.peer

    @property
    def interval(self) -> tuple[float, float]:
        """Where the ratio is, with 95 % confidence; of unpaired rounds, the ratio itself."""
        return median_interval(self.ratios) or (self.ratio, self.ratio)

    @property
    def met(self) -> bool | None:
        """None: there is no goal, or it lies within the interval."""
        if self.goal is None:
            return None
        low, high = self.interval
        good, bad = (high <= self.goal, low > self.goal)
        if not self.lower_is_better:
            good, bad = (low >= self.goal, high < self.goal)
        return True if good else False if bad else None

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


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the median's 95 % interval, whatever the distribution (the sign test turned around):
    so many of the smallest and largest are left out as coins would not come up. None: too few
    values."""
    left_out, tail = -1, 0.0
    while (tail := tail + math.comb(len(values), left_out + 1) / 2 ** len(values)) <= 0.025:
        left_out += 1
    ordered = sorted(values)
    return (ordered[left_out], ordered[-1 - left_out]) if left_out >= 0 else None


def paired(
    name: str,
    ours: Sequence[float],
    peers: Sequence[float],
    unit: str,
    peer_name: str,
    goal: float | None = None,
    lower_is_better: bool = False,
) -> Figure:
    """Make the figure of measurements that were taken in turn."""
    ratios = tuple(mine / other for mine, other in zip(ours, peers, strict=True))
    return Figure(
        name, statistics.median(ours), statistics.median(peers), unit, peer_name,
        goal=goal, lower_is_better=lower_is_better, ratios=ratios,
        spread=spread(ratios) if len(ratios) > 1 else None,
    )  # fmt: skip


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
            f"{figure.ratio:.3f}{_between(figure)}",
            "-" if figure.goal is None else f"{sign} {figure.goal:g}",
            {True: "yes", False: "NO", None: "-" if figure.goal is None else "?"}[figure.met],
            *([_percent(figure.of_floor)] if floors else []),
            *([_percent(figure.spread)] if noise else []),
        )
    console = Console(width=int(os.environ.get("COLUMNS", "120")))
    console.print(table)
    for row in rows:
        if isinstance(row, Skipped):
            console.print(f"skipped: {row.name}: {row.why}")


def _between(figure: Figure) -> str:
    low, high = figure.interval
    return f" ({low:.3f} to {high:.3f})" if low < high else ""


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
    if row.unlike:
        facts["unlike"] = row.unlike
    if row.interval[0] < row.interval[1]:
        facts["interval"] = [round(bound, 4) for bound in row.interval]
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


def this_command() -> str:
    """How this program was called, but for `--json FILE`."""
    words = sys.argv[1:]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


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


def accuracy(hits: float, prefetched: float) -> float:
    """Return which part of the pages that were fetched ahead was asked for. Some that are hit in a
    round were fetched before it: they count with both."""
    return hits / max(1, hits, prefetched)
