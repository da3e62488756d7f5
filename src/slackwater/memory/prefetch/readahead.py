"""Leap in front of a device: what its clients read is followed, and the next pages are fetched.

What clients read is split into streams by address (streams.py), each with a history of its own
(prefetch.py decides). Requests are noted by whoever parses
them, mostly compiled code; the notes are read here, when a request had to wait anyway, or when a
client came to the first page of the newest window. Prefetched pages lie in the table's cache, where
compiled code finds them: a page that was fetched in time is answered without the interpreter.

Only pages behind a channel are fetched. Mapped memory (shm) costs no more than the cache would, the
disk's own pages the kernel reads ahead; a device that has nothing else is left as it is.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from slackwater.common.base import limits
from slackwater.common.base.errors import SlackwaterError
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import latency, prefetch_cache, prefetch_kernels, states, streams
from slackwater.memory.pages.device import Device
from slackwater.memory.prefetch.prefetch import WINDOW_MAX, Leap
from slackwater.memory.store import PAGE_BYTES, Pages

_log = structlog.get_logger()
_CAUSES: Final = {k.DONE: latency.HIT, k.REMOTE: latency.LENDER, k.DISK: latency.DISK}
_Places = NDArray[np.int64]


class ReadAhead:
    """All on the device's loop. Without places in its table it does nothing."""

    def __init__(self, device: Device, window: int = WINDOW_MAX) -> None:
        self._device = device
        self._table = device.table
        places = int(self._table.prefetched.words[prefetch_cache.PLACES])
        self._leap = Leap(device.page_count, window_max=window, unused_max=max(1, places // 2))
        self._notes = np.zeros((prefetch_cache.NOTES, prefetch_cache.NOTE_WORDS), np.int64)
        self._coming: dict[int, asyncio.Task[None]] = {}
        """Page -> what brings it."""
        self._fetches = device.background.group()
        self._due = False
        self._bell: int | None = None
        self.late_pages = 0
        """That a client waited for while they were on their way."""

    def start(self) -> None:
        """Compiled code may ring from now on."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._table.prefetched.words[prefetch_cache.BELL] = self._bell
        rung = self._device.background.guarded(self._rung)
        asyncio.get_running_loop().add_reader(self._bell, rung)

    async def close(self) -> None:
        """No client is there any more."""
        if self._bell is not None:
            asyncio.get_running_loop().remove_reader(self._bell)
            self._table.prefetched.words[prefetch_cache.BELL] = -1
            os.close(self._bell)
        await self._fetches.ended()

    # Reads ----------------------------------------------------------------------------------------

    def coming(self, first: int, count: int) -> bool:
        """Some of these pages are on their way."""
        if not self._coming:
            return False
        return any(page in self._coming for page in range(first, first + count))

    async def read_pages(self, pages: Pages, target: memoryview) -> int:
        """Read pages without asking twice for those that are on their way. Return what it waited
        for: a cause (latency.py)."""
        late = [page for page in pages.tolist() if page in self._coming] if self._coming else []
        if late:
            self.late_pages += len(late)
            await asyncio.wait({self._coming[page] for page in late})
        place = await self._device.read_from(pages, target)
        return latency.LATE if late and place == k.DONE else _CAUSES[place]

    # Prefetching ----------------------------------------------------------------------------------

    def look_soon(self) -> None:
        """Requests are being served that had to wait; what is fetched ahead goes behind them."""
        if not self._due and self._table.prefetched.words[prefetch_cache.NOTED]:
            self._due = True
            asyncio.get_running_loop().call_soon(self._device.background.guarded(self.look))

    def _rung(self) -> None:
        assert self._bell is not None
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self.look()

    def look(self) -> None:
        """Take the notes. Requests of one stream that came together are one decision."""
        self._due = False
        count = prefetch_kernels.take_notes(self._table, self._notes)
        due: dict[int, int] = {}
        for stream, page, pages in self._notes[:count].tolist():
            if stream == prefetch_cache.DROPPED:
                self._leap.drop([page])
            elif pages == 0:
                self._leap.recall(stream, page)
            elif stream == streams.NOBODY:
                self._leap.log(None, page)
            elif self._leap.log(stream, page) or stream in due:
                due[stream] = pages
        for stream, pages in due.items():
            self._bring(self._leap.decide(stream, self._far), pages)

    def _far(self, pages: Sequence[int]) -> Sequence[int]:
        """A first look, without the mutex; `reserve` decides."""
        if not pages:
            return ()
        table, asked = self._table, np.array(pages, np.int64)
        spans = asked // table.words[k.SPAN_PAGES]
        far = (table.mark[asked] == states.PRESENT) & (table.pending[asked] == 0)
        far &= (table.state[spans] == states.MAPPED) & (table.base[spans] == 0)
        return [int(page) for page in asked[far]]

    def _bring(self, chosen: Sequence[int], length: int) -> None:
        """Requests of `length` pages will begin at the chosen ones."""
        if not chosen:
            return
        if self._fetches.running >= limits.AHEAD_FETCHES:
            self._leap.drop(chosen)
            return
        end = self._device.page_count
        wanted = dict.fromkeys(p for one in chosen for p in range(one, min(one + length, end)))
        pages = np.fromiter(wanted, np.int64, len(wanted))
        places, tickets = np.zeros_like(pages), np.zeros_like(pages)
        prefetch_kernels.reserve(self._table, pages, places, tickets)
        got = tickets != 0
        reserved = set(pages[got].tolist())
        self._leap.drop(page for page in chosen if page not in reserved)
        if not reserved:
            return
        order = np.flatnonzero(got)[np.argsort(pages[got])]
        work = self._fetch(pages[order], places[order], tickets[order])
        task = self._fetches.spawn(work)
        self._coming.update(dict.fromkeys(reserved, task))

    async def _fetch(self, pages: Pages, places: _Places, tickets: _Places) -> None:
        buffer = np.empty(len(pages) * PAGE_BYTES, np.uint8)
        came = np.zeros(len(pages), np.bool_)
        try:
            came = await self._device.read_ahead(pages, buffer.data)
        # A read that asks for them reports it, with more detail.
        except (OSError, SlackwaterError) as error:
            _log.debug("ahead.failed", pages=len(pages), reason=str(error))
        finally:
            prefetch_kernels.store(self._table, places, tickets, buffer.ctypes.data, came)
            task = asyncio.current_task()
            assert task is not None
            for page in pages.tolist():  # One that was changed meanwhile may be another's by now.
                if self._coming.get(page) is task:
                    del self._coming[page]
            self._leap.drop(pages[~came].tolist())
