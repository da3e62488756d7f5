"""Whole aggregators under virtual time, spoken to in frames over the transport's memory double."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from unittest.mock import call, patch

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.regions import count

from slackwater.common.base import codec, limits
from slackwater.common.base.errors import (
    DECODE_TEXT_MAX,
    AccessRefused,
    ConfigRejected,
    Rejected,
    Unavailable,
)
from slackwater.common.bus.base import Delivery
from slackwater.common.domains.slots import folding
from slackwater.common.domains.slots.frames import (
    Attach,
    Denied,
    Done,
    Granted,
    Hello,
    Moved,
    Offer,
    PushRefused,
    Seed,
    SeedAsked,
    decode,
    encode_control,
    encode_hello,
    encode_rings,
)
from slackwater.common.domains.slots.layout import HEADER_BYTES, plan_buckets
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rules import Hyper
from slackwater.common.domains.slots.tokens import process_token
from slackwater.common.shell import run_service
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.common.transport.base import Channel
from slackwater.common.transport.memory import MemoryFabric, MemoryNetwork
from slackwater.common.transport.region import Region
from slackwater.schemas import subjects
from slackwater.schemas.base import AggregatorId, ClusterId, JobId, Message, Ok, Refused
from slackwater.schemas.cluster import AggregatorHeartbeat
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.placement import (
    BucketHeld,
    BucketsHeld,
    DropJob,
    Endpoint,
    HostBuckets,
    JobPlan,
    ListBuckets,
    MigrateInit,
    TensorCopyDone,
    WorkerDone,
)
from slackwater.schemas.telemetry import TasksObserved
from slackwater.schemas.tensors import TensorSpec, UpdateRule
from slackwater.services.aggregator.config import AggregatorConfig
from slackwater.services.aggregator.regions import Held
from slackwater.services.aggregator.shell import Aggregator

TENSORS = (TensorSpec(name="w", shape=(300_000,)), TensorSpec(name="b", shape=(20_000,)))
BUCKETS = plan_buckets(TENSORS)
UPDATE = UpdateRule(name="momentum", learning_rate=0.1)
PLAN = JobPlan(
    job=JobId("j1"),
    workers=2,
    gradient_dtype="float32",
    update=UPDATE,
    layout_epoch=3,
    token="of-j1",
)
FACTS = TensorCopyDone | WorkerDone | JobEvent
Array = np.ndarray[Any, Any]


class Worker:
    """One rank, by hand: it says frames and looks at what comes back."""

    def __init__(self, system: "System", rank: int) -> None:
        self.system, self.rank = system, rank
        self.granted: dict[int, Granted] = {}
        self.regions: dict[int, SlotRegion] = {}
        self.unheard: deque[Any] = deque()
        self.channel: Channel

    async def connect(self, aggregator: str = "a1", **hello: Any) -> "Worker":
        said: dict[str, Any] = {"role": "agent", "job": "j1", "rank": self.rank, **hello}
        said.setdefault("token", process_token("of-j1", said["rank"], said.get("attempt", 0)))
        said.setdefault("layout_epoch", 3)
        self.channel = await self.system.fabric.connect(
            aggregator, encode_hello(Hello(**said)), deadline_s=5
        )
        self.granted.clear()
        self.unheard.clear()
        return self

    async def hear(self) -> Any:
        while not self.unheard:
            self.unheard.extend(decode(await asyncio.wait_for(self.channel.receive(), 60)))
        return self.unheard.popleft()

    async def attach(self, *buckets: int) -> list[Any]:
        self.channel.send(encode_control(Attach(buckets=buckets)))
        answers = [await self.hear() for _ in buckets]
        for answer in answers:
            if isinstance(answer, Granted):
                self.granted[answer.bucket] = answer
                remote = await self.channel.open(answer.key)
                assert remote.view is not None
                self.regions[answer.bucket] = SlotRegion.open(remote.view)
        return answers

    def say(self, frame: Any) -> None:
        self.channel.send(encode_control(frame))

    def ring(self, bucket: int, iteration: int) -> None:
        self.channel.send(encode_rings([(self.granted[bucket].handle, iteration)]))

    def push(
        self, bucket: int, iteration: int, gradient: Array, hyper: Hyper | None = None
    ) -> None:
        region = self.regions[bucket]
        region.gradient(self.rank)[:] = gradient
        region.set_hyper(self.rank, hyper or Hyper.of(UPDATE))
        count(region, self.rank, pushed=gradient.nbytes)
        region.set_pushed(self.rank, iteration)
        self.ring(bucket, iteration)


class System:
    """Aggregators that live and die in one simulated system."""

    def __init__(self) -> None:
        self.world: SimWorld = SimWorld(1)
        self.network = MemoryNetwork(seed=1, latency_s=1e-4)
        self.fabric = MemoryFabric(self.network, mapped=True)
        self.client = self.world.client("test")
        self.facts: list[Any] = []
        self.reports: list[TasksObserved] = []
        self.running: dict[str, Aggregator] = {}
        self._stops: dict[str, tuple[asyncio.Event, asyncio.Task[int]]] = {}

    async def begin(self) -> None:
        async def fact(delivery: Delivery) -> None:
            self.facts.append(codec.decode(delivery.payload, FACTS))

        async def report(delivery: Delivery) -> None:
            self.reports.append(codec.decode(delivery.payload, TasksObserved))

        bus = self.client.bus
        await bus.subscribe(subjects.events("migration", fact="copied"), fact)
        await bus.subscribe(subjects.events("migration", fact="worker-done"), fact)
        await bus.subscribe(subjects.events("job"), fact)
        await bus.subscribe(subjects.telemetries("aggregator", what="tasks"), report)

    async def start(self, id: str, **config: Any) -> Aggregator:
        world = self.world.client(f"aggregator-{id}")
        aggregator = Aggregator(
            AggregatorConfig(id=id, cluster_token="c", **config),
            world,
            {"memory": MemoryFabric(self.network, mapped=True)},
            {"memory": id},
            virtual=True,
        )
        stop = asyncio.Event()
        task = asyncio.create_task(run_service(aggregator.definition(), world, stop))
        self.running[id] = aggregator
        self._stops[id] = (stop, task)
        await asyncio.sleep(0.5)
        return aggregator

    async def stop(self, id: str) -> None:
        stop, task = self._stops.pop(id)
        stop.set()
        assert await task == 0

    async def ask(self, id: str, verb: str, message: Message) -> Any:
        raw = await self.client.bus.request(
            subjects.command("aggregator", id, verb), codec.encode(message), timeout_s=20
        )
        return codec.decode(raw, Ok | Refused | BucketsHeld)

    async def host(
        self, id: str = "a1", epoch: int = 0, plan: JobPlan = PLAN, buckets: Any = BUCKETS
    ) -> Any:
        message = HostBuckets(
            cluster=ClusterId("c1"),
            plan=plan,
            buckets=buckets,
            at_epochs=(epoch,) * len(buckets),
            tensors=TENSORS,
        )
        return await self.ask(id, "host", message)

    async def migrate(self, bucket: int, epoch: int, source: str = "a1", to: str = "a2") -> Any:
        message = MigrateInit(
            cluster=ClusterId("c1"),
            migration=f"m{epoch}",
            job="j1",
            buckets=(bucket,),
            epochs=(epoch,),
            to=Endpoint(aggregator=AggregatorId(to), addresses=(("memory", to),)),
        )
        return await self.ask(source, "migrate", message)

    async def held(self, id: str) -> dict[int, BucketHeld]:
        answer = await self.ask(id, "held", ListBuckets())
        return {each.bucket: each for each in answer.held}

    async def training(self, *, aggregator: str = "a1") -> list[Worker]:
        """Two workers, attached; the parameters are ones."""
        workers = [await Worker(self, rank).connect(aggregator) for rank in range(2)]
        for worker in workers:
            assert all(isinstance(g, Granted) for g in await worker.attach(0, 1))
            for granted in worker.granted.values():
                worker.say(Offer(handle=granted.handle, version=0))
        for _ in BUCKETS:
            asked = await workers[0].hear()
            assert isinstance(asked, SeedAsked)
            for index, granted in workers[0].granted.items():
                if granted.handle == asked.handle:
                    workers[0].regions[index].parameters(0)[:] = 1.0
            workers[0].say(Seed(handle=asked.handle, version=0))
        for worker in workers:
            for _ in BUCKETS:
                assert (await worker.hear()).version == 0
        return workers


def simulated(test: Callable[..., Awaitable[None]]) -> Any:
    """Run the test's coroutine with a fresh system, on virtual time."""

    async def main() -> None:
        system = System()
        await system.begin()
        await test(system)
        for id in list(system._stops):
            await system.stop(id)

    def run() -> None:
        coroutine: Coroutine[Any, Any, None] = main()
        run_simulated(coroutine)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def gradient(rank: int, iteration: int, bucket: int) -> Array:
    rng = np.random.default_rng([rank, iteration, bucket])
    return rng.standard_normal(BUCKETS[bucket].elements).astype(np.float32)


async def iterate(workers: list[Worker], bucket: int, iteration: int) -> list[Any]:
    for worker in workers:
        worker.push(bucket, iteration, gradient(worker.rank, iteration, bucket))
    return [await worker.hear() for worker in workers]


def expected(bucket: int, iterations: int) -> Array:
    rows = ([gradient(r, i, bucket) for r in range(2)] for i in range(1, iterations + 1))
    initial = np.ones(BUCKETS[bucket].elements, np.float32)
    return folding.replay(UPDATE, "float32", initial, rows)


def same(worker: Worker, bucket: int, version: int) -> bool:
    got = worker.regions[bucket].parameters(version)
    return bool((got.view(np.uint32) == expected(bucket, version).view(np.uint32)).all())


@simulated
async def test_training_is_the_replay(system: System) -> None:
    """Seeded by rank 0, pushed, pulled: the same bits as in one process; counters add up."""
    aggregator = await system.start("a1", cpu_share=0.1)
    assert isinstance(await system.host(), Ok)
    workers = await system.training()
    for iteration in range(1, 6):
        for bucket in (0, 1):
            answers = await iterate(workers, bucket, iteration)
            assert [a.version for a in answers] == [iteration] * 2
    assert all(same(workers[1], bucket, 5) for bucket in (0, 1))
    beat: AggregatorHeartbeat = aggregator.heartbeat(0.0)
    assert (beat.buckets, beat.jobs) == (2, 1)
    assert beat.bytes_in == 5 * 2 * 320_000 * 4
    assert beat.held_bytes == aggregator.core.held_bytes > 300_010 * 4 * 6
    await asyncio.sleep(3.0)
    tasks = {t.bucket: t for report in system.reports for t in report.tasks}
    assert tasks[0].executions == tasks[1].executions == 5
    assert tasks[0].cpu_s > 0.0
    assert beat.busy_s >= 5 * tasks[0].cpu_s / 0.1 * 0.5


@simulated
async def test_an_aggregator_charges_by_bytes_and_says_when_folds_take_longer(
    system: System,
) -> None:
    """A millionth of a nanosecond for each byte is too little for any machine."""
    aggregator = await system.start("a1", cpu_share=0.1, charge_ns_per_byte=1e-6)
    await system.host()
    workers = await system.training()
    for iteration in range(1, 6):
        for bucket in (0, 1):
            await iterate(workers, bucket, iteration)
    beat: AggregatorHeartbeat = aggregator.heartbeat(0.0)
    assert (beat.executions, beat.undercharged) == (10, 10)
    charged_s = [4 * layout.elements * 4 * 1e-15 for layout in BUCKETS]
    assert beat.busy_s == pytest.approx(5 * sum(charged_s) / 0.1)
    await asyncio.sleep(3.0)
    tasks = {t.bucket: t for report in system.reports for t in report.tasks}
    assert [tasks[bucket].cpu_s for bucket in (0, 1)] == pytest.approx(charged_s)
    assert all(task.undercharged == 5 and task.real_cpu_s > 0.0 for task in tasks.values())


@simulated
async def test_the_slot_spaces_the_answers(system: System) -> None:
    """DONE goes out when the slot ends: CPU time / share after the last push."""
    aggregator = await system.start("a1", cpu_share=0.03)
    await system.host()
    workers = await system.training()
    begun_s = system.client.clock.now_s()
    busy_s = aggregator.executor.busy_s
    await iterate(workers, 0, 1)
    spent_s = aggregator.executor.busy_s - busy_s
    assert spent_s > 0.0
    assert system.client.clock.now_s() - begun_s >= spent_s * 0.99


@simulated
async def test_a_retry_is_answered_and_never_counted(system: System) -> None:
    await system.start("a1")
    await system.host()
    workers = await system.training()
    workers[0].push(0, 1, gradient(0, 1, 0))
    for _ in range(3):
        workers[0].ring(0, 1)
    workers[1].push(0, 1, gradient(1, 1, 0))
    first = [await worker.hear() for worker in workers]
    assert {a.version for a in first} == {1}
    workers[1].ring(0, 1)
    again = await workers[1].hear()
    assert isinstance(again, Done)
    assert again.version == 1
    assert (await system.held("a1"))[0].version == 1
    assert same(workers[0], 0, 1)


@simulated
async def test_a_bad_gradient_is_refused_to_its_worker_alone(system: System) -> None:
    """Nothing is applied; the others' pushes stand; a good gradient completes the iteration."""
    await system.start("a1")
    await system.host()
    workers = await system.training()
    bad = gradient(1, 1, 0)
    bad[77] = np.nan
    workers[0].push(0, 1, gradient(0, 1, 0))
    workers[1].push(0, 1, bad)
    refused = await workers[1].hear()
    assert isinstance(refused, PushRefused)
    assert (refused.job, refused.tensor, refused.worker, refused.iteration) == ("j1", "w", 1, 1)
    assert workers[1].regions[0].pushed(1) == 0
    assert workers[1].regions[0].version == 0
    workers[1].push(0, 1, gradient(1, 1, 0))
    assert [(await worker.hear()).version for worker in workers] == [1, 1]
    assert same(workers[0], 0, 1)


@simulated
async def test_workers_must_agree_on_hyper_parameters(system: System) -> None:
    await system.start("a1")
    await system.host()
    workers = await system.training()
    workers[0].push(1, 1, gradient(0, 1, 1), Hyper(0.1))
    workers[1].push(1, 1, gradient(1, 1, 1), Hyper(0.2))
    refused = await workers[1].hear()
    assert isinstance(refused, PushRefused)
    assert "learning_rate is 0.2, rank 0 pushed 0.1" in refused.why


@simulated
async def test_a_push_from_the_future_is_refused(system: System) -> None:
    await system.start("a1")
    await system.host()
    workers = await system.training()
    workers[0].push(0, 3, gradient(0, 3, 0))
    refused = await workers[0].hear()
    assert isinstance(refused, PushRefused)
    assert "push iteration 1 next" in refused.why
    assert [a.version for a in await iterate(workers, 0, 1)] == [1, 1]


@simulated
async def test_strangers_are_turned_away(system: System) -> None:
    await system.start("a1")
    await system.host()
    for wrong in ({"token": "x"}, {"token": PLAN.token}, {"layout_epoch": 2}, {"rank": 2}):
        with pytest.raises(AccessRefused):
            await Worker(system, 0).connect(**wrong)
    with pytest.raises(AccessRefused, match="token"):
        await Worker(system, 0).connect(role="aggregator", token="x", sender="a9")
    with pytest.raises(Unavailable, match="no bucket of job j2"):
        await Worker(system, 0).connect(job="j2", token="anything")
    with pytest.raises(AccessRefused):
        await system.fabric.connect("a1", b"nonsense", deadline_s=5)
    for name in ("role", "job", "t"):
        hello = msgspec.msgpack.encode({"t": "hello", "role": "agent", name: "y" * 5000})
        with pytest.raises((AccessRefused, Unavailable)) as refusal:
            await system.fabric.connect("a1", hello, deadline_s=5)
        assert str(refusal.value).count("y") < DECODE_TEXT_MAX + 10, "quoted at length"


@simulated
async def test_a_token_is_of_one_process_of_one_rank(system: System) -> None:
    await system.start("a1")
    await system.host()
    own = process_token(PLAN.token, 0, 3)
    with patch.object(system.running["a1"].plane.port, "count") as counted:
        for wrong in ({"rank": 1, "attempt": 3}, {"attempt": 2}, {"attempt": 4}, {}):
            with pytest.raises(AccessRefused, match="token"):
                await Worker(system, 0).connect(token=own, **wrong)
    assert counted.call_args_list == [call("strangers_refused")] * 4
    worker = await Worker(system, 0).connect(token=own, attempt=3)
    assert isinstance((await worker.attach(0))[0], Granted)


@simulated
async def test_a_process_is_not_let_in_once_another_of_its_rank_has_come(system: System) -> None:
    await system.start("a1")
    await system.host()
    early = await Worker(system, 0).connect(attempt=1)
    late = await Worker(system, 0).connect(attempt=2)
    assert isinstance((await early.attach(0))[0], Granted)
    assert isinstance((await late.attach(0))[0], Granted)
    (denied,) = await early.attach(0)
    assert isinstance(denied, Denied)
    assert "process 2 came after process 1" in denied.why
    (other,) = await early.attach(1)
    assert isinstance(other, Granted), "each bucket knows who came to it"
    again = await Worker(system, 0).connect(attempt=2)
    assert isinstance((await again.attach(0))[0], Granted)


@simulated
async def test_a_token_is_looked_at_when_the_job_has_come(system: System) -> None:
    """No one has a channel before: not the thief, nor the worker, who waits while it comes."""
    await system.start("a1")
    thief = asyncio.create_task(Worker(system, 0).connect(token="wrong"))
    worker = asyncio.create_task(Worker(system, 0).connect())
    await asyncio.sleep(limits.ADMIT_WAIT_S / 4)
    assert not system.running["a1"].plane._sessions, "nothing is kept for either"
    await system.host()
    with pytest.raises(AccessRefused, match="token"):
        await thief
    (granted,) = await (await worker).attach(0)
    assert isinstance(granted, Granted)


@simulated
async def test_a_token_is_checked_again_when_the_job_has_come_anew(system: System) -> None:
    await system.start("a1")
    await system.host()
    worker = await Worker(system, 0).connect()
    await system.ask("a1", "drop", DropJob(job="j1"))
    await system.host(epoch=1, plan=msgspec.structs.replace(PLAN, token="another"))
    (denied,) = await worker.attach(0)
    assert isinstance(denied, Denied)
    assert "token" in denied.why


@simulated
async def test_only_an_aggregator_may_hand_a_region_over(system: System) -> None:
    """An Agent is refused before any memory is taken; an aggregator within memory_bytes_max."""
    aggregator = await system.start("a1", memory_bytes_max=1_000_000)
    await system.host(plan=PLAN, buckets=BUCKETS[1:])
    agent = await Worker(system, 0).connect()
    region = Region.create(4096, "stolen")
    with pytest.raises(AccessRefused, match="only aggregators"):
        await agent.channel.handover(region, b"")
    region.close()
    peer = await Worker(system, 0).connect(role="aggregator", token="c", sender="a2")
    large = Region.create(1_000_000, "large")
    with pytest.raises(Rejected, match="memory_bytes_max"):
        await peer.channel.handover(large, b"")
    large.close()
    free = 1_000_000 - aggregator.core.held_bytes
    give_back = aggregator.core.prepare(free)
    assert aggregator.core.no_room_for(1)
    give_back()
    assert not aggregator.core.no_room_for(free)


@simulated
async def test_what_cannot_be_understood_ends_the_channel(system: System) -> None:
    await system.start("a1")
    await system.host()
    workers = await system.training()
    workers[0].channel.send(b"\x09garbage")
    with pytest.raises(Unavailable):
        await workers[0].channel.receive()
    await workers[0].connect()
    await workers[0].attach(0, 1)
    assert [a.version for a in await iterate(workers, 0, 1)] == [1, 1]


@simulated
async def test_channels_that_say_what_cannot_be_understood_are_few_lines(system: System) -> None:
    """However many there are: a stranger's words are not the log."""
    await system.start("a1")
    await system.host()
    with capture_logs() as logged:
        for _ in range(3 * limits.STRANGER_LINES_MAX):
            worker = await Worker(system, 0).connect()
            worker.channel.send(b"\x09garbage")
            with pytest.raises(Unavailable):
                await worker.channel.receive()
    lines = [line for line in logged if line["event"] == "channel.refused"]
    assert 0 < len(lines) <= limits.STRANGER_LINES_MAX


@simulated
async def test_a_worker_that_comes_back_goes_on(system: System) -> None:
    """Its push of before stands; a second channel of its rank replaces the first."""
    await system.start("a1")
    await system.host()
    workers = await system.training()
    workers[0].push(0, 1, gradient(0, 1, 0))
    old = workers[0].channel
    await workers[0].connect()
    granted, _ = await workers[0].attach(0, 1)
    assert (granted.initialized, granted.version) == (True, 0)
    assert workers[0].regions[0].pushed(0) == 1
    workers[1].push(0, 1, gradient(1, 1, 0))
    assert (await workers[1].hear()).version == 1
    assert (await workers[0].hear()).version == 1
    await old.close()
    assert [a.version for a in await iterate(workers, 0, 2)] == [2, 2]


@simulated
async def test_lost_bytes_come_back_from_the_newest_worker(system: System) -> None:
    """A fresh region at a higher epoch: the newest version's lowest rank seeds, and that the
    optimiser's state is lost is told."""
    await system.start("a1")
    await system.host()
    workers = await system.training()
    await system.ask("a1", "drop", DropJob(job="j1"))
    for worker in workers:
        assert {type(await worker.hear()) for _ in BUCKETS} == {Denied}
    await system.host(epoch=1)
    for worker in workers:
        granted = await worker.attach(0)
        assert not granted[0].initialized
        worker.say(Offer(handle=granted[0].handle, version=40 + worker.rank))
    asked = await workers[1].hear()
    assert isinstance(asked, SeedAsked)
    workers[1].regions[0].parameters(41)[:] = 5.0
    workers[1].say(Seed(handle=asked.handle, version=41))
    for worker in workers:
        done = await worker.hear()
        assert (done.version, done.location_epoch) == (41, 1)
    await asyncio.sleep(0.1)
    (lost,) = system.facts
    assert (lost.fact, lost.detail["version"]) == ("optimizer-state-lost", "41")
    answers = await iterate(workers, 0, 42)
    assert [a.version for a in answers] == [42, 42]
    mean = (gradient(0, 42, 0) + gradient(1, 42, 0)) * np.float32(0.5)
    assert (workers[0].regions[0].parameters(42) == 5.0 - np.float32(0.1) * mean).all()


async def moved_to(system: System, workers: list[Worker], bucket: int, to: str) -> None:
    """The workers follow to the new aggregator."""
    for worker in workers:
        while True:
            with contextlib.suppress(Unavailable):  # Its first bucket there may be on its way.
                await worker.connect(to)
                (answer,) = await worker.attach(bucket)
                if isinstance(answer, Granted):
                    break
            await asyncio.sleep(0.05)


@simulated
async def test_a_bucket_moves_after_the_next_version(system: System) -> None:
    """MIGRATE_INIT, the pull response that names the new aggregator, TENSOR_COPY_DONE, and
    WORKER_DONE once both workers have pushed there; the bits are those of a run without it."""
    await system.start("a1")
    await system.start("a2")
    await system.host()
    workers = await system.training()
    await iterate(workers, 0, 1)
    workers[0].push(0, 2, gradient(0, 2, 0))
    await asyncio.sleep(0.1)
    assert isinstance(await system.migrate(0, epoch=1), Ok)
    await asyncio.sleep(1.0)
    assert (await system.held("a1"))[0].moving, "a push waits for its update"
    assert system.facts == []
    workers[1].push(0, 2, gradient(1, 2, 0))
    for worker in workers:
        moved = await worker.hear()
        assert isinstance(moved, Moved)
        assert (moved.version, moved.location_epoch, moved.to.aggregator) == (2, 1, "a2")
        assert same(worker, 0, 2), "the version is complete where it was"
    await moved_to(system, workers, 0, "a2")
    await asyncio.sleep(0.1)
    (copied,) = system.facts
    assert (copied.migration, copied.location_epoch, copied.version) == ("m1", 1, 2)
    assert 0 not in await system.held("a1")
    assert [a.version for a in await iterate(workers, 0, 3)] == [3, 3]
    await asyncio.sleep(0.1)
    done = system.facts[-1]
    assert isinstance(done, WorkerDone)
    assert (done.bucket, done.location_epoch, done.target) == (0, 1, "a2")
    assert same(workers[0], 0, 3)


@simulated
async def test_an_idle_bucket_moves_at_once_and_late_comers_are_sent_on(system: System) -> None:
    await system.start("a1")
    await system.start("a2")
    await system.host()
    workers = await system.training()
    await iterate(workers, 0, 1)
    await system.migrate(0, epoch=1)
    assert isinstance(await workers[0].hear(), Moved)
    await asyncio.sleep(0.2)
    workers[1].ring(0, 2)
    told = [await workers[1].hear(), await workers[1].hear()]
    assert {type(t) for t in told} == {Moved}
    late = await Worker(system, 0).connect()
    (answer,) = await late.attach(0)
    assert isinstance(answer, Moved)
    assert answer.to.aggregator == "a2"
    assert isinstance(await system.migrate(0, epoch=1), Ok)
    await asyncio.sleep(0.1)
    assert system.facts[0] == system.facts[1], "a finished migration is told again"


@simulated
async def test_other_buckets_train_on_while_one_cannot_leave(system: System) -> None:
    """Its target is dead: the lane tries again; called off, the bucket goes on where it is."""
    await system.start("a1")
    await system.host()
    workers = await system.training()
    await system.migrate(0, epoch=1)
    for worker in workers:
        assert isinstance(await worker.hear(), Moved)
    for iteration in (1, 2, 3):
        answers = await iterate(workers, 1, iteration)
        assert [a.version for a in answers] == [iteration] * 2
    await asyncio.sleep(30.0)
    assert (await system.held("a1"))[0].moving
    assert isinstance(await system.host(epoch=2), Ok)
    held = (await system.held("a1"))[0]
    assert (held.moving, held.location_epoch) == (False, 2)
    for worker in workers:
        await worker.attach(0)
    assert [a.location_epoch for a in await iterate(workers, 0, 1)] == [2, 2]
    assert same(workers[0], 0, 1)


@simulated
async def test_a_target_that_comes_late_gets_it(system: System) -> None:
    await system.start("a1")
    await system.host()
    workers = await system.training()
    await system.migrate(0, epoch=1)
    await asyncio.sleep(10.0)
    await system.start("a2")
    await moved_to(system, workers, 0, "a2")
    assert [a.version for a in await iterate(workers, 0, 1)] == [1, 1]


@simulated
async def test_a_full_target_refuses_and_the_bucket_is_sent_elsewhere(system: System) -> None:
    await system.start("a1")
    await system.start("a2", memory_bytes_max=1000)
    await system.start("a3")
    await system.host()
    workers = await system.training()
    await system.migrate(0, epoch=1, to="a2")
    await asyncio.sleep(5.0)
    assert 0 in await system.held("a1")
    assert await system.held("a2") == {}
    await system.migrate(0, epoch=2, to="a3")
    await moved_to(system, workers, 0, "a3")
    assert [a.version for a in await iterate(workers, 0, 1)] == [1, 1]
    assert same(workers[0], 0, 1)


@simulated
async def test_a_bucket_travels_in_a_circle_without_losing_a_bit(system: System) -> None:
    for id in ("a1", "a2", "a3"):
        await system.start(id)
    await system.host()
    workers = await system.training()
    here, iteration = "a1", 0
    for epoch, there in enumerate(["a2", "a3", "a1", "a2", "a1", "a3"], 1):
        iteration += 1
        await iterate(workers, 0, iteration)
        await system.migrate(0, epoch, source=here, to=there)
        await moved_to(system, workers, 0, there)
        here = there
    assert same(workers[1], 0, iteration)
    everywhere = [id for id in system.running if 0 in await system.held(id)]
    assert everywhere == ["a3"]
    counted = sum(a.heartbeat(0.0).bytes_in for a in system.running.values())
    nbytes = live_bytes(system.running["a3"].regions.held[JobId("j1"), 0])
    pushed = iteration * 2 * 300_000 * 4
    assert counted in (pushed, pushed + 6 * nbytes), "counters travel with the region"


def live_bytes(held: Held) -> int:
    """Header, parameters, momentum, record."""
    record = held.region.nbytes - held.slots.geometry.nbytes
    return HEADER_BYTES + 2 * held.slots.geometry.parameter_bytes + record


@simulated
async def test_a_copy_sends_one_buffer_of_each_and_no_slot(system: System) -> None:
    """Two slots and the buffers of the version before went along once: 2.5 times as much."""
    await system.start("a1")
    await system.start("a2")
    await system.host()
    workers = await system.training()
    for iteration in (1, 2, 3):
        await iterate(workers, 0, iteration)
    await system.migrate(0, epoch=1)
    await moved_to(system, workers, 0, "a2")
    await asyncio.sleep(0.1)
    held = system.running["a2"].regions.held[JobId("j1"), 0]
    assert system.network.copied_bytes == live_bytes(held)
    (fact,) = system.facts
    assert fact.nbytes == live_bytes(held)
    assert not held.slots.gradient(0).any()
    assert [a.version for a in await iterate(workers, 0, 4)] == [4, 4]
    assert same(workers[0], 0, 4)


@simulated
async def test_a_bucket_whose_worker_does_not_push_lets_others_leave(system: System) -> None:
    """A push of bucket 0 waits for the other worker's, for minutes: a turn is not held so long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MOVES_AT_ONCE", 1)
        await system.start("a1")
    await system.start("a2")
    await system.host()
    workers = await system.training()
    workers[0].push(0, 1, gradient(0, 1, 0))
    await asyncio.sleep(0.1)
    for bucket in (0, 1):
        await system.migrate(bucket, epoch=1)
    await asyncio.sleep(100.0)
    assert {bucket: held.moving for bucket, held in (await system.held("a1")).items()} == {0: True}
    workers[1].push(0, 1, gradient(1, 1, 0))
    await asyncio.sleep(60.0)
    assert await system.held("a1") == {}
    assert (await system.held("a2"))[0].version == 1


@simulated
async def test_a_bucket_that_nobody_has_filled_moves_too(system: System) -> None:
    await system.start("a1")
    await system.start("a2")
    await system.host()
    for bucket in (0, 1):
        assert isinstance(await system.migrate(bucket, epoch=1), Ok)
    await asyncio.sleep(1.0)
    assert await system.held("a1") == {}
    assert len(await system.held("a2")) == 2
    workers = await system.training(aggregator="a2")
    assert [a.version for a in await iterate(workers, 0, 1)] == [1, 1]


@simulated
async def test_hosting_names_what_is_asked_and_free(system: System) -> None:
    await system.start("a1", memory_bytes_max=5_000_000)
    answer = await system.host()
    assert isinstance(answer, Refused)
    assert "of 5000000 are free" in answer.reason
    assert await system.held("a1") == {}


@simulated
async def test_a_worker_that_never_reads_is_let_go(system: System) -> None:
    """Its frames are bounded; the others train on once it is back."""
    await system.start("a1")
    await system.host()
    workers = await system.training()
    rung = 0
    while not workers[0].channel.closed and rung <= limits.SEND_QUEUE_FRAMES + 10:
        workers[0].ring(0, 0)
        rung += 1
        await asyncio.sleep(0.001)
    assert workers[0].channel.closed
    await workers[0].connect()
    await workers[0].attach(0, 1)
    assert [a.version for a in await iterate(workers, 0, 1)] == [1, 1]


@simulated
async def test_the_older_of_two_aggregators_of_one_id_ends(system: System) -> None:
    """It says which other one it saw; the newer one serves on."""
    await system.start("a1")
    _, older = system._stops.pop("a1")
    system.network = MemoryNetwork(
        seed=2, latency_s=1e-4
    )  # No one listens at its address, as on another machine.
    await system.start("a1", node="n2")
    with pytest.raises(ConfigRejected, match=r"aggregator: .* id a1 runs on node n2"):
        async with asyncio.timeout(20):
            await older
    assert isinstance(await system.ask("a1", "held", ListBuckets()), BucketsHeld)
