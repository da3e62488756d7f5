"""The lanes of one NBD connection as the program sees them: asked for, installed, closed."""

import asyncio
import itertools
import threading
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from slackwater.common.base import limits
from slackwater.common.base.errors import SlackwaterError
from slackwater.common.transport.base import Lane, Laned
from slackwater.memory.nbd import lanes as compiled
from slackwater.memory.nbd import state as s
from slackwater.memory.pages.device import Device

_log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Held:
    channel: Laned
    lane: Lane
    buffer: NDArray[np.uint8]
    sent_before: int = 0
    """Requests, when room was last made."""


def _idle(words: NDArray[np.int64]) -> bool:
    return bool(words[s.HEAD] == words[s.TAIL])


class LaneSet:
    """Made on the event loop. `sweep` and `close` are the connection's thread's, while the compiled
    loop is not running; the rest is the event loop's."""

    def __init__(self, device: Device, most: int = s.LANES) -> None:
        """`most`: lanes that it has at once."""
        self._device = device
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[int, _Held] = {}
        """By its number in the connection's state."""
        self._not_before_s: dict[int, float] = {}
        """By channel id: when to try again."""
        self._replace_not_before_s = 0.0
        self._crowded = False
        """One of them is to make room."""
        self._dialing = device.background.group()
        self._turn = threading.Lock()
        self._closed = False

    # On the event loop ----------------------------------------------------------------------------

    def want(self, channel_id: int, lanes: s.Lanes) -> None:
        """Open a lane on this channel, which leads to pages and has none yet."""
        channel = self._device.channels.channel(channel_id)
        now_s = self._loop.time()
        self._not_before_s = {r: at_s for r, at_s in self._not_before_s.items() if now_s < at_s}
        if channel is None or self._dialing.running or channel_id in self._not_before_s:
            return
        if len(self._lanes) == self._most:
            if now_s >= self._replace_not_before_s:
                self._replace_not_before_s = now_s + limits.LANE_PAUSE_S
                self._crowded = True
                lanes.shared[s.SWEEP] = 1
            return
        self._not_before_s[channel_id] = now_s + limits.LANE_PAUSE_S
        self._dialing.spawn(self._dial(channel, channel_id, lanes))

    async def _dial(self, channel: Laned, channel_id: int, lanes: s.Lanes) -> None:
        try:
            lane = await channel.lane()
        except SlackwaterError as error:
            _log.info("nbd.no-lane", reason=str(error))
            return
        with self._turn:
            if self._closed:
                lane.close()
                return
            i = next(number for number in itertools.count() if number not in self._lanes)
            self._lanes[i] = held = _Held(channel, lane, s.untouched(s.LANE_BYTES))
            at = held.buffer.ctypes.data
            compiled.install(self._device.table, lanes, i, channel_id, lane.fileno(), at)

    async def rest(self) -> None:
        """Nothing is being asked for any more; `close` came first."""
        await self._dialing.close()

    # In the connection's thread -------------------------------------------------------------------

    def sweep(self, lanes: s.Lanes) -> None:
        """Close those that are gone, and idle ones of channels that are over; where there are too
        few for all channels, the one that was used least."""
        lanes.shared[s.SWEEP] = 0
        with self._turn:
            for i, held in tuple(self._lanes.items()):
                words = lanes.words[i]
                if words[s.STATE] == s.GONE or (held.channel.closed and _idle(words)):
                    if words[s.VIOLATED]:
                        why = "an answer on a lane to what was not asked"
                        self._device.background.post(self._loop, held.channel.violated, why)
                    self._drop(i, words)
            if self._crowded:
                self._crowded = False
                if len(self._lanes) == self._most:
                    self._make_room(lanes)

    def _make_room(self, lanes: s.Lanes) -> None:
        """Drop the idle lane on which the fewest requests were sent since the last time."""
        sent = {i: int(lanes.words[i, s.TAIL]) for i in self._lanes}
        used = {i: count - self._lanes[i].sent_before for i, count in sent.items()}
        for i, held in self._lanes.items():
            held.sent_before = sent[i]
        idle = [i for i in self._lanes if _idle(lanes.words[i])]
        if idle:
            least = min(idle, key=used.__getitem__)
            self._drop(least, lanes.words[least])

    def _drop(self, i: int, words: NDArray[np.int64]) -> None:
        words[s.STATE], words[s.CHANNEL_ID] = s.NONE, 0
        self._lanes.pop(i).lane.close()

    def close(self) -> None:
        with self._turn:
            self._closed = True
            for held in self._lanes.values():
                held.lane.close()
            self._lanes.clear()
