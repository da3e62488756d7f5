"""Harmony against isolated and naively co-located jobs (Lee, dissertation, section 4.4.3).

    python -m slackwater.loadgen.reproduce.harmony [--seeds N] [--out FILE]

100 machines, the 80 documented jobs, all submitted at once. Isolated: 16 machines a job, first
come, first served. Naive co-location tries several combinations of jobs and ways of sharing; the
paper reports mean, best and worst of all. Regrouping is free, as in the paper's simulations (there:
below 2 % of the makespan); a column shows it at 60 s for every move.
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import Final

from slackwater.loadgen.simulator.gpu.options import Options
from slackwater.loadgen.simulator.gpu.runner import Task, run

MACHINES: Final = 100
SEEDS: Final = 5
NAIVE: Final = tuple((ways, stride) for ways in (2, 3) for stride in (1, 2, 3, 5))
MOVE_S: Final = 60.0


def simulate(
    policy: str, seed: int, settings: tuple[str, ...] = (), restart_s: float = 0.0
) -> tuple[float, float]:
    """(average JCT, makespan)."""
    options = Options(
        trace="generate:harmony", policies=(policy,), nodes=MACHINES, gpus_per_node=1,
        overhead="full" if restart_s else "none", restart_s=restart_s, job_model="subtasks",
        mode="malleable" if policy == "harmony" else "rigid", settings=settings,
    )  # fmt: skip
    summary = run(Task(0, options, policy, seed)).summary
    return summary.avg_jct_s, summary.makespan_s


def speedups(seed: int) -> dict[str, tuple[float, float]]:
    """Over isolated: JCT and makespan."""
    base = simulate("isolated", seed)

    def over(found: tuple[float, float]) -> tuple[float, float]:
        return base[0] / found[0], base[1] / found[1]

    naive = [
        over(
            simulate(
                "naive-colocation", seed,
                (f"naive-colocation.ways={ways}", f"naive-colocation.stride={stride}"),
            )
        )
        for ways, stride in NAIVE
    ]  # fmt: skip
    return {
        "harmony": over(simulate("harmony", seed)),
        "harmony, n_G untuned": over(simulate("harmony", seed, ("harmony.tune=false",))),
        "harmony, 60 s a move": over(simulate("harmony", seed, (), MOVE_S)),
        "naive, mean": (fmean(j for j, _ in naive), fmean(m for _, m in naive)),
        "naive, best": (max(j for j, _ in naive), max(m for _, m in naive)),
        "naive, worst": (min(j for j, _ in naive), min(m for _, m in naive)),
    }


PUBLISHED: Final = {"harmony": (2.11, 1.60), "naive, mean": (1.11, 1.09)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("docs/reproduction/harmony.md"))
    given = parser.parse_args()
    found = [speedups(seed) for seed in range(given.seeds)]
    lines = [
        "# Harmony (Lee, dissertation, chapter 4)", "",
        f"80 jobs on {MACHINES} machines, speed-up over isolated (16 machines a job, FIFO), seeds",
        f"0 to {given.seeds - 1}. Made by",
        "`python -m slackwater.loadgen.reproduce.harmony`; a run is",
        "`loadgen simulate generate:harmony --policy harmony --mode malleable --job-model subtasks",
        "--nodes 100 --gpus-per-node 1 --overhead none --seed 0`.", "",
        "| figure | published | ours (mean) | ratio | by seed |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name in found[0]:
        for index, what in enumerate(("JCT", "makespan")):
            values = [speedup[name][index] for speedup in found]
            ours = fmean(values)
            published = PUBLISHED[name][index] if name in PUBLISHED else None
            lines.append(
                f"| {name}: {what} | {published or '-'} | {ours:.2f} | "
                f"{f'{ours / published:.2f}' if published else '-'} | "
                f"{', '.join(f'{value:.2f}' for value in values)} |"
            )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
