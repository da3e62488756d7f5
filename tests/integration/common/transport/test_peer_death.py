"""A peer process is killed, or stopped, in the middle: everything ends, and nothing stays open."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slackwater.common.base.errors import DeadlineExceeded, Unavailable
from slackwater.common.transport.base import Channel, Fabric, RemoteRegion
from slackwater.common.transport.region import Region
from slackwater.common.transport.shm import ShmFabric
from slackwater.common.transport.tcp import TcpFabric
from slackwater.common.transport.tcp_channel import TcpTuning

PEER = Path(__file__).with_name("peer.py")
NBYTES = 32 * 1024 * 1024
pytestmark = pytest.mark.live


@pytest.fixture(params=["shm", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def fabric_of(kind: str) -> Fabric:
    return ShmFabric() if kind == "shm" else TcpFabric(TcpTuning(stall_s=2.0, resume_s=1.0))


class Peer:
    process: asyncio.subprocess.Process
    address: str
    channel: Channel
    remote: RemoteRegion


@asynccontextmanager
async def peer(kind: str, folder: Path) -> AsyncIterator[Peer]:
    made = Peer()
    where = str(folder / "peer") if kind == "shm" else "127.0.0.1:0"
    made.process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PEER),
        kind,
        where,
        str(NBYTES),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert made.process.stdout is not None
        made.address = (await asyncio.wait_for(made.process.stdout.readline(), 30)).decode().strip()
        made.channel = await fabric_of(kind).connect(made.address, b"", deadline_s=5)
        made.remote = await made.channel.open(await made.channel.receive())
        yield made
        await made.channel.close()
    finally:
        if made.process.returncode is None:
            made.process.kill()
        await made.process.wait()


def open_sockets_and_memory() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if "memfd" in link or "socket" in link:
            found.add(link)
    return found


def operations(made: Peer, given: Region) -> dict[str, Any]:
    """Each of them again and again, so that the death comes in the middle of one."""
    data = memoryview(bytearray(NBYTES))

    async def forever(work: Any) -> None:
        while True:
            await work()

    async def ring() -> None:
        made.channel.send(b"ring")
        await made.channel.receive()

    return {
        "write": forever(lambda: made.channel.write(data, made.remote, 0)),
        "read": forever(lambda: made.channel.read(made.remote, 0, data)),
        "frames": forever(ring),
        "handover": forever(lambda: made.channel.handover(given, b"")),
    }


async def test_a_killed_peer_ends_every_operation(kind: str, tmp_path: Path) -> None:
    before = open_sockets_and_memory()
    async with peer(kind, tmp_path) as made:
        given = Region.create(NBYTES, "given")
        works = operations(made, given)
        tasks = {name: asyncio.create_task(work) for name, work in works.items()}
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in tasks.values())
        made.process.kill()
        outcomes = await asyncio.wait_for(
            asyncio.gather(*tasks.values(), return_exceptions=True), 15
        )
        for name, outcome in zip(tasks, outcomes, strict=True):
            assert isinstance(outcome, Unavailable), (name, outcome)
        assert made.channel.closed
        if kind == "shm":  # Mapped memory stays readable: in-place pulls do not crash.
            assert made.remote.view is not None
            assert len(bytes(made.remote.view[:4096])) == 4096
        given.close()
        with pytest.raises(Unavailable):
            await fabric_of(kind).connect(made.address, b"", deadline_s=5)
    del outcomes, outcome, tasks, works  # Tracebacks hold views of `given`.
    gc.collect()
    assert open_sockets_and_memory() <= before
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_stopped_peer_ends_every_wait(kind: str, tmp_path: Path) -> None:
    """Its kernel still answers for it: only deadlines can tell."""
    async with peer(kind, tmp_path) as made:
        made.process.send_signal(signal.SIGSTOP)
        data = memoryview(bytearray(NBYTES))
        waiting = [asyncio.create_task(made.channel.open(bytes(32)))]
        if kind == "tcp":
            waiting.append(asyncio.create_task(made.channel.write(data, made.remote, 0)))
        outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)
        assert all(isinstance(each, Unavailable | DeadlineExceeded) for each in outcomes), outcomes
        with pytest.raises((DeadlineExceeded, Unavailable)):
            await fabric_of(kind).connect(made.address, b"", deadline_s=0.3)
        made.process.send_signal(signal.SIGCONT)


async def test_a_peer_that_starts_anew_listens_on_the_same_path(tmp_path: Path) -> None:
    """The dead one's socket file is in the way of nobody."""
    async with peer("shm", tmp_path) as first:
        first.process.kill()
        await first.process.wait()
        assert (tmp_path / "peer").exists()
        async with peer("shm", tmp_path) as second:
            await second.channel.write(memoryview(b"again"), second.remote, 0)


async def test_the_owner_takes_no_part_in_a_write(tmp_path: Path) -> None:
    """One-sided for real: the owner is stopped, and the bytes arrive in its memory all the same."""
    async with peer("shm", tmp_path) as made:
        made.process.send_signal(signal.SIGSTOP)
        await made.channel.write(memoryview(b"one-sided"), made.remote, 100)
        back = memoryview(bytearray(9))
        await made.channel.read(made.remote, 100, back)
        assert bytes(back) == b"one-sided"
        made.process.send_signal(signal.SIGCONT)
