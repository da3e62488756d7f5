"""kill -9 of lenders and of the device's own process, evictions and stops, under load.

Real processes, a real nats-server, real NBD over a Unix socket. A checker remembers every page:
each is right or its read fails, and after a kill of the device every page that a flush covered is
there.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slackwater.common.base import failpoints
from slackwater.common.base.errors import SlackwaterError, Unavailable
from slackwater.common.embedded import Supervisor, UnitSpec
from slackwater.common.shell.client import connect
from slackwater.common.shell.config import write_config
from slackwater.loadgen.memory.checker import PAGE_BYTES, Checker
from slackwater.loadgen.memory.nbd_client import NbdClient
from slackwater.schemas import subjects
from slackwater.schemas.memory import DeviceMap, EvictBegun, EvictNow, GetMap

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

MIB = 1024 * 1024
SLAB_BYTES = 2 * MIB
PAGES = 4 * SLAB_BYTES // PAGE_BYTES
LENDERS = ("s1", "s2", "s3")
TOKEN = "secret"
FAULTS = 25
PACE_S = 0.01
"""Between two requests of a user: the faults shall find the machine awake."""


class Device:
    """The process behind `slackwater memory export`, and its lives."""

    def __init__(self, folder: Path, url: str, resilience: str, transport: str) -> None:
        self.folder, self.url, self.resilience = folder, url, resilience
        self.transport = transport
        self.socket = folder / "nbd"
        self.process: subprocess.Popen[bytes] | None = None
        self.armed = ""
        """Failpoints of its next life, and their actions."""

    async def start(self) -> NbdClient:
        with (self.folder / "device.log").open("ab") as log:
            self.process = subprocess.Popen(  # noqa: ASYNC220  # A kill by its pid is the point.
                [
                    sys.executable, "-m", "slackwater.cli.main", "memory", "export",
                    "--size", str(PAGES * PAGE_BYTES), "--socket", str(self.socket),
                    "--backup", str(self.folder / "backup"), "--slab-size", str(SLAB_BYTES),
                    "--node", "here", "--hot", "5", "--resilience", self.resilience,
                    "--transport", self.transport,
                ],
                env={
                    **os.environ, "SLACKWATER_URL": self.url, "SLACKWATER_CLUSTER_TOKEN": TOKEN,
                    failpoints.VARIABLE: self.armed,
                },
                stdout=log,
                stderr=log,
            )  # fmt: skip
        async with asyncio.timeout(120):
            while True:
                with contextlib.suppress(Unavailable):
                    return await NbdClient.connect(self.socket)
                assert self.process.poll() is None, (self.folder / "device.log").read_text()
                await asyncio.sleep(0.05)

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.process.wait(timeout=30)


@asynccontextmanager
async def lenders(
    folder: Path, ids: Sequence[str] = LENDERS, transport: str = "shm"
) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor()
    try:
        url = await supervisor.start_nats()
        specs = []
        for id in ids:
            config = folder / f"{id}.toml"
            state = folder / id
            state.mkdir()
            values = {
                "id": id, "node": f"m-{id}", "url": url, "state_dir": str(state),
                "slab_bytes": SLAB_BYTES, "lend_bytes_max": 8 * SLAB_BYTES, "hold_s_max": 5.0,
            }  # fmt: skip
            if transport == "tcp":
                values |= {"tcp_address": "127.0.0.1:0", "cluster_token": TOKEN, "transport": "tcp"}
            write_config(config, values)
            command = (sys.executable, "-m", "slackwater.services.slabd", "--config", str(config))
            specs.append(UnitSpec(name=id, command=command, restarts_max=10 * FAULTS))
        await supervisor.start_units(specs)
        yield supervisor
    finally:
        await supervisor.stop()


class Run:
    def __init__(
        self,
        folder: Path,
        supervisor: Supervisor,
        seed: int,
        resilience: str = "disk",
        transport: str = "shm",
    ) -> None:
        self.supervisor = supervisor
        self.device = Device(folder, supervisor.url, resilience, transport)
        self.checker = Checker()
        self.rng = random.Random(seed)
        self.client: NbdClient | None = None
        self.busy: set[int] = set()
        self.users: list[asyncio.Task[None]] = []
        self.done: dict[str, int] = {}
        self.ends_with: tuple[type[Exception], ...] = (Unavailable,)
        """Errors that end a user of a device whose process ends."""

    async def begin(self) -> None:
        self.client = await self.device.start()
        self.users = [asyncio.ensure_future(self._use(n)) for n in range(4)]

    async def _use(self, number: int) -> None:
        rng = random.Random(f"{number}/{self.checker.writes}")
        client = self.client
        assert client is not None
        while True:
            first = rng.randrange(PAGES)
            count = rng.choice((1, 1, 8, 24))
            pages = [p for p in range(first, min(PAGES, first + count)) if p not in self.busy]
            pages = [p for i, p in enumerate(pages) if p == pages[0] + i]
            await asyncio.sleep(PACE_S)
            if not pages or self.busy.intersection(pages):
                continue
            self.busy.update(pages)
            try:
                await self._one(client, rng, pages)
            except self.ends_with:
                return
            finally:
                self.busy.difference_update(pages)

    async def _one(self, client: NbdClient, rng: random.Random, pages: list[int]) -> None:
        what = rng.random()
        offset, length = pages[0] * PAGE_BYTES, len(pages) * PAGE_BYTES
        if what < 0.5:
            begun = [(page, *self.checker.begin(page)) for page in pages]
            try:
                await client.write(offset, b"".join(data for _, _, data in begun))
            except (OSError, SlackwaterError):
                for page, generation, _ in begun:
                    self.checker.failed(page, generation)
                raise
            for page, generation, _ in begun:
                self.checker.acknowledged(page, generation)
        elif what < 0.97:
            data = await client.read(offset, length)
            for i, page in enumerate(pages):
                self.checker.check(page, data[i * PAGE_BYTES : (i + 1) * PAGE_BYTES])
        else:
            covered = self.checker.snapshot()
            await client.flush()
            self.checker.flushed(covered)

    # Faults ---------------------------------------------------------------------------------------

    async def fault(self) -> None:
        kind = self.rng.choice(("lender", "lender", "device", "evict", "evict", "stop", "pause"))
        self.done[kind] = self.done.get(kind, 0) + 1
        name = self.rng.choice(LENDERS)
        if kind == "lender":
            if self.rng.random() < 0.3:
                self.supervisor.drop_fds(name)  # The machine's memory is lost as well.
            self.supervisor.kill(name, signal.SIGKILL)
            if self.rng.random() < 0.5:
                await self.supervisor.until_ready(name)
        elif kind == "device":
            await self.device_dies()
        elif kind == "evict":
            await self._evict(name)
        elif kind == "stop":  # A lender hangs: its watchdog, or we, wake it.
            self.supervisor.kill(name, signal.SIGSTOP)
            await asyncio.sleep(self.rng.uniform(0.0, 1.0))
            self.supervisor.kill(name, signal.SIGCONT)
        else:  # The device hangs while its lenders evict: they take the slabs by force.
            self.device.kill(signal.SIGSTOP)
            await self._evict(name)
            await asyncio.sleep(self.rng.uniform(0.3, 1.0))
            self.device.kill(signal.SIGCONT)

    async def _evict(self, name: str) -> None:
        with contextlib.suppress(SlackwaterError):  # It may be dead at present.
            async with connect(self.supervisor.url, "operator") as client:
                message = EvictNow(count=self.rng.choice((1, 2, 4)))
                await client.ask(subjects.command("slabd", name, "evict"), message, EvictBegun)

    async def restart(self) -> NbdClient:
        """kill -9, and a new life."""
        self.device.kill()
        if self.client is not None:
            await self.client.close()
        self.client = await self.device.start()
        return self.client

    async def end(self) -> None:
        if self.device.process is not None and self.device.process.poll() is None:
            self.device.kill(signal.SIGCONT)
            self.device.kill()
        if self.client is not None:
            await self.client.close()

    async def device_dies(self) -> None:
        self.device.kill()
        await self._users_end()
        self.checker.crashed()
        self.busy.clear()
        await self.read_all(await self.restart())
        self.users = [asyncio.ensure_future(self._use(n)) for n in range(4)]

    async def _users_end(self) -> None:
        for user in self.users:
            user.cancel()
        for outcome in await asyncio.gather(*self.users, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def read_all(self, client: NbdClient) -> None:
        for first in range(0, PAGES, 64):
            data = await client.read(first * PAGE_BYTES, 64 * PAGE_BYTES)
            for i in range(64):
                self.checker.settle(first + i, data[i * PAGE_BYTES : (i + 1) * PAGE_BYTES])

    def watch(self) -> None:
        for user in self.users:
            if user.done() and not user.cancelled():
                user.result()

    async def finish(self) -> DeviceMap:
        await self._users_end()
        assert self.client is not None
        await self.read_all(self.client)
        async with connect(self.supervisor.url, "operator") as client:
            found = await client.ask(subjects.command("device", "d1", "map"), GetMap(), DeviceMap)
        await self.client.close()
        self.device.kill(signal.SIGTERM)
        return found


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.nightly)])
async def test_every_page_is_right_through_kills_and_evictions(
    tmp_path: Path, transport: str
) -> None:
    async with lenders(tmp_path, transport=transport) as supervisor:
        run = Run(tmp_path, supervisor, seed=5, transport=transport)
        try:
            await run.begin()
            await asyncio.sleep(8.0)
            for _ in range(FAULTS):
                await run.fault()
                await asyncio.sleep(run.rng.choice((0.1, 0.5, 1.5)))
                run.watch()
            await run.finish()
        finally:
            await run.end()
        assert run.checker.reads > 2000
        assert run.device.process is not None
        assert run.device.process.returncode == 0, "SIGTERM ends it in order"
        assert sum(run.done.values()) == FAULTS


async def test_kill_9_of_the_device_loses_no_acknowledged_flush(tmp_path: Path) -> None:
    """Write, flush, write more, kill -9: what the flush covered is on disk, again and again."""
    async with lenders(tmp_path) as supervisor:
        run = Run(tmp_path, supervisor, seed=9)
        try:
            run.client = client = await run.device.start()
            for number in range(4):
                for page in range(number * 50, number * 50 + 200):
                    generation, data = run.checker.begin(page)
                    await client.write(page * PAGE_BYTES, data)
                    run.checker.acknowledged(page, generation)
                covered = run.checker.snapshot()
                await client.flush()
                run.checker.flushed(covered)
                for page in range(100):  # And some that no flush covers.
                    generation, data = run.checker.begin(page)
                    await client.write(page * PAGE_BYTES, data)
                    run.checker.acknowledged(page, generation)
                client = await run.restart()
                run.checker.crashed()
                await run.read_all(client)
        finally:
            await run.end()


async def test_slabs_outlive_a_kill_of_their_daemon(tmp_path: Path) -> None:
    """The descriptor store keeps the memory, the device claims it back: the same slabs, and their
    pages still count."""
    async with lenders(tmp_path) as supervisor:
        run = Run(tmp_path, supervisor, seed=2)
        try:
            run.client = client = await run.device.start()
            data = bytes(range(256)) * 16
            async with connect(supervisor.url, "operator") as operator:

                async def ask() -> DeviceMap:
                    subject = subjects.command("device", "d1", "map")
                    return await operator.ask(subject, GetMap(), DeviceMap)

                async with asyncio.timeout(120):
                    while True:
                        await asyncio.gather(
                            *(client.write(n * PAGE_BYTES, data) for n in range(256))
                        )
                        before = (await ask()).spans
                        if before and before[0].remote_pages == 256:
                            break
                        await asyncio.sleep(0.2)
                    [member] = before[0].members
                    assert member is not None
                    supervisor.kill(member.lender, signal.SIGKILL)
                    for state in ("suspended", "mapped"):
                        while (await ask()).spans[0].state != state:  # noqa: ASYNC110
                            await asyncio.sleep(0.01)
                after = (await ask()).spans[0]
            assert after.members[0] == member
            assert after.remote_pages == 256
            assert await client.read(0, PAGE_BYTES) == data
        finally:
            await run.end()


@pytest.mark.slow
async def test_two_of_ten_lenders_are_lost_and_nobody_notices(tmp_path: Path) -> None:
    """8 + 2, two lenders killed with their memory under load: the span stays mapped, what they held
    is made again, then two others go. No byte is wrong, and none was lost in remote memory."""
    ids = [f"s{n}" for n in range(12)]
    async with lenders(tmp_path, ids) as supervisor:
        run = Run(tmp_path, supervisor, seed=4, resilience="8+2")
        try:
            await run.begin()
            async with connect(supervisor.url, "operator") as operator:

                async def members() -> list[str]:
                    subject = subjects.command("device", "d1", "map")
                    spans = (await operator.ask(subject, GetMap(), DeviceMap)).spans
                    if not spans or spans[0].state != "mapped":
                        return []
                    return [member.lender for member in spans[0].members if member is not None]

                async def whole(without: Sequence[str] = ()) -> list[str]:
                    async with asyncio.timeout(120):
                        while True:
                            found = await members()
                            if len(found) == 10 and not set(found) & set(without):
                                return found
                            assert found or not without, "the span is mapped all the time"
                            run.watch()
                            await asyncio.sleep(0.1)

                async def made_again(since: int) -> None:
                    """Wait until the fragments that two members lacked are made again; only then
                    may two others go."""
                    async with asyncio.timeout(120):
                        while len(regenerated(log.read_text()[since:])) < 2:
                            run.watch()
                            await asyncio.sleep(0.1)

                log = tmp_path / "device.log"
                found = await whole()
                for _ in range(2):
                    since = len(log.read_text())
                    lost = run.rng.sample(found, 2)
                    for name in lost:
                        supervisor.drop_fds(name)
                        supervisor.kill(name, signal.SIGKILL)
                    await asyncio.sleep(1.0)
                    found = await whole(lost)
                    await made_again(since)
                    await asyncio.sleep(2.0)
                    run.watch()
            await run.finish()
        finally:
            await run.end()
        assert run.checker.reads > 500
        assert "pages.lost" not in log.read_text()
        assert "pages.not-taken" not in log.read_text()


def regenerated(log: str) -> set[int]:
    """The members that a device's log says were given what they lacked."""
    lines = [line for line in log.splitlines(keepends=True) if line.endswith("\n")]
    return {json.loads(line)["member"] for line in lines if '"event":"regenerated"' in line}
