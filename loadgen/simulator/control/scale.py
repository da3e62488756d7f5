"""A fleet in virtual time: thousands of jobs on a thousand nodes, and what that asks of each
service.

Master, controllers, profiler and worker services are the product's. Half of the jobs train on
aggregators, the others are gangs of GPUs. Programs, aggregators, network and disk are models.
"""

import asyncio
import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from typing import Annotated, Any, Final

import msgspec
import psutil

from slackwater.common.base.errors import Retryable
from slackwater.common.shell.client import Client
from slackwater.common.shell.simulated_loop import SIM_START_S
from slackwater.common.store.memory import Fate
from slackwater.loadgen.simulator.control.metering import MeteredLoop, Spent
from slackwater.loadgen.simulator.control.plane import AggregatorModel, JobModel, Plane
from slackwater.loadgen.simulator.control.processes import Rank, node
from slackwater.loadgen.simulator.control.services import PARTY
from slackwater.schemas.base import JobId
from slackwater.schemas.job_requests import JobAccepted, JobRegistered, RegisterJob, SubmitJob
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.subjects import parsed
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.shell import definition as controller_definition
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.shell import definition as master_definition
from slackwater.services.profiler.config import ProfilerConfig
from slackwater.services.profiler.shell import definition as profiler_definition

STOPPED: Final = -15
WINDOW_S: Final = 10.0
"""Seconds of a window: peaks are of the busiest. The last one may be shorter."""
SHORTEST_S: Final = 1.0
PROGRAMS: Final = "programs"
SUBMITTERS: Final = "submitters"
WORKERS: Final = 2
COSTS_S: Final = (0.004, 0.003)
"""CPU seconds of an iteration's tasks, of each bucket."""
COMPUTE_S: Final = 1.0
GPUS_OF_A_JOB: Final = (1, 1, 1, 1, 1, 1, 2, 2, 4, 8)
"""Drawn from: most jobs of a cluster have one GPU."""

Progress = Callable[[int, float], None]
"""Is told how many jobs have ended, and the time in seconds."""
Some = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Counted = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class ControlSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`--set control.option=value`."""

    controllers: Counted = 3
    aggregators: Counted = 96
    """Over all clusters."""
    submitted_s: Some = 50.0
    """Jobs submitted a second."""
    lasting_s: Some = 100.0
    """Mean seconds that a job runs, drawn evenly from half to one and a half of it."""
    aggregating: Share = 0.5
    """Share of jobs that train on aggregators; the others are gangs of GPUs."""
    latency_s: Share = 0.0002
    """Seconds that a message takes."""
    store_s: Share = 0.002
    """Seconds until a record is durable."""
    tail_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    """Seconds for which it goes on after the last submission."""


class Sample(msgspec.Struct):
    """One window."""

    until_s: float
    lasted_s: float
    running: int
    waiting: int
    cpu_s: dict[str, float]
    """Party -> seconds of processor in the window."""
    arrived: dict[str, int]
    """Party -> messages that came to it."""
    sent: dict[str, int]
    stored: dict[str, int]
    """Party -> records that it stored."""


class ControlOutcome(msgspec.Struct):
    policy: str
    seed: int
    nodes: int
    jobs: int
    settings: ControlSettings
    accepted: int = 0
    refused: int = 0
    ended: int = 0
    accepted_s: list[float] = []
    """Seconds from each submission to its answer, in virtual time."""
    samples: list[Sample] = []
    longest_s: dict[str, float] = {}
    """Party -> its longest callback."""
    subjects: dict[str, int] = {}
    """Messages by `kind: service.verb`, of all parties."""
    simulated_s: float = 0.0
    wall_s: float = 0.0
    rss_bytes: int = 0


class _Network:
    """Counts messages, and delays each (`Faults`)."""

    def __init__(self, latency_s: float) -> None:
        self._delays_s = (latency_s,)
        self.sent: Counter[str] = Counter()
        self.arrived: Counter[str] = Counter()
        self.subjects: Counter[str] = Counter()

    def copies(self, sender: str, receiver: str, subject: str) -> Sequence[float]:
        self.sent[sender] += 1
        self.arrived[receiver] += 1
        self.subjects[_class(subject)] += 1
        return self._delays_s


def _class(subject: str) -> str:
    words = parsed(subject)
    return f"{words.kind} {words.noun}.{words.what}" if words is not None else "answers"


class _Disk:
    """Counts records, and delays each (`StoreFaults`)."""

    def __init__(self, store_s: float) -> None:
        self._store_s = store_s
        self.stored: Counter[str] = Counter()

    def fate(self, client: str, bucket: str, key: str) -> tuple[Fate, float]:
        self.stored[client] += 1
        return "good", self._store_s

    def reaches(self, client: str) -> bool:
        return True


class Fleet(Plane):
    """The services and their jobs."""

    def __init__(
        self,
        outcome: ControlOutcome,
        gpus: int,
        loop: MeteredLoop,
        progress: Progress | None,
    ) -> None:
        self.settings = settings = outcome.settings
        self.network, self.disk = _Network(settings.latency_s), _Disk(settings.store_s)
        super().__init__(outcome.seed, self.network, self.disk)
        self.outcome, self._loop, self._progress = outcome, loop, progress
        self._left_s: dict[str, float] = {}
        self._over: dict[str, asyncio.Event] = {}
        self._seen: dict[str, float] = {}
        self._sampled_s = self.now_s()
        self._define(gpus)

    def _define(self, gpus: int) -> None:
        outcome, settings = self.outcome, self.settings
        per_cluster = -(-settings.aggregators // settings.controllers)
        master = MasterConfig(gpu_policy=outcome.policy, aggregators_max=per_cluster)
        self.definitions["master"] = partial(master_definition, master)
        for number in range(settings.controllers):
            config = ControllerConfig(id=f"c{number}")
            self.definitions[config.id] = partial(controller_definition, config)
        self.definitions["profiler"] = partial(profiler_definition, ProfilerConfig())
        for number in range(settings.aggregators):
            self.add(AggregatorModel(f"a{number}", self))
        for number in range(outcome.nodes):
            name = f"n{number}"
            self.definitions[name] = node(self, {}, self._run, name, gpus)

    # Jobs -----------------------------------------------------------------------------------------

    async def submit_all(self, gpus: int) -> None:
        """Submit the jobs, evenly over time, and wait until all have ended or time is over."""
        PARTY.set(SUBMITTERS)
        outcome, settings = self.outcome, self.settings
        rng = random.Random(f"{outcome.seed}/jobs")
        world = self.sim.client("submitters")
        client = Client(world.bus, world.clock, budget_s=60.0, rng=world.rng)
        began_s = self.now_s()
        for number in range(outcome.jobs):
            await world.clock.sleep_until(began_s + number / settings.submitted_s)
            spec = self._spec(number, gpus, rng)
            self._left_s[spec.id] = settings.lasting_s * rng.uniform(0.5, 1.5)
            self.spawn(self._submit(client, spec))
        until_s = self.now_s() + settings.tail_s
        while outcome.ended < outcome.jobs and self.now_s() < until_s:
            await asyncio.sleep(1.0)
            self.raise_failures()

    def _spec(self, number: int, gpus: int, rng: random.Random) -> JobSpec:
        if rng.random() < self.settings.aggregating:
            return JobSpec(
                id=f"j{number}", model="alexnet", workers=WORKERS, servers=1, program=("train",),
                fractional_share=True,
            )  # fmt: skip
        wanted = min(rng.choice(GPUS_OF_A_JOB), gpus * self.outcome.nodes)
        return JobSpec(id=f"j{number}", workers=wanted, gpus=wanted, program=("train",))

    async def _submit(self, client: Client, spec: JobSpec) -> None:
        asked_s = self.now_s()
        try:
            await client.master("submit", SubmitJob(spec=spec), JobAccepted)
        except Retryable:
            self.outcome.refused += 1
            return
        self.outcome.accepted += 1
        self.outcome.accepted_s.append(self.now_s() - asked_s)

    async def _run(self, rank: Rank) -> None:
        """Be a rank's program until the job's time is over, or it is stopped."""
        PARTY.set(PROGRAMS)
        started = rank.started
        began_s = self.now_s()
        try:
            if started.gpu_ids:
                await asyncio.sleep(self._left_s[started.job])
            else:
                await self._train(started.job, started.rank)
        except asyncio.CancelledError:
            rank.code = STOPPED
            if started.rank == 0:
                self._left_s[started.job] -= self.now_s() - began_s
            return
        if started.rank == 0:
            self.outcome.ended += 1

    async def _train(self, job: str, rank: int) -> None:
        """Register, and train: rank 0 moves the versions, each rank tells its iterations."""
        world = self.sim.client(f"agent-{job}-{rank}")
        client = Client(world.bus, world.clock, budget_s=120.0, rng=world.rng)
        spec = JobSpec(id=job, model="alexnet", workers=WORKERS, servers=1, fractional_share=True)
        model = self.models.setdefault(JobId(job), JobModel(spec, COMPUTE_S, COSTS_S))
        register = RegisterJob(job=job, rank=rank, tensors=model.tensors)
        cluster = (await client.master("register", register, JobRegistered)).cluster
        over = self._over.setdefault(job, asyncio.Event())
        if rank:
            await over.wait()
            return
        await self.locate(client, cluster, model)
        until_s = self.now_s() + self._left_s[job]
        while self.now_s() < until_s:
            await self._iterate(client, cluster, model)
        model.result = "done"
        over.set()
        del self.models[JobId(job)], self._over[job]

    async def _iterate(self, client: Client, cluster: str, model: JobModel) -> None:
        begun_s, model.iteration = self.now_s(), model.iteration + 1
        await asyncio.sleep(model.compute_s)
        for bucket in range(len(model.costs_s)):
            await self.push(client, cluster, model, bucket)
        for each in range(model.spec.workers):
            self.tell(model, each, model.iteration, [self.now_s() - begun_s])

    # Samples --------------------------------------------------------------------------------------

    async def sample(self) -> None:
        """Note what each window of WINDOW_S took."""
        while True:
            await asyncio.sleep(WINDOW_S)
            gc.collect()  # Here, where no service pays for what all of them hold.
            self.take_sample()

    def take_last_sample(self) -> None:
        """Note the rest of a window, unless it is so short that its rates say nothing."""
        if self.now_s() - self._sampled_s >= SHORTEST_S or not self.outcome.samples:
            self.take_sample()

    def take_sample(self) -> None:
        now_s = self.now_s()
        cpu_s = {party: spent.total_s for party, spent in self._loop.spent.items()}
        states = Counter(
            known.record.state for known in (self.master.state.jobs.values() if self.master else ())
        )
        self.outcome.samples.append(
            Sample(
                now_s,
                now_s - self._sampled_s,
                states["running"],
                states["pending"],
                {party: all_s - self._seen.get(party, 0.0) for party, all_s in cpu_s.items()},
                dict(self.network.arrived),
                dict(self.network.sent),
                dict(self.disk.stored),
            )
        )
        self._seen, self._sampled_s = cpu_s, now_s
        for counted in (self.network.arrived, self.network.sent, self.disk.stored):
            counted.clear()
        if self._progress is not None:
            self._progress(self.outcome.ended, now_s - SIM_START_S)


def simulate_control(
    policy: str,
    seed: int,
    nodes: int,
    gpus: int,
    jobs: int,
    settings: ControlSettings,
    progress: Progress | None = None,
) -> ControlOutcome:
    """Run one fleet to its end."""
    outcome = ControlOutcome(policy, seed, nodes, jobs, settings)
    began_s = time.perf_counter()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=MeteredLoop) as runner:
            loop: Any = runner.get_loop()
            runner.run(_main(outcome, gpus, loop, progress), context=Context())
    finally:
        gc.enable()
    outcome.rss_bytes = psutil.Process().memory_info().rss
    outcome.wall_s = time.perf_counter() - began_s
    return outcome


async def _main(
    outcome: ControlOutcome, gpus: int, loop: MeteredLoop, progress: Progress | None
) -> None:
    fleet = Fleet(outcome, gpus, loop, progress)
    for name in fleet.definitions:
        fleet.start(name)
    try:
        await asyncio.sleep(WINDOW_S)  # Everybody has begun, and is heard.
        fleet.raise_failures()
        began_s = fleet.now_s()
        fleet.take_sample()
        outcome.samples.clear()
        fleet.network.subjects.clear()
        _forget_longest(loop.spent)
        sampling = fleet.spawn(fleet.sample())
        await fleet.submit_all(gpus)
        fleet.take_last_sample()
        sampling.cancel()
        outcome.simulated_s = fleet.now_s() - began_s
        outcome.longest_s = {party: spent.longest_s for party, spent in loop.spent.items()}
        outcome.subjects = dict(fleet.network.subjects)
    finally:
        for _, task, _ in fleet.running.values():
            task.cancel()  # A thousand services need not end in order.
        await fleet.end_tasks()


def _forget_longest(spent: dict[str, Spent]) -> None:
    for each in spent.values():
        each.longest_s = 0.0
