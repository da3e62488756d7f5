"""`loadgen experiment`: the papers' experiments, live, with their controls and a verdict."""

import os
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from slackwater.common.bus.access import shown
from slackwater.common.embedded import ClusterOptions, fit_cpu_share
from slackwater.console.names import policy_named
from slackwater.console.options import Json, Report, Seed, Window
from slackwater.console.outcome import INCONCLUSIVE, Usage, err, report_folder, reported, run
from slackwater.loadgen.cli import fidelity
from slackwater.loadgen.cli.progress import progress
from slackwater.loadgen.cli.replay import POLICY_HELP, conclude
from slackwater.loadgen.fidelity.experiment import Plan
from slackwater.loadgen.replay import calibrate, experiment, report, workload
from slackwater.schemas.jobs import Aggregation

NAMES: Final = ("sharing", "fidelity")
AGGREGATORS: Final = 10
CPU_SHARE: Final = 0.1
PROFILER: Final = {"profile_iterations": 8, "profile_s": 2.0}
WINDOW_S: Final = 8.0
"""A window of VGG19's is full with ten of its iterations."""
DUTY: Final = 0.327
"""VGG19's. AlexNet's is 1.05 then, so that it asks for a second server as in figure 10, and three
VGG19 keep one aggregator .98 busy."""


def play(
    name: Annotated[
        str,
        typer.Argument(
            help="The experiment to play: sharing, which is figure 10 of AutoPS, or fidelity: the "
            "simulator beside a live cluster."
        ),
    ],
    time_scale: Annotated[
        str, typer.Option(help="Factor for arrivals and durations: 0.5; fidelity's is 1/60.")
    ] = "",
    policy: Annotated[str, typer.Option(help=f"{POLICY_HELP}.")] = "cyclic",
    window: Window = 20,
    gpu_policy: Annotated[
        list[str] | None, typer.Option(help="Policy of the experiment fidelity; repeatable.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=2, max=480, help="Jobs of fidelity.")] = 60,
    nodes: Annotated[int, typer.Option(min=1, max=16, help="Worker services of fidelity.")] = 4,
    gpus_per_node: Annotated[int, typer.Option(min=1, max=16, help="Fake GPUs of each.")] = 4,
    kill_master: Annotated[
        int, typer.Option(min=0, max=10, help="Kill fidelity's master so often.")
    ] = 0,
    seed: Seed = 1,
    report_dir: Report = Path("reports/experiment"),
    json: Json = False,
) -> None:
    """Play an experiment live, beside its baselines and control, and say what it proves.

    Exit codes: 0 conclusive, 1 a bound is missed, 3 it proves nothing; with the reasons.
    """
    options: dict[str, Any] = {k: shown(str(v)) for k, v in locals().items() if k != "options"}
    with reported():
        if name not in NAMES:
            raise Usage(f"experiment {name!r}: choose {', '.join(NAMES)}")
        if name == "fidelity":
            plan = Plan(
                policy="", seed=seed, jobs=jobs, nodes=nodes, gpus_per_node=gpus_per_node,
                time_scale=fidelity.scale(time_scale or "1/60"), kills=kill_master,
            )  # fmt: skip
            return fidelity.play(plan, gpu_policy or ["tiresias-las"], report_dir, json)
        factor = fidelity.scale(time_scale or "1")
        chosen = policy_named(policy)
        if chosen == "static":
            raise Usage("--policy static shares nothing: it is the baseline; choose another")
        doubts = _share(chosen, factor, window, seed, report_dir, options, json)
    if doubts:
        raise typer.Exit(INCONCLUSIVE)


def _share(
    policy: Aggregation, time_scale: float, window: int, seed: int, report_dir: Path,
    options: dict[str, Any], json: bool,
) -> list[str]:  # fmt: skip
    """Play the experiment of sharing; return why it proves nothing, if it does not."""
    started_s = time.monotonic()
    report_folder(report_dir)  # Before anything long begins.
    cluster, work = _prepared(policy, time_scale, window, seed, report_dir)
    options["workload"] = work
    err.print(
        f"bytes scale {work.bytes_scale:.3f}, a fold is charged "
        f"{cluster.charge_ns_per_byte:.3f} ns a byte, load {os.getloadavg()[0]:.1f}"
    )
    with progress() as on_phase:
        phases = experiment.Phases(events=True)
        outcome = run(experiment.shared_experiment(work, cluster, window, on_phase, phases))
    doubts = report.doubts_about(outcome)
    summary = report.summarize(
        outcome, doubts=doubts, experiment=True, wall_s=time.monotonic() - started_s
    )
    conclude(outcome, summary, report_dir, options, json)
    return doubts


def _prepared(
    policy: Aggregation, time_scale: float, window: int, seed: int, report_dir: Path
) -> tuple[ClusterOptions, workload.Workload]:
    """The cluster, and the workload with tensors that keep its servers as busy as the paper's."""
    plan = workload.shared_aggregation(time_scale=time_scale, bytes_scale=1.0, seed=seed)
    servers = AGGREGATORS + sum(spec.servers for spec in experiment.twins(plan))
    share = fit_cpu_share(CPU_SHARE, servers, len(os.sched_getaffinity(0)))
    compute_s = workload.COMPUTE_S[calibrate.REFERENCE] * time_scale
    charge = calibrate.charge(share, compute_s, DUTY)
    cluster = ClusterOptions(
        controllers=2,
        aggregators=AGGREGATORS,
        cpu_share=CPU_SHARE,
        policy=policy,
        charge_ns_per_byte=charge.ns_per_byte,
        log_dir=report_dir / "logs",
        master={"cluster_scaling_s": experiment.CLUSTER_SCALING_S},
        profiler={**PROFILER, "window_iterations": window, "window_s": WINDOW_S * time_scale},
    )
    work = workload.shared_aggregation(
        time_scale=time_scale, bytes_scale=charge.bytes_scale, seed=seed
    )
    return cluster, work
