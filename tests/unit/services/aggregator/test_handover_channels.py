"""Channels to the aggregators that buckets go to: one each, and what was reserved there."""

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from slackwater.common.base.errors import Rejected
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.common.transport.memory import MemoryFabric, MemoryNetwork
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.schemas.placement import Endpoint
from slackwater.services.aggregator.bucket import Move
from slackwater.services.aggregator.migration import Adoptions, HandoverNote, Handovers, _Readiness

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


def test_over_a_channel_that_reserves_nothing_a_bucket_leaves_as_well() -> None:
    async def main() -> None:
        made = handovers(SimWorld(1), MemoryFabric(MemoryNetwork()))
        ready = _Readiness(Move("m1", 8, TO))
        plain: Any = object()
        held: Any = None
        assert await made._take_turn(plain, held, ready, lambda: True)
        assert (ready.done, ready.room) == (True, _Readiness(Move("m1", 8, TO)).room)

    run_simulated(main())


def test_a_bucket_may_leave_once_its_way_is_ready() -> None:
    async def main() -> None:
        made = handovers(SimWorld(1), MemoryFabric(MemoryNetwork()))
        bucket: Any = SimpleNamespace(key=("j", 0))
        held: Any = None
        assert made.may_leave(bucket, held), "nobody prepares anything for it"
        ready = made._ready["j", 0] = _Readiness(Move("m1", 8, TO))  # type: ignore[index]
        assert not made.may_leave(bucket, held)
        ready.done = ready.unhindered = True
        assert made.may_leave(bucket, held)

    run_simulated(main())


def test_a_region_comes_with_a_note_that_has_the_clusters_token() -> None:
    unused: Any = None
    adoptions = Adoptions("a2", "token", unused, unused)
    note = HandoverNote(
        token="token", source="a1", job=JobId("j"), bucket=0, layout_epoch=1, location_epoch=2,
        pushed=(1, 2),
    )  # fmt: skip
    assert adoptions._read(msgspec.msgpack.encode(note)) == note
    for token in ("another", "tokem", ""):
        other = msgspec.structs.replace(note, token=token)
        with pytest.raises(Rejected):
            adoptions._read(msgspec.msgpack.encode(other))
    with pytest.raises(Rejected, match="a note that is none"):
        adoptions._read(b"text")
