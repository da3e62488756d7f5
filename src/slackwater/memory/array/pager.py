"""The pager of one array: brings pages in when they are touched, takes others out, prefetches.

All of it runs on one event loop, so a decision about a page is never interrupted. A page is
missing, resident, held (prefetched, the first of a window, kept here so that touching it tells the
prefetcher how far the program is) or coming. Resident pages are write-protected until somebody
writes, which makes them dirty. A dirty page goes out in this order:

    1. protect it: from here on a writer waits in the kernel;
    2. copy its bytes to `_waiting`, where reads find them;
    3. punch it out of the shared file: the next touch, the waiting writer's too, is a fault.

All three happen before the next fault is looked at, so no write falls between. One writer empties
`_waiting` into the store, in batches, one at a time: two writes of a page never overlap.
"""

import asyncio
import errno
import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from slackwater.common.base import limits
from slackwater.common.base.background import Background
from slackwater.common.base.errors import Retryable, SlackwaterError
from slackwater.common.native.hole_punch import punch
from slackwater.memory.array.residency import Residency
from slackwater.memory.array.userfault import Fault, Userfault
from slackwater.memory.pages.table import runs
from slackwater.memory.prefetch.prefetch import WINDOW_MAX, Leap
from slackwater.memory.store import PAGE_BYTES, PageStore

_EVICT: Final = 16
"""Pages that go at a time."""
_RETRY_S: Final = 0.1
_log = structlog.get_logger()
Bytes = NDArray[np.uint8]


class Pager:
    """`serve` until the program goes, alongside `background`: what makes it impossible to go on is
    told there."""

    def __init__(
        self,
        store: PageStore,
        faults: Userfault,
        memory_fd: int,
        memory: Bytes,
        cache_pages: int,
        window: int = WINDOW_MAX,
        patience_s: float = limits.ARRAY_STORE_S,
        *,
        background: Background,
    ) -> None:
        """`memory`: the pager's own view of the array's bytes, in the file `memory_fd`."""
        pages = len(memory) // PAGE_BYTES
        self._store = store
        self._faults = faults
        self._fd = memory_fd
        self._patience_s = patience_s
        self._memory = memory.reshape(pages, PAGE_BYTES)
        self.local = Residency(pages, cache_pages)
        self.leap = Leap(pages, window_max=window, unused_max=cache_pages // 2)
        self._stored = np.zeros(pages, np.bool_)
        """The store has bytes of it; else it is zeros."""
        self._held: dict[int, Bytes] = {}
        self._silent: dict[int, deque[int]] = {}
        """Thread -> prefetched pages put in place: touching them is not seen."""
        self._coming: dict[int, Fault | None] = {}
        """Page -> who touched it meanwhile."""
        self._waiting: OrderedDict[int, Bytes] = OrderedDict()
        self._flying: dict[int, Bytes] = {}
        self._starved: deque[Fault] = deque()
        """Faults for which no room could be made until the writer is further."""
        self._write = asyncio.Event()
        self._written = asyncio.Event()
        self._tasks = background.group()
        self._loop = asyncio.get_running_loop()
        self._background = background
        self._over = asyncio.Event()
        self.missed = 0
        """Faults that waited for the store."""
        self.touched = 0
        """All missing-page faults."""
        self.written_back = 0
        self.evicted = 0

    async def serve(self) -> None:
        """Return after `stop`."""
        self._loop.add_reader(self._faults.fd, self._background.guarded(self._on_faults))
        self._tasks.spawn(self._write_back())
        try:
            await self._over.wait()
        finally:
            self._loop.remove_reader(self._faults.fd)
            await self._tasks.close()

    def stop(self) -> None:
        self._over.set()

    # Faults ---------------------------------------------------------------------------------------

    def _on_faults(self) -> None:
        try:
            for fault in self._faults.faults():
                self._fault(fault)
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise
            self.stop()  # The program is gone.

    def _fault(self, fault: Fault) -> None:
        page = self._faults.page(fault)
        if page in self.local:
            if fault.protected:
                self.local.soil(page)
                self._faults.unprotect(page, 1)
            else:
                self._faults.wake(page, 1)
        elif fault.protected:  # It has gone meanwhile: touch it again.
            self._faults.wake(page, 1)
        else:
            self._missing(page, fault)

    def _missing(self, page: int, fault: Fault) -> None:
        if page in self._coming:
            self._coming[page] = fault
            self._late(page, fault)
            return
        if not self._room(1):
            self._starved.append(fault)
            return
        self.touched += 1
        found = self._held.pop(page, None)
        if found is None:
            found = self._kept(page)
        if found is not None:
            self._install(page, found, fault)
        elif not self._stored[page]:  # Its first touch: nothing had to be fetched.
            self._install(page, None, fault)
            return
        else:
            self._miss(page, fault)
        self._follow(page, fault.thread)

    def _late(self, page: int, fault: Fault) -> None:
        """It was prefetched too late: the thread waits for what is left of that."""
        self.touched += 1
        self.missed += 1
        self._follow(page, fault.thread)

    def _kept(self, page: int) -> Bytes | None:
        found = self._waiting.get(page)
        return self._flying.get(page) if found is None else found

    def _miss(self, page: int, fault: Fault) -> None:
        self.missed += 1
        data = np.empty((1, PAGE_BYTES), np.uint8)
        if self._store.read_now(np.array([page]), data.data.cast("B")):
            self._install(page, data[0], fault)
            return
        self._coming[page] = fault
        self._tasks.spawn(self._fetch([page], held=None))

    def _install(self, page: int, data: Bytes | None, fault: Fault) -> None:
        if data is None and fault.write:
            self._faults.zero(page)
        else:
            if data is None:
                data = _ZEROS
            self._faults.copy(page, 1, data.ctypes.data, protected=not fault.write)
        self.local.add(page, dirty=fault.write)

    # Prefetching ----------------------------------------------------------------------------------

    def _follow(self, page: int, thread: int) -> None:
        """Tell the prefetcher, and fetch what it answers."""
        silent = self._silent.setdefault(thread, deque(maxlen=2 * self.leap.window_max))
        if page == self.leap.trigger(thread) and self.leap.unused(page):
            # It has come to the first page of its newest window: it has passed those before.
            passed = [one for one in silent if self.leap.unused(one) and one != page]
            for one in passed:
                self.leap.access(thread, one)
            self.local.consume(passed)
            silent.clear()
        while len(self._silent) > self.leap.streams_max:
            del self._silent[next(iter(self._silent))]
        answer = self.leap.access(thread, page, self._unknown)
        if answer:
            self._bring(answer, thread)

    def _unknown(self, pages: Sequence[int]) -> Sequence[int]:
        return [page for page in pages if not self._known(page)]

    def _known(self, page: int) -> bool:
        return page in self.local or page in self._held or page in self._coming

    def _bring(self, pages: Sequence[int], thread: int) -> None:
        if self._tasks.running > limits.ARRAY_FETCHES or not self._room(len(pages)):
            self.leap.drop(pages)
            return
        silent = self._silent[thread]
        silent.extend(pages[1:])
        self._prefetch(pages, held=pages[0])

    def _prefetch(self, pages: Sequence[int], held: int | None) -> None:
        """Zeros and what is kept here come at once, the rest in a task."""
        far = []
        for page in pages:
            kept = self._kept(page)
            if kept is None and self._stored[page]:
                far.append(page)
            else:
                self._arrived(page, _ZEROS if kept is None else kept, held)
        if not far:
            return
        data = np.empty((len(far), PAGE_BYTES), np.uint8)
        order = np.array(sorted(far), np.int64)
        if self._store.read_now(order, data.data.cast("B")) == len(order):
            self._place(order, data, held)
            return
        self._coming.update(dict.fromkeys(far))
        self._tasks.spawn(self._fetch(far, held))

    def _place(self, order: NDArray[np.int64], data: Bytes, held: int | None) -> None:
        """Neighbours with one call. They are all missing."""
        for start, end in runs(order):
            while start < end and order[start] == held:
                self._arrived(int(order[start]), data[start], held)
                start += 1
            stop = start
            while stop < end and order[stop] != held:
                stop += 1
            if stop > start:
                first, count = int(order[start]), stop - start
                self._faults.copy(first, count, data[start].ctypes.data, protected=True)
                for page in range(first, first + count):
                    self.local.add(page, dirty=False)
            for i in range(stop, end):
                self._arrived(int(order[i]), data[i], held)

    def _arrived(self, page: int, data: Bytes, held: int | None) -> None:
        if page == held:
            self._hold(page, data.copy())
        else:
            self._faults.copy(page, 1, data.ctypes.data, protected=True)
            self.local.add(page, dirty=False)

    def _hold(self, page: int, data: Bytes) -> None:
        self._held[page] = data
        while len(self._held) > self.local.capacity // 8:
            self._let_go()

    def _let_go(self) -> None:
        """Let go of the page that is held longest."""
        page = next(iter(self._held))
        del self._held[page]
        self.leap.drop([page])

    def prefetch(self, first: int, count: int) -> int:
        """Bring a range, nearest first, as far as half of the cache; how many pages come."""
        wanted = [page for page in range(first, first + count) if not self._known(page)]
        wanted = wanted[: self.local.capacity // 2]
        for at in range(0, len(wanted), limits.ARRAY_BATCH_PAGES):
            batch = wanted[at : at + limits.ARRAY_BATCH_PAGES]
            if self._tasks.running > limits.ARRAY_FETCHES or not self._room(len(batch)):
                return at
            self._prefetch(batch, held=None)
        return len(wanted)

    async def _fetch(self, pages: Sequence[int], held: int | None) -> None:
        """The pages are in `_coming`. A failure ends in SIGBUS for who waits, not in a guess."""
        order = np.array(sorted(pages), np.int64)
        data = np.empty((len(order), PAGE_BYTES), np.uint8)
        try:
            await self._read(order, data)
        except (SlackwaterError, OSError) as error:
            self._give_up(order, error)
            return
        for i, page in enumerate(order.tolist()):
            fault = self._coming.pop(page)
            if fault is not None:
                self._install(page, data[i], fault)
            else:
                self._arrived(page, data[i], held)
        self._feed()

    async def _read(self, order: NDArray[np.int64], data: Bytes) -> None:
        end_s = self._loop.time() + self._patience_s
        while True:
            try:
                await self._store.read_pages(order, data.data.cast("B"))
                return
            except (Retryable, OSError):
                if self._loop.time() > end_s:
                    raise
            await asyncio.sleep(_RETRY_S)

    def _give_up(self, order: NDArray[np.int64], error: Exception) -> None:
        for page in order.tolist():
            if self._coming[page] is not None and len(order) > 1:
                self._tasks.spawn(self._fetch([page], held=None))  # It may be well, unlike another.
                continue
            fault = self._coming.pop(page)
            self.leap.drop([page])
            if fault is None:
                continue
            _log.error("page.lost", page=page, reason=str(error), hint="its reader gets SIGBUS")
            self._faults.poison(page)
            self._faults.wake(page, 1)

    # Room -----------------------------------------------------------------------------------------

    def _room(self, count: int) -> bool:
        """Take out so many that `count` may come; False: the writer must get further first."""
        more = count + len(self._held) + len(self._coming)
        excess = self.local.excess(more)
        if not excess:
            return True
        victims = self.local.victims(max(excess, _EVICT))
        dirty = [page for page in victims if self.local.dirty(page)]
        if len(self._waiting) + len(self._flying) + len(dirty) > limits.ARRAY_WRITING_PAGES:
            dirty = []
            victims = [page for page in victims if not self.local.dirty(page)]
        self._copy_out(dirty)
        for start, end in runs(order := np.array(sorted(victims), np.int64)):
            if start < end:
                punch(self._fd, int(order[start]) * PAGE_BYTES, (end - start) * PAGE_BYTES)
        for page in victims:
            self.local.remove(page)
        self.evicted += len(victims)
        self.leap.drop(victims)
        return not self.local.excess(more)

    def _copy_out(self, pages: Iterable[int]) -> None:
        """Under protection, to where the writer takes them from."""
        order = np.array(sorted(pages), np.int64)
        if not len(order):
            return
        for start, end in runs(order):
            self._faults.protect(int(order[start]), end - start)
        copied = self._memory[order]
        for i, page in enumerate(order.tolist()):
            self._waiting.pop(page, None)
            self._waiting[page] = copied[i]
            self._stored[page] = True
            self.local.clean(page)
        self._write.set()

    # Writing back ---------------------------------------------------------------------------------

    async def _write_back(self) -> None:
        while True:
            while not self._waiting:
                self._write.clear()
                await self._write.wait()
            count = min(len(self._waiting), limits.ARRAY_BATCH_PAGES)
            self._flying = dict(self._waiting.popitem(last=False) for _ in range(count))
            order = np.array(sorted(self._flying), np.int64)
            data = np.concatenate([self._flying[page] for page in order.tolist()])
            await self._put(order, data)
            self._flying = {}
            self.written_back += count
            self._written.set()
            self._feed()

    async def _put(self, order: NDArray[np.int64], data: Bytes) -> None:
        end_s = self._loop.time() + self._patience_s
        while True:
            try:
                await self._store.write_pages(order, data.data)
                return
            except (Retryable, OSError) as error:
                if self._loop.time() > end_s:
                    raise
                _log.warning("write-back.failed", pages=len(order), reason=str(error))
            await asyncio.sleep(_RETRY_S)

    def _feed(self) -> None:
        """There is room again."""
        starved, self._starved = self._starved, deque()
        for fault in starved:
            self._fault(fault)

    async def flush(self) -> None:
        """Return when all that was written before the call is in the store, durably."""
        dirty = self.local.dirty_pages()
        for at in range(0, len(dirty), limits.ARRAY_BATCH_PAGES):
            while (
                len(self._waiting) + len(self._flying)
                > limits.ARRAY_WRITING_PAGES - limits.ARRAY_BATCH_PAGES
            ):
                await self._progress()
            batch = dirty[at : at + limits.ARRAY_BATCH_PAGES]
            self._copy_out(page for page in batch if self.local.dirty(page))
        while self._waiting or self._flying:
            await self._progress()
        await self._store.flush()

    async def _progress(self) -> None:
        self._written.clear()
        await self._written.wait()

    def figures(self) -> dict[str, int]:
        counted = self.leap.counters
        return {
            "faults": self.touched,
            "missed": self.missed,
            "accesses": counted.accesses,
            "hits": counted.hits,
            "prefetched": counted.prefetched,
            "dropped": counted.dropped,
            "resident": len(self.local),
            "evicted": self.evicted,
            "written_back": self.written_back,
        }


_ZEROS: Final = np.zeros(PAGE_BYTES, np.uint8)
assert os.sysconf("SC_PAGESIZE") == PAGE_BYTES, "arrays need pages of 4096 bytes"
