"""Writes docs/reproduction.md: every goal of the reproduction beside what came out.

    python -m slackwater.loadgen.reproduce.page

Figures are read from the pages under docs/reproduction, each made by its own script (named above
its table); nothing is computed here but ratios and whether a goal is met. A page that is missing
is said to be missing: nobody ran it.
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
MODULE = "python -m slackwater.loadgen.reproduce"

Table = list[dict[str, str]]


class Row(NamedTuple):
    what: str
    goal: str
    ours: str
    ratio: str
    met: str
    command: str


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


def yes(met: bool) -> str:
    return "yes" if met else "**no**"


def numbers(text: str) -> list[float]:
    return [float(word.replace(",", "")) for word in re.findall(r"\d[\d,]*\.?\d*", text)]


def tiresias(text: str) -> Iterator[Row]:
    """Tiresias, co-location, a week of Philly"""
    verdicts = {"equal": yes(True), "within": yes(True), "reported": "reported"}
    for rows in tables(text).values():
        for row in rows:
            ratio = row["ratio"] or "-"
            bound = numbers(row["published or bound"])
            if ratio == "-" and row["verdict"] == "within":
                ratio = f"{numbers(row['ours'])[0] / bound[0]:.2f}"
            met = verdicts.get(row["verdict"], yes(False))
            yield Row(row["what"], row["published or bound"], row["ours"], ratio, met,
                      row["command"].strip("`"))  # fmt: skip


def pollux(text: str) -> Iterator[Row]:
    """Pollux's artifact: 16 machines of 4 GPUs, rounds of 60 s, 30 s a restart"""
    load = tables(text)["Job load (figure 3.13a)"]
    command = f"{MODULE}.pollux --only load"
    cells = [row for row in load if row["workload"] != "mean"]
    bounds = {"pollux": (0, 1.05), "tiresias-artifact": (0.95, 1.05), "optimus": (0.95, 1.05)}
    (six,) = (row for row in cells if row["load"] == "1.0" and row["workload"] == "6")
    for policy, (low, high) in bounds.items():
        published, ours, ratio = numbers(six[policy])
        goal = f"<= {high} x {published:,.0f}" if not low else f"{published:,.0f} within 5 %"
        yield Row(f"workload 6, average JCT (s), {policy}", goal, f"{ours:,.0f}", f"{ratio:.3f}",
                  yes(low <= ratio <= high), command)  # fmt: skip
    best = sum(row["best"] == "pollux" for row in cells)
    yield Row("pollux best, workloads 1, 2, 3, 5, 6 at four loads", f"{len(cells)} cells",
              f"{best} cells", f"{best / len(cells):.2f}", yes(best == len(cells)),
              command)  # fmt: skip
    loads = {
        p: [numbers(row[p])[1] for row in cells if row["load"] == "1.0"]
        for p in ("tiresias-artifact", "optimus")
    }
    before = sum(a < b for a, b in zip(*loads.values(), strict=True))
    count = len(loads["optimus"])
    yield Row("tiresias-artifact before optimus, load 1.0", f"{count} workloads",
              f"{before} workloads", f"{before / count:.2f}", yes(before == count),
              command)  # fmt: skip
    yield from pollux_means(tables(text))


def pollux_means(found: dict[str, Table]) -> Iterator[Row]:
    """The experiments with no bound of their own: as published, ours beside them."""
    for row in found["Scheduling interval (figure 3.13b)"]:
        published, ours, ratio = numbers(row["mean"])
        yield Row(f"pollux every {row['interval']}, mean JCT (s)", f"{published:,.0f}",
                  f"{ours:,.0f}", f"{ratio:.3f}", "reported",
                  f"{MODULE}.pollux --only interval")  # fmt: skip
    for row in found["Interference (figure 3.13c)"]:
        published, ours, ratio = numbers(row["mean"])
        yield Row(f"interference {row['slowdown, avoidance']}, mean JCT (s)", f"{published:,.0f}",
                  f"{ours:,.0f}", f"{ratio:.3f}", "reported",
                  f"{MODULE}.pollux --only interference")  # fmt: skip
    for row in found["Fairness knob (table 3.2, figure 3.12)"]:
        testbed = row["testbed: JCT, p99, makespan"] or "-"
        yield Row(f"{row['policy']}: JCT, p99, makespan (h); largest rho", testbed,
                  f"{row['JCT (h)']}, {row['p99 (h)']}, {row['makespan (h)']}; {row['max rho']}",
                  "-", "reported", f"{MODULE}.pollux --only fairness")  # fmt: skip
    for row in found["Cluster auto-scaling (section 3.5.4)"]:
        ratio = numbers(row["ratio"])[0] / numbers(row["published"])[0]
        yield Row(f"auto-scaling, {row['']}, goodput- over throughput-driven", row["published"],
                  row["ratio"], f"{ratio:.3f}", "reported",
                  f"{MODULE}.pollux --only autoscaling")  # fmt: skip


def lin(text: str) -> Iterator[Row]:
    """Lin et al.: common random numbers, queues drained, ten seeds"""
    found = tables(text)
    command = f"{MODULE}.lin --jobs 1000 --seeds 10"
    for model in ("exact", "hybrid"):
        for row in found[f"What the paper says, {model} model"]:
            published, ours = row["published"], row["ours"]
            if published == "-":
                continue
            if "stable" in published:
                met = ours.split()[0] == published
            else:
                met = float(ours) < (1.05 if "1.05" in published else 1.0)
            yield Row(f"{model}: {row['figure']}", published, ours, row["ratio"], yes(met), command)
        means = found[f"Mean response, days, {model} model"]
        (equal,) = (row for row in means if row["policy"].startswith("equal-share"))
        for load in ("load 0.1", "load 0.7"):
            yield Row(f"{model}: equal-share, {load}, mean response (days)", "-", equal[load], "-",
                      "reported", command)  # fmt: skip


def harmony(text: str) -> Iterator[Row]:
    """Harmony: over isolated (16 machines a job, FIFO), 80 jobs, five seeds"""
    (rows,) = tables(text).values()
    for row in rows:
        least = min(numbers(row["by seed"]))
        goal, met = f"paper {row['published']}", "reported"
        if row["figure"] in ("harmony: JCT", "harmony: makespan"):
            goal, met = f">= 1.4 on every seed (paper {row['published']})", yes(least >= 1.4)
        yield Row(row["figure"], goal, f"{row['ours (mean)']} (least {least})", row["ratio"], met,
                  f"{MODULE}.harmony")  # fmt: skip


def cruise(text: str) -> Iterator[Row]:
    """Cruise: its cost model, its choice under noise, machines that differ"""
    alike, noisy, different = tables(text).values()
    command = f"{MODULE}.cruise"
    for row in alike:
        exhaustive, ours = row["exhaustive in the model"], row["closed form"]
        what = f"{row['application']}: workers of 32"
        yield Row(what, exhaustive, ours, row["ratio"], yes(ours == exhaustive), command)
    for row in noisy:
        for column in list(row)[3:]:
            loss, usual = numbers(row[column])
            what = f"{row['application']}, {row['noise']}: largest loss, {column}"
            shown = f"{loss:.2f} % (99 of 100 draws: {usual:.2f} %)"
            stricter = column.startswith("averages off")
            goal, met = (
                ("published: 6.5 %", "reported") if stricter else ("<= 6.5 %", yes(loss <= 6.5))
            )
            yield Row(what, goal, shown, f"{loss / 6.5:.2f}", met, command)
    for row in different:
        yield Row(row["figure"], row["published"], row["ours"], row["ratio"], "reported", command)
    yield Row(
        "machines that differ, N <= 6, random cases: programme and brute force",
        "equal",
        "asserted by the test",
        "-",
        "see test",
        "pytest tests/unit/common/domains/models/test_cost_model.py",
    )


def speed(text: str) -> Iterator[Row]:
    """Speed, one core"""
    simulator, models, search = (
        f"python benchmarks/{n}.py" for n in ("simulator", "models", "pollux")
    )
    for line in text.splitlines():
        big = re.search(r"(.*GPUs): ([\d.]+) s CPU \(goal (\d+)\).*peak waiting ([\d,]*\d)", line)
        plan = re.search(r"(re-plan.*): (\d+) ms from a bare snapshot \(goal (\d+)\)", line)
        peer = re.search(r"(.*): ([\d.]+) s CPU, published (\S+) s: (\d+)x-(\d+)x", line)
        boxed = [cell.strip() for cell in line.strip("│").split("│")]
        if big or plan:
            what, ours, goal = (big or plan).groups()[:3]  # type: ignore[union-attr]
            what += f", {big.group(4)} waiting at the peak" if big else ""
            unit = "s" if big else "ms"
            ratio = float(ours) / float(goal)
            yield Row(what, f"<= {goal} {unit}", f"{ours} {unit}", f"{ratio:.2f}", yes(ratio <= 1),
                      simulator)  # fmt: skip
        elif peer:
            what, ours, published, slow, fast = peer.groups()
            met = yes(True) if int(slow) >= 10 else "**partly**" if int(fast) >= 10 else yes(False)
            goal = f"10x faster than {published} s"
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
    """A page that states goal and outcome itself, in every table with the columns of a row."""
    for table in tables(text).values():
        for row in table:
            if set(STATED) <= set(row):
                yield Row(*(row[column].strip("`") for column in STATED))


STATED = ("figure", "published or goal", "ours", "ratio", "met", "command")
SECTIONS: dict[str, Callable[[str], Iterator[Row]]] = {
    "tiresias": tiresias, "pollux": pollux, "lin": lin, "harmony": harmony, "cruise": cruise,
    "speed": speed,
}  # fmt: skip
"""Page under docs/reproduction -> its goals; the docstring is the heading. Other pages state their
goals (see `stated`); their first line is the heading."""


def page(folder: Path) -> str:
    body: list[str] = []
    missed: list[str] = []
    others = sorted({source.stem for source in folder.glob("*.md")} - set(SECTIONS))
    for name in [*SECTIONS, *others]:
        section, source = SECTIONS.get(name, stated), folder / f"{name}.md"
        if not source.exists():
            body += ["", f"## {section.__doc__}", "", "Not run: the page of this group is missing."]
            continue
        heading = source.read_text().split("\n", 1)[0] if name in others else section.__doc__
        body += ["", f"## {(heading or name).lstrip('# ')}", ""]
        body += [f"In full: [{name}.md](reproduction/{name}.md).", "",
                 "| figure | published or goal | ours | ratio | met | command |",
                 "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
        for row in section(source.read_text()):
            body.append(f"| {' | '.join(row[:5])} | `{row.command}` |")
            if row.met not in ("yes", "reported", "see test"):
                missed.append(
                    f"- {row.what}: {row.ours} (ratio {row.ratio}), the goal is {row.goal}."
                )
    head = [
        "# Published results and ours",
        "",
        f"Written by `{MODULE}.page` from the pages",
        "under [reproduction](reproduction), which the commands beside the rows",
        "make. *Ratio* is ours over the published figure or the goal;",
        "*reported* means that there is no bound. Trace files are named without their folder.",
        "",
        "## What misses its goal",
        "",
    ]
    return "\n".join([*head, *(missed or ["Nothing."]), *body]) + "\n"


def main() -> int:
    (DOCS / "reproduction.md").write_text(page(DOCS / "reproduction"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
