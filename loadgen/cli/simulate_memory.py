"""`loadgen simulate --pool memory generate:infiniswap`: containers page over a cluster's memory.

`--nodes` are the machines, `--seeds` as many placements of the containers; `disk`, the baseline, is
always run, as everything is compared with it.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from os import cpu_count
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from slackwater.common.base.errors import ConfigRejected
from slackwater.loadgen.cli.runs import writing
from slackwater.loadgen.simulator.memory.eviction import Point, figure
from slackwater.loadgen.simulator.memory.report import Reported, comparison, write_report
from slackwater.loadgen.simulator.memory.run import (
    POLICIES,
    MemoryOutcome,
    MemoryRun,
    MemorySettings,
)
from slackwater.loadgen.simulator.memory.summary import summarize
from slackwater.loadgen.simulator.options import GENERATED, Options, settings_in

WORKLOAD: Final = f"{GENERATED}infiniswap"


def settings_for(options: Options, policy: str) -> MemorySettings:
    return settings_in(MemorySettings, options, "memory", policy, {})


def containers_of(options: Options) -> int:
    """How many the workload's name asks for; 0: as many a machine as the paper has."""
    name, *given = options.trace.split(",")
    if name != WORKLOAD:
        raise ConfigRejected(
            f"--pool memory knows one workload, {WORKLOAD}, and {options.trace!r} is another"
        )
    values = dict(part.partition("=")[::2] for part in given)
    count = values.pop("containers", "0")
    if values or not count.isdigit():
        raise ConfigRejected(
            f"{options.trace!r}: the one option of {WORKLOAD} is containers=NUMBER"
        )
    return int(count)


def simulate_memory(
    options: Options,
    report: Path | None = None,
    processes: int = 0,
) -> tuple[list[Reported], list[Point]]:
    """Run every policy with every seed; write the report, print nothing."""
    unknown = [name for name in options.policies if name not in POLICIES]
    if unknown:
        raise ConfigRejected(f"--policy {unknown[0]}: --pool memory knows {', '.join(POLICIES)}")
    names = tuple(dict.fromkeys(("disk", *options.policies)))
    settings = {name: settings_for(options, name) for name in names}
    count = containers_of(options)
    seeds = range(options.seed, options.seed + options.seeds)
    tasks = [(name, options.nodes, settings[name], seed, count) for seed in seeds for name in names]
    outcomes = _run_all(tasks, min(processes or cpu_count() or 1, len(tasks)))
    runs: list[Reported] = []
    for number, outcome in enumerate(outcomes):
        baseline = outcomes[number - number % len(names)]
        found = summarize(outcome, settings[outcome.policy].seconds, baseline)
        runs.append((outcome, found))
    points = figure(options.seed)
    if report is not None:
        with writing(report):
            write_report(report, options, settings, runs, points)
    return runs, points


def print_memory(
    out: Console,
    runs: Sequence[Reported],
    points: Sequence[Point],
    as_json: bool,
    folder: Path | None,
) -> None:
    summaries = [summary for _, summary in runs]
    if as_json:
        out.out(msgspec.json.encode(summaries).decode(), highlight=False)
        return
    for table in comparison(summaries, points):
        out.print(table)
    if folder is not None:
        out.print(f"report: {folder}", highlight=False)


Task = tuple[str, int, MemorySettings, int, int]


def _run_all(tasks: list[Task], processes: int) -> list[MemoryOutcome]:
    if processes <= 1:
        return [MemoryRun(*task).run() for task in tasks]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        found: list[Any] = list(pool.map(_run_one, tasks))
    return [msgspec.msgpack.decode(each, type=MemoryOutcome) for each in found]


def _run_one(task: Task) -> bytes:
    return msgspec.msgpack.encode(MemoryRun(*task).run())
