"""AutoPS's live evaluation, cell by cell: what sharing saves, and what it costs each job.

    python benchmarks/live_sharing.py --list | --plan | --markdown
    python benchmarks/live_sharing.py 'fig8-*-edf' [--out reports/live_sharing] [--again]

Each cell is a cluster of its own and takes a minute and a half: the models standalone, the `static`
baseline (own servers per job), the jobs under sharing, and the control, as many jobs on one
aggregator as ask for more than it has (loadgen/replay/experiment.py). Figure 7's cells play one job
beside its twin under `static`. Without patterns all cells are run. A result is a file; a cell that
has a conclusive one is not run again without --again, so that the command can be interrupted and
repeated. The table at the end has all results of the folder, with the machine's load at the time.
"""

import argparse
import asyncio
import os
import time
from functools import cache
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from slackwater.common.base.errors import Rejected, SlackwaterError
from slackwater.common.domains.facts.timeline import Timeline
from slackwater.common.embedded import ClusterOptions, fit_cpu_share
from slackwater.loadgen.replay import calibrate, cells, display, report
from slackwater.loadgen.replay.cells import Cell, CellResult
from slackwater.loadgen.replay.experiment import (
    OnPhase,
    lone_experiment,
    profiled_scale,
    shared_experiment,
)
from slackwater.loadgen.simulator.pool.planned import planned

CPU_SHARE = 0.1
AGGREGATORS = 10
"""Four jobs being profiled take eight."""
LINE_EVERY_S = 10.0
err = Console(stderr=True)


def play(cell: Cell, options: argparse.Namespace) -> CellResult:
    """Raises SlackwaterError when it cannot be played at all."""
    # Twins of the models run beside the cell, on servers of their own.
    beside = 0 if cell.figure == "figure 7" else cell.servers * len(set(cell.models))
    share = fit_cpu_share(CPU_SHARE, AGGREGATORS + beside, len(os.sched_getaffinity(0)))
    time_scale = options.time_scale or cell.time_scale
    window = cell.window(time_scale)
    scale = options.bytes_scale or profiled(share, time_scale)
    work = cells.workload(cell, time_scale=time_scale, bytes_scale=scale)
    cluster = ClusterOptions(
        controllers=1,
        aggregators=AGGREGATORS,
        cpu_share=CPU_SHARE,
        profiler={
            "window_iterations": window,
            "profile_iterations": cells.PROFILE_ITERATIONS,
            "profile_s": cells.PROFILE_S,
        },
    )
    load_before, begun_s = os.getloadavg()[0], time.monotonic()
    if cell.figure == "figure 7":
        run = lone_experiment(work, cluster, window, said())
    else:
        run = shared_experiment(work, cluster, window, said(), cells.PHASES)
    outcome = asyncio.run(run)
    found = cells.result(cell, outcome)
    found.load = (load_before, os.getloadavg()[0])
    found.bytes_scale, found.time_scale = scale, time_scale
    found.cpu_share, found.wall_s = outcome.cpu_share, time.monotonic() - begun_s
    if options.plots:
        where = options.out / cell.id
        report.draw(where, outcome.timeline, outcome.figures)
    return found


@cache
def profiled(share: float, time_scale: float) -> float:
    """One probe for all cells of a time scale: they are to be compared."""
    guess = calibrate.bytes_scale(share, time_scale)
    probing = ClusterOptions(
        controllers=1,
        aggregators=AGGREGATORS,
        cpu_share=CPU_SHARE,
        profiler={"profile_iterations": cells.PROFILE_ITERATIONS, "profile_s": cells.PROFILE_S},
    )
    return asyncio.run(profiled_scale(probing, guess, time_scale, said()))


def said() -> OnPhase:
    """A line every few seconds."""
    last_s = float("-inf")

    def say(phase: str, timeline: Timeline, now_s: float) -> None:
        nonlocal last_s
        if now_s - last_s >= LINE_EVERY_S:
            last_s = now_s
            err.print(display.line(phase, timeline, now_s), markup=False, style="dim")

    return say


def results(folder: Path) -> dict[str, CellResult]:
    found = (
        msgspec.json.decode(path.read_bytes(), type=CellResult)
        for path in sorted(folder.glob("*.json"))
    )
    return {each.id: each for each in found}


def goal(each: CellResult) -> str:
    if each.figure == "figure 7":
        return "at least 0.99: not slower (our goal)"
    return "-" if each.goal is None else f"at least {each.goal:.1%}"


def ours(each: CellResult) -> str:
    if each.speed_ratio is not None:
        return f"{each.speed_ratio:.3f}"
    return report.percent(each.reduction)


def verdict(each: CellResult) -> str:
    return {True: "yes", False: "no", None: "inconclusive"}[each.met]


def table(found: dict[str, CellResult]) -> Table:
    shown = Table(title_justify="left")
    for column in ("cell", "goal", "ours", "loss median", "worst", "control", "undone", "load",
                   "s", "met"):  # fmt: skip
        shown.add_column(column, justify="left" if column == "cell" else "right")
    for each in found.values():
        shown.add_row(
            each.id, goal(each), ours(each), report.percent(each.loss_median),
            report.percent(each.loss_max), report.percent(each.control_loss), str(each.reverts),
            f"{max(each.load):.1f}", f"{each.wall_s:.0f}", verdict(each),
        )  # fmt: skip
    return shown


def markdown(found: dict[str, CellResult]) -> str:
    """Rows of docs/reproduction/live.md."""
    lines = [
        "| figure | published or goal | ours | ratio | met | command |",
        "|---|---|---|---|---|---|",
    ]
    for each in found.values():
        command = f"`python benchmarks/live_sharing.py {each.id}`"
        said_ours, ratio = ours(each), "-"
        if each.speed_ratio is not None:
            ratio = f"{each.speed_ratio:.2f}"
        elif each.goal and each.reduction is not None:
            ratio = f"{each.reduction / each.goal:.2f}"
        if each.speed_ratio is None:
            said_ours += (
                f"; lost {report.percent(each.loss_median)} median, "
                f"{report.percent(each.loss_max)} worst, "
                f"control {report.percent(each.control_loss)}"
            )
        lines.append(
            f"| {each.id} | {goal(each)} | {said_ours} | {ratio} | {verdict(each)} | {command} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", nargs="*", help="patterns of ids")
    parser.add_argument("--list", action="store_true", help="the chosen cells' ids, and no run")
    parser.add_argument("--plan", action="store_true", help="aggregators planned, and no run")
    parser.add_argument("--out", type=Path, default=Path("reports/live_sharing"))
    parser.add_argument("--again", action="store_true", help="also what is conclusive already")
    parser.add_argument("--time-scale", type=float, help="of computing times (1 or .5 by cell)")
    parser.add_argument("--bytes-scale", type=float, help="by default by this machine's speed")
    parser.add_argument("--plots", action="store_true", help="a folder of plots per cell")
    parser.add_argument("--markdown", action="store_true", help="rows of the page, and no run")
    options = parser.parse_args()
    try:
        chosen = cells.choose(options.cells)
    except Rejected as error:
        parser.error(str(error))
    if options.list:
        Console().print("\n".join(cell.id for cell in chosen), markup=False)
        return
    if options.plan:
        for cell in chosen:
            asked = cell.servers * len(cell.models)
            Console().print(f"{cell.id}: {planned(cell)} of {asked}", markup=False)
        return
    if options.markdown:
        Console(width=400, soft_wrap=True).print(markdown(results(options.out)), markup=False)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    known = results(options.out)
    for cell in chosen:
        before = known.get(cell.id)
        if before is not None and not before.doubts and not options.again:
            continue
        err.print(f"{cell.id}:")
        try:
            found = play(cell, options)
        except SlackwaterError as error:
            err.print(f"{cell.id}: {error}", markup=False, style="red")
            continue
        path = options.out / f"{cell.id}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        for doubt in found.doubts:
            err.print(f"inconclusive: {doubt}", markup=False)
    Console(width=140).print(table(results(options.out)))


if __name__ == "__main__":
    main()
