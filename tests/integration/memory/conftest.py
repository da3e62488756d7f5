"""Lenders and a device in this process: real memory, real channels, real sockets; no bus server."""

import asyncio
import importlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slackwater.common.base.clock import LiveClock
from slackwater.common.bus.memory import MemoryBroker
from slackwater.common.shell import run_service
from slackwater.common.shell.world import World
from slackwater.common.store.history_memory import MemoryHistory
from slackwater.common.store.memory import MemoryStorage
from slackwater.common.store.objects import MemoryObjects
from slackwater.common.transport import tcp
from slackwater.memory.control import lenders
from slackwater.memory.service.assembly import DeviceAssembly
from slackwater.memory.service.control_service import FactSaid
from slackwater.memory.service.export import start_serving
from slackwater.memory.service.options import DeviceOptions
from slackwater.memory.service.warm import warm
from slackwater.services.slabd.config import SlabdConfig
from slackwater.services.slabd.events import MemorySampled
from slackwater.services.slabd.shell import Slabd

SLAB_BYTES = 1024 * 1024
TOKEN = "secret"


class Machine:
    """Has room for `slabs`, until a test says otherwise."""

    def __init__(self, slabs: int) -> None:
        self.total_bytes = int((slabs + 0.25) * (SLAB_BYTES + 4096) * 8 / 7)
        self.others_bytes = 0

    def sample(self, own_bytes: int) -> MemorySampled:
        return MemorySampled(self.total_bytes, self.others_bytes)


class Cluster:
    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.clock = LiveClock()
        self.broker = MemoryBroker(1, clock=self.clock)
        self.storage = MemoryStorage(clock=self.clock)
        self.lenders: list[Slabd] = []
        self.machines: list[Machine] = []
        self.assembly: DeviceAssembly | None = None
        self.facts: list[str] = []
        self._stops: list[asyncio.Event] = []
        self._lives: list[asyncio.Task[Any]] = []
        self._tasks: list[asyncio.Task[Any]] = []

    def world(self, name: str) -> World:
        import random

        return World(
            name, self.clock, self.broker.connect(name), self.storage.connect(name),
            MemoryHistory(self.broker), random.Random(name), MemoryObjects(self.clock),
        )  # fmt: skip

    async def lend(self, count: int, slabs: int = 4, **config: Any) -> None:
        for _ in range(count):
            number = len(self.lenders) + 1
            addresses = {"shm": str(self.folder / f"s{number}")}
            if self.kind == "tcp":
                addresses = {"tcp": "127.0.0.1:0"}
            made = SlabdConfig(
                id=f"s{number}", node=f"m{number}", slab_bytes=SLAB_BYTES, cluster_token=TOKEN,
                sample_s=0.02, **config,
            )  # fmt: skip
            machine = Machine(slabs)
            slabd = Slabd(made, self.world(f"slabd-s{number}"), None, addresses, machine)
            stop = asyncio.Event()
            work = run_service(slabd.definition(), self.world(f"slabd-s{number}"), stop)
            self.lenders.append(slabd)
            self.machines.append(machine)
            self._stops.append(stop)
            self._lives.append(asyncio.ensure_future(work))
        await self.until(lambda: all(len(one.core.having("free")) >= slabs for one in self.lenders))

    async def export(self, size: int, **options: Any) -> DeviceAssembly:
        """A device; spans get hot at the first touch, its clock ticks fast."""
        made = DeviceOptions(
            id="d1", size_bytes=size, socket=self.folder / "nbd", backup=self.folder / "backup",
            node="here", slab_bytes=SLAB_BYTES, token=TOKEN, transport=self.kind,
            **{"hot": 0.1, **options},
        )  # fmt: skip
        self.assembly = assembly = DeviceAssembly(made, SLAB_BYTES, self.clock)
        await start_serving(assembly)
        assembly._post = self._note
        self._tasks.append(asyncio.ensure_future(self._beat(assembly)))
        return assembly

    def _note(self, event: Any) -> None:
        if isinstance(event, FactSaid):
            self.facts.append(event.effect.subject.rsplit(".", 1)[1])

    async def _beat(self, assembly: DeviceAssembly) -> None:
        while True:
            for slabd in self.lenders:
                assembly.lenders.seen(slabd.heartbeat(self.clock.now_s()))
            await asyncio.sleep(0.02)

    async def until(self, true: Callable[[], bool], seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while not true():  # noqa: ASYNC110  # A look from outside has no event to wait for.
                await asyncio.sleep(0.005)

    async def mapped(self, spans: int, seconds: float = 20.0) -> None:
        """All of the device's spans are in remote memory (touch them first), and what the file had
        of them is as well: a page that is written while it is on its way stays on the disk."""
        assembly = self.assembly
        assert assembly is not None
        await self.until(
            lambda: assembly.device.mapped_spans == spans and not assembly.lenders._refills.running,
            seconds,
        )

    async def close(self) -> None:
        if self.assembly is not None:
            await self.assembly.close()
        for stop in self._stops:
            stop.set()
        if self._lives:
            await asyncio.wait(self._lives, timeout=10)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._lives, return_exceptions=True)
        assert self.assembly is None or self.assembly.background.failure is None


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Now: while it is compiled, deadlines of a test pass."""
    warm()
    for name in tcp._COMPILED:
        importlib.import_module(name)


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activity is measured twenty times a second, so that spans are placed soon."""
    monkeypatch.setattr(lenders, "TICK_S", 0.05)


@pytest.fixture
def cluster(tmp_path: Path) -> Callable[..., Any]:
    """`async with cluster("shm") as c`."""

    @asynccontextmanager
    async def make(kind: str = "shm") -> AsyncIterator[Cluster]:
        made = Cluster(tmp_path, kind)
        try:
            yield made
        finally:
            await made.close()

    return make


@pytest.fixture
def raw() -> Callable[[Path], socket.socket]:
    """A plain socket to the NBD server, for clients that do not behave."""

    def connect(path: Path) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(10.0)
        sock.connect(str(path))
        return sock

    return connect
