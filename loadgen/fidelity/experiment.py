"""The fidelity experiment: measure costs live, play a trace live, simulate the same with them.

One cluster of worker services with fake GPUs for each policy, with a real bus. A control simulates
without costs, and has to miss.
"""

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.fidelity import compare, costs, live
from slackwater.loadgen.fidelity.compare import Compared
from slackwater.loadgen.fidelity.costs import Measured
from slackwater.loadgen.fidelity.foretold import Foretold, Told, middle_error
from slackwater.loadgen.fidelity.jobs import (
    SAVE_S,
    Attempt,
    LiveJob,
    attempts,
    live_jobs,
    profiled_jobs,
)
from slackwater.loadgen.fidelity.live import LiveRun
from slackwater.loadgen.fidelity.livelog import live_log, result_of
from slackwater.loadgen.fidelity.training import Training
from slackwater.loadgen.simulator.gpu import audit, eventlog
from slackwater.loadgen.simulator.gpu.build import build_model
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine
from slackwater.loadgen.simulator.gpu.jobmodels.base import JobModel
from slackwater.loadgen.simulator.gpu.jobmodels.profiles import ProfilesModel
from slackwater.loadgen.simulator.gpu.outcome import Costs, Result, Settings
from slackwater.loadgen.simulator.gpu.prepare import prepare
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.loadgen.simulator.options import GENERATED, Options
from slackwater.schemas.gpus import FAKE
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.scheduling import PolicyInfo, SetPolicy
from slackwater.services.master.scheduling.registry import make

POLICIES: Final = ("fifo", "srsf", "tiresias-las", "pollux")
SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "tiresias-las": {"limits": "60,960"},
    "pollux": {"round_s": "1", "steps": "20"},
}
"""Limits of Tiresias' queues in GPU-seconds and rounds of Pollux, scaled down as the trace is; the
search of a round takes fewer steps, as it has a second."""
PROFILED: Final = "pollux"
"""The policy whose jobs train as measured profiles say."""
PROFILED_TRACE: Final = GENERATED + "pollux,load=0.25"
PROFILED_JOBS: Final = 40
REPORT_S: Final = 0.95
"""Seconds between two reports of a profiled job: a little less than a round."""
TRACE: Final = GENERATED + "tiresias"
TIME_SCALE: Final = 1 / 60
PATIENCE: Final = 2.0
SETTLE_S: Final = 60.0
"""A live run is given up after PATIENCE times the simulated one and so many seconds."""

OnPhase = Callable[[str, Mapping[str, JobRecord], float, int], None]
"""(phase, records, seconds, jobs)"""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one trace."""

    policy: str
    seed: int = 1
    jobs: int = 60
    nodes: int = 4
    gpus_per_node: int = 4
    time_scale: float = TIME_SCALE
    kills: int = 0
    """How often the master is killed (-9) while the trace is played."""
    trace: str = TRACE
    min_gpus: int = 0
    settings: dict[str, str] = {}
    """Options of the policy."""


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of one policy's run."""

    plan: Plan
    costs: Measured
    compared: Compared
    control: Compared
    """Beside a simulation in which starts, stops and restarts cost nothing."""
    lost: tuple[str, ...]
    """Jobs that did not complete."""
    findings: tuple[str, ...]
    """Findings of the auditor in the live event log."""
    simulated_findings: tuple[str, ...]
    kills: int
    load: float
    """Processes that wanted to run on this machine at the end, over the last minute."""

    eta_error: float | None = None
    """Median error of the end that was told at half of a job's life, relative to what was left;
    None: nothing was told."""

    def wrong(self) -> list[str]:
        """Say what must not be on any machine."""
        found = [f"job {id} was lost" for id in self.lost]
        return found + [f"audit: {each}" for each in (*self.findings, *self.simulated_findings)]

    def misses(self) -> list[str]:
        """Say what is not as it has to be; empty: all is. While its master is being started again
        a cluster decides nothing: where it was killed, times are for the reader to judge."""
        if self.kills:
            return self.wrong() + self.compared.misses_of_order()
        return self.wrong() + self.compared.misses()

    def doubts(self) -> list[str]:
        """Say why it does not pass; empty: it does."""
        found = self.misses()
        if self.kills:
            return found
        if self.eta_error is not None and self.eta_error > compare.ETA_WITHIN:
            found.append(
                f"ends were foretold {self.eta_error:.0%} off in the middle of jobs' lives, beyond "
                f"{compare.ETA_WITHIN:.0%}"
            )
        preempts = self.compared.simulated.preemptions > 0
        if preempts and not self.control.misses_of_times():
            found.append("the control without costs keeps the bounds: the trace proves nothing")
        return found


def planned(plan: Plan, policy: str) -> Plan:
    """Return the plan under a policy, with its options; Pollux has a trace of its own."""
    settings = dict(SETTINGS.get(policy, {}))
    plan = msgspec.structs.replace(plan, policy=policy, settings=settings)
    if policy == PROFILED and plan.trace == TRACE:
        jobs = min(plan.jobs, PROFILED_JOBS)
        plan = msgspec.structs.replace(plan, trace=PROFILED_TRACE, jobs=jobs)
    return plan


def options_of(plan: Plan) -> Options:
    """Return the same as the simulator is told it."""
    most = plan.nodes * plan.gpus_per_node
    settings: tuple[str, ...] = ("fixed.whole_seconds=false",)
    if plan.policy == PROFILED:
        settings = (
            "profiles.whole_seconds=false", f"profiles.time_scale={plan.time_scale!r}",
            f"profiles.report_s={REPORT_S}",
        )  # fmt: skip
    return Options(
        trace=plan.trace, policies=(plan.policy,), nodes=plan.nodes, seed=plan.seed,
        jobs=plan.jobs, min_gpus=plan.min_gpus,
        gpus_per_node=plan.gpus_per_node, time_scale=plan.time_scale, max_gpus=most,
        job_model="profiles" if plan.policy == PROFILED else "fixed", settings=settings,
    )  # fmt: skip


def model_of(plan: Plan) -> JobModel:
    return build_model(options_of(plan), plan.seed)


def submissions_of(plan: Plan) -> list[Submission]:
    """Take the trace's jobs that fit the cluster. Raises Rejected: the trace is at fault, or none
    does."""
    jobs, model = prepare(options_of(plan), plan.seed).jobs, model_of(plan)
    if isinstance(model, ProfilesModel):
        return model.elastic(jobs, plan.nodes * plan.gpus_per_node)
    return jobs


def simulated(plan: Plan, jobs: Sequence[Submission], measured: Measured) -> Result:
    """Simulate the trace with these costs. Pure."""
    settings = Settings(
        costs=Costs(measured.start_s, measured.restart_s, stop_s=measured.stop_s),
    )
    cluster = Cluster([(plan.gpus_per_node, FAKE)] * plan.nodes)
    policy = make(plan.policy, plan.settings)
    return Engine(jobs, cluster, policy, model_of(plan), settings).run()


@asynccontextmanager
async def cluster_of(
    plan: Plan, folder: Path, durations: Mapping[str, float]
) -> AsyncIterator[tuple[EmbeddedCluster, Client]]:
    """Start a cluster of worker services with fake GPUs whose master knows the `durations`."""
    options = ClusterOptions(
        controllers=1, aggregators=1, cpu_share=0.1, nodes=plan.nodes,
        gpus_per_node=plan.gpus_per_node, gpu_type=FAKE, log_dir=folder / "logs",
        master={
            # Costs are measured of jobs of a fixed size.
            "gpu_policy": "fifo" if plan.policy == PROFILED else plan.policy,
            "gpu_policy_settings": {} if plan.policy == PROFILED else plan.settings,
            "gpu_durations": _told(folder, durations),
            "tick_s": compare.TICK_S,
        },
    )  # fmt: skip
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "fidelity") as client:
        await live.nodes_there(client, plan.nodes)
        yield cluster, client


def _told(folder: Path, durations: Mapping[str, float]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "durations.json"
    path.write_bytes(msgspec.json.encode(durations))
    return str(path.absolute())


async def experiment(
    plan: Plan, folder: Path, on_phase: OnPhase, measured: Measured | None = None
) -> Fidelity:
    """`measured`: the costs, where they are known. Raises what a live run raises; the cluster is
    gone either way."""
    with TemporaryDirectory(prefix="slackwater-saves-") as saves:
        return await _experiment(plan, folder, Path(saves), on_phase, measured)


async def _experiment(
    plan: Plan, folder: Path, saves: Path, on_phase: OnPhase, measured: Measured | None
) -> Fidelity:
    if plan.policy == PROFILED:
        return await _profiled(plan, folder, saves, on_phase, measured)
    submissions = submissions_of(plan)
    jobs = live_jobs(submissions, saves)
    probes = costs.calibration(saves, plan.nodes * plan.gpus_per_node, SAVE_S)
    durations = {job.spec.id: job.submission.oracle.duration_s for job in (*jobs, *probes)}
    async with cluster_of(plan, folder, durations) as (cluster, client):
        if measured is None:
            measured = await costs.measure(client, probes, _phase(on_phase, "costs", probes))
        expected = simulated(plan, submissions, measured)
        foretold = Foretold(measured.start_s)
        kills_s = [expected.end_s * (n + 1) / (plan.kills + 2) for n in range(plan.kills)]
        run = await live.play(
            client, jobs, PATIENCE * expected.end_s + SETTLE_S,
            _phase(on_phase, plan.policy, jobs), kills_s, cluster, foretold=foretold,
        )  # fmt: skip
    written = {job.spec.id: attempts(job) for job in jobs}
    told = foretold.told(run.records)
    return judged(plan, folder, jobs, run, measured, expected, told, written)


async def _profiled(
    plan: Plan, folder: Path, saves: Path, on_phase: OnPhase, measured: Measured | None
) -> Fidelity:
    """Play jobs that train as profiles say. Ends are not foretold: nobody tells what is left."""
    submissions, model, path = submissions_of(plan), model_of(plan), saves / "training"
    view = Cluster([(plan.gpus_per_node, FAKE)] * plan.nodes).view
    assert isinstance(model, ProfilesModel)
    runs = {each.spec.id: model.run(each, view) for each in submissions}
    jobs = profiled_jobs(submissions, runs, saves, path)
    probes = costs.calibration(saves, plan.nodes * plan.gpus_per_node, SAVE_S)
    async with cluster_of(plan, folder, {}) as (cluster, client):
        if measured is None:
            measured = await costs.measure(client, probes, _phase(on_phase, "costs", probes))
        delay_s = measured.stop_s + measured.restart_s
        settings = plan.settings | {"delay_s": f"{delay_s:.3f}"}
        plan = msgspec.structs.replace(plan, settings=settings)
        expected = simulated(plan, submissions, measured)
        chosen = SetPolicy(policy=plan.policy, settings=settings)
        await client.master("set-policy", chosen, PolicyInfo)
        kills_s = [expected.end_s * (n + 1) / (plan.kills + 2) for n in range(plan.kills)]
        training = Training(client, {job.spec.id: runs[job.submission.spec.id] for job in jobs})
        async with training.listening(path):
            run = await live.play(
                client, jobs, PATIENCE * expected.end_s + SETTLE_S,
                _phase(on_phase, plan.policy, jobs), kills_s, cluster, training=training,
            )  # fmt: skip
    return judged(plan, folder, jobs, run, measured, expected, {}, training.written)


def judged(
    plan: Plan,
    folder: Path,
    jobs: Sequence[LiveJob],
    run: LiveRun,
    measured: Measured,
    expected: Result,
    told: Mapping[str, Told],
    written: Mapping[str, Mapping[int, Attempt]],
) -> Fidelity:
    """Compare, audit both logs, and leave them in the folder."""
    submissions = [job.submission for job in jobs]
    found = result_of(run, jobs, written)
    nodes = [(plan.gpus_per_node, FAKE)] * plan.nodes
    lived = live_log(found, plan.policy, nodes)
    model = eventlog.event_log(expected, plan.policy, model_of(plan).name, nodes, False)
    eventlog.write(lived, folder / f"events-{plan.policy}-live.json")
    eventlog.write(model, folder / f"events-{plan.policy}-simulated.json")
    (folder / f"foretold-{plan.policy}.json").write_bytes(msgspec.json.encode(told))
    lost = tuple(id for id, record in run.records.items() if record.state != "completed")
    return Fidelity(
        plan=plan,
        costs=measured,
        compared=compare.compare(found, expected),
        control=compare.compare(found, simulated(plan, submissions, costs.FREE)),
        lost=lost,
        findings=tuple(audit.audit(lived)),
        simulated_findings=tuple(audit.audit(model)),
        kills=run.kills,
        load=os.getloadavg()[0],
        eta_error=middle_error(told),
    )


def _phase(on_phase: OnPhase, name: str, jobs: Sequence[LiveJob]) -> live.OnLook:
    ids = {job.spec.id for job in jobs}

    def look(records: Mapping[str, JobRecord], at_s: float) -> None:
        ours = {id: record for id, record in records.items() if id in ids}
        on_phase(name, ours, at_s, len(ids))

    return look
