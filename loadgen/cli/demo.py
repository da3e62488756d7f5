"""`loadgen demo`, which `make run` calls: what the product does, shown in two minutes."""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import JustifyMethod
from rich.table import Table

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster, fit_cpu_share
from slackwater.common.shell.client import connect
from slackwater.console.options import Json, Report, Seed
from slackwater.console.outcome import FAILED, err, out, print_json, report_folder, reported, run
from slackwater.loadgen.cli.progress import progress
from slackwater.loadgen.replay import calibrate, demo, experiment, gpu_demo, report, web_page
from slackwater.loadgen.replay.demo import DemoJob, DemoSummary
from slackwater.loadgen.replay.experiment import OnPhase, Outcome
from slackwater.loadgen.replay.gpu_demo import GpuJob, GpuTurns
from slackwater.loadgen.replay.machine import cpu_stalled_s
from slackwater.loadgen.replay.workload import Workload
from slackwater.loadgen.samples import PHILLY
from slackwater.loadgen.traces import read
from slackwater.web import report as web

CONTROLLERS: Final = 2
INTRODUCTION: Final = """\
Data-parallel jobs sum their gradients on CPU servers. Each job usually reserves servers of its own
for its bursts, and they idle in between. Slackwater lets jobs share them, watches what that costs
each job, and where sharing hurts one, moves it away while it trains. Then jobs take turns on GPUs:
they are paused for others, or by hand, and go on where they were.
"""


def show(
    report_dir: Report = Path("reports/run"),
    seed: Seed = 1,
    json: Json = False,
) -> None:
    """Show what Slackwater does: a live cluster, six jobs of a real trace, then three that take
    turns on (fake) GPUs, in two minutes.

    Exit codes: 0 the product did its work; 1 a job failed, a parameter differs from the replay, or
    a job was left where it lost more than its limit, or was not paused.
    """
    with reported():
        report_folder(report_dir)  # Before two minutes are spent.
        err.print(INTRODUCTION, markup=False)
        err.print("Measuring how fast this machine sums gradients ...", markup=False)
        share = fit_cpu_share(demo.CPU_SHARE, demo.AGGREGATORS, len(os.sched_getaffinity(0)))
        charge = calibrate.charge(share, demo.COMPUTE_S, demo.DUTY)
        work = demo.workload(read(PHILLY).jobs, charge.bytes_scale, seed)
        options = ClusterOptions(
            controllers=CONTROLLERS,
            aggregators=demo.AGGREGATORS,
            cpu_share=demo.CPU_SHARE,
            policy=demo.POLICY,
            charge_ns_per_byte=charge.ns_per_byte,
            log_dir=report_dir / "logs",
            nodes=gpu_demo.NODES,
            gpus_per_node=gpu_demo.GPUS_PER_NODE,
            master={
                "cluster_scaling_s": experiment.CLUSTER_SCALING_S,
                "gpu_policy": gpu_demo.POLICY,
                "gpu_policy_settings": dict(gpu_demo.SETTINGS),
            },
            controller={"pack_alone": True},
            profiler=dict(demo.PROFILER),
        )
        started_s, stalled_s = time.monotonic(), cpu_stalled_s()
        with progress() as on_phase:
            outcome, turns = run(_play(work, gpu_demo.workload(seed), options, on_phase))
        wall_s = time.monotonic() - started_s
        pressure = None
        if stalled_s is not None and (now_s := cpu_stalled_s()) is not None:
            pressure = (now_s - stalled_s) / wall_s
        summary = demo.summarize(
            outcome, work, charge_ns_per_byte=charge.ns_per_byte, cpu_pressure=pressure,
            wall_s=wall_s, turns=turns,
        )  # fmt: skip
        _write(report_dir, summary, outcome, turns, {"seed": seed, "workload": work})
        _say(report_dir, summary, json)
    if summary.failures:
        raise typer.Exit(FAILED)


async def _play(
    work: Workload, turns: Workload, options: ClusterOptions, on_phase: OnPhase
) -> tuple[Outcome, GpuTurns]:
    began_s = time.monotonic()
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "loadgen") as client:
        err.print(
            f"A cluster runs on this machine after {time.monotonic() - began_s:.1f} s: the bus, a "
            f"master, {options.controllers} controllers, {options.aggregators} aggregators of "
            f"{cluster.cpu_share:g} cores, a profiler, {options.nodes} worker services with "
            f"{options.gpus_per_node} fake GPUs each. {len(work.jobs)} jobs of "
            f"Microsoft's Philly trace arrive, {1 / work.time_scale:,.0f} times as fast as in "
            "2017. Ctrl-C ends all of it.",
            markup=False,
        )
        share = cluster.cpu_share
        outcome = await experiment.play(client, work, share, demo.STEADY_MIN, on_phase)
        return outcome, await gpu_demo.play(client, turns, on_phase)


def _write(
    folder: Path,
    summary: DemoSummary,
    outcome: Outcome,
    turns: GpuTurns,
    options: dict[str, Any],
) -> None:
    report.write(folder, summary, outcome.figures, outcome.timeline, options)
    report.write_events(folder / "gpu_events.jsonl", turns.timeline)
    report.draw_gpus(folder / "gpus.png", turns.timeline)
    header, rows = _rows(summary.jobs)
    gpu_header, gpu_rows = _gpu_rows(summary.gpu_jobs)
    notes = [web.Note(text, bad=True) for text in summary.failures]
    notes += [web.Note(text) for text in (*summary.moved, *summary.remarks)]
    page = web_page.page(
        "Slackwater: jobs share their servers",
        [outcome.timeline, turns.timeline],
        outcome.figures,
        tiles=_facts(summary),
        notes=notes,
        tables=[
            web.Table("What each job asked for, and what sharing cost it", header, rows,
                      (1, 2, 4, 5, 6)),
            web.Table("Jobs that took turns on GPUs", gpu_header, gpu_rows, (1, 2, 3)),
        ],
        images=[
            (folder / "aggregators.png",
             "Aggregators in use (filled) against the servers that the jobs asked for."),
            (folder / "gpus.png", "GPUs that each job held, one above the other."),
        ],
    )  # fmt: skip
    numbers = web.figures_of(summary, skip=("wall_s",))
    sets = {"demo": web_page.results(outcome.timeline, **numbers)}
    web.write(folder, page, sets)


def _facts(summary: DemoSummary) -> list[tuple[str, str]]:
    equal = [job.equal for job in summary.jobs] + [job.equal for job in summary.gpu_jobs]
    stop_s = [each for job in summary.gpu_jobs for each in job.stop_s]
    resume_s = [each for job in summary.gpu_jobs for each in job.resume_s]
    return [
        (str(summary.servers_asked_max), "servers asked for, at most"),
        (str(summary.aggregators_max), "aggregators used, at most"),
        (report.percent(summary.cpu_saved), "of the server time saved"),
        (report.percent(summary.loss_max), "of its speed lost by the job that lost most"),
        (seconds(stop_s), "from the order to pause a job to its GPUs' release, at most"),
        (seconds(resume_s), "from the order to go on to its next iteration, at most"),
        (
            f"{sum(equal)} of {len(equal)}",
            "jobs' parameters equal to a replay, bit for bit",
        ),
    ]


def _rows(jobs: tuple[DemoJob, ...]) -> tuple[list[str], list[list[str]]]:
    header = ["job", "GPUs", "servers asked", "ran on", "it/s alone", "it/s shared",
              "speed lost", "moved away", "parameters"]  # fmt: skip
    return header, [
        [
            job.job, str(job.gpus), str(job.servers), ", ".join(job.ended_on) or "-",
            report.scaled(job.alone_per_s, 1.0, 2), report.scaled(job.shared_per_s, 1.0, 2),
            report.percent(job.loss), {0: "-", 1: "once"}.get(job.moved, f"{job.moved} times"),
            "equal" if job.equal else "DIFFERENT" if job.state == "completed" else job.state,
        ]
        for job in jobs
    ]  # fmt: skip


def seconds(found: list[float]) -> str:
    return f"{max(found):.2f} s" if found else "-"


def _gpu_rows(jobs: tuple[GpuJob, ...]) -> tuple[list[str], list[list[str]]]:
    header = ["job", "GPUs", "waited s", "ran s", "paused because", "went on at", "parameters"]
    return header, [
        [
            job.job, str(job.gpus), f"{job.waited_s:.1f}", f"{job.ran_s:.1f}",
            "; ".join(job.stops) or "-",
            ", ".join(f"iteration {number}" for number in job.resumed_at) or "-",
            "equal" if job.equal else "DIFFERENT" if job.state == "completed" else job.state,
        ]
        for job in jobs
    ]  # fmt: skip


def table(jobs: tuple[DemoJob, ...]) -> Table:
    """Return the table that is printed at the end, for terminals of 80 columns and more."""
    return _table("What each job asked for, and what it cost", *_rows(jobs), left=(0, 3, 7, 8))


def gpu_table(jobs: tuple[GpuJob, ...]) -> Table:
    """Return the table of the jobs that took turns, for terminals of 80 columns and more."""
    return _table("Jobs that took turns on GPUs", *_gpu_rows(jobs), left=(0, 4, 5, 6))


def _table(title: str, header: list[str], rows: list[list[str]], left: tuple[int, ...]) -> Table:
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(header):
        justify: JustifyMethod = "left" if index in left else "right"
        made.add_column("\n".join(column.rsplit(" ", 1)), justify=justify, no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def _say(folder: Path, summary: DemoSummary, json: bool) -> None:
    if json:
        print_json(summary)
    else:
        out.print(table(summary.jobs), "")
        out.print(gpu_table(summary.gpu_jobs), "")
        for value, what in _facts(summary):
            out.print(f"  {value:>8}  {what}", markup=False, highlight=False)
        out.print()
        for text in summary.moved:
            out.print(text, markup=False, highlight=False)
        for text in summary.remarks:
            out.print(f"note: {text}", markup=False, highlight=False)
        out.print(_next(folder), markup=False, highlight=False)
    for text in summary.failures:
        err.print(f"failed: {text}", markup=False)


def _next(folder: Path) -> str:
    prefix = "" if shutil.which("slackwater") else f"{Path(sys.executable).parent}/"
    if prefix.startswith(str(Path.cwd())):
        prefix = f"{Path(prefix).relative_to(Path.cwd())}/"
    return f"""
The report: {folder}/index.html (opens in a browser, needs no server)

What to type next:
  {prefix}slackwater up               a cluster on this machine, until Ctrl-C
  {prefix}slackwater web              its jobs, pools and events in a browser
  {prefix}slackwater top              the same in the terminal
  {prefix}loadgen experiment sharing  the paper's experiment, some minutes
  {prefix}slackwater --help           all the rest"""
