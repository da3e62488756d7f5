"""Real aggregators as processes under the supervisor, real Agents, and a director in this process
that plays master and controller: it places, moves and hosts exactly when a test says so."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.integration.aggregator.wire import Wire
from tests.ports import free_port

from slackwater.agent import Agent
from slackwater.common.base import codec, limits
from slackwater.common.base.errors import Retryable
from slackwater.common.bus.base import Delivery, Endpoint, ServiceInfo
from slackwater.common.bus.nats import NatsBus
from slackwater.common.domains.slots.folding import replay
from slackwater.common.domains.slots.layout import plan_buckets
from slackwater.common.domains.slots.tokens import process_token
from slackwater.common.embedded import Supervisor, UnitSpec
from slackwater.common.shell.config import write_config
from slackwater.common.transport.devices import device_named
from slackwater.common.transport.gpu import DeviceArray
from slackwater.schemas import placement, subjects
from slackwater.schemas.base import AggregatorId, ClusterId, JobId, Message, Ok, Refused
from slackwater.schemas.cluster import AggregatorHeartbeat
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_requests import FinishJob, JobRegistered, RegisterJob
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.tensors import TensorSpec, UpdateRule

ANSWERS = Ok | Refused | placement.BucketsHeld
TOKEN = "of-the-cluster"
PATIENCE = float(os.environ.get("SLACKWATER_TEST_PATIENCE", "1"))
"""Stretches the deadlines of what processes are waited for: an emulated machine is slow."""


@dataclass
class Job:
    spec: JobSpec
    tensors: tuple[TensorSpec, ...]
    plan: placement.JobPlan
    buckets: tuple[placement.BucketLayout, ...]
    places: list[placement.BucketPlace]
    hosted: bool = False


class Director:
    """Places buckets round robin; moves and hosts them on demand."""

    def __init__(self, bus: NatsBus, homes: list[str]) -> None:
        self.bus = bus
        self.homes = homes
        self.divide_bytes = 0
        self.jobs: dict[str, Job] = {}
        self.beats: dict[str, AggregatorHeartbeat] = {}
        self.facts: list[Any] = []
        self._hosting = asyncio.Lock()
        self._migrations = 0

    async def begin(self) -> None:
        await self.bus.subscribe(subjects.telemetries("aggregator", what="heartbeat"), self._beat)
        for pattern in (
            subjects.events("migration", fact="copied"),
            subjects.events("migration", fact="worker-done"),
            subjects.events("job", fact="optimizer-state-lost"),
            subjects.events("job", fact="optimizer-state-recovered"),
        ):
            await self.bus.subscribe(pattern, self._fact)
        endpoints = [
            self._endpoint("master", subjects.MASTER, "register", RegisterJob, self._register),
            self._endpoint("master", subjects.MASTER, "finish", FinishJob, self._finish),
            self._endpoint("controller", "c1", "locate", placement.LocateJob, self._locate),
        ]
        await self.bus.serve(ServiceInfo("director", "1.0.0", "plays both", {}), endpoints)

    def _endpoint(
        self, service: str, id: str, verb: str, kind: Any, answer: Callable[[Any], Any]
    ) -> Endpoint:
        async def respond(delivery: Delivery) -> bytes:
            return codec.encode(await answer(codec.decode(delivery.payload, kind)))

        return Endpoint(verb, subjects.command(service, id, verb), respond, {}, 64)

    async def _beat(self, delivery: Delivery) -> None:
        beat = codec.decode(delivery.payload, AggregatorHeartbeat)
        self.beats[beat.id] = beat

    async def _fact(self, delivery: Delivery) -> None:
        kinds = placement.TensorCopyDone | placement.WorkerDone | JobEvent
        self.facts.append(codec.decode(delivery.payload, kinds))

    async def copies(self, count: int) -> list[placement.TensorCopyDone]:
        """Wait until so many were told. The new home may know of a copy before we hear of it."""
        async with asyncio.timeout(10.0 * PATIENCE):
            while True:
                told = [each for each in self.facts if isinstance(each, placement.TensorCopyDone)]
                if len(told) >= count:
                    return told
                await asyncio.sleep(0.02)

    async def fresh_beats(self) -> list[AggregatorHeartbeat]:
        """Return a heartbeat of every home, heard after now."""
        self.beats.clear()
        async with asyncio.timeout(10.0 * PATIENCE):
            while len(self.beats) < len(self.homes):  # noqa: ASYNC110 (told by other programs)
                await asyncio.sleep(0.02)
        return list(self.beats.values())

    # Master ---------------------------------------------------------------------------------------

    async def _register(self, message: RegisterJob) -> Message:
        async with self._hosting:
            if message.job not in self.jobs:
                assert message.spec is not None
                self.jobs[message.job] = self._plan(message.spec, message.tensors)
            job = self.jobs[message.job]
            if not job.hosted:
                for home in self.homes:
                    await self.host(job, home)
                job.hosted = True
        return JobRegistered(job=message.job, cluster=ClusterId("c1"), workers=job.plan.workers)

    def _plan(self, spec: JobSpec, tensors: tuple[TensorSpec, ...]) -> Job:
        buckets = plan_buckets(tensors, divide_bytes=self.divide_bytes)
        plan = placement.JobPlan(
            job=JobId(spec.id),
            workers=spec.workers,
            gradient_dtype=spec.gradient_dtype,
            update=spec.update,
            consistency=spec.consistency,
            staleness=spec.staleness,
            noise=spec.noise,
            layout_epoch=1,
            token=f"of-{spec.id}",
        )
        places = [
            placement.BucketPlace(aggregator=AggregatorId(self.homes[b.index % len(self.homes)]))
            for b in buckets
        ]
        return Job(spec, tensors, plan, buckets, places)

    async def _finish(self, message: FinishJob) -> Message:
        return Ok()

    async def _locate(self, message: placement.LocateJob) -> Message:
        job = self.jobs.get(message.job)
        if job is None or not job.hosted or any(home not in self.beats for home in self.homes):
            return Refused(reason="not yet", retry_after_s=0.1)
        token = process_token(job.plan.token, message.rank, message.attempt)
        return placement.Located(
            job=job.plan.job,
            plan=msgspec.structs.replace(job.plan, token=token),
            buckets=job.buckets,
            places=tuple(job.places),
            endpoints=tuple(self.endpoint(home) for home in self.homes),
        )

    def endpoint(self, id: str) -> placement.Endpoint:
        return placement.Endpoint(aggregator=AggregatorId(id), addresses=self.beats[id].addresses)

    # Controller -----------------------------------------------------------------------------------

    async def ask(self, id: str, verb: str, message: Message, timeout_s: float = 2.0) -> Any:
        subject = subjects.command("aggregator", id, verb)
        raw = await self.bus.request(subject, codec.encode(message), timeout_s=timeout_s)
        return codec.decode(raw, ANSWERS)

    async def insist(self, id: str, verb: str, message: Message) -> Any:
        """Ask until there is an answer, as long as the aggregator may be coming back."""
        async with asyncio.timeout(30.0 * PATIENCE):
            while True:
                try:
                    answer = await self.ask(id, verb, message, timeout_s=1.0 * PATIENCE)
                except Retryable:
                    await asyncio.sleep(0.02)
                    continue
                if not isinstance(answer, Refused) or answer.retry_after_s == 0.0:
                    return answer
                await asyncio.sleep(answer.retry_after_s)

    async def host(self, job: Job, home: str) -> None:
        own = [
            b for b, place in zip(job.buckets, job.places, strict=True) if place.aggregator == home
        ]
        if own:
            message = placement.HostBuckets(
                cluster=ClusterId("c1"),
                plan=job.plan,
                buckets=tuple(own),
                at_epochs=tuple(job.places[b.index].location_epoch for b in own),
                tensors=job.tensors,
            )
            assert isinstance(await self.insist(home, "host", message), Ok)

    async def held(self, id: str, job: Job) -> dict[int, placement.BucketHeld]:
        answer = await self.insist(id, "held", placement.ListBuckets(job=job.plan.job))
        return {each.bucket: each for each in answer.held}

    async def rehost(self, job: Job, home: str) -> int:
        """Begin anew, one epoch up, the buckets that were lost there; return how many those
        were."""
        held = await self.held(home, job)
        lost = [
            bucket
            for bucket, place in enumerate(job.places)
            if place.aggregator == home and bucket not in held
        ]
        for bucket in lost:
            epoch = job.places[bucket].location_epoch + 1
            job.places[bucket] = placement.BucketPlace(
                aggregator=AggregatorId(home), location_epoch=epoch
            )
        await self.host(job, home)
        return len(lost)

    async def move(self, job: Job, bucket: int, to: str, within_s: float = 30.0) -> None:
        """MIGRATE_INIT until the bucket is there, whoever is killed meanwhile."""
        epoch = job.places[bucket].location_epoch + 1
        self._migrations += 1
        try:
            async with asyncio.timeout(within_s * PATIENCE):
                await self._insist_on(job, bucket, to, epoch)
        except TimeoutError:
            there = {home: (await self.held(home, job)).get(bucket) for home in self.homes}
            raise AssertionError(
                f"bucket {bucket} is not at {to}, epoch {epoch}: {there}"
            ) from None
        job.places[bucket] = placement.BucketPlace(
            aggregator=AggregatorId(to), location_epoch=epoch
        )

    async def _insist_on(self, job: Job, bucket: int, to: str, epoch: int) -> None:
        old = job.places[bucket]
        while True:
            message = placement.MigrateInit(
                cluster=ClusterId("c1"),
                migration=f"m{self._migrations}",
                job=job.plan.job,
                buckets=(bucket,),
                epochs=(epoch,),
                to=self.endpoint(to),
            )
            await self.insist(old.aggregator, "migrate", message)
            if await self._arrived(job, bucket, to, epoch):
                return

    async def _arrived(self, job: Job, bucket: int, to: str, epoch: int) -> bool:
        for _ in range(10):
            for fact in self.facts:
                if isinstance(fact, placement.TensorCopyDone) and (
                    fact.job,
                    fact.bucket,
                    fact.location_epoch,
                ) == (job.plan.job, bucket, epoch):
                    return True
            await asyncio.sleep(0.02)
        held = (await self.held(to, job)).get(bucket)
        return held is not None and held.location_epoch >= epoch and not held.moving


@dataclass
class Training:
    """Two or more Agents in threads; gradients are drawn from seeds, so that they can be drawn
    again for the replay."""

    url: str
    job: str
    sizes: dict[str, int]
    update: UpdateRule
    workers: int = 2
    transport: str | None = None
    pace_s: float = 0.0
    deadline_s: float = 60.0
    devices: tuple[str, ...] = ()
    """Where each rank has its arrays: a device's name, or "" for the host."""
    lossy: bool = False
    """Regions are lost in this test, and their counters with them."""
    last: int = 2**62
    done: dict[int, int] = field(default_factory=dict)
    results: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    failures: list[BaseException] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _rows: dict[str, np.ndarray] = field(default_factory=dict)

    def gradient(self, name: str, rank: int, iteration: int) -> np.ndarray:
        """A slice of the tensor's row of random numbers: another one for each rank and iteration.
        To draw them anew would be most of what these tests compute, twice."""
        row = self._rows.get(name)
        if row is None:
            rng = np.random.Generator(np.random.PCG64([len(name), ord(name[-1])]))
            row = rng.standard_normal(self.sizes[name] + 65_536, dtype=np.float32)
            self._rows[name] = row
        first = (131 * iteration + 7919 * rank) % 65_536
        return row[first : first + self.sizes[name]]

    def initial(self, name: str) -> np.ndarray:
        return np.linspace(-1, 1, self.sizes[name], dtype=np.float32)

    def start(self) -> None:
        for rank in range(self.workers):
            thread = threading.Thread(target=self._run, args=(rank,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self, rank: int) -> None:
        try:
            with Agent(
                url=self.url, job=self.job, rank=rank, workers=self.workers, update=self.update,
                tensors={name: self.initial(name) for name in self.sizes},
                transport=self.transport, device=self._device(rank),
                deadline_s=self.deadline_s * PATIENCE,
            ) as agent:  # fmt: skip
                iteration = agent.iteration
                parameters: dict[str, np.ndarray] = {}
                pause = threading.Event()
                while iteration < self.last:
                    iteration += 1
                    made = {
                        n: self._placed(self.gradient(n, rank, iteration), rank) for n in self.sizes
                    }
                    parameters = agent.step(made)
                    self.done[rank] = iteration
                    pause.wait(self.pace_s)
                self.results[rank] = {n: _on_host(v) for n, v in parameters.items()}
        except BaseException as error:
            self.failures.append(error)

    def _device(self, rank: int) -> str:
        return self.devices[rank] if self.devices else ""

    def _placed(self, gradient: np.ndarray, rank: int) -> Any:
        """Place the gradient as the program would have it: on its rank's device."""
        name = self._device(rank)
        if not name:
            return gradient
        device: Any = device_named(name)
        return device.array(gradient) if name == "fake" else device.cupy.asarray(gradient)

    async def until(self, iteration: int, within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s * PATIENCE):
            while min((self.done.get(r, 0) for r in range(self.workers)), default=0) < iteration:
                self.check()
                await asyncio.sleep(0.01)

    def check(self) -> None:
        if self.failures:
            raise self.failures[0]

    async def finish(self, more: int = 5) -> int:
        """Let all workers end with the same iteration; which one."""
        self.last = max(self.done.values(), default=0) + more
        for thread in self._threads:
            await asyncio.to_thread(thread.join, 60.0 * PATIENCE)
            assert not thread.is_alive(), "a worker hangs"
        self.check()
        return self.last

    def expected(self, name: str, iterations: int) -> np.ndarray:
        """By a replay in this process."""
        rows = (
            [self.gradient(name, rank, i) for rank in range(self.workers)]
            for i in range(1, iterations + 1)
        )
        return replay(self.update, "float32", self.initial(name), rows)


def _on_host(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array.copy()
    return array.to_host() if isinstance(array, DeviceArray) else array.get()


class Lab:
    def __init__(self, supervisor: Supervisor, bus: NatsBus) -> None:
        self.supervisor = supervisor
        self.bus = bus
        self.director = Director(bus, [])

    async def aggregators(self, *ids: str, **fields: Any) -> None:
        specs = []
        for id in ids:
            folder = self.supervisor.state_dir / id
            folder.mkdir(parents=True)
            config = self.supervisor.run_dir / f"{id}.toml"
            values = {"id": id, "url": self.supervisor.url, "state_dir": folder}
            if (kind := fields.get("transport")) in ("tcp", "verbs"):
                values[f"{kind}_address"] = f"127.0.0.1:{free_port()}"
            write_config(config, values | {"cluster_token": TOKEN} | fields)
            command = (
                sys.executable,
                "-m",
                "slackwater.services.aggregator",
                "--config",
                str(config),
            )
            specs.append(
                UnitSpec(
                    name=id,
                    command=command,
                    restarts_max=10_000,
                    restart_wait_s=0.01,
                    restart_wait_s_max=0.02,
                )
            )
        await self.supervisor.start_units(specs)
        self.director.homes += ids
        async with asyncio.timeout(limits.START_S * PATIENCE):
            while any(id not in self.director.beats for id in ids):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def restarts(self, id: str) -> int:
        return self.supervisor.units[id].restarts

    async def restarted(self, id: str, times: int, within_s: float = 30.0) -> None:
        """Until the unit has been restarted so often in all, and is ready."""
        async with asyncio.timeout(within_s * PATIENCE):
            while self.restarts(id) < times:  # noqa: ASYNC110 (told by another program)
                await asyncio.sleep(0.01)
            await self.supervisor.until_ready(id)

    async def lose(self, id: str, job: Job) -> int:
        """Kill an aggregator, its memory with it, and begin its buckets anew there; return how many
        those were."""
        before = self.restarts(id)
        self.supervisor.drop_fds(id)
        self.supervisor.kill(id, signal.SIGKILL)
        await self.restarted(id, before + 1)
        return await self.director.rehost(job, id)

    async def settle(self, job: Job) -> None:
        """The last migration, which was cut short, ends by itself; the table says where."""
        async with asyncio.timeout(30.0 * PATIENCE):
            while True:
                homes = self.director.homes
                held = {home: await self.director.held(home, job) for home in homes}
                flat = [each for mine in held.values() for each in mine.values()]
                if len(flat) == len(job.places) and not any(each.moving for each in flat):
                    break
                await asyncio.sleep(0.1)
        for home, mine in held.items():
            for bucket, each in mine.items():
                job.places[bucket] = placement.BucketPlace(
                    aggregator=AggregatorId(home), location_epoch=each.location_epoch
                )


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    supervisor = Supervisor()
    try:
        await supervisor.start_nats()
        bus = await NatsBus.connect(supervisor.url, "test")
        made = Lab(supervisor, bus)
        try:
            await made.director.begin()
            yield made
        finally:
            await bus.close()
    finally:
        await supervisor.stop()
    assert not await asyncio.to_thread(supervisor.run_dir.exists)


@pytest.fixture
def training(lab: Lab) -> Callable[..., Training]:
    def make(job: str = "j1", update: str = "adam", **options: Any) -> Training:
        sizes = options.pop("sizes", {"embed": 300_007, "mlp.w": 270_001, "mlp.b": 20_011})
        rule = UpdateRule(name=update, learning_rate=0.01)  # type: ignore[arg-type]
        return Training(lab.supervisor.url, job, sizes, rule, **options)

    return make


@pytest.fixture
def check_result(lab: Lab) -> Callable[[Training, int], Any]:
    """Every worker's parameters equal the replay's, bit for bit; every bucket has one owner, whose
    version is the number of iterations."""

    async def check(run: Training, iterations: int) -> None:
        job = lab.director.jobs[run.job]
        for name in run.sizes:
            expected = run.expected(name, iterations)
            for rank in range(run.workers):
                got = run.results[rank][name]
                assert (got.view(np.uint32) == expected.view(np.uint32)).all(), (name, rank)
        owners: dict[int, list[str]] = {bucket.index: [] for bucket in job.buckets}
        for home in lab.director.homes:
            for bucket, held in (await lab.director.held(home, job)).items():
                owners[bucket].append(home)
                assert held.version == iterations
        assert owners == {b: [p.aggregator] for b, p in enumerate(job.places)}
        beats = await lab.director.fresh_beats()
        gradients = iterations * run.workers * sum(run.sizes.values()) * 4
        if run.transport == "shm" and not run.lossy:
            assert sum(beat.bytes_in for beat in beats) == gradients
            assert sum(beat.bytes_out for beat in beats) == gradients

    return check


@pytest.fixture
async def wires(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Wire]]:
    """Two aggregators that everybody, each other included, reaches over tcp through a `Wire`."""
    await lab.aggregators("a1", "a2", transport="tcp")
    made: list[Wire] = []
    addresses = {}
    for id in lab.director.homes:
        (address,) = [where for kind, where in lab.director.beats[id].addresses if kind == "tcp"]
        wire = Wire()
        addresses[id] = await wire.open(int(address.rpartition(":")[2]))
        made.append(wire)

    def endpoint(id: str) -> placement.Endpoint:
        return placement.Endpoint(aggregator=AggregatorId(id), addresses=(("tcp", addresses[id]),))

    monkeypatch.setattr(lab.director, "endpoint", endpoint)
    yield made
    for wire in made:
        await wire.close()
