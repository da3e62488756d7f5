"""Rows of Pollux's page: what the thesis and the artifact publish beside our simulations.

Numbers of section 3.5.2 are those of a testbed, the others of the authors' simulator. Testbed hours
have no verdict here; what Pollux saves over a baseline has one, whichever it was measured on.
"""

from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import Any, Final

from slackwater.loadgen.reproduce.pollux_cells import (
    FAIRNESS,
    INTERVALS,
    LOADS,
    POLICIES,
    RESTART_S,
    WORKLOADS,
    Cell,
    Outcome,
    autoscaling_cells,
    fair,
    unavoided,
)
from slackwater.loadgen.reproduce.verdict import Better, Row, is_met, judged, unlike, yes

Results = Mapping[str, Outcome]
Published = Callable[[str], dict[str, Any]]
"""Name of one of the artifact's summaries -> its content."""

MODULE: Final = "python -m slackwater.loadgen.reproduce.pollux --only"
TESTBED: Final = "their testbed, our simulation"
POLLUX: Final = [fair(w, -1) for w in WORKLOADS]
TUNED: Final = {p: [Cell(policy=p, workload=w) for w in WORKLOADS] for p in POLICIES[1:]}
REALISTIC: Final = {
    p: [Cell(policy=p, workload=w, load="realistic") for w in WORKLOADS] for p in POLICIES[1:]
}
FIELDS: Final = ("avg_jct_s", "p99_jct_s", "makespan_s")
SHORT_NAMES: Final = ("average JCT", "99th percentile of JCT", "makespan")

TABLE_3_2: Final = (
    ("pollux, p = -1", POLLUX, "0.76, 11, 16"),
    ("optimus with an oracle, tuned jobs", TUNED["optimus"], "1.5, 15, 20"),
    ("tiresias-artifact, tuned jobs", TUNED["tiresias-artifact"], "1.2, 15, 24"),
    ("optimus with an oracle, realistic jobs", REALISTIC["optimus"], "2.7, 22, 28"),
    ("tiresias-artifact, realistic jobs", REALISTIC["tiresias-artifact"], "2.8, 25, 31"),
    ("pollux, p = 1", [fair(w, 1) for w in WORKLOADS], "0.83, 10, 16"),
    ("pollux, p = -10", [fair(w, -10) for w in WORKLOADS], "0.84, 12, 18"),
)
"""Configuration, its simulations, and the testbed's average and p99 JCT and makespan in hours."""

SAVED: Final = (
    ("optimus, tuned jobs", TUNED["optimus"], (50, 27, 20)),
    ("tiresias-artifact, tuned jobs", TUNED["tiresias-artifact"], (37, 27, 33)),
    ("optimus, realistic jobs", REALISTIC["optimus"], (72, 50, 43)),
    ("tiresias-artifact, realistic jobs", REALISTIC["tiresias-artifact"], (73, 56, 48)),
)
"""Baseline, its simulations, and by how many per cent Pollux is below it on the testbed."""
SAVED_SIMULATED: Final = {"optimus": 48, "tiresias-artifact": 32}
"""The same for the average JCT of tuned jobs in the authors' simulator (section 3.5.3)."""


def average(results: Results, cells: list[Cell], field: str) -> float:
    return fmean(float(getattr(results[cell.key], field)) for cell in cells)


def mean(summary: dict[str, Any]) -> float:
    """Published, over the workloads that are here."""
    return fmean(float(summary["avgs"][f"workload-{w}"]) for w in WORKLOADS)


def load_rows(results: Results, published: Published) -> Iterator[Row]:
    """Each load and policy by the workload that is furthest off; then who is best."""
    command = f"{MODULE} load"
    ours = {
        (policy, load, w): results[Cell(policy=policy, workload=w, load=load).key].avg_jct_s
        for policy in POLICIES for load in LOADS for w in WORKLOADS
    }  # fmt: skip
    for policy in POLICIES:
        for load in LOADS:
            theirs = published(f"results-jobload/{policy.split('-')[0]}-{load}")["avgs"]
            ratios = {w: ours[policy, load, w] / theirs[f"workload-{w}"] for w in WORKLOADS}
            better: Better = "less" if policy == "pollux" else "equal"
            w = max(ratios, key=lambda w: abs(ratios[w] - 1) if better == "equal" else ratios[w])
            side = "within 5 %" if better == "equal" else "at most 5 % longer"
            yield Row(
                f"average JCT (s), load {load}, {policy}, workload {w} (of five the furthest off)",
                f"{theirs[f'workload-{w}']:,.0f} (published), {side}",
                f"{ours[policy, load, w]:,.0f}", f"{ratios[w]:.3f}",
                yes(is_met(1.0, ratios[w], better)), command,
            )  # fmt: skip
    cells = [{p: ours[p, load, w] for p in POLICIES} for load in LOADS for w in WORKLOADS]
    best = [cell["pollux"] == min(cell.values()) for cell in cells]
    yield _counted("pollux best, five workloads at four loads", best, "cells", command)
    ahead = [ours["tiresias-artifact", "1.0", w] < ours["optimus", "1.0", w] for w in WORKLOADS]
    yield _counted("tiresias-artifact before optimus, load 1.0", ahead, "workloads", command)
    pollux = average(results, POLLUX, "avg_jct_s")
    for policy, saved in SAVED_SIMULATED.items():
        found = 100 * (1 - pollux / average(results, TUNED[policy], "avg_jct_s"))
        yield judged(f"average JCT below {policy}'s, their simulator", saved, found, "more",
                     command, "{:.1f} %")  # fmt: skip


def _counted(what: str, hold: list[bool], unit: str, command: str) -> Row:
    ours, count = sum(hold), len(hold)
    return Row(
        what, f"{count} {unit} (published)", f"{ours} {unit}", f"{ours / count:.2f}",
        yes(ours == count), command,
    )  # fmt: skip


def interval_rows(results: Results, published: Published) -> Iterator[Row]:
    for name, seconds in INTERVALS.items():
        cells = [Cell(policy="pollux", workload=w, interval_s=seconds) for w in WORKLOADS]
        theirs, ours = (
            mean(published(f"results-period/pollux-{name}")),
            average(results, cells, "avg_jct_s"),
        )
        what = f"pollux every {name}, average JCT (s)"
        yield judged(what, theirs, ours, "less", f"{MODULE} interval", "{:,.0f}")


def interference_rows(results: Results, published: Published) -> Iterator[Row]:
    command = f"{MODULE} interference"
    avoided = [Cell(policy="pollux", workload=w, interference=0.5) for w in WORKLOADS]
    kinds = [("any, avoided", "avoid", avoided)]
    for part, name in ((0.0, "noavoid"), (0.25, "inter25"), (0.5, "inter50")):
        kinds.append((f"{part:.0%}, not avoided", name, [unavoided(w, part) for w in WORKLOADS]))
    for what, name, cells in kinds:
        yield judged(
            f"interference {what}, average JCT (s)", mean(published(f"results-inter/{name}")),
            average(results, cells, "avg_jct_s"), "less", command, "{:,.0f}",
        )  # fmt: skip
    longer = average(results, kinds[-1][2], "avg_jct_s") / average(results, avoided, "avg_jct_s")
    what = "average JCT, interference of 50 %, not avoided over avoided"
    yield judged(what, 1.4, longer, "equal", command)


def fairness_rows(results: Results, published: Published) -> Iterator[Row]:
    """Table 3.2's tuned rows and figure 3.12."""
    command = f"{MODULE} fairness"
    names = {f"pollux, p = {p:g}" for p in FAIRNESS}
    yield from _hours(results, command, lambda name: name in names or "tuned" in name)
    yield from _saved(results, command, "tuned")
    below = 100 * average(results, POLLUX, "fair_part")
    yield judged("jobs with rho below 2, p = -1", 99, below, "more", command, "{:.1f} %",
                 tolerance=0.0)  # fmt: skip
    pollux = average(results, POLLUX, "max_fairness")
    for policy, times in (("optimus", 1.5), ("tiresias-artifact", 5.4)):
        found = average(results, TUNED[policy], "max_fairness") / pollux
        yield judged(
            f"largest rho, {policy} over pollux", times, found, "equal", command, "{:.2f}x"
        )


def realistic_rows(results: Results, published: Published) -> Iterator[Row]:
    """Table 3.2's baselines as ordinary users configure their jobs."""
    command = f"{MODULE} realistic"
    yield from _hours(results, command, lambda name: "realistic" in name)
    yield from _saved(results, command, "realistic")


def _hours(results: Results, command: str, chosen: Callable[[str], bool]) -> Iterator[Row]:
    for name, cells, testbed in TABLE_3_2:
        if chosen(name):
            hours = (average(results, cells, field) / 3600 for field in FIELDS)
            what = f"{name}: average and p99 JCT, makespan (h)"
            yield unlike(what, testbed, ", ".join(f"{h:.2f}" for h in hours), TESTBED, command)


def _saved(results: Results, command: str, jobs: str) -> Iterator[Row]:
    for baseline, cells, percents in SAVED:
        for field, name, percent in zip(FIELDS, SHORT_NAMES, percents, strict=True):
            if jobs in baseline:
                ours, base = (average(results, c, field) for c in (POLLUX, cells))
                yield judged(f"{name}: pollux below {baseline}, their testbed", percent,
                             100 * (1 - ours / base), "more", command, "{:.1f} %")  # fmt: skip


def exploration_rows(results: Results, published: Published) -> Iterator[Row]:
    """Show what models known beforehand spare a job, and what re-allocations cost."""
    command = f"{MODULE} exploration"
    explored, known = (
        [Cell(policy="pollux", workload=w, known=k) for w in WORKLOADS] for k in (False, True)
    )

    def spared(application: str) -> float:
        first, second = (
            fmean(
                found[application]
                for cell in cells
                if application in (found := results[cell.key].application_jct_s)
            )
            for cells in (explored, known)
        )
        return 100 * (1 - second / first)

    short, long = spared("cifar10"), spared("imagenet")
    yield Row("JCT spared by known models, cifar10", "2 to 5 % (published)", f"{short:.1f} %", "-",
              yes(2 <= short <= 5), command)  # fmt: skip
    goal = "no significant change (published): within 2 %"
    yield Row("JCT spared by known models, imagenet", goal, f"{long:.1f} %", "-",
              yes(abs(long) <= 2), command)  # fmt: skip
    run_s, restarts = (average(results, explored, field) for field in ("run_s", "restarts"))
    yield unlike("a job is re-allocated every (min)", "7", f"{run_s / restarts / 60:.1f}", TESTBED,
                 command)  # fmt: skip
    yield unlike("part of the run time that re-allocations take", "8 %",
                 f"{RESTART_S * restarts / run_s:.1%}", TESTBED, command)  # fmt: skip


def autoscaling_rows(results: Results, published: Published) -> Iterator[Row]:
    goodput, throughput = (results[cell.key] for cell in autoscaling_cells())
    for what, figure, field in (
        ("cost", 0.75, "capacity_gpu_s"), ("completion", 1.06, "avg_jct_s"),
    ):  # fmt: skip
        ours = getattr(goodput, field) / getattr(throughput, field)
        yield judged(f"auto-scaling, {what}, goodput- over throughput-driven", figure, ours, "less",
                     f"{MODULE} autoscaling")  # fmt: skip
