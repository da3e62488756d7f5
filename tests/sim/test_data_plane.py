"""The whole data plane in virtual time: real aggregators and real Agents while buckets travel and
aggregators die, at every moment that a seed can draw.

Shells, cores and region words are the real ones; the network, the clock, the supervisor's
descriptor store and the controller (a director that insists on its moves) are the model's. A kill
is that of a process: no line of it runs any more, its channels break, its memory stays where the
descriptor store or a worker maps it. When no fault comes any more, everything must be attached and
go on, and the parameters are those of a replay, bit for bit.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.sim.lives import POINTS, Lives, Network

from slackwater.agent import region_access
from slackwater.agent.initial import Initial
from slackwater.agent.session import Session
from slackwater.common.base import codec, limits
from slackwater.common.base.errors import Retryable, Unavailable
from slackwater.common.bus.access import Access
from slackwater.common.bus.base import Delivery
from slackwater.common.domains.slots.consistency import staleness_bound
from slackwater.common.domains.slots.folding import replay
from slackwater.common.domains.slots.tokens import process_token
from slackwater.common.shell.simulated_loop import SimLoop
from slackwater.common.shell.world import SimWorld
from slackwater.common.transport.memory import MemoryFabric
from slackwater.common.transport.memory_channel import MemoryChannel
from slackwater.schemas import subjects
from slackwater.schemas.base import AggregatorId, ClusterId, JobId, Message, Ok, Refused
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import (
    BucketHeld,
    BucketLayout,
    BucketPlace,
    BucketsHeld,
    Endpoint,
    HostBuckets,
    JobPlan,
    ListBuckets,
    Located,
    MigrateInit,
    TensorCopyDone,
)
from slackwater.schemas.tensors import TensorSpec, UpdateRule

HOMES = ("a1", "a2")
WORKERS = 2
BUCKETS = 3
ELEMENTS = 48
UPDATE = UpdateRule(name="momentum", learning_rate=0.1)
TENSORS = tuple(TensorSpec(name=f"t{index}", shape=(ELEMENTS,)) for index in range(BUCKETS))
LAYOUTS = tuple(
    BucketLayout(index=index, first=index, count=1, elements=ELEMENTS) for index in range(BUCKETS)
)
PLAN = JobPlan(
    job=JobId("j1"),
    workers=WORKERS,
    gradient_dtype="float32",
    update=UPDATE,
    layout_epoch=1,
    token="of-j1",
)
ALONE = UpdateRule(name="sgd", learning_rate=1.0)
"""Gradients are whole numbers then: parameters say exactly which of them they contain."""
MODES = {
    "asynchronous": msgspec.structs.replace(PLAN, update=ALONE, consistency="asynchronous"),
    **{
        f"stale-{bound}": msgspec.structs.replace(
            PLAN, update=ALONE, consistency="stale-synchronous", staleness=bound
        )
        for bound in (0, 2)
    },
}
STALLED_S = 30.0
"""Nothing here takes so long, not even a few repeats: whoever waited for it waits for ever."""


class Cluster(Lives):
    def __init__(self, seed: int, *, shared: bool, plan: JobPlan = PLAN) -> None:
        sim = SimWorld(seed)
        super().__init__(sim, Network(seed, shared=shared), random.Random(seed), HOMES)
        self.shared, self.plan = shared, plan
        self.clock = sim.clock
        self.bus = sim.client("director").bus
        self.places = [BucketPlace(aggregator=AggregatorId(HOMES[b % 2])) for b in range(BUCKETS)]
        self.copied: set[tuple[int, int]] = set()
        self.moves = 0

    async def begin(self) -> None:
        async def copied(delivery: Delivery) -> None:
            fact = codec.decode(delivery.payload, TensorCopyDone)
            self.copied.add((fact.bucket, fact.location_epoch))

        await self.bus.subscribe(subjects.events("migration", fact="copied"), copied)
        await super().begin()

    # The director: master and controller ----------------------------------------------------------

    def endpoint(self, id: str) -> Endpoint:
        return Endpoint(aggregator=AggregatorId(id), addresses=(("memory", id),))

    async def locate(self, rank: int) -> Located:
        await asyncio.sleep(self.rng.choice((1e-3, 1e-2)))
        if self.rng.random() < 0.1:
            raise Unavailable("the controller is away", 0.05)
        return Located(
            job=self.plan.job,
            plan=msgspec.structs.replace(self.plan, token=process_token(self.plan.token, rank, 0)),
            buckets=LAYOUTS,
            places=tuple(self.places),
            endpoints=tuple(map(self.endpoint, HOMES)),
        )

    async def insist(self, id: str, verb: str, message: Message) -> Any:
        subject = subjects.command("aggregator", id, verb)
        while True:
            try:
                raw = await self.bus.request(subject, codec.encode(message), timeout_s=1.0)
            except Retryable:
                await asyncio.sleep(0.02)
                continue
            answer = codec.decode(raw, Ok | Refused | BucketsHeld)
            if not isinstance(answer, Refused) or answer.retry_after_s == 0.0:
                return answer
            await asyncio.sleep(answer.retry_after_s)

    async def host(self) -> None:
        for id in HOMES:
            await self.host_at(id)

    async def host_at(self, id: str) -> None:
        own = [b for b in range(BUCKETS) if self.places[b].aggregator == id]
        message = HostBuckets(
            cluster=ClusterId("c1"),
            plan=self.plan,
            buckets=tuple(LAYOUTS[b] for b in own),
            at_epochs=tuple(self.places[b].location_epoch for b in own),
            tensors=TENSORS,
        )
        assert isinstance(await self.insist(id, "host", message), Ok)

    async def held(self, id: str) -> dict[int, BucketHeld]:
        answer = await self.insist(id, "held", ListBuckets(job=self.plan.job))
        return {each.bucket: each for each in answer.held}

    def order(self, bucket: int, to: str, epoch: int) -> MigrateInit:
        self.moves += 1
        return MigrateInit(
            cluster=ClusterId("c1"),
            migration=f"m{self.moves}",
            job=self.plan.job,
            buckets=(bucket,),
            epochs=(epoch,),
            to=self.endpoint(to),
        )

    async def move(self, bucket: int) -> None:
        """MIGRATE_INIT until the bucket is there, whoever is killed meanwhile."""
        old = self.places[bucket]
        to = next(id for id in HOMES if id != old.aggregator)
        epoch = old.location_epoch + 1
        message = self.order(bucket, to, epoch)
        async with asyncio.timeout(STALLED_S):
            while True:
                await self.insist(old.aggregator, "migrate", message)
                await asyncio.sleep(0.05)
                here = (await self.held(to)).get(bucket)
                if (bucket, epoch) in self.copied or (
                    here is not None and here.location_epoch >= epoch and not here.moving
                ):
                    break
        self.places[bucket] = BucketPlace(aggregator=AggregatorId(to), location_epoch=epoch)


# Agents -------------------------------------------------------------------------------------------


class Rank:
    """The real Agent's thread as tasks of the simulation, and a program that trains with it."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster, self.rank = cluster, rank
        self.rng = random.Random(f"{cluster.sim.seed}/{rank}")
        spec = JobSpec(id="j1", workers=WORKERS, update=cluster.plan.update)
        self.bound = staleness_bound(cluster.plan)
        initial = Initial({tensor.name: np.ones(ELEMENTS, np.float32) for tensor in TENSORS})
        self.session = session = Session(
            spec,
            rank,
            TENSORS,
            initial,
            Access(""),
            submitted=True,
            transport=None,
            deadline_s=60.0,
        )
        parts: Any = session
        parts._loop = asyncio.get_running_loop()
        parts._fabrics = {"memory": MemoryFabric(cluster.network, mapped=cluster.shared)}
        parts._begin(cluster.clock)
        parts._control = self
        session._apply(session._core.start(cluster.clock.now_s()))

    async def locate(self) -> Located:
        """Answer as the session's control does."""
        return await self.cluster.locate(self.rank)

    async def repeat(self) -> None:
        """Repeat as the Agent's thread does; without it a lost frame's loss would be for ever."""
        while True:
            await asyncio.sleep(limits.REPEAT_S)
            self.session._apply(self.session._core.repeat(self.now_s))

    @property
    def now_s(self) -> float:
        return self.cluster.clock.now_s()

    async def until(self, done: Callable[[], bool], what: str) -> None:
        give_up_s = self.now_s + STALLED_S
        while not done():
            if self.session.failure is not None:
                raise self.session.failure
            await asyncio.sleep(self.rng.choice((1e-4, 1e-3)))
            if self.now_s > give_up_s:
                late = [c for c in self.session.buckets if c.version < max(c.iteration, 0)]
                where = ", ".join(map(self.session._describe, late))
                raise AssertionError(f"rank {self.rank} waits for {what}: {where}")

    async def train(self, iterations: int) -> None:
        cells = self.session.buckets
        await self.until(
            lambda: (
                bool(self.session.buckets) and all(c.version >= 0 for c in self.session.buckets)
            ),
            "its first parameters",
        )
        cells = self.session.buckets
        for iteration in range(cells[0].iteration + 1, iterations + 1):
            for cell in self.rng.sample(cells, len(cells)):
                cell.put(0, self.gradient(iteration, cell.index))
                self.session.ring(cell)
                if self.rng.random() < 0.3:
                    await asyncio.sleep(self.rng.choice((1e-4, 2e-3, 2e-2)))
            await self.until(lambda: all(cell.settled for cell in cells), f"version {iteration}")
            assert not any(cell.refused for cell in cells)
            if self.bound is not None:
                self.check_reads(iteration, self.bound)

    def gradient(self, iteration: int, bucket: int) -> Any:
        return (gradient if self.bound is None else whole)(self.rank, iteration, bucket)

    def check_reads(self, iteration: int, bound: int) -> None:
        """Check that this worker's reads after an iteration are whole, say what they contain, and
        lack nothing that the bound promises."""
        for cell in self.session.buckets:
            values = cell.parameters(0)
            contained = cell.contained
            assert (values == summed(cell.index, contained)).all(), (cell.index, contained)
            assert contained[self.rank] >= iteration, "its own push is in"
            assert min(contained) >= iteration - bound, (contained, iteration)

    async def close(self) -> None:
        await self.session._runner.close()
        for channel in self.session._channels.values():
            await channel.close()
        for cell in self.session.buckets:
            for slots in {id(s): s for s in (cell.slots, cell.source) if s is not None}.values():
                slots.close()


def gradient(rank: int, iteration: int, bucket: int) -> Any:
    rng = np.random.default_rng([rank, iteration, bucket])
    return rng.standard_normal(ELEMENTS, dtype=np.float32)


def whole(rank: int, iteration: int, bucket: int) -> Any:
    rng = np.random.default_rng([rank, iteration, bucket])
    return rng.integers(-9, 10, ELEMENTS).astype(np.float32)


def summed(bucket: int, contained: Sequence[int]) -> Any:
    """The parameters after these iterations of each rank, each applied once, in any order."""
    values = np.ones(ELEMENTS, np.float32)
    for rank, last in enumerate(contained):
        for iteration in range(1, last + 1):
            values -= whole(rank, iteration, bucket)
    return values


def expected(bucket: int, iterations: int) -> Any:
    rows = ([gradient(r, i, bucket) for r in range(WORKERS)] for i in range(1, iterations + 1))
    return replay(UPDATE, "float32", np.ones(ELEMENTS, np.float32), rows)


# The story ----------------------------------------------------------------------------------------


async def faults(cluster: Cluster, kills: int) -> None:
    """Kills at some moment and at named points, also of both at once; channels cut."""
    rng = cluster.rng
    for _ in range(kills):
        await asyncio.sleep(rng.choice((0.002, 0.02, 0.2)) * rng.random())
        victim = rng.choice(HOMES)
        life = cluster.lives[victim]
        match rng.choice(("kill", "point", "point", "cut")):
            case "kill":
                cluster.kill(victim)
            case "point":
                life.armed[rng.choice(POINTS)] = rng.randint(1, 4)
                await asyncio.sleep(rng.random() * 0.3)
                if rng.random() < 0.7:
                    cluster.kill(victim)
            case "cut" if life.alive:
                cluster.network.cut(victim)
                cluster.network.heal(victim)
    for id in HOMES:
        cluster.lives[id].armed.clear()
    for life in tuple(cluster.lives.values()):
        if not life.alive:
            await life.ended.wait()


async def travel(cluster: Cluster) -> None:
    """One bucket after the other to the other aggregator, for ever."""
    while True:
        await cluster.move(cluster.rng.randrange(BUCKETS))
        await asyncio.sleep(cluster.rng.choice((0.0, 0.02)) * cluster.rng.random())


def arrange(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, lossy: bool) -> None:
    """Replace the parts of the real world that the model stands for."""
    cluster.patch(monkeypatch)
    monkeypatch.setattr(region_access, "PIECE_BYTES", 4 * ELEMENTS // 3)
    arrive = MemoryChannel.arrive

    def sometimes(channel: MemoryChannel, frame: bytes) -> None:
        if cluster.rng.random() >= 0.02:
            arrive(channel, frame)

    if lossy:
        monkeypatch.setattr(MemoryChannel, "arrive", sometimes)


async def story(
    seed: int, *, shared: bool, kills: int, lossy: bool, plan: JobPlan = PLAN
) -> tuple[int, int]:
    cluster = Cluster(seed, shared=shared, plan=plan)
    monkeypatch = pytest.MonkeyPatch()
    arrange(monkeypatch, cluster, lossy)
    try:
        await cluster.begin()
        await cluster.host()
        ranks = [Rank(cluster, rank) for rank in range(WORKERS)]
        repeating = [asyncio.create_task(rank.repeat()) for rank in ranks if lossy]
        travelling = asyncio.create_task(travel(cluster))
        breaking = asyncio.create_task(faults(cluster, kills))
        last = 0
        while not breaking.done():
            last += 3
            await asyncio.gather(*(rank.train(last) for rank in ranks))
            if travelling.done():
                travelling.result()
        await breaking
        last += 5
        await asyncio.gather(*(rank.train(last) for rank in ranks))
        assert not travelling.done(), travelling
        travelling.cancel()
        for task in repeating:
            task.cancel()
        await check(cluster, ranks, last)
        for rank in ranks:
            await rank.close()
        return cluster.kills, cluster.moves
    finally:
        monkeypatch.undo()
        cluster.close()


async def check(cluster: Cluster, ranks: list[Rank], iterations: int) -> None:
    """Bits as in a replay; one owner each, idle, at the last version."""
    alone = cluster.plan.consistency != "synchronous"
    for bucket in range(BUCKETS) if not alone else ():
        wanted = expected(bucket, iterations)
        for rank in ranks:
            got = rank.session.buckets[bucket].parameters(0)
            assert (got.view(np.uint32) == wanted.view(np.uint32)).all(), (bucket, rank.rank)
    async with asyncio.timeout(STALLED_S):
        while True:
            held = [each for id in HOMES for each in (await cluster.held(id)).values()]
            if len(held) == BUCKETS and not any(each.moving for each in held):
                break
            await asyncio.sleep(0.05)
    assert sorted(each.bucket for each in held) == list(range(BUCKETS))
    assert {each.version for each in held} == {iterations * (WORKERS if alone else 1)}
    for life in cluster.lives.values() if alone else ():
        for (_, bucket), here in life.aggregator.regions.held.items():
            slots = here.slots
            assert slots.applied() == [iterations] * WORKERS
            assert (slots.parameters(slots.version) == summed(bucket, slots.applied())).all()


def run_story(
    seed: int, *, shared: bool, kills: int = 12, lossy: bool = False, plan: JobPlan = PLAN
) -> tuple[int, int]:
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(story(seed, shared=shared, kills=kills, lossy=lossy, plan=plan))


# The migration lane, scripted ---------------------------------------------------------------------


def scripted(
    act: Callable[["Cluster", list["Rank"]], Coroutine[Any, Any, None]], *, shared: bool
) -> None:
    """A trained job on a1 and a2; `act` does the rest, and everything is right at its end."""

    async def main() -> None:
        cluster = Cluster(1, shared=shared)
        monkeypatch = pytest.MonkeyPatch()
        arrange(monkeypatch, cluster, lossy=False)
        try:
            await cluster.begin()
            await cluster.host()
            ranks = [Rank(cluster, rank) for rank in range(WORKERS)]
            await train(ranks, 3)
            await act(cluster, ranks)
            last = max(cell.iteration for rank in ranks for cell in rank.session.buckets) + 3
            await train(ranks, last)
            await check(cluster, ranks, last)
            for rank in ranks:
                await rank.close()
        finally:
            monkeypatch.undo()
            cluster.close()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(main())


async def train(ranks: list[Rank], iterations: int) -> None:
    await asyncio.gather(*(rank.train(iterations) for rank in ranks))


@pytest.mark.parametrize("shared", [True, False], ids=["one-host", "two-hosts"])
@pytest.mark.parametrize("point", ["copy.before", "copy.mid", "copy.after"])
@pytest.mark.parametrize("dies", ["a1", "a2"])
def test_a_migration_whose_end_dies_resumes(dies: str, point: str, shared: bool) -> None:
    """Either end, at every step of the copy: the other buckets train on meanwhile, the order is
    carried out when the dead one is back, and the workers' pushes of before stand."""

    async def act(cluster: Cluster, ranks: list[Rank]) -> None:
        life = cluster.lives[dies]
        at_target = point == "copy.mid"
        if (dies == "a2") == at_target:
            life.armed[f"aggregator.{point}"] = 1
        else:  # The other end of that step.
            asyncio.get_running_loop().call_later(0.012, cluster.kill, dies)
        before = cluster.kills
        moving = asyncio.create_task(cluster.move(0))
        await train(ranks, 6)
        await moving
        assert cluster.kills == before + 1
        assert cluster.places[0].aggregator == "a2"

    scripted(act, shared=shared)


@pytest.mark.parametrize("shared", [True, False], ids=["one-host", "two-hosts"])
def test_a_migration_to_one_that_stays_away_is_called_off(shared: bool) -> None:
    """The target dies with the bytes in its hands and stays away: the controller says that the
    bucket stays, one epoch up. Nothing is applied twice when the dead one returns with its copy."""

    async def act(cluster: Cluster, ranks: list[Rank]) -> None:
        cluster.pauses_s = (8.0,)
        cluster.lives["a2"].armed["aggregator.copy.mid"] = 1
        old = cluster.places[0]
        message = cluster.order(0, "a2", old.location_epoch + 1)
        assert isinstance(await cluster.insist("a1", "migrate", message), Ok)
        training = asyncio.create_task(train(ranks, 8))
        await asyncio.sleep(2.0)
        held = await cluster.held("a1")
        assert held[0].moving, "frozen, and offered again and again"
        cluster.places[0] = BucketPlace(
            aggregator=AggregatorId("a1"), location_epoch=old.location_epoch + 2
        )
        await cluster.host_at("a1")
        held = await cluster.held("a1")
        assert (held[0].moving, held[0].location_epoch) == (False, old.location_epoch + 2)
        await training
        assert 0 not in await cluster.held("a2"), "it never owned what it had in its hands"

    scripted(act, shared=shared)


SEEDS = {
    True: (*range(10), 27, 51, 88, 89, 105, 146, 166, 181),
    False: (*range(10), 10, 32, 58, 79, 88, 115),
}
"""Beyond the first ten: those that have found something. A bucket whose workers were sent on could
not follow them, one that came back before its departure was over was let go by both, and the memory
of a copy was forgotten with its original's, which has the same identity."""


@pytest.mark.parametrize(
    ("seed", "shared"),
    [
        pytest.param(seed, shared, id=f"{seed}-{'one-host' if shared else 'two-hosts'}")
        for shared, seeds in SEEDS.items()
        for seed in seeds
    ],
)
def test_training_outlives_every_fault(seed: int, shared: bool) -> None:
    killed, moved = run_story(seed, shared=shared)
    assert killed >= 3
    assert moved >= 3


@pytest.mark.parametrize("seed", range(6))
def test_lost_frames_are_said_again(seed: int) -> None:
    """No transport of ours loses a frame while its channel lives: should one ever, or a bug, the
    wait has an end."""
    killed, moved = run_story(seed, shared=seed % 2 == 0, kills=5, lossy=True)
    assert killed >= 1
    assert moved >= 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_updates_of_their_own_are_applied_once_whatever_happens(seed: int, mode: str) -> None:
    """Every push is in the parameters once, also of buckets that left with pushes pending and of
    aggregators killed at every point of an update; nobody reads what is older than the bound."""
    killed, moved = run_story(seed, shared=seed % 2 == 0, plan=MODES[mode])
    assert killed >= 3
    assert moved >= 3
