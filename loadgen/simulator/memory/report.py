"""The report folder of simulated remote memory.

    summary.json      a list, one object per policy and seed
    machines.csv      every machine under every policy and seed: own, lent, used
    seconds.csv       of the first seed: mean, largest and smallest share in use, by second
    eviction.csv      figure 2.7: batch eviction by formula and as drawn
    manifest.json     options, settings, the applications, definitions, version
    utilization.png   the cluster's memory in use over time (the paper's figure 2.18a)
    machines.png      machines in order of their memory in use (figure 2.18b)
    eviction.png      figure 2.7
    index.html        a page that opens without a server; results.json: for `loadgen compare`

Everything but `wall_s` is a function of options and seed: a rerun gives equal bytes.
"""

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
from rich.table import Table

from slackwater.loadgen.files import table_text, write_json
from slackwater.loadgen.plots import COLORS, figure
from slackwater.loadgen.simulator.memory.containers import APPLICATIONS, CONFIGURATIONS
from slackwater.loadgen.simulator.memory.eviction import EXTRAS, NEED, Point
from slackwater.loadgen.simulator.memory.run import MachineRow, MemoryOutcome, MemorySettings
from slackwater.loadgen.simulator.memory.summary import MemorySummary
from slackwater.loadgen.simulator.options import Options
from slackwater.web import report as web

DIGITS: Final = 6

Reported = tuple[MemoryOutcome, MemorySummary]


def write_report(
    folder: Path,
    options: Options,
    settings: dict[str, MemorySettings],
    runs: Sequence[Reported],
    points: Sequence[Point],
) -> None:
    write_json(folder / "summary.json", [summary for _, summary in runs])
    write_json(folder / "manifest.json", manifest(options, settings))
    machine_fields = [field.name for field in msgspec.structs.fields(MachineRow)]
    _csv(
        folder / "machines.csv",
        ["policy", "seed", *machine_fields],
        ((o.policy, o.seed, *msgspec.structs.astuple(row)) for o, _ in runs for row in o.rows),
    )
    first = [outcome for outcome, _ in runs if outcome.seed == options.seed]
    _csv(
        folder / "seconds.csv",
        ["policy", "second", "mean", "largest", "smallest"],
        ((o.policy, n + 1, *row) for o in first for n, row in enumerate(o.by_second)),
    )
    _csv(
        folder / "eviction.csv",
        ["need", "extra", "busy", "formula", "found"],
        ((NEED, p.extra, p.busy, p.formula, p.found) for p in points),
    )
    _draw_seconds(folder / "utilization.png", first)
    _draw_machines(folder / "machines.png", first)
    _draw_eviction(folder / "eviction.png", points)
    summaries = [summary for outcome, summary in runs if outcome.seed == options.seed]
    sets = {each.policy: web.Result(web.figures_of(each, skip=("wall_s",))) for each in summaries}
    web.write(folder, made_page(options, first, summaries), sets)


def made_page(
    options: Options, runs: Sequence[MemoryOutcome], summaries: Sequence[MemorySummary]
) -> web.Report:
    seconds = [
        web.Series(each.policy, web.thinned([(n + 1.0, row[0]) for n, row in enumerate(
            each.by_second)]), step=False)
        for each in runs
    ]  # fmt: skip
    ordered = [
        web.Series(each.policy, web.distribution(row.used for row in each.rows)) for each in runs
    ]
    return web.Report(
        title=f"Memory of {options.nodes:,} simulated machines",
        subtitle=f"seed {options.seed}",
        charts=[
            web.Chart("Share of the cluster's memory in use", seconds, y="share", y_max=1.02),
            web.Chart("Machines that use at most so much of their memory", ordered, x="share used",
                      y="share", y_max=1.02),
        ],
        tables=[web.table_of("Policies", summaries, skip=("wall_s",))],
        now_s=float(max((len(each.by_second) for each in runs), default=1)),
    )  # fmt: skip


def _csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    path.write_text(table_text(header, rows, DIGITS))


def manifest(options: Options, settings: dict[str, MemorySettings]) -> dict[str, Any]:
    return {
        "version": version("slackwater"),
        "workload": options.trace,
        "machines": options.nodes,
        "seed": options.seed,
        "seeds": options.seeds,
        "settings": {name: msgspec.to_builtins(each) for name, each in settings.items()},
        "applications": [application._asdict() for application in APPLICATIONS],
        "configurations": [{"share": share, "of": part} for share, part in CONFIGURATIONS],
        "definitions": {
            "used": "system, containers and lent slabs, over the machine's memory",
            "utilization": "the mean over machines of what each used, averaged over the run",
            "max_to_min": "the largest of the machines' averages over the smallest",
            "filled": "share of the lent slabs' bytes that hold a page which may still be read",
            "comparable": "the baseline is the published one: 40.8 % within 2 points, 22.5 within "
            "a fifth",
        },
    }


def _draw_seconds(path: Path, runs: Sequence[MemoryOutcome]) -> None:
    with figure(path) as (_, axes):
        for color, outcome in zip(COLORS, runs, strict=False):
            seconds = range(1, len(outcome.by_second) + 1)
            mean, largest, smallest = zip(*outcome.by_second, strict=True)
            axes.plot(seconds, mean, label=outcome.policy, color=color)
            axes.fill_between(seconds, smallest, largest, color=color, alpha=0.12, linewidth=0)
        axes.set_xlabel("time (s)")
        axes.set_ylabel("share of memory in use")
        axes.set_title("Mean over machines; from the smallest to the largest")
        axes.legend()


def _draw_machines(path: Path, runs: Sequence[MemoryOutcome]) -> None:
    with figure(path) as (_, axes):
        for color, outcome in zip(COLORS, runs, strict=False):
            ordered = sorted(row.used for row in outcome.rows)
            axes.plot(range(1, len(ordered) + 1), ordered, label=outcome.policy, color=color)
        axes.set_xlabel("machines, in order")
        axes.set_ylabel("share of memory in use, averaged")
        axes.set_ylim(0, 1)
        axes.legend()


def _draw_eviction(path: Path, points: Sequence[Point]) -> None:
    with figure(path) as (_, axes):
        for color, extra in zip(COLORS, EXTRAS, strict=False):
            mine = [point for point in points if point.extra == extra]
            name = f"E' = {extra}" if extra else "random"
            busy = [point.busy for point in mine]
            axes.plot(busy, [point.formula for point in mine], color=color, label=name)
            axes.plot(busy, [point.found for point in mine], ".", color=color)
        axes.set_xlabel("probability that a slab is busy")
        axes.set_ylabel(f"all {NEED} evicted slabs lightly active")
        axes.set_title("Lines: the formula; dots: drawn")
        axes.legend()


def comparison(summaries: Sequence[MemorySummary], points: Sequence[Point]) -> list[Table]:
    table = Table(title="Remote memory: policies compared")
    table.add_column("policy")
    for name in (
        "seed", "in use", "x disk", "max/median", "max/min", "at the end", "max/min then",
        "as published", "mapped", "evicted", "refused", "Mbit/s", "remote reads", "filled",
        "wall s",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for s in summaries:
        table.add_row(
            s.policy, str(s.seed), f"{s.utilization:.1%}", f"{s.gain:.2f}",
            f"{s.max_to_median:.2f}", f"{s.max_to_min:.2f}", f"{s.utilization_end:.1%}",
            f"{s.max_to_min_end:.2f}", "yes" if s.comparable else "no", f"{s.mapped:,}",
            f"{s.evicted:,}", f"{s.refused:,}", f"{s.paging_mbps:.0f}", f"{s.read_remote:.1%}",
            f"{s.filled:.0%}", f"{s.wall_s:.0f}",
        )  # fmt: skip
    tables = [table]
    if len({s.seed for s in summaries}) > 1:
        tables.append(_over_seeds(summaries))
    worst = max(point.deviation for point in points)
    mean = sum(point.deviation for point in points) / len(points)
    evicting = Table(title=f"Batch eviction, E = {NEED}: {len(points)} points of figure 2.7")
    for name in ("furthest from the formula", "on average"):
        evicting.add_column(name, justify="right")
    evicting.add_row(f"{worst:.2f} standard errors", f"{mean:.2f}")
    return [*tables, evicting]


def _over_seeds(summaries: Sequence[MemorySummary]) -> Table:
    """Show the seeds whose baseline is near the published one."""
    table = Table(title="Seeds whose baseline is as published: median (smallest to largest)")
    table.add_column("policy")
    names = ("utilization", "gain", "max_to_median", "max_to_min")
    for name in ("seeds", "in use", "x disk", "max/median", "max/min"):
        table.add_column(name, justify="right")
    for policy in dict.fromkeys(s.policy for s in summaries):
        mine = [s for s in summaries if s.policy == policy and s.comparable]
        if not mine:
            continue
        cells = []
        for name in names:
            values = [float(getattr(s, name)) for s in mine]
            cells.append(f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        table.add_row(policy, str(len(mine)), *cells)
    return table
