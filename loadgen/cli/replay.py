"""`loadgen replay`: a trace on a live cluster."""

import os
import re
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected
from slackwater.common.bus.access import shown
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster, fit_cpu_share
from slackwater.common.shell.client import Client, connect
from slackwater.console import where
from slackwater.console.names import gpu_policy_named, policy_named
from slackwater.console.options import Json, Report, Seed, Url, Window
from slackwater.console.outcome import (
    FAILED,
    Usage,
    err,
    out,
    print_json,
    report_folder,
    reported,
    run,
)
from slackwater.console.where import credentials
from slackwater.loadgen.cli import fidelity
from slackwater.loadgen.cli.progress import progress
from slackwater.loadgen.fidelity.experiment import Plan
from slackwater.loadgen.replay import calibrate, experiment, report, workload
from slackwater.loadgen.replay.experiment import OnPhase, Outcome
from slackwater.loadgen.replay.report import Summary
from slackwater.loadgen.replay.workload import Workload
from slackwater.loadgen.traces import read
from slackwater.loadgen.traces.select import select
from slackwater.schemas.base import AGGREGATORS_MAX, ID_PATTERN, NODE_GPUS_MAX
from slackwater.schemas.job_states import STATE_SAID
from slackwater.schemas.jobs import Aggregation
from slackwater.schemas.scheduling import GetPolicy, PolicyInfo

BYTES_SCALE_HELP = "Shrinks tensors; by default chosen by this machine's folding speed."
TRANSPORT_HELP = "How bytes go between Agents and aggregators: shm, verbs, tcp or auto."
POLICY_HELP = "How jobs share: edf, cyclic (the paper's), static (own servers) or one installed"
GPU_POLICY_HELP = (
    "How jobs are given GPUs, one for each worker: fifo, sf, pollux or another; left out, they "
    "need none. With --url, the one that the running cluster has."
)
PROFILING = {"profile_iterations": 5, "profile_s": 2.0}
Transport = Literal["auto", "shm", "verbs", "tcp"]
Prefix = Annotated[
    str, typer.Option(help="Prefix of the jobs' ids; another one lets a trace be played again.")
]
_Aggregators = Annotated[
    int, typer.Option(min=1, max=AGGREGATORS_MAX, help="Aggregators of the embedded cluster.")
]
_Policy = Annotated[str | None, typer.Option(help=f"{POLICY_HELP}; by default the cluster's own.")]
_GpuPolicy = Annotated[str | None, typer.Option(help=GPU_POLICY_HELP)]
_Gpus = Annotated[
    int,
    typer.Option(min=1, max=NODE_GPUS_MAX, help="Fake GPUs of each of its worker nodes."),
]
_Nodes = Annotated[
    int,
    typer.Option(
        min=0,
        max=64,
        help="Play on so many worker nodes, with programs that hold their GPUs and train nothing, "
        "beside a simulation; 0: on one, with Agents.",
    ),
]
_Controllers = Annotated[
    int,
    typer.Option(
        min=1, max=limits.CLUSTERS_MAX, help="Aggregator clusters of the embedded cluster."
    ),
]


def replay(
    trace: Annotated[Path, typer.Argument(help="The trace file to replay.")],
    url: Url = None,
    time_scale: Annotated[float, typer.Option(help="Factor for arrivals and durations.")] = 1.0,
    compute_scale: Annotated[float, typer.Option(help="Factor for a job's computing.")] = 0.5,
    bytes_scale: Annotated[float | None, typer.Option(help=BYTES_SCALE_HELP)] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Take at most this many jobs.")] = None,
    min_gpus: Annotated[int, typer.Option(min=0, help="Take jobs of at least N GPUs.")] = 0,
    policy: _Policy = None,
    gpu_policy: _GpuPolicy = None,
    gpus: _Gpus = 8,
    nodes: _Nodes = 0,
    aggregators: _Aggregators = 10,
    controllers: _Controllers = 2,
    cpu_share: Annotated[float, typer.Option(help="Cores of one aggregator.")] = 0.1,
    window: Window = 20,
    transport: Annotated[str, typer.Option(help=TRANSPORT_HELP)] = "auto",
    prefix: Prefix = "",
    seed: Seed = 1,
    report_dir: Report = Path("reports/replay"),
    json: Json = False,
) -> None:
    """Replay a trace against a live cluster (an embedded one without --url) and report.

    Losses are against each job's own profile. `loadgen experiment` has baselines and a verdict.
    """
    options: dict[str, Any] = {k: shown(str(v)) for k, v in locals().items() if k != "options"}
    started_s = time.monotonic()
    with reported():
        chosen = None if policy is None else policy_named(policy)
        of_gpus = None if gpu_policy is None else gpu_policy_named(gpu_policy)
        forced = _transport(transport, url := where.given(url))
        above_zero(time_scale, compute_scale, 1.0 if bytes_scale is None else bytes_scale)
        if nodes:
            plan = _plan(trace, nodes, gpus, time_scale, jobs or 0, min_gpus, seed)
            return _played(plan, gpu_policy, url, report_dir, json)
        rows = select(read(trace).jobs, min_gpus=min_gpus, jobs=jobs)
        report_folder(report_dir)  # Before anything long begins.
        scale = bytes_scale or _calibrated(compute_scale, cpu_share, aggregators)
        work = workload.from_trace(
            rows, time_scale=time_scale, compute_scale=compute_scale, bytes_scale=scale, seed=seed
        )
        work = _named(work.with_gpus() if of_gpus else work, chosen, prefix)
        cluster = ClusterOptions(
            controllers=controllers, aggregators=aggregators, cpu_share=cpu_share,
            log_dir=report_dir / "logs", transport=forced,
            profiler={"window_iterations": window, **PROFILING}, **_with_gpus(of_gpus, gpus),
        )  # fmt: skip
        options |= {"bytes_scale": scale, "workload": work}
        err.print(f"bytes scale {scale:.3f}, {len(work.jobs)} jobs, seed {seed}")
        with progress() as on_phase:
            outcome = run(_run(work, cluster, url, of_gpus, window, on_phase))
        doubts = report.unfinished(outcome.figures) + list(outcome.mismatches.values())
        summary = report.summarize(
            outcome, doubts=doubts, experiment=False, wall_s=time.monotonic() - started_s
        )
        conclude(outcome, summary, report_dir, options, json)
    if doubts:
        raise typer.Exit(FAILED)


def _plan(
    trace: Path, nodes: int, gpus: int, time_scale: float, jobs: int, min_gpus: int, seed: int
) -> Plan:
    return Plan(
        policy="", seed=seed, jobs=jobs, nodes=nodes, gpus_per_node=gpus, time_scale=time_scale,
        trace=str(trace), min_gpus=min_gpus,
    )  # fmt: skip


def _played(plan: Plan, gpu_policy: str | None, url: str | None, folder: Path, json: bool) -> None:
    """Play it on nodes of its own. Raises Usage, and Exit where a job was lost."""
    if gpu_policy is None or url is not None:
        raise Usage("--nodes starts a cluster of its own: give --gpu-policy, and leave --url out")
    if not fidelity.replay(msgspec.structs.replace(plan, policy=gpu_policy), folder, json):
        raise typer.Exit(FAILED)


def conclude(
    outcome: Outcome, summary: Summary, folder: Path, options: dict[str, Any], json: bool
) -> None:
    """Write the report, and say what is in it."""
    report.write(folder, summary, outcome.figures, outcome.timeline, options)
    if json:
        print_json(summary)
    else:
        for table in report.tables(summary, outcome.figures):
            out.print(table)
        out.print(f"report: {folder}")
    for doubt in summary.inconclusive:
        word = "failed" if summary.conclusive is None else "inconclusive"
        err.print(f"{word}: {doubt}", markup=False)


def above_zero(*scales: float) -> None:
    """Check scales before anything is started. Raises Usage."""
    if not all(scale > 0 for scale in scales):
        raise Usage("--time-scale, --compute-scale and --bytes-scale must be above 0")


def _calibrated(compute_scale: float, cpu_share: float, aggregators: int) -> float:
    """Return the bytes scale for jobs whose computing is scaled by `compute_scale`."""
    share = fit_cpu_share(cpu_share, aggregators, len(os.sched_getaffinity(0)))
    return calibrate.bytes_scale(share, compute_scale)


def _named(work: Workload, policy: Aggregation | None, prefix: str) -> Workload:
    """Give the jobs their policy and ids. Raises Rejected where an id would not be valid."""
    work = work if policy is None else work.with_policy(policy, policy)
    renamed = work.renamed(prefix) if prefix else work
    for job in renamed.jobs:
        if re.fullmatch(ID_PATTERN, job.spec.id) is None:
            raise Usage(
                f"--prefix {prefix!r}: {job.spec.id!r} is not a job's id, which has letters, "
                "digits, - and _, at most 63 in all, and begins with a letter or digit"
            )
    return renamed


async def _refuse_known(client: Client, work: Workload) -> None:
    """Refuse, before anything is submitted, jobs that are there already: they would not run again.
    Raises Rejected."""
    ids = {job.spec.id for job in work.jobs}
    offset, total = 0, 1
    while offset < total:
        page = await client.job_page(offset=offset)
        total, offset = page.total, offset + max(1, len(page.jobs))
        for record in page.jobs:
            if record.spec.id in ids:
                raise Rejected(
                    f"job {record.spec.id} exists on this cluster and "
                    f"{STATE_SAID[record.state]}: give --prefix NAME to play the trace under "
                    "other ids"
                )


def _transport(name: str, url: str | None) -> Transport:
    """Choose the embedded cluster's transport. Raises Usage."""
    match name:
        case "auto":
            return name
        case "shm" | "verbs" | "tcp" if url is None:
            return name
        case "shm" | "verbs" | "tcp":
            raise Usage(
                f"--transport {name} cannot be forced on a running cluster: set `transport` in its "
                "aggregators' configuration and SLACKWATER_TRANSPORT in its worker services' "
                "environment, or leave out --url"
            )
    raise Usage(f"--transport {name!r}: choose shm, verbs, tcp or auto")


def _with_gpus(policy: str | None, gpus: int) -> dict[str, Any]:
    """Choose the embedded cluster's options where jobs ask for GPUs."""
    return {"gpus_per_node": gpus, "master": {"gpu_policy": policy}} if policy else {}


async def _refuse_other_policy(client: Client, policy: str) -> None:
    """Refuse a running cluster that has another policy: replays change no settings. Raises
    Rejected."""
    info = await client.master("policy", GetPolicy(), PolicyInfo)
    if info.policy != policy:
        raise Rejected(
            f"--gpu-policy {policy}: this cluster gives GPUs by {info.policy}; change it for all "
            f"its jobs with `slackwater policy set {policy}`, or leave --url out"
        )
    if not info.gpus:
        raise Rejected(f"--gpu-policy {policy}: no node of this cluster has GPUs; leave it out")


async def _run(
    work: Workload,
    options: ClusterOptions,
    url: str | None,
    gpu_policy: str | None,
    window: int,
    on_phase: OnPhase,
) -> Outcome:
    if url is not None:
        async with connect(url, "loadgen", credentials()) as client:
            if gpu_policy is not None:
                await _refuse_other_policy(client, gpu_policy)
            await _refuse_known(client, work)
            share = await experiment.cpu_share(client)
            return await experiment.play(client, work, share, window, on_phase)
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "loadgen") as client:
        return await experiment.play(client, work, cluster.cpu_share, window, on_phase)
