"""The GPU simulator's time in two checkouts, interleaved: has a change made it slower?

    python benchmarks/simulator_revisions.py OLD NEW [--jobs N] [--runs N] [--policy NAME]...

OLD and NEW are roots of checkouts, such as `git worktree add` makes them; this Python runs both. In
turns, each runs `loadgen simulate` on the same trace, drawn by a fixed seed: 100,000 jobs on 64
GPUs at a load above 1, so that thousands wait. Counted are seconds of CPU, less those of a run that
reads the trace and keeps one job of it. Prints the median of the pairs' ratios, and exits with 1
where that is above --limit or where the figures differ.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

GPUS = 64
LIMIT = 1.05
SIZES = (1, 1, 1, 1, 1, 2, 2, 4, 8)


def write_trace(path: Path, jobs: int) -> None:
    """Draw days of jobs: most short and small, a few long, a tenth more than the GPUs can do."""
    rng = Random(1)
    drawn = [
        (rng.choice(SIZES), rng.choice((60, 300, 900, 3600, 14400)) + rng.randrange(600))
        for _ in range(jobs)
    ]
    span_s = sum(gpus * seconds for gpus, seconds in drawn) // GPUS * 10 // 11
    submits = sorted(rng.randrange(span_s + 1) for _ in drawn)
    lines = [
        f"j{number},{at_s},{gpus},{seconds}"
        for number, (at_s, (gpus, seconds)) in enumerate(zip(submits, drawn, strict=True))
    ]
    path.write_text("\n".join(["job_id,submit_s,gpus,duration_s", *lines]) + "\n")


def program(root: Path) -> list[str]:
    """Find `loadgen` by the checkout's own project file: no installed script has to be fresh."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["loadgen"].partition(":")
    start = f"import sys; from {module} import {function}; sys.exit({function}())"
    return [sys.executable, "-c", start]


def simulated(root: Path, trace: Path, policy: str, *more: str) -> tuple[float, dict[str, object]]:
    """Run once in that checkout. Returns seconds of CPU and the figures, which must be equal."""
    began_s = _children_s()
    done = subprocess.run(
        [*program(root), "simulate", trace, "--policy", policy, "--overhead", "none",
         "--nodes", str(GPUS // 8), "--gpus-per-node", "8", "--processes", "1", "--json", *more],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root / "src")}, capture_output=True,
        text=True, check=True, timeout=600,
    )  # fmt: skip
    (figures,) = json.loads(done.stdout)
    del figures["wall_s"]
    return _children_s() - began_s, figures


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compared(old: Path, new: Path, trace: Path, policy: str, runs: int) -> float:
    """Run both in turns, the first one changing. Returns the median ratio of new to old."""
    start_s = {root: simulated(root, trace, policy, "--jobs", "1")[0] for root in (old, new)}
    ratios = []
    for number in range(runs):
        order = (old, new) if number % 2 == 0 else (new, old)
        found = [simulated(root, trace, policy) for root in order]
        (old_s, was), (new_s, now) = found if number % 2 == 0 else found[::-1]
        old_s, new_s = old_s - start_s[old], new_s - start_s[new]
        ratios.append(new_s / old_s)
        if was != now:
            sys.exit(f"{policy}: DIFFERENT figures, old {was}, new {now}")
        print(f"{policy}: old {old_s:.2f} s, new {new_s:.2f} s, ratio {ratios[-1]:.3f}, equal")
    ratio = median(ratios)
    print(f"{policy}: median ratio {ratio:.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"default: {LIMIT}")
    parser.add_argument("--policy", action="append", help="default: tiresias-las and srsf")
    options = parser.parse_args()
    old, new = options.old.resolve(), options.new.resolve()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        write_trace(trace, options.jobs)
        ratios = [
            compared(old, new, trace, policy, options.runs)
            for policy in options.policy or ["tiresias-las", "srsf"]
        ]
    return 1 if max(ratios) > options.limit else 0


if __name__ == "__main__":
    sys.exit(main())
