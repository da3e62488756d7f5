"""The newest marks of buckets (common/store/witness.py), told among services and remembered.

The writer of a bucket tells each mark before it acknowledges what the mark covers. Others remember
the newest of each bucket. An instance that takes a bucket over, on another host perhaps, asks for
them: those that remember something answer, and it waits PEERS_S.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from slackwater.common.base import codec, limits
from slackwater.common.base.clock import Clock
from slackwater.common.base.effects import Publish
from slackwater.common.base.errors import DecodeRejected
from slackwater.common.bus.base import Bus, Delivery
from slackwater.common.store.witness import Mark
from slackwater.schemas import subjects
from slackwater.schemas.permissions import REMEMBERS, WITNESSED
from slackwater.schemas.service import BucketMark, Marks, Recovering

_WITNESS: Final = subjects.telemetries(what="witness")
_RECOVERING: Final = subjects.telemetries(what="recovering")
_REMEMBERED: Final = subjects.telemetries(what="remembered")


class Peers:
    """The memory of one instance of `service`."""

    def __init__(
        self,
        service: str,
        id: str,
        bus: Bus,
        clock: Clock,
        publish: Callable[[Publish], Awaitable[None]],
    ) -> None:
        self._service, self._id = service, id
        self._bus, self._clock, self._publish = bus, clock, publish
        self._newest: dict[str, Mark] = {}

    async def listen(self) -> None:
        """Remember from now on what is told, and tell it to those that ask. Raises Retryable."""
        if self._service in REMEMBERS:
            await self._bus.subscribe(_WITNESS, self._hear)
            await self._bus.subscribe(_RECOVERING, self._asked)

    async def tell(self, bucket: str, mark: Mark) -> None:
        """Tell the newest mark of a bucket of one's own."""
        if self._service in WITNESSED:
            await self._say("witness", Marks(marks=(_record(bucket, mark),)))

    async def remembered(self, buckets: Iterable[str]) -> Mapping[str, list[Mark]]:
        """Ask for what others remember of these buckets. Raises Retryable."""
        found: dict[str, list[Mark]] = {bucket: [] for bucket in buckets}
        if self._service not in WITNESSED or not found:
            return found

        async def take(delivery: Delivery) -> None:
            for each in _marks(delivery):
                if each.bucket in found:
                    found[each.bucket].append(_mark(each))

        heard = await self._bus.subscribe(_REMEMBERED, take)
        try:
            await self._bus.flush()
            await self._say("recovering", Recovering(buckets=tuple(found)))
            await self._clock.sleep_until(self._clock.now_s() + limits.PEERS_S)
        finally:
            await heard.unsubscribe()
        return found

    async def _hear(self, delivery: Delivery) -> None:
        for each in _marks(delivery):
            mark, known = _mark(each), self._newest.get(each.bucket)
            if known is None and len(self._newest) >= limits.REMEMBERED_MAX:
                continue
            if known is None or mark.when > known.when:
                self._newest[each.bucket] = mark

    async def _asked(self, delivery: Delivery) -> None:
        try:
            asked = codec.decode(delivery.payload, Recovering, json=delivery.json)
        except DecodeRejected:
            return  # It waits for those that understood it.
        known = [
            _record(bucket, self._newest[bucket])
            for bucket in asked.buckets
            if bucket in self._newest
        ]
        if known:
            await self._say("remembered", Marks(marks=tuple(known)))

    async def _say(self, what: str, message: Marks | Recovering) -> None:
        await self._publish(Publish(subjects.telemetry(self._service, self._id, what), message))


def _marks(delivery: Delivery) -> Iterable[BucketMark]:
    try:
        return codec.decode(delivery.payload, Marks, json=delivery.json).marks
    except DecodeRejected:
        return ()


def _mark(told: BucketMark) -> Mark:
    return Mark(int(told.epoch), int(told.sequence), int(told.count), told.digest)


def _record(bucket: str, mark: Mark) -> BucketMark:
    return BucketMark(
        bucket=bucket,
        epoch=mark.epoch,
        sequence=mark.sequence,
        count=mark.records,
        digest=mark.digest,
    )
