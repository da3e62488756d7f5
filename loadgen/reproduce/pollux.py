"""Pollux's simulator experiments, rerun: published, ours, ratio (Qiao, thesis, 3.5.2 to 3.5.4).

    python -m slackwater.loadgen.reproduce.pollux [--processes 2] [--only load --only interval ...]

Conditions of the authors' artifact: 16 machines of 4 GPUs, rounds of 60 s, 30 s for each start and
re-allocation, jobs start at a tick. The published figures are the authors' own `summary.json`
files. A results file keeps finished cells, so that an interrupted run goes on where it was.
"""

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from slackwater.common.native import blas_threads
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.jobmodels.applications import Application, read_applications
from slackwater.loadgen.simulator.gpu.jobmodels.profiles import Options, ProfilesModel
from slackwater.loadgen.simulator.gpu.metrics import quantile
from slackwater.loadgen.simulator.gpu.outcome import Outcome as JobOutcome
from slackwater.loadgen.simulator.gpu.outcome import Result, Scaling
from slackwater.loadgen.simulator.gpu.single import simulate_once
from slackwater.loadgen.simulator.gpu.workload import SimJob, workload
from slackwater.loadgen.traces import read

NODES, NODE_GPUS, RESTART_S, ROUND_S = 16, 4, 30.0, 60.0
WORKLOADS = (1, 2, 3, 5, 6)
LOADS = ("0.5", "1.0", "1.5", "2.0")
POLICIES = ("pollux", "tiresias-artifact", "optimus")
INTERVALS = {"30s": 30.0, "1m": 60.0, "2m": 120.0, "4m": 240.0, "8m": 480.0}
FAIRNESS = (1.0, -1.0, -10.0)
SCALERS = ("goodput", "throughput")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation."""

    policy: str
    workload: int = 0
    """0: a single ImageNet job on a cluster that scales."""
    load: str = "1.0"
    interval_s: float = ROUND_S
    interference: float = 0.0
    known: bool = False
    """Throughput models fitted before submission."""
    scaling: str = ""
    options: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def key(self) -> str:
        return msgspec.json.encode(self).decode()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    avg_jct_s: float
    median_jct_s: float
    p99_jct_s: float
    makespan_s: float
    max_fairness: float
    fair_part: float
    """Of all jobs, those with a finish-time fairness below 2."""
    restarts: int
    capacity_gpu_s: float


def simulate(cell: Cell, traces: str) -> Outcome:
    folder = Path(traces) / "pollux"
    applications = _applications(str(folder / "profiles"))
    options = Options(
        adaptive=cell.policy == "pollux",
        report_s=cell.interval_s,
        throughput_only=cell.scaling == "throughput",
        known={name: a.step_times_model() for name, a in applications.items()}
        if cell.known
        else {},
    )
    model = ProfilesModel.of(applications, options)
    result = simulate_once(
        _jobs(cell, folder),
        Cluster([(NODE_GPUS, "")] * NODES, up=1 if cell.scaling else None),
        cell.policy,
        model,
        knobs={"round_s": str(cell.interval_s), **cell.options},
        restart_s=RESTART_S,
        interference=cell.interference,
        scaling=Scaling(1, NODES) if cell.scaling else None,
    )
    return _outcome(result, model)


@cache
def _applications(folder: str) -> dict[str, Application]:
    return read_applications(Path(folder))


def _jobs(cell: Cell, folder: Path) -> list[SimJob]:
    if not cell.workload:
        return [
            SimJob(
                id="imagenet", number=0, submit_s=0.0, gpus=4, duration_s=1.0, gpus_min=4,
                gpus_max=4, model="imagenet", batch_size=200,
            )
        ]  # fmt: skip
    name = "workloads" if cell.load == "1.0" else f"workloads-{cell.load}"
    return workload(read(folder / name / f"workload-{cell.workload}.csv", origin_s=0.0).jobs)


def _outcome(result: Result, model: ProfilesModel) -> Outcome:
    done = result.outcomes
    jcts = sorted(o.end_s - o.job.submit_s for o in done)
    fairness = [_fairness_of(o, done, model) for o in done]
    return Outcome(
        avg_jct_s=sum(jcts) / len(jcts),
        median_jct_s=quantile(jcts, 0.5),
        p99_jct_s=quantile(jcts, 0.99),
        makespan_s=max(o.end_s for o in done) - min(o.job.submit_s for o in done),
        max_fairness=max(fairness),
        fair_part=sum(f < 2 for f in fairness) / len(fairness),
        restarts=sum(o.restarts for o in done),
        capacity_gpu_s=result.capacity_gpu_s,
    )


def _fairness_of(one: JobOutcome, everyone: list[JobOutcome], model: ProfilesModel) -> float:
    """rho: the JCT over that with an equal share of the cluster to itself, the start included.
    The share is 1/N of the GPUs, N the jobs in the system averaged over this one's life."""
    begun, ended = one.job.submit_s, one.end_s
    together = sum(
        max(0.0, min(ended, o.end_s) - max(begun, o.job.submit_s)) for o in everyone
    ) / max(1.0, ended - begun)
    cluster = Cluster([(NODE_GPUS, "")] * NODES).view
    (free,) = model.elastic([one.job])
    share = max(1, min(free.gpus_max, round(NODES * NODE_GPUS / max(1.0, together))))
    return (ended - begun) / (RESTART_S + model.run(one.job, cluster).alone_s(share))


# The experiments ------------------------------------------------------------------------------

Results = Mapping[str, Outcome]
Published = Callable[[str], dict[str, Any]]


def load_cells() -> list[Cell]:
    return [
        Cell(policy=policy, workload=w, load=load)
        for load in LOADS
        for w in WORKLOADS
        for policy in POLICIES
    ]


def load_table(results: Results, published: Published) -> list[str]:
    lines = [
        "## Job load (figure 3.13a)",
        "",
        "Average JCT in seconds, published / ours (ratio), and the best policy by our figures.",
        "",
        "| load | workload | pollux | tiresias-artifact | optimus | best |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for load in LOADS:
        for w in WORKLOADS:
            ours = {
                p: results[Cell(policy=p, workload=w, load=load).key].avg_jct_s for p in POLICIES
            }
            cells = [
                _pair(published(f"results-jobload/{p.split('-')[0]}-{load}"), w, ours[p])
                for p in POLICIES
            ]
            best = min(ours, key=lambda p: ours[p])
            lines.append(f"| {load} | {w} | {' | '.join(cells)} | {best} |")
        means = [
            sum(results[Cell(policy=p, workload=w, load=load).key].avg_jct_s for w in WORKLOADS)
            / len(WORKLOADS)
            for p in POLICIES
        ]
        theirs = [_mean(published(f"results-jobload/{p.split('-')[0]}-{load}")) for p in POLICIES]
        cells = [_ratio(t, o) for t, o in zip(theirs, means, strict=True)]
        lines.append(f"| {load} | mean | {' | '.join(cells)} | |")
    return lines


def interval_cells() -> list[Cell]:
    return [
        Cell(policy="pollux", workload=w, interval_s=s)
        for s in INTERVALS.values()
        for w in WORKLOADS
    ]


def interval_table(results: Results, published: Published) -> list[str]:
    lines = ["## Scheduling interval (figure 3.13b)", "", *_head("interval")]
    for name, seconds in INTERVALS.items():
        ours = [
            results[Cell(policy="pollux", workload=w, interval_s=seconds).key].avg_jct_s
            for w in WORKLOADS
        ]
        lines.append(_row(name, published(f"results-period/pollux-{name}"), ours))
    return lines


def interference_cells() -> list[Cell]:
    cells = [Cell(policy="pollux", workload=w, interference=0.5) for w in WORKLOADS]
    for part in (0.0, 0.25, 0.5):
        cells += [_unavoided(w, part) for w in WORKLOADS]
    return cells


def _unavoided(w: int, part: float) -> Cell:
    options = {"avoid_interference": "false"}
    return Cell(policy="pollux", workload=w, interference=part, options=options)


def interference_table(results: Results, published: Published) -> list[str]:
    lines = ["## Interference (figure 3.13c)", "", *_head("slowdown, avoidance")]
    avoided = [
        results[Cell(policy="pollux", workload=w, interference=0.5).key].avg_jct_s
        for w in WORKLOADS
    ]
    lines.append(_row("any, avoided", published("results-inter/avoid"), avoided))
    for part, name in ((0.0, "noavoid"), (0.25, "inter25"), (0.5, "inter50")):
        ours = [results[_unavoided(w, part).key].avg_jct_s for w in WORKLOADS]
        lines.append(_row(f"{part:.0%}, not avoided", published(f"results-inter/{name}"), ours))
    return lines


def fairness_cells() -> list[Cell]:
    return [_fairness(w, p) for p in FAIRNESS for w in WORKLOADS]


def _fairness(w: int, p: float) -> Cell:
    options = {} if p == -1 else {"p": f"{p:g}"}
    return Cell(policy="pollux", workload=w, options=options)


def fairness_table(results: Results, published: Published) -> list[str]:
    """Table 3.2 is of the testbed; the simulator's fairness is a figure without numbers."""
    testbed = {1.0: "0.83 h, 10 h, 16 h", -1.0: "0.76 h, 11 h, 16 h", -10.0: "0.84 h, 12 h, 18 h"}
    lines = [
        "## Fairness knob (table 3.2, figure 3.12)",
        "",
        "Averages over the workloads. rho is the JCT over that of the job (with the trace's batch) "
        "on an equal share of the cluster of its own, start included; its maximum is the average "
        "of the workloads' maxima. Published as a figure: 99 % of jobs below 2 for p = -1, a tail "
        "above 4 for p = 1 and Tiresias.",
        "",
        "| policy | testbed: JCT, p99, makespan | JCT (h) | p99 (h) | makespan (h) | max rho | "
        "rho < 2 | restarts a job |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    cells = {f"pollux, p = {p:g}": [_fairness(w, p) for w in WORKLOADS] for p in FAIRNESS}
    for policy in POLICIES[1:]:
        cells[policy] = [Cell(policy=policy, workload=w) for w in WORKLOADS]
    for name, runs in cells.items():
        found = [results[cell.key] for cell in runs if cell.key in results]
        if len(found) < len(runs):
            continue
        p = next((p for p in FAIRNESS if name.endswith(f"= {p:g}")), None)
        columns = [
            testbed[p] if p is not None else "",
            *(f"{_average(found, field) / 3600:.2f}" for field in
              ("avg_jct_s", "p99_jct_s", "makespan_s")),
            f"{_average(found, 'max_fairness'):.2f}",
            f"{_average(found, 'fair_part'):.1%}",
            f"{_average(found, 'restarts') / 160:.1f}",
        ]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return lines


def exploration_cells() -> list[Cell]:
    return [Cell(policy="pollux", workload=w, known=k) for k in (False, True) for w in WORKLOADS]


def exploration_table(results: Results, published: Published) -> list[str]:
    explored, known = (
        sum(results[Cell(policy="pollux", workload=w, known=k).key].avg_jct_s for w in WORKLOADS)
        / len(WORKLOADS)
        for k in (False, True)
    )
    return [
        "## Prior-driven exploration (section 3.5.3)",
        "",
        "Published: models fitted before submission shorten the JCT of short jobs by 2-5 %, of "
        f"long ones not at all. Ours: {explored:.0f} s explored, {known:.0f} s known beforehand, "
        f"{1 - known / explored:.1%} less.",
    ]


def autoscaling_cells() -> list[Cell]:
    return [Cell(policy="pollux", scaling=s, options={"scale": "true"}) for s in SCALERS]


def autoscaling_table(results: Results, published: Published) -> list[str]:
    goodput, throughput = (results[cell.key] for cell in autoscaling_cells())
    return [
        "## Cluster auto-scaling (section 3.5.4)",
        "",
        "One ImageNet job, 1 to 16 machines of 4 GPUs, U = 2/3, L = 1/2; against the throughput-"
        "driven scaling of Or et al. (the same rule on agents that take every example for equally "
        "useful). Published are only the ratios.",
        "",
        "| | published | goodput-driven | throughput-driven | ratio |",
        "| --- | --- | --- | --- | --- |",
        f"| cost, GPU-hours | 0.75 | {goodput.capacity_gpu_s / 3600:.0f} | "
        f"{throughput.capacity_gpu_s / 3600:.0f} | "
        f"{goodput.capacity_gpu_s / throughput.capacity_gpu_s:.2f} |",
        f"| completion, h | 1.06 | {goodput.avg_jct_s / 3600:.1f} | "
        f"{throughput.avg_jct_s / 3600:.1f} | {goodput.avg_jct_s / throughput.avg_jct_s:.2f} |",
    ]


EXPERIMENTS: dict[
    str, tuple[Callable[[], list[Cell]], Callable[[Results, Published], list[str]]]
] = {
    "load": (load_cells, load_table),
    "interval": (interval_cells, interval_table),
    "interference": (interference_cells, interference_table),
    "fairness": (fairness_cells, fairness_table),
    "exploration": (exploration_cells, exploration_table),
    "autoscaling": (autoscaling_cells, autoscaling_table),
}


# Tables ---------------------------------------------------------------------------------------


def _average(found: list[Outcome], field: str) -> float:
    values = [float(getattr(outcome, field)) for outcome in found]
    return sum(values) / len(values)


def _mean(summary: dict[str, Any]) -> float:
    """Published, over the workloads that are here."""
    return float(sum(summary["avgs"][f"workload-{w}"] for w in WORKLOADS)) / len(WORKLOADS)


def _ratio(published: float, ours: float) -> str:
    return f"{published:.0f} / {ours:.0f} ({ours / published:.3f})"


def _pair(summary: dict[str, Any], w: int, ours: float) -> str:
    return _ratio(float(summary["avgs"][f"workload-{w}"]), ours)


def _head(first: str) -> list[str]:
    names = " | ".join(f"workload {w}" for w in WORKLOADS)
    return [
        "Average JCT in seconds, published / ours (ratio), Pollux.",
        "",
        f"| {first} | {names} | mean |",
        "| --- |" + " --- |" * (len(WORKLOADS) + 1),
    ]


def _row(name: str, summary: dict[str, Any], ours: list[float]) -> str:
    cells = [_pair(summary, w, value) for w, value in zip(WORKLOADS, ours, strict=True)]
    cells.append(_ratio(_mean(summary), sum(ours) / len(ours)))
    return f"| {name} | {' | '.join(cells)} |"


# Running --------------------------------------------------------------------------------------


def run_cells(
    cells: list[Cell], traces: Path, processes: int, kept: Path | None, console: Console
) -> dict[str, Outcome]:
    """Every cell once; cells in the results file are not run again."""
    results: dict[str, Outcome] = {}
    if kept is not None and kept.exists():
        results = msgspec.json.decode(kept.read_bytes(), type=dict[str, Outcome])
    missing = {cell.key: cell for cell in cells if cell.key not in results}
    os.environ.update(blas_threads.one_each(os.environ))  # Each process is one core's work.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(simulate, cell, str(traces)): cell for cell in missing.values()}
        for done, future in enumerate(as_completed(futures), 1):
            cell = futures[future]
            results[cell.key] = future.result()
            console.print(
                f"{done}/{len(futures)} {cell.policy} workload {cell.workload} load {cell.load} "
                f"{results[cell.key].avg_jct_s:.1f} s"
            )
            if kept is not None:
                kept.write_bytes(msgspec.json.encode(results))
    return results


def main(
    traces: Annotated[Path, typer.Option(envvar="SLACKWATER_TRACES")] = Path("../shared/traces"),
    processes: int = 1,
    only: Annotated[list[str] | None, typer.Option(help="experiments; default: all")] = None,
    results: Annotated[Path | None, typer.Option(help="keeps finished cells")] = None,
    out: Annotated[Path | None, typer.Option(help="the markdown page")] = None,
) -> None:
    chosen = {name: EXPERIMENTS[name] for name in only or EXPERIMENTS}
    console = Console(stderr=True)
    cells = list({c.key: c for list_cells, _ in chosen.values() for c in list_cells()}.values())
    found = run_cells(cells, traces, processes, results, console)

    @cache
    def published(name: str) -> dict[str, Any]:
        path = traces / "pollux" / "published" / f"{name}.json"
        summary: dict[str, Any] = json.loads(path.read_text())
        return summary

    page = [
        "# Pollux: published and ours",
        "",
        "Written by `python -m slackwater.loadgen.reproduce.pollux --out "
        "docs/reproduction/pollux.md`; one experiment: `--only load|interval|interference|fairness|"
        "exploration|autoscaling`.",
        "",
        "Our random choices are not the authors', so equality is not to be expected of Pollux. The "
        "baselines are deterministic: what differs is the order of machines within a placement (a "
        "ring that starts elsewhere or runs backwards was measured a little faster or slower), "
        "and for Tiresias the choice of machines.",
        "",
        "16 machines of 4 GPUs, rounds of 60 s, 30 s for each start and re-allocation; workloads "
        "1, 2, 3, 5, 6 of the authors' eight.",
    ]
    for _, table in chosen.values():
        page += ["", *table(found, published)]
    text = "\n".join(page) + "\n"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    Console(width=200).print(text, markup=False)


if __name__ == "__main__":
    typer.run(main)
