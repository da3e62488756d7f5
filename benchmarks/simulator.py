"""The trace-scale simulator: how fast, against what it replaces, with the same results.

    python benchmarks/simulator.py [--traces DIR] [--check] [--quick]

1. 100,000 jobs (Philly tiled, load above 1, over 10,000 waiting at the peak) under tiresias-las:
   seconds of CPU on one core (goal: 30); `--check` repeats it with a program that re-sorts every
   active job at every instant (numpy; minutes) and compares every completion.
2. A re-plan of 10,000 active jobs from a bare snapshot (goal: 100 ms), and with its memory.
3. CPU seconds on traces that public simulators were run on, against their CPU seconds there (which
   we measured once on the same kind of machine; goal: 10x).
"""

import argparse
import os
import sys
from collections.abc import Callable
from math import ceil
from pathlib import Path
from random import Random
from time import process_time

import msgspec
import numpy as np

from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine, Result
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.simulator.gpu.jobmodels.interleaved import InterleavedModel
from slackwater.loadgen.simulator.gpu.metrics import job_figures
from slackwater.loadgen.simulator.gpu.workload import Submission, workload
from slackwater.loadgen.traces import read
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.colocation import Colocated
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.view import JobView, Policy, View

ROOT = Path(__file__).resolve().parent.parent
LIMITS = (3600, 57600)
BIG_JOBS, BIG_GPUS = 100_000, 64

PUBLIC_CPU_S = {
    ("muri/trace3.csv", 64, "srtf"): (0.4, 0.9),
    ("muri/trace3.csv", 64, "tiresias-las"): (0.4, 0.9),
    ("muri/trace3.csv", 64, "tiresias-gittins"): (7.4, 7.4),
    ("muri/trace3.csv", 64, "srsf, co-located"): (36.0, 36.0),
    ("muri/trace1.csv", 128, "srsf"): (1.0, 5.6),
    ("muri/trace1.csv", 128, "tiresias-las"): (1.0, 5.6),
    ("elasticflow-itp/cluster02.csv", 96, "srsf"): (10.0, 14.0),
    ("elasticflow-itp/cluster02.csv", 96, "tiresias-las"): (10.0, 14.0),
}
"""Tiresias' and (co-located) Muri's public simulators: user CPU seconds, from and to, as we
measured them once. No paper has them."""


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    began_s = process_time()
    result = work()
    return result, process_time() - began_s


def tiled(folder: Path, count: int) -> list[Submission]:
    """Philly's first two months, over and over."""
    jobs = read(folder / "philly/philly_gpu_jobs_2017-09_10.csv").jobs
    span_s = jobs[-1].submit_s
    rows = [
        msgspec.structs.replace(row, id=f"{row.id}.{tile}", submit_s=row.submit_s + tile * span_s)
        for tile in range(ceil(count / len(jobs)))
        for row in jobs
    ]
    return workload(rows[:count])


def peak_waiting(result: Result) -> int:
    """Most jobs without GPUs at one instant."""
    steps: list[tuple[float, int]] = []
    for outcome in result.outcomes:
        steps += [(outcome.job.submit_s, 1), (outcome.end_s, -1)]
    for segment in result.segments:
        steps += [(segment.start_s, -1), (segment.end_s, 1)]
    waiting = peak = 0
    for _, change in sorted(steps):
        waiting += change
        peak = max(peak, waiting)
    return peak


def re_sorting(jobs: list[Submission], gpus: int) -> np.ndarray:
    """Completions under tiresias-las by a program that re-sorts every active job every time."""
    size = np.array([j.spec.gpus for j in jobs])
    left = np.array([int(j.oracle.duration_s) for j in jobs])
    attained, ends = np.zeros(len(jobs), int), np.zeros(len(jobs), int)
    running = np.zeros(len(jobs), bool)
    active = np.zeros(0, int)
    now = int(jobs[0].submit_s)
    coming = 0
    while coming < len(jobs) or len(active):
        runs = active[running[active]]
        steps = [int(left[runs].min())] if len(runs) else []
        for limit in LIMITS:
            below = runs[attained[runs] < limit]
            if len(below):
                steps.append(int((-(-(limit - attained[below]) // size[below])).min()))
        if coming < len(jobs):
            steps.append(int(jobs[coming].submit_s) - now)
        step = min(steps)
        now += step
        left[runs] -= step
        attained[runs] += step * size[runs]
        done = runs[left[runs] == 0]
        ends[done] = now
        running[done] = False
        active = active[left[active] > 0]
        first = coming
        while coming < len(jobs) and jobs[coming].submit_s <= now:
            coming += 1
        active = np.concatenate([active, np.arange(first, coming)])
        queue = (attained[active, None] >= np.array(LIMITS)).sum(axis=1)
        order = active[np.lexsort((active, ~running[active], queue))]
        running[active] = False
        running[_fitting(order, size[order], gpus)] = True
    return ends


def _fitting(order: np.ndarray, sizes: np.ndarray, free: int) -> list[int]:
    """Greedy in order, skipping what does not fit."""
    chosen: list[int] = []
    at = 0
    while free and at < len(order):
        sums = np.cumsum(sizes[at:])
        fit = int(np.searchsorted(sums, free, side="right"))
        chosen += order[at : at + fit].tolist()
        free -= int(sums[fit - 1]) if fit else 0
        at += fit
        if free:
            rest = np.flatnonzero(sizes[at:] <= free)
            if not len(rest):
                break
            at += int(rest[0])
    return chosen


def big_run(folder: Path, check: bool, count: int) -> None:
    jobs = tiled(folder, count)
    load = sum(j.spec.gpus * j.oracle.duration_s for j in jobs) / BIG_GPUS / jobs[-1].submit_s
    result, cpu_s = timed(
        Engine(
            jobs, Cluster.counted(BIG_GPUS), make("tiresias-las"), FixedModel(), record=False
        ).run
    )
    recorded = Engine(jobs, Cluster.counted(BIG_GPUS), make("tiresias-las"), FixedModel()).run()
    print(
        f"tiresias-las, {len(jobs):,} jobs on {BIG_GPUS} GPUs: {cpu_s:.1f} s CPU (goal 30), "
        f"load {load:.2f}, peak waiting {peak_waiting(recorded):,}, {result.events:,} events, "
        f"{result.decisions:,} decisions"
    )
    if check:
        began_s = process_time()
        ends = re_sorting(jobs, BIG_GPUS)
        slow_s = process_time() - began_s
        same = all(o.end_s == end for o, end in zip(result.outcomes, ends, strict=True))
        print(
            f"re-sorting reference: {slow_s:.1f} s CPU, {'equal' if same else 'DIFFERENT'} "
            f"completions; ratio {slow_s / cpu_s:.1f}"
        )
        if not same:
            sys.exit(1)


def replan(policy_name: str) -> None:
    """10,000 active jobs, 512 GPUs of which all are held: every decision of a busy cluster."""
    rng = Random(1)
    policy = make(policy_name)
    cluster = Cluster([(8, "")] * 64)
    views: dict[JobId, JobView] = {}
    for number in range(10_000):
        gpus = rng.choice((1, 1, 1, 1, 2, 4, 8))
        views[JobId(f"j{number}")] = JobView(
            id=JobId(f"j{number}"), number=number, submitted_s=number, gpus=gpus, gpus_min=gpus,
            gpus_max=gpus, since_s=number, remaining_s_then=rng.randint(10, 10**5),
            attained_gpu_s_then=rng.choice((0, 100, 5000, 10**5)), first_start_s=number,
        )  # fmt: skip
    view = View(10_000, cluster.view, views, cluster.free)
    plan, _ = policy.allocate(view, None)
    for job_id, allocation in plan.allocations.items():
        views[job_id] = views[job_id].moved(allocation, 10_000)
        for node, gpus in allocation:
            cluster.free[node] -= gpus
    runs = 5
    began_s = process_time()
    for i in range(runs):
        _, memory = policy.allocate(View(10_001 + i, cluster.view, views, cluster.free), None)
    cold_ms = (process_time() - began_s) / runs * 1000
    rounds = 200
    began_s = process_time()
    for i in range(rounds):
        arrived = msgspec.structs.replace(views[JobId(f"j{9_999 - i}")])
        views[arrived.id] = arrived
        view = View(10_010 + i, cluster.view, views, cluster.free, (arrived.id,))
        _, memory = policy.allocate(view, memory)
    warm_ms = (process_time() - began_s) / rounds * 1000
    print(
        f"re-plan of 10,000 active jobs, {policy_name}: {cold_ms:.0f} ms from a bare snapshot "
        f"(goal 100), {warm_ms:.2f} ms with its memory and one "
        f"job changed; ratio {cold_ms / warm_ms:.0f}"
    )


def against_public(folder: Path) -> None:
    for (trace, gpus, name), (low_s, high_s) in PUBLIC_CPU_S.items():
        jobs = workload(read(folder / trace).jobs)
        shared = name.endswith("co-located")
        policy: Policy = make(name.split(",")[0])
        model = InterleavedModel() if shared else FixedModel()
        if shared:
            policy = Colocated(policy)
        engine = Engine(jobs, Cluster.counted(gpus), policy, model, record=False)
        result, cpu_s = timed(engine.run)
        average_s = sum(f.jct_s for f in job_figures(result, gpus)) / len(jobs)
        print(
            f"{trace} {name}: {cpu_s:.2f} s CPU, public simulator {low_s}-{high_s} s: "
            f"{low_s / cpu_s:.0f}x-{high_s / cpu_s:.0f}x faster; average JCT {average_s:,.0f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("SLACKWATER_TRACES", ROOT.parent / "shared" / "traces")
    parser.add_argument("--traces", type=Path, default=Path(default))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a tenth of the jobs")
    options = parser.parse_args()
    for policy in ("tiresias-las", "tiresias-gittins", "srsf"):
        replan(policy)
    if not options.traces.is_dir():
        print(f"no traces at {options.traces}: set SLACKWATER_TRACES for the other figures")
        return
    big_run(options.traces, options.check, BIG_JOBS // 10 if options.quick else BIG_JOBS)
    against_public(options.traces)


if __name__ == "__main__":
    main()
