"""How a worker's time divides into turns: computing, pushing, waiting for the server, pulling (Lin
et al. 2018, section III-A), measured where it happens, without looking at packets.

Every instant belongs to one of the four, so that their sum is the time itself: transfers come
first, then a push that is unanswered, and the rest is the worker's own. A turn ends when all
buckets of an iteration are answered and their parameters here; sums are of whole turns. A stall
counts like any other time: throughput is made of means.
"""

import time
from collections.abc import Callable
from typing import Final

from slackwater.schemas.steps import TurnTimes

SKIPPED: Final = 2
"""TurnSums at first that do not count: connections and caches are cold."""
_WORKER, _UPLINK, _SERVER, _DOWNLINK = range(4)


class TurnClock:
    """One worker's. Used by the Agent's own thread only."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._since_s = now_s()
        self._up = self._down = 0
        self._unanswered: set[int] = set()
        self._answered: dict[int, int] = {}
        """Bucket -> the newest of this worker's iterations that is answered."""
        self._ended = 0
        """The iteration that the last turn was of."""
        self._skip = SKIPPED
        self._turn = [0.0] * 4
        self._sums = [0.0] * 4
        self._turns = 0

    def up(self, change: int) -> None:
        """Note that a push of bytes begins (1) or ends (-1)."""
        self._settle()
        self._up += change

    def down(self, change: int) -> None:
        """Note that a pull of bytes begins (1) or ends (-1)."""
        self._settle()
        self._down += change

    def pushed(self, bucket: int) -> None:
        """Note that the program has pushed a bucket. Repeated, it changes nothing."""
        self._settle()
        self._unanswered.add(bucket)

    def answered(self, bucket: int, iteration: int) -> None:
        """Note that a push is answered, and that its parameters are here."""
        self._settle()
        self._unanswered.discard(bucket)
        self._answered[bucket] = iteration
        ended = min(self._answered.values())
        if ended > self._ended:
            self._end(whole=ended == self._ended + 1)
            self._ended = ended

    def take(self) -> TurnTimes:
        """Return the turns that ended since the last call."""
        sums, turns = self._sums, self._turns
        self._sums, self._turns = [0.0] * 4, 0
        return TurnTimes(
            turns=turns,
            worker_s=sums[_WORKER],
            uplink_s=sums[_UPLINK],
            server_s=sums[_SERVER],
            downlink_s=sums[_DOWNLINK],
        )

    def _end(self, *, whole: bool) -> None:
        """`whole`: false after a start, or a move, that brought several iterations at once."""
        if whole and not self._skip:
            self._sums = [a + b for a, b in zip(self._sums, self._turn, strict=True)]
            self._turns += 1
        self._skip = max(0, self._skip - 1)
        self._turn = [0.0] * 4

    def _settle(self) -> None:
        now_s = self._now_s()
        spent_s, self._since_s = now_s - self._since_s, now_s
        if self._up and self._down:
            self._turn[_UPLINK] += spent_s / 2
            self._turn[_DOWNLINK] += spent_s / 2
        elif self._up:
            self._turn[_UPLINK] += spent_s
        elif self._down:
            self._turn[_DOWNLINK] += spent_s
        elif self._unanswered:
            self._turn[_SERVER] += spent_s
        else:
            self._turn[_WORKER] += spent_s
