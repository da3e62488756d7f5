"""Services in virtual time, started and killed by name, and what all of a pool's simulations look
at in peace."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar, copy_context
from typing import Any, Final

from slackwater.common.base.errors import Deposed, Retryable, RolledBack
from slackwater.common.shell import ServiceDefinition, run_service
from slackwater.common.shell.world import SimWorld, World
from slackwater.loadgen.simulator.control.grants import hold_to
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.services.controller.core import Controller
from slackwater.services.controller.invariants import check_invariants
from slackwater.services.master.core import Master

Held = Mapping[tuple[JobId, int], list[tuple[AggregatorId, int]]]
"""(job, bucket) -> (aggregator, location epoch) of each that has it."""


PARTY: Final[ContextVar[str]] = ContextVar("party", default="")
"""The service or client that is at work."""


class Services:
    """Masters and controllers are found by their cores: `master`, `controllers`."""

    def __init__(self, sim: SimWorld) -> None:
        self.sim = sim
        self.definitions: dict[str, Callable[[World], ServiceDefinition]] = {}
        self.running: dict[str, tuple[World, asyncio.Task[Any], asyncio.Event]] = {}
        self.controllers: dict[str, Controller] = {}
        self._masters: dict[str, Master] = {}
        self.failures: list[BaseException] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}

    @property
    def master(self) -> Master | None:
        """The master that led last; one that stands by knows no epoch."""
        return max(self._masters.values(), key=lambda core: core.state.epoch, default=None)

    def now_s(self) -> float:
        return self.sim.clock.now_s()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(error)

    def raise_failures(self) -> None:
        for error in self.failures:
            raise error

    def start(self, name: str) -> None:
        stop, context = asyncio.Event(), copy_context()
        context.run(PARTY.set, name)
        world = context.run(self.sim.client, name)
        life = self._live(name, world, stop)
        task = asyncio.get_running_loop().create_task(life, context=context)
        self.running[name] = (world, task, stop)

    async def _live(self, name: str, world: World, stop: asyncio.Event) -> None:
        while True:
            made = self.definitions[name](world)
            hold_to(world, made.service, made.id)
            if isinstance(made.core, Controller):
                self.controllers[name] = made.core
            if isinstance(made.core, Master):
                self._masters[name] = made.core
            try:
                await run_service(made, world, stop)
                return
            except (Retryable, Deposed, RolledBack):
                await asyncio.sleep(0.2)  # The supervisor waits, too.
                world = self.sim.client(name)
            except Exception as error:  # Noted: a core's broken invariant is the test's failure.
                self.failures.append(error)
                raise

    async def kill(self, name: str) -> None:
        """kill -9: nothing more of it arrives anywhere; what it had stored stays."""
        world, task, _ = self.running.pop(name)
        await self.sim.broker.crash(world.name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def end_services(self) -> None:
        for _, _, stop in self.running.values():
            stop.set()
        tasks = [task for _, task, _ in self.running.values()]
        await asyncio.gather(*tasks, return_exceptions=True)  # Failures are noted already.

    async def end_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check_indexes(self) -> None:
        """Every core's indexes and sums are what its records say, at any moment."""
        for name in sorted(self._masters):
            self._masters[name].state.check_invariants()
        for name in sorted(self.controllers):
            check_invariants(self.controllers[name].state)

    async def watch_indexes(self) -> None:
        """Check them every second for as long as the simulation lasts; a failure is noted."""
        while True:
            await asyncio.sleep(1.0)
            self.check_indexes()

    def allocated(self) -> set[AggregatorId]:
        assert self.master is not None
        listing = self.master.state.pool.listing()
        return {
            AggregatorId(info.record.id)
            for info in listing.aggregators
            if info.record.cluster is not None
        }

    def check_settled(self, held: Held) -> None:
        """In peace: each bucket of each living job is on the aggregator of its record and nowhere
        else; nothing else is held; nothing is allocated that serves no job."""
        expected: dict[tuple[JobId, int], list[tuple[AggregatorId, int]]] = {}
        homes: set[AggregatorId] = set()
        for _, controller in sorted(self.controllers.items()):
            for job in controller.state.living():
                assert not job.moving, job.record
                homes |= job.homes()
                for bucket, place in enumerate(job.record.places):
                    expected[job.id, bucket] = [(place.aggregator, place.location_epoch)]
        assert held == expected
        assert self.allocated() == homes
