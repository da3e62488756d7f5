"""`python -m tests.mutants`: do the tests notice a change of what matters most?

A sample of changes, drawn by a seed, is made one at a time in a copy of the checkout, and the unit
tests of the module's folder are run there until one fails, then simulations of the whole system. A
change that none notices has survived. It is to be killed by a better test, or listed in
survivors.toml with the reason why no test can: it changes nothing that anybody sees.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.mutants.changes import Change, changes

ROOT: Final = Path(__file__).parents[2]
KILLED_PART: Final = 0.9
TIME_LIMIT_S: Final = 300.0
"""A change that makes the tests run for so long is killed: they would not end."""
UNIT: Final = "tests/unit"
CRITICAL: Final[dict[tuple[str, ...], tuple[str, ...]]] = {
    (
        "services/master/core.py", "services/master/lifecycle.py", "services/master/pool.py",
        "services/master/jobs.py", "services/master/rerun.py", "services/master/ended.py",
        "services/master/rank_restarts.py", "services/master/cluster_assignment.py",
        "services/master/usage.py", "services/master/orphans.py",
    ): (f"{UNIT}/services/master",),
    (
        "services/controller/core.py", "services/controller/migrations.py",
        "services/controller/reconcile.py", "services/controller/assignment.py",
        "services/controller/hosting.py", "services/controller/drains.py",
    ): (f"{UNIT}/services/controller",),
    (
        "services/aggregator/bucket.py", "services/aggregator/ledger.py",
        "services/aggregator/core.py", "services/aggregator/migration.py",
    ): (f"{UNIT}/services/aggregator",),
    (
        "common/shell/steps.py", "common/shell/persister.py", "common/shell/recovery.py",
        "common/shell/known.py", "common/shell/marker.py", "common/shell/fencing.py",
    ): (f"{UNIT}/common/shell", f"{UNIT}/common/store/test_witness.py"),
    ("common/store/witness.py", "common/store/witness_file.py"): (
        f"{UNIT}/common/store/test_witness.py", f"{UNIT}/common/shell",
    ),
    ("common/domains/slots/consistency.py", "common/domains/slots/region.py"): (
        f"{UNIT}/common/domains/slots",
    ),
}  # fmt: skip
"""Modules -> the tests that are to notice a change of theirs."""
SIMULATIONS: Final = tuple(
    f"tests/sim/test_{name}.py"
    for name in (
        "control_plane",
        "late_exits",
        "data_plane",
        "saving",
        "standing_in",
        "whole_system",
    )
)
"""Run where the unit tests notice nothing."""


def sample(rng: random.Random, count: int) -> list[tuple[Change, tuple[str, ...]]]:
    """Draw so many changes, the same number of each group of modules."""
    found = []
    for modules, tests in CRITICAL.items():
        all_of = [each for module in modules for each in changes(module, _read(module))]
        drawn = rng.sample(all_of, min(len(all_of), -(-count // len(CRITICAL))))
        found += [(change, tests) for change in drawn]
    return found[:count]


def _read(module: str) -> str:
    return (ROOT / module).read_text()


def survives(change: Change, tests: tuple[str, ...], copy: Path) -> bool:
    """Make the change in `copy` and run the tests there, then the simulations."""
    path = copy / change.module
    source = path.read_text()
    path.write_text(change.applied(source))
    try:
        return _pass(tests, copy) and _pass(SIMULATIONS, copy)
    finally:
        path.write_text(source)


def _pass(tests: tuple[str, ...], copy: Path) -> bool:
    command = [
        sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
        "-m", "not slow and not nightly and not live", *tests,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=TIME_LIMIT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == 0


def copied(folder: Path) -> Path:
    """Copy what tests need of the checkout."""
    copy = folder / "checkout"
    skipped = shutil.ignore_patterns(".git", ".venv*", "reports", "__pycache__", "build")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=skipped)
    return copy


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--named", default="", help="only changes of the sample named so, in part")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    excused = tomllib.loads((Path(__file__).parent / "survivors.toml").read_text())
    drawn = sample(random.Random(options.seed), options.count)
    drawn = [each for each in drawn if options.named in each[0].name]
    survivors: list[Change] = []
    with tempfile.TemporaryDirectory(prefix="sw-mutants-") as folder:
        copies = [copied(Path(folder) / str(n)) for n in range(options.processes)]

        def judge(one: tuple[Change, tuple[str, ...]]) -> bool:
            copy = copies.pop()
            try:
                return survives(*one, copy)
            finally:
                copies.append(copy)

        with ThreadPoolExecutor(options.processes) as pool:
            for number, ((change, _), alive) in enumerate(
                zip(drawn, pool.map(judge, drawn), strict=True), 1
            ):
                excuse = excused.get(change.name, "")
                if alive and not excuse:
                    survivors.append(change)
                verdict = "excused" if alive and excuse else "SURVIVED" if alive else "killed"
                sys.stdout.write(f"{number:3} {verdict:8} {change.name} (line {change.line})\n")
                sys.stdout.flush()
    killed = 1.0 - len(survivors) / max(1, len(drawn))
    sys.stdout.write(f"{killed:.0%} of {len(drawn)} noticed; at least {KILLED_PART:.0%}\n")
    return 0 if killed >= KILLED_PART else 1


if __name__ == "__main__":
    sys.exit(main())
