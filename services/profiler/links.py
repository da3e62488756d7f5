"""Times of a job's transfers, by aggregator, under one placement (Gu et al. 2021, appendix D).

The sums of all ranks are kept apart: those since the last window, by which a congested link shows,
and those of the whole placement, whose usual aggregator is the yardstick.
"""

from collections.abc import Iterable
from statistics import median_low

from slackwater.schemas.base import AggregatorId
from slackwater.schemas.telemetry import LinkTimes


class LinkSums:
    def __init__(self) -> None:
        self._all: dict[AggregatorId, LinkTimes] = {}
        self._fresh: dict[AggregatorId, LinkTimes] = {}
        self._said: tuple[LinkTimes, ...] = ()
        self._iterations = 0

    def add(self, links: Iterable[LinkTimes], iterations: int) -> None:
        """Take one rank's report of so many iterations."""
        self._iterations += iterations
        for link in links:
            for sums in (self._all, self._fresh):
                known = sums.get(link.aggregator)
                sums[link.aggregator] = link if known is None else _sum(known, link)

    def take(self) -> tuple[LinkTimes, ...]:
        """Since the last time; where nothing came since (two windows of one report), the same."""
        if self._fresh:
            self._said = tuple(self._fresh[id] for id in sorted(self._fresh))
            self._fresh = {}
        return self._said

    def bytes_of_iteration(self, ranks: int) -> int:
        """Return the bytes that all ranks, so many, push or pull in an iteration over a network,
        whichever is more; 0: nothing was measured."""
        pushed = sum(link.pushed_bytes for link in self._all.values())
        pulled = sum(link.pulled_bytes for link in self._all.values())
        return max(pushed, pulled) * ranks // max(self._iterations, 1)

    def usual(self) -> tuple[float, float]:
        """Seconds per byte of pushes and of pulls: the lower median over the aggregators, so that
        one that is congested already does not become the yardstick. 0: nothing was measured."""
        return (
            _median(
                link.pushing_s / link.pushed_bytes
                for link in self._all.values()
                if link.pushed_bytes
            ),
            _median(
                link.pulling_s / link.pulled_bytes
                for link in self._all.values()
                if link.pulled_bytes
            ),
        )


def _sum(one: LinkTimes, other: LinkTimes) -> LinkTimes:
    return LinkTimes(
        aggregator=one.aggregator,
        pushed_bytes=one.pushed_bytes + other.pushed_bytes,
        pushing_s=one.pushing_s + other.pushing_s,
        pulled_bytes=one.pulled_bytes + other.pulled_bytes,
        pulling_s=one.pulling_s + other.pulling_s,
    )


def _median(rates: Iterable[float]) -> float:
    found = list(rates)
    return median_low(found) if found else 0.0
