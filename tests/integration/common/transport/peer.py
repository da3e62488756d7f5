"""The other process of a test or benchmark: listens, grants one region, answers frames.

python peer.py KIND ADDRESS BYTES: prints its address, then serves until it is killed or its
standard input ends. Every frame is answered with itself; the first one sent is the region's key.
A handover is never answered.
"""

import asyncio
import contextlib
import sys

from slackwater.common.base.errors import Unavailable
from slackwater.common.transport.base import Channel, Fabric
from slackwater.common.transport.region import Region
from slackwater.common.transport.shm import ShmFabric
from slackwater.common.transport.tcp import TcpFabric


def fabric_of(kind: str) -> Fabric:
    return ShmFabric() if kind == "shm" else TcpFabric()


async def serve(kind: str, address: str, nbytes: int) -> None:
    region = Region.create(nbytes, "peer", prefault=True)

    async def on_channel(channel: Channel) -> None:
        channel.send(channel.grant(region))
        with contextlib.suppress(Unavailable):
            while True:
                channel.send(await channel.receive())

    async def never(_region: Region, _note: bytes) -> None:
        await asyncio.sleep(3600)

    listener = await fabric_of(kind).listen(address, lambda _hello: None, on_channel, never)
    sys.stdout.write(listener.address + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await listener.close()
    region.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
