"""The handling of pages, compiled: where a read finds its bytes, what a write leaves behind.

All threads that touch pages (a connection's, the backup writer's, the event loop's) meet here under
the table's mutex; none of them holds the interpreter lock meanwhile. Gu, dissertation, 2.4.3: a
write goes to remote memory and, in a held buffer, to the disk queue; a read goes to remote memory
if the page's bit is set, else to disk; here it looks at the held buffers before the disk, which is
what the paper's one disk queue per slab gives: a read behind a write sees it.

states.py has the states of a page and what leads from one to another.

A FLYING page that is written again becomes STALE and goes to disk alone: two writes of one page
over a channel could arrive in either order.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.native import libc
from slackwater.common.native.compiled import kernel, njit
from slackwater.memory.pages import prefetch_cache, states
from slackwater.memory.pages.states import (
    ABSENT,
    DISCARD,
    FILLING,
    FLYING,
    HELD,
    MAPPED,
    NO_BACKUP,
    PRESENT,
    STALE,
    UNMAPPED,
    WRITTEN,
)
from slackwater.memory.store import PAGE_BYTES

# Where a page of a read was found (or must be fetched from)
DONE: Final = 0
DISK: Final = 1
REMOTE: Final = 2
BROKEN: Final = 3  # its slab was fenced off: the span is lost
OUTSIDE: Final = 4

# Words of the table
HEAD: Final = 0  # entries ever appended to the ring
TAIL: Final = 1  # entries of the ring that were released
TAKEN: Final = 2  # entries of the ring that are on disk
FAILED: Final = 3  # errno of the backup file; writes are refused with it
STOP: Final = 4
WATCHED: Final = 5  # somebody waits for TAKEN or TAIL: the writer returns after each batch
ASLEEP: Final = 11  # the writer waits for work; or, GATHERING, for more of it
SPAN_PAGES: Final = 6
PAGES: Final = 7
SLOTS: Final = 8
BACKED: Final = 9  # writes to mapped spans go to the backup, too
DELAY_US: Final = 10  # what an operation of the disk takes at least (experiments)
READ: Final = 16  # pages read
READ_MAPPED: Final = 17  # pages read out of mapped remote memory
READ_HELD: Final = 18  # pages read out of held buffers
WRITE: Final = 19  # pages written
WRITE_MAPPED: Final = 20  # pages written into mapped remote memory
FULL: Final = 21  # writes that found the ring full
DISK_OPERATIONS: Final = 22
DISK_PAGES: Final = 23
FENCED: Final = 24  # copies thrown away because the fence had changed
READ_LANE: Final = 25  # pages that connections read on lanes of theirs
WRITE_LANE: Final = 26
WORDS: Final = 32

IDLE: Final = 1
GATHERING: Final = 2
GATHER_PAGES: Final = 256
"""The writer that has fewer waits a moment for more, unless somebody waits for it."""

STAMPS: Final = 4096
"""Pages share so many counters of changes; a power of two."""

WORK_AT: Final = libc.MUTEX_BYTES
ROOM_AT: Final = libc.MUTEX_BYTES + libc.COND_BYTES
SYNC_BYTES: Final = libc.MUTEX_BYTES + 2 * libc.COND_BYTES


class Table(NamedTuple):
    """Memory that all threads share; made by table.make_table."""

    words: NDArray[np.int64]
    sync: NDArray[np.uint8]  # mutex, condition "work", condition "room"
    state: NDArray[np.uint8]  # by span
    base: NDArray[np.int64]  # by span: address of the slab's data where it is mapped, else 0
    fence_at: NDArray[np.int64]
    fence: NDArray[np.int64]
    activity: NDArray[np.int64]  # by span: page I/O since it was last taken
    version: NDArray[np.int64]  # by span: grows with every write
    channel_id: NDArray[np.int64]  # by span: the channel whose lanes lead to its slab, else 0
    handle: NDArray[np.int64]  # by span: what requests on those lanes name the slab by
    stamp: NDArray[np.int64]  # by page modulo STAMPS: grows with every change
    mark: NDArray[np.uint8]  # by page
    pending: NDArray[np.int32]  # by page: slot + 1 of its newest entry in the ring
    ring: NDArray[np.uint8]
    slot_page: NDArray[np.int64]
    slot_count: NDArray[np.int64]
    slot_flags: NDArray[np.uint8]
    prefetched: prefetch_cache.PrefetchCache  # prefetched pages


@kernel(inline="always")
def lock(t):
    libc.lock(t.sync.ctypes.data)


@kernel(inline="always")
def unlock(t):
    libc.unlock(t.sync.ctypes.data)


@kernel()
def intact(t, span):
    """Read after a copy: the slab was still ours when the copy was made."""
    return libc.load(t.fence_at[span]) == t.fence[span]


# Reads (under the mutex) --------------------------------------------------------------------------


@kernel()
def far(t, page):
    """The newest bytes are in remote memory, and only a channel leads there."""
    span = page // t.words[SPAN_PAGES]
    here = t.base[span] != 0 or t.pending[page] != 0
    return t.mark[page] == PRESENT and t.state[span] == MAPPED and not here


@kernel()
def read_page(t, page, target):
    """Copy one page if it can be had without waiting; DONE, or where it must come from. Whoever
    answers a client with it consumes it."""
    span = page // t.words[SPAN_PAGES]
    if t.mark[page] == PRESENT and t.state[span] == MAPPED and t.base[span] != 0:
        at = (page - span * t.words[SPAN_PAGES]) * PAGE_BYTES
        libc.copy(target, t.base[span] + at, PAGE_BYTES)
        if not intact(t, span):
            t.words[FENCED] += 1
            return BROKEN
        t.words[READ_MAPPED] += 1
        return DONE
    slot = t.pending[page]
    if slot != 0:
        libc.copy(target, t.ring.ctypes.data + np.int64(slot - 1) * PAGE_BYTES, PAGE_BYTES)
        t.words[READ_HELD] += 1
        return DONE
    away = REMOTE if far(t, page) else DISK
    return DONE if prefetch_cache.get(t.prefetched, page, target) else away


@kernel()
def read_run(t, first, count, target):
    """Copy pages that follow one another for a client, if all can be had without waiting. True:
    some cannot, and nothing was consumed."""
    for i in range(count):
        if read_page(t, first + i, target + i * PAGE_BYTES) != DONE:
            return True
    for i in range(count):
        t.activity[(first + i) // t.words[SPAN_PAGES]] += 1
        prefetch_cache.consume(t.prefetched, first + i)
    t.words[READ] += count
    return False


@kernel(cache=True)
def read_pages(t, pages, target, where, count_activity):
    """Page i to target + i * PAGE_BYTES where it is at hand; where[i] says so, or where it must
    come from. Returns how many are not done."""
    missing = 0
    lock(t)
    for i in range(len(pages)):
        page = pages[i]
        if page < 0 or page >= t.words[PAGES]:
            where[i] = OUTSIDE
        else:
            where[i] = read_page(t, page, target + i * PAGE_BYTES)
            if count_activity:
                t.activity[page // t.words[SPAN_PAGES]] += 1
                t.words[READ] += 1
        if where[i] != DONE:
            missing += 1
        else:
            prefetch_cache.consume(t.prefetched, page)
    unlock(t)
    return missing


# Writes (under the mutex) -------------------------------------------------------------------------


@kernel(inline="always")
def room(t):
    return t.words[SLOTS] - (t.words[HEAD] - t.words[TAIL])


@kernel()
def append(t, page, count, flags):
    """A new entry at the ring's end, whose slot is returned. There must be room."""
    slot = t.words[HEAD] % t.words[SLOTS]
    t.slot_page[slot] = page
    t.slot_count[slot] = count
    t.slot_flags[slot] = flags
    t.words[HEAD] += 1
    return slot


@kernel(inline="always")
def flies(t, page):
    """A write of it is on a channel."""
    return t.mark[page] == FLYING or t.mark[page] == STALE


@kernel(inline="always")
def next_slot(t):
    """Where the page of the next entry is to lie: an address."""
    return t.ring.ctypes.data + t.words[HEAD] % t.words[SLOTS] * PAGE_BYTES


@kernel()
def wake_writer(t):
    """Entries were appended: the writer may have waited for them."""
    asleep = t.words[ASLEEP]
    if t.words[HEAD] == t.words[TAKEN]:
        return
    if asleep == IDLE or (asleep == GATHERING and not few(t)):
        t.words[ASLEEP] = 0
        libc.wake(t.sync.ctypes.data + WORK_AT)


@kernel(inline="always")
def few(t):
    """So little waits for the disk that it can wait for more."""
    waiting = t.words[HEAD] - t.words[TAKEN]
    return waiting < min(GATHER_PAGES, t.words[SLOTS] // 4)


@kernel()
def write_page(t, page, source):
    """Copy one page in, and take it."""
    libc.copy(next_slot(t), source, PAGE_BYTES)
    return take_page(t, page)


@kernel()
def take_page(t, page):
    """Take in one page whose bytes lie in the next slot. DONE: remote memory has it. REMOTE: it is
    to be sent over the span's channel, and its slot is held until `landed`. DISK: it counts once it
    is on disk."""
    span = page // t.words[SPAN_PAGES]
    mapped = t.state[span] == MAPPED
    held = next_slot(t)
    prefetch_cache.invalidate(t.prefetched, page)
    slot = append(t, page, 1, 0)
    t.pending[page] = slot + 1
    t.version[span] += 1
    t.stamp[page & (STAMPS - 1)] += 1
    t.activity[span] += 1
    t.words[WRITE] += 1
    if mapped and t.base[span] != 0:
        at = (page - span * t.words[SPAN_PAGES]) * PAGE_BYTES
        libc.copy(t.base[span] + at, held, PAGE_BYTES)
        if intact(t, span):
            t.mark[page] = PRESENT
            t.words[WRITE_MAPPED] += 1
            return DONE
        t.words[FENCED] += 1
        t.mark[page] = ABSENT
        return DISK
    if flies(t, page):
        t.mark[page] = STALE
        return DISK
    if not mapped:
        t.mark[page] = ABSENT
        return DISK
    t.mark[page] = FLYING
    t.slot_flags[slot] = HELD if t.words[BACKED] else HELD | NO_BACKUP
    return REMOTE


@kernel(cache=True)
def write_pages(t, pages, source, kinds, span, version):
    """All pages or none: the first entry's number, -1 (no room), -2 (the backup fails), -3 (outside
    the address space), -4 (somebody wrote `span` after `version`; -1: whatever its version)."""
    lock(t)
    first = t.words[HEAD]
    if t.words[FAILED]:
        first = -2
    elif version >= 0 and t.version[span] != version:
        first = -4
    elif room(t) < len(pages):
        t.words[FULL] += 1
        first = -1
    else:
        for i in range(len(pages)):
            if pages[i] < 0 or pages[i] >= t.words[PAGES]:
                first = -3
    if first >= 0:
        for i in range(len(pages)):
            kinds[i] = write_page(t, pages[i], source + i * PAGE_BYTES)
        wake_writer(t)
    unlock(t)
    return first


@kernel(cache=True)
def look(t, first, kinds):
    """Return what the entries from `first` on still wait for: REMOTE (they are held), DISK, or
    DONE. An entry that has left the ring is done: its slot may be another's by now."""
    lock(t)
    for i in range(len(kinds)):
        slot = (first + i) % t.words[SLOTS]
        page = t.slot_page[slot]
        if first + i < t.words[TAIL]:
            kinds[i] = DONE
        elif t.slot_flags[slot] & HELD:
            kinds[i] = REMOTE
        elif t.slot_flags[slot] & WRITTEN or t.mark[page] == PRESENT:
            kinds[i] = DONE
        else:
            kinds[i] = DISK
    unlock(t)


@kernel(cache=True)
def discard(t, first, count):
    """Queue a discard of a range; its entry's number, or -1, -2 as `write_pages`."""
    lock(t)
    number = t.words[HEAD]
    if t.words[FAILED]:
        number = -2
    elif room(t) < 1:
        t.words[FULL] += 1
        number = -1
    else:
        append(t, first, count, DISCARD)
        prefetch_cache.invalidate_range(t.prefetched, first, count, -1)
        for page in range(first, first + count):
            t.stamp[page & (STAMPS - 1)] += 1
            t.mark[page] = STALE if flies(t, page) else ABSENT
        for span in range(
            first // t.words[SPAN_PAGES], (first + count - 1) // t.words[SPAN_PAGES] + 1
        ):
            t.version[span] += 1
        wake_writer(t)
    unlock(t)
    return number


@kernel()
def _settle(t, slot):
    """An entry that is on disk and not held is over: reads look elsewhere from now on."""
    if t.slot_flags[slot] & (HELD | WRITTEN) == WRITTEN:
        page = t.slot_page[slot]
        if t.slot_flags[slot] & DISCARD == 0 and t.pending[page] == slot + 1:
            t.pending[page] = 0


@kernel()
def release(t):
    """Slots come free in order."""
    tail = t.words[TAIL]
    while tail < t.words[HEAD]:
        if t.slot_flags[tail % t.words[SLOTS]] & (HELD | WRITTEN) != WRITTEN:
            break
        tail += 1
    if tail != t.words[TAIL]:
        t.words[TAIL] = tail
        libc.wake(t.sync.ctypes.data + ROOM_AT)


@kernel()
def finish(t, first, count):
    """These entries are on disk (under the mutex)."""
    for i in range(count):
        slot = (first + i) % t.words[SLOTS]
        t.slot_flags[slot] |= np.uint8(WRITTEN)
        _settle(t, slot)
    t.words[TAKEN] = first + count
    t.words[FAILED] = 0
    release(t)


@kernel()
def land(t, entry, arrived):
    """A write over a channel has ended (under the mutex); `release` follows."""
    slot = entry % t.words[SLOTS]
    page = t.slot_page[slot]
    t.slot_flags[slot] &= ~np.uint8(HELD)
    good = arrived and t.mark[page] == FLYING
    t.mark[page] = PRESENT if good else ABSENT
    _settle(t, slot)


@kernel(cache=True)
def landed(t, entries, arrived):
    """Writes over a channel have ended; `arrived[i]`: the bytes are in remote memory."""
    lock(t)
    for i in range(len(entries)):
        land(t, entries[i], arrived[i])
    release(t)
    unlock(t)


# Spans --------------------------------------------------------------------------------------------


@kernel(cache=True)
def map_span(t, span, base, fence_at, fence):
    """From now on reads and writes of the span use this slab. Its marks stay: a span that was
    suspended finds its pages again, one that was unmapped has none."""
    lock(t)
    t.state[span] = MAPPED
    t.base[span] = base
    t.fence_at[span] = fence_at
    t.fence[span] = fence
    unlock(t)


@kernel(cache=True)
def set_lane_target(t, span, channel_id, handle):
    """Lanes lead to the slab of a span that was mapped."""
    lock(t)
    t.channel_id[span] = channel_id
    t.handle[span] = handle
    unlock(t)


@kernel(cache=True)
def leave_span(t, span, state):
    """UNMAPPED: reset its bits. SUSPENDED: keep them. Returns how many pages were PRESENT. When
    this returns no thread is in the middle of a copy in or out of the slab."""
    lock(t)
    t.state[span] = state
    t.base[span] = t.channel_id[span] = 0
    first = span * t.words[SPAN_PAGES]
    last = min(first + t.words[SPAN_PAGES], t.words[PAGES])
    count = 0
    if state == UNMAPPED:  # Else the next slab would be asked for what these entries wait for.
        prefetch_cache.invalidate_range(t.prefetched, first, last - first, states.COMING)
    for page in range(first, last):
        if t.mark[page] == PRESENT:
            count += 1
            if state == UNMAPPED:
                t.mark[page] = ABSENT
        elif t.mark[page] == FLYING:
            t.mark[page] = STALE
        elif t.mark[page] == FILLING:
            t.mark[page] = ABSENT
    unlock(t)
    return count


@kernel(cache=True)
def forget_pages(t, pages):
    """Remote memory does not have these any more: reads look on disk."""
    lock(t)
    for i in range(len(pages)):
        if t.mark[pages[i]] == PRESENT:
            t.mark[pages[i]] = ABSENT
    unlock(t)


@njit(nogil=True, cache=True)
def count_present(t, span):
    first = span * t.words[SPAN_PAGES]
    last = min(first + t.words[SPAN_PAGES], t.words[PAGES])
    return np.sum(t.mark[first:last] == PRESENT)


@kernel(cache=True)
def take_activity(t, into):
    """The page I/O of every span since the last call."""
    lock(t)
    for span in range(len(into)):
        into[span] = t.activity[span]
        t.activity[span] = 0
    unlock(t)


def address(buffer: Any) -> int:
    """Where a buffer (memoryview, array) lies; the caller keeps it alive."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)
