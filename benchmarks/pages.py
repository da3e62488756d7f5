"""Writes what was measured into the pages of docs/reproduction, from benchmarks/results.

    python benchmarks/pages.py

Each benchmark writes its rows with `--json benchmarks/results/NAME.json`; nothing is measured here.
A page says which results it shows, between two comments; all between them is written anew:

    <!-- results: NAME NAME ... -->
    <!-- end of results -->

Rows that miss their goal, or do not show that they meet it, come first.
"""

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PAGES = RESULTS.parent.parent / "docs" / "reproduction"
MARKED = re.compile(r"(<!-- results:([^>]*)-->\n).*?(<!-- end of results -->)", re.DOTALL)
COLUMNS = ("figure", "published or goal", "ours", "ratio", "met", "command", "of floor", "spread")
MISSED = ("**no**", "**not shown**")


def cells(row: dict[str, Any], command: str) -> tuple[str, ...]:
    if "skipped" in row:
        return (row["name"], "-", f"skipped: {row['skipped']}", "-", "reported", command, "-", "-")
    peer = f"{row['peer']:g} {row['unit']} ({row['peer_name']})"
    goal = f"{row['bound']} {row['goal']:.3g} x {peer}" if row["goal"] is not None else peer
    unknown = "reported" if row["goal"] is None else "**not shown**"
    if "unlike" in row:
        goal, unknown = f"{peer}: {row['unlike']}", "not comparable"
    met = {True: "yes", False: "**no**", None: unknown}[row["met"]]
    ratio = f"{row['ratio']:.3f}"
    if "interval" in row:
        low, high = row["interval"]
        ratio += f" ({low:.3f} to {high:.3f})"
    percents = (
        "-" if row.get(name) is None else f"{row[name]:.0%}" for name in ("of_floor", "spread")
    )
    return (row["name"], goal, f"{row['ours']:g} {row['unit']}", ratio, met, command, *percents)


def table(rows: list[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    lines += [f"| {' | '.join([*row[:5], f'`{row[5]}`', *row[6:]])} |" for row in rows]
    return [*lines, ""]


def measured(names: list[str]) -> str:
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for name in names:
        source = RESULTS / f"{name}.json"
        if not source.exists():
            notes.append(f"- {name}: not run.")
            continue
        report = json.loads(source.read_text())
        rows += [cells(row, report["command"]) for row in report["rows"]]
        load = report["load_average_at_end"][0]
        notes.append(f"- {name}: load average {load:g} at its end. {report['note']}".rstrip())
    missed = [row for row in rows if row[4] in MISSED]
    rest = [row for row in rows if row[4] not in MISSED]
    lines = ["", "## What misses its goal", "", *table(missed)] if missed else [""]
    lines += ["## The rest", "", *table(rest)] if rest else []
    return "\n".join([*lines, "## Runs", "", *notes, "", ""])


def main() -> None:
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text()
        filled = MARKED.sub(lambda at: at[1] + measured(at[2].split()) + at[3], text)
        if filled != text:
            page.write_text(filled)
            print(f"written: {page.name}")


if __name__ == "__main__":
    main()
