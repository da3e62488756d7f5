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

import msgspec

from slackwater.loadgen.simulator.pool.profiles import SERVER_CORES, PoolJob, cost
from slackwater.loadgen.simulator.pool.slots import SlotJob, SlotTask, losses
from slackwater.loadgen.simulator.pool.world import MASTER, World
from slackwater.schemas.base import JobId, Message
from slackwater.schemas.cluster import AllocationEvent
from slackwater.schemas.jobs import CancelJob, JobEvent, JobSpec, RegisterJob
from slackwater.schemas.placement import MigrationEvent
from slackwater.schemas.telemetry import JobProfiled
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.core import Controller
from slackwater.services.controller.policies import load_policy
from slackwater.services.controller.policies.demand import slack_s
from slackwater.services.controller.policies.scheme import Packing
from slackwater.services.controller.snapshot import cluster_view
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.core import Master

Progress = Callable[[int, float], None]
PLAYED_S = 20.0
NEVER_S = 1e12
"""Nobody restarts and no message is lost, so that nothing has to be compared again."""


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`--set POLICY.option=value`, or `pool.option=value` for every policy."""

    aggregators: int = 640
    """The pool: machines, or warm slots."""
    clusters: int = 5
    """Controllers that may be used; how many are is the master's decision."""
    aggregators_max: int = 128
    """Of one cluster."""
    scaling_s: float = 600.0
    """The scaling period of the clusters' aggregators; 0: with every exit."""
    on_demand_min: int = 1
    cluster_scaling_s: float = 3600.0
    """The period of the number of clusters."""
    profile_iterations: int = 100
    loss_limit: float = 0.1
    models: str = "alexnet+vgg19+awd-lm+bert-large"
    """Those that jobs are drawn from, the same for every policy: those that the paper trains. `all`
    of the table is another."""
    plays: int = 12
    """Instants at which the slots are played out."""


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
    loss: float = 0.0
    """The worst by the policy's own reckoning."""
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
        self._deadlines = load_policy(policy).deadlines
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
        self._changed: set[str] = set()
        self._master = Master(
            MasterConfig(
                aggregators_max=settings.aggregators_max,
                cluster_scaling_s=settings.cluster_scaling_s,
                jobs_kept_max=1,
            )
        )
        self._controllers = {
            name: Controller(
                ControllerConfig(
                    id=name,
                    policy=policy,
                    loss_limit=settings.loss_limit,
                    scaling_s=settings.scaling_s if self._adapts else 0.0,
                    on_demand_min=settings.on_demand_min,
                    resync_s=NEVER_S,
                ),
                Random(f"{seed} {name}"),
            )
            for name in (f"c{n:02d}" for n in range(settings.clusters))
        }
        self._world = World(
            self._master, self._controllers, settings.aggregators, SERVER_CORES, self._hear
        )

    def run(self) -> PoolOutcome:
        began_s = perf_counter()
        world = self._world
        for job in self._jobs.values():
            world.at(job.start_s, lambda job=job: self._start(job))  # type: ignore[misc]
        last_s = max(job.end_s for job in self._jobs.values())
        self._plan_periods(last_s)
        while world.next_s() < inf and (self._done < len(self._jobs) or world.next_s() <= last_s):
            world.run_next()
            if self._changed:
                self._reckon()
        return PoolOutcome(
            self._policy,
            list(self._rows.values()),
            self._allocated,
            self._in_use,
            dict(sorted(self._causes.items())),
            self._buckets,
            world.steps,
            perf_counter() - began_s,
        )

    def _plan_periods(self, last_s: float) -> None:
        first_s = min(job.start_s for job in self._jobs.values())
        if self._settings.scaling_s and self._adapts:
            self._period(self._settings.scaling_s, last_s)
        for n in range(self._settings.plays if self._adapts else 0):
            at_s = first_s + (last_s - first_s) * (n + 0.5) / self._settings.plays
            self._world.at(at_s, self._play)

    def _period(self, at_s: float, last_s: float) -> None:
        def end() -> None:
            for name in self._controllers:
                if self._world.scaling_due(name):
                    self._world.tick(name)
            if at_s < last_s:
                self._period(at_s + self._settings.scaling_s, last_s)

        self._world.at(at_s, end)

    # A job's life ---------------------------------------------------------------------------------

    def _start(self, job: PoolJob) -> None:
        world = self._world
        for name in self._controllers:
            world.tick(name)  # So that the master has their reports.
        spec = JobSpec(id=job.id, model=job.model, workers=job.workers, servers=job.servers)
        tensors = cost(job.model, job.workers).tensors
        world.command(MASTER, RegisterJob(job=job.id, rank=0, tensors=tensors, spec=spec))
        world.at(job.end_s, lambda: self._end(job))

    def _end(self, job: PoolJob) -> None:
        self._world.command(MASTER, CancelJob(job=job.id))
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._world.now_s)

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
                self._changed.add(str(message.cluster))
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
            known = self._controllers[cluster].state.jobs.get(JobId(job.id))
            if known is None or known.record.phase != "profiling":
                return
            fact = JobProfiled(
                job=JobId(job.id), location_epoch=known.location_epoch, profile=profile
            )
            self._world.fact(MASTER, fact)
            self._world.fact(cluster, fact)

        wait_s = self._settings.profile_iterations * profile.iteration_s
        self._world.at(now_s + wait_s, profiled)

    # What it costs the jobs -----------------------------------------------------------------------

    def _reckon(self) -> None:
        """The loss that the paper's scheme expects, where something changed: d_j against D_j. By
        deadlines nobody is stretched; what is promised there is the limit."""
        for cluster in self._changed:
            state = self._controllers[cluster].state
            if not self._adapts:
                continue
            packing = Packing(cluster_view(state, None))
            for id, duration_s in packing.durations_s().items():
                profile = state.jobs[id].record.profile
                assert profile is not None
                lost = 0.0 if self._deadlines else 1.0 - profile.iteration_s / duration_s
                self._rows[id].loss = max(self._rows[id].loss, lost)
        self._changed.clear()

    def _play(self) -> None:
        """Every cluster's placement as it is now, slot by slot."""
        rng = Random(f"phases at {self._world.now_s}")
        order = "deadline" if self._deadlines else "arrival"
        for controller in self._controllers.values():
            played, shares = [], dict[str, float]()
            for job in controller.state.living():
                profile = job.record.profile
                if profile is None or job.record.temporary or job.moving:
                    continue
                tasks = tuple(
                    SlotTask(place.aggregator, cpu_s, position)
                    for place, cpu_s, position in zip(
                        job.record.places, profile.task_cpu_s, profile.positions, strict=True
                    )
                )
                shares.update({task.aggregator: SERVER_CORES for task in tasks})
                source = self._jobs[job.id]
                played.append(
                    SlotJob(
                        job.id,
                        cost(source.model, source.workers).compute_s,
                        tasks,
                        profile.iteration_s,
                        slack_s(1.0, self._settings.loss_limit),
                        rng.uniform(0.0, 2.0),
                    )
                )
            if played:
                for id, lost in losses(played, shares, order, PLAYED_S).items():  # type: ignore[arg-type]
                    self._rows[id].played = max(self._rows[id].played, lost)
