"""The lanes of one NBD connection as the program sees them: asked for, installed, closed."""

import asyncio
import threading

import structlog

from slackwater.common import limits
from slackwater.common.errors import SlackwaterError
from slackwater.common.transport.base import Lane, Laned
from slackwater.memory.device import Device
from slackwater.memory.nbd import lanes as compiled
from slackwater.memory.nbd import state as s

_log = structlog.get_logger()


class LaneSet:
    """Made on the event loop. `sweep` and `close` are the connection's thread's, while the compiled
    loop is not running; the rest is the event loop's."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[int, tuple[Laned, Lane]] = {}
        """By its number in the connection's state."""
        self._not_before_s: dict[int, float] = {}
        """By road: another try."""
        self._dialing: set[asyncio.Task[None]] = set()
        self._turn = threading.Lock()
        self._closed = False

    # On the event loop ----------------------------------------------------------------------------

    def want(self, road: int, lanes: s.Lanes) -> None:
        """Pages lie at the end of this road, and no lane leads there yet."""
        channel = self._device.roads.channel(road)
        now_s = self._loop.time()
        self._not_before_s = {r: at_s for r, at_s in self._not_before_s.items() if now_s < at_s}
        if channel is None or self._dialing or road in self._not_before_s:
            return
        self._not_before_s[road] = now_s + limits.LANE_PAUSE_S
        if len(self._lanes) == s.LANES:
            lanes.shared[s.SWEEP] = 1
            return
        task = self._loop.create_task(self._dial(channel, road, lanes))
        self._dialing.add(task)
        task.add_done_callback(self._dialing.discard)

    async def _dial(self, channel: Laned, road: int, lanes: s.Lanes) -> None:
        try:
            lane = await channel.lane()
        except SlackwaterError as error:
            _log.info("nbd.no-lane", reason=str(error))
            return
        with self._turn:
            free = [i for i in range(s.LANES) if i not in self._lanes]
            if self._closed or not free:
                lane.close()
                return
            self._lanes[free[0]] = channel, lane
            compiled.install(self._device.table, lanes, free[0], road, lane.fileno())

    async def rest(self) -> None:
        """Nothing is being asked for any more; `close` came first."""
        for task in tuple(self._dialing):
            task.cancel()
        await asyncio.gather(*self._dialing, return_exceptions=True)

    # In the connection's thread -------------------------------------------------------------------

    def sweep(self, lanes: s.Lanes) -> None:
        """Close those that are gone, and idle ones of channels that are over."""
        lanes.shared[s.SWEEP] = 0
        with self._turn:
            for i, (channel, lane) in tuple(self._lanes.items()):
                words = lanes.words[i]
                idle = words[s.HEAD] == words[s.TAIL]
                if words[s.STATE] == s.GONE or (channel.closed and idle):
                    if words[s.VIOLATED]:
                        why = "an answer on a lane to what was not asked"
                        self._loop.call_soon_threadsafe(channel.violated, why)
                    words[s.STATE], words[s.ROAD] = s.NONE, 0
                    lane.close()
                    del self._lanes[i]

    def close(self) -> None:
        with self._turn:
            self._closed = True
            for _, lane in self._lanes.values():
                lane.close()
            self._lanes.clear()
