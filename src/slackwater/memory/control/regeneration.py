"""Lost redundancy is put back in the background, no faster than a cap.

Hydra (FAST'22), section 4.4: a slab that was lost is made again on another lender out of the k + r
- 1 that are left, while reads and writes go on. The member is in use for new writes from the moment
that it is there; what was written before comes page by page. A member that was only away for a
while is given what it missed. One at a time, so that the cap holds for the device.
"""

import asyncio
from typing import Final

import structlog

from slackwater.common.base import limits
from slackwater.common.base.clock import Clock
from slackwater.common.base.errors import AccessRefused, Unavailable
from slackwater.common.transport.pacing import Bandwidth
from slackwater.memory.pages.device import Device
from slackwater.memory.store import PAGE_BYTES

_log = structlog.get_logger()
_PAUSE_S: Final = 1e-3
"""Between batches, at least: the device's own I/O goes first."""


class Regenerator:
    """`regenerated_pages` counts fragments given to members that lacked them."""

    def __init__(self, device: Device, clock: Clock, bandwidth: Bandwidth) -> None:
        self.regenerated_pages = 0
        self._device = device
        self._clock = clock
        self._bandwidth = bandwidth
        self._turn = asyncio.Lock()

    async def run(self, span: int, index: int) -> bool:
        """Give this member of the span what it lacks, for as long as it stays. Return whether it
        has all."""
        slab = self._device.member(span, index)
        async with self._turn:
            before = self.regenerated_pages
            pages = self._device.written(span)
            for start in range(0, len(pages), limits.REGENERATION_PAGES):
                if slab is None or self._device.member(span, index) is not slab:
                    return False
                part = pages[start : start + limits.REGENERATION_PAGES]
                try:
                    given = await self._device.regenerate(span, index, part)
                except (Unavailable, AccessRefused) as error:
                    _log.warning("regeneration.ended", span=span, member=index, reason=str(error))
                    return False
                self.regenerated_pages += given
                now_s = self._clock.now_s()
                next_s = self._bandwidth.spend(given * PAGE_BYTES, now_s)
                await self._clock.sleep_until(max(next_s, now_s + _PAUSE_S))
        count = self.regenerated_pages - before
        if count:
            _log.info("regenerated", span=span, member=index, pages=count)
        return slab is not None and self._device.member(span, index) is slab
