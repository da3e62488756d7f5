"""A connection's loop, compiled: receive, parse, copy pages, answer; no interpreter lock.

Requests are taken as they come in the buffer, many at a time; their answers leave together. What
cannot be done at once becomes an item for the program: reads of pages that are on disk or behind a
channel, writes that count only once they are somewhere else, flushes, trims, unaligned requests.
Items are answered in any order, as the protocol allows; the loop goes on meanwhile.

The payload of a large write to remote memory is received straight into the ring's slots and taken
in as it comes, so that the client fills its socket while pages are copied on, or leave on a lane.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from typing import Final

from slackwater.common.native import libc
from slackwater.common.native.compiled import inline_kernel, kernel
from slackwater.memory.nbd import lane_sockets as ends
from slackwater.memory.nbd import lanes, page_read, page_write
from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.nbd import state as s
from slackwater.memory.pages import kernels, prefetch_cache, states
from slackwater.memory.store import PAGE_BYTES

# Results of `serve`
CLOSED: Final = 0
DISCONNECTED: Final = 1
GARBAGE: Final = 2
HAS_ITEMS: Final = 3
# and what `parse` may say besides
MORE: Final = 10
NO_ROOM: Final = 12
STREAM: Final = 13
CAME: Final = 14
LANE_FULL: Final = 15

STREAM_BYTES: Final = 64 * 1024
"""Writes from here on are streamed, where they go to mapped memory or on a lane."""
STREAM_PAGES: Final = 64
"""Pages that are streamed at a time: the table's mutex is held meanwhile."""


@kernel()
def _refusal(c, kind, flags, offset, length):
    """The error of a request that no export of this size can serve; 0: none."""
    if flags & ~nbd.FLAGS_KNOWN:
        return nbd.EINVAL
    if kind == nbd.FLUSH:
        return 0
    if kind == nbd.READ and length > c.words[s.LENGTH_MAX]:
        c.words[s.OVERSIZED] += 1
        return nbd.EOVERFLOW
    if length == 0:
        return nbd.EINVAL
    if offset < 0 or offset > c.words[s.SIZE] - length:  # Their sum may be beyond 64 bits.
        writes = kind in (nbd.WRITE, nbd.WRITE_ZEROES)
        return nbd.ENOSPC if writes else nbd.EINVAL
    return 0


@inline_kernel()
def _one(t, c, at, kind, flags, offset, length):
    """One whole request. 0: it is dealt with; else what must happen first."""
    error = _refusal(c, kind, flags, offset, length)
    if error == 0 and t.words[kernels.FAILED] and kind == nbd.WRITE:
        error = t.words[kernels.FAILED]
        if error != nbd.ENOSPC:
            error = nbd.EIO
    if error:
        c.words[s.OUT] = s.head_for(c, kind, at, error, 0, 0)
        c.words[s.DISK_BARRIER_ENTRY] = -1
        return 0
    if kind == nbd.READ:
        status = page_read.read(t, c, at, flags, offset, length)
        if status != page_read.DEFERRED:
            return status
    elif kind == nbd.WRITE and offset % PAGE_BYTES == 0 and length % PAGE_BYTES == 0:
        if kernels.room(t) < length // PAGE_BYTES:
            c.words[s.NEED] = length // PAGE_BYTES
            return NO_ROOM
        page_write.write(t, c, at, flags, offset, length)
        return 0
    s.defer(c, kind, at, offset, length, flags, -1)
    return 0


@kernel()
def _mapped(t, page):
    span = page // t.words[kernels.SPAN_PAGES]
    return t.state[span] == states.MAPPED and t.base[span] != 0


@kernel()
def _streams(t, c, flags, offset, length):
    """Whether this write can be taken in while it comes; WAY says where to."""
    plain = (
        length >= STREAM_BYTES
        and offset % PAGE_BYTES == 0
        and length % PAGE_BYTES == 0
        and _refusal(c, nbd.WRITE, flags, offset, length) == 0
        and not t.words[kernels.FAILED]
    )
    c.words[s.LANE_INDEX] = -1
    if not plain or _mapped(t, offset // PAGE_BYTES):
        return plain
    if c.words[s.DISK_BARRIER_ENTRY] < 0 and not flags & nbd.FUA:
        c.words[s.LANE_INDEX] = lanes.lane_for_stream(t, c.lanes, offset, length)
    return c.words[s.LANE_INDEX] >= 0


@inline_kernel()
def parse(t, c):
    """Deal with what was received, under the table's mutex. Returns what the loop must do next."""
    while True:
        at = c.words[s.START]
        waiting = c.words[s.END] - at
        if waiting < nbd.REQUEST_BYTES:
            return MORE
        if s.number(c.inward, at, 4) != nbd.REQUEST_MAGIC:
            return GARBAGE
        if c.words[s.ITEMS] == s.ITEMS_MAX:
            return HAS_ITEMS
        if c.words[s.OUT] > s.SEND_BYTES:
            return page_read.SEND_FIRST
        flags = s.number(c.inward, at + 4, 2)
        kind = s.number(c.inward, at + 6, 2)
        offset = s.number(c.inward, at + 16, 8)
        length = s.number(c.inward, at + 24, 4)
        whole = nbd.REQUEST_BYTES
        if kind == nbd.DISCONNECT:
            return DISCONNECTED
        if kind == nbd.WRITE:
            if length > c.words[s.LENGTH_MAX]:
                c.words[s.OVERSIZED] += 1
                return GARBAGE  # Its payload cannot be taken in, and what follows not be found.
            whole += length
            if waiting < whole:
                if c.words[s.ITEMS]:  # Their payloads lie in the buffer, which a stream moves.
                    return HAS_ITEMS
                return STREAM if _streams(t, c, flags, offset, length) else MORE
        status = _one(t, c, at, kind, flags, offset, length)
        if status:
            return status
        c.words[s.START] = at + whole
        c.words[s.STREAMED] = 0
        c.words[s.REQUESTS] += 1


@kernel()
def _flush(c):
    """Send the answers; False: the client is gone."""
    fd, parts = c.words[s.FD], c.words[s.PARTS]
    if c.words[s.OUT] == 0 and parts == 0:
        return True
    libc.lock(c.sync.ctypes.data)
    if parts == 0:
        sent = libc.send_all(fd, c.outward.ctypes.data, c.words[s.OUT])
    else:
        c.parts[0, 0], c.parts[0, 1] = c.outward.ctypes.data, c.words[s.OUT]
        sent = libc.send_vector(fd, c.parts.ctypes.data, parts + 1, c.message.ctypes.data)
    libc.unlock(c.sync.ctypes.data)
    c.words[s.OUT] = c.words[s.PARTS] = 0
    return sent


@kernel()
def _await_room(t, c):
    """Block until the dispatch entries that a write needs are free, or the backup fails: then the
    write is refused (section 2.4.3)."""
    kernels.lock(t)
    t.words[kernels.FULL] += 1
    while (
        kernels.room(t) < c.words[s.NEED]
        and not t.words[kernels.FAILED]
        and not t.words[kernels.STOP]
    ):
        libc.wait(t.sync.ctypes.data + kernels.ROOM_AT, t.sync.ctypes.data)
    kernels.unlock(t)


@kernel()
def _receive(c, waits):
    """Make room in the buffer and take in what is there; False: the client is gone. `waits`: until
    there is something."""
    left = c.words[s.END] - c.words[s.START]
    # A buffer that begins anew as often as it can stays in the processor's cache.
    cheap = left == 0 or (left < 2 * PAGE_BYTES and c.words[s.START] >= s.RECEIVE_BYTES)
    if c.words[s.START] and (cheap or len(c.inward) - c.words[s.END] < s.RECEIVE_BYTES):
        base = c.inward.ctypes.data
        libc.move(base, base + c.words[s.START], left)
        c.words[s.START] = 0
        c.words[s.END] = left
    space = min(len(c.inward) - c.words[s.END], s.RECEIVE_BYTES)
    if c.words[s.STREAMED] and left < nbd.REQUEST_BYTES:
        space = nbd.REQUEST_BYTES - left  # Its payload shall not come here.
    target = c.inward.ctypes.data + c.words[s.END]
    if waits:
        came = libc.receive(c.words[s.FD], target, space)
    else:
        came = libc.receive_now(c.words[s.FD], target, space)
        if came == -libc.EAGAIN:
            return True
    if came <= 0:
        return False
    c.words[s.END] += came
    return True


@kernel()
def _begin_stream(t, c):
    """The write's head goes to the front of the buffer, what came of its payload behind it."""
    at, base = c.words[s.START], c.inward.ctypes.data
    c.words[s.BEGUN] = t.words[kernels.HEAD]
    c.words[s.AT] = s.number(c.inward, at + 16, 8)
    c.words[s.LEFT] = s.number(c.inward, at + 24, 4)
    c.words[s.END] -= at
    libc.move(base, base + at, c.words[s.END])
    c.words[s.START] = nbd.REQUEST_BYTES
    c.words[s.STREAMED] = 1


@kernel()
def _end_stream(t, c):
    """All of it was taken in: it is answered, unless a lane has the last piece. Or the rest cannot
    go where it was to go: it becomes a request of its own, with the same cookie, that is taken in
    when it is whole."""
    newest, lane_index = t.words[kernels.HEAD] - 1, c.words[s.LANE_INDEX]
    if c.words[s.LEFT]:
        if lane_index >= 0 and newest >= c.words[s.BEGUN]:  # No one waits for what is on the lane.
            c.words[s.DISK_BARRIER_ENTRY] = newest
        s.put_number(c.inward, 16, 8, c.words[s.AT])
        s.put_number(c.inward, 24, 4, c.words[s.LEFT])
        had = c.words[s.END] - c.words[s.START]
        base = c.inward.ctypes.data
        libc.move(base + nbd.REQUEST_BYTES, base + c.words[s.START], had)
        c.words[s.START] = 0
        c.words[s.END] = nbd.REQUEST_BYTES + had
        c.words[s.STREAMED] = c.words[s.LEFT] = 0
        return
    if lane_index < 0 or c.words[s.DISK_BARRIER_ENTRY] >= 0:
        if lane_index >= 0:
            c.words[s.DISK_BARRIER_ENTRY] = newest
        s.written(c, 0, c.words[s.AT], 0, s.number(c.inward, 4, 2), newest + 1, True)
    c.words[s.REQUESTS] += 1


@kernel()
def _goes_on(t, c):
    """The rest of a streamed write can go where its beginning went."""
    first, lane_index = c.words[s.AT] // PAGE_BYTES, c.words[s.LANE_INDEX]
    if t.words[kernels.FAILED]:
        return False
    if lane_index < 0:
        return _mapped(t, first)
    return lanes.lane_for_stream(t, c.lanes, c.words[s.AT], c.words[s.LEFT]) == lane_index


@kernel()
def _take_pages(t, c, count):
    """So many pages of a streamed write lie in the next slots."""
    first, entry = c.words[s.AT] // PAGE_BYTES, t.words[kernels.HEAD]
    late = False
    for i in range(count):
        late |= kernels.take_page(t, first + i) == kernels.DISK
    if count and c.words[s.LANE_INDEX] >= 0:
        cookie = s.cookie_of(c, 0)
        late = not lanes.send_piece(t, c, cookie, c.words[s.AT], count, entry)
    if late:
        c.words[s.DISK_BARRIER_ENTRY] = t.words[kernels.HEAD] - 1
    c.words[s.AT] += count * PAGE_BYTES
    c.words[s.LEFT] -= count * PAGE_BYTES


@kernel()
def _take_in(t, c):
    """The next pages of a streamed write, under the table's mutex: what is in the buffer, and what
    the socket has. CAME: go on, if anything is left. MORE: it has nothing. NO_ROOM, LANE_FULL,
    CLOSED."""
    if c.words[s.LANE_INDEX] >= 0 and not lanes.has_room(c.lanes, c.words[s.LANE_INDEX]):
        return LANE_FULL
    first = c.words[s.AT] // PAGE_BYTES
    span_end = (first // t.words[kernels.SPAN_PAGES] + 1) * t.words[kernels.SPAN_PAGES]
    slots = t.words[kernels.SLOTS]
    count = min(c.words[s.LEFT] // PAGE_BYTES, span_end - first, STREAM_PAGES)
    count = min(count, kernels.room(t), slots - t.words[kernels.HEAD] % slots)
    if count < 1:
        c.words[s.NEED] = 1
        return NO_ROOM
    wanted = count * PAGE_BYTES
    target = kernels.next_slot(t)
    had = min(c.words[s.END] - c.words[s.START], wanted)
    libc.copy(target, c.inward.ctypes.data + c.words[s.START], had)
    came = had
    if had < wanted:
        n = libc.receive_now(c.words[s.FD], target + had, wanted - had)
        if n == 0 or (n < 0 and n != -libc.EAGAIN):
            return CLOSED
        came += max(n, 0)
    whole = came // PAGE_BYTES
    rest = came % PAGE_BYTES
    if had < wanted:  # The buffer is empty but for a page that came in part.
        c.words[s.START] = nbd.REQUEST_BYTES
        c.words[s.END] = nbd.REQUEST_BYTES + rest
        base = c.inward.ctypes.data + nbd.REQUEST_BYTES
        libc.copy(base, target + whole * PAGE_BYTES, rest)
    else:
        c.words[s.START] += had
    _take_pages(t, c, whole)
    return CAME if came > had or whole else MORE


@kernel()
def _advance(t, c):
    """Go on with the write that is streamed, or with what was received (under the table's mutex).
    Returns what the loop must do next."""
    while True:
        if c.words[s.LEFT] == 0:
            status = parse(t, c)
            if status != STREAM:
                return status
            _begin_stream(t, c)
        if not _goes_on(t, c):
            _end_stream(t, c)
            continue
        status = _take_in(t, c)
        if c.words[s.LEFT]:
            return status
        _end_stream(t, c)


@kernel()
def _proceed(t, c, status):
    """Wait for what is needed to go on after `parse`. False: the client is gone, or the device
    ends."""
    streams = c.words[s.LEFT] > 0  # It takes in what comes, where it belongs.
    if status == CLOSED or (streams and t.words[kernels.STOP]):
        return False
    if status == CAME:
        return True
    if c.lanes.shared[s.UNDER_WAY]:  # Entries of the ring may be held by what is on a lane.
        reads = status == MORE
        busy = c.lanes.shared[s.UNDER_WAY] >= ends.BUSY
        if reads and busy and not streams and ends.wait(c, False, ends.BRIEF_NS):
            return _receive(c, False)
        came = ends.wait(c, reads, ends.LONG_NS)
        return streams or came & ends.CLIENT == 0 or _receive(c, True)
    if status == NO_ROOM:
        _await_room(t, c)
        return t.words[kernels.STOP] == 0
    if status == MORE and streams:
        libc.await_event(c.words[s.FD], libc.POLL_IN, c.words.ctypes.data + s.SCRATCH * 8)
    elif status == MORE:
        return _receive(c, True)
    return True


@kernel(cache=True)
def serve(t, c):
    """Until the connection ends, or the program is wanted: there are items, or lanes to look at.
    The items' payloads lie in the buffer until the next call."""
    c.words[s.ITEMS] = 0
    shared = c.lanes.shared
    while True:
        s.begin_turn(c)
        kernels.lock(t)
        status = _advance(t, c)
        again = shared[s.UNDER_WAY] != 0 and lanes.settle(t, c)
        kernels.wake_writer(t)
        called = t.prefetched.words[prefetch_cache.CALL]
        t.prefetched.words[prefetch_cache.CALL] = 0
        kernels.unlock(t)
        c.words[s.BATCHES] += 1
        if shared[s.UNDER_WAY]:
            ends.push(c.lanes)
        if not _flush(c) or (again and not ends.send_large(c)):
            return CLOSED
        s.time_answered(c)
        if called:
            prefetch_cache.ring(t.prefetched)
        if status in (DISCONNECTED, GARBAGE):
            return status
        if c.words[s.ITEMS] or shared[s.SWEEP] or shared[s.TELL]:
            return HAS_ITEMS
        if not again and status != page_read.SEND_FIRST and not _proceed(t, c, status):
            return CLOSED


@kernel(cache=True)
def send(c, address, nbytes):
    """Send an answer that the program made; False: the client is gone."""
    libc.lock(c.sync.ctypes.data)
    sent = libc.send_all(c.words[s.FD], address, nbytes)
    libc.unlock(c.sync.ctypes.data)
    return sent
