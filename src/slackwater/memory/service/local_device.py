"""A block device within this process, without an NBD server: for arrays and for what is spilled."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from slackwater.common.base import limits
from slackwater.common.base.clock import LiveClock
from slackwater.common.bus.access import Credentials, ends_of
from slackwater.memory.pages.device import Device
from slackwater.memory.service.assembly import DeviceAssembly
from slackwater.memory.service.discovery import find_slab_bytes
from slackwater.memory.service.options import DeviceOptions


@contextlib.asynccontextmanager
async def local_device(
    options: DeviceOptions, url: str, credentials: Credentials
) -> AsyncIterator[Device]:
    """`url` "": no cluster, pages go to the backup file alone. Run what uses it alongside its
    `background`. Raises ConfigRejected, Unavailable."""
    slab_bytes = options.slab_bytes
    if not slab_bytes and url:
        slab_bytes = await find_slab_bytes(url, f"device-{options.id}", credentials)
    made = replace(options, socket=None)
    assembly = DeviceAssembly(
        made, slab_bytes or limits.SLAB_BYTES_DEFAULT, LiveClock(), ends_of(credentials)
    )
    stop = asyncio.Event()
    published: asyncio.Task[None] | None = None
    await assembly.start()
    try:
        if url:
            published = assembly.background.spawn(assembly.publish(url, stop, credentials))
        yield assembly.device
    finally:
        stop.set()
        await assembly.close()
        if published is not None:
            await asyncio.gather(published, return_exceptions=True)
