"""One process's device memory, opened by another: by CUDA IPC, or as the fake GPU does it."""

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gpu.owner import pattern

from slackwater.common.base.errors import ConfigRejected, Unavailable
from slackwater.common.transport.base import Channel
from slackwater.common.transport.devices import device_named
from slackwater.common.transport.gpu import DeviceArray
from slackwater.common.transport.shm import ShmFabric

ROOT = Path(__file__).resolve().parent.parent.parent
NBYTES = 3 * 1024 * 1024 + 4096


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def name(request: pytest.FixtureRequest) -> str:
    kind = str(request.param)
    try:
        device_named(kind)
    except ConfigRejected as error:
        pytest.skip(f"no GPU here: {error}")
    return kind


class Owner:
    def __init__(self, process: asyncio.subprocess.Process, channel: Channel) -> None:
        self.process, self.channel = process, channel

    async def say(self, word: bytes) -> bytes:
        self.channel.send(word)
        return await asyncio.wait_for(self.channel.receive(), 20)

    async def waiting(self, count: int) -> None:
        """Until so many allocations of the owner's wait for a peer."""
        async with asyncio.timeout(20):
            while int(await self.say(b"reap")) != count:  # noqa: ASYNC110 (told by another program)
                await asyncio.sleep(0.01)


@asynccontextmanager
async def owner(name: str, tmp_path: Path, *, opens: bool = True) -> AsyncIterator[Owner]:
    path = str(tmp_path / "s")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.gpu.owner", name, path, str(NBYTES),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"listening\n"
        fabric = ShmFabric(device=device_named(name) if opens else None)
        channel = await fabric.connect(path, b"", deadline_s=5)
        yield Owner(process, channel)
        await channel.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("opens", [True, False])
async def test_both_processes_see_one_memory(name: str, tmp_path: Path, opens: bool) -> None:
    """Opened by its handle, or staged by its owner where the other has no device: read, write,
    across the edges of the body; the owner's bytes are what was written."""
    async with owner(name, tmp_path, opens=opens) as peer:
        remote: Any = await peer.channel.open(await peer.say(b"grant"))
        assert remote.view is None
        assert (remote.loan is not None) == opens
        back = memoryview(bytearray(NBYTES))
        await peer.channel.read(remote, 0, back)
        assert bytes(back) == pattern(NBYTES)
        changed = bytearray(back)
        for place in (slice(0, 9), slice(4000, 5000), slice(NBYTES - 5000, NBYTES - 4000)):
            changed[place] = bytes(reversed(changed[place]))
            await peer.channel.write(memoryview(changed)[place], remote, place.start)
        assert await peer.say(b"digest") == hashlib.sha256(changed).digest()


async def test_a_copy_on_the_device_needs_neither_host_nor_peer(name: str, tmp_path: Path) -> None:
    """An Agent copies its own array straight into the aggregator's slot and back."""
    async with owner(name, tmp_path) as peer:
        remote: Any = await peer.channel.open(await peer.say(b"grant"))
        loan, first = remote.loan
        mine = DeviceArray(device_named(name).allocate(40_000), 0, (10_000,), np.float32)
        mine.assign(np.arange(10_000, dtype=np.float32))
        loan.copy_from(8192 - first, mine.memory, 0, mine.nbytes)
        expected = bytearray(pattern(NBYTES))
        expected[8192 : 8192 + mine.nbytes] = mine.to_host().tobytes()
        assert await peer.say(b"digest") == hashlib.sha256(expected).digest()
        mine.memory.copy_from(0, loan, 12288 - first, 4096)
        assert mine.to_host().tobytes()[:4096] == bytes(expected[12288 : 12288 + 4096])


async def test_memory_that_a_peer_has_open_outlives_its_region(name: str, tmp_path: Path) -> None:
    """The owner closes its region: the allocation waits for the peer, who goes on reading, and is
    freed when the peer has closed it."""
    async with owner(name, tmp_path) as peer:
        remote: Any = await peer.channel.open(await peer.say(b"grant"))
        assert await peer.say(b"close") == b"1"
        loan, first = remote.loan
        back = memoryview(bytearray(1000))
        loan.download(20_000 - first, back)
        assert bytes(back) == pattern(NBYTES)[20_000:21_000]
        del loan
        remote.close()
        await peer.waiting(0)


async def test_a_program_that_still_uses_it_keeps_it_open(name: str, tmp_path: Path) -> None:
    async with owner(name, tmp_path) as peer:
        remote: Any = await peer.channel.open(await peer.say(b"grant"))
        kept = DeviceArray(remote.loan[0], 0, (16,), np.uint8)
        await peer.say(b"close")
        remote.close()
        assert await peer.say(b"reap") == b"1"
        assert kept.to_host().tobytes() == pattern(NBYTES)[4096 : 4096 + 16]
        del kept
        await peer.waiting(0)


async def test_whoever_only_stages_holds_nothing(name: str, tmp_path: Path) -> None:
    async with owner(name, tmp_path, opens=False) as peer:
        await peer.channel.open(await peer.say(b"grant"))
        assert await peer.say(b"close") == b"0"


async def test_a_second_peer_that_dies_gives_back_what_it_had(name: str, tmp_path: Path) -> None:
    """No word from it: its process has ended, and the allocation is freed."""
    async with owner(name, tmp_path) as peer:
        code = (
            "import asyncio, os, sys\n"
            "from slackwater.common.transport.devices import device_named\n"
            "from slackwater.common.transport.shm import ShmFabric\n"
            "async def main():\n"
            "    fabric = ShmFabric(device=device_named(sys.argv[1]))\n"
            "    channel = await fabric.connect(sys.argv[2], b'', deadline_s=5)\n"
            "    channel.send(b'grant')\n"
            "    remote = await channel.open(await channel.receive())\n"
            "    assert remote.loan is not None\n"
            "    print('open', flush=True)\n"
            "    await asyncio.sleep(60)\n"
            "asyncio.run(main())\n"
        )
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, name, str(tmp_path / "s"),
            cwd=ROOT, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert other.stdout is not None
        assert await asyncio.wait_for(other.stdout.readline(), 60) == b"open\n"
        assert await peer.say(b"close") == b"1"
        other.kill()
        await other.wait()
        await peer.waiting(0)


async def test_the_owners_death_ends_the_channel_and_harms_nobody_here(
    name: str, tmp_path: Path
) -> None:
    async with owner(name, tmp_path) as peer:
        remote: Any = await peer.channel.open(await peer.say(b"grant"))
        peer.process.kill()
        await peer.process.wait()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(peer.channel.receive(), 20)
        with pytest.raises(Unavailable):
            await peer.channel.write(memoryview(b"x"), remote, 5000)
        remote.close()
        mine = DeviceArray(device_named(name).allocate(64), 0, (16,), np.float32)
        mine.assign(np.ones(16, np.float32))
        assert mine.to_host().sum() == 16
