"""Announcements of the embedded supervisor: an aggregator, silent itself, is being started anew.

An aggregator that is killed again and again before it is up is silent for a long time, and all the
while the supervisor keeps its memory. Its controller must not give it up then. So it hears each
second that it is being restarted, or that it was given up. Under systemd the aggregator's
`restart_window_s` stands for it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from slackwater.common.base import codec, limits
from slackwater.common.base.errors import Retryable
from slackwater.common.bus.base import Bus
from slackwater.common.bus.nats import NatsBus
from slackwater.common.embedded.unit import Unit
from slackwater.schemas import subjects
from slackwater.schemas.base import AggregatorId
from slackwater.schemas.cluster import AggregatorRestarts

_PREFIX: Final = "aggregator-"
_DOWN: Final = ("restarting", "starting")


def restarting(units: Mapping[str, Unit]) -> list[AggregatorRestarts]:
    """Return the restarts of aggregators that were up and are not."""
    return [
        AggregatorRestarts(
            aggregator=AggregatorId(name.removeprefix(_PREFIX)),
            restarts=unit.recent_ends,
            given_up=unit.state == "failed",
        )
        for name, unit in units.items()
        if name.startswith(_PREFIX)
        and (unit.state == "failed" or (unit.restarts > 0 and unit.state in _DOWN))
    ]


async def announce(url: str, units: Callable[[], Mapping[str, Unit]]) -> None:
    """Until cancelled. Nothing is connected while all are up."""
    while True:
        await asyncio.sleep(limits.HEARTBEAT_S)
        if not restarting(units()):
            continue
        # The bus may be away as well: said again soon.
        with contextlib.suppress(Retryable):
            bus = await NatsBus.connect(url, "supervisor")
            try:
                while said := restarting(units()):
                    await _publish(bus, said)
                    await asyncio.sleep(limits.HEARTBEAT_S)
            finally:
                await bus.close()


async def _publish(bus: Bus, said: Iterable[AggregatorRestarts]) -> None:
    for each in said:
        subject = subjects.telemetry("aggregator", each.aggregator, "restarts")
        await bus.publish(subject, codec.encode(each))
