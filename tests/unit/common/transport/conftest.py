"""Pairs of connected channels on every transport, and a check that nothing is left open after."""

import asyncio
import gc
import importlib
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import uvloop
from tests.certificates import make_certificates, needs_openssl

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.bus.access import Tls
from slackwater.common.transport import tcp
from slackwater.common.transport.base import (
    Address,
    Channel,
    Fabric,
    Listener,
    OnHandover,
    OnPrepare,
)
from slackwater.common.transport.devices import device_named
from slackwater.common.transport.gpu import Device, DeviceRegion
from slackwater.common.transport.memory import MemoryFabric, MemoryNetwork
from slackwater.common.transport.region import Region
from slackwater.common.transport.shm import ShmFabric
from slackwater.common.transport.tcp import TcpFabric
from slackwater.common.transport.tls import TlsEnds
from slackwater.common.transport.verbs.fabric import VerbsFabric, VerbsTuning
from slackwater.common.transport.verbs.library import why_not

for _name in tcp._COMPILED:  # Now: while it is loaded, short deadlines of the first tests pass.
    importlib.import_module(_name)

CASES = [
    "memory", "memory-mapped", "shm", "tcp", pytest.param("tls", marks=needs_openssl), "verbs",
    "verbs-domains",
]  # fmt: skip
VERBS_LACKS = why_not()
DEVICE_CASES = ["memory+part", "shm+fake", "shm+part-staged", "tcp+part"]
"""Regions wholly or partly on a device, played by host memory: opened by its handle where both ends
have it (shm), else staged."""
GPU_CASES = ["shm+cuda", "shm+cuda-staged", "tcp+cuda"]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run what every transport must do on both event loops."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.path.name == "test_conformance.py":
        loops["uvloop"] = uvloop.new_event_loop
    return loops


def make_fabric(case: str) -> Fabric:
    if case.startswith("memory"):
        return MemoryFabric(MemoryNetwork(), mapped=case.endswith("mapped"))
    if case.startswith("shm"):
        kind = device_of(case)
        return ShmFabric(device=kind if kind is None or "staged" not in case else None)
    if case.startswith("verbs"):
        return VerbsFabric(VerbsTuning(windows=case == "verbs"))
    return TcpFabric(tls=tls_ends() if case == "tls" else None)


@cache
def tls_ends() -> TlsEnds:
    """Return contexts of this host; the files are read once."""
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        made = make_certificates(Path(folder))
        return Tls(ca=made.ca, certificate=made.certificate, key=made.key).ends()


@dataclass
class Party:
    """A listener that keeps its channels and what was handed over to it."""

    fabric: Fabric
    start_address: Address
    accept: Callable[[bytes], None] = lambda _hello: None
    channels: "asyncio.Queue[Channel]" = field(default_factory=asyncio.Queue)
    received: list[tuple[Region, bytes]] = field(default_factory=list)
    on_handover: OnHandover | None = None
    on_prepare: OnPrepare | None = None
    listener: Listener | None = None

    async def start(self) -> "Party":
        self.listener = await self.fabric.listen(
            self.start_address,
            self.accept,
            self._keep,
            self.on_handover or self._take,
            self.on_prepare,
        )
        return self

    async def _keep(self, channel: Channel) -> None:
        self.channels.put_nowait(channel)

    async def _take(self, region: Region, note: bytes) -> None:
        self.received.append((region, note))

    async def connect(self, hello: bytes = b"hi") -> tuple[Channel, Channel]:
        """(the connecting end, the accepted end)"""
        assert self.listener is not None
        near = await self.fabric.connect(self.listener.address, hello, deadline_s=5)
        return near, await asyncio.wait_for(self.channels.get(), 5)

    async def close(self) -> None:
        if self.listener is not None:
            await self.listener.close()
        for region, _ in self.received:
            region.close()


def device_of(case: str) -> Device | None:
    if "+" not in case:
        return None
    return device_named("cuda" if "cuda" in case else "fake")


@pytest.fixture
def make_region(case: str) -> Callable[..., Region]:
    """A region with these bytes, in the memory of the present case."""

    def make(data: bytes, label: str = "r") -> Region:
        device = device_of(case)
        if device is None:
            region = Region.create(len(data), label)
            region.buffer[:] = data
            return region
        edge = len(data) // 4 if "part" in case else 0
        first, last = edge, max(edge + 1, len(data) - edge)
        on_device = DeviceRegion.on(device, len(data), label, (first, last))
        on_device.buffer[:first], on_device.buffer[last:] = data[:first], data[last:]
        on_device.memory.upload(0, memoryview(data)[first:last])
        return on_device

    return make


@pytest.fixture(
    params=[*CASES, *DEVICE_CASES, *(pytest.param(c, marks=pytest.mark.gpu) for c in GPU_CASES)]
)
def case(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if "cuda" in name and (why := no_cuda()):
        pytest.skip(f"no GPU here: {why}")
    if name.startswith("verbs") and VERBS_LACKS:
        pytest.skip(f"no verbs here: {VERBS_LACKS}")
    return name


@pytest.fixture
def party(case: str, tmp_path: Path) -> Callable[..., object]:
    """An async context manager that gives a started Party of the present transport."""

    @asynccontextmanager
    async def make(**options: object) -> AsyncIterator[Party]:
        fabric = make_fabric(case)
        address = {
            "shm": str(tmp_path / "s"),
            "tcp": "127.0.0.1:0",
            "tls": "127.0.0.1:0",
            "verbs": "127.0.0.1:0",
        }.get(fabric.kind, "")
        made = Party(fabric, address, **options)  # type: ignore[arg-type]
        await made.start()
        try:
            yield made
        finally:
            await made.close()

    return make


def no_cuda() -> str:
    """Why there is no CUDA device here; empty: there is one."""
    try:
        device_named("cuda")
    except ConfigRejected as error:
        return str(error)
    return ""


def open_files() -> dict[str, str]:
    links = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            links[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return {name: link for name, link in links.items() if "memfd" in link or "socket" in link}


def memfd_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:")


@cache
def have_driver_open_its_socket() -> None:
    """Let CUDA's driver, where there is one, open what it keeps for the life of a process."""
    if not no_cuda():
        device_named("cuda").allocate(4096).export()


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """No descriptor, mapping or thread of the transport outlives a test."""
    have_driver_open_its_socket()
    files, maps = open_files(), memfd_mappings()
    yield
    encrypted = any(thread.name.startswith("tls-") for thread in threading.enumerate())
    for turn in range(400 if encrypted else 2):
        if turn == 1:  # Slow; tracebacks of expected errors may hold views in a cycle.
            gc.collect()
        if turn > 1:  # The thread that carries encrypted bytes closes its ends a moment later.
            time.sleep(0.005)
        left = {name: link for name, link in open_files().items() if name not in files}
        mapped = memfd_mappings()
        if not left and mapped <= maps:
            break
    assert not left, f"descriptors left open: {left}"
    assert mapped <= maps, "mappings left"
    assert not [t for t in threading.enumerate() if t.name.startswith("transport")]
