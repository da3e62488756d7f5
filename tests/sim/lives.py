"""Aggregators that live and die under virtual time: what a kill is in every simulation here.

A kill is that of a process: no line of it runs any more, its channels break, its memory stays where
the descriptor store or a worker maps it, until the supervisor starts it again.
"""

import asyncio
import os
import random
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

import pytest

from slackwater.common.base import failpoints
from slackwater.common.base.errors import Retryable
from slackwater.common.embedded.notify import FdStore
from slackwater.common.shell import run_service
from slackwater.common.shell.notify import SdNotify
from slackwater.common.shell.process import Process
from slackwater.common.shell.world import SimWorld
from slackwater.common.transport.memory import MemoryFabric, MemoryNetwork
from slackwater.common.transport.memory_channel import MemoryChannel
from slackwater.loadgen.simulator.control.grants import hold_to
from slackwater.services.aggregator import migration, regions, shell
from slackwater.services.aggregator.config import AggregatorConfig
from slackwater.services.aggregator.shell import Aggregator

POINTS = tuple(name for name in failpoints.OWN_POINTS if name.startswith("aggregator."))


class Store(SdNotify):
    """One life's messages to its supervisor, whose descriptor store outlives it."""

    def __init__(self, kept: FdStore) -> None:
        super().__init__()
        self.kept = kept
        self.alive = True

    async def store(self, fd: int, name: str) -> None:
        if self.alive:
            self.kept.add(name, os.dup(fd))

    async def remove(self, name: str) -> None:
        if self.alive:
            self.kept.remove(name)

    async def barrier(self) -> None:
        await asyncio.sleep(1e-4)


@dataclass(eq=False)
class Life:
    """From a start to a kill."""

    id: str
    world: Any
    aggregator: Aggregator
    notify: Store
    born: int
    """The how-manieth of all lives it is."""
    armed: dict[str, int] = field(default_factory=dict)
    """Failpoint -> how often it is passed yet, the last time included."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[int] | None = None

    @property
    def alive(self) -> bool:
        return self.notify.alive


LIFE: ContextVar[Life] = ContextVar("life")


class Network(MemoryNetwork):
    """Frames of one channel keep their order; those of two overtake one another."""

    def __init__(self, seed: int, *, shared: bool) -> None:
        self._ways = random.Random(seed)
        super().__init__(seed=seed, shared=shared)

    @property
    def latency_s(self) -> float:
        return self._ways.choice((1e-5, 1e-4, 1e-3, 5e-3))

    @latency_s.setter
    def latency_s(self, value: float) -> None:
        assert value == 0.0


class Lives:
    """The aggregators `ids` of one simulated system."""

    def __init__(
        self,
        sim: SimWorld,
        network: Network,
        rng: random.Random,
        ids: Sequence[str],
        cpu_share: float = 1.0,
    ) -> None:
        self.sim, self.network, self.rng, self.ids = sim, network, rng, ids
        self.cpu_share = cpu_share
        self.lives: dict[str, Life] = {}
        self.kills = self._births = 0
        self.pauses_s: tuple[float, ...] = (0.001, 0.05, 0.3)
        """How long an aggregator may be dead."""
        self.failures: list[BaseException] = []
        """Errors that ended a life that nobody killed."""
        self._kept = {id: FdStore() for id in ids}
        self._tasks: dict[asyncio.Task[Any], Context] = {}

    async def begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._numbered: Any = loop.get_task_factory()
        loop.set_task_factory(self._make_task)
        for id in self.ids:
            await self.start(id)

    def _make_task(self, loop: Any, work: Coroutine[Any, Any, Any], context: Any = None) -> Any:
        """So that a kill finds all tasks of a life, whoever began them."""
        context = copy_context() if context is None else context  # An empty one is falsy.
        task: asyncio.Task[Any] = self._numbered(loop, work, context=context)
        self._tasks[task] = context
        task.add_done_callback(self._tasks.pop)
        return task

    async def start(self, id: str) -> None:
        kept = self._kept[id]
        notify = Store(kept)
        process = Process(notify=notify, stored=tuple((name, os.dup(fd)) for name, fd in kept.held))
        world = self.sim.client(f"aggregator-{id}")
        hold_to(world, "aggregator", id)
        aggregator = Aggregator(
            AggregatorConfig(id=id, cluster_token="c", cpu_share=self.cpu_share),
            world,
            {"memory": MemoryFabric(self.network, mapped=self.network.shared)},
            {"memory": id},
            virtual=True,
        )
        self._births += 1
        life = Life(id, world, aggregator, notify, self._births)
        self._enter_at_the_door(life)
        self.lives[id] = life
        token = LIFE.set(life)
        service = run_service(aggregator.definition(), world, asyncio.Event(), process)
        life.task = asyncio.create_task(service)
        life.task.add_done_callback(lambda task: self._service_ended(life, task))
        LIFE.reset(token)

    def _service_ended(self, life: Life, task: asyncio.Task[int]) -> None:
        """A supervisor starts what gave up; whatever else ends by itself is a fault of ours."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Retryable):
            self.kill(life.id)
        elif error is not None:
            self.failures.append(error)

    def _enter_at_the_door(self, life: Life) -> None:
        """Let this process do what a peer's channel or a command causes here, not the process that
        sent it."""
        plane: Any = life.aggregator.plane
        adoptions: Any = life.aggregator._adoptions
        orders: Any = life.aggregator.orders

        def own(work: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
            async def run(*arguments: Any, **options: Any) -> Any:
                LIFE.set(life)
                return await work(*arguments, **options)

            return run

        def own_tasks(begin: Callable[..., None]) -> Callable[..., None]:
            def run(*arguments: Any) -> None:
                context = copy_context()
                context.run(LIFE.set, life)
                context.run(begin, *arguments)

            return run

        plane.serve, adoptions.adopt = own(plane.serve), own(adoptions.adopt)
        orders.make = own(orders.make)
        orders._background = own_tasks(orders._background)
        orders.handovers.start = own_tasks(orders.handovers.start)
        orders.handovers.prepare = own_tasks(orders.handovers.prepare)

    def passed(self, name: str) -> None:
        """A failpoint. Whose life ends here does nothing more: not even this task."""
        life = LIFE.get(None)
        if life is None or not life.alive or name not in life.armed:
            return
        life.armed[name] -= 1
        if life.armed[name] == 0:
            self.kill(life.id)
            raise asyncio.CancelledError

    def kill(self, id: str, *, forget: bool = False) -> None:
        """`forget`: its memory goes with it, as with the machine."""
        life = self.lives[id]
        if not life.alive:
            return
        self.kills += 1
        life.notify.alive = False
        for task, context in tuple(self._tasks.items()):
            if context.get(LIFE) is life:
                task.cancel()
        self.network.cut(id)
        for _, channel in life.aggregator.orders.handovers._channels.values():
            assert isinstance(channel, MemoryChannel)
            channel.lose("we died")
            channel.peer.lose("the peer died")
        pause_s = self.rng.choice(self.pauses_s)
        back = self._return(life, pause_s, forget)
        asyncio.get_running_loop().create_task(back, context=Context())

    async def _return(self, life: Life, pause_s: float, forget: bool) -> None:
        mine = [task for task, context in self._tasks.items() if context.get(LIFE) is life]
        await asyncio.gather(*mine, return_exceptions=True)
        await self.sim.broker.crash(life.world.name)
        for _, listener in life.aggregator._listeners:
            await listener.close()
        life.aggregator.regions.close()
        if forget:
            self._kept[life.id].clear()
        await asyncio.sleep(pause_s)
        self.network.heal(life.id)
        await self.start(life.id)
        life.ended.set()

    def kept(self, id: str) -> int:
        """How many regions its supervisor keeps; the ledger of counters outlives them all."""
        return sum(name != regions.NAME for name, _ in self._kept[id].held)

    def close(self) -> None:
        for kept in self._kept.values():
            kept.clear()

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the parts of the real world that the model stands for."""
        monkeypatch.setattr(failpoints, "_armed", dict.fromkeys(POINTS))
        monkeypatch.setattr(failpoints, "_hit", self.passed)
        if self.network.shared:  # The model's network has one kind.
            monkeypatch.setattr(migration, "SHARED", "memory")
            monkeypatch.setattr(shell, "SHARED", "memory")

        async def inline(work: Callable[..., Any], *arguments: Any) -> Any:
            return work(*arguments)

        monkeypatch.setattr(asyncio, "to_thread", inline)
