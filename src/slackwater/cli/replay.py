"""`loadgen replay`: the built-in experiment, or a trace, on a live cluster."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.live import Live

from slackwater.cli.outcome import FAILED, INCONCLUSIVE, err, out, print_json, reported, run
from slackwater.cli.show import Json, Url
from slackwater.cli.where import credentials
from slackwater.common.bus.access import shown
from slackwater.common.client import connect
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster, fit_cpu_share
from slackwater.common.errors import Rejected
from slackwater.loadgen.replay import calibrate, display, experiment, report, workload
from slackwater.loadgen.replay.experiment import OnPhase, Outcome
from slackwater.loadgen.replay.timeline import Timeline
from slackwater.loadgen.replay.workload import Workload
from slackwater.loadgen.traces import read
from slackwater.loadgen.traces.select import select
from slackwater.schemas.jobs import Aggregation

LINE_EVERY_S = 5.0
PROFILING = {"profile_iterations": 5, "profile_s": 2.0}
Transport = Literal["auto", "shm", "verbs", "tcp"]


def replay(
    trace: Annotated[
        Path | None, typer.Argument(help="A job trace; without one, the built-in experiment.")
    ] = None,
    url: Url = None,
    time_scale: Annotated[
        float, typer.Option(help="Shrinks arrivals and durations (built-in: compute times too).")
    ] = 1.0,
    compute_scale: Annotated[
        float, typer.Option(help="Shrinks a trace job's computing per iteration.")
    ] = 0.5,
    bytes_scale: Annotated[
        float | None,
        typer.Option(help="Shrinks tensors; by default chosen by this machine's folding speed."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="At most so many of the trace.")] = None,
    min_gpus: Annotated[int, typer.Option(min=0, help="Only jobs of so many GPUs.")] = 0,
    policy: Annotated[
        str, typer.Option(help="cyclic (the paper's), edf (deadlines) or static (own servers).")
    ] = "cyclic",
    aggregators: Annotated[int, typer.Option(min=1, help="Pool of the embedded cluster.")] = 10,
    controllers: Annotated[int, typer.Option(min=1)] = 2,
    cpu_share: Annotated[float, typer.Option(help="Cores of one aggregator.")] = 0.1,
    window: Annotated[int, typer.Option(min=2, help="Iterations of a monitor window.")] = 20,
    transport: Annotated[
        str,
        typer.Option(help="shm, verbs, tcp or auto: of Agents and aggregators, and among these."),
    ] = "auto",
    seed: int = 1,
    report_dir: Annotated[Path, typer.Option("--report", help="Folder.")] = Path("reports/run"),
    json: Json = False,
) -> None:
    """Replay a workload against a live cluster (an embedded one without --url) and report."""
    options: dict[str, Any] = {k: shown(str(v)) for k, v in locals().items() if k != "options"}
    started_s = time.monotonic()
    with reported():
        chosen, forced = _policy(policy), _transport(transport, url)
        _above_zero(time_scale, compute_scale, 1.0 if bytes_scale is None else bytes_scale)
        scale_of_compute = time_scale if trace is None else compute_scale
        scale = bytes_scale or _calibrated(scale_of_compute, cpu_share, aggregators)
        cluster = ClusterOptions(
            controllers=controllers,
            aggregators=aggregators,
            cpu_share=cpu_share,
            log_dir=report_dir / "logs",
            profiler={"window_iterations": window, **PROFILING},
            transport=forced,
        )
        built_in = trace is None and url is None and chosen != "static"
        with _progress() as on_phase:
            if built_in and bytes_scale is None:
                probing = experiment.profiled_scale(cluster, scale, scale_of_compute, on_phase)
                scale = run(probing)
            work = _workload(trace, time_scale, compute_scale, scale, jobs, min_gpus, seed, chosen)
            options |= {"bytes_scale": scale, "workload": work}
            err.print(f"bytes scale {scale:.3f}, {len(work.jobs)} jobs, seed {seed}")
            outcome = run(_run(work, cluster, url, window, built_in, on_phase))
        wall_s = time.monotonic() - started_s
        _conclude(outcome, options, report_dir, built_in, wall_s, json)


def _above_zero(*scales: float) -> None:
    """Before anything is started."""
    if not all(scale > 0 for scale in scales):
        raise Rejected("--time-scale, --compute-scale and --bytes-scale must be above 0")


def _calibrated(compute_scale: float, cpu_share: float, aggregators: int) -> float:
    """The bytes scale for jobs whose computing is shrunk by `compute_scale`."""
    share = fit_cpu_share(cpu_share, aggregators, len(os.sched_getaffinity(0)))
    return calibrate.bytes_scale(share, compute_scale)


def _policy(name: str) -> Aggregation:
    if name == "cyclic":
        return "cyclic"
    if name == "edf":
        return "edf"
    if name == "static":
        return "static"
    raise Rejected(f"--policy {name!r}: choose cyclic, edf or static")


def _transport(name: str, url: str | None) -> Transport:
    """Of the embedded cluster. Raises Rejected."""
    match name:
        case "auto":
            return name
        case "shm" | "verbs" | "tcp" if url is None:
            return name
        case "shm" | "verbs" | "tcp":
            raise Rejected(
                f"--transport {name} cannot be forced on a running cluster: set `transport` in its "
                "aggregators' configuration and SLACKWATER_TRANSPORT in its worker services' "
                "environment, or leave out --url"
            )
    raise Rejected(f"--transport {name!r}: choose shm, verbs, tcp or auto")


def _workload(
    trace: Path | None,
    time_scale: float,
    compute_scale: float,
    bytes_scale: float,
    jobs: int | None,
    min_gpus: int,
    seed: int,
    policy: Aggregation,
) -> Workload:
    if trace is None:
        work = workload.shared_aggregation(
            time_scale=time_scale, bytes_scale=bytes_scale, seed=seed
        )
    else:
        work = workload.from_trace(
            select(read(trace).jobs, min_gpus=min_gpus, jobs=jobs),
            time_scale=time_scale,
            compute_scale=compute_scale,
            bytes_scale=bytes_scale,
            seed=seed,
        )
    return work if policy == "cyclic" else work.with_policy(policy, policy)


async def _run(
    work: Workload,
    options: ClusterOptions,
    url: str | None,
    window: int,
    built_in: bool,
    on_phase: OnPhase,
) -> Outcome:
    if built_in:
        return await experiment.shared_experiment(work, options, window, on_phase)
    if url is not None:
        async with connect(url, "loadgen", credentials()) as client:
            infos = await client.aggregators()
            share = max((i.heartbeat.cpu_share for i in infos if i.heartbeat), default=1.0)
            return await experiment.play(client, work, share, window, on_phase)
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "loadgen") as client:
        return await experiment.play(client, work, cluster.cpu_share, window, on_phase)


@contextmanager
def _progress() -> Iterator[OnPhase]:
    """A live display on a terminal; elsewhere each event, and a line every few seconds."""
    if err.is_terminal:
        with Live(console=err, refresh_per_second=4) as live:
            yield lambda phase, timeline, now_s: live.update(display.render(phase, timeline, now_s))
        return
    said_s, told, heard = float("-inf"), 0, ""

    def say(phase: str, timeline: Timeline, now_s: float) -> None:
        nonlocal said_s, told, heard
        told, heard = told if phase == heard else 0, phase
        for news in display.news(phase, timeline, told):
            told += 1
            err.print(news, markup=False)
        if now_s - said_s >= LINE_EVERY_S:
            said_s = now_s
            err.print(display.line(phase, timeline, now_s), markup=False)

    yield say


def _conclude(
    outcome: Outcome,
    options: dict[str, Any],
    folder: Path,
    built_in: bool,
    wall_s: float,
    json: bool,
) -> None:
    doubts = report.doubts_about(
        outcome.timeline,
        outcome.figures,
        control_loss=outcome.control_loss,
        verified=outcome.verified,
        experiment=built_in,
    )
    doubts += outcome.mismatches
    summary = report.summarize(
        outcome.timeline,
        outcome.figures,
        until_s=outcome.until_s,
        cpu_share=outcome.cpu_share,
        control_loss=outcome.control_loss,
        verified=outcome.verified,
        doubts=doubts,
        wall_s=wall_s,
    )
    report.write(folder, summary, outcome.figures, outcome.timeline, options)
    if json:
        print_json(summary)
    else:
        for table in report.tables(summary, outcome.figures):
            out.print(table)
        out.print(f"report: {folder}")
    for doubt in doubts:
        err.print(f"inconclusive: {doubt}", markup=False)
    if summary.failed:
        raise typer.Exit(FAILED)
    if doubts:
        raise typer.Exit(INCONCLUSIVE)
