"""Questions to the bus before a device begins: is its name taken, and how large are slabs."""

import asyncio
import contextlib
from typing import Final

from slackwater.common.base import codec
from slackwater.common.base.errors import ConfigRejected, DecodeRejected, Retryable
from slackwater.common.bus.access import Credentials
from slackwater.common.bus.base import Delivery
from slackwater.common.shell.world import live_world
from slackwater.memory.service import control_service
from slackwater.schemas import subjects
from slackwater.schemas.memory import GetMap, SlabdHeartbeat

_LOOK_S: Final = 2.5
"""Longer than two heartbeats: a lender that is there has been heard by then."""


async def refuse_namesake(url: str, id: str, credentials: Credentials | None = None) -> None:
    """Two devices of one name would depose each other from their slab map, and be one to lenders.
    Raises ConfigRejected when one is there, Unavailable when the bus is not."""
    async with live_world(url, f"device-{id}", credentials=credentials) as world:
        try:
            await world.bus.request(
                subjects.command(control_service.SERVICE, id, "map"),
                codec.encode(GetMap()),
                timeout_s=_LOOK_S,
            )
        except Retryable:
            return
    raise ConfigRejected(f"id {id!r}: a device of this name is served already; give another id")


async def find_slab_bytes(url: str, name: str, credentials: Credentials | None = None) -> int:
    """The slab size of the cluster's lenders, as the first of them tells; 0: none is there. Raises
    Unavailable when the bus is not there, ConfigRejected when it will not have us."""
    heard: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def hear(delivery: Delivery) -> None:
        with contextlib.suppress(DecodeRejected):
            beat = codec.decode(delivery.payload, SlabdHeartbeat, json=delivery.json)
            if not heard.done():
                heard.set_result(beat.slab_bytes)

    async with live_world(url, name, credentials=credentials) as world:
        await world.bus.subscribe(subjects.telemetries(service="slabd", what="heartbeat"), hear)
        try:
            async with asyncio.timeout(_LOOK_S):
                return await heard
        except TimeoutError:
            return 0
