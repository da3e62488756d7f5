"""Writes docs/reproduction/data_plane.md from the results of the data plane's benchmarks.

    python benchmarks/data_plane.py

Each benchmark writes its rows with `--json benchmarks/results/NAME.json`; nothing is measured here.
Rows that miss their goal come first.
"""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "reproduction" / "data_plane.md"
RESULTS = (
    "aggregation_shm", "aggregation_tcp", "kernels", "tensor_lists", "one_sided", "migration",
    "aggregator_memory",
)  # fmt: skip
HEAD = """# The data plane: aggregation, one-sided pages, migration, memory

Written by `python benchmarks/data_plane.py` from [benchmarks/results](../../benchmarks/results).
Each row is one interleaved run on a machine of two cores; *ours* and the peer are medians over
rounds, *of floor* is the part reached of what the memory's or a bare socket's rate allows, *spread*
the quartiles' distance over the median, which says how noisy the machine was.
"""
COLUMNS = ("figure", "published or goal", "ours", "ratio", "met", "command", "of floor", "spread")


def cells(row: dict[str, Any], command: str) -> tuple[str, ...]:
    if "skipped" in row:
        return (row["name"], "-", f"skipped: {row['skipped']}", "-", "reported", command, "-", "-")
    peer = f"{row['peer']:g} {row['unit']} ({row['peer_name']})"
    goal = f"{row['bound']} {row['goal']:.3g} x {peer}" if row["goal"] is not None else peer
    met = {True: "yes", False: "**no**", None: "reported"}[row["met"]]
    percents = (
        "-" if row.get(name) is None else f"{row[name]:.0%}" for name in ("of_floor", "spread")
    )
    ours = f"{row['ours']:g} {row['unit']}"
    return (row["name"], goal, ours, f"{row['ratio']:.3f}", met, command, *percents)


def table(rows: list[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    lines += [f"| {' | '.join([*row[:5], f'`{row[5]}`', *row[6:]])} |" for row in rows]
    return [*lines, ""]


def main() -> None:
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for name in RESULTS:
        source = HERE / "results" / f"{name}.json"
        if not source.exists():
            notes.append(f"- {name}: not run.")
            continue
        report = json.loads(source.read_text())
        rows += [cells(row, report["command"]) for row in report["rows"]]
        load = report["load_average_at_end"][0]
        notes.append(f"- {name}: load average {load:g} at its end. {report['note']}".rstrip())
    missed = [row for row in rows if row[4] == "**no**"]
    lines = [HEAD, "## What misses its goal", "", *table(missed)] if missed else [HEAD]
    lines += ["## The rest", "", *table([row for row in rows if row not in missed])]
    lines += ["## Runs", "", *notes, "", *_tried()]
    PAGE.write_text("\n".join(lines))


def _tried() -> list[str]:
    """What was tried and left out, with its figures: benchmarks/results/tried.md."""
    source = HERE / "results" / "tried.md"
    return [*source.read_text().rstrip("\n").split("\n"), ""] if source.exists() else []


if __name__ == "__main__":
    main()
