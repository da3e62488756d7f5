"""TurnSums of a job's workers, as their Agents report them, added up while their number stays."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from slackwater.schemas.base import COUNT_MAX, AggregatorId
from slackwater.schemas.steps import TurnTimes
from slackwater.schemas.telemetry import IterationsObserved

TURNS_MIN: Final = 40
"""TurnSums of all workers together whose means are trusted."""


@dataclass(slots=True)
class TurnSums:
    """TurnSums of one job since it has trained with so many workers."""

    workers: int = 0
    attempt: int = -1
    sums: TurnTimes = field(default_factory=TurnTimes)
    next: int = TURNS_MIN
    """How many turns make the next record."""
    pushed_bytes: Counter[AggregatorId] = field(default_factory=Counter)

    def add(self, message: IterationsObserved) -> None:
        seen, more = self.sums, message.turns
        self.sums = TurnTimes(
            turns=min(COUNT_MAX, seen.turns + more.turns),
            worker_s=seen.worker_s + more.worker_s,
            uplink_s=seen.uplink_s + more.uplink_s,
            server_s=seen.server_s + more.server_s,
            downlink_s=seen.downlink_s + more.downlink_s,
        )
        for link in message.links:
            self.pushed_bytes[link.aggregator] += link.pushed_bytes
