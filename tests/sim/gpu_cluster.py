"""A cluster of GPUs in virtual time: the master and worker services are the product's; programs are
models that run for as long as the trace says, and remember what they have done when stopped."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from tests.sim.processes import Processes, Rank, Ranks
from tests.sim.services import Services

from slackwater.common.bus.memory import SeededFaults
from slackwater.common.shell import ServiceDefinition
from slackwater.common.shell.client import Client
from slackwater.common.shell.world import SimWorld, World
from slackwater.common.store.memory import SeededStoreFaults
from slackwater.schemas.base import JobId
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.jobs import JobAccepted, JobRecord, JobSpec, SubmitJob
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.core import Master
from slackwater.services.master.scheduling.scheduler import Decision, Scheduler
from slackwater.services.master.scheduling.view import View
from slackwater.services.master.shell import definition as master_definition
from slackwater.services.worker.config import WorkerConfig
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
        self.ranks: dict[str, Ranks] = {name: {} for name in names}
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
            beat = made.heartbeat
            assert beat is not None

            def heartbeat(now_s: float) -> WorkerHeartbeat:
                told = beat(now_s)
                assert isinstance(told, WorkerHeartbeat)
                return msgspec.structs.replace(told, gpus=inventory)

            processes = Processes(self, self.ranks[name], self._run)
            return dataclasses.replace(processes.of(made), heartbeat=heartbeat, service_gauges=None)

        return define

    async def _run(self, rank: Rank) -> None:
        """Sleep for the rest of the job's duration. Its first rank notes what a stop has left."""
        job, began_s = rank.started.job, self.now_s()
        self.take(job, rank.started.gpu_ids)
        try:
            await asyncio.sleep(self.durations[job] - self.done_s[job])
        except asyncio.CancelledError:
            rank.code = STOPPED
            if rank.started.rank == 0:
                self.done_s[job] += self.now_s() - began_s
        finally:
            self.leave(job, rank.started.gpu_ids)

    # GPUs: two jobs never hold one ---------------------------------------------------------------

    def take(self, job: str, gpu_ids: Sequence[str]) -> None:
        assert gpu_ids, f"{job} was started without GPUs"
        for id in gpu_ids:
            assert id not in self.holders, f"{id} is held by {self.holders[id]}, given to {job}"
            self.holders[id] = job

    def leave(self, job: str, gpu_ids: Sequence[str]) -> None:
        for id in gpu_ids:
            assert self.holders.pop(id) == job

    # For users ------------------------------------------------------------------------------------

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
