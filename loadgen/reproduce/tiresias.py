"""Tiresias' comparisons (section 3.5.3) on public traces, rerun: published, ours, ratio, command.

    python -m slackwater.loadgen.reproduce.tiresias [--traces DIR] [--out FILE] [--only NAME]

Three sections: the published simulators' tables, equal to the integer second; 2DAS and co-location
against the same simulators; a week of Philly. A row's command gives that row alone. The exit code
is not 0 if a bound is missed.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from slackwater.loadgen.simulator.gpu.metrics import Summary
from slackwater.loadgen.simulator.gpu.options import Options
from slackwater.loadgen.simulator.gpu.runner import Task, run

ROOT = Path(__file__).resolve().parent.parent.parent


class Row(NamedTuple):
    what: str
    published: str
    ours: str
    ratio: str
    verdict: str
    command: str


def simulate(**given: object) -> tuple[Summary, str]:
    """One policy on one trace, and the command that does the same."""
    options = Options(**given)  # type: ignore[arg-type]  # names are checked by the struct
    words = ["loadgen simulate", Path(options.trace).name, f"--policy {options.policies[0]}"]
    for name, value in given.items():
        if name == "settings":
            words += [f"--set {text}" for text in options.settings]
        elif name not in ("trace", "policies"):
            words.append(f"--{name.replace('_', '-')} {value}")
    return run(Task(0, options, options.policies[0], options.seed)).summary, " ".join(words)


TABLE = {
    ("muri/trace3.csv", 64): {
        "fifo": (991_167, 1_479_578), "best-effort": (480_105, 1_130_456),
        "srtf": (180_116, 779_704), "srsf": (172_684, 600_008),
    },
    ("muri/trace1.csv", 128): {
        "fifo": (2_993_895, 3_669_383), "best-effort": (2_041_980, 3_724_502),
        "srtf": (496_099, 4_382_231), "srsf": (395_634, 2_059_940),
    },
    ("elasticflow-itp/cluster02.csv", 96): {
        "fifo": (498_311, 1_001_331), "best-effort": (150_317, 486_589),
        "srtf": (29_092, 114_904), "srsf": (27_915, 109_625),
    },
    ("elasticflow-itp/cluster03.csv", 160): {
        "fifo": (280_338, 832_683), "best-effort": (230_598, 706_770),
        "srtf": (46_234, 148_118), "srsf": (44_728, 138_634),
    },
    ("tiresias/60_job.csv", 128): {"fifo": (178, 368), "best-effort": (178, 368)},
}  # fmt: skip
"""Average and p95 JCT in whole seconds, GPUs only counted (Tiresias' simulator and its fork)."""

PHILLY = "philly/philly_gpu_jobs_2017-09_10.csv"
PHILLY_512 = {
    "fifo": (14_417, 33_320), "best-effort": (13_466, 31_377), "srtf": (7_788, 14_877),
    "srsf": (7_734, 14_877),
}  # fmt: skip


def equal(label: str, summary: Summary, published: tuple[int, int], command: str) -> Row:
    ours = (round(summary.avg_jct_s), round(summary.p95_jct_s))
    return Row(
        label, f"{published[0]:,} / {published[1]:,}", f"{ours[0]:,} / {ours[1]:,}",
        f"{ours[0] / published[0]:.4f}", "equal" if ours == published else "DIFFERENT", command,
    )  # fmt: skip


def at_most(label: str, ours: float, bound: float, command: str, unit: str = " s") -> Row:
    verdict = "within" if ours <= bound else "MISSED"
    form = ",.0f" if bound > 100 else ".2f"
    return Row(
        label, f"<= {bound:{form}}{unit}", f"{ours:{form}}{unit}", f"{ours / bound:.3f}", verdict,
        command,
    )  # fmt: skip


def exact_tables(traces: Path) -> Iterator[Row]:
    """Average / p95 JCT, equal to the integer second"""
    for (path, gpus), policies in TABLE.items():
        for policy, published in policies.items():
            summary, command = simulate(
                trace=str(traces / path), policies=(policy,), nodes=1, gpus_per_node=gpus,
                overhead="none",
            )  # fmt: skip
            yield equal(f"{path}, {gpus} GPUs, {policy}", summary, published, command)
    for policy, published in PHILLY_512.items():
        summary, command = simulate(
            trace=str(traces / PHILLY), policies=(policy,), nodes=1, gpus_per_node=512,
            overhead="none", start="2017-10-09", end="2017-10-16",
        )  # fmt: skip
        yield equal(f"Philly week, 512 GPUs, {policy}", summary, published, command)


def two_dimensional(traces: Path) -> Iterator[Row]:
    """Tiresias (2DAS) and co-location against the published simulators"""
    for path, gpus, published, preemptions in (
        ("elasticflow-itp/cluster02.csv", 96, 37_197, 0.84),
        ("muri/trace3.csv", 64, 315_223, 1.32),
    ):
        world = {
            "trace": str(traces / path), "nodes": 1, "gpus_per_node": gpus, "overhead": "none",
        }  # fmt: skip
        las, command = simulate(policies=("tiresias-las",), **world)
        yield at_most(f"{path}, tiresias-las", las.avg_jct_s, published, command)
        per_job = las.preemptions / las.jobs
        yield at_most(f"{path}, tiresias-las, preemptions/job", per_job, preemptions, command, "")
        gittins, command = simulate(policies=("tiresias-gittins",), **world)
        label = f"{path}, tiresias-gittins against 1.01 x las"
        yield at_most(label, gittins.avg_jct_s, 1.01 * las.avg_jct_s, command)
    for policy in ("srsf", "srtf", "tiresias-las", "tiresias-gittins"):
        shared, command = simulate(
            trace=str(traces / "muri/trace3.csv"), policies=(policy,), nodes=1, gpus_per_node=64,
            overhead="none", colocate=3,
        )  # fmt: skip
        label = f"trace3, co-located, {policy}"
        if policy in ("srsf", "srtf"):
            yield at_most(label, shared.avg_jct_s, 83_242, command)
        else:
            ours = f"{shared.avg_jct_s:,.0f} s"
            yield Row(label, "(durations unknown to it)", ours, "", "reported", command)


def philly_week(traces: Path) -> Iterator[Row]:
    """A week of Philly (2017-10-09..15) on 432 GPUs"""
    found: dict[str, Summary] = {}
    commands: dict[str, str] = {}
    for policy in (
        "fifo", "best-effort", "sf", "srtf", "srsf", "gandiva", "tiresias-las", "tiresias-gittins",
    ):  # fmt: skip
        found[policy], commands[policy] = simulate(
            trace=str(traces / PHILLY), policies=(policy,), nodes=1, gpus_per_node=432,
            overhead="none", start="2017-10-09", end="2017-10-16",
        )  # fmt: skip
    las, fifo = found["tiresias-las"], found["fifo"]

    def ratio(label: str, wanted: str, value: float, good: bool, policy: str) -> Row:
        verdict = "within" if good else "MISSED"
        return Row(label, wanted, f"{value:.2f}", "", verdict, commands[policy])

    average = fifo.avg_jct_s / las.avg_jct_s
    median = fifo.median_jct_s / las.median_jct_s
    srtf = las.avg_jct_s / found["srtf"].avg_jct_s
    yield ratio("fifo / tiresias-las, average", ">= 3 (paper: 2.41)", average, average >= 3, "fifo")
    yield ratio("fifo / tiresias-las, median", ">= 10 (paper: 30.85)", median, median >= 10, "fifo")
    yield ratio("tiresias-las / srtf, average", "<= 1.10 (paper: 1.00)", srtf, srtf <= 1.1, "srtf")
    lowest = found["srsf"].avg_jct_s < min(found[p].avg_jct_s for p in ("srtf", "sf"))
    for policy in ("sf", "srtf"):
        value = found[policy].avg_jct_s / found["srsf"].avg_jct_s
        paper = {"sf": 1.52, "srtf": 1.03}[policy]
        yield ratio(f"{policy} / srsf, average", f"> 1 (paper: {paper})", value, lowest, policy)
    for policy, paper in (("best-effort", 1.50), ("gandiva", 2.00), ("tiresias-gittins", 0.97)):
        value = found[policy].avg_jct_s / las.avg_jct_s
        yield Row(
            f"{policy} / tiresias-las, average", f"paper: {paper} (another trace)",
            f"{value:.2f}", "", "reported", commands[policy],
        )  # fmt: skip


SECTIONS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "exact": exact_tables,
    "tiresias": two_dimensional,
    "philly": philly_week,
}
"""Name -> section. The first line of its docstring is its heading."""


def markdown(traces: Path, names: list[str]) -> Iterator[str]:
    for name in names:
        section = SECTIONS[name]
        yield f"## {(section.__doc__ or name).splitlines()[0]}"
        yield ""
        yield "| what | published or bound | ours | ratio | verdict | command |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for row in section(traces):
            yield f"| {' | '.join(row[:5])} | `{row.command}` |"
        yield ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Tiresias' comparisons on public traces, rerun.")
    default = os.environ.get("SLACKWATER_TRACES", ROOT.parent / "shared" / "traces")
    parser.add_argument("--traces", type=Path, default=Path(default))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", action="append", choices=sorted(SECTIONS))
    options = parser.parse_args()
    if not options.traces.is_dir():
        sys.stderr.write(f"no traces at {options.traces}; set SLACKWATER_TRACES\n")
        return 2
    lines = []
    for line in markdown(options.traces, options.only or list(SECTIONS)):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        lines.append(line)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")
    return int(any("| MISSED |" in line or "| DIFFERENT |" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
