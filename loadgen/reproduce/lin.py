"""Lin et al. (2018), sections III, V-B and VI, on their own workload: published, ours, ratio.

    python -m slackwater.loadgen.reproduce.lin [--jobs N] [--seeds N] [--out FILE]

100 nodes; table III's jobs with Poisson arrivals; equal seeds draw equal jobs at every load and
under every policy (common random numbers); each run goes on until the queue is drained. JSQ-Chunk
is run with every chunk size from 7 to 40 that no other dominates and reported at its best, as the
paper does; moldable KNEE knows the load, as the paper's does. The paper runs until the 95 %
interval is below 5 % of each figure; here the jobs and seeds are fixed, and a row says how wide the
widest interval is. Figures 1, 12 and 13 have no numbers: what the text says of them is the goal.

**Stable**: the paper shows curves that rise without bound. Here a load counts as stable if the jobs
in the system that arrivals of the last quarter find are at most `STABLE_GROWTH` times those that
the second quarter found. Under overload they grow in proportion to time: 7/8 to 3/8, or 2.3.
"""

import argparse
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Final

import msgspec

from slackwater.common.domains.models.queueing import StepTimes, throughputs
from slackwater.loadgen.generate.lin import TABLE_III
from slackwater.loadgen.reproduce.verdict import REPORTED, Row, judged, unlike, yes
from slackwater.loadgen.reproduce.verdict import table as rows_table
from slackwater.loadgen.simulator.gpu.build import build_cluster, build_model, build_policy
from slackwater.loadgen.simulator.gpu.engine import Engine
from slackwater.loadgen.simulator.gpu.prepare import prepare
from slackwater.loadgen.simulator.gpu.runner import Task, run
from slackwater.loadgen.simulator.options import Options

MODULE: Final = "python -m slackwater.loadgen.reproduce.lin"
NODES: Final = 100
LOADS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
SRPT_LOADS: Final = (0.1, 0.2, 0.3)
MALLEABLE: Final = ("hell", "knee", "waterfill", "equal-share")
METHODS: Final = ("exact", "hybrid")
CHUNKS: Final = (7, 8, 9, 10, 11, 12, 14, 16, 20, 25, 33, 40)
LOW, MIDDLE, HIGH = LOADS[:3], LOADS[3:6], LOADS[6:]
"""The text gives no numbers for a low and a high load; these are ours."""
STABLE_GROWTH: Final = 1.6
DAY_S: Final = 86_400.0
LIMIT_WORKERS: Final = 10_000
GAMMA: Final = 1.05
ALL_MODELS: Final = "+".join(TABLE_III)
Knobs = Mapping[str, float]
NO_KNOBS: Final[Knobs] = MappingProxyType({})
LARGE_MODELS: Final = "alexnet+vgg19"
FRACTION: Final = 0.4


class Cell(msgspec.Struct):
    """One policy at one load: means over seeds."""

    policy: str
    mode: str
    load: float
    method: str
    response_days: float
    half_width_days: float
    """Half of the 95 % confidence interval over seeds (normal)."""
    growth: float
    note: str = ""

    @property
    def stable(self) -> bool:
        return self.growth <= STABLE_GROWTH


def simulate(
    policy: str,
    mode: str,
    load: float,
    method: str,
    jobs: int,
    seeds: int,
    knobs: Knobs = NO_KNOBS,
    models: str = ALL_MODELS,
) -> Cell:
    settings = [f"{policy}.{name}={value}" for name, value in knobs.items()]
    options = Options(
        trace=f"generate:lin,load={load},jobs={jobs},models={models}", policies=(policy,),
        nodes=NODES, gpus_per_node=1, overhead="none", job_model="queueing",
        mode="moldable" if mode == "moldable" else "malleable",
        settings=(f"queueing.method={method}", *settings),
    )  # fmt: skip
    means, early, late = [], [], []
    for seed in range(seeds):
        figures = run(Task(0, options, policy, seed)).figures
        means.append(fmean(job.jct_s for job in figures) / DAY_S)
        found = _found([job.submit_s for job in figures], [job.end_s for job in figures])
        quarter = max(1, len(found) // 4)
        early += found[quarter : 2 * quarter]
        late += found[-quarter:]
    half = 1.96 * stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0
    growth = fmean(late) / max(fmean(early), 1e-9)
    note = ", ".join(f"{name} {value:g}" for name, value in knobs.items())
    return Cell(policy, mode, load, method, fmean(means), half, growth, note)


def _found(arrivals_s: list[float], ends_s: list[float]) -> list[int]:
    """Jobs in the system that each arrival finds."""
    ends_s = sorted(ends_s)
    return [i - bisect_right(ends_s, at_s) for i, at_s in enumerate(arrivals_s)]


def table(
    jobs: int, seeds: int, method: str, models: str = ALL_MODELS
) -> dict[tuple[str, str, float], Cell]:
    """(policy, mode, load) -> cell."""

    def cell(policy: str, mode: str, load: float, knobs: Knobs = NO_KNOBS) -> Cell:
        return simulate(policy, mode, load, method, jobs, seeds, knobs, models)

    rows: list[Cell] = []
    for load in LOADS:
        rows += [cell(policy, "malleable", load) for policy in MALLEABLE]
        if load in SRPT_LOADS:
            rows.append(cell("srpt", "malleable", load))
        rows.append(cell("hell", "moldable", load))
        rows.append(cell("knee", "moldable", load, {"load": load}))
        rows.append(best_chunk(jobs, seeds, method, load, models))
    return {(found.policy, found.mode, found.load): found for found in rows}


def best_chunk(jobs: int, seeds: int, method: str, load: float, models: str) -> Cell:
    chunks = (
        simulate("jsq-chunk", "chunks", load, method, jobs, seeds, {"chunk": chunk}, models)
        for chunk in CHUNKS
    )
    return min(chunks, key=lambda cell: cell.response_days)


def one_network(jobs: int, seeds: int) -> dict[tuple[str, str, float], Cell]:
    """Figure 1: AlexNet alone, HELL and the best chunk."""
    rows: list[Cell] = []
    for load in LOADS:
        rows.append(simulate("hell", "malleable", load, "hybrid", jobs, seeds, models="alexnet"))
        rows.append(best_chunk(jobs, seeds, "hybrid", load, "alexnet"))
    return {(found.policy, found.mode, found.load): found for found in rows}


def model_rows(command: str) -> list[Row]:
    """The throughput model's published figures."""
    alexnet = TABLE_III["alexnet"]
    step = StepTimes(alexnet.worker_s, 0.0, alexnet.link_s, alexnet.link_s)
    x = throughputs(step, LIMIT_WORKERS)
    days = alexnet.steps(alexnet.epochs) / float(x[1]) / DAY_S
    limit = float(x[-1] / x[1])
    return [
        judged("AlexNet on one node, days", 12, days, "equal", command),
        judged("AlexNet's limit speed-up", 4.8, limit, "equal", command),
    ]


Cells = Mapping[tuple[str, str, float], Cell]


def claims(cells: Cells, title: str, command: str) -> list[Row]:
    """Put section V-B's words and curves about malleable and moldable jobs into numbers."""

    def response_days(what: str, load: float) -> float:
        policy, mode = what.split()
        return cells[policy, mode, load].response_days

    def below(over: str, under: str, loads: tuple[float, ...], goal: str, bound: float) -> Row:
        """`over` and `under`: "policy mode". The load at which their ratio is largest counts."""
        ratios = {load: response_days(over, load) / response_days(under, load) for load in loads}
        worst = max(ratios, key=lambda load: ratios[load])
        beyond = [f"{load}" for load in loads if ratios[load] > bound]
        ours = f"{ratios[worst]:.3f} at load {worst}"
        if goal != "-" and beyond and len(loads) > 1:
            ours += f"; above {bound:g} at {', '.join(beyond)}"
        met = REPORTED if goal == "-" else yes(not beyond)
        span = f"load {loads[0]}" if len(loads) == 1 else f"loads {loads[0]} to {loads[-1]}"
        return Row(f"{over} / {under}, {span}", goal, ours, f"{ratios[worst]:.3f}", met, command)

    rows = [_growth(cells, "hell", 0.7, True, command)]
    rows += [_growth(cells, "srpt", load, load < 0.15, command) for load in SRPT_LOADS]
    hell, knee, jsq = "hell malleable", "knee malleable", "jsq-chunk chunks"
    lower = "lower (published): below 1"
    rows += [
        below(hell, knee, LOW, "similar (published): at most 1.05", 1.05),
        below(hell, knee, MIDDLE, "-", 1.0),
        below(hell, knee, HIGH, lower, 1.0),
        below("knee moldable", "hell moldable", HIGH, lower, 1.0),
    ]
    for over in (hell, knee, "hell moldable", "knee moldable"):
        rows.append(below(over, jsq, LOADS, f"{lower}, of the best chunk", 1.0))
    rows.append(below("equal-share malleable", hell, LOADS, "-", 1.0))
    widest = max(cells.values(), key=lambda cell: cell.half_width_days / cell.response_days)
    part = widest.half_width_days / widest.response_days
    what = f"widest 95 % interval ({widest.policy}, {widest.mode}, load {widest.load})"
    rows.append(Row(what, "below 5 % (published)", f"{part:.1%}", f"{part / 0.05:.2f}",
                    yes(part < 0.05), command))  # fmt: skip
    prefix = title.split(" (")[0] + title.partition(")")[2].removesuffix(" model")
    return [row._replace(what=f"{prefix}: {row.what}") for row in rows]


def _growth(cells: Cells, policy: str, load: float, stable: bool, command: str) -> Row:
    cell = cells[policy, "malleable", load]
    said, ours = ("stable" if is_so else "unstable" for is_so in (stable, cell.stable))
    what, grows = f"{policy}, malleable, load {load}", f"{ours} (grows {cell.growth:.2f}x)"
    return Row(what, f"{said} (published)", grows, "-", yes(stable == cell.stable), command)


def chunk_rows(cells: Cells, command: str) -> list[Row]:
    """HELL against the best chunk, where the other policies were not run."""
    ratios = {
        load: cells["hell", "malleable", load].response_days
        / cells["jsq-chunk", "chunks", load].response_days
        for load in LOADS
    }
    worst = max(ratios, key=lambda load: ratios[load])
    what = f"AlexNet alone: hell malleable / jsq-chunk chunks, loads {LOADS[0]} to {LOADS[-1]}"
    ours = f"{ratios[worst]:.3f} at load {worst}"
    return [Row(what, "lower (published): below 1, of the best chunk", ours,
                f"{ratios[worst]:.3f}", yes(ratios[worst] <= 1), command)]  # fmt: skip


def early_termination_rows(jobs: int, seeds: int, command: str) -> list[Row]:
    """Section VI-B: malleable HELL until jobs are 40 % done."""
    plain, eager = (_until_and_whole_s(gamma, jobs, seeds) for gamma in (0.0, GAMMA))
    rows = []
    for what, published, (until_s, _) in (
        ("gamma 0", "41", plain), (f"gamma {GAMMA}", "26.8", eager),
    ):  # fmt: skip
        rows.append(unlike(f"hours to 40 % of a job, {what}", published, f"{until_s / 3600:.1f}",
                           "load and model unpublished, ours .7 and hybrid", command))  # fmt: skip
    saved = 100 * (1 - eager[0] / plain[0])
    rows.append(judged("hours to 40 % of a job that gamma saves", 35, saved, "more", command,
                       "{:.0f} %"))  # fmt: skip
    longer = eager[1] / plain[1]
    rows.append(Row(f"mean response of whole jobs, gamma {GAMMA} over 0",
                    "longer (published): above 1", f"{longer:.3f}", "-", yes(longer > 1),
                    command))  # fmt: skip
    return rows


def _until_and_whole_s(gamma: float, jobs: int, seeds: int) -> tuple[float, float]:
    """Mean seconds from submission to 40 % of a job, and to its end."""
    options = Options(
        trace=f"generate:lin,load=0.7,jobs={jobs}", policies=("hell",), nodes=NODES,
        gpus_per_node=1, overhead="none", mode="malleable", job_model="queueing",
        settings=("queueing.method=hybrid", f"hell.gamma={gamma}"),
    )  # fmt: skip
    until_s, whole_s = [], []
    for seed in range(seeds):
        work = prepare(options, seed).jobs
        model, policy = build_model(options, seed), build_policy(options, "hell")
        result = Engine(work, build_cluster(options), policy, model).run()
        whole_s += [outcome.end_s - outcome.job.submit_s for outcome in result.outcomes]
        for segment in result.segments:
            job = work[segment.number]
            goal = FRACTION * job.oracle.iterations
            if segment.work_before < goal <= segment.work_after:
                part = (goal - segment.work_before) / (segment.work_after - segment.work_before)
                reached_s = segment.ready_s + part * (segment.end_s - segment.ready_s)
                until_s.append(reached_s - job.submit_s)
    return fmean(until_s), fmean(whole_s)


def markdown(title: str, rows: list[Row]) -> str:
    return "\n".join([f"## {title}", "", *rows_table(rows), "", ""])


def response_table(cells: Cells, title: str) -> str:
    kinds = list(dict.fromkeys((policy, mode) for policy, mode, _ in cells))
    lines = [
        f"## Mean response, days, {title}", "",
        "± is the half width of the 95 % interval over seeds; * unstable.", "",
        "| policy | " + " | ".join(f"load {load}" for load in LOADS) + " |",
        "|---|" + "---|" * len(LOADS),
    ]  # fmt: skip
    for policy, mode in kinds:
        shown = []
        for load in LOADS:
            cell = cells.get((policy, mode, load))
            if cell is None:
                shown.append("-")
                continue
            star = "" if cell.stable else " *"
            note = f" ({cell.note})" if cell.policy == "jsq-chunk" else ""
            shown.append(f"{cell.response_days:.2f} ± {cell.half_width_days:.2f}{star}{note}")
        lines.append(f"| {policy}, {mode} | " + " | ".join(shown) + " |")
    return "\n".join([*lines, "", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("docs/reproduction/lin.md"))
    given = parser.parse_args()
    command = f"{MODULE} --jobs {given.jobs} --seeds {given.seeds}"
    text = "# Lin et al.: common random numbers, queues drained\n\n"
    text += (
        f"{given.jobs} jobs a run, {given.seeds} seeds, {NODES} nodes, resizing is free. Made by\n"
        f"`{command}`;\n"
        "one cell is `loadgen simulate generate:lin,load=0.7,jobs=1000 --policy hell --mode\n"
        "malleable --job-model queueing --nodes 100 --gpus-per-node 1 --overhead none`. Figures\n"
        "1, 12 and 13 have no numbers: the goals are what the text says of them.\n\n"
    )
    text += markdown("Throughput model", model_rows(command))
    runs = [(f"four networks (figures 12a and 13a), {m} model", m, ALL_MODELS) for m in METHODS]
    runs.append(("two large networks (figures 12b and 13b), hybrid model", "hybrid", LARGE_MODELS))
    for title, method, models in runs:
        cells = table(given.jobs, given.seeds, method, models)
        text += markdown(f"What the paper says, {title}", claims(cells, title, command))
        text += response_table(cells, title)
    rows = chunk_rows(one_network(given.jobs, given.seeds), command)
    text += markdown("AlexNet alone (figure 1), hybrid model", rows)
    rows = early_termination_rows(given.jobs, given.seeds, command)
    text += markdown("Early termination (section VI), hybrid model", rows)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    main()
