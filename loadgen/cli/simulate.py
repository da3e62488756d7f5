"""`loadgen simulate` and `loadgen audit`: options in, a table and a report folder out.

`simulate(options)` is the plain function; `app` holds the two commands for the command line to
mount. Expected errors are one line on stderr and an exit code.
"""

import logging
import re
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_type_hints

import msgspec
import structlog
import typer
from rich.console import Console
from rich.table import Table

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected, Rejected, SlackwaterError
from slackwater.loadgen.cli.runs import bars, writing
from slackwater.loadgen.simulator.gpu import audit as auditor
from slackwater.loadgen.simulator.gpu import eventlog
from slackwater.loadgen.simulator.gpu.build import refuse_ignored
from slackwater.loadgen.simulator.gpu.metrics import Summary
from slackwater.loadgen.simulator.gpu.prepare import (
    prepare,
    read_trace,
    refuse_without_stages,
    selected,
)
from slackwater.loadgen.simulator.gpu.report import confidence, write_report
from slackwater.loadgen.simulator.gpu.runner import RunReport, run_all, tasks_of
from slackwater.loadgen.simulator.options import PRESETS, Options
from slackwater.loadgen.traces import read
from slackwater.services.master.scheduling import registry

DATA_ERROR: Final = 65
USAGE: Final = 2
FAILED: Final = 1
DEFAULT_POLICY: Final = "tiresias-las"

_SEEDS_MAX: Final = limits.TRACE_SEEDS_MAX
_PROCESSES_MAX: Final = 1024
PIPE_COLUMNS: Final = 160
"""Width of a table that goes to a file or a pipe."""

app = typer.Typer(no_args_is_help=True, add_completion=False)


def simulate(
    options: Options,
    report: Path | None = None,
    as_json: bool = False,
    processes: int = 0,
    progress: bool = True,
) -> int:
    """Run every policy (with every seed), print the comparison, write the report."""
    _refuse_slips(options, report)
    prepared = prepare(options, options.seed)
    refuse_ignored(options, prepared.jobs)
    refuse_without_stages(options, prepared.jobs)
    if report is not None:
        _begin(report)
    tasks = tasks_of(options, report)
    names = [f"{task.policy} #{task.seed}" for task in tasks]
    with bars(names, len(prepared.jobs), progress and not as_json) as tick:
        flat = run_all(tasks, processes, tick, {options.seed: prepared.jobs})
    reports = [flat[i : i + options.seeds] for i in range(0, len(flat), options.seeds)]
    if report is not None:
        with writing(report):
            write_report(report, options, prepared, reports)
    _print(reports, as_json, report)
    for note in prepared.notes:
        said = Console(stderr=True, soft_wrap=True) if as_json else _console()
        said.print(f"note: {note}", highlight=False, markup=False)
    return 0


def _refuse_slips(options: Options, report: Path | None) -> None:
    if options.why_at and report is None:
        raise ConfigRejected("--why-at writes to the report: add --report DIR, or leave it out")
    if len(set(options.policies)) < len(options.policies):
        raise ConfigRejected(f"a policy is named twice: {', '.join(options.policies)}")
    for name in options.policies:
        registry.options_of(name)


def _begin(report: Path) -> None:
    """Write to the folder before the runs: a full run is too late to find out."""
    with writing(report):
        (report / "summary.json").write_bytes(b"")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def _print(reports: list[list[RunReport]], as_json: bool, folder: Path | None) -> None:
    out = _console()
    if as_json:
        summaries = [runs[0].summary.published() for runs in reports]
        out.out(msgspec.json.encode(summaries).decode(), highlight=False)
        return
    out.print(comparison(reports))
    if len(reports[0]) > 1:
        out.print(_intervals(reports))
    if folder is not None:
        out.print(f"report: {folder}", highlight=False)


def comparison(reports: list[list[RunReport]]) -> Table:
    best = min(runs[0].summary.avg_jct_s for runs in reports)
    table = Table(title="Policies compared (times in seconds)")
    table.add_column("policy")
    for name in (
        "jobs", "avg JCT", "/ best", "median", "p95", "p99", "makespan", "queueing", "GPU use",
        "preempt/job", "max FTF", "wall s",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for runs in reports:
        s: Summary = runs[0].summary
        table.add_row(
            s.policy, f"{s.completed}/{s.jobs}", f"{s.avg_jct_s:,.0f}",
            f"{s.avg_jct_s / max(best, 1e-9):.2f}", f"{s.median_jct_s:,.0f}", f"{s.p95_jct_s:,.0f}",
            f"{s.p99_jct_s:,.0f}", f"{s.makespan_s:,.0f}", f"{s.avg_queueing_s:,.0f}",
            f"{s.gpu_utilization:.3f}", f"{s.preemptions / max(1, s.jobs):.2f}",
            f"{s.max_finish_time_fairness:,.2f}", f"{s.wall_s:.1f}",
        )  # fmt: skip
    return table


def _intervals(reports: list[list[RunReport]]) -> Table:
    table = Table(title=f"{len(reports[0])} seeds: mean and 95 % interval")
    table.add_column("policy")
    names = ("avg_jct_s", "median_jct_s", "p95_jct_s", "makespan_s", "gpu_utilization")
    for name in names:
        table.add_column(name, justify="right")
    for row in confidence(reports):
        cells = [f"{row[n]['mean']:,.3f} ± {row[n]['half_width']:,.3f}" for n in names]
        table.add_row(str(row["policy"]), *cells)
    return table


def audit(folder: Path, trace: str = "", as_json: bool = False) -> int:
    """Re-check the event logs of a report folder (or one log); 0 if nothing is wrong."""
    logs = sorted(folder.glob("events-*.json")) if folder.is_dir() else [folder]
    if not logs or not logs[0].exists():
        raise Rejected(f"{folder} holds no event log; name a report folder or an events-*.json")
    rows = None
    if trace:
        if folder.is_dir() and (folder / "manifest.json").exists():
            chosen = msgspec.json.decode((folder / "manifest.json").read_bytes())["options"]
            options = msgspec.convert({**chosen, "trace": trace}, Options)
            rows = selected(options, read_trace(options, options.seed))
        else:
            rows = read(Path(trace)).jobs
    findings = {path.name: auditor.audit(eventlog.read(path), rows) for path in logs}
    out = _console()
    if as_json:
        out.out(msgspec.json.encode(findings).decode(), highlight=False)
    else:
        for name, wrong in findings.items():
            out.print(f"{name}: {'ok' if not wrong else f'{len(wrong)} findings'}", highlight=False)
            for text in wrong:
                out.print(f"  {text}", highlight=False, markup=False)
    return FAILED if any(findings.values()) else 0


# The command line ------------------------------------------------------------------------------


def _exit(work: Any, *args: Any) -> None:
    try:
        code = work(*args)
    except SlackwaterError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {error}", markup=False)
        code = DATA_ERROR if isinstance(error, Rejected) else FAILED
        code = USAGE if isinstance(error, ConfigRejected) else code
    raise typer.Exit(code)


_Settings = Annotated[
    list[str], typer.Option("--set", help="A setting as policy.option=value; repeatable.")
]


def _count(help: str, least: int = 0, most: int = limits.TRACE_GPUS_MAX) -> Any:
    return typer.Option(min=least, max=most, help=help)


@app.command("simulate")
def simulate_command(
    context: typer.Context,
    trace: Annotated[str, typer.Argument(help="A trace file, or generate:NAME[,option=value].")],
    policy: Annotated[list[str], typer.Option(help="A policy; repeat to compare.")] = [  # noqa: B006
        DEFAULT_POLICY
    ],
    preset: Annotated[
        str, typer.Option(help=f"Options of a published comparison: {', '.join(PRESETS)}.")
    ] = "",
    nodes: Annotated[int, _count("Machines of the cluster.", 1)] = 16,
    gpus_per_node: Annotated[int, _count("GPUs of each machine.", 1)] = 4,
    racks: Annotated[int, _count("Racks into which the machines are divided.", 1)] = 1,
    cluster: Annotated[str, typer.Option(help="Machines of several kinds: 6x4:t4,2x8:dgx.")] = "",
    overhead: Annotated[str, typer.Option(help="Costs of placement: full or none.")] = "full",
    mode: Annotated[str, typer.Option(help="Sizes: rigid, malleable or moldable.")] = "rigid",
    job_model: Annotated[str, typer.Option(help="How jobs progress.")] = "fixed",
    set_: _Settings = [],  # noqa: B006
    seed: Annotated[int, typer.Option(min=0, help="Draw by this seed.")] = 0,
    seeds: Annotated[int, _count("Runs per policy, for intervals.", 1, _SEEDS_MAX)] = 1,
    shake_s: Annotated[float, typer.Option(help="Seconds to shift submissions.")] = 60.0,
    format: Annotated[str, typer.Option(help="Trace format, if not detected.")] = "",
    jobs: Annotated[int, typer.Option(help="At most this many jobs.")] = 0,
    min_gpus: Annotated[int, typer.Option(min=0, help="Only jobs of at least N GPUs.")] = 0,
    max_gpus: Annotated[int, typer.Option(min=0, help="Only jobs of at most N GPUs.")] = 0,
    start: Annotated[str, typer.Option(help="Only later jobs; seconds or a date.")] = "",
    end: Annotated[str, typer.Option(help="Only earlier jobs; as --start.")] = "",
    time_scale: Annotated[float, typer.Option(help="Factor for arrivals and durations.")] = 1.0,
    rebase: Annotated[bool, typer.Option(help="Count time from the first job kept.")] = True,
    priorities: Annotated[bool, typer.Option(help="Use the trace's priorities.")] = False,
    speeds: Annotated[str, typer.Option(help="JSON: model -> GPU type -> speed.")] = "",
    throughputs: Annotated[str, typer.Option(help="Gavel's table of measured steps/s.")] = "",
    reference_gpu: Annotated[str, typer.Option(help="GPU type of the durations.")] = "v100",
    start_s: Annotated[float, typer.Option(help="Seconds that a first start costs.")] = 0,
    restart_s: Annotated[float, typer.Option(help="Seconds that a restart costs.")] = 0,
    stop_s: Annotated[float, typer.Option(help="Seconds that a stopped job saves.")] = 0,
    restart_by_model: Annotated[str, typer.Option(help="Seconds by model: a=30,b=60.")] = "",
    spread_slowdown: Annotated[float, typer.Option(help="Times skew, for spread jobs.")] = 0,
    interference: Annotated[float, typer.Option(help="Speed lost by sharing a network.")] = 0,
    mtbf_s: Annotated[float, typer.Option(help="Seconds between a node's failures; 0: none.")] = 0,
    repair_s: Annotated[float, typer.Option(help="Seconds that a repair of a node takes.")] = 3600,
    checkpoint_s: Annotated[float, typer.Option(help="Checkpoint period; 0: no loss.")] = 0,
    quotas: Annotated[str, typer.Option(help="GPUs by tenant, as a=8,b=4, or equal.")] = "",
    borrowing: Annotated[bool, typer.Option(help="Let tenants borrow idle GPUs.")] = True,
    min_run_s: Annotated[float, typer.Option(help="Seconds before a job may be preempted.")] = 0,
    colocate: Annotated[int, _count("Most jobs on the same GPUs.")] = 0,
    nodes_max: Annotated[int, _count("Nodes to which the cluster may grow.")] = 0,
    provision_s: Annotated[float, typer.Option(help="Seconds until a new node is there.")] = 0,
    pool: Annotated[str, typer.Option(help="Not GPUs: aggregation, memory or control.")] = "",
    why_at: Annotated[list[float], typer.Option(help="Note why jobs wait then.")] = [],  # noqa: B006
    report: Annotated[Path | None, typer.Option(help="Folder to write to.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    processes: Annotated[int, _count("Processes; 0: one per core.", 0, _PROCESSES_MAX)] = 0,
) -> None:
    """Simulate a trace under one or several policies."""
    given = dict(locals())
    for name in ("context", "preset", "report", "json", "processes", "pool"):
        del given[name]
    given["policies"], given["settings"] = given.pop("policy"), given.pop("set_")
    by_default = [name for name in given if _is_default(context, name)]
    _exit(_simulate_given, given, preset, by_default, report, json, processes, pool)


def _is_default(context: typer.Context, name: str) -> bool:
    """Say whether the option was left at its default."""
    source = context.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"


def _simulate_given(
    given: dict[str, Any],
    preset: str,
    by_default: Collection[str],
    report: Path | None,
    as_json: bool,
    processes: int,
    pool: str,
) -> int:
    if preset and preset not in PRESETS:
        raise ConfigRejected(f"--preset {preset}: choose one of {', '.join(PRESETS)}")
    given |= {name: PRESETS[preset][name] for name in PRESETS.get(preset, {}) if name in by_default}
    try:
        options = msgspec.convert(given, Options)
    except msgspec.ValidationError as error:
        raise ConfigRejected(_named(str(error), given)) from error
    match pool:
        case "":
            return simulate(options, report, as_json, processes)
        case "memory":
            from slackwater.loadgen.cli import simulate_memory
            from slackwater.loadgen.simulator.memory import run as memory_run

            options = _with_policies(options, memory_run.POLICIES)
            found, points = simulate_memory.simulate_memory(options, report, processes)
            simulate_memory.print_memory(_console(), found, points, as_json, report)
        case "aggregation":
            from slackwater.loadgen.cli import simulate_pool

            options = _with_policies(options, simulate_pool.POLICIES)
            runs = simulate_pool.simulate_pool(options, report, as_json, processes)
            simulate_pool.print_pool(_console(), runs, as_json, report)
        case "control":
            from slackwater.loadgen.cli import simulate_control

            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
            fleets = simulate_control.simulate_fleet(options, report, as_json)
            simulate_control.print_fleet(_console(), fleets, as_json, report)
        case _:
            raise ConfigRejected(
                f"--pool {pool!r}: aggregation, memory and control can be simulated"
            )
    return 0


def _with_policies(options: Options, all_of_them: Iterable[str]) -> Options:
    """Every policy of a pool, where the user names none."""
    if options.policies != (DEFAULT_POLICY,):
        return options
    return msgspec.structs.replace(options, policies=tuple(all_of_them))


def _named(error: str, given: dict[str, Any]) -> str:
    """msgspec's words, with the option and its value."""
    found = re.search(r"(.*) - at `\$\.(\w+)", error)
    if found is None:
        return f"{error}; see loadgen simulate --help"
    why, field = found.groups()
    choices = get_args(get_type_hints(Options)[field]) if "enum" in why else ()
    why = f"choose one of {', '.join(choices)}" if choices else why.lower().replace("`", "")
    option = "--" + field.replace("_", "-")
    return f"{option} {given[field]}: {why}; see loadgen simulate --help"


@app.command("audit")
def audit_command(
    folder: Annotated[Path, typer.Argument(help="A report folder, or one events-*.json.")],
    trace: Annotated[str, typer.Option(help="Compare with this trace, too.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Re-check a simulation's event log: capacity, whole gangs, conservation of work."""
    _exit(audit, folder, trace, json)
