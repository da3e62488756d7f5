"""Record what the simulator decides: digests of its event logs, case by case.

    python -m tests.sim.decisions.record                    compare with digests.json
    python -m tests.sim.decisions.record --rewrite          write digests.json anew
    python -m tests.sim.decisions.record --logs DIR CASE... keep the logs, to compare two checkouts

The program is driven by its command line alone, so that what lies behind it may be rebuilt. Runs
depend on neither the clock nor the order of sets or files.
"""

# ruff: noqa: T201
import argparse
import json
import sys
from collections.abc import Sequence
from hashlib import sha256
from math import exp, log
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, Final

import numpy as np
from tests.conftest import ROOT, public_traces
from tests.sim.decisions.cases import CASES, Case
from tests.sim.decisions.inputs import write_inputs
from typer.testing import CliRunner

from slackwater.loadgen.cli.commands import app

DIGESTS: Final = Path(__file__).with_name("digests.json")
FIGURES: Final = (
    "avg_jct_s", "makespan_s", "gpu_utilization", "wasted_gpu_s", "preemptions", "restarts",
    "failures",
)  # fmt: skip
MARKED_EVENTS: Final = 200
"""Slices of a log of which each has a mark of its own, to find the first that differs."""
MARK: Final = 3
"""Hexadecimal digits."""

Record = dict[str, Any]
"""One case as it is kept. Each run holds `events` (the log's SHA-256), `audit`, figures, marks."""


def record(name: str, inputs: Path, report: Path) -> Record:
    """Simulate the case and digest its report, which stays in `report`."""
    case = CASES[name]
    _invoke("simulate", *words(case, inputs), "--report", str(report), "--processes", "1")
    audits = json.loads(_invoke("audit", str(report), "--json"))
    summaries, counts = (
        json.loads((report / name).read_bytes()) for name in ("summary.json", "counts.json")
    )
    runs = {}
    for policy, summary, counted in zip(case.policies, summaries, counts, strict=True):
        assert summary["policy"] == counted["policy"] == policy
        log_name = f"events-{policy}.json"
        found = {**summary, **counted}
        slices = slices_of(report, policy)
        runs[policy] = {
            "events": sha256((report / log_name).read_bytes()).hexdigest(),
            "audit": audits[log_name],
            "slices": len(slices),
            **{figure: found[figure] for figure in FIGURES},
            "marks": "".join(map(mark, slices[:MARKED_EVENTS])),
        }
    tables = [report / each for each in ("jobs.csv", "bins.csv", "why.json")]
    digest = sha256(b"".join(path.read_bytes() for path in tables if path.exists()))
    return {"tables": digest.hexdigest(), "runs": runs}


def words(case: Case, inputs: Path) -> list[str]:
    """Give the case's command line, with its policies."""
    places = {"inputs": inputs, "root": ROOT, "traces": public_traces()}
    given = [word.format(**places) for word in case.words.split()]
    return [*given, *(word for policy in case.policies for word in ("--policy", policy))]


def slices_of(report: Path, policy: str) -> list[dict[str, Any]]:
    """Read the log's slices: a job on a machine from one instant until another."""
    events = json.loads((report / f"events-{policy}.json").read_bytes())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def mark(event: dict[str, Any]) -> str:
    return sha256(json.dumps(event, sort_keys=True).encode()).hexdigest()[:MARK]


def differences(name: str, was: Record, now: Record, report: Path) -> list[str]:
    """Say what differs from the record, each run's first differing event with its second."""
    found = []
    for policy in sorted({*was["runs"], *now["runs"]}):
        before, after = was["runs"].get(policy), now["runs"].get(policy)
        if before is None or after is None:
            found.append(f"{name}, {policy}: {'not recorded' if before is None else 'not run'}")
        elif before != after:
            changed = [
                f"{key} {before[key]} -> {after[key]}"
                for key in after
                if key not in ("events", "marks") and before[key] != after[key]
            ]
            first = _first(before["marks"], slices_of(report, policy))
            found.append(f"{name}, {policy}: {first}; {', '.join(changed) or 'figures are equal'}")
    if was["tables"] != now["tables"] and not found:
        found.append(f"{name}: events are equal, and jobs.csv, bins.csv or why.json differs")
    return found


def _first(marks: str, slices: list[dict[str, Any]]) -> str:
    recorded = [marks[i : i + MARK] for i in range(0, len(marks), MARK)]
    for number, (was, event) in enumerate(zip(recorded, slices, strict=False)):
        if was != mark(event):
            facts = event["args"]
            return (
                f"differs first in slice {number}, from {facts['start_s']} s: {event['name']} on "
                f"n{event['pid'] - 1} {json.dumps(facts)}"
            )
    both = min(len(recorded), len(slices))
    return f"the first {both} slices are equal, the log differs elsewhere or later"


def _invoke(*given: str) -> str:
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, f"loadgen {' '.join(given)}: {done.output} {done.exception!r}"
    return done.stdout


def arithmetic() -> str:
    """Digest how this machine rounds: libm, vector units, linear algebra, Python's own sum.

    Where it differs, fitted models differ in their last digits, and so do decisions after a while.
    """
    values = [0.1 + 0.37 * i for i in range(200)]
    grid = np.array(values)
    matrix = np.outer(np.sin(grid[:40]), np.cos(grid[:40])) + np.eye(40)
    parts = [
        repr([(exp(-x), log(x), x**1.37, x**-0.21) for x in values]),
        repr(sum(values)),
        np.exp(-grid).tobytes().hex(),
        np.log(grid).tobytes().hex(),
        np.power(grid, 1.37).tobytes().hex(),
        np.linalg.solve(matrix, grid[:40]).tobytes().hex(),
        repr(float(grid.sum())),
    ]
    return sha256("".join(parts).encode()).hexdigest()[:16]


def read_digests() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DIGESTS.read_bytes())
    return found


def write_digests(cases: dict[str, Record], rounding: str) -> None:
    kept = {"arithmetic": rounding, "cases": dict(sorted(cases.items()))}
    DIGESTS.write_text(json.dumps(kept, indent=1) + "\n")


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: every case")
    parser.add_argument("--rewrite", action="store_true", help="write digests.json anew")
    parser.add_argument("--logs", type=Path, help="keep the reports in this folder")
    options = parser.parse_args(given)
    kept, rounding = {}, ""
    if DIGESTS.exists():
        found = read_digests()
        kept = {name: was for name, was in found["cases"].items() if name in CASES}
        rounding = found["arithmetic"]
    fitted = any(CASES[name].fitted for name in options.cases or CASES)
    if options.rewrite and options.cases and fitted and rounding not in ("", arithmetic()):
        parser.error("this machine rounds otherwise than the recorded one: rewrite every case")
    failed = 0
    with TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs"
        inputs.mkdir()
        write_inputs(inputs)
        for name in options.cases or CASES:
            if CASES[name].recorded and not public_traces().is_dir():
                print(f"{name}: left out, folder {public_traces()} is missing")
                continue
            began_s = process_time()
            report = (options.logs or Path(folder)) / name
            now = record(name, inputs, report)
            print(f"{name}: {len(now['runs'])} logs in {process_time() - began_s:.1f} s of CPU")
            if options.rewrite:
                kept[name] = now
            elif name not in kept:
                failed += 1
                print(f"{name}: not recorded; run with --rewrite")
            else:
                changes = differences(name, kept[name], now, report)
                failed += bool(changes)
                print("\n".join(changes), end="\n" if changes else "")
    if options.rewrite:
        write_digests(kept, arithmetic() if fitted else rounding)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
