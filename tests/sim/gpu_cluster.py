"""A cluster of GPUs in virtual time: the master and worker services are the product's; programs are
models that run for as long as the trace says, and remember what they have done when stopped."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.sim.services import Services

from slackwater.common.bus.memory import SeededFaults
from slackwater.common.shell import ServiceDefinition
from slackwater.common.shell.client import Client
from slackwater.common.shell.definition import Port
from slackwater.common.shell.effect_runner import handlers, on
from slackwater.common.shell.world import SimWorld, World
from slackwater.common.store.memory import SeededStoreFaults
from slackwater.schemas.base import JobId
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.jobs import JobAccepted, JobRecord, JobSpec, SubmitJob
from slackwater.schemas.logs import LogPiece
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.core import Master
from slackwater.services.master.scheduling.scheduler import Decision, Scheduler
from slackwater.services.master.scheduling.view import View
from slackwater.services.master.shell import definition as master_definition
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.core import Found, LogRead, ProcessesFound, ProcessExited
from slackwater.services.worker.effects import (
    AwaitEnd,
    FindProcesses,
    ForgetRank,
    ReadRankLog,
    RunRank,
    SignalRank,
    WatchRank,
    WorkerAction,
)
from slackwater.services.worker.shell import definition as worker_definition

STOPPED = -15


@dataclass(frozen=True)
class Decided:
    """One decision that changed something."""

    at_s: float
    allocations: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    """(job, allocation) by job."""


def record(scheduler: Scheduler, into: list[Decided], since_s: float = 0.0) -> None:
    """Note each decision that changes something."""
    decide = scheduler.decide

    def noted(view: View) -> Decision:
        decision = decide(view)
        changed = {**decision.start, **decision.resize, **dict.fromkeys(decision.pause, ())}
        if changed:
            into.append(Decided(view.now_s - since_s, tuple(sorted(changed.items()))))
        return decision

    scheduler.decide = noted  # type: ignore[method-assign]


@dataclass(eq=False)
class Rank:
    """A process, as its files tell of it: they outlive the worker service."""

    job: str
    rank: int
    attempt: int
    gpu_ids: tuple[str, ...]
    state: Any = "running"
    code: int = 0
    task: asyncio.Task[None] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Processes:
    """Handlers of one life of a node's worker service."""

    def __init__(self, cluster: "GpuCluster", node: str) -> None:
        self._cluster, self._ranks = cluster, cluster.ranks[node]
        self._port: Port | None = None

    async def start(self, port: Port) -> None:
        self._port = port

    async def stop(self) -> None:
        pass

    def find(self, _: FindProcesses) -> ProcessesFound:
        return ProcessesFound(
            tuple(
                Found(
                    JobId(r.job), r.rank, r.state, code=r.code, attempt=r.attempt,
                    gpu_ids=r.gpu_ids,
                )
                for _, r in sorted(self._ranks.items())
            )
        )  # fmt: skip

    def run(self, effect: RunRank) -> None:
        job, rank = effect.job, effect.rank
        self._cluster.take(job, effect.gpu_ids)
        entry = self._ranks[job, rank] = Rank(job, rank, effect.attempt, effect.gpu_ids)
        entry.task = self._cluster.spawn(self._live(entry))
        self._cluster.spawn(self._follow(entry))

    async def _live(self, entry: Rank) -> None:
        cluster = self._cluster
        began_s = cluster.now_s()
        try:
            await asyncio.sleep(cluster.durations[entry.job] - cluster.done_s[entry.job])
        except asyncio.CancelledError:
            entry.code = STOPPED
            if entry.rank == 0:
                cluster.done_s[entry.job] += cluster.now_s() - began_s
        finally:
            entry.state = "exited"
            cluster.leave(entry.job, entry.gpu_ids)
            entry.over.set()

    def watch(self, effect: WatchRank) -> None:
        self._cluster.spawn(self._follow(self._ranks[effect.job, effect.rank]))

    async def _follow(self, entry: Rank) -> None:
        await entry.over.wait()
        assert self._port is not None
        self._port.post(ProcessExited(JobId(entry.job), entry.rank, entry.code, "", entry.attempt))

    def signal(self, effect: SignalRank) -> None:
        task = self._ranks[effect.job, effect.rank].task
        assert task is not None
        task.cancel()

    async def await_end(self, _: AwaitEnd) -> None:
        pass

    def forget(self, effect: ForgetRank) -> None:
        entry = self._ranks[effect.job, effect.rank]
        if entry.attempt == effect.attempt:
            entry.state = "reported"

    def read(self, effect: ReadRankLog) -> LogRead:
        asked = effect.asked
        return LogRead(effect.token, LogPiece(job=asked.job, rank=asked.rank, start=0, ended=True))


class GpuCluster(Services):
    """A master and `nodes` worker services with `gpus` GPUs each."""

    def __init__(
        self,
        seed: int,
        policy: str,
        durations: Mapping[str, float],
        *,
        nodes: int = 4,
        gpus: int = 4,
        settings: Mapping[str, str] | None = None,
        faults: SeededFaults | None = None,
        store_faults: SeededStoreFaults | None = None,
    ) -> None:
        super().__init__(SimWorld(seed, faults=faults, store_faults=store_faults))
        self.durations = durations
        self.done_s = dict.fromkeys(durations, 0.0)
        self.decided: list[Decided] = []
        self.began_s = self.now_s()
        self.holders: dict[str, str] = {}
        """GPU -> the job whose process runs on it."""
        names = [f"n{number}" for number in range(nodes)]
        self.ranks: dict[str, dict[tuple[str, int], Rank]] = {name: {} for name in names}
        config = MasterConfig(gpu_policy=policy, gpu_policy_settings=dict(settings or {}))
        self.definitions["master"] = lambda world: self._master(config, world)
        for name in names:
            self.definitions[name] = self._worker(name, gpus)

    def _master(self, config: MasterConfig, world: World) -> ServiceDefinition:
        made = master_definition(config, world, self.durations)
        assert isinstance(made.core, Master)
        record(made.core.state.gpus.scheduler, self.decided, self.began_s)
        return dataclasses.replace(made, tasks=())

    def _worker(self, name: str, gpus: int) -> Callable[[World], ServiceDefinition]:
        inventory = tuple(Gpu(index=n, id=f"{name}/{n}", type="fake") for n in range(gpus))

        def define(world: World) -> ServiceDefinition:
            made = worker_definition(WorkerConfig(id=name, keep_jobs=True), world)
            processes, beat = Processes(self, name), made.heartbeat
            assert beat is not None

            def heartbeat(now_s: float) -> WorkerHeartbeat:
                told = beat(now_s)
                assert isinstance(told, WorkerHeartbeat)
                return msgspec.structs.replace(told, gpus=inventory)

            return dataclasses.replace(
                made,
                handlers=handlers(
                    WorkerAction,
                    on(FindProcesses, processes.find),
                    on(RunRank, processes.run),
                    on(WatchRank, processes.watch),
                    on(SignalRank, processes.signal),
                    on(ForgetRank, processes.forget),
                    on(AwaitEnd, processes.await_end),
                    on(ReadRankLog, processes.read),
                ),
                heartbeat=heartbeat,
                on_start=processes.start,
                on_stop=processes.stop,
                service_gauges=None,
                tasks=(),
            )

        return define

    # GPUs: two jobs never hold one ---------------------------------------------------------------

    def take(self, job: str, gpu_ids: Sequence[str]) -> None:
        assert gpu_ids, f"{job} was started without GPUs"
        for id in gpu_ids:
            assert id not in self.holders, f"{id} is held by {self.holders[id]}, given to {job}"
            self.holders[id] = job

    def leave(self, job: str, gpu_ids: Sequence[str]) -> None:
        for id in gpu_ids:
            assert self.holders.pop(id) == job

    # What users do and see -----------------------------------------------------------------------

    async def submit(self, spec: JobSpec) -> None:
        world = self.sim.client(f"user-{spec.id}")
        client = Client(world.bus, world.clock, budget_s=60.0, rng=world.rng)
        await client.master("submit", SubmitJob(spec=spec), JobAccepted)

    def record(self, id: str) -> JobRecord | None:
        known = self.master.state.jobs.get(JobId(id)) if self.master is not None else None
        return known.record if known is not None else None


@asynccontextmanager
async def gpu_cluster(*arguments: Any, **options: Any) -> AsyncIterator[GpuCluster]:
    cluster = GpuCluster(*arguments, **options)
    for name in cluster.definitions:
        cluster.start(name)
    try:
        yield cluster
        cluster.raise_failures()
    finally:
        await cluster.end_services()
        await cluster.end_tasks()
