"""Tiresias' experiments (Gu, dissertation, chapter III), rerun: published, ours, ratio, command.

    python -m slackwater.loadgen.reproduce.tiresias [--traces DIR] [--out FILE] [--only NAME]

Sections: public simulators' averages, equal to the integer second; 2DAS and co-location against the
same simulators; tables 3.1 and 3.6 and section 3.5.4 on a week of Philly; the testbed's workload. A
row's command gives that row alone. The exit code is not 0 if a public simulator's figure is missed.

The paper's trace is not public. What is published of it stands beside a week of another extract of
the same clusters, on as many GPUs as make it busy.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from slackwater.loadgen.reproduce import tiresias_sensitivity as sensitivity
from slackwater.loadgen.reproduce import tiresias_testbed as testbed
from slackwater.loadgen.reproduce.simulated import Given, Run, simulate
from slackwater.loadgen.reproduce.tiresias_sensitivity import PHILLY, WEEK
from slackwater.loadgen.reproduce.verdict import (
    MISSED,
    REPORTED,
    Better,
    Row,
    judged,
    table,
    yes,
)

ROOT = Path(__file__).resolve().parent.parent.parent

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
    ("tiresias/60_job.csv", 128): {"fifo": (178, 368), "best-effort": (178, 368)},
}  # fmt: skip
"""Average and p95 JCT in whole seconds, GPUs only counted: what Tiresias' public simulator and its
fork print. No paper has these figures: we ran the programs."""

LOOP: Final = {
    ("elasticflow-itp/cluster03.csv", 160): {
        "fifo": (280_338, 832_683), "best-effort": (230_598, 706_770),
        "srtf": (46_234, 148_118), "srsf": (44_728, 138_634),
    },
    (PHILLY, 512): {
        "fifo": (14_417, 33_320), "best-effort": (13_466, 31_377), "srtf": (7_788, 14_877),
        "srsf": (7_734, 14_877),
    },
}  # fmt: skip
"""The same by a second program of our own, which decides at every instant anew: a check of this
simulator against itself, on traces that the public ones were not run on."""

TABLE_3_1: Final = {"sf": (1.52, 1.20, 3.45), "srtf": (1.03, 1.01, 1.55)}
"""Average, median and p95 JCT over those of SRSF."""
TABLE_3_6: Final[dict[str, tuple[tuple[float, float, float], Better]]] = {
    "fifo": ((2.41, 30.85, 1.25), "more"), "best-effort": ((1.50, 9.03, 1.08), "more"),
    "srtf": ((1.00, 1.00, 0.84), "more"), "gandiva": ((2.00, 2.59, 2.08), "more"),
    "tiresias-gittins": ((0.97, 1.00, 0.85), "less"),
}  # fmt: skip
"""The same over those of Tiresias-L, and what is better for Tiresias."""


def equal(label: str, found: Run, theirs: tuple[int, int], source: str) -> Row:
    ours = (round(found.summary.avg_jct_s), round(found.summary.p95_jct_s))
    return Row(
        label, f"{theirs[0]:,} / {theirs[1]:,} ({source})", f"{ours[0]:,} / {ours[1]:,}",
        f"{ours[0] / theirs[0]:.4f}", yes(ours == theirs), found.command,
    )  # fmt: skip


def at_most(label: str, ours: float, bound: float, source: str, command: str) -> Row:
    form = ",.0f" if bound > 100 else ".2f"
    return Row(
        label, f"at most {bound:{form}} ({source})", f"{ours:{form}}", f"{ours / bound:.3f}",
        yes(ours <= bound), command,
    )  # fmt: skip


def exact_tables(traces: Path) -> Iterator[Row]:
    """Average / p95 JCT (s), equal to the integer second"""
    for figures, source in ((TABLE, "public simulator, run by us"), (LOOP, "own second program")):
        for (path, gpus), policies in figures.items():
            span: Given = WEEK if path == PHILLY else {}
            for policy, theirs in policies.items():
                found = simulate(
                    policy,
                    {
                        "trace": str(traces / path), "nodes": 1, "gpus_per_node": gpus,
                        "overhead": "none", **span,
                    },
                )  # fmt: skip
                name = "Philly week" if path == PHILLY else path
                yield equal(f"{name}, {gpus} GPUs, {policy}", found, theirs, source)


def two_dimensional(traces: Path) -> Iterator[Row]:
    """Tiresias (2DAS) and co-location against public simulators"""
    source = "Tiresias' simulator, limits 3250 and 7200, run by us"
    for path, gpus, average_s, preemptions in (
        ("elasticflow-itp/cluster02.csv", 96, 37_197, 0.84),
        ("muri/trace3.csv", 64, 315_223, 1.32),
    ):
        world: Given = {
            "trace": str(traces / path), "nodes": 1, "gpus_per_node": gpus, "overhead": "none",
        }  # fmt: skip
        las, _, command = simulate("tiresias-las", world)
        label = f"{path}, tiresias-las (limits 3600 and 57600)"
        yield at_most(f"{label}, average JCT (s)", las.avg_jct_s, average_s, source, command)
        per_job = las.preemptions / las.jobs
        yield at_most(f"{label}, preemptions a job", per_job, preemptions, source, command)
        gittins, _, command = simulate("tiresias-gittins", world)
        yield Row(
            f"{path}, tiresias-gittins over tiresias-las, average JCT: its index orders the "
            "waiting jobs of one queue, or it is LAS",
            "-", f"{gittins.avg_jct_s / las.avg_jct_s:.3f}", "-", REPORTED, command,
        )  # fmt: skip
    source = "Muri's simulator with its start costs, srsf, 8 machines of 8, run by us"
    trace = str(traces / "muri/trace3.csv")
    for policy in ("srsf", "srtf"):
        found = simulate(
            policy,
            {
                "trace": trace, "nodes": 8, "gpus_per_node": 8, "start_s": 30, "restart_s": 30,
                "colocate": 3,
            },
        )  # fmt: skip
        label = f"trace3, co-located, {policy}, 30 s a start, average JCT (s)"
        yield at_most(label, found.summary.avg_jct_s, 83_242, source, found.command)
    for policy in ("srsf", "srtf", "tiresias-las", "tiresias-gittins"):
        found = simulate(
            policy,
            {
                "trace": trace, "nodes": 1, "gpus_per_node": 64, "overhead": "none", "colocate": 3,
            },
        )  # fmt: skip
        label = f"trace3, co-located, {policy}, starts and places free, average JCT (s)"
        yield Row(label, "-", f"{found.summary.avg_jct_s:,.0f}", "-", REPORTED, found.command)


def philly_week(traces: Path) -> Iterator[Row]:
    """Tables 3.1 and 3.6, on a week of Philly (2017-10-09..15) and 432 GPUs"""
    found = {
        policy: simulate(policy, {"trace": str(traces / PHILLY), **sensitivity.WORLD})
        for policy in ("srsf", "tiresias-las", *TABLE_3_1, *TABLE_3_6)
    }
    kinds: tuple[tuple[str, dict[str, tuple[tuple[float, float, float], Better]]], ...] = (
        ("srsf", {policy: (figures, "more") for policy, figures in TABLE_3_1.items()}),
        ("tiresias-las", TABLE_3_6),
    )
    for base, rows in kinds:
        for policy, (figures, better) in rows.items():
            for name, field, published in zip(
                ("average", "median", "p95"), ("avg_jct_s", "median_jct_s", "p95_jct_s"), figures,
                strict=True,
            ):  # fmt: skip
                ours, over = (getattr(found[p].summary, field) for p in (policy, base))
                yield judged(f"{policy} / {base}, {name} JCT", published, ours / over, better,
                             found[policy].command)  # fmt: skip


SECTIONS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "exact": exact_tables,
    "tiresias": two_dimensional,
    "philly": philly_week,
    "sensitivity": sensitivity.rows,
    "testbed": testbed.rows,
}
"""Name -> section. The first line of its docstring is its heading."""
OURS: Final = ("exact", "tiresias")
"""Sections whose figures are those of programs that were run on the same traces."""


def markdown(traces: Path, names: list[str]) -> Iterator[tuple[str, list[str]]]:
    for name in names:
        section = SECTIONS[name]
        heading = (section.__doc__ or name).splitlines()[0]
        yield name, [f"## {heading}", "", *table(list(section(traces))), ""]


HEAD: Final = (
    "# Tiresias, co-location, a week of Philly", "",
    "Written by `python -m slackwater.loadgen.reproduce.tiresias --out",
    "docs/reproduction/tiresias.md`. A published figure is met if ours is on its better side or",
    "within 5 % of it. The paper's trace is not public: the week of Philly is another extract of",
    "the same clusters, and 432 GPUs are our choice. Starts are free, as in the paper's",
    "simulator, unless a row says otherwise.", "",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Tiresias' experiments, rerun.")
    default = os.environ.get("SLACKWATER_TRACES", ROOT.parent / "shared" / "traces")
    parser.add_argument("--traces", type=Path, default=Path(default))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", action="append", choices=sorted(SECTIONS))
    options = parser.parse_args()
    if not options.traces.is_dir():
        sys.stderr.write(f"no traces at {options.traces}; set SLACKWATER_TRACES\n")
        return 2
    lines, failed = list(HEAD), False
    for name, section in markdown(options.traces, options.only or list(SECTIONS)):
        sys.stdout.write("\n".join(section) + "\n")
        sys.stdout.flush()
        lines += section
        failed |= name in OURS and any(f"| {MISSED} |" in line for line in section)
    if options.out is not None:
        options.out.write_text("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
