"""A benchmark's ratios in two checkouts, interleaved: has a change made any of them worse?

    python benchmarks/revisions.py OLD NEW BENCHMARK [--runs N] [--json FILE] [-- OPTIONS]

OLD and NEW are roots of checkouts in which `make setup-dev kernels` was run; each runs its own
file of that name with its own Python. Figures are compared by name and peer. One fell where the
runs tell the checkouts apart: NEW's median is worse than every run of OLD, and OLD's median better
than every run of NEW. Exits with 1 where any did.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

RUN_S_MAX = 900.0


@dataclass(frozen=True)
class Compared:
    """A figure's ratios to its peer, a value a run, in the old checkout and in the new one."""

    name: str
    old: tuple[float, ...]
    new: tuple[float, ...]
    lower_is_better: bool

    @property
    def fell(self) -> bool:
        was, now = median(self.old), median(self.new)
        if self.lower_is_better:
            return now > max(self.old) and was < min(self.new)
        return now < min(self.old) and was > max(self.new)


def ran(root: Path, benchmark: str, options: Sequence[str]) -> list[dict[str, Any]]:
    """Run it once in that checkout. Returns the rows that it measured."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run(
            [root / ".venv/bin/python", f"benchmarks/{benchmark}.py", *options, "--json", report],
            cwd=root, stdout=subprocess.DEVNULL, check=True, timeout=RUN_S_MAX,
        )  # fmt: skip
        rows: list[dict[str, Any]] = json.loads(report.read_text())["rows"]
    return [row for row in rows if "skipped" not in row]


def in_turns(
    roots: tuple[Path, Path], benchmark: str, runs: int, options: Sequence[str]
) -> tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]]]:
    """Run both, the first one changing. Returns each one's rows, a list a run."""
    found: tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]]] = ([], [])
    for number in range(runs):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            found[which].append(ran(roots[which], benchmark, options))
        print(f"{benchmark}: {number + 1} of {runs} runs of both", file=sys.stderr)
    return found


def compared(
    old: Sequence[Sequence[Mapping[str, Any]]], new: Sequence[Sequence[Mapping[str, Any]]]
) -> list[Compared]:
    """Pair the figures that both checkouts measure, in the new one's order."""
    ratios: dict[tuple[str, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    lower = dict[tuple[str, str], bool]()
    for which, runs in enumerate((old, new)):
        for row in (row for rows in runs for row in rows):
            key = row["name"], row["peer_name"]
            ratios[key][which].append(row["ratio"])
            lower[key] = row["bound"] == "at most"
    return [
        Compared(f"{name} / {peer}", tuple(was), tuple(now), lower[name, peer])
        for (name, peer), (was, now) in ratios.items()
        if was and now
    ]


def show(benchmark: str, figures: Sequence[Compared]) -> None:
    table = Table(title=f"{benchmark}: ratios, median (least to most)", title_justify="left")
    for column in ("figure", "old", "new", "new / old", "fell"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for one in figures:
        spans = (f"{median(x):.3f} ({min(x):.3f} to {max(x):.3f})" for x in (one.old, one.new))
        changed = f"{median(one.new) / median(one.old):.3f}" if median(one.old) else "-"
        table.add_row(one.name, *spans, changed, "FELL" if one.fell else "no")
    Console(width=120).print(table)


def main() -> int:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("benchmark", help="a file's name in benchmarks, without .py")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words[:at])
    roots = (options.old.resolve(), options.new.resolve())
    for root in roots:
        if not (root / "benchmarks" / f"{options.benchmark}.py").exists():
            parser.error(f"{root} has no benchmarks/{options.benchmark}.py")
    figures = compared(*in_turns(roots, options.benchmark, options.runs, words[at + 1 :]))
    show(options.benchmark, figures)
    if options.json:
        rows = [{"name": f.name, "old": f.old, "new": f.new, "fell": f.fell} for f in figures]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if any(figure.fell for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
