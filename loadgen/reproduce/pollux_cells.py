"""One simulation of Pollux's experiments, and which of them each experiment needs.

Conditions of the authors' artifact: 16 machines of 4 GPUs, rounds of 60 s, 30 s for each start and
re-allocation, jobs start at a tick.
"""

from functools import cache
from pathlib import Path
from statistics import fmean

import msgspec

from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.jobmodels.applications import Application, read_applications
from slackwater.loadgen.simulator.gpu.jobmodels.profiles import Options, ProfilesModel
from slackwater.loadgen.simulator.gpu.metrics import quantile
from slackwater.loadgen.simulator.gpu.outcome import Outcome as JobOutcome
from slackwater.loadgen.simulator.gpu.outcome import Result, Scaling
from slackwater.loadgen.simulator.gpu.single import simulate_once
from slackwater.loadgen.simulator.gpu.workload import Oracle, Submission, workload
from slackwater.loadgen.traces import read
from slackwater.schemas.jobs import JobSpec

NODES, NODE_GPUS, RESTART_S, ROUND_S = 16, 4, 30.0, 60.0
WORKLOADS = (1, 2, 3, 5, 6)
LOADS = ("0.5", "1.0", "1.5", "2.0")
POLICIES = ("pollux", "tiresias-artifact", "optimus")
INTERVALS = {"30s": 30.0, "1m": 60.0, "2m": 120.0, "4m": 240.0, "8m": 480.0}
FAIRNESS = (1.0, -1.0, -10.0)
JOBS = 160
"""A workload's at load 1."""
SCALERS = ("goodput", "throughput")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation."""

    policy: str
    workload: int = 0
    """0: a single ImageNet job on a cluster that scales."""
    load: str = "1.0"
    interval_s: float = ROUND_S
    interference: float = 0.0
    known: bool = False
    """Throughput models fitted before submission."""
    scaling: str = ""
    options: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def key(self) -> str:
        return msgspec.json.encode(self).decode()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    avg_jct_s: float
    median_jct_s: float
    p99_jct_s: float
    makespan_s: float
    max_fairness: float
    fair_part: float
    """Part of all jobs: those with a finish-time fairness below 2."""
    restarts: int
    capacity_gpu_s: float
    run_s: float = 0.0
    """Seconds that all jobs together held GPUs."""
    application_jct_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Average JCT by application."""


def simulate(cell: Cell, traces: str) -> Outcome:
    folder = Path(traces) / "pollux"
    applications = _applications(str(folder / "profiles"))
    options = Options(
        adaptive=cell.policy == "pollux",
        report_s=cell.interval_s,
        throughput_only=cell.scaling == "throughput",
        known={name: {"": a.throughput().fitted} for name, a in applications.items()}
        if cell.known
        else {},
    )
    model = ProfilesModel.of(applications, options)
    result = simulate_once(
        _jobs(cell, folder),
        Cluster([(NODE_GPUS, "")] * NODES, up=1 if cell.scaling else None),
        cell.policy,
        model,
        knobs={"round_s": str(cell.interval_s), **cell.options},
        restart_s=RESTART_S,
        interference=cell.interference,
        scaling=Scaling(1, NODES) if cell.scaling else None,
    )
    return _outcome(result, model)


@cache
def _applications(folder: str) -> dict[str, Application]:
    return read_applications(Path(folder))


def _jobs(cell: Cell, folder: Path) -> list[Submission]:
    if not cell.workload:
        return [
            Submission(
                spec=JobSpec(id="imagenet", gpus=4, model="imagenet", batch_size=200),
                oracle=Oracle(), number=0, submit_s=0.0,
            )
        ]  # fmt: skip
    name = "workloads" if cell.load == "1.0" else f"workloads-{cell.load}"
    return workload(read(folder / name / f"workload-{cell.workload}.csv", origin_s=0.0).jobs)


def _outcome(result: Result, model: ProfilesModel) -> Outcome:
    done = result.outcomes
    jcts = sorted(o.end_s - o.job.submit_s for o in done)
    fairness = [_fairness_of(o, done, model) for o in done]
    return Outcome(
        avg_jct_s=sum(jcts) / len(jcts),
        median_jct_s=quantile(jcts, 0.5),
        p99_jct_s=quantile(jcts, 0.99),
        makespan_s=max(o.end_s for o in done) - min(o.job.submit_s for o in done),
        max_fairness=max(fairness),
        fair_part=sum(f < 2 for f in fairness) / len(fairness),
        restarts=sum(o.restarts for o in done),
        capacity_gpu_s=result.capacity_gpu_s,
        run_s=sum(o.run_s for o in done),
        application_jct_s={
            name: fmean(o.end_s - o.job.submit_s for o in done if o.job.spec.model == name)
            for name in sorted({o.job.spec.model for o in done})
        },
    )


def _fairness_of(one: JobOutcome, everyone: list[JobOutcome], model: ProfilesModel) -> float:
    """rho: the JCT over that with an equal share of the cluster to itself, the start included.
    The share is 1/N of the GPUs, N the jobs in the system averaged over this one's life."""
    begun, ended = one.job.submit_s, one.end_s
    together = sum(
        max(0.0, min(ended, o.end_s) - max(begun, o.job.submit_s)) for o in everyone
    ) / max(1.0, ended - begun)
    cluster = Cluster([(NODE_GPUS, "")] * NODES).view
    (free,) = model.elastic([one.job])
    share = max(1, min(free.spec.gpus_max, round(NODES * NODE_GPUS / max(1.0, together))))
    return (ended - begun) / (RESTART_S + model.run(one.job, cluster).alone_s(share))


def load_cells() -> list[Cell]:
    return [
        Cell(policy=policy, workload=w, load=load)
        for load in LOADS
        for w in WORKLOADS
        for policy in POLICIES
    ]


def interval_cells() -> list[Cell]:
    return [
        Cell(policy="pollux", workload=w, interval_s=s)
        for s in INTERVALS.values()
        for w in WORKLOADS
    ]


def interference_cells() -> list[Cell]:
    cells = [Cell(policy="pollux", workload=w, interference=0.5) for w in WORKLOADS]
    for part in (0.0, 0.25, 0.5):
        cells += [unavoided(w, part) for w in WORKLOADS]
    return cells


def unavoided(w: int, part: float) -> Cell:
    options = {"avoid_interference": "false"}
    return Cell(policy="pollux", workload=w, interference=part, options=options)


def fairness_cells() -> list[Cell]:
    baselines = [Cell(policy=p, workload=w) for p in POLICIES[1:] for w in WORKLOADS]
    return [fair(w, p) for p in FAIRNESS for w in WORKLOADS] + baselines


def fair(w: int, p: float) -> Cell:
    options = {} if p == -1 else {"p": f"{p:g}"}
    return Cell(policy="pollux", workload=w, options=options)


def realistic_cells() -> list[Cell]:
    """Table 3.2's baselines as ordinary users configure jobs (the trace's GPUs, M0 for each), and
    Pollux, which chooses both itself."""
    baselines = [
        Cell(policy=policy, workload=w, load="realistic")
        for policy in POLICIES[1:]
        for w in WORKLOADS
    ]
    return [fair(w, -1) for w in WORKLOADS] + baselines


def exploration_cells() -> list[Cell]:
    return [Cell(policy="pollux", workload=w, known=k) for k in (False, True) for w in WORKLOADS]


def autoscaling_cells() -> list[Cell]:
    return [Cell(policy="pollux", scaling=s, options={"scale": "true"}) for s in SCALERS]
