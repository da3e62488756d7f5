"""Every service's real core under messages that only their types bound: no exception escapes, every
request is answered, every record can be read back by the next life."""

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from tests.fuzz.driven import Driven
from tests.fuzz.messages import message

from slackwater.common.base.effects import Action
from slackwater.common.shell import ServiceDefinition
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.memory import (
    DeviceHello,
    EvictNow,
    LenderRecord,
    ListSlabs,
    SetLending,
    ToLender,
)
from slackwater.schemas.workers import PrepareWorkers, StartWorkers, StopWorkers
from slackwater.services.controller import invariants as placements
from slackwater.services.controller import shell as controller
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.master import shell as master
from slackwater.services.master.config import MasterConfig, Tenant
from slackwater.services.master.state import State
from slackwater.services.profiler import shell as profiler
from slackwater.services.profiler.config import ProfilerConfig
from slackwater.services.slabd import drain_record
from slackwater.services.slabd.config import SlabdConfig
from slackwater.services.slabd.core import LenderCore
from slackwater.services.slabd.effects import MakeSlab, ReleaseSlab, RenewSlab
from slackwater.services.slabd.events import (
    Heard,
    MemorySampled,
    SessionClosed,
    SessionOpened,
    SlabGone,
    SlabMade,
)
from slackwater.services.slabd.slab import check_invariants
from slackwater.services.worker.core import WorkerCore
from slackwater.services.worker.effects import FindProcesses, LookAtProgram, RunRank
from slackwater.services.worker.events import ProcessesFound, ProcessExited, ProgramLooked

SHORT, LONG = 1_200, 20_000
"""Events from outside, in `make test` and in `make thorough`."""
seeds = pytest.mark.parametrize(
    ("seed", "count"),
    [(1, SHORT), (2, SHORT), pytest.param(3, LONG, marks=pytest.mark.nightly)],
)


def watched(driven: Driven, check: Callable[[Any], None]) -> Callable[[], None]:
    """Tell it something, and look whether its indexes still say what its records do."""

    def tell() -> None:
        driven.tell()
        check(driven.core.state)  # type: ignore[attr-defined]

    return tell


def drive(driven: Driven, count: int, extra: Any = None) -> None:
    rng = driven.rng
    for number in range(count):
        what = rng.random()
        if what < 0.45 and driven.endpoints:
            driven.ask(rng.choice(driven.endpoints))
        elif what < 0.7:
            driven.tell() if extra is None else extra()
        elif what < 0.9:
            driven.answer()
        else:
            driven.pass_time(rng.choice((0.1, 1.0, 5.0)))
        if number % 500 == 499:
            driven.settle()
            driven.restart()
    driven.settle()
    assert driven.steps > count // 2


@seeds
def test_no_message_breaks_the_master(seed: int, count: int) -> None:
    async def main() -> None:
        world = SimWorld(seed).client("master")
        config = MasterConfig(
            admission="standalone" if seed % 2 else "open",
            tenants={"j1": Tenant(cpu_fraction=0.1, loss_limit=0.999, queued_max=2)},
            jobs_kept_max=5,
        )
        driven = Driven(Random(seed), lambda: master.definition(config, world))
        drive(driven, count, watched(driven, State.check_invariants))
        assert driven.stored > 10

    run_simulated(main())


@pytest.mark.parametrize("policy", ["cyclic", "edf", "static", "packed"])
@seeds
def test_no_message_breaks_a_controller(seed: int, count: int, policy: Any) -> None:
    async def main() -> None:
        world = SimWorld(seed).client("controller")
        config = ControllerConfig(id="c0", policy=policy)
        driven = Driven(Random(seed), lambda: controller.definition(config, world))
        drive(driven, count, watched(driven, placements.check_invariants))
        assert driven.stored > 10

    run_simulated(main())


@seeds
def test_no_message_breaks_the_profiler(seed: int, count: int) -> None:
    async def main() -> None:
        world = SimWorld(seed).client("profiler")
        config = ProfilerConfig(profile_iterations=2, window_iterations=2)
        drive(Driven(Random(seed), lambda: profiler.definition(config, world)), count)

    run_simulated(main())


class Node:
    """Processes that start at once and end whenever they like, one at a time for each rank."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.running: set[tuple[str, int]] = set()

    def define(self) -> ServiceDefinition:
        core = WorkerCore(NodeId("w1"), slots=64, stop_grace_s=3.0, keep_jobs=False)
        endpoints = {"prepare": PrepareWorkers, "start": StartWorkers, "stop": StopWorkers}
        return ServiceDefinition(service="worker", id="w1", core=core, endpoints=endpoints)

    def act(self, effect: Action) -> list[Any]:
        match effect:
            case FindProcesses():
                self.running.clear()
                return [ProcessesFound(())]
            case LookAtProgram():
                why = self.rng.choice(("", "", "there is no script train.py"))
                return [ProgramLooked(effect.token, effect.job, effect.attempt, why, "h", 4000)]
            case RunRank(job=job, rank=rank):
                assert (job, rank) not in self.running, "two processes of one rank"
                self.running.add((job, rank))
        return []

    def some_end(self) -> list[Any]:
        if not self.running:
            return []
        rank = self.rng.choice(sorted(self.running))
        self.running.discard(rank)
        code = self.rng.choice((0, 1, 127, -9, 255))
        return [ProcessExited(JobId(rank[0]), rank[1], code, self.rng.choice(("", "x" * 4096)))]


@seeds
def test_no_message_breaks_a_worker(seed: int, count: int) -> None:
    rng = Random(seed)
    node = Node(rng)
    driven = Driven(rng, node.define, node.act)

    def extra() -> None:
        for event in node.some_end():
            driven.step(event)

    drive(driven, count, extra)


class Memory:
    """A lender's machine, and devices that say anything."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.config = SlabdConfig(id="s1", slab_bytes=1 << 20, memory_bytes=64 << 20)

    def define(self) -> ServiceDefinition:
        return ServiceDefinition(
            service="slabd",
            id="s1",
            core=LenderCore(self.config, self.rng),
            buckets={drain_record.bucket("s1"): LenderRecord},
            endpoints={"slabs": ListSlabs, "evict": EvictNow, "lending": SetLending},
        )

    def act(self, effect: Action) -> list[Any]:
        match effect:
            case MakeSlab(slab=slab) | RenewSlab(slab=slab):
                return [SlabMade(slab, self.rng.choice(("", "", "no memory")))]
            case ReleaseSlab(slab=slab):
                return [SlabGone(slab)]
        return []

    def event(self, slabs: list[Any]) -> Any:
        session = self.rng.choice((1, 2, 3))
        what = self.rng.random()
        if what < 0.1:
            return SessionOpened(session, message(DeviceHello, self.rng))
        if what < 0.15:
            return SessionClosed(session)
        if what < 0.4:
            others = self.rng.choice((0, 30 << 20, 60 << 20, 64 << 20))
            return MemorySampled(64 << 20, others, self.rng.choice((0.0, 1.0)))
        return Heard(session, _about(message(ToLender, self.rng), slabs, self.rng))


def _about(said: Any, slabs: list[Any], rng: Random) -> Any:
    """About a slab that there is."""
    if hasattr(said, "slab") and slabs:
        return msgspec.structs.replace(said, slab=rng.choice(slabs), generation=rng.choice((1, 2)))
    return said


@seeds
def test_no_message_breaks_a_lender(seed: int, count: int) -> None:
    rng = Random(seed)
    memory = Memory(rng)
    driven = Driven(rng, memory.define, memory.act)

    def step() -> None:
        driven.step(memory.event(list(driven.core.slabs)))
        check_invariants(driven.core.slabs, driven.core.sessions)

    drive(driven, count, step)
