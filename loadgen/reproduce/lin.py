"""Lin et al. (2018), sections III and V-B, on their own workload: published, ours, ratio.

    python -m slackwater.loadgen.reproduce.lin [--jobs N] [--seeds N] [--out FILE]

100 nodes; table III's jobs with Poisson arrivals; equal seeds draw equal jobs at every load and
under every policy (common random numbers); each run goes on until the queue is drained. JSQ-Chunk
is run with every chunk size from 7 to 40 that no other dominates and reported at its best, as the
paper does; moldable KNEE knows the load, as the paper's does.

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
from slackwater.loadgen.simulator.gpu.engine import Engine
from slackwater.loadgen.simulator.gpu.options import (
    Options,
    build_cluster,
    build_model,
    build_policy,
    prepare,
)
from slackwater.loadgen.simulator.gpu.runner import Task, run

NODES: Final = 100
LOADS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
SRPT_LOADS: Final = (0.1, 0.2, 0.3)
METHODS: Final = ("exact", "hybrid")
CHUNKS: Final = (7, 8, 9, 10, 11, 12, 14, 16, 20, 25, 33, 40)
STABLE_GROWTH: Final = 1.6
DAY_S: Final = 86_400.0
LIMIT_WORKERS: Final = 10_000
GAMMA: Final = 1.05
FRACTION: Final = 0.4


class Cell(msgspec.Struct):
    """One policy at one load: means over seeds."""

    policy: str
    mode: str
    load: float
    method: str
    response_days: float
    half_width_days: float
    """Of the 95 % confidence interval over seeds (normal)."""
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
    knobs: Mapping[str, float] = MappingProxyType({}),
) -> Cell:
    settings = [f"{policy}.{name}={value}" for name, value in knobs.items()]
    options = Options(
        trace=f"generate:lin,load={load},jobs={jobs}", policies=(policy,), nodes=NODES,
        gpus_per_node=1, overhead="none", mode="moldable" if mode == "moldable" else "malleable",
        job_model="queueing", settings=(f"queueing.method={method}", *settings),
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


def table(jobs: int, seeds: int, method: str) -> dict[tuple[str, str, float], Cell]:
    """(policy, mode, load) -> cell."""
    cells: dict[tuple[str, str, float], Cell] = {}
    for load in LOADS:
        rows = [
            simulate(policy, "malleable", load, method, jobs, seeds)
            for policy in ("hell", "knee", "waterfill", "equal-share")
        ]
        if load in SRPT_LOADS:
            rows.append(simulate("srpt", "malleable", load, method, jobs, seeds))
        rows.append(simulate("hell", "moldable", load, method, jobs, seeds))
        rows.append(simulate("knee", "moldable", load, method, jobs, seeds, {"load": load}))
        chunks = [
            simulate("jsq-chunk", "chunks", load, method, jobs, seeds, {"chunk": chunk})
            for chunk in CHUNKS
        ]
        rows.append(min(chunks, key=lambda cell: cell.response_days))
        cells |= {(cell.policy, cell.mode, load): cell for cell in rows}
    return cells


Row = tuple[str, str, str, str]


def model_rows() -> list[Row]:
    """The throughput model's published figures."""
    alexnet = TABLE_III["alexnet"]
    step = StepTimes(alexnet.worker_s, 0.0, alexnet.link_s, alexnet.link_s)
    x = throughputs(step, LIMIT_WORKERS)
    days = alexnet.steps(alexnet.epochs) / float(x[1]) / DAY_S
    limit = float(x[-1] / x[1])
    return [
        ("AlexNet on one node, days", "12", f"{days:.2f}", f"{days / 12:.3f}"),
        ("AlexNet's limit speed-up", "4.8", f"{limit:.2f}", f"{limit / 4.8:.3f}"),
    ]


def claims(cells: dict[tuple[str, str, float], Cell]) -> list[Row]:
    """What section V-B says in words or curves, as numbers."""

    def days(policy: str, mode: str, load: float) -> float:
        return cells[policy, mode, load].response_days

    def growth(policy: str, load: float) -> str:
        cell = cells[policy, "malleable", load]
        return f"{'stable' if cell.stable else 'unstable'} (grows {cell.growth:.2f}x)"

    rows: list[Row] = [
        ("srpt, load .1", "stable", growth("srpt", 0.1), "-"),
        ("srpt, load .2", "unstable", growth("srpt", 0.2), "-"),
        ("srpt, load .3", "unstable", growth("srpt", 0.3), "-"),
        ("hell with filling, load .7", "stable", growth("hell", 0.7), "-"),
    ]
    for load in LOADS:
        ratio = days("hell", "malleable", load) / days("knee", "malleable", load)
        said = "similar (at most 1.05)" if load <= 0.3 else "hell lower" if load == 0.7 else "-"
        rows.append((f"hell / knee, malleable, load {load}", said, f"{ratio:.3f}", f"{ratio:.3f}"))
    ratio = days("knee", "moldable", 0.7) / days("hell", "moldable", 0.7)
    rows.append(("knee / hell, moldable, load 0.7", "below 1", f"{ratio:.3f}", f"{ratio:.3f}"))
    for load in LOADS[1:]:
        ratio = days("hell", "malleable", load) / days("jsq-chunk", "chunks", load)
        said = f"{ratio:.3f}"
        rows.append((f"hell / best-chunk jsq, load {load}", "below 1", said, said))
    return rows


def early_termination_rows(jobs: int, seeds: int) -> list[Row]:
    """Section VI-B: malleable HELL until jobs are 40 % done. The paper's load is unstated: .7."""
    plain, eager = (fmean(_until_s(gamma, jobs, seeds)) / 3600 for gamma in (0.0, GAMMA))
    return [
        ("hours to 40 % of a job, gamma 0", "41", f"{plain:.1f}", f"{plain / 41:.2f}"),
        (f"the same, gamma {GAMMA}", "26.8", f"{eager:.1f}", f"{eager / 26.8:.2f}"),
        (
            "what gamma saves",
            "35 %",
            f"{1 - eager / plain:.0%}",
            f"{(1 - eager / plain) / 0.35:.2f}",
        ),
    ]


def _until_s(gamma: float, jobs: int, seeds: int) -> list[float]:
    options = Options(
        trace=f"generate:lin,load=0.7,jobs={jobs}", policies=("hell",), nodes=NODES,
        gpus_per_node=1, overhead="none", mode="malleable", job_model="queueing",
        settings=("queueing.method=hybrid", f"hell.gamma={gamma}"),
    )  # fmt: skip
    times_s = []
    for seed in range(seeds):
        work = prepare(options, seed).jobs
        model, policy = build_model(options, seed), build_policy(options, "hell")
        result = Engine(work, build_cluster(options), policy, model).run()
        for segment in result.segments:
            job = work[segment.number]
            goal = FRACTION * job.iterations
            if segment.work_before < goal <= segment.work_after:
                part = (goal - segment.work_before) / (segment.work_after - segment.work_before)
                reached_s = segment.ready_s + part * (segment.end_s - segment.ready_s)
                times_s.append(reached_s - job.submit_s)
    return times_s


def markdown(title: str, rows: list[Row]) -> str:
    lines = [f"## {title}", "", "| figure | published | ours | ratio |", "|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), "", ""])


def response_table(cells: dict[tuple[str, str, float], Cell], method: str) -> str:
    kinds = list(dict.fromkeys((policy, mode) for policy, mode, _ in cells))
    lines = [
        f"## Mean response, days, {method} model", "",
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
    text = "# Lin et al. (2018)\n\n"
    text += (
        f"{given.jobs} jobs a run, {given.seeds} seeds, {NODES} nodes. Made by\n"
        f"`python -m slackwater.loadgen.reproduce.lin --jobs {given.jobs} --seeds {given.seeds}`;\n"
        "one cell is `loadgen simulate generate:lin,load=0.7,jobs=1000 --policy hell --mode\n"
        "malleable --job-model queueing --nodes 100 --gpus-per-node 1 --overhead none`.\n\n"
    )
    text += markdown("Throughput model", model_rows())
    for method in METHODS:
        cells = table(given.jobs, given.seeds, method)
        text += markdown(f"What the paper says, {method} model", claims(cells))
        text += response_table(cells, method)
    rows = early_termination_rows(given.jobs, given.seeds)
    text += markdown("Early termination, hybrid model", rows)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    main()
