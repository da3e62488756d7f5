"""An open, idle channel takes little memory, and one that is closed leaves none behind."""

import subprocess
import sys

import msgspec
import pytest

CHANNELS = 200
IDLE_BYTES_MAX = 512 * 1024
"""Bytes of one channel, both ends; they have some 6 MiB of tables and buffers to touch."""
LEFT_BYTES_MAX = 64 * 1024 * 1024
"""Bytes left by 400 channels that came and went."""
PROGRAM = """
import asyncio, gc, json, os, sys

from slackwater.common.transport.tcp import TcpFabric

def resident():
    with open("/proc/self/statm") as lines:
        return int(lines.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

async def main(count):
    ends, fabric = [], TcpFabric()

    async def keep(channel):
        ends.append(channel)

    async def opened(count):
        near = [await fabric.connect(here.address, b"", deadline_s=30) for _ in range(count)]
        while len(ends) < count:
            await asyncio.sleep(0.01)
        return near

    async def closed(near):
        for channel in near:
            await channel.close()
        while not all(end.closed for end in ends):
            await asyncio.sleep(0.01)
        for end in ends:
            await end.close()
        ends.clear()

    here = await fabric.listen("127.0.0.1:0", lambda hello: None, keep, None)
    await closed(await opened(1))
    gc.collect()
    before, idle = resident(), []
    for _ in range(2):
        near = await opened(count)
        idle.append(resident())
        await closed(near)
        near.clear()
    gc.collect()
    print(json.dumps({"before": before, "idle": idle, "after": resident()}))
    await here.close()

asyncio.run(main(int(sys.argv[1])))
"""


class Resident(msgspec.Struct):
    before: int
    idle: list[int]
    after: int


@pytest.fixture(scope="module")
def resident() -> Resident:
    """Measured in a process of its own: this one's heap has holes of its own. It loads the compiled
    code, which takes seconds on a busy machine."""
    command = [sys.executable, "-c", PROGRAM, str(CHANNELS)]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=Resident)


@pytest.mark.timeout(150)
def test_an_idle_channel_touches_few_pages(resident: Resident) -> None:
    assert (resident.idle[0] - resident.before) / CHANNELS < IDLE_BYTES_MAX


@pytest.mark.timeout(150)
def test_closed_channels_give_their_memory_back(resident: Resident) -> None:
    """Whole mappings go; a heap would keep what it once had, and clear it anew for each channel."""
    assert resident.after - resident.before < LEFT_BYTES_MAX
