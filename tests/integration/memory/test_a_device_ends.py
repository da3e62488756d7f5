"""A device that cannot go on says so and ends: a part fails unseen, or its ring stands still."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slackwater.common.base.errors import Fatal, Unavailable
from slackwater.common.transport.tcp_channel import TcpChannel
from slackwater.loadgen.memory.nbd_client import NbdClient
from slackwater.memory.control.regeneration import Regenerator
from slackwater.memory.pages.backup import Backup
from slackwater.memory.pages.device import Device
from slackwater.memory.pages.stall import Stall
from slackwater.memory.resilience.late_binding import WritePlan
from slackwater.memory.service import assembly as parts
from slackwater.memory.service.shutdown import Patience

MIB = 1024 * 1024
Make = Callable[..., Any]


async def test_a_task_that_fails_is_the_devices_state_and_end(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One member's acknowledgement raises, in a task that nobody awaits."""

    def answered(self: WritePlan, *_: object) -> None:
        raise ValueError("injected")

    async with cluster("tcp") as c:
        await c.lend(2, slabs=2)
        assembly = await c.export(MIB // 2, resilience="2-copies")
        client = await NbdClient.connect(assembly.options.socket)
        await client.write(0, bytes(4096))
        await c.mapped(1)
        monkeypatch.setattr(WritePlan, "answered", answered)
        writing = asyncio.ensure_future(client.write(0, bytes(4096)))
        with pytest.raises(Fatal, match=r"Hydra\._post failed: ValueError\('injected'\)"):
            await assembly.background.alongside(asyncio.sleep(20))
        beat = assembly.status.heartbeat(0.0)
        assert (beat.state, "injected" in beat.reason) == ("failed", True)
        monkeypatch.setattr(parts, "Patience", partial(Patience, stuck_s=0.1))
        c.assembly = None
        with pytest.raises(Fatal, match="while it waited for requests of clients"):
            await assembly.close()
        await c.until(lambda: assembly.front.clients == 0)
        with pytest.raises(Unavailable):
            await writing
        await client.close()
        assert assembly.options.backup.stat().st_size == MIB // 2


@pytest.mark.parametrize(
    ("owner", "method", "resilience", "task"),
    [
        (Device, "flush", "disk", "Connection._one"),
        (Device, "read_ahead", "disk", "ReadAhead._fetch"),
        (TcpChannel, "lane", "disk", "LaneSet._dial"),
        (Backup, "allocated", "disk", "Refiller.run"),
        (Regenerator, "run", "2-copies", "Lenders._restore"),
        (Device, "retire", "disk", "Lenders._leaving"),
    ],
)
async def test_whatever_works_for_a_device_ends_it_when_it_fails(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, resilience: str,
    task: str,
) -> None:  # fmt: skip
    """Each part meets a bug once. What it leaves undone is waited for in vain: some seconds."""

    async def broken(*_: object, **__: object) -> None:
        raise ValueError("injected")

    async def used(c: Any, client: NbdClient) -> None:
        await client.write(0, bytes(MIB // 2))
        await c.until(lambda: c.assembly.device.mapped_spans == 1)
        await client.write(0, bytes(MIB // 2))
        await client.flush()
        await c.until(lambda: not c.assembly.device.table.pending.any())
        for page in range(64):  # From lenders: what is in the ring is not fetched ahead.
            await client.read(page * 4096, 4096)
        for machine in c.machines:
            machine.others_bytes = machine.total_bytes
        await asyncio.Event().wait()

    monkeypatch.setattr(owner, method, broken)
    monkeypatch.setattr(parts, "Patience", partial(Patience, stuck_s=0.1))
    async with cluster("tcp") as c:
        await c.lend(2, slabs=2)
        assembly = await c.export(MIB // 2, resilience=resilience)
        client = await NbdClient.connect(assembly.options.socket)
        async with asyncio.timeout(20):
            with pytest.raises(
                Fatal, match=rf"^{re.escape(task)} failed: ValueError\('injected'\)"
            ):
                await assembly.background.alongside(used(c, client))
        c.assembly = None
        await client.close()
        with contextlib.suppress(Fatal):  # The part's unfinished work is given up.
            await assembly.close()


async def test_a_ring_that_stands_still_is_shown_until_it_moves(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = asyncio.Event()
    hold = Device._hold

    async def held(*arguments: Any, **named: Any) -> None:
        await go.wait()
        await hold(*arguments, **named)

    monkeypatch.setattr(Device, "_hold", held)
    monkeypatch.setattr(parts, "Stall", partial(Stall, stuck_s=0.1))
    monkeypatch.setattr(parts, "_WATCH_S", 0.02)
    async with cluster("shm") as c:
        await c.lend(2, slabs=2)
        assembly = await c.export(MIB // 2, resilience="2-copies")
        client = await NbdClient.connect(assembly.options.socket)
        await client.write(0, bytes(4096))
        await c.until(lambda: assembly.device.mapped_spans == 1)
        await client.write(4096, b"g" * 4096)
        await c.until(lambda: assembly.status.heartbeat(0.0).state == "stuck")
        assert "has waited for lenders of span 0" in assembly.status.heartbeat(0.0).reason
        go.set()
        await c.until(lambda: assembly.status.heartbeat(0.0).state == "serving")
        await client.close()


async def test_patience_lasts_as_long_as_something_moves() -> None:
    moved = 0

    async def slow() -> None:
        nonlocal moved
        for _ in range(10):
            await asyncio.sleep(0.05)
            moved += 1

    async def never() -> None:
        await asyncio.Event().wait()

    patience = Patience(lambda: moved, stuck_s=0.3)
    await patience.wait(slow(), "the slow one")
    assert patience.given_up == []
    for name in ("the first", "the second"):
        await patience.wait(never(), name)
    assert patience.given_up == ["the first", "the second"]


PROGRAM = """
    import asyncio, sys, threading
    from slackwater.common.base import limits
    limits.RING_STUCK_S = 1.0
    from slackwater.memory.pages import writeback
    from slackwater.memory.pages.device import Device
    from slackwater.memory.control.lenders import Lenders

    async def failing_task(self):
        raise ValueError("injected into a task")

    def failing_thread():
        raise ValueError("injected into a thread")

    async def never(*_):
        await asyncio.Event().wait()

    def hanging_thread():
        threading.Event().wait()

    def writer_does(work):
        begun = writeback.write_back  # It is also called once to compile it.

        def instead(*arguments):
            writer = threading.current_thread().name == "backup-write"
            return work() if writer else begun(*arguments)

        writeback.write_back = instead

    {patch}
    from slackwater.cli.main import main
    sys.argv = [
        "slackwater", "memory", "export", "--size", "1M", "--slab-size", "1M", "--socket",
        {socket!r}, "--url", "nats://127.0.0.1:9",
    ]
    main()
"""


START_S = 100.0
"""A process that loads its compiled code, or compiles it, has so long."""


@contextmanager
def exported(folder: Path, patch: str) -> Iterator["subprocess.Popen[str]"]:
    text = textwrap.dedent(PROGRAM).format(patch=patch, socket=str(folder / "nbd"))
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ("Lenders.run = failing_task", "injected into a task"),
        ("writer_does(failing_thread)", "injected into a thread"),
    ],
)
def test_the_process_exits_with_an_error_when_a_part_of_it_fails(
    tmp_path: Path, patch: str, reason: str
) -> None:
    """A process starts and loads its compiled code: some seconds."""
    with exported(tmp_path, patch) as process:
        _, told = process.communicate(timeout=START_S)
    assert process.returncode == 1
    assert "background.failed" in told
    assert f"failed: ValueError('{reason}')" in told.splitlines()[-1]


@pytest.mark.parametrize(
    ("number", "patch", "given_up"),
    [
        (signal.SIGTERM, "Device.write_pages = Device.write_if = never", "requests of clients"),
        (signal.SIGINT, "writer_does(hanging_thread)", "the backup file"),
    ],
)
async def test_a_signal_ends_a_device_that_is_stuck(
    tmp_path: Path, number: int, patch: str, given_up: str
) -> None:
    """It says what was not flushed. A process starts and waits in vain: some seconds."""
    with exported(tmp_path, patch) as process:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            await asyncio.to_thread(process.stdout.readline)
        client = await NbdClient.connect(tmp_path / "nbd")
        parts_of_pages = [n * 4096 + 512 for n in range(4)]
        writes = [asyncio.ensure_future(client.write(at, b"x" * 512)) for at in parts_of_pages]
        try:
            await asyncio.sleep(0.2)
            process.send_signal(number)
            _, told = await asyncio.to_thread(process.communicate, timeout=60)
        finally:
            process.kill()
            await asyncio.gather(*writes, return_exceptions=True)
            await client.close()
    assert process.returncode == 1
    assert "device.given-up" in told
    assert "was ended while it waited for " in told
    assert given_up in told
    assert "pages are not in the backup file" in told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_device_that_still_compiles(tmp_path: Path, number: int) -> None:
    """The first start of an installation compiles for up to a minute. A process starts: seconds."""
    cache = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "slackwater.cli.main", "memory", "export", "--size", "1M"]
    command += ["--socket", str(tmp_path / "nbd"), "--slab-size", "1M"]
    command += ["--url", "nats://127.0.0.1:9"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=cache) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any('"compiling"' in line for line in lines)
        process.send_signal(number)
        told = process.stderr.read()
        assert process.wait(timeout=30) == 130
    assert "device.interrupted" in told
    assert not (tmp_path / "nbd").exists()
