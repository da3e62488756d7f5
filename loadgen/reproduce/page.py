"""Writes docs/reproduction.md: every goal of the reproduction beside what came out.

    python -m slackwater.loadgen.reproduce.page

Figures are read from the pages under docs/reproduction, each made by its own script (named above
its table). A page states verdicts itself, in tables with the columns of a row; only what
`benchmarks/speed.py` prints is judged here. What misses is listed from the verdicts, so that none
is left out. A page that is missing is said to be missing: nobody ran it.
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from slackwater.loadgen.reproduce.verdict import (
    COLUMNS,
    MISSED,
    REPORTED,
    UNLIKE,
    YES,
    Row,
    table,
    yes,
)

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
MODULE = "python -m slackwater.loadgen.reproduce"

Table = list[dict[str, str]]


def tables(text: str) -> dict[str, Table]:
    """Heading -> the rows of the table under it, by column."""
    found: dict[str, Table] = {}
    heading, header = "", list[str]()
    for line in text.splitlines():
        if line.startswith("#"):
            heading, header = line.lstrip("# "), []
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not header:
                header = cells
            elif set("".join(cells)) - set("-: "):
                found.setdefault(heading, []).append(dict(zip(header, cells, strict=True)))
        else:
            header = []
    return found


def speed(text: str) -> Iterator[Row]:
    """Speed, one core"""
    simulator, models, search = (
        f"python benchmarks/{n}.py" for n in ("simulator", "models", "pollux")
    )
    for line in text.splitlines():
        big = re.search(r"(.*GPUs): ([\d.]+) s CPU \(goal (\d+)\).*peak waiting ([\d,]*\d)", line)
        plan = re.search(r"(re-plan.*): (\d+) ms from a bare snapshot \(goal (\d+)\)", line)
        peer = re.search(r"(.*): ([\d.]+) s CPU, public simulator (\S+) s: (\d+)x-(\d+)x", line)
        boxed = [cell.strip() for cell in line.strip("│").split("│")]
        if big or plan:
            what, ours, goal = (big or plan).groups()[:3]  # type: ignore[union-attr]
            what += f", {big.group(4)} waiting at the peak" if big else ""
            unit = "s" if big else "ms"
            ratio = float(ours) / float(goal)
            yield Row(what, f"<= {goal} {unit}", f"{ours} {unit}", f"{ratio:.2f}", yes(ratio <= 1),
                      simulator)  # fmt: skip
        elif peer:
            what, ours, theirs, slow, fast = peer.groups()
            met = yes(True) if int(slow) >= 10 else "**partly**" if int(fast) >= 10 else yes(False)
            goal = f"10x faster than {theirs} s (public simulator, timed by us)"
            yield Row(what, goal, f"{ours} s", f"{slow}x to {fast}x", met, simulator)
        elif len(boxed) == 6 and boxed[5] in ("yes", "no"):
            command = search if re.match("round|fitness", boxed[0]) else models
            better = boxed[4].replace("<= 1", "at most").replace(">= 1", "at least")
            yield Row(boxed[0].removesuffix(" []"), f"{better} {boxed[2]}", boxed[1], boxed[3],
                      yes(boxed[5] == "yes"), command)  # fmt: skip
    same = re.findall(r".*(?:re-sort|reference).*", text)
    for line in same:
        yield Row("100,000 jobs against the re-sorting program", "equal", line, "-",
                  yes("equal" in line or "same" in line), f"{simulator} --check")  # fmt: skip


def stated(text: str) -> Iterator[Row]:
    """The rows of every table that has their columns."""
    for rows in tables(text).values():
        for row in rows:
            if set(COLUMNS) <= set(row):
                yield Row(*(row[column].strip("`") for column in COLUMNS))


SECTIONS: dict[str, Callable[[str], Iterator[Row]]] = {
    "tiresias": stated, "pollux": stated, "lin": stated, "harmony": stated, "cruise": stated,
    "speed": speed,
}  # fmt: skip
"""Pages that come first -> how they are read. Each page's first line is its heading."""

MET: Final = (YES, "see test")
OPEN: Final = (REPORTED, UNLIKE)
NOT_MET: Final = (MISSED, "no", "**partly**", "**not shown**", "not run again", "inconclusive")


class Group(NamedTuple):
    """A page under docs/reproduction."""

    name: str
    heading: str
    rows: list[Row]


def groups(folder: Path) -> Iterator[Group]:
    others = sorted({source.stem for source in folder.glob("*.md")} - set(SECTIONS))
    for name in [*SECTIONS, *others]:
        source = folder / f"{name}.md"
        if source.exists():
            text = source.read_text()
            rows = list(SECTIONS.get(name, stated)(text))
            yield Group(name, text.split("\n", 1)[0].lstrip("# "), rows)
        else:
            yield Group(name, name, [])


def listed(found: list[Group], verdicts: tuple[str, ...], beside: str) -> list[str]:
    """The rows with one of these verdicts, by page."""
    lines: list[str] = []
    for group in found:
        rows = [row for row in group.rows if row.met in verdicts]
        if rows:
            lines += [f"### {group.heading}", ""]
            lines += [f"- {_sentence(row, beside)}" for row in rows]
            lines.append("")
    return lines or ["Nothing.", ""]


def _sentence(row: Row, beside: str) -> str:
    ratio = "" if row.ratio == "-" else f", ratio {row.ratio}"
    return f"{row.what}: {row.ours}{ratio}. {beside}: {row.goal}."


def page(folder: Path) -> str:
    found = list(groups(folder))
    for group in found:
        for row in group.rows:
            if row.met not in (*MET, *OPEN, *NOT_MET):
                raise ValueError(
                    f"{group.name}.md: met is {row.met!r} for {row.what!r}; "
                    f"give one of {', '.join((*MET, *OPEN, *NOT_MET))}"
                )
    body: list[str] = []
    for group in found:
        body += [f"## {group.heading}", ""]
        if not group.rows:
            body += ["Not run: the page of this group is missing.", ""]
            continue
        body += [f"In full: [{group.name}.md](reproduction/{group.name}.md).", ""]
        body += [*table(group.rows), ""]
    head = [
        "# Published results and ours",
        "",
        f"Written by `{MODULE}.page` from the pages",
        "under [reproduction](reproduction), which the commands beside the rows",
        "make. *Ratio* is ours over the published figure or the goal. *Reported* means that nobody",
        "published a figure and no goal is set; *not comparable*, that a published figure was got",
        "under other conditions, which the row names. Trace files are named without their folder.",
        "",
        "## What misses its goal",
        "",
        "Every row below that has a goal or a published figure and does not show that it meets it.",
        "",
        *listed(found, NOT_MET, "Goal"),
        "## What cannot be compared",
        "",
        *listed(found, (UNLIKE,), "Beside"),
    ]
    return "\n".join([*head, *body])


def main() -> int:
    (DOCS / "reproduction.md").write_text(page(DOCS / "reproduction"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
