"""examples/hdbscan.py beside scikit-learn's exact HDBSCAN, on the same points.

A fifth of the points is noise, as in table 4.2 of Qiao 2021. FM is the Fowlkes-Mallows index of
both labellings, each noise point a cluster of its own. Times are from the points to the labels:
ours of the whole program, its processes and libraries included, the other's of the fit alone.

    python benchmarks/hdbscan.py [--points 20000] [--clusters 200] [--dimensions 2,3,5,10]
        [--grows 20000,40000,80000,160000] [--hosts 1] [--json FILE]

`--hosts` of more than one: by `slackwater launch`, on a cluster that is up. `--grows`: more points
of ten clusters and ten dimensions, for the exponent of both times.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, Row, show, write_json

EXAMPLE = Path(__file__).parent.parent / "examples" / "hdbscan.py"
GOAL_FM, GOAL_TIMES, GOAL_SPARED = 0.94, 10.0, 0.25
SMALLEST = 5


@dataclass
class Both:
    fm: float
    clusters: tuple[int, int]
    ours_s: float
    exact_s: float
    spared: float


def both(points: int, clusters: int, dimensions: int, hosts: int) -> Both:
    from sklearn.cluster import HDBSCAN

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.npz"
        given = {
            "POINTS": str(points), "CLUSTERS": str(clusters), "DIMENSIONS": str(dimensions),
            "OUT": str(out),
        }  # fmt: skip
        command = [sys.executable, str(EXAMPLE)]
        if hosts > 1:
            words = [word for name in given for word in ("--env", name)]
            command = ["slackwater", "launch", str(EXAMPLE), "--hosts", f"{hosts}:{hosts}", *words]
        begun_s = time.monotonic()
        done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True)
        ours_s = time.monotonic() - begun_s
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        found = np.load(out)
        begun_s = time.monotonic()
        exact = HDBSCAN(min_cluster_size=SMALLEST, copy=True).fit(found["x"]).labels_
        exact_s = time.monotonic() - begun_s
    ours = found["labels"]
    return Both(
        agreement(ours, exact), (int(exact.max()) + 1, int(ours.max()) + 1), ours_s, exact_s,
        float(found["spared"]),
    )  # fmt: skip


def agreement(first: Any, second: Any) -> float:
    """Return the Fowlkes-Mallows index, each noise point alone."""
    from sklearn.metrics import fowlkes_mallows_score

    return float(fowlkes_mallows_score(_alone(first), _alone(second)))


def _alone(labels: Any) -> Any:
    noise = labels < 0
    return np.where(noise, labels.max() + np.cumsum(noise), labels)


def exponent(sizes: Sequence[int], times_s: Sequence[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(times_s), 1)[0])


def run(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    scores: list[float] = []
    for dimensions in map(int, options.dimensions.split(",")):
        found = both(options.points, options.clusters, dimensions, options.hosts)
        exact, ours = found.clusters
        scores.append(found.fm)
        rows.append(
            Figure(f"{dimensions} dimensions: FM ({exact} clusters exact, {ours} ours)",
                   found.fm, 1.0, "", "the exact tree")
        )  # fmt: skip
        print(
            f"{options.points} points, {dimensions} dimensions: FM {found.fm:.3f}, clusters {exact}"
            f" exact, {ours} ours; {found.ours_s:.1f} s and {found.exact_s:.1f} s; "
            f"{found.spared:.0%} of offers were not sent", flush=True,
        )  # fmt: skip
    rows += [
        Figure("mean FM", statistics.fmean(scores), 1.0, "", "the exact tree", goal=GOAL_FM),
        Figure("offers sent", 1.0 - found.spared, 1.0, "", "without the filter",
               goal=1.0 - GOAL_SPARED, lower_is_better=True),
    ]  # fmt: skip
    sizes = [int(size) for size in options.grows.split(",") if size]
    grown = [both(size, 10, 10, options.hosts) for size in sizes]
    for size, each in zip(sizes, grown, strict=True):
        print(f"{size} points: {each.ours_s:.1f} s and {each.exact_s:.1f} s, FM {each.fm:.3f}")
    if len(sizes) > 1:
        last = grown[-1]
        rows += [
            Figure(f"{sizes[-1]} points of ten dimensions a second", sizes[-1] / last.ours_s,
                   sizes[-1] / last.exact_s, "1/s", "scikit-learn, exact", goal=GOAL_TIMES),
            Figure("exponent of growth", exponent(sizes, [each.ours_s for each in grown]),
                   exponent(sizes, [each.exact_s for each in grown]), "", "scikit-learn, exact",
                   lower_is_better=True),
        ]  # fmt: skip
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--clusters", type=int, default=200)
    parser.add_argument("--dimensions", default="2,3,5,10")
    parser.add_argument("--grows", default="20000,40000,80000,160000")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = run(options)
    show(f"load {os.getloadavg()[0]:.1f}", rows)
    if options.json is not None:
        write_json(options.json, "python benchmarks/hdbscan.py", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
