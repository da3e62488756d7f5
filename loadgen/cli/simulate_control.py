"""`loadgen simulate --pool control generate:fleet`: what a fleet asks of each service.

`--nodes` are machines with `--gpus-per-node` GPUs each, `--policy` gives the GPUs. Jobs come at
`control.submitted_s` a second.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.limits import JOBS_MAX, WORKER_NODES_MAX
from slackwater.loadgen.cli.runs import bars, writing
from slackwater.loadgen.simulator.control.report import (
    ControlSummary,
    summarize,
    tables,
    write_report,
)
from slackwater.loadgen.simulator.control.scale import ControlSettings, simulate_control
from slackwater.loadgen.simulator.options import GENERATED, Options, settings_in
from slackwater.services.master.scheduling.registry import make

WORKLOAD: Final = f"{GENERATED}fleet"
JOBS: Final = 1000


def jobs_of(options: Options) -> int:
    """Return how many jobs the workload's name asks for. Raises ConfigRejected."""
    name, *given = options.trace.split(",")
    if name != WORKLOAD:
        raise ConfigRejected(
            f"--pool control knows one workload, {WORKLOAD}, and {options.trace!r} is another"
        )
    values = dict(part.partition("=")[::2] for part in given)
    count = values.pop("jobs", str(JOBS))
    if values or not count.isdigit() or not 1 <= int(count) <= JOBS_MAX:
        raise ConfigRejected(
            f"{options.trace!r}: the one option of {WORKLOAD} is jobs=NUMBER, from 1 to {JOBS_MAX}"
        )
    return int(count)


def simulate_fleet(
    options: Options, report: Path | None = None, as_json: bool = False
) -> list[ControlSummary]:
    """Run every policy; write the report, print nothing but how far it is."""
    jobs = jobs_of(options)
    if options.nodes > WORKER_NODES_MAX:
        raise ConfigRejected(f"--nodes {options.nodes}: a master knows at most {WORKER_NODES_MAX}")
    settings = {
        name: settings_in(ControlSettings, options, "control", name, {})
        for name in options.policies
    }
    for name in options.policies:
        make(name)  # Refused before anything is simulated.
    with bars(options.policies, jobs, not as_json) as tick:
        outcomes = [
            simulate_control(
                name, options.seed, options.nodes, options.gpus_per_node, jobs, settings[name],
                partial(tick, number) if tick is not None else None,
            )
            for number, name in enumerate(options.policies)
        ]  # fmt: skip
    summaries = [summarize(each) for each in outcomes]
    if report is not None:
        with writing(report):
            write_report(report, options, outcomes, summaries)
    return summaries


def print_fleet(
    out: Console, summaries: Sequence[ControlSummary], as_json: bool, folder: Path | None
) -> None:
    if as_json:
        out.out(msgspec.json.encode(list(summaries)).decode(), highlight=False)
        return
    for table in tables(summaries):
        out.print(table)
    if folder is not None:
        out.print(f"report: {folder}", highlight=False)
