"""The health of a service's store: whether it answers, what bus servers say of their disks."""

from collections.abc import Mapping
from typing import Final

from slackwater.common.base import codec, limits
from slackwater.common.base.clock import Clock
from slackwater.common.base.errors import DecodeRejected
from slackwater.common.bus.base import Delivery
from slackwater.common.shell.persister import BucketWriter
from slackwater.schemas import subjects
from slackwater.schemas.service import BusState

BUS_STATES: Final = subjects.telemetries("bus", what="state")
_MIB: Final = 1024**2


class StoreHealth:
    def __init__(
        self, clock: Clock, writers: Mapping[str, BucketWriter], replicas: int = 1
    ) -> None:
        """`writers`: those that there are at any time. `replicas`: servers that keep each record;
        most of them are enough."""
        self._clock, self._writers = clock, writers
        self._spare = (replicas - 1) // 2
        self._states: dict[str, tuple[float, BusState]] = {}
        """Bus server -> its newest state, and when it was heard."""

    async def hear(self, delivery: Delivery) -> None:
        try:
            state = codec.decode(delivery.payload, BusState, json=delivery.json)
        except DecodeRejected:
            return  # The next one comes in a second.
        if delivery.subject == subjects.telemetry("bus", state.server, "state"):
            self._states[state.server] = self._clock.now_s(), state

    def away(self) -> bool:
        """Say whether a bucket has not answered for long."""
        return any(each.doubt_s() > limits.STORE_DOUBT_S for each in self._writers.values())

    def doubts(self) -> list[str]:
        """List what is wrong: buckets that do not answer, servers that cannot write."""
        return [*(w.in_doubt for w in self._writers.values() if w.in_doubt), *self._errors()]

    def why_not(self, full: bool) -> str:
        """Say why nothing can be stored at present; empty: it can. `full`: nor may be what is new,
        where a disk has little room."""
        if self.away():
            named = "; ".join(self._errors() or self.doubts()[:1])
            return f"cannot store anything at present: {named}"
        return self._full() if full else ""

    def _errors(self) -> list[str]:
        return [f"bus server {each.server}: {each.reason}" for each in self._heard() if each.reason]

    def _full(self) -> str:
        full = [each for each in self._heard() if each.free_bytes < each.reserve_bytes]
        if len(full) <= self._spare:
            return ""
        each = full[0]
        return (
            f"takes no new jobs: the disk of bus server {each.server} has "
            f"{each.free_bytes // _MIB} MiB left of {each.total_bytes // _MIB}, and "
            f"{each.reserve_bytes // _MIB} are kept for those that are there: make room"
        )

    def _heard(self) -> list[BusState]:
        since_s = self._clock.now_s() - limits.BUS_STATE_S
        return [state for heard_s, state in self._states.values() if heard_s >= since_s]
