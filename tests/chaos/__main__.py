"""`python -m tests.chaos`: faults under load, each run judged by what clients were told."""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from pathlib import Path

import msgspec
import structlog
from tests.chaos import overload, points, soak
from tests.chaos.run import Plan, lines, run

SERVICES = ("master-m1", "controller-c1", "profiler-p1", "worker-w1", "aggregator-a1")
MIXED = (
    *(f"kill:{unit}" for unit in (*SERVICES, "nats")),
    *(f"pause:{unit}" for unit in ("master-m1", "controller-c1", "worker-w1", "nats")),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", default=",".join(MIXED), help="kill:UNIT, pause:UNIT, ...")
    parser.add_argument("--points", action="store_true", help="each failpoint, with each action")
    parser.add_argument("--times", type=int, default=40, help="faults in all, of each in turns")
    parser.add_argument("--rate", type=float, default=60.0, help="submissions a second")
    parser.add_argument("--programs", type=float, default=0.05, help="the part with a program")
    parser.add_argument("--trains", action="store_true", help="two jobs train, to the bit")
    parser.add_argument("--soak", type=float, default=0.0, help="seconds of everyday use instead")
    parser.add_argument("--overload", type=float, default=0.0, help="seconds of 5x what it takes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if options.soak:
        return _soak(options.soak, options.rate, options.seed)
    if options.overload:
        return _overload(options.overload)
    faults, times = tuple(options.faults.split(",")), options.times
    if options.points:
        faults = tuple(points.faults())
        times = len(faults)
    plan = Plan(faults, times, options.rate, options.programs, options.seed, options.trains)
    with tempfile.TemporaryDirectory(prefix="sw-chaos-") as folder:
        report = asyncio.run(run(plan, Path(folder)))
    if options.json:
        told = json.dumps(msgspec.to_builtins(report), indent=2)
    else:
        told = "\n".join(lines(report))
    sys.stdout.write(told + "\n")
    return 1 if report.wrong else 0


def _soak(seconds: float, rate: float, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="sw-chaos-") as folder:
        told = asyncio.run(soak.soak(seconds, rate, Path(folder), seed))
    sys.stdout.write("\n".join(soak.lines(told)) + "\n")
    return 1 if told.wrong else 0


def _overload(seconds: float) -> int:
    told = asyncio.run(overload.overload(seconds, 5.0))
    sys.stdout.write("\n".join(overload.lines(told)) + "\n")
    return 1 if told.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
