"""A cluster of GPUs in virtual time: the master and worker services are the product's; programs are
models that remember what they have done when stopped. They run for as long as a trace says, or are
the simulator's profiles of training jobs, whose Pollux agents report to the master."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

from tests.sim.gangs import Gangs, Work

from slackwater.common.base import codec
from slackwater.common.bus.faults import SeededFaults
from slackwater.common.shell import ServiceDefinition
from slackwater.common.shell.client import Client
from slackwater.common.shell.world import SimWorld, World
from slackwater.common.store.memory import SeededStoreFaults
from slackwater.loadgen.simulator.control.processes import Ranks, node
from slackwater.loadgen.simulator.control.services import Services
from slackwater.loadgen.simulator.gpu.jobmodels.base import Conditions
from slackwater.loadgen.simulator.gpu.jobmodels.profiles import ProfileRun
from slackwater.schemas import subjects
from slackwater.schemas.base import RUN_ATTEMPTS, JobId
from slackwater.schemas.job_requests import JobAccepted, SubmitJob
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.core import Master
from slackwater.services.master.scheduling.scheduler import Decision, Scheduler
from slackwater.services.master.scheduling.view import NOTHING, View
from slackwater.services.master.shell import definition as master_definition
from slackwater.services.worker.effects import RunRank


@dataclass(frozen=True)
class Decided:
    """One decision that changed something."""

    at_s: float
    allocations: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    """(job, allocation) by job."""


class NotingScheduler(Scheduler):
    """A scheduler as another one was made, which notes each decision that changes something."""

    def __init__(self, like: Scheduler, into: list[Decided], since_s: float = 0.0) -> None:
        super().__init__(like.policy, like.rules)
        self._into, self._since_s = into, since_s

    def decide(self, view: View) -> Decision:
        decision = super().decide(view)
        changed = {**decision.start, **decision.resize, **dict.fromkeys(decision.pause, ())}
        if changed:
            at_s = view.now_s - self._since_s
            self._into.append(Decided(at_s, tuple(sorted(changed.items()))))
        return decision


class Training:
    """It trains as its profile says. The profile's own agent reports whenever it learned something,
    so that a live policy may know at each round what the simulator's policy sees."""

    def __init__(self, run: ProfileRun) -> None:
        self.run, self.over = run, asyncio.Event()
        self._told: Any = None

    async def go_on(self, cluster: "GpuCluster", rank: RunRank) -> None:
        if rank.rank:
            await self.over.wait()
            return
        run, world = self.run, cluster.sim.client(f"agent-{rank.job}-{rank.attempt}")
        places = tuple((int(node[1:]), gpus) for node, gpus in rank.allocation)
        run.resume(cluster.now_s() - cluster.began_s, places, Conditions())
        try:
            while not run.done:
                due_s = run.next_s()
                await world.clock.sleep_until(cluster.began_s + due_s)
                run.advance(due_s)
                known = run.model, run.gpus_seen
                if known != self._told:
                    self._told = known
                    report = run.agent.report(rank.job, rank.attempt // RUN_ATTEMPTS)
                    subject = subjects.telemetry("job", rank.job, "goodput")
                    await world.bus.publish(subject, codec.encode(report))
            self.over.set()
        except asyncio.CancelledError:
            now_s = cluster.now_s() - cluster.began_s
            run.advance(now_s)
            run.resume(now_s, NOTHING, Conditions())
            raise


class GpuCluster(Services):
    """A master and `nodes` worker services with `gpus` GPUs each. `durations`: what the master is
    told of how long jobs run; None: nothing, as on a real cluster. `align_s`: the trace begins at
    a multiple of it, so that rounds are at the same of its seconds as in the simulator."""

    def __init__(
        self,
        seed: int,
        policy: str,
        works: Mapping[str, Work],
        *,
        durations: Mapping[str, float] | None = None,
        nodes: int = 4,
        gpus: int = 4,
        settings: Mapping[str, str] | None = None,
        align_s: float = 1.0,
        faults: SeededFaults | None = None,
        store_faults: SeededStoreFaults | None = None,
    ) -> None:
        super().__init__(SimWorld(seed, faults=faults, store_faults=store_faults))
        self.gangs = Gangs(self, works)
        self.durations = durations
        self.decided: list[Decided] = []
        self.began_s = ceil(self.now_s() / align_s) * align_s
        """The trace's second 0."""
        names = [f"n{number}" for number in range(nodes)]
        self.ranks: dict[str, Ranks] = {name: {} for name in names}
        config = MasterConfig(gpu_policy=policy, gpu_policy_settings=dict(settings or {}))
        self.definitions["master"] = lambda world: self._master(config, world)
        for name in names:
            self.definitions[name] = node(self, self.ranks[name], self.gangs.run, name, gpus)

    def _master(self, config: MasterConfig, world: World) -> ServiceDefinition:
        made = master_definition(config, world, self.durations)
        assert isinstance(made.core, Master)
        gpus = made.core.state.gpus
        gpus.scheduler = NotingScheduler(gpus.scheduler, self.decided, self.began_s)
        return dataclasses.replace(made, tasks=())

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
    cluster.spawn(cluster.watch_indexes())
    try:
        yield cluster
        cluster.raise_failures()
    finally:
        await cluster.end_services()
        await cluster.end_tasks()
