"""Channels to the aggregators that buckets go to: one each, and what was reserved there."""

import random
from typing import Any

from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.common.transport.memory import MemoryFabric, MemoryNetwork
from slackwater.schemas.base import AggregatorId
from slackwater.schemas.placement import Endpoint
from slackwater.services.aggregator.bucket import Move
from slackwater.services.aggregator.migration import Handovers, _Readiness

TO = Endpoint(aggregator=AggregatorId("a2"), addresses=(("memory", "there"),))


def handovers(sim: SimWorld, fabric: MemoryFabric) -> Handovers:
    return Handovers(
        "a1", "token", {"memory": fabric}, sim.clock, random.Random(1), lambda *_: None
    )


def test_buckets_that_go_to_one_aggregator_share_a_channel_while_it_lives() -> None:
    async def main() -> None:
        sim, greeted = SimWorld(1), list[bytes]()
        fabric = MemoryFabric(MemoryNetwork())

        def accept(hello: bytes) -> Any:
            greeted.append(hello)

        async def serve(channel: Any, _: Any) -> None:
            await channel.receive()

        listener = await fabric.listen("there", accept, serve, None)
        made = handovers(sim, fabric)
        _, first = await made._channel(TO)
        assert (await made._channel(TO))[1] is first
        await first.close()
        _, second = await made._channel(TO)
        assert second is not first
        assert len(greeted) == 2
        await made.close()
        await listener.close()

    run_simulated(main())


class ReservingDouble:
    """A channel that reserves, and notes what is given back (`Reserving`)."""

    closed = False

    def __init__(self) -> None:
        self.given_back: list[int] = []

    async def make_room(self, region: Any) -> int:
        return 7

    def give_back(self, room: int) -> None:
        self.given_back.append(room)

    async def hand_over_into(self, *_: Any) -> None: ...


def test_room_that_a_bucket_does_not_need_is_given_back_once() -> None:
    async def main() -> None:
        made = handovers(SimWorld(1), MemoryFabric(MemoryNetwork()))
        rooms: Any = ReservingDouble()
        ready = _Readiness(Move("m1", 8, TO), channel=rooms, room=7)
        made._ready["j", 0] = ready  # type: ignore[index]
        made.cancel(("j", 0))  # type: ignore[arg-type]
        made._give_back(ready)
        assert rooms.given_back == [7]

    run_simulated(main())
