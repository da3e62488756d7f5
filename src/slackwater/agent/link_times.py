"""How long pushes and pulls are on their way, by aggregator: tells a congested link from a slow
iteration (Gu et al. 2021, appendix D).

Counted is the time in which at least one transfer is under way in a direction, so that what
overlaps counts once. A transfer that waits for its turn in the Agent is not under way. Over shared
memory nothing travels.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final

from slackwater.agent.permits import MovePermit
from slackwater.agent.turn_times import TurnClock
from slackwater.common.transport.pacing import Pace
from slackwater.schemas.base import AggregatorId
from slackwater.schemas.telemetry import LinkTimes

LINKS_MAX: Final = 1024
"""Links that one report carries; those beyond it are counted and never reported."""


class LinkDirection:
    """One direction of one link."""

    __slots__ = ("_changed", "_now_s", "_open", "_since_s", "busy_s", "nbytes")

    def __init__(
        self, now_s: Callable[[], float], changed: Callable[[int], None] | None = None
    ) -> None:
        """`changed` is told 1 when a transfer begins, -1 when it ends."""
        self._now_s, self._changed = now_s, changed
        self._open = 0
        self._since_s = 0.0
        self.nbytes = 0
        self.busy_s = 0.0

    def begin(self) -> None:
        if self._open == 0:
            self._since_s = self._now_s()
        self._open += 1
        if self._changed is not None:
            self._changed(1)

    def end(self, nbytes: int) -> None:
        """`nbytes`: what has arrived of that transfer; 0 of one that failed."""
        self._settle()
        self._open -= 1
        self.nbytes += nbytes
        if self._changed is not None:
            self._changed(-1)

    def take(self) -> tuple[int, float]:
        """(bytes that arrived, seconds) since the last time."""
        self._settle()
        taken = self.nbytes, self.busy_s
        self.nbytes, self.busy_s = 0, 0.0
        return taken

    def _settle(self) -> None:
        if self._open:
            now_s = self._now_s()
            self.busy_s += now_s - self._since_s
            self._since_s = now_s


class TimedTransfer:
    """`async with TimedTransfer(way, nbytes, permit): await ...`: waits for the permit, if the job
    takes turns; that does not count as being on the way."""

    __slots__ = ("_nbytes", "_permit", "_way")

    def __init__(self, way: LinkDirection, nbytes: int, permit: MovePermit | None) -> None:
        self._way, self._nbytes, self._permit = way, nbytes, permit

    async def __aenter__(self) -> None:
        if self._permit is not None:
            await self._permit.begin()
        self._way.begin()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._way.end(self._nbytes if kind is None else 0)
        if self._permit is not None:
            self._permit.end()


class Link:
    """Both directions between this worker and one aggregator."""

    __slots__ = ("_receives", "_sends", "pulled", "pushed")

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        turns: TurnClock | None = None,
        sends: MovePermit | None = None,
        receives: MovePermit | None = None,
    ) -> None:
        """`sends`, `receives`: the permits of a job that takes turns."""
        self._sends, self._receives = sends, receives
        self.pushed = LinkDirection(now_s, turns.up if turns is not None else None)
        self.pulled = LinkDirection(now_s, turns.down if turns is not None else None)

    @asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        """Hold the permit, if the job takes turns, for all transfers within: a read that is looked
        at again must not wait for a turn in its midst, in which others write what it reads."""
        if self._receives is None:
            yield
            return
        await self._receives.begin()
        try:
            yield
        finally:
            self._receives.end()

    def pushing(self, nbytes: int) -> TimedTransfer:
        return TimedTransfer(self.pushed, nbytes, self._sends)

    def pulling(self, nbytes: int) -> TimedTransfer:
        return TimedTransfer(self.pulled, nbytes, self._receives)

    @property
    def pace(self) -> Pace | None:
        """Return the pace of a push that others go before; None: there are none."""
        return None if self._sends is None else self._sends.pace

    @property
    def pull_pace(self) -> Pace | None:
        return None if self._receives is None else self._receives.pace


class Links:
    """The links of one worker. Used by the Agent's own thread only. `sends`, `receives`: without
    them no bytes are moved that way; None: they are moved at any time."""

    def __init__(self, sends: MovePermit | None = None, receives: MovePermit | None = None) -> None:
        self._sends, self._receives = sends, receives
        self._links: dict[AggregatorId, Link] = {}
        self.turns = TurnClock()
        """How all of them, and the worker, take turns."""

    def to(self, aggregator: AggregatorId) -> Link:
        return self._links.setdefault(
            aggregator, Link(turns=self.turns, sends=self._sends, receives=self._receives)
        )

    def take(self) -> tuple[LinkTimes, ...]:
        """Return the transfers since the last call."""
        said = []
        for aggregator in sorted(self._links):
            link = self._links[aggregator]
            pushed_bytes, pushing_s = link.pushed.take()
            pulled_bytes, pulling_s = link.pulled.take()
            if pushing_s or pulling_s:
                said.append(
                    LinkTimes(
                        aggregator=aggregator,
                        pushed_bytes=pushed_bytes,
                        pushing_s=pushing_s,
                        pulled_bytes=pulled_bytes,
                        pulling_s=pulling_s,
                    )
                )
        return tuple(said[:LINKS_MAX])
