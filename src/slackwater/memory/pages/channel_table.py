"""Give channels that offer lanes an id: compiled code names the channel to a slab by it.

An id is never used twice, so a lane of a closed channel never reaches a slab of another one.
"""

import itertools

from slackwater.common.transport.base import Laned


class ChannelTable:
    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._channels: dict[int, Laned] = {}

    def id_of(self, channel: Laned) -> int:
        """Return the channel's id; a channel that has none gets the next one."""
        self._channels = {n: known for n, known in self._channels.items() if not known.closed}
        for channel_id, known in self._channels.items():
            if known is channel:
                return channel_id
        channel_id = next(self._ids)
        self._channels[channel_id] = channel
        return channel_id

    def channel(self, channel_id: int) -> Laned | None:
        """Return the channel, or None once it is closed."""
        found = self._channels.get(channel_id)
        return None if found is None or found.closed else found
