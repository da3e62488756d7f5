"""A device: the PageStore over page table, backup file and remote slabs.

The kernels do what needs no waiting; here is the rest: pages that must come from the disk or over
a channel, writes that count only once they are somewhere else, spans that come and go. All of it
runs on one event loop. `admit`, `suspend` and `retire` are called by the driver (lenders.py); when
they return, the table says so to every thread.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from slackwater.common.base.background import Background
from slackwater.common.base.errors import AccessRefused, Rejected, SlackwaterError, Unavailable
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import states
from slackwater.memory.pages.backup import Backup
from slackwater.memory.pages.channel_table import ChannelTable
from slackwater.memory.pages.latency import Latencies
from slackwater.memory.pages.remote import RemoteSlab
from slackwater.memory.pages.table import Where
from slackwater.memory.store import PAGE_BYTES, Pages, PagesLost, Resilience

_ATTEMPTS_MAX: Final = 8
"""Places a read is sent to before it gives up: each time the slab it was sent to went away."""
_log = structlog.get_logger()
_Read = Callable[[Pages, memoryview], Awaitable[None]]


class Device:
    def __init__(
        self,
        table: k.Table,
        backup: Backup,
        resilience: Resilience,
        background: Background,
    ) -> None:
        self.background = background
        self.table = table
        self.backup = backup
        self.resilience = resilience
        self.on_fenced: Callable[[int], None] | None = None
        """Told, with the span, that its slab was taken away under a copy."""
        self.on_failed: Callable[[int], None] | None = None
        """Told, with the span, that a request on its channel failed."""
        self.remote_read_pages = 0
        """Pages read over channels, those that were read ahead among them."""
        self.remote_ahead_pages = 0
        self.remote_written_pages = 0
        self.channels = ChannelTable()
        self.latency = Latencies()
        self._span_pages = int(table.words[k.SPAN_PAGES])
        self._members: dict[int, list[RemoteSlab | None]] = {}
        self._flying: dict[int, Counter[int]] = {}
        """Span -> requests on a channel, by the list of members that they use."""
        self._landed: dict[int, list[asyncio.Future[None]]] = {}

    @property
    def page_count(self) -> int:
        return int(self.table.words[k.PAGES])

    # Reads ----------------------------------------------------------------------------------------

    def read_now(self, pages: Pages, target: memoryview) -> int:
        where = np.empty(len(pages), np.int64)
        if not k.read_pages(self.table, pages, k.address(target), where, True):
            return len(pages)
        return int(np.flatnonzero(where)[0])

    async def read_pages(self, pages: Pages, target: memoryview) -> None:
        await self.read_from(pages, target)

    async def read_from(self, pages: Pages, target: memoryview) -> int:
        """Read pages. Return the farthest place that they came from: k.DISK, k.REMOTE or k.DONE."""
        where = np.empty(len(pages), np.int64)
        if not k.read_pages(self.table, pages, k.address(target), where, True):
            return k.DONE
        place = k.REMOTE
        for _ in range(_ATTEMPTS_MAX):
            missing = np.flatnonzero(where)
            if not len(missing):
                return place
            if (where == k.DISK).any():
                place = k.DISK
            await self._fetch(pages, target, where, missing)
            missing = np.flatnonzero(where)
            self._look_again(pages, target, where, missing)
        raise Unavailable("the slabs behind these pages keep going away; try again")

    async def read_ahead(self, pages: Pages, target: memoryview) -> NDArray[np.bool_]:
        """Read these pages, which remote memory alone has, and mark those that came; the others
        were not looked for anywhere else, and not waited for. Raises OSError, Rejected."""
        where = np.full(len(pages), k.REMOTE, np.int64)
        await self._fetch(pages, target, where, np.arange(len(pages)))
        came: NDArray[np.bool_] = where == k.DONE
        self.remote_ahead_pages += int(np.count_nonzero(came))
        return came

    def _look_again(self, pages: Pages, target: memoryview, where: Where, missing: Pages) -> None:
        """Look again for pages that are missing: they may be at hand by now, or somewhere else."""
        one = np.empty(1, np.int64)
        at = k.address(target)
        for i in missing.tolist():
            k.read_pages(self.table, pages[i : i + 1], at + i * PAGE_BYTES, one, False)
            where[i] = one[0]

    async def _fetch(self, pages: Pages, target: memoryview, where: Where, missing: Pages) -> None:
        """Try once for every page that is missing; `where` is DONE for those that came."""
        if (where == k.OUTSIDE).any():
            raise Rejected(f"a page outside the device, which has {self.page_count}")
        for span in set((pages[where == k.BROKEN] // self._span_pages).tolist()):
            self.fenced(span)
        work = []
        disk = np.flatnonzero(where == k.DISK)
        if len(disk):
            work.append(self._from_disk(pages, target, where, disk))
        remote = np.flatnonzero(where == k.REMOTE)
        spans = pages[remote] // self._span_pages
        work += [
            self._from_span(span, pages, target, where, remote[spans == span])
            for span in sorted(set(spans.tolist()))
        ]
        if len(work) == 1:
            await work[0]
        elif work:
            await asyncio.gather(*work)

    async def _from_disk(
        self, pages: Pages, target: memoryview, where: Where, chosen: Pages
    ) -> None:
        await self._scattered(self.backup.read, pages[chosen], target, chosen)
        where[chosen] = k.DONE

    async def _from_span(
        self, span: int, pages: Pages, target: memoryview, where: Where, chosen: Pages
    ) -> None:
        """A span whose slab fails is suspended at once: the next look finds the page elsewhere."""
        members = self._members.get(span)
        if members is None:
            return

        async def read(wanted: Pages, part: memoryview) -> None:
            await self.resilience.read(span, members, wanted - span * self._span_pages, part)

        self._begin(span, members)
        try:
            await self._scattered(read, pages[chosen], target, chosen)
        except PagesLost as error:
            if len(error.pages):
                _log.error("pages.lost", span=span, count=len(error.pages), reason=str(error))
                k.forget_pages(self.table, error.pages + span * self._span_pages)
            return
        except (Unavailable, AccessRefused) as error:
            self._fail(span, members, error)
            return
        finally:
            self._settle(span, members)
        where[chosen] = k.DONE
        self.remote_read_pages += len(chosen)

    @staticmethod
    async def _scattered(read: _Read, wanted: Pages, target: memoryview, chosen: Pages) -> None:
        """Read into the chosen places of `target`; through a buffer where they are not one run."""
        first, count = int(chosen[0]), len(chosen)
        if int(chosen[-1]) - first + 1 == count:
            await read(wanted, target[first * PAGE_BYTES : (first + count) * PAGE_BYTES])
            return
        buffer = np.empty((count, PAGE_BYTES), np.uint8)
        await read(wanted, buffer.data.cast("B"))
        np.frombuffer(target, np.uint8).reshape(-1, PAGE_BYTES)[chosen] = buffer

    # Writes ---------------------------------------------------------------------------------------

    async def write_pages(self, pages: Pages, source: memoryview) -> None:
        kinds = np.empty(len(pages), np.int64)
        first = await self._enqueue(pages, source, kinds)
        if kinds.any():
            await self.land(first, len(pages))

    async def write_if(self, pages: Pages, source: memoryview, span: int, version: int) -> bool:
        """Write, unless somebody wrote the span after it had this version."""
        kinds = np.empty(len(pages), np.int64)
        first = await self._enqueue(pages, source, kinds, span, version)
        if first < 0:
            return False
        if kinds.any():
            await self.land(first, len(pages))
        return True

    async def _enqueue(
        self, pages: Pages, source: memoryview, kinds: Where, span: int = 0, version: int = -1
    ) -> int:
        """Into the ring, as soon as it has room: the first entry; -4: the version is another."""
        at = k.address(source)
        if len(pages) > self.table.words[k.SLOTS] // 2:
            raise Rejected(
                f"{len(pages)} pages in one write, at most {self.table.words[k.SLOTS] // 2} fit"
            )
        kept = source
        while True:
            first: int = k.write_pages(self.table, pages, at, kinds, span, version)
            if first >= 0 or first == -4:
                return first
            if first == -3:
                raise Rejected(f"a page outside the device, which has {self.page_count}")
            if first == -2:
                raise self.backup.error()
            if kept is source:  # The caller may reuse its buffer while we wait.
                kept = memoryview(bytes(source))
                at = k.address(kept)
            await self.backup.room()

    async def land(self, first: int, count: int) -> None:
        """Return when these entries count: in remote memory, or else in the file. Raises OSError.

        A write that has begun on a channel is never given up halfway: it could land after a later
        one. So a cancelled caller leaves it to itself.
        """
        kinds = np.empty(count, np.int64)
        k.look(self.table, first, kinds)
        disk = np.flatnonzero(kinds == k.DISK)
        last = first + int(disk[-1]) if len(disk) else -1
        held = first + np.flatnonzero(kinds == k.REMOTE)
        if len(held):
            sending = self.background.spawn(self._send(held))
            last = max(last, await asyncio.shield(sending))
        if last >= 0:
            await self.backup.written(last)

    async def _send(self, entries: Pages) -> int:
        """Over the channels of their spans; the last entry that did not arrive, or -1."""
        table = self.table
        pages = table.slot_page[entries % table.words[k.SLOTS]]
        spans = pages // self._span_pages
        arrived = np.zeros(len(entries), np.bool_)

        async def one(span: int) -> None:
            chosen = np.flatnonzero(spans == span)
            if await self._send_span(span, entries[chosen], pages[chosen]):
                arrived[chosen] = True

        different = sorted(set(spans.tolist()))
        if len(different) == 1:
            await one(different[0])
        else:
            await asyncio.gather(*(one(span) for span in different))
        late = entries[~arrived]
        return int(late[-1]) if len(late) else -1

    async def _send_span(self, span: int, entries: Pages, pages: Pages) -> bool:
        """Whether enough members have them. Held they stay until every member has answered."""
        members = self._members.get(span)
        if members is None:
            self._land(entries, arrived=False)
            return False
        slots = entries % self.table.words[k.SLOTS]
        ring = self.table.ring.data
        start, count = int(slots[0]), len(slots)
        if int(slots[-1]) - start + 1 == count:
            source = ring[start * PAGE_BYTES : (start + count) * PAGE_BYTES]
        else:  # Around the ring's end, or with other spans' entries in between.
            ordered = np.ascontiguousarray(self.table.ring.reshape(-1, PAGE_BYTES)[slots])
            source = ordered.reshape(-1).data
        inside = pages - span * self._span_pages
        arrived = False
        self._begin(span, members)
        try:
            await self.resilience.write(span, members, inside, source)
            arrived = True
        except PagesLost as error:
            _log.warning("pages.not-taken", span=span, count=count, reason=str(error))
        except (Unavailable, AccessRefused) as error:
            self._fail(span, members, error)
        finally:
            if self.resilience.width == 1:
                self._land(entries, arrived=arrived)
                self._settle(span, members)
            else:
                self.background.spawn(self._hold(span, members, inside, entries, arrived=arrived))
        self.remote_written_pages += count * arrived
        return arrived

    async def _hold(
        self,
        span: int,
        members: Sequence[RemoteSlab | None],
        inside: Pages,
        entries: Pages,
        *,
        arrived: bool,
    ) -> None:
        try:
            await self.resilience.settled(span, inside)
        finally:
            self._land(entries, arrived=arrived)
            self._settle(span, members)

    def _land(self, entries: Pages, *, arrived: bool) -> None:
        k.landed(self.table, entries, np.full(len(entries), arrived))
        self.backup.settle_soon()

    async def discard(self, first: int, count: int) -> None:
        if first < 0 or count < 1 or first + count > self.page_count:
            raise Rejected(f"pages [{first}, {first + count}) of a device of {self.page_count}")
        while True:
            entry: int = k.discard(self.table, first, count)
            if entry >= 0:
                await self.backup.written(entry)
                return
            if entry == -2:
                raise self.backup.error()
            await self.backup.room()

    async def allocated(self, first: int, count: int) -> NDArray[np.bool_]:
        """By page, from `first` on, as far as the file was looked at: it was written, and not let
        go since. Raises OSError."""
        pages = slice(first, first + count)
        # Look at waiting entries before the disk: an entry that gets there in between is in both.
        marks = self.table.mark[pages]
        here = self.table.pending[pages] != 0
        here |= ~np.isin(marks, (states.ABSENT, states.FILLING))
        stored = await self.backup.allocated(first, count)
        stored |= here[: len(stored)]
        return stored

    async def flush(self) -> None:
        head = int(self.table.words[k.HEAD])
        if head:
            await self.backup.written(head - 1)
        await self.backup.sync()

    def version(self, page: int) -> tuple[int, int]:
        """(span, its version) of a page: for `write_if`."""
        span = page // self._span_pages
        return span, int(self.table.version[span])

    # Spans come and go ----------------------------------------------------------------------------

    def admit(self, span: int, index: int, slab: RemoteSlab) -> None:
        """From now on this slab backs the span, alone or beside others."""
        members = self._members.get(span, [None] * self.resilience.width)
        members = [*members[:index], slab, *members[index + 1 :]]
        self._members[span] = members
        if sum(member is not None for member in members) >= self.resilience.needed:
            mapped = slab.mapped is not None and self.resilience.width == 1
            base = slab.address if mapped else 0
            k.map_span(self.table, span, base, base + slab.nbytes if mapped else 0, slab.fence)
            if self.resilience.width == 1 and (laned := slab.laned) is not None:
                channel, handle = laned
                k.set_lane_target(self.table, span, self.channels.id_of(channel), handle)

    def suspend(self, span: int, index: int) -> None:
        """The lender is away: the bits stay, the slab is not used."""
        self._drop(span, index, states.SUSPENDED)

    def leave(self, span: int, index: int) -> None:
        """The slab is no longer the span's: nothing new goes there from here on. Its memory may be
        unmapped only after this, or a thread would find it gone."""
        self._drop(span, index, states.UNMAPPED)

    async def retire(self, span: int, index: int) -> None:
        """Leave like `leave`, and return when nothing reads or writes the slab any more."""
        self._drop(span, index, states.UNMAPPED)
        await self.quiet(span)

    def _drop(self, span: int, index: int, state: int) -> None:
        members = self._members.get(span)
        if members is not None:
            members = [*members[:index], None, *members[index + 1 :]]
            self._members[span] = members
        left = sum(member is not None for member in members or ())
        if left < self.resilience.needed:
            k.leave_span(self.table, span, state)
            if state == states.UNMAPPED:
                self.resilience.forget(span)
        if not left:
            self._members.pop(span, None)

    def members(self, span: int) -> Sequence[RemoteSlab | None]:
        return self._members.get(span, ())

    def member(self, span: int, index: int) -> RemoteSlab | None:
        members = self._members.get(span)
        return None if members is None else members[index]

    def written(self, span: int) -> Pages:
        """Pages of the span, from its start, that a new member may lack."""
        return self.resilience.written(span)

    async def regenerate(self, span: int, index: int, pages: Pages) -> int:
        """Give a new member what it lacks; how many pages. Raises Unavailable, AccessRefused."""
        members = self._members.get(span)
        if members is None or self.member(span, index) is None:
            raise Unavailable(f"member {index} of span {span} is gone")
        self._begin(span, members)
        try:
            return await self.resilience.regenerate(span, members, index, pages)
        finally:
            self._settle(span, members)

    async def quiet(self, span: int) -> None:
        """Returns when nothing of this span is on a channel to members that it no longer has."""
        old = set(self._flying.get(span, ())) - {id(self._members.get(span))}
        while old & set(self._flying.get(span, ())):
            done = asyncio.get_running_loop().create_future()
            self._landed.setdefault(span, []).append(done)
            await done
        await self.resilience.quiet(span)

    def fenced(self, span: int) -> None:
        """Its slab was taken away: nothing in it is ours any more."""
        k.leave_span(self.table, span, states.UNMAPPED)
        if self.on_fenced is not None:
            self.on_fenced(span)

    def _fail(
        self, span: int, members: Sequence[RemoteSlab | None], error: SlackwaterError
    ) -> None:
        """A request on a channel failed. A refusal says that the slab is gone; else the channel
        ends, and the driver sees whether the lender comes back."""
        if self._members.get(span) is not members:
            return
        if isinstance(error, AccessRefused):
            self.fenced(span)
            return
        k.leave_span(self.table, span, states.SUSPENDED)
        if self.on_failed is not None:
            self.on_failed(span)

    async def lane_failed(self, channel_id: int, first: int, count: int, *, refused: bool) -> None:
        """A lane did not acknowledge these entries, pages of one span. Unless they were refused,
        they may still land: the channel ends, and with it all that is on its way. Returns when they
        count. Raises OSError."""
        entries = np.arange(first, first + count)
        span = int(self.table.slot_page[first % self.table.words[k.SLOTS]]) // self._span_pages
        members = self._members.get(span)
        if members is not None and self.table.channel_id[span] == channel_id:
            why = "the slab was taken back" if refused else "a lane broke under a write"
            self._fail(span, members, AccessRefused(why) if refused else Unavailable(why))
        self._land(entries, arrived=False)
        await self.backup.written(first + count - 1)

    def _begin(self, span: int, members: Sequence[RemoteSlab | None]) -> None:
        """A request is on its way to these members, and keeps their list alive until `_settle`."""
        self._flying.setdefault(span, Counter())[id(members)] += 1

    def _settle(self, span: int, members: Sequence[RemoteSlab | None]) -> None:
        flying = self._flying[span]
        flying[id(members)] -= 1
        if flying[id(members)]:
            return
        del flying[id(members)]
        if not flying:
            del self._flying[span]
        for done in self._landed.pop(span, ()):
            if not done.done():
                done.set_result(None)

    # For operators --------------------------------------------------------------------------------

    def present_pages(self, span: int) -> int:
        return int(k.count_present(self.table, span))

    @property
    def mapped_spans(self) -> int:
        return int(np.count_nonzero(self.table.state == states.MAPPED))

    @property
    def backup_waiting_pages(self) -> int:
        return self.backup.waiting_pages
