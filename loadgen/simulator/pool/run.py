"""One policy over one list of jobs: the pool as it grows and shrinks, and what the jobs feel.

A job registers when its GPUs are given to it, is profiled for `profile_iterations` on temporary
aggregators, is assigned, shares, and is released when its time is over. All of that is decided by
the services' cores (world.py). Its running time is the trace's: no job is slowed here; what sharing
costs it is counted as its policy counts it, and at a few instants played out slot by slot.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from random import Random
from time import perf_counter
from typing import Annotated, Final

import msgspec

from slackwater.common.base import limits
from slackwater.loadgen.simulator.pool.checker import Checker
from slackwater.loadgen.simulator.pool.faults import Faults
from slackwater.loadgen.simulator.pool.feedback import Feedback, Mode
from slackwater.loadgen.simulator.pool.profiles import SERVER_CORES, PoolJob, cost
from slackwater.loadgen.simulator.pool.world import MASTER, World
from slackwater.schemas.base import AGGREGATORS_MAX, ClusterId, JobId, Message
from slackwater.schemas.cluster import AllocationEvent
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_requests import CancelJob, RegisterJob
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import MigrationEvent
from slackwater.schemas.telemetry import JobProfiled
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.core import Controller
from slackwater.services.controller.policies import load_policy
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.core import Master

Progress = Callable[[int, float], None]
NEVER_S = 1e12
"""No service restarts and no message is lost: nothing has to be compared again."""


Iterations = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Period = Annotated[float, msgspec.Meta(ge=0.0, le=limits.TRACE_SECONDS_MAX)]
Daily = Annotated[float, msgspec.Meta(ge=0.0, le=100_000.0)]
Members = Annotated[int, msgspec.Meta(ge=1, le=AGGREGATORS_MAX)]
PERIOD_S_MIN: Final = 1.0


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`--set POLICY.option=value`, or `pool.option=value` for every policy."""

    aggregators: Members = 640
    """The pool: machines, or warm slots."""
    clusters: Annotated[int, msgspec.Meta(ge=1, le=limits.CLUSTERS_MAX)] = 5
    """Controllers that may be used; how many are is the master's decision."""
    aggregators_max: Members = 128
    """Aggregators that one cluster may have."""
    scaling_s: Period = 600.0
    """The scaling period of the clusters' aggregators; 0: with every exit."""
    on_demand_min: Members = 1
    keep_demand: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """The part of a period's mean number of aggregators in use that stays allocated."""
    cluster_scaling_s: Period = 3600.0
    """The period of the number of clusters."""
    profile_iterations: Iterations = 100
    loss_limit: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)] = 0.1
    pack_alone: bool = False
    """Whether a job alone in its cluster has to do with as few aggregators as it needs."""
    feedback: Mode = "scheme"
    """Chooses what monitor windows tell the controllers: the loss that the policy expects, the one
    that the slots show when they are played out, or nothing."""
    window_iterations: Iterations = 50
    kills: Daily = 0.0
    """Aggregators killed a day."""
    stragglers: Daily = 0.0
    """Jobs whose own machines are slow for a while, a day."""
    check: bool = False
    """Whether all that must hold is looked at after every event."""
    models: str = "alexnet+vgg19+awd-lm+bert-large"
    """Models that jobs are drawn from, the same for every policy: those that the paper trains.
    `all` takes every model of the table."""
    plays: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 12
    """Instants at which the slots are played out."""

    def __post_init__(self) -> None:
        for name in ("scaling_s", "cluster_scaling_s"):
            if 0.0 < getattr(self, name) < PERIOD_S_MIN:
                raise ValueError(f"{name} is 0 (none) or at least {PERIOD_S_MIN:g}")


class JobRow(msgspec.Struct):
    """One row of jobs.csv."""

    job: str
    model: str
    workers: int
    servers: int
    start_s: float
    end_s: float
    cluster: str = ""
    migrations: int = 0
    reverts: int = 0
    loss: float = 0.0
    """The worst at any moment, as `feedback` reckons it."""
    loss_mean: float = 0.0
    """Mean loss over the whole time that the job ran."""
    beyond_longest_s: float = 0.0
    """The longest that it lost more than the limit."""
    played: float = -1.0
    """The worst that the slots showed; -1: not played."""


class PoolOutcome(msgspec.Struct):
    policy: str
    rows: list[JobRow]
    allocated: list[tuple[float, int]]
    """(from when, how many aggregators)"""
    clusters: list[tuple[float, int]]
    """(from when, how many clusters hold any)"""
    migrations: dict[str, int]
    buckets_moved: int
    steps: int
    wall_s: float


def _controllers(policy: str, settings: PoolSettings, seed: int) -> dict[str, Controller]:
    adapts = load_policy(policy).adapts
    return {
        name: Controller(
            ControllerConfig(
                id=name,
                policy=policy,
                loss_limit=settings.loss_limit,
                pack_alone=settings.pack_alone,
                scaling_s=settings.scaling_s if adapts else 0.0,
                on_demand_min=settings.on_demand_min,
                keep_demand=settings.keep_demand,
                resync_s=NEVER_S,
            ),
            Random(f"{seed} {name}"),
        )
        for name in (f"c{n:02d}" for n in range(settings.clusters))
    }


class PoolRun:
    def __init__(
        self,
        policy: str,
        jobs: Sequence[PoolJob],
        settings: PoolSettings,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self._policy = policy
        self._settings = settings
        self._adapts = load_policy(policy).adapts
        self._progress = progress
        self._jobs = {JobId(job.id): job for job in jobs}
        self._rows = {
            job.id: JobRow(job.id, job.model, job.workers, job.servers, job.start_s, job.end_s)
            for job in jobs
        }
        self._done = 0
        self._allocated: list[tuple[float, int]] = [(0.0, 0)]
        self._holders: Counter[str] = Counter()
        self._holder_of: dict[str, str] = {}
        self._in_use: list[tuple[float, int]] = [(0.0, 0)]
        self._causes: Counter[str] = Counter()
        self._buckets = 0
        self._master = Master(
            MasterConfig(
                aggregators_max=settings.aggregators_max,
                cluster_scaling_s=settings.cluster_scaling_s,
                jobs_kept_max=1,
            )
        )
        self.controllers = _controllers(policy, settings, seed)
        self.world = World(
            self._master, self.controllers, settings.aggregators, SERVER_CORES, self._hear
        )
        self._feedback = Feedback(
            settings.feedback,
            self.controllers,
            self._jobs,
            settings.loss_limit,
            settings.window_iterations,
            self.world.at,
            self.world.fact,
        )

        self.faults = Faults(seed, self.world, self._feedback, self._running)
        self._checker = (
            Checker(self.world, self.controllers, self._feedback) if settings.check else None
        )
        self._last_s = max(job.end_s for job in jobs)
        for job in jobs:
            self.world.at(job.start_s, lambda job=job: self._start(job))  # type: ignore[misc]
        self._plan_periods(min(job.start_s for job in jobs), self._last_s)

    def _running(self) -> dict[JobId, str]:
        """Return jobs that are settled, and their clusters."""
        return {
            job.id: name
            for name, controller in self.controllers.items()
            for job in controller.state.living()
            if job.record.phase == "steady"
        }

    def run(self) -> PoolOutcome:
        began_s = perf_counter()
        self.play_until(inf)
        self._sum_up()
        return PoolOutcome(
            self._policy,
            list(self._rows.values()),
            self._allocated,
            self._in_use,
            dict(sorted(self._causes.items())),
            self._buckets,
            self.world.steps,
            perf_counter() - began_s,
        )

    def play_until(self, until_s: float) -> None:
        """All events before then, or until all is over."""
        world, last_s = self.world, self._last_s
        while (next_s := world.next_s()) < until_s:
            if self._done == len(self._jobs) and next_s > last_s:
                return
            world.run_next()
            if self._adapts:
                self._feedback.settle(world.now_s)
            if self._checker is not None:
                self._checker.check()

    def _plan_periods(self, first_s: float, last_s: float) -> None:
        self.faults.plan(first_s, last_s, self._settings.kills, self._settings.stragglers)
        if self._settings.scaling_s and self._adapts:
            self._period(self._settings.scaling_s, last_s)
        for n in range(self._settings.plays if self._adapts else 0):
            at_s = first_s + (last_s - first_s) * (n + 0.5) / self._settings.plays
            self.world.at(at_s, self._play)

    def _period(self, at_s: float, last_s: float) -> None:
        def end() -> None:
            for name in self.controllers:
                if self.world.scaling_due(name):
                    self.world.tick(name)
            if at_s < last_s:
                self._period(at_s + self._settings.scaling_s, last_s)

        self.world.at(at_s, end)

    # A job's life ---------------------------------------------------------------------------------

    def _start(self, job: PoolJob) -> None:
        world = self.world
        for name in self.controllers:
            world.report(name)
        spec = JobSpec(
            id=job.id, model=job.model, workers=job.workers, servers=job.servers,
            fractional_share=True,
        )  # fmt: skip
        tensors = cost(job.model, job.workers).tensors
        world.command(MASTER, RegisterJob(job=job.id, rank=0, tensors=tensors, spec=spec))
        world.at(job.end_s, lambda: self._end(job))

    def _end(self, job: PoolJob) -> None:
        cluster = self._rows[job.id].cluster
        self.world.command(MASTER, CancelJob(job=job.id))
        self._done += 1
        if cluster:
            self._feedback.ended(JobId(job.id), self.world.now_s)
            self._feedback.changed(ClusterId(cluster))
        if self._progress is not None:
            self._progress(self._done, self.world.now_s)

    def _hear(self, now_s: float, message: Message) -> None:
        match message:
            case AllocationEvent():
                self._allocation(message, now_s)
            case MigrationEvent(fact="started"):
                self._causes[message.cause] += 1
                self._buckets += len(message.buckets)
                self._rows[message.job].migrations += 1
            case JobEvent(fact="located") if self._adapts:
                self._located(message, now_s)
            case JobEvent(fact="steady"):
                self._feedback.changed(message.cluster)
            case JobEvent(fact="reverted" | "expanded" | "protected"):
                self._rows[message.job].reverts += 1
            case _:
                pass

    def _allocation(self, event: AllocationEvent, now_s: float) -> None:
        if event.fact == "allocated":
            self._holder_of[event.aggregator] = str(event.cluster)
            self._holders[str(event.cluster)] += 1
        elif event.fact == "released":
            self._holders[self._holder_of.pop(event.aggregator)] -= 1
        held = sum(count > 0 for count in self._holders.values())
        for series, value in ((self._allocated, event.in_use), (self._in_use, held)):
            if series[-1][0] == now_s:
                series.pop()
            series.append((now_s, value))

    def _located(self, event: JobEvent, now_s: float) -> None:
        job, cluster = self._jobs[event.job], str(event.cluster)
        self._rows[event.job].cluster = cluster
        profile = cost(job.model, job.workers).profile

        def profiled() -> None:
            known = self.controllers[cluster].state.jobs.get(JobId(job.id))
            if known is None or known.record.phase != "profiling":
                return
            fact = JobProfiled(
                job=JobId(job.id), location_epoch=known.location_epoch, profile=profile
            )
            self.world.fact(MASTER, fact)
            self.world.fact(cluster, fact)

        wait_s = self._settings.profile_iterations * profile.iteration_s
        self.world.at(now_s + wait_s, profiled)

    # Costs for the jobs ---------------------------------------------------------------------------

    def _play(self) -> None:
        for id, lost in self._feedback.play_all(self.world.now_s).items():
            self._rows[id].played = max(self._rows[id].played, lost)

    def _sum_up(self) -> None:
        for id, felt in self._feedback.felt.items():
            row = self._rows[id]
            row.loss, row.beyond_longest_s = felt.worst, felt.beyond_longest_s
            row.loss_mean = felt.lost_s / max(row.end_s - row.start_s, 1e-9)
