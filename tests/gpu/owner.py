"""The other process of test_two_processes.py: owns a region on a device and does what it is told.

python -m tests.gpu.owner DEVICE SOCKET NBYTES
"""

import asyncio
import hashlib
import sys

from slackwater.common.transport.base import Channel
from slackwater.common.transport.devices import device_named
from slackwater.common.transport.gpu import DeviceRegion, reap
from slackwater.common.transport.region import Region
from slackwater.common.transport.shm import ShmFabric

SEED = b"owner"


def pattern(nbytes: int) -> bytes:
    return hashlib.shake_256(SEED).digest(nbytes)


async def main(device: str, path: str, nbytes: int) -> None:
    region = DeviceRegion.on(device_named(device), nbytes, "lent", (4096, nbytes - 4096))
    region.buffer[:4096] = pattern(nbytes)[:4096]
    region.buffer[nbytes - 4096 :] = pattern(nbytes)[nbytes - 4096 :]
    region.memory.upload(0, memoryview(pattern(nbytes))[4096 : nbytes - 4096])
    over = asyncio.Event()

    async def serve(channel: Channel) -> None:
        while not over.is_set():
            match await channel.receive():
                case b"grant":
                    channel.send(channel.grant(region))
                case b"digest":
                    whole = region.whole()
                    channel.send(hashlib.sha256(whole.buffer).digest())
                    whole.close()
                case b"close":
                    region.close()
                    channel.send(b"%d" % reap())
                case b"reap":
                    channel.send(b"%d" % reap())
                case b"end":
                    over.set()

    async def refuse(region: Region, note: bytes) -> None:
        region.close()

    listener = await ShmFabric().listen(path, lambda _: None, serve, refuse)
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    await over.wait()
    await listener.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
