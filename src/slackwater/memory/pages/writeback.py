"""The backup's thread, compiled: what is in the ring of dispatch entries goes to the file.

Gu, dissertation, 2.4.3: the disk dispatch queues. One queue for all spans keeps the order within
each, which read-after-write needs. A batch is sorted by page, the newest of each page only, and
neighbours go as one operation: the busier the disk, the larger the batches. What nobody waits for
waits a millisecond for more, so that a stream of small writes does not wake a thread for each.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from typing import Final

import numpy as np

from slackwater.common.native import libc
from slackwater.common.native.compiled import kernel, njit
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import states
from slackwater.memory.store import PAGE_BYTES

BATCH: Final = 1024
"""Entries that the writer takes at a time: one pwritev holds no more."""

GATHER_NS: Final = 1_000_000

# Results of `write_back`
PROGRESS: Final = 0
STOPPED: Final = 1
DISCARDS: Final = 2
ERROR: Final = 3


@kernel()
def _put_run(t, fd, vector, first_page, count):
    """Pages `first_page`... from the slots in `vector`, as one operation of the disk."""
    if t.words[k.DELAY_US]:
        libc.sleep_us(t.words[k.DELAY_US])
    t.words[k.DISK_OPERATIONS] += 1
    t.words[k.DISK_PAGES] += count
    done = 0
    while done < count:
        n = libc.write_vector(
            fd, vector.ctypes.data + done * 16, count - done, (first_page + done) * PAGE_BYTES
        )
        if n < 0:
            return -n
        if n % PAGE_BYTES:  # A page that went in half is written again as a whole.
            n -= n % PAGE_BYTES
        if n == 0:
            return 28  # ENOSPC: nothing more goes in.
        done += n // PAGE_BYTES
    return 0


@njit(nogil=True)
def _put(t, fd, first, count, vector):
    """Entries [first, first + count) in the order of their pages, the newest of each page only."""
    keys = np.empty(count, np.int64)
    n = 0
    for i in range(count):
        slot = (first + i) % t.words[k.SLOTS]
        if t.slot_flags[slot] & states.NO_BACKUP == 0:
            keys[n] = t.slot_page[slot] * BATCH + i
            n += 1
    keys = np.sort(keys[:n])
    ring = t.ring.ctypes.data
    start = last = np.int64(-1)
    length = 0
    for j in range(n):
        page = keys[j] // BATCH
        if j + 1 < n and keys[j + 1] // BATCH == page:
            continue
        if length and page != last + 1:
            error = _put_run(t, fd, vector, start, length)
            if error:
                return error
            length = 0
        if length == 0:
            start = page
        slot = (first + keys[j] % BATCH) % t.words[k.SLOTS]
        vector[length, 0] = ring + slot * PAGE_BYTES
        vector[length, 1] = PAGE_BYTES
        length += 1
        last = page
    return _put_run(t, fd, vector, start, length) if length else 0


@kernel()
def _await_work(t, scratch):
    """Return (under the mutex) when there is enough to write, or somebody waits for it."""
    work, mutex = t.sync.ctypes.data + k.WORK_AT, t.sync.ctypes.data
    while t.words[k.TAKEN] == t.words[k.HEAD] and not t.words[k.STOP]:
        t.words[k.ASLEEP] = k.IDLE
        libc.wait(work, mutex)
    if k.few(t) and not t.words[k.WATCHED] and not t.words[k.STOP]:
        t.words[k.ASLEEP] = k.GATHERING
        libc.wait_for(work, mutex, GATHER_NS, scratch)
    t.words[k.ASLEEP] = 0


@njit(nogil=True, cache=True)
def write_back(t, fd):
    """The life of the backup's thread: put what is in the ring on disk, in order, until somebody
    watches, a discard is due, or the file fails."""
    vector = np.empty((BATCH, 2), np.int64)
    while True:
        k.lock(t)
        _await_work(t, vector.ctypes.data)
        first = t.words[k.TAKEN]
        count = min(BATCH, t.words[k.HEAD] - first)
        for i in range(count):
            if t.slot_flags[(first + i) % t.words[k.SLOTS]] & states.DISCARD:
                count = i
                break
        stopped = t.words[k.STOP] and t.words[k.TAKEN] == t.words[k.HEAD]
        k.unlock(t)
        if stopped:
            return STOPPED
        if count == 0:
            return DISCARDS
        error = _put(t, fd, first, count, vector)
        k.lock(t)
        if error:
            t.words[k.FAILED] = error
            libc.wake(t.sync.ctypes.data + k.ROOM_AT)
            k.unlock(t)
            return ERROR
        k.finish(t, first, count)
        watched = t.words[k.WATCHED]
        k.unlock(t)
        if watched:
            return PROGRESS


@kernel(cache=True)
def discarded(t):
    """The discard at the front of the queue is done. A write before it that a slow member holds
    still is not what the page is any more."""
    k.lock(t)
    number, tail, slots = t.words[k.TAKEN], t.words[k.TAIL], t.words[k.SLOTS]
    slot = number % slots
    for page in range(t.slot_page[slot], t.slot_page[slot] + t.slot_count[slot]):
        if t.pending[page] != 0 and tail + (t.pending[page] - 1 - tail) % slots < number:
            t.pending[page] = 0
    k.finish(t, number, 1)
    k.unlock(t)


@kernel(cache=True)
def watch(t, wanted):
    """Whether the writer is to return after each batch; how many entries are on disk so far."""
    k.lock(t)
    t.words[k.WATCHED] = wanted
    if wanted and t.words[k.ASLEEP]:
        libc.wake(t.sync.ctypes.data + k.WORK_AT)
    taken = t.words[k.TAKEN]
    k.unlock(t)
    return taken


@kernel(cache=True)
def backup_failed(t, error):
    k.lock(t)
    t.words[k.FAILED] = error
    libc.wake(t.sync.ctypes.data + k.ROOM_AT)
    k.unlock(t)


@kernel(cache=True)
def stop(t):
    """The writer returns once the ring is empty; nobody waits for room any more."""
    k.lock(t)
    t.words[k.STOP] = 1
    libc.wake(t.sync.ctypes.data + k.WORK_AT)
    libc.wake(t.sync.ctypes.data + k.ROOM_AT)
    k.unlock(t)
