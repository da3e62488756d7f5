"""Lenders and the disk of a simulation of remote memory: the real ones, in a modelled machine."""

import asyncio
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slackwater.common.embedded.notify import FdStore
from slackwater.common.shell import run_service
from slackwater.common.shell.notify import SdNotify
from slackwater.common.shell.process import Process
from slackwater.common.shell.world import SimWorld
from slackwater.common.transport.memory import MemoryFabric, MemoryNetwork
from slackwater.loadgen.memory.checker import PAGE_BYTES
from slackwater.loadgen.simulator.control.grants import hold_to
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import writeback
from slackwater.memory.pages.backup import Backup
from slackwater.memory.store import Pages
from slackwater.services.slabd.config import SlabdConfig
from slackwater.services.slabd.events import MemorySampled
from slackwater.services.slabd.shell import Slabd
from slackwater.services.slabd.slab import check_invariants

SPAN_PAGES = 16
SLAB_BYTES = SPAN_PAGES * PAGE_BYTES
MEMORY_BYTES = 8 * (SLAB_BYTES + PAGE_BYTES)


def checked(core: Any, check: Callable[[], object]) -> None:
    """Run `check` after each step of this core."""
    step = core.step

    def stepped(event: Any, now_s: float) -> Any:
        effects = step(event, now_s)
        check()
        return effects

    core.step = stepped


class Surroundings(Protocol):
    sim: SimWorld
    network: MemoryNetwork
    fabric: MemoryFabric
    mapped: bool


class Notify(SdNotify):
    """A supervisor's descriptor store, which outlives the process that fills it."""

    def __init__(self, kept: FdStore) -> None:
        super().__init__()
        self._kept = kept
        self.alive = True

    async def store(self, fd: int, name: str) -> None:
        if self.alive:
            self._kept.add(name, os.dup(fd))

    async def remove(self, name: str) -> None:
        if self.alive:
            self._kept.remove(name)

    async def barrier(self) -> None:
        await asyncio.sleep(1e-4)


class Machine:
    """The machine that a lender's monitor sees; a test fills and empties it."""

    def __init__(self) -> None:
        self.others_bytes = 0

    def sample(self, own_bytes: int) -> MemorySampled:
        return MemorySampled(MEMORY_BYTES, self.others_bytes)


class SlowDisk(Backup):
    """The real file and the real kernel, moved by the simulation's clock instead of threads."""

    turn_s = 0.003
    """Seconds between two looks at what is to be written."""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pump = self._loop.create_task(self._turn())

    async def _turn(self) -> None:
        words = self._table.words
        while True:
            await asyncio.sleep(self.turn_s)
            while words[k.TAKEN] < words[k.HEAD]:
                writeback.watch(self._table, 1)
                if writeback.write_back(self._table, self._fd) == writeback.DISCARDS:
                    self._discard()
                self._settle()

    async def sync(self) -> None:
        await asyncio.sleep(0.002)

    async def read(self, pages: Pages, target: memoryview) -> None:
        await asyncio.sleep(0.001)
        self._read(pages, target)

    async def allocated(self, first: int, count: int) -> NDArray[np.bool_]:
        await asyncio.sleep(0.001)
        return self._allocated(first, count)

    async def close(self) -> None:
        """End as by a kill: what is in the ring is lost, what is in the file stays."""
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        self._readers.shutdown()
        os.close(self._fd)


class Lender:
    """One slabd and its lives."""

    def __init__(self, system: Surroundings, id: str) -> None:
        self.system, self.id = system, id
        self.machine = Machine()
        self.kept = FdStore()
        self.address = f"at-{id}"
        self.life = 0
        self._stop = asyncio.Event()
        self._task: asyncio.Task[int] | None = None
        self.slabd: Slabd | None = None

    async def start(self) -> None:
        self.life += 1
        self._stop = asyncio.Event()
        self._notify = Notify(self.kept)
        stored = tuple((name, os.dup(fd)) for name, fd in self.kept.held)
        config = SlabdConfig(
            id=self.id, node=self.id, slab_bytes=SLAB_BYTES, hold_s_max=3.0, cluster_token="c"
        )
        self.slabd = Slabd(
            config,
            self.system.sim.client(f"slabd-{self.id}-{self.life}"),
            {"memory": self.system.fabric},
            {"memory": self.address},
            self.machine,
            mapping=frozenset(("memory",)) if self.system.mapped else frozenset(),
            virtual=True,
        )
        core = self.slabd.core
        checked(core, lambda: check_invariants(core.slabs, core.sessions))
        process = Process(notify=self._notify, stored=stored)
        world = self.system.sim.client(f"slabd-{self.id}-{self.life}")
        hold_to(world, "slabd", self.id)
        self._task = asyncio.ensure_future(
            run_service(self.slabd.definition(), world, self._stop, process)
        )

    async def kill(self) -> None:
        """Its channels break, its memory stays in the descriptor store."""
        self._notify.alive = False
        self.system.network.cut(self.address)
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.system.network.heal(self.address)

    async def end(self) -> None:
        self._stop.set()
        assert self._task is not None
        await self._task
        self.kept.clear()
