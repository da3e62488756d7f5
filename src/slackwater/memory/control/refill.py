"""A slab that is new to its span is filled from the backup, in the background, within a cap.

In the paper (Gu, dissertation, 2.4.4, 2.4.5) pages of a slab that was evicted or lost are read from
the disk until they are written again, however soon the span is mapped anew. Here what the file has
comes back by itself: in stretches, so that even a slow disk does it in a few operations, while
reads and writes go on (refill_kernels.py says why that is safe). One batch at a time for the whole
device.
"""

import asyncio
from typing import Final

import numpy as np
import structlog

from slackwater.common.base import limits
from slackwater.common.base.clock import Clock
from slackwater.common.transport.pacing import Bandwidth
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import refill_kernels, states
from slackwater.memory.pages.device import Device
from slackwater.memory.pages.table import page_range, runs
from slackwater.memory.store import PAGE_BYTES, Pages

_log = structlog.get_logger()
_PAUSE_S: Final = 1e-3
"""Between batches, at least: the device's own I/O goes first."""


class Refiller:
    """`refilled_pages` counts those that were given to remote memory again."""

    def __init__(self, device: Device, clock: Clock, bandwidth: Bandwidth) -> None:
        self.refilled_pages = 0
        self._device = device
        self._clock = clock
        self._bandwidth = bandwidth
        self._turn = asyncio.Lock()

    async def run(self, span: int) -> None:
        """Bring back what the file has of a span that was just mapped, as long as it is."""
        device = self._device
        first = span * int(device.table.words[k.SPAN_PAGES])
        last = min(first + int(device.table.words[k.SPAN_PAGES]), device.page_count)
        before = self.refilled_pages
        async with self._turn:
            try:
                while first < last and device.table.state[span] == states.MAPPED:
                    first += await self._stretches(first, last - first)
            except OSError as error:
                _log.warning("refill.ended", span=span, reason=str(error))
        count = self.refilled_pages - before
        if count:
            _log.info("refilled", span=span, pages=count)

    async def _stretches(self, first: int, count: int) -> int:
        """Return how many pages of the file were looked at."""
        lacking = self._device.table.mark[first : first + count] == states.ABSENT
        if not lacking.any():
            return count
        await self._device.backup.written(int(self._device.table.words[k.HEAD]) - 1)
        stored = await self._device.backup.allocated(first, count)
        wanted: Pages = first + np.flatnonzero(stored & lacking[: len(stored)])
        for start, end in runs(wanted):
            for at in range(start, end, limits.REFILL_PAGES):
                await self._batch(int(wanted[at]), min(end - at, limits.REFILL_PAGES))
        return len(stored)

    async def _batch(self, first: int, count: int) -> None:
        device = self._device
        marked, entries = refill_kernels.mark(device.table, first, count)
        if not marked:
            return
        data = np.empty(count * PAGE_BYTES, np.uint8)
        came = False
        try:
            await device.backup.written(entries - 1)
            await device.backup.read(page_range(first, count), data.data)
            came = True
        finally:
            done, entry, sent = refill_kernels.store(
                device.table, first, count, k.address(data), came
            )
        if sent:
            await device.land(entry, sent)
        self.refilled_pages += done + sent
        now_s = self._clock.now_s()
        due_s = self._bandwidth.spend(count * PAGE_BYTES, now_s)
        await self._clock.sleep_until(max(due_s, now_s + _PAUSE_S))
