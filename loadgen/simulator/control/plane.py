"""The whole control plane in virtual time: real master, controllers and profiler in real shells
over the in-memory bus and store; aggregators and jobs are models that keep the slot protocol's
promises.

The models keep version counters instead of bytes: an update that is lost or applied twice shows as
a version that differs from the job's iteration.
"""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from slackwater.common.base.codec import encode
from slackwater.common.base.effects import Effect, Recovered, Reply, Requested
from slackwater.common.bus.faults import Faults
from slackwater.common.shell import ServiceDefinition
from slackwater.common.shell.client import Client
from slackwater.common.shell.world import SimWorld, World
from slackwater.common.store.memory import StoreFaults
from slackwater.loadgen.simulator.control.services import Services
from slackwater.schemas import subjects
from slackwater.schemas.base import AggregatorId, JobId, NodeId, Ok
from slackwater.schemas.cluster import AggregatorHeartbeat
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import (
    BucketHeld,
    BucketsHeld,
    DropJob,
    HostBuckets,
    ListBuckets,
    Located,
    LocateJob,
    MigrateInit,
    SlotPlan,
    TensorCopyDone,
    WorkerDone,
)
from slackwater.schemas.telemetry import IterationsObserved, TaskCost, TasksObserved
from slackwater.schemas.tensors import TensorSpec

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
            here = self.regions.get((job, bucket)) is region
            if not here or region.move is not move or not self.running:
                return  # Dropped, cancelled, or this process died.
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

    def definition(self, world: World) -> ServiceDefinition:
        return ServiceDefinition(
            service="aggregator",
            id=self.id,
            core=self,
            endpoints={
                "host": HostBuckets,
                "migrate": MigrateInit,
                "drop": DropJob,
                "held": ListBuckets,
                "turns": SlotPlan,
            },
            heartbeat=self.heartbeat,
            tasks=(self.tell_costs,),
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
    places: dict[int, tuple[AggregatorId, int]] = field(default_factory=dict)
    iteration: int = 0
    result: str = ""

    def __post_init__(self) -> None:
        # A tensor of 1 MiB is a bucket of its own.
        self.tensors = tuple(
            TensorSpec(name=f"t{n}", shape=(MIB // 4,)) for n in range(len(self.costs_s))
        )


# The system -------------------------------------------------------------------------------------


class Plane(Services):
    """Everything, started and killed by name."""

    def __init__(self, seed: int, faults: Faults | None, store: StoreFaults | None) -> None:
        super().__init__(SimWorld(seed, faults=faults, store_faults=store))
        self.rng = random.Random(f"{seed}/plane")
        self.world: World = self.sim.client("outside")
        self.aggregators: dict[str, AggregatorModel] = {}
        self.models: dict[JobId, JobModel] = {}

    def publish(self, subject: str, message: Any) -> None:
        self.spawn(self.world.bus.publish(subject, encode(message)))

    def add(self, model: AggregatorModel) -> None:
        self.aggregators[model.id] = model
        self.definitions[model.id] = model.definition

    # Jobs ---------------------------------------------------------------------------------------

    async def locate(self, client: Client, cluster: str, model: JobModel) -> None:
        subject = subjects.command("controller", cluster, "locate")
        located = await client.ask(subject, LocateJob(job=model.spec.id), Located)
        for bucket, place in enumerate(located.places):
            known = model.places.get(bucket, ("", -1))
            if place.location_epoch >= known[1]:
                model.places[bucket] = (place.aggregator, place.location_epoch)

    async def push(self, client: Client, cluster: str, model: JobModel, bucket: int) -> None:
        for attempt in range(1000):
            aggregator = self.aggregators[model.places[bucket][0]]
            answer = aggregator.fold(JobId(model.spec.id), bucket, model.iteration)
            if answer is not None:
                model.places[bucket] = answer
                return
            await asyncio.sleep(0.05)
            if attempt % 4 == 3:
                await self.locate(client, cluster, model)
        raise AssertionError(f"{model.spec.id}: bucket {bucket} is nowhere")

    def tell(self, model: JobModel, rank: int, first: int, durations_s: list[float]) -> None:
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
