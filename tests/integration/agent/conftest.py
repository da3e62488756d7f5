"""A cluster small enough to be told what to do: master, controller and two aggregators in a thread
of this process, on a real bus and real transports. It folds by the plain definition of the rules,
so that what an Agent gets can be compared with obvious arithmetic."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from slackwater.agent import Agent
from slackwater.common.base import codec
from slackwater.common.base.errors import AccessRefused, Unavailable
from slackwater.common.bus.base import Delivery, Endpoint, ServiceInfo
from slackwater.common.bus.nats import NatsBus
from slackwater.common.bus.server import NatsServer
from slackwater.common.domains.slots import frames
from slackwater.common.domains.slots.layout import plan_buckets, tensor_at
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rules import Hyper, mean, scalars, step
from slackwater.common.transport.base import Channel, Fabric, Listener
from slackwater.common.transport.region import Region
from slackwater.common.transport.shm import ShmFabric
from slackwater.common.transport.tcp import TcpFabric
from slackwater.schemas import placement, subjects
from slackwater.schemas.base import AggregatorId, ClusterId, JobId, Message, Ok, Refused
from slackwater.schemas.job_requests import FinishJob, JobRegistered, RegisterJob
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.telemetry import IterationsObserved
from slackwater.schemas.tensors import TensorSpec

T = TypeVar("T")


class Home:
    """One aggregator: a listener and the channels of Agents."""

    def __init__(self, cluster: "StandIn", id: str, fabric: Fabric, address: str) -> None:
        self.cluster, self.id, self.fabric = cluster, AggregatorId(id), fabric
        self.channels: dict[int, Channel] = {}
        self._address = address
        self._listener: Listener | None = None

    async def open(self) -> None:
        async def no_handover(region: Region, note: bytes) -> None:
            raise AccessRefused("none here")

        self._listener = await self.fabric.listen(
            self._address, self._accept, self._on_channel, no_handover
        )
        self._address = self._listener.address.rpartition("!")[2]

    async def close(self) -> None:
        assert self._listener is not None
        await self._listener.close()

    @property
    def endpoint(self) -> placement.Endpoint:
        assert self._listener is not None
        addresses = ((self.fabric.kind, self._listener.address),)
        return placement.Endpoint(aggregator=self.id, addresses=addresses)

    def _accept(self, hello: bytes) -> None:
        if frames.decode_hello(hello).token != "secret":
            raise AccessRefused("wrong token")

    async def _on_channel(self, channel: Channel) -> None:
        rank = frames.decode_hello(channel.hello).rank
        self.channels[rank] = channel
        try:
            while True:
                for entry in frames.decode(await channel.receive()):
                    await self.cluster.heard(self, rank, channel, entry)
        except Unavailable:
            if self.channels.get(rank) is channel:
                del self.channels[rank]

    def tell(self, *controls: frames.Control) -> None:
        for channel in self.channels.values():
            for control in controls:
                channel.send(frames.encode_control(control))


class StandIn:
    """Methods without an underscore may be called from the test's thread through `do`."""

    def __init__(self, url: str, folder: Path, kind: str) -> None:
        self.url = url
        self.finished: list[FinishJob] = []
        self.observed: list[IterationsObserved] = []
        self.applied: list[tuple[int, int]] = []
        """(bucket, version), one entry for every fold."""
        self.rings = 0
        self.placed = True
        self.silent = False
        """Take rings and answer nothing."""
        self.fabrics: dict[str, Fabric] = {"shm": ShmFabric(), "tcp": TcpFabric()}
        self.homes = {
            id: Home(
                self,
                id,
                self.fabrics[kind],
                str(folder / f"{id}.sock") if kind == "shm" else "127.0.0.1:0",
            )
            for id in ("a1", "a2")
        }
        self.spec: JobSpec | None = None
        self.tensors: tuple[TensorSpec, ...] = ()
        self.regions: list[tuple[Region, SlotRegion]] = []
        self.places: list[placement.BucketPlace] = []
        self.buckets: tuple[placement.BucketLayout, ...] = ()
        self.moving: dict[int, str] = {}
        self._offers: dict[int, dict[int, int]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def __enter__(self) -> "StandIn":
        self._thread.start()
        self.do(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        self._bus = await NatsBus.connect(self.url, "stand-in")
        for home in self.homes.values():
            await home.open()
        served: list[tuple[str, str, str, Any]] = [
            ("master", "main", "register", self._register),
            ("master", "main", "finish", self._finish),
            ("controller", "c1", "locate", self._locate),
        ]
        for service, id, verb, respond in served:
            endpoint = Endpoint(verb, subjects.command(service, id, verb), respond, {}, 8)
            await self._bus.serve(ServiceInfo(service, "1.0.0", "", {}), [endpoint])

        async def observe(delivery: Delivery) -> None:
            self.observed.append(codec.decode(delivery.payload, IterationsObserved))

        await self._bus.subscribe(subjects.telemetries("job", what="iterations"), observe)
        await self._bus.flush()

    async def _close(self) -> None:
        for home in self.homes.values():
            await home.close()
        await self._bus.close()
        for region, slots in self.regions:
            slots.release()
            region.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    # Master and controller ------------------------------------------------------------------------

    async def _register(self, delivery: Delivery) -> bytes:
        message = codec.decode(delivery.payload, RegisterJob)
        if self.spec is None:
            assert message.spec is not None
            self.spec, self.tensors = message.spec, message.tensors
            self.buckets = plan_buckets(self.tensors, bucket_bytes=64)
            for bucket in self.buckets:
                self.places.append(placement.BucketPlace(aggregator=AggregatorId("a1")))
                self.regions.append(self._fresh(bucket))
        return codec.encode(
            JobRegistered(job=message.job, cluster=ClusterId("c1"), workers=self.spec.workers)
        )

    async def _finish(self, delivery: Delivery) -> bytes:
        self.finished.append(codec.decode(delivery.payload, FinishJob))
        return codec.encode(Ok())

    async def _locate(self, delivery: Delivery) -> bytes:
        answer: Message = Refused(reason="not placed yet", retry_after_s=0.05)
        if self.spec is not None and self.placed:
            answer = placement.Located(
                job=JobId(self.spec.id),
                plan=self.plan,
                buckets=self.buckets,
                places=tuple(self.places),
                endpoints=tuple(home.endpoint for home in self.homes.values()),
            )
        return codec.encode(answer)

    @property
    def plan(self) -> placement.JobPlan:
        assert self.spec is not None
        return placement.JobPlan(
            job=JobId(self.spec.id),
            workers=self.spec.workers,
            gradient_dtype=self.spec.gradient_dtype,
            update=self.spec.update,
            layout_epoch=1,
            token="secret",
        )

    # Aggregators ----------------------------------------------------------------------------------

    def _fresh(self, bucket: placement.BucketLayout) -> tuple[Region, SlotRegion]:
        region = Region.create(SlotRegion.nbytes_of(self.plan, bucket, self.tensors), "test")
        slots = SlotRegion.format(region.buffer, self.plan, bucket, self.tensors, 0)
        return region, slots

    async def heard(self, home: Home, rank: int, channel: Channel, entry: object) -> None:
        match entry:
            case frames.Attach(buckets=buckets):
                for bucket in buckets:
                    self._attach(home, channel, bucket)
            case frames.Offer(handle=bucket, version=version):
                offers = self._offers.setdefault(bucket, {})
                offers[rank] = version
                if len(offers) == self.plan.workers:
                    newest = min(r for r, v in offers.items() if v == max(offers.values()))
                    asked = frames.SeedAsked(handle=bucket)
                    home.channels[newest].send(frames.encode_control(asked))
            case frames.Seed(handle=bucket, version=version):
                self.regions[bucket][1].initialize(version)
                self._offers.pop(bucket, None)
                self._done(home, bucket)
            case frames.Ring(handle=bucket):
                self.rings += 1
                if not self.silent:
                    self._fold(home, bucket)

    def _attach(self, home: Home, channel: Channel, bucket: int) -> None:
        place, (region, slots) = self.places[bucket], self.regions[bucket]
        control: frames.Control = frames.Denied(bucket=bucket, why="not here", retry_after_s=0.05)
        if place.aggregator == home.id:
            control = frames.Granted(
                bucket=bucket,
                handle=bucket,
                key=channel.grant(region),
                region=slots.identity,
                location_epoch=place.location_epoch,
                initialized=slots.initialized,
                version=slots.version,
            )
        channel.send(frames.encode_control(control))

    def _fold(self, home: Home, bucket: int) -> None:
        slots = self.regions[bucket][1]
        if slots.version > 0 and max(slots.all_pushed()) <= slots.version:
            self._done(home, bucket)  # A retry.
            return
        if any(pushed != slots.version + 1 for pushed in slots.all_pushed()):
            return
        gradients = [slots.gradient(rank) for rank in range(self.plan.workers)]
        for rank, gradient in enumerate(gradients):
            if not np.isfinite(gradient.astype(np.float32)).all():
                slots.set_pushed(rank, slots.version)
                at = int(np.argmin(np.isfinite(gradient.astype(np.float32))))
                refused = frames.PushRefused(
                    handle=bucket,
                    iteration=slots.version + 1,
                    job=self.plan.job,
                    tensor=tensor_at(slots.tensors, at),
                    worker=rank,
                    why="element 0 is not finite",
                )
                home.tell(refused)
                return
        k = scalars(slots.hyper(0), slots.version + 1, self.plan.workers)
        new, _ = step("sgd", mean(gradients, k), slots.parameters(slots.version), (), k)
        slots.parameters(slots.version + 1)[:] = new
        slots.version += 1
        self.applied.append((bucket, slots.version))
        if bucket in self.moving:
            self._move(home, bucket, self.moving.pop(bucket))
        else:
            self._done(home, bucket)

    def _done(self, home: Home, bucket: int) -> None:
        place, slots = self.places[bucket], self.regions[bucket][1]
        frame = frames.encode_dones([(bucket, slots.version, place.location_epoch)])
        for channel in home.channels.values():
            channel.send(frame)

    def _move(self, home: Home, bucket: int, to: str) -> None:
        """The redirect is the pull response; the bytes are copied to memory of the new home's."""
        epoch = self.places[bucket].location_epoch + 1
        self.places[bucket] = placement.BucketPlace(
            aggregator=AggregatorId(to), location_epoch=epoch
        )
        region, slots = self.regions[bucket]
        copied = Region.create(region.nbytes, "moved")
        copied.buffer[:] = region.buffer
        self.regions[bucket] = copied, SlotRegion.open(copied.buffer)
        home.tell(
            frames.Moved(
                bucket=bucket,
                version=slots.version,
                initialized=True,
                location_epoch=epoch,
                to=self.homes[to].endpoint,
            )
        )
        self._spoil(region, slots)

    def _spoil(self, region: Region, slots: SlotRegion) -> None:
        """Give the region up: a worker that still pushes here pushes into the void."""
        slots.release()
        region.close()

    # For tests ------------------------------------------------------------------------------------

    async def move_after_next(self, to: str) -> None:
        self.moving = dict.fromkeys(range(len(self.buckets)), to)

    async def cut(self, id: str) -> None:
        for channel in list(self.homes[id].channels.values()):
            await channel.close()

    async def restart(self, id: str, *, lose: bool = False) -> None:
        """Restart as after a kill -9; `lose`: nobody kept the regions."""
        await self.homes[id].close()
        if lose:
            for index, bucket in enumerate(self.buckets):
                if self.places[index].aggregator == id:
                    self._spoil(*self.regions[index])
                    self.regions[index] = self._fresh(bucket)
        await self.homes[id].open()


@pytest.fixture(params=["shm", "tcp"])
def cluster(
    request: pytest.FixtureRequest, own_nats_server: NatsServer, tmp_path: Path
) -> Iterator[StandIn]:
    with StandIn(own_nats_server.url, tmp_path, request.param) as made:
        yield made


@pytest.fixture
def train() -> Callable[..., list[Any]]:
    """Run one program per rank, each with its Agent, and return what they return."""

    def run(
        cluster: StandIn, program: Callable[[Agent], T], *, workers: int = 2, **options: Any
    ) -> list[T]:
        def rank_main(rank: int) -> T:
            settings = {"job": "j1", "deadline_s": 20.0, **options}
            with Agent(url=cluster.url, rank=rank, workers=workers, **settings) as agent:
                return program(agent)

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(rank_main, range(workers)))

    return run


__all__ = ["Hyper", "StandIn"]
