"""The line to the control plane: the bus itself, or the relay of the worker service that started
this program."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

from slackwater.common.base.clock import Clock, LiveClock
from slackwater.common.bus.access import Access
from slackwater.common.bus.base import Bus
from slackwater.common.bus.relay import RelayBus, Ticket
from slackwater.common.shell.world import live_world


@dataclass(frozen=True, slots=True)
class Line:
    bus: Bus
    clock: Clock
    rng: Random


@asynccontextmanager
async def connected(way: Access | Ticket, name: str) -> AsyncIterator[Line]:
    """Raises Unavailable when nobody listens there, Rejected when whoever does will not have us."""
    if isinstance(way, Access):
        async with live_world(way.url, name, credentials=way.credentials) as world:
            yield Line(world.bus, world.clock, world.rng)
        return
    clock = LiveClock()
    bus = await RelayBus.connect(way, clock=clock)
    try:
        yield Line(bus, clock, Random())
    finally:
        await bus.close()
