"""A machine that swaps to the memory of others: real nbd-client, mkswap and swapon, real processes.

They swap the machine that they run in, so they run in the guest of `make vm-test` alone.
nats-server, lenders, the device and its users are processes of their own, and the lenders pose as
other machines. The backup file is on a disk of the guest's, as swap needs direct I/O. Emulation is
slow: little memory, and nothing is asserted of speed.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slackwater.common.base import codec
from slackwater.common.bus.base import Delivery
from slackwater.common.embedded import Supervisor, UnitSpec
from slackwater.common.shell.client import connect
from slackwater.common.shell.config import write_config
from slackwater.loadgen.memory.checker import PAGE_BYTES, content
from slackwater.schemas import subjects
from slackwater.schemas.memory import DeviceHeartbeat, SlabdHeartbeat

pytestmark = [
    pytest.mark.vm,
    pytest.mark.live,
    pytest.mark.timeout(1700),
    pytest.mark.skipif(
        os.environ.get("SLACKWATER_VM") != "1",
        reason="swaps the machine that it runs in: only in the guest of make vm-test",
    ),
]
MIB = 1024 * 1024
SLAB_BYTES = 4 * MIB
DEVICE_BYTES = 48 * MIB
LENDERS = ("s1", "s2")
ADDRESSES = {"tcp": "127.0.0.1:0", "verbs": "10.99.0.1:0"}
TOKEN = "of-the-cluster"
NBD = "/dev/nbd0"
PROGRAM = Path(__file__).with_name("walker_program.py")
GROUPS = Path("/sys/fs/cgroup")
ARRAY_PAGES = 4 * MIB // PAGE_BYTES
WALKS_MAX = 8
SCANNED_PAGES = 2048
VALUES = 1024
PATIENCE_S = 600.0
SHOWN_CHARS = 3000


async def sh(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=PIPE, stderr=subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 0, f"{' '.join(command)}: {said.decode()}"
    return said.decode()


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def kib(pid: int, name: str) -> int:
    return int(status_of(pid)[name].split()[0])


def paged() -> dict[str, int]:
    """Pages that the kernel has read from and written to swap since it was started."""
    lines = (line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return {name: int(value) for name, value in lines if name in ("pswpin", "pswpout")}


def swaps() -> dict[str, int]:
    """KiB in use, by device."""
    lines = Path("/proc/swaps").read_text().splitlines()[1:]
    return {line.split()[0]: int(line.split()[3]) for line in lines}


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110  # A look from outside has no event to wait for.
            await asyncio.sleep(0.1)


class Group:
    """A cgroup. It must be unlimited before swap is taken away.

    `memory.high` makes it swap, and wait for that. `memory.max` alone kills a program whose pages
    do not leave as fast as it asks for others, and here they leave slowly.
    """

    def __init__(self, name: str) -> None:
        self.path = GROUPS / name
        (GROUPS / "cgroup.subtree_control").write_text("+memory")
        self.path.mkdir()

    def limit(self, nbytes: int) -> None:
        (self.path / "memory.high").write_text(str(nbytes))
        (self.path / "memory.max").write_text(str(nbytes + nbytes // 2))

    async def shrink(self, nbytes: int) -> None:
        """Shrink a cgroup that has more than `nbytes`."""
        (self.path / "memory.high").write_text(str(nbytes))
        await until(lambda: self.value("memory.current") < nbytes + nbytes // 4)
        self.limit(nbytes)

    def unlimit(self) -> None:
        for name in ("memory.high", "memory.max"):
            (self.path / name).write_text("max")

    def value(self, name: str) -> int:
        return int((self.path / name).read_text())

    async def remove(self) -> None:
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(OSError):  # Ended processes leave a little later.
                    self.path.rmdir()
                    return
                await asyncio.sleep(0.1)


class Swap:
    """The device that is this machine's swap, and who is behind it."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.pids: list[int] = []
        """The device's process, then the lenders'."""
        self.free: dict[str, int] = {}
        """Slabs, by lender."""
        self._beat: DeviceHeartbeat | None = None

    async def lender_said(self, delivery: Delivery) -> None:
        beat = codec.decode(delivery.payload, SlabdHeartbeat, json=delivery.json)
        self.free[beat.id] = beat.free_slabs

    async def device_said(self, delivery: Delivery) -> None:
        self._beat = codec.decode(delivery.payload, DeviceHeartbeat, json=delivery.json)

    @property
    def read_remote_pages(self) -> int:
        """Return the figure of the device's last heartbeat."""
        return self._beat.read_remote_pages if self._beat is not None else 0

    async def heard(self, true: Callable[[DeviceHeartbeat], bool]) -> DeviceHeartbeat:
        """Waits until the device says that of itself."""
        try:
            await until(lambda: self._beat is not None and true(self._beat))
        except TimeoutError:
            pytest.fail(f"the device's last heartbeat: {self._beat}")
        assert self._beat is not None
        return self._beat

    async def on(self) -> None:
        assert not swaps(), "the guest has swap of its own"
        await sh("nbd-client", "-unix", str(self.socket), NBD, "-b", str(PAGE_BYTES), "-swap")
        await sh("mkswap", NBD)
        await sh("swapon", NBD)

    async def off(self) -> None:
        """Everything comes back."""
        if NBD in swaps():
            await sh("swapoff", NBD)

    def check_safe(self) -> None:
        """No process through which pages are swapped can be swapped, or be killed to make room."""
        for pid in self.pids:
            assert (kib(pid, "VmLck") > 0, kib(pid, "VmSwap")) == (True, 0)
        assert Path(f"/proc/{self.pids[0]}/oom_score_adj").read_text().strip() == "-1000"


@pytest.fixture(scope="session")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system with direct I/O, on a RAM disk."""
    folder = tmp_path_factory.mktemp("disk")
    for command in (
        ("mke2fs", "-q", "-t", "ext4", "-F", "/dev/ram0"),
        ("mount", "/dev/ram0", folder),
    ):
        subprocess.run(command, check=True, timeout=120)
    yield folder
    subprocess.run(("umount", folder), check=True, timeout=120)


def lender(folder: Path, url: str, id: str, kind: str) -> UnitSpec:
    config, state = folder / f"{id}.toml", folder / id
    state.mkdir()
    values = {
        "id": id, "node": f"m-{id}", "url": url, "state_dir": str(state), "slab_bytes": SLAB_BYTES,
        "lend_bytes_max": DEVICE_BYTES, "transport": kind, "tcp_address": ADDRESSES[kind],
        "cluster_token": TOKEN,
        # Here lenders and a machine short of memory are one: its pressure is not theirs.
        "pressure_max": 1.0,
    }  # fmt: skip
    write_config(config, values)
    command = (sys.executable, "-m", "slackwater.services.slabd", "--config", str(config))
    return UnitSpec(name=id, command=command, start_s=PATIENCE_S, watchdog_s=PATIENCE_S)


@asynccontextmanager
async def exported(folder: Path, disk: Path, url: str, kind: str) -> AsyncIterator[Swap]:
    """`slackwater memory export --swap`, connected and in use as swap."""
    swap = Swap(folder / "swap.sock")
    command = (
        sys.executable, "-m", "slackwater.cli.main", "memory", "export", "--swap",
        "--size", str(DEVICE_BYTES), "--socket", str(swap.socket), "--backup", str(disk / kind),
        "--slab-size", str(SLAB_BYTES), "--node", "here", "--hot", "1", "--transport", kind,
    )  # fmt: skip
    environment = {**os.environ, "SLACKWATER_URL": url, "SLACKWATER_CLUSTER_TOKEN": TOKEN}
    with (folder / "device.log").open("wb") as log:
        device = await asyncio.create_subprocess_exec(
            *command, stdout=PIPE, stderr=log, env=environment
        )
    try:
        assert device.stdout is not None
        ready = await asyncio.wait_for(device.stdout.readline(), PATIENCE_S)
        assert b"nbd+unix" in ready, (folder / "device.log").read_text()
        swap.pids.append(device.pid)
        await swap.on()
        try:
            yield swap
        finally:
            await swap.off()
            await sh("nbd-client", "-d", NBD)
    finally:
        with contextlib.suppress(ProcessLookupError):
            device.send_signal(signal.SIGTERM)
        ended = await asyncio.wait_for(device.wait(), PATIENCE_S)
        sys.stdout.write((folder / "device.log").read_text()[-SHOWN_CHARS:])
    assert ended == 0


@asynccontextmanager
async def swapping(folder: Path, disk: Path, kind: str) -> AsyncIterator[Swap]:
    """Two lenders with free slabs, and this machine's swap in them."""
    supervisor = Supervisor()
    try:
        url = await supervisor.start_nats()
        await supervisor.start_units([lender(folder, url, id, kind) for id in LENDERS])
        async with (
            connect(url, "test") as client,
            exported(folder, disk, url, kind) as swap,
        ):
            swap.pids += [supervisor.units[id].pid for id in LENDERS]
            for service, hear in (("slabd", swap.lender_said), ("device", swap.device_said)):
                pattern = subjects.telemetries(service=service, what="heartbeat")
                await client.bus.subscribe(pattern, hear)
            needed = DEVICE_BYTES // SLAB_BYTES // len(LENDERS)
            await until(lambda: sum(free >= needed for free in swap.free.values()) == len(LENDERS))
            yield swap
    finally:
        for unit in supervisor.units.values():  # Shown where the test fails.
            sys.stdout.write(unit.log_path.read_text()[-SHOWN_CHARS:])
        await supervisor.stop()


@asynccontextmanager
async def grouped(name: str) -> AsyncIterator[Group]:
    group = Group(name)
    try:
        yield group
    finally:
        group.unlimit()
        await group.remove()


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def tell(walker: Process, line: str) -> dict[str, Any]:
    assert walker.stdin is not None
    assert walker.stdout is not None
    walker.stdin.write(f"{line}\n".encode())
    answer = await asyncio.wait_for(walker.stdout.readline(), 2 * PATIENCE_S)
    assert answer, f"the program died of: {line}"
    said: dict[str, Any] = json.loads(answer)
    sys.stdout.write(f"{line}: {said}\n")
    return said


@pytest.mark.parametrize("kind", ["tcp", "verbs"])
async def test_programs_with_half_of_their_memory_find_every_byte(
    tmp_path: Path, disk: Path, kind: str
) -> None:
    """memcached, then a program that knows each of its pages; then swap is taken away from it, and
    all of it is looked at once more. (In one test, as everything takes minutes to start.)"""
    async with swapping(tmp_path, disk, kind) as swap:
        await cached(swap, tmp_path / "memcached.sock")
        swap.check_safe()
        await walked(swap)
        await scanned(swap)


async def scanned(swap: Swap) -> None:
    """Where swap was, read in order around the page cache: pages come before they are asked for
    (Leap), and more of them than while programs swapped, which seldom do so in order."""
    before = await swap.heard(lambda beat: beat.prefetched_pages > 0)
    said = await sh(
        "dd", f"if={NBD}", "of=/dev/null", f"bs={PAGE_BYTES}", f"count={SCANNED_PAGES}",
        "iflag=direct",
    )  # fmt: skip
    after = await swap.heard(lambda beat: beat.read_pages - before.read_pages >= SCANNED_PAGES)
    for beat in (before, after):
        sys.stdout.write(
            f"prefetched {beat.prefetched_pages}, hit {beat.prefetch_hit_pages}, late "
            f"{beat.prefetch_late_pages}, waited for {beat.read_waited_pages} of "
            f"{beat.read_pages}; {beat.read_remote_pages} remote\n"
        )
    sys.stdout.write(said)
    far = after.read_remote_pages - before.read_remote_pages
    assert far > 0
    assert after.prefetch_hit_pages - before.prefetch_hit_pages > far // 2


async def walked(swap: Swap) -> None:
    program = (sys.executable, str(PROGRAM), str(ARRAY_PAGES))
    async with grouped("walker") as group, running(*program) as walker:
        before, read_before = paged(), swap.read_remote_pages
        group.limit(ARRAY_PAGES * PAGE_BYTES // 2)
        await tell(walker, f"join {group.path}")
        assert (await tell(walker, "walk forwards 0 1"))["wrong"] == []
        for line in ("backwards 0 3", "random 0 2"):
            assert (await tell(walker, f"walk {line}"))["wrong"] == []
        for more in range(1, WALKS_MAX):  # Until lenders have had their share, too.
            if swap.read_remote_pages - read_before > ARRAY_PAGES // 2:
                break
            assert (await tell(walker, f"walk strided {more} 3"))["wrong"] == []

        assert swaps()[NBD] * 1024 > ARRAY_PAGES * PAGE_BYTES // 4
        assert paged()["pswpin"] - before["pswpin"] > ARRAY_PAGES
        assert paged()["pswpout"] - before["pswpout"] > ARRAY_PAGES
        assert swap.read_remote_pages - read_before > ARRAY_PAGES // 2
        await swap.heard(lambda beat: beat.written_remote_pages > ARRAY_PAGES // 2)
        swap.check_safe()

        group.unlimit()
        await swap.off()
        back = paged()
        assert (await tell(walker, "walk random 9 0"))["wrong"] == []
        assert paged() == back, "pages travel without swap"


async def cached(swap: Swap, socket: Path) -> None:
    """Every value, of a second generation too, is what was stored."""
    command = ("memcached", "-u", "root", "-m", "64", "-t", "1", "-s", str(socket))
    async with (
        grouped("memcached") as group,
        running("sh", "-c", f"echo 0 > {group.path}/cgroup.procs; exec {' '.join(command)}"),
    ):
        await until(socket.exists)
        reader, writer = await asyncio.open_unix_connection(str(socket))
        await store(reader, writer, 1)
        working_set = group.value("memory.current")
        assert working_set > VALUES * PAGE_BYTES
        await group.shrink(working_set // 2)
        before = paged()
        assert await wrong(reader, writer, 1) == []
        await store(reader, writer, 2)
        assert await wrong(reader, writer, 2) == []

        swapped = group.value("memory.swap.current")
        sys.stdout.write(f"working set {working_set}, swapped {swapped}, {paged()}\n")
        assert swapped > working_set // 4
        assert paged()["pswpin"] - before["pswpin"] > VALUES // 2
        writer.close()
        group.unlimit()


async def store(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, generation: int
) -> None:
    for number in range(VALUES):
        value = content(number, generation)
        writer.write(b"set v%d 0 0 %d\r\n%b\r\n" % (number, len(value), value))
        assert await asyncio.wait_for(reader.readline(), PATIENCE_S) == b"STORED\r\n"


async def wrong(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, generation: int
) -> list[int]:
    """Numbers of the values that are not what was stored, or are gone."""
    found = []
    for number in range(VALUES):
        value = content(number, generation)
        writer.write(b"get v%d\r\n" % number)
        head = await asyncio.wait_for(reader.readline(), PATIENCE_S)
        if head != b"VALUE v%d 0 %d\r\n" % (number, len(value)):
            found.append(number)
            assert head == b"END\r\n", head
            continue
        answer = await asyncio.wait_for(reader.readexactly(len(value) + 7), PATIENCE_S)
        if answer != value + b"\r\nEND\r\n":
            found.append(number)
    return found
