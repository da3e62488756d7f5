"""How benchmarks measure and print: side by side in one run, interleaved, medians, ratios.

Absolute figures depend on the machine and on who else uses it; the ratio to a peer measured in
the same run is what is compared with a goal.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

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

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.ratio <= self.goal if self.lower_is_better else self.ratio >= self.goal


def interleaved(measures: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Every measure once a round, in turn; the median of each."""
    seen: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            seen[name].append(measure())
    return {name: statistics.median(values) for name, values in seen.items()}


def show(title: str, figures: list[Figure]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("figure", "ours", "peer", "ratio", "goal", "met"):
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
        )
    Console(width=120).print(table)
