"""Two services of one id are one to everybody else: the older of them ends."""

import asyncio
import contextlib

from slackwater.common.base import codec
from slackwater.common.base.errors import ConfigRejected, DecodeRejected
from slackwater.common.bus.base import Bus, Delivery
from slackwater.schemas import subjects
from slackwater.schemas.cluster import AggregatorHeartbeat
from slackwater.schemas.memory import SlabdHeartbeat


async def yield_to_namesake(
    bus: Bus,
    service: str,
    id: str,
    epoch: int,
    kind: type[AggregatorHeartbeat] | type[SlabdHeartbeat],
) -> None:
    """Wait for a heartbeat of a later start of this id. Raises ConfigRejected then, so that this
    process ends and is not started again: it would be the newer one."""
    newer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def hear(delivery: Delivery) -> None:
        with contextlib.suppress(DecodeRejected):
            beat = codec.decode(delivery.payload, kind, json=delivery.json)
            if beat.incarnation > epoch and not newer.done():
                newer.set_result(beat.node)

    await bus.subscribe(subjects.telemetry(service, id, "heartbeat"), hear)
    raise ConfigRejected(
        f"{service}: a newer one of id {id} runs on node {await newer}: this one ends; give one of "
        "them another id"
    )
