"""The whole control plane in virtual time: real master, controllers and profiler in real shells
over the in-memory bus and store; aggregators and jobs are models that keep the slot protocol's
promises.

The models keep version counters instead of bytes: an update that is lost or applied twice shows as
a version that differs from the job's iteration.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from slackwater.common.bus.memory import SeededFaults
from slackwater.common.client import Client
from slackwater.common.codec import decode, encode
from slackwater.common.effects import Effect, Recovered, Reply, Requested
from slackwater.common.errors import Rejected, Retryable
from slackwater.common.shell import ServiceDefinition, run_service
from slackwater.common.simloop import run_simulated
from slackwater.common.store.memory import SeededStoreFaults
from slackwater.common.world import SimWorld, World, sim_world
from slackwater.schemas import subjects
from slackwater.schemas.base import AggregatorId, JobId, NodeId, Ok
from slackwater.schemas.cluster import AggregatorHeartbeat, AllocationEvent
from slackwater.schemas.jobs import (
    FinishJob,
    JobEvent,
    JobRegistered,
    JobSpec,
    RegisterJob,
    TensorSpec,
)
from slackwater.schemas.placement import (
    BucketHeld,
    BucketsHeld,
    DropJob,
    HostBuckets,
    ListBuckets,
    Located,
    LocateJob,
    MigrateInit,
    MigrationEvent,
    PlanTurns,
    TensorCopyDone,
    WorkerDone,
)
from slackwater.schemas.telemetry import IterationsObserved, TaskCost, TasksObserved
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.core import Controller
from slackwater.services.controller.shell import definition as controller_definition
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.core import Master
from slackwater.services.master.shell import definition as master_definition
from slackwater.services.profiler.config import ProfilerConfig
from slackwater.services.profiler.shell import definition as profiler_definition

SHARE = 0.1
MIB = 1024 * 1024


# The modelled aggregator ------------------------------------------------------------------------


@dataclass
class Region:
    """A bucket's memory. It outlives its aggregator's process, as a memfd in a descriptor store."""

    location_epoch: int
    version: int
    initialized: bool
    hosted: bool = True
    """Its plan is known to the present process, so that Agents can attach."""
    move: MigrateInit | None = None
    told: bool = True
    """WORKER_DONE was said since it came here."""


class AggregatorModel:
    """Host, migrate, drop, held; `fold` is what a job's last worker causes by ringing."""

    def __init__(self, id: str, plane: "Plane") -> None:
        self.id = AggregatorId(id)
        self.plane = plane
        self.regions: dict[tuple[JobId, int], Region] = {}
        self.incarnation = 0
        self.running = False
        self.executions: dict[tuple[JobId, int], int] = {}

    def step(self, event: Any, now_s: float) -> list[Effect]:
        if isinstance(event, Recovered):
            self.incarnation = event.epoch
            self.running = True
            for region in self.regions.values():
                region.hosted, region.move = False, None
        if not isinstance(event, Requested):
            return []
        match event.message:
            case HostBuckets():
                self._host(event.message)
            case MigrateInit():
                self._migrate(event.message)
            case DropJob():
                self._drop(event.message)
            case ListBuckets():
                return [Reply(event.token, self._held())]
        return [Reply(event.token, Ok())]

    def _host(self, message: HostBuckets) -> None:
        for layout, epoch in zip(message.buckets, message.at_epochs, strict=True):
            region = self.regions.get((message.plan.job, layout.index))
            if region is None:
                self.regions[message.plan.job, layout.index] = Region(epoch, 0, False)
            elif region.location_epoch <= epoch:
                if region.location_epoch < epoch:
                    region.move = None
                region.location_epoch, region.hosted = epoch, True

    def _migrate(self, message: MigrateInit) -> None:
        for bucket, epoch in zip(message.buckets, message.epochs, strict=True):
            region = self.regions.get((JobId(message.job), bucket))
            if region is None or region.location_epoch >= epoch:
                continue
            standing = region.move
            if standing is None or standing.epochs[standing.buckets.index(bucket)] != epoch:
                region.move = message  # Else it is repeated, perhaps by the next controller.

    def _drop(self, message: DropJob) -> None:
        epochs = dict(zip(message.buckets or (), message.up_to_epochs or (), strict=False))
        for job, bucket in list(self.regions):
            named = message.buckets is None or bucket in message.buckets
            region = self.regions[job, bucket]
            if (
                job == message.job
                and named
                and region.location_epoch <= epochs.get(bucket, 1 << 60)
            ):
                del self.regions[job, bucket]

    def _held(self) -> BucketsHeld:
        return BucketsHeld(
            aggregator=self.id,
            incarnation=self.incarnation,
            held=tuple(
                BucketHeld(
                    job=job,
                    bucket=bucket,
                    layout_epoch=1,
                    location_epoch=region.location_epoch,
                    version=region.version,
                    moving=region.move is not None,
                )
                for (job, bucket), region in sorted(self.regions.items())
            ),
        )

    def heartbeat(self, now_s: float) -> AggregatorHeartbeat:
        return AggregatorHeartbeat(
            service="aggregator",
            id=self.id,
            incarnation=self.incarnation,
            at_s=now_s,
            node=NodeId("n"),
            cpu_share=SHARE,
            addresses=(("shm", f"/run/{self.id}"),),
            buckets=len(self.regions),
            jobs=len({job for job, _ in self.regions}),
            held_bytes=0,
            busy_s=0.0,
            bytes_in=0,
            bytes_out=0,
        )

    def fold(self, job: JobId, bucket: int, iteration: int) -> tuple[AggregatorId, int] | None:
        """Apply one iteration's update: (where the pull response says the bucket is, its location
        epoch); None: this process does not have the bucket."""
        region = self.regions.get((job, bucket))
        if not self.running or region is None or not region.hosted:
            return None
        if not region.initialized:  # Seeded from the workers' parameters.
            region.version, region.initialized = iteration - 1, True
        if region.version == iteration - 1:  # Else a retry: it was applied before the answer.
            region.version = iteration
        assert region.version == iteration, f"{job}/{bucket} at {self.id}: {region}, {iteration}"
        self.executions[job, bucket] = self.executions.get((job, bucket), 0) + 1
        if not region.told:
            region.told = True
            self.plane.publish(
                subjects.event("migration", job, "worker-done"),
                WorkerDone(
                    job=job, bucket=bucket, location_epoch=region.location_epoch, target=self.id
                ),
            )
        if region.move is None:
            return self.id, region.location_epoch
        move = region.move
        epoch = move.epochs[move.buckets.index(bucket)]
        self.plane.spawn(self._copy(job, bucket, region, move, epoch))
        return move.to.aggregator, epoch

    async def _copy(
        self, job: JobId, bucket: int, region: Region, move: MigrateInit, epoch: int
    ) -> None:
        target = self.plane.aggregators[move.to.aggregator]
        while True:
            await asyncio.sleep(self.plane.rng.uniform(0.001, 0.02))
            if region.move is not move or not self.running:
                return  # Cancelled, dropped, or this process died.
            if target.running:
                break
        del self.regions[job, bucket]
        arrived = target.regions[job, bucket] = Region(epoch, region.version, True, told=False)
        self.plane.publish(
            subjects.event("migration", move.migration, "copied"),
            TensorCopyDone(
                migration=move.migration,
                job=job,
                bucket=bucket,
                location_epoch=epoch,
                version=arrived.version,
                source=self.id,
                target=target.id,
                nbytes=1,
                copy_s=0.01,
            ),
        )

    async def tell_costs(self, port: Any) -> None:
        """TasksObserved, once a second."""
        while True:
            await asyncio.sleep(1.0)
            tasks = tuple(
                TaskCost(
                    job=job,
                    bucket=bucket,
                    executions=count,
                    cpu_s=self.plane.models[job].costs_s[bucket],
                    nbytes=1,
                )
                for (job, bucket), count in sorted(self.executions.items())
                if job in self.plane.models
            )
            self.executions.clear()
            if tasks:
                message = TasksObserved(aggregator=self.id, period_s=1.0, tasks=tasks)
                subject = subjects.telemetry("aggregator", self.id, "tasks")
                self.plane.publish(subject, message)


# The modelled job -------------------------------------------------------------------------------


@dataclass
class JobModel:
    """Synchronous training: compute, push every bucket, pull. One task plays all its workers."""

    spec: JobSpec
    compute_s: float
    costs_s: tuple[float, ...]
    """CPU seconds of each bucket's task."""
    tensors: tuple[TensorSpec, ...] = ()
    started_s: float = 0.0
    places: dict[int, tuple[AggregatorId, int]] = field(default_factory=dict)
    iteration: int = 0
    result: str = ""

    def __post_init__(self) -> None:
        # A tensor of 1 MiB is a bucket of its own.
        self.tensors = tuple(
            TensorSpec(name=f"t{n}", shape=(MIB // 4,)) for n in range(len(self.costs_s))
        )

    def slots_s(self, aggregator: AggregatorId) -> float:
        here = [b for b, (place, _) in self.places.items() if place == aggregator]
        return sum(self.costs_s[bucket] for bucket in here) / SHARE


# The system -------------------------------------------------------------------------------------


class Plane:
    """Everything, started and killed by name."""

    def __init__(self, seed: int, faults: SeededFaults | None, store: SeededStoreFaults | None):
        self.sim: SimWorld = sim_world(seed, faults=faults, store_faults=store)
        self.faults = faults
        self.rng = random.Random(f"{seed}/plane")
        self.world: World = self.sim.client("outside")
        self.watcher: World = self.sim.client("watcher")
        self.tasks: set[asyncio.Task[Any]] = set()
        self.services: dict[str, tuple[World, asyncio.Task[Any], asyncio.Event]] = {}
        self.definitions: dict[str, Callable[[World], ServiceDefinition]] = {}
        self.aggregators: dict[str, AggregatorModel] = {}
        self.controllers: dict[str, Controller] = {}
        self.master: Master | None = None
        self.models: dict[JobId, JobModel] = {}
        self.events: list[tuple[float, str, Any]] = []
        self.failures: list[BaseException] = []

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failures.append(task.exception())  # type: ignore[arg-type]  # checked above

    def publish(self, subject: str, message: Any) -> None:
        self.spawn(self.world.bus.publish(subject, encode(message)))

    def now_s(self) -> float:
        return self.sim.clock.now_s()

    def start(self, name: str) -> None:
        world = self.sim.client(name)
        stop = asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._life(name, world, stop))
        self.services[name] = (world, task, stop)

    async def _life(self, name: str, world: World, stop: asyncio.Event) -> None:
        while True:
            made = self.definitions[name](world)
            if isinstance(made.core, Controller):
                self.controllers[name] = made.core
            if isinstance(made.core, Master):
                self.master = made.core
            try:
                await run_service(made, world, stop)
                return
            except Retryable:
                await asyncio.sleep(0.2)  # As the supervisor does.
                world = self.sim.client(name)
            except Exception as error:  # Noted: a core's broken invariant is the test's failure.
                self.failures.append(error)
                raise

    async def kill(self, name: str) -> None:
        """kill -9: nothing more of it arrives anywhere; what it had stored stays."""
        world, task, _ = self.services.pop(name)
        if name in self.aggregators:
            self.aggregators[name].running = False
        await self.sim.broker.crash(world.name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def stop(self) -> None:
        for _, _, stop in self.services.values():
            stop.set()
        await asyncio.gather(*(task for _, task, _ in self.services.values()))
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    # Jobs ---------------------------------------------------------------------------------------

    def penalty(self, model: JobModel) -> float:
        """How contention stretches an iteration: tasks collide as an aggregator fills up."""
        worst = 0.0
        for aggregator in {place for place, _ in model.places.values()}:
            own = model.slots_s(aggregator) / model.compute_s
            rest = sum(
                other.slots_s(aggregator) / other.compute_s
                for other in self.models.values()
                if other is not model and not other.result
            )
            if rest > 0.0:
                worst = max(worst, max(0.0, own + rest - 0.75))
        return worst

    async def run_job(self, model: JobModel, at_s: float) -> None:
        spec = model.spec
        await asyncio.sleep(at_s)
        self.models[JobId(spec.id)] = model
        outside = self.sim.client(f"agent-{spec.id}")
        client = Client(outside.bus, outside.clock, budget_s=120.0, rng=outside.rng)
        for rank in range(spec.workers):
            register = RegisterJob(job=spec.id, rank=rank, tensors=model.tensors, spec=spec)
            registered = await client.master("register", register, JobRegistered)
        await self._locate(client, registered.cluster, model)
        first, durations_s = 1, []
        told_s = self.now_s()
        while model.iteration < spec.iterations:
            begun_s = self.now_s()
            model.iteration += 1
            await asyncio.sleep(model.compute_s * (1.0 + self.penalty(model)))
            for bucket in range(len(model.costs_s)):
                await self._push(client, registered.cluster, model, bucket)
            durations_s.append(self.now_s() - begun_s)
            if self.now_s() - told_s >= 1.0:
                told_s = self.now_s()
                for rank in range(spec.workers):
                    self._tell(model, rank, first, durations_s)
                first, durations_s = model.iteration + 1, []
        for rank in range(spec.workers):
            await client.master("finish", FinishJob(job=spec.id, rank=rank), Ok)
        model.result = "done"

    async def _locate(self, client: Client, cluster: str, model: JobModel) -> None:
        subject = subjects.command("controller", cluster, "locate")
        located = await client.ask(subject, LocateJob(job=model.spec.id), Located)
        for bucket, place in enumerate(located.places):
            known = model.places.get(bucket, ("", -1))
            if place.location_epoch >= known[1]:
                model.places[bucket] = (place.aggregator, place.location_epoch)

    async def _push(self, client: Client, cluster: str, model: JobModel, bucket: int) -> None:
        for attempt in range(1000):
            aggregator = self.aggregators[model.places[bucket][0]]
            answer = aggregator.fold(JobId(model.spec.id), bucket, model.iteration)
            if answer is not None:
                model.places[bucket] = answer
                return
            await asyncio.sleep(0.05)
            if attempt % 4 == 3:
                await self._locate(client, cluster, model)
        raise AssertionError(f"{model.spec.id}: bucket {bucket} is nowhere")

    def _tell(self, model: JobModel, rank: int, first: int, durations_s: list[float]) -> None:
        message = IterationsObserved(
            job=JobId(model.spec.id),
            rank=rank,
            first_iteration=first,
            durations_s=tuple(durations_s),
            location_epoch=sum(epoch for _, epoch in model.places.values()),
            bytes_pushed=0,
            bytes_pulled=0,
            workers=model.spec.workers,
            buckets=len(model.costs_s),
        )
        self.publish(subjects.telemetry("job", model.spec.id, "iterations"), message)

    # What is seen -------------------------------------------------------------------------------

    async def watch(self) -> None:
        async def take(delivery: Any) -> None:
            kind = JobEvent | MigrationEvent | AllocationEvent
            try:
                message = decode(delivery.payload, kind)
            except Rejected:
                return  # Of another type.
            self.events.append((self.now_s(), delivery.subject, message))

        await self.watcher.bus.subscribe("sw.v1.evt.>", take)

    def facts(self, job: str) -> list[str]:
        return [
            message.fact
            for _, _, message in self.events
            if isinstance(message, JobEvent) and message.job == job
        ]

    def allocated(self) -> set[str]:
        assert self.master is not None
        listing = self.master.state.pool.listing()
        return {info.record.id for info in listing.aggregators if info.record.cluster is not None}


@asynccontextmanager
async def plane(
    seed: int,
    aggregators: int,
    *,
    clusters: int = 1,
    faults: SeededFaults | None = None,
    store: SeededStoreFaults | None = None,
    aggregators_max: int = 16,
    policy: str = "cyclic",
    **controller: Any,
) -> AsyncIterator[Plane]:
    made = Plane(seed, faults, store)
    master = MasterConfig(aggregators_max=aggregators_max)
    made.definitions["master"] = lambda world: master_definition(master, world)
    for number in range(clusters):
        config = ControllerConfig(id=f"c{number}", policy=policy, **controller)
        made.definitions[f"c{number}"] = lambda world, c=config: controller_definition(c, world)
    profiler = ProfilerConfig(profile_iterations=5, window_iterations=20)
    made.definitions["profiler"] = lambda world: profiler_definition(profiler, world)
    for number in range(aggregators):
        model = AggregatorModel(f"a{number}", made)
        made.aggregators[model.id] = model
        made.definitions[model.id] = lambda world, m=model: ServiceDefinition(
            service="aggregator",
            id=m.id,
            core=m,
            endpoints={
                "host": HostBuckets,
                "migrate": MigrateInit,
                "drop": DropJob,
                "held": ListBuckets,
                "turns": PlanTurns,
            },
            heartbeat=m.heartbeat,
            tasks=(m.tell_costs,),
        )
    await made.watch()
    for name in made.definitions:
        made.start(name)
    try:
        yield made
    finally:
        await made.stop()


def check_settled(made: Plane) -> None:
    """Each bucket of each living job on exactly one aggregator, by record and by what is held;
    nothing else is held; nothing is allocated that serves no job."""
    expected: dict[tuple[str, str, int], int] = {}
    homes: set[str] = set()
    for controller in made.controllers.values():
        for job in controller.state.living():
            assert not job.moving
            homes |= job.homes()
            for bucket, place in enumerate(job.record.places):
                expected[place.aggregator, job.id, bucket] = place.location_epoch
    held = {
        (id, job, bucket): region.location_epoch
        for id, model in made.aggregators.items()
        for (job, bucket), region in model.regions.items()
    }
    assert held == expected
    assert made.allocated() == homes


def job(
    id: str, compute_s: float, costs_s: list[float], iterations: int = 400, servers: int = 2
) -> JobModel:
    spec = JobSpec(id=id, model=id[0], workers=2, servers=servers, iterations=iterations)
    return JobModel(spec, compute_s, tuple(costs_s))


async def settle(made: Plane, seconds: float = 40.0) -> None:
    await asyncio.sleep(seconds)
    if made.failures:
        raise made.failures[0]


def finished(made: Plane) -> bool:
    return all(model.result for model in made.models.values())


async def all_done(made: Plane, jobs: int, limit_s: float) -> None:
    until_s = made.now_s() + limit_s
    while len(made.models) < jobs or not finished(made):
        assert made.now_s() < until_s, {j: (m.iteration, m.result) for j, m in made.models.items()}
        if made.failures:
            raise made.failures[0]
        await asyncio.sleep(1.0)


# Scenarios --------------------------------------------------------------------------------------


def test_a_job_is_profiled_on_what_it_asked_for_keeps_it_alone_and_gives_all_back() -> None:
    async def main() -> None:
        async with plane(1, 4) as made:
            made.spawn(made.run_job(job("v1", 1.0, [0.02, 0.01, 0.005], iterations=60), 2.0))
            await settle(made, 40.0)
            assert made.facts("v1") == [
                "pending", "running", "placed", "located", "measured", "assigned", "steady",
            ]  # fmt: skip
            assert made.facts("v1").count("steady") == 1
            assert made.allocated() == {"a0", "a1"}  # Figure 10: a lone job keeps its 2 servers.
            check_settled(made)
            await all_done(made, 1, 120.0)
            await settle(made)
            assert made.allocated() == set()
            check_settled(made)

    run_simulated(main())


def test_two_jobs_of_one_model_share_two_aggregators() -> None:
    """Figure 8: the second job's temporary aggregators are given back, its buckets migrate."""

    async def main() -> None:
        async with plane(2, 6) as made:
            for number in range(2):
                arrival = job(f"v{number}", 1.0, [0.015, 0.01, 0.005], iterations=120)
                made.spawn(made.run_job(arrival, 2.0 + 20.0 * number))
            await settle(made, 80.0)
            assert len(made.allocated()) == 2
            check_settled(made)
            causes = {m.cause for _, _, m in made.events if isinstance(m, MigrationEvent)}
            assert causes == {"profiled"}
            await all_done(made, 2, 200.0)
            await settle(made)
            check_settled(made)

    run_simulated(main())


def test_figure_10_an_alexnet_that_slows_is_reverted_and_gets_an_aggregator_of_its_own() -> None:
    """VGG19 runs on two; AlexNet is assigned there, somebody loses over 10 % for a window, the
    newest assignment is undone, a new aggregator is added, and released at AlexNet's exit."""

    async def main() -> list[str]:
        async with plane(3, 8) as made:
            vgg = job("vgg", 1.0, [0.018, 0.008, 0.006], iterations=400)
            alex = job("alex", 0.13, [0.004, 0.003, 0.0025, 0.0015], iterations=700)
            made.spawn(made.run_job(vgg, 2.0))
            made.spawn(made.run_job(alex, 30.0))
            await settle(made, 110.0)
            check_settled(made)
            assert made.allocated() >= {"a0", "a1"}
            await all_done(made, 2, 600.0)
            await settle(made)
            check_settled(made)
            shown = []
            for _, _, message in made.events:
                if isinstance(message, JobEvent) and message.fact in ("reverted", "completed"):
                    shown.append(f"{message.job} {message.fact}")
                elif isinstance(message, MigrationEvent):
                    shown.append(f"{message.job} {message.fact} {message.cause}")
                elif isinstance(message, AllocationEvent):
                    shown.append(f"{message.fact} {message.in_use}")
            return shown

    assert run_simulated(main()) == [
        "allocated 1", "allocated 2",  # VGG19's temporary ones ...
        "adopted 2", "adopted 2",  # ... which it keeps.
        "allocated 3", "allocated 4",  # AlexNet's.
        "alex started profiled", "alex finished profiled", "released 3", "released 2",
        "alex reverted",
        "allocated 3", "alex started reverted", "alex finished reverted",
        "alex completed", "released 2",
        "vgg completed", "released 1", "released 0",
    ]  # fmt: skip


def test_the_static_policy_gives_every_job_its_own_servers_and_moves_nothing() -> None:
    async def main() -> None:
        async with plane(4, 6, policy="static") as made:
            for number in range(2):
                arrival = job(f"v{number}", 1.0, [0.015, 0.01, 0.005], iterations=60)
                made.spawn(made.run_job(arrival, 2.0))
            await settle(made, 40.0)
            assert len(made.allocated()) == 4
            await all_done(made, 2, 200.0)
            assert not [m for _, _, m in made.events if isinstance(m, MigrationEvent)]
            await settle(made)
            check_settled(made)

    run_simulated(main())


def test_the_control_with_one_aggregator_packs_everybody_there() -> None:
    """Without room the jobs share what there is, unprofiled: the limit breaks, nobody waits."""

    async def main() -> None:
        async with plane(5, 1, aggregators_max=1, unprofiled_after_s=2.0) as made:
            for number in range(3):
                arrival = job(f"v{number}", 1.0, [0.015, 0.01, 0.005], iterations=80)
                made.spawn(made.run_job(arrival, 2.0 + 10.0 * number))
            await settle(made, 50.0)
            assert {m.iteration > 5 for m in made.models.values()} == {True}
            assert made.allocated() == {"a0"}
            await all_done(made, 3, 300.0)
            await settle(made)
            check_settled(made)

    run_simulated(main())


# Faults -----------------------------------------------------------------------------------------


async def _storm(seed: int, memory_lost: float, harsh: bool = False) -> int:
    """Jobs come and go while messages are lost, repeated and delayed, the store times out, and
    every kind of service is killed and started again; with a probability, an aggregator's memory
    goes with it. Harsh: several at once, and jobs that slow each other. Returns the reverts."""
    rng = random.Random(f"storm/{seed}/{harsh}")
    faults = SeededFaults(rng, drop=0.02, duplicate=0.05, delay_s_max=0.02)
    store = SeededStoreFaults(rng, unanswered=0.01, delay_s_max=0.01)
    duty = (0.2, 0.7) if harsh else (0.1, 0.4)
    jobs, kills = (8, 14) if harsh else (6, 10)
    if harsh:
        faults.drop, faults.delay_s_max = 0.05, 0.05
    async with plane(seed, 8, clusters=2, faults=faults, store=store, aggregators_max=6) as made:
        for number in range(jobs):
            compute_s = rng.choice([0.5, 1.0, 2.0])
            busy_s = rng.uniform(*duty) * SHARE * compute_s
            costs_s = [busy_s * part for part in (0.5, 0.2, 0.2, 0.1)]
            arrival = job(
                f"{rng.choice('xyz')}{number}", compute_s, costs_s, rng.choice([200, 400])
            )
            made.spawn(made.run_job(arrival, rng.uniform(1.0, 60.0)))
        for _ in range(kills):
            await asyncio.sleep(rng.uniform(2.0, 20.0))
            victims = rng.sample(sorted(made.services), rng.choice([1, 2, 3]) if harsh else 1)
            for name in victims:
                await made.kill(name)
                if name in made.aggregators and rng.random() < memory_lost:
                    made.aggregators[name].regions.clear()
            await asyncio.sleep(rng.choice([0.2, 0.2, 3.0, 40.0]))
            for name in victims:
                made.start(name)
        await all_done(made, jobs, 6000.0)
        faults.drop = faults.duplicate = 0.0
        await settle(made, 120.0)
        check_settled(made)
        assert made.master is not None
        for record in made.master.state.jobs.values():
            assert record.record.state == "completed", record.record
        return sum(isinstance(m, JobEvent) and m.fact == "reverted" for _, _, m in made.events)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 3))]
)
def test_no_bucket_allocation_or_job_is_lost_whoever_is_killed(seed: int) -> None:
    run_simulated(_storm(seed, memory_lost=0.0))


@pytest.mark.parametrize(
    "seed", [100, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(101, 103))]
)
def test_lost_memory_begins_anew_and_every_job_ends(seed: int) -> None:
    run_simulated(_storm(seed, memory_lost=0.5))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_harsher_storm_with_reverts_breaks_nothing_either() -> None:
    reverts = sum(run_simulated(_storm(seed, memory_lost=0.2, harsh=True)) for seed in range(8))
    assert reverts > 0


def test_a_standby_master_leads_when_the_leader_is_killed() -> None:
    """Its first write fences the old one; jobs that ran never noticed."""

    async def main() -> None:
        async with plane(6, 4) as made:
            standby = MasterConfig(id="m1")
            made.definitions["standby"] = lambda world: master_definition(standby, world)
            made.start("standby")
            made.spawn(made.run_job(job("v1", 1.0, [0.02, 0.01], iterations=60), 2.0))
            await settle(made, 20.0)
            await made.kill("master")
            made.spawn(made.run_job(job("v2", 1.0, [0.02, 0.01], iterations=60), 1.0))
            await all_done(made, 2, 300.0)
            await settle(made)
            assert made.master is not None
            assert made.master.state.epoch == 2
            check_settled(made)

    run_simulated(main())
