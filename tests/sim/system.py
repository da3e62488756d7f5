"""The whole system in virtual time: every service's own shell and core, real Agents, real memory.

Master, controllers, profiler, worker service, aggregators and Agents are the product's. The model's
are the network, the clock, the disk, the supervisor, the training programs (they sleep where a GPU
would compute, and push whole numbers, so that parameters say exactly what was applied) and what a
task costs (so much per element: virtual time has no CPU time).
"""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.sim.gangs import Gangs, Work
from tests.sim.lives import Lives, Network

from slackwater.agent import line as agent_line
from slackwater.agent import session as agent_session
from slackwater.agent.initial import Initial
from slackwater.agent.session import Session
from slackwater.common.base import limits
from slackwater.common.base.errors import SlackwaterError
from slackwater.common.bus.access import Access
from slackwater.common.bus.faults import SeededFaults
from slackwater.common.shell import ServiceDefinition
from slackwater.common.shell.client import Client
from slackwater.common.shell.world import SimWorld, World
from slackwater.common.store.memory import SeededStoreFaults
from slackwater.common.transport.memory import MemoryFabric
from slackwater.common.transport.memory_channel import MemoryChannel
from slackwater.loadgen.simulator.control.processes import Processes, Rank, Ranks, node
from slackwater.loadgen.simulator.control.services import Services
from slackwater.schemas.base import JobId
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.tensors import TensorSpec, UpdateRule
from slackwater.services.aggregator import executor
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.policies import demand
from slackwater.services.controller.shell import definition as controller_definition
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.shell import definition as master_definition
from slackwater.services.profiler.config import ProfilerConfig
from slackwater.services.profiler.shell import definition as profiler_definition
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.shell import definition as worker_definition

SHARE = 0.25
CPU_S_PER_ELEMENT = 1e-3
CHUNK_S = 0.02
"""For how long a task with a deadline has the slot before it looks whether another is nearer."""
WORKERS = 2
NODES, GPUS = 3, 2
"""Nodes with GPUs, and GPUs of each."""
STALLED_S = 120.0
"""Longer than any fault lasts: whoever waits so long waits for ever."""
KILLED = -9


class Slow(Network):
    """A network some of whose addresses are congested: each step to or from them takes longer."""

    def __init__(self, seed: int, *, shared: bool) -> None:
        super().__init__(seed, shared=shared)
        self.extra_s: dict[str, float] = {}

    def way_s(self, address: str) -> float:
        return self.latency_s + self.extra_s.get(address, 0.0)


@dataclass
class Job:
    """The computation of a job, and what its parameters must be after every iteration."""

    spec: JobSpec
    compute_s: float
    elements: tuple[int, ...]
    """Elements of each bucket, in forward order."""
    gradients: list[Any]
    """Per bucket: [rank, iteration, element]"""
    expected: list[Any]
    """Per bucket: [iteration, element]"""
    slow: list[float] = field(default_factory=lambda: [1.0] * WORKERS)
    """Per rank: how many times longer its computing takes just now."""
    iterations_s: list[tuple[float, float]] = field(default_factory=list)
    """Iterations of rank 0: (when it ended, how long it lasted)."""
    ended: str = ""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return tensors with a group each, so that each is a bucket though it is small."""
        return tuple(
            TensorSpec(name=f"t{n}", shape=(count,), group=n)
            for n, count in enumerate(self.elements)
        )


def make_job(id: str, compute_s: float, cpu_s: float, iterations: int, rng: random.Random) -> Job:
    """`cpu_s` an iteration, most of it in the last bucket, as in a network of convolutions."""
    parts = (0.15, 0.3, 0.55)
    elements = tuple(max(2, round(cpu_s * part / CPU_S_PER_ELEMENT)) for part in parts)
    numbers = np.random.default_rng(rng.getrandbits(32))
    gradients = [
        numbers.integers(-9, 10, (WORKERS, iterations + 1, count)).astype(np.float32)
        for count in elements
    ]
    for each in gradients:
        each[:, 0] = 0.0
    expected = [1.0 - each.sum(0).cumsum(0, dtype=np.float32) for each in gradients]
    spec = JobSpec(
        id=id,
        model=id[0],
        workers=WORKERS,
        servers=2,
        iterations=iterations,
        program=("train", id),
        update=UpdateRule(name="sgd", learning_rate=float(WORKERS)),
        fractional_share=True,
    )
    return Job(spec, compute_s, elements, gradients, expected)


# Training programs --------------------------------------------------------------------------------


class _Woken:
    """Stands in for the Waiter of a program's thread."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def look(self) -> None:
        self.event.set()

    release = look


class Program:
    """One rank: the Agent's own main, and a program that trains with it."""

    def __init__(self, system: "System", job: Job, rank: int) -> None:
        self.system, self.job, self.rank = system, job, rank
        initial = Initial({t.name: np.ones(t.shape, np.float32) for t in job.tensors})
        self.session: Any = Session(
            job.spec,
            rank,
            job.tensors,
            initial,
            Access(""),
            submitted=True,
            transport=None,
            deadline_s=STALLED_S,
        )
        self._woken = _Woken()
        self.session._waiter = self._woken

    async def run(self) -> None:
        agent = asyncio.create_task(self._agent())
        looking = asyncio.create_task(self._look())
        try:
            await self._until(self.session._opened.is_set, "its buckets")
            session = self.session
            iteration = min(cell.iteration for cell in session.buckets)
            session.progress.first_iteration = iteration + 1
            while iteration < self.job.spec.iterations:
                await self._iterate(iteration)
                iteration += 1
            await self._forward(iteration, 0.0)
            session._finish = ""
            session._closing.set()
            await agent
        finally:
            agent.cancel()
            looking.cancel()
            await asyncio.gather(agent, looking, return_exceptions=True)
            await self._die()

    async def _agent(self) -> None:
        """Run the Agent as its thread does."""
        try:
            await self.session._main()
        except SlackwaterError as error:
            self.session._fail(error)
            self._woken.release()

    async def _look(self) -> None:
        """Say whether a wait is over is looked at with all that is heard, and now and then."""
        while True:
            await asyncio.sleep(0.25)
            self._woken.look()

    async def _until(self, done: Callable[[], bool], what: str) -> None:
        give_up_s = self.system.now_s() + STALLED_S
        while not done():
            if self.session.failure is not None:
                raise self.session.failure
            self._woken.event.clear()
            await self._woken.event.wait()
            if self.system.now_s() > give_up_s:
                raise AssertionError(
                    f"{self.job.spec.id}/{self.rank} waits for {what} at "
                    f"{self.system.now_s():.1f}: {self._where()}"
                )

    def _where(self) -> str:
        late = [cell for cell in self.session.buckets if not cell.settled]
        if not self.session.buckets:
            return str(self.session._missing_at_start("in time"))
        return ", ".join(map(self.session._describe, late))

    async def _iterate(self, iteration: int) -> None:
        """Forward, each layer with parameters that contain `iteration`, then backward."""
        began_s = self.system.now_s()
        part_s = self.job.compute_s / len(self.job.elements)
        await self._forward(iteration, part_s / 3.0)
        for index in reversed(range(len(self.job.elements))):
            await asyncio.sleep(part_s * 2.0 / 3.0 * self.job.slow[self.rank])
            cell = self.session.buckets[index]
            cell.put(0, self.job.gradients[index][self.rank, iteration + 1])
            self.session.ring(cell)
        lasted_s = self.system.now_s() - began_s
        self.session.progress.durations_s.append(lasted_s)
        if self.rank == 0:
            self.job.iterations_s.append((self.system.now_s(), lasted_s))

    async def _forward(self, iteration: int, layer_s: float) -> None:
        for index, cell in enumerate(self.session.buckets):
            await self._until(lambda cell=cell: cell.settled, f"version {iteration}")  # type: ignore[misc]
            assert cell.refused is None
            self._check(cell, index, iteration)
            await asyncio.sleep(layer_s * self.job.slow[self.rank])

    def _check(self, cell: Any, index: int, iteration: int) -> None:
        """Every update applied once: not one less, not one more, nobody else's."""
        assert cell.version == iteration, (self.job.spec.id, index, cell.version, iteration)
        values = cell.parameters(0)
        wanted = self.job.expected[index][iteration]
        assert (values == wanted).all(), (self.job.spec.id, self.rank, index, iteration)

    async def _die(self) -> None:
        """The process is over: its channels break, whatever it waited for."""
        session = self.session
        if hasattr(session, "_runner"):  # It had begun.
            await session._runner.close()
        for channel in list(session._channels.values()):
            if isinstance(channel, MemoryChannel) and not channel.closed:
                await channel.close()
        for cell in session.buckets:
            for slots in {id(s): s for s in (cell.slots, cell.source) if s is not None}.values():
                slots.close()
        await self.system.sim.broker.crash(f"agent-{self.job.spec.id}-{self.rank}")


# The system ---------------------------------------------------------------------------------------


class System(Services):
    """Everything, started and killed by name."""

    def __init__(
        self,
        seed: int,
        *,
        policy: str,
        aggregators: int = 8,
        clusters: int = 1,
        shared: bool = True,
        masters: int = 1,
        gpu_policy: str = "",
    ) -> None:
        rng = random.Random(f"{seed}/faults")
        self.faults = SeededFaults(rng, drop=0.01, duplicate=0.02, delay_s_max=0.01)
        self.store_faults = SeededStoreFaults(rng, unanswered=0.005, delay_s_max=0.005)
        super().__init__(SimWorld(seed, faults=self.faults, store_faults=self.store_faults))
        self.rng = random.Random(f"{seed}/system")
        self.network = Slow(seed, shared=shared)
        ids = [f"a{n}" for n in range(1, aggregators + 1)]
        self.lives = Lives(self.sim, self.network, random.Random(f"{seed}/lives"), ids, SHARE)
        self.outside: World = self.sim.client("outside")
        self.jobs: dict[str, Job] = {}
        self.ranks: Ranks = {}
        self.works: dict[str, Work] = {}
        """Work of jobs with GPUs, by id."""
        self.gangs = Gangs(self, self.works)
        self.gang_ranks: list[Ranks] = []
        """Processes of each node with GPUs, which others may be on, too."""
        for number in range(masters):
            config = MasterConfig(
                id=f"m{number}", aggregators_max=aggregators, gpu_policy=gpu_policy or "fifo"
            )
            name = f"master{number or ''}"
            self.definitions[name] = lambda world, c=config: master_definition(c, world)  # type: ignore[misc]
        self._define(policy, clusters)
        for number in range(NODES if gpu_policy else 0):
            self.gang_ranks.append({})
            self.definitions[f"n{number}"] = node(
                self, self.gang_ranks[number], self._run, f"n{number}", GPUS
            )

    def _define(self, policy: str, clusters: int) -> None:
        for number in range(clusters):
            config = ControllerConfig(id=f"c{number}", policy=policy)
            self.definitions[config.id] = lambda world, c=config: controller_definition(c, world)  # type: ignore[misc]
        profiler = ProfilerConfig(profile_iterations=5, window_iterations=20)
        self.definitions["profiler"] = lambda world: profiler_definition(profiler, world)

        def worker(world: World) -> ServiceDefinition:
            made = worker_definition(WorkerConfig(id="w1", keep_jobs=True), world)
            return Processes(self, self.ranks, self._run).of(made)

        self.definitions["worker"] = worker

    async def _run(self, rank: Rank) -> None:
        if rank.started.job in self.works:
            await self.gangs.run(rank)
            return
        try:
            await Program(self, self.jobs[rank.started.job], rank.started.rank).run()
        except asyncio.CancelledError:
            rank.code, rank.result = KILLED, "killed"
        except SlackwaterError as error:
            rank.code, rank.result = 1, str(error)

    def raise_failures(self) -> None:
        super().raise_failures()
        for error in self.lives.failures:
            raise error

    # Lives ----------------------------------------------------------------------------------------

    async def begin(self) -> None:
        await self.lives.begin()
        for name in self.definitions:
            self.start(name)

    async def end(self) -> None:
        await self.end_services()
        for id in self.lives.ids:
            life = self.lives.lives[id]
            if life.task is not None:
                life.task.cancel()
                await asyncio.gather(life.task, return_exceptions=True)
            life.aggregator.regions.close()
        await self.end_tasks()
        self.lives.close()

    # For users ------------------------------------------------------------------------------------

    def user(self) -> Client:
        world = self.outside
        return Client(world.bus, world.clock, budget_s=STALLED_S, rng=world.rng)

    async def submit(self, job: Job) -> None:
        self.jobs[job.spec.id] = job
        await self.submit_spec(job.spec)

    async def submit_spec(self, spec: JobSpec) -> None:
        await self.user().submit(spec)

    async def cancel(self, job: Job) -> None:
        await self.user().cancel(job.spec.id)
        job.ended = "cancelled"

    def state_of(self, id: str) -> str:
        assert self.master is not None
        known = self.master.state.jobs.get(JobId(id))
        return known.record.state if known is not None else "unknown"


@asynccontextmanager
async def whole_system(seed: int, **options: Any) -> AsyncIterator[System]:
    """A running system; everything of the real world that it must not touch is replaced."""
    system = System(seed, **options)
    monkeypatch = pytest.MonkeyPatch()
    system.lives.patch(monkeypatch)
    execute = executor.execute

    def modelled(task: executor.Task, *arguments: Any) -> executor.Outcome:
        outcome = execute(task, *arguments)
        return dataclasses.replace(outcome, cpu_s=CPU_S_PER_ELEMENT * task.slots.geometry.elements)

    @asynccontextmanager
    async def world(url: str, name: str, **_: Any) -> AsyncIterator[World]:
        made = system.sim.client(name)
        yield made
        await made.bus.close()

    def fabrics(_: Any) -> dict[str, Any]:
        return {"memory": MemoryFabric(system.network, mapped=system.network.shared)}

    for where in (limits, demand):  # Tasks here are as long as iterations of seconds make them.
        monkeypatch.setattr(where, "CHUNK_SLOT_S", CHUNK_S)
    monkeypatch.setattr(executor, "execute", modelled)
    monkeypatch.setattr(executor, "_spent_s", lambda *_: 0.0)
    monkeypatch.setattr(agent_line, "live_world", world)
    monkeypatch.setattr(agent_session, "agent_fabrics", fabrics)
    try:
        await system.begin()
        yield system
    finally:
        await system.end()
        monkeypatch.undo()
