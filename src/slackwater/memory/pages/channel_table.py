"""Channels that offer lanes, by number: what compiled code knows of the way to a slab.

A number is never given again, so a lane of a channel that is over leads to nothing of another's.
"""

import itertools

from slackwater.common.transport.base import Laned


class Roads:
    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._roads: dict[int, Laned] = {}

    def number(self, channel: Laned) -> int:
        self._roads = {n: known for n, known in self._roads.items() if not known.closed}
        for number, known in self._roads.items():
            if known is channel:
                return number
        number = next(self._numbers)
        self._roads[number] = channel
        return number

    def channel(self, road: int) -> Laned | None:
        """None: it is over."""
        found = self._roads.get(road)
        return None if found is None or found.closed else found
