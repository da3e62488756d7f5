"""A connection's lanes, compiled: pages at a lender are asked for by the connection's own thread.

A read of pages that only a channel leads to, or a small write of such, leaves at once on a lane of
that channel (common/transport/lanes.py), many under way at a time; the answer goes from the lane's
buffer into the client's. The event loop takes no part. Whatever is not plain is left to it, as an
item: a lane that is missing, full, refused or broken, pages that were written meanwhile.

Answers come in the order of the requests, so that any other is a violation. A lane on which nothing
comes for LANE_WAIT_S, while something is due, is given up.

What is read is right: the pages' newest bytes were in the slab when they were asked for (kernels.
far), and nobody has taken a write of them since, or else the answer is thrown away. The slab itself
may be gone by now: its lender answers nothing from memory that is not this device's any more.

What is written is FLYING until it is acknowledged, as it is on the channel; nobody sends that page
again meanwhile. A lane that breaks under a write leaves open whether it has landed, or will: so its
channel ends, which ends whatever is on its way (LOST items; Device.lane_failed).

The thread alone touches lanes; the program gives it new ones (install), and closes those that are
GONE while the loop is not running.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from typing import Final

from slackwater.common.native import libc
from slackwater.common.native.compiled import inline_kernel, kernel
from slackwater.common.transport import wire
from slackwater.memory.nbd import lane_sockets as ends
from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.nbd import state as s
from slackwater.memory.pages import kernels, latency, states
from slackwater.memory.store import PAGE_BYTES

_READ_BYTES: Final = wire.HEADER_BYTES + 8

assert s.DEPTH & (s.DEPTH - 1) == 0
assert s.HEAD_BYTES <= wire.HEADER_BYTES


@kernel(cache=True)
def install(t, lanes, i, channel_id, fd, buffer):
    """Make lane `i`, which is free, a lane of this channel. `buffer`: the address of LANE_BYTES of
    its own."""
    kernels.lock(t)
    w = lanes.words[i]
    w[:] = 0
    w[s.CHANNEL_ID], w[s.LANE_FD], w[s.LOST_AT], w[s.BUFFER] = channel_id, fd, -1, buffer
    lanes.shared[s.USED] = max(lanes.shared[s.USED], i + 1)
    w[s.STATE] = s.UP
    kernels.unlock(t)


# Requests (under the table's mutex) ---------------------------------------------------------------


@kernel()
def lane_to(t, lanes, first, count):
    """The lane that leads to these pages; or -1."""
    span = first // t.words[kernels.SPAN_PAGES]
    channel_id = t.channel_id[span]
    if channel_id == 0 or (first + count - 1) // t.words[kernels.SPAN_PAGES] != span:
        return -1
    for i in range(lanes.shared[s.USED]):
        w = lanes.words[i]
        if w[s.CHANNEL_ID] == channel_id and w[s.STATE] == s.UP:
            return i
    lanes.shared[s.WANTED] = channel_id
    return -1


@kernel()
def has_room(lanes, i):
    """Say whether there is room for one request more. None comes between a header and the body that
    follows it."""
    w = lanes.words[i]
    fits = w[s.WAITING] + wire.HEADER_BYTES <= s.REQUESTS_BYTES
    return w[s.TAIL] - w[s.HEAD] < s.DEPTH and w[s.BULK_LEFT] == 0 and fits


@kernel()
def route(t, lanes, first, count):
    """The lane that leads to these pages, with room for one request more; or -1."""
    i = lane_to(t, lanes, first, count)
    return i if i >= 0 and has_room(lanes, i) else -1


@kernel()
def _stamp(t, first, count):
    """How often these pages (or others that share their counters) were changed."""
    total = 0
    for page in range(first, first + count):
        total += t.stamp[page & (kernels.STAMPS - 1)]
    return total


@kernel()
def _enter(t, lanes, i, kind, cookie, offset, length, first, stamp):
    """Its record, but for the bytes; where they belong."""
    w = lanes.words[i]
    if w[s.HEAD] == w[s.TAIL]:
        w[s.SINCE_NS] = libc.now_ns(lanes.shared.ctypes.data + s.CLOCK * 8)
    row = lanes.asked[i, w[s.TAIL] & (s.DEPTH - 1)]
    row[s.KIND] = kind
    row[s.COOKIE] = cookie
    row[s.OFFSET] = offset
    row[s.LENGTH] = length
    row[s.FIRST] = first
    row[s.STAMP] = stamp
    row[s.PART] = 0
    row[s.ASKED_NS] = lanes.shared[s.TURN_NS]
    w[s.TAIL] += 1
    w[s.QUEUED] += 1
    lanes.shared[s.UNDER_WAY] += 1
    span_bytes = t.words[kernels.SPAN_PAGES] * PAGE_BYTES
    at = ends.base(lanes, i) + s.REQUESTS_AT + w[s.WAITING]
    libc.put(at, kind | t.handle[offset // span_bytes] << 32)
    libc.put(at + 8, w[s.TAIL])
    libc.put(at + 16, offset % span_bytes)
    libc.put(at + 24, length if kind == wire.WRITE else 8)
    return at + wire.HEADER_BYTES


@inline_kernel()
def ask(t, lanes, cookie, offset, length):
    """Ask for whole pages that only lenders have, if a lane leads to all. True: it was asked."""
    first = offset // PAGE_BYTES
    count = length // PAGE_BYTES
    if length > s.LARGE_BYTES:
        return False
    i = route(t, lanes, first, count)
    if i < 0 or lanes.words[i, s.WAITING] + _READ_BYTES > s.REQUESTS_BYTES:
        return False
    stamp = _stamp(t, first, count)
    libc.put(_enter(t, lanes, i, wire.READ, cookie, offset, length, -1, stamp), length)
    lanes.words[i, s.WAITING] += _READ_BYTES
    return True


@kernel()
def _lane_for_write(t, lanes, offset, length):
    """Return the lane for a small write, with room for it; or -1."""
    first = offset // PAGE_BYTES
    span = first // t.words[kernels.SPAN_PAGES]
    if length > ends.SMALL_BYTES or t.state[span] != states.MAPPED or t.base[span] != 0:
        return -1
    i = route(t, lanes, first, length // PAGE_BYTES)
    if i < 0 or lanes.words[i, s.WAITING] + wire.HEADER_BYTES + length > s.REQUESTS_BYTES:
        return -1
    return i


@kernel()
def lane_for_stream(t, lanes, offset, length):
    """The lane for a write that is taken in while it comes; or -1."""
    first = offset // PAGE_BYTES
    span = first // t.words[kernels.SPAN_PAGES]
    if t.state[span] != states.MAPPED or t.base[span] != 0 or not t.words[kernels.BACKED]:
        return -1
    return lane_to(t, lanes, first, length // PAGE_BYTES)


@kernel()
def send_write(t, lanes, cookie, offset, length, first):
    """Send entries that were just taken in. False: no lane leads there, or not all may be sent."""
    i = _lane_for_write(t, lanes, offset, length)
    if i < 0:
        return False
    count = length // PAGE_BYTES
    slots = t.words[kernels.SLOTS]
    for entry in range(first, first + count):
        if t.slot_flags[entry % slots] & states.HELD == 0:
            return False
    at = _enter(t, lanes, i, wire.WRITE, cookie, offset, length, first, first)
    ring = t.ring.ctypes.data
    for j in range(count):
        libc.copy(at + j * PAGE_BYTES, ring + (first + j) % slots * PAGE_BYTES, PAGE_BYTES)
    lanes.words[i, s.WAITING] += wire.HEADER_BYTES + length
    return True


@kernel()
def send_piece(t, c, cookie, offset, count, first):
    """Send `count` pages of a streamed write that were just taken in, side by side in the ring:
    they are sent from there. False: one of them is on its way already; all of these go to the
    disk."""
    lanes, i, slots = c.lanes, c.words[s.LANE_INDEX], t.words[kernels.SLOTS]
    for entry in range(first, first + count):
        if t.slot_flags[entry % slots] & states.HELD == 0:
            for other in range(first, first + count):
                if t.slot_flags[other % slots] & states.HELD:
                    kernels.land(t, other, False)
            return False
    length = count * PAGE_BYTES
    _enter(t, lanes, i, wire.WRITE, cookie, offset, length, first, c.words[s.BEGUN])
    w = lanes.words[i]
    others = length < c.words[s.LEFT] or c.words[s.DISK_BARRIER_ENTRY] >= 0
    lanes.asked[i, (w[s.TAIL] - 1) & (s.DEPTH - 1), s.PART] = others
    w[s.WAITING] += wire.HEADER_BYTES
    w[s.BULK_AT] = t.ring.ctypes.data + first % slots * PAGE_BYTES
    w[s.BULK_LEFT] = length
    return True


# Answers (under the table's mutex) ----------------------------------------------------------------


@kernel()
def _give_back(lanes, c, i, row, refused):
    """The oldest request becomes an item; there must be room for it."""
    if row[s.KIND] == wire.READ:
        s.item(c, nbd.READ, row[s.COOKIE], row[s.OFFSET], row[s.LENGTH], 0, -1, 0)
    else:
        kind, channel_id = s.LOST_PART if row[s.PART] else s.LOST, lanes.words[i, s.CHANNEL_ID]
        s.item(
            c, kind, row[s.COOKIE], row[s.OFFSET], row[s.LENGTH], refused, row[s.FIRST], channel_id
        )
        if row[s.PART]:
            lanes.words[i, s.LOST_AT] = row[s.FIRST] + row[s.LENGTH] // PAGE_BYTES - 1
    c.items[c.words[s.ITEMS] - 1, s.ITEM_BEGAN] = row[s.ASKED_NS]
    ends.over(lanes, i)


@kernel()
def _still(t, row):
    """Say whether the pages of a read are unchanged since it was asked for."""
    return _stamp(t, row[s.OFFSET] // PAGE_BYTES, row[s.LENGTH] // PAGE_BYTES) == row[s.STAMP]


@kernel()
def _time(c, row, cause):
    """Time a request that is answered in this turn."""
    latency.add(c.times, cause, c.lanes.shared[s.TURN_NS] - row[s.ASKED_NS], 1)


@kernel()
def _count(t, c, row):
    _time(c, row, latency.LENDER)
    pages = row[s.LENGTH] // PAGE_BYTES
    t.words[kernels.READ] += pages
    t.words[kernels.READ_LANE] += pages
    t.activity[row[s.OFFSET] // PAGE_BYTES // t.words[kernels.SPAN_PAGES]] += pages


@kernel()
def _landed(t, lanes, row):
    pages = row[s.LENGTH] // PAGE_BYTES
    for entry in range(row[s.FIRST], row[s.FIRST] + pages):
        kernels.land(t, entry, True)
    kernels.release(t)
    t.words[kernels.WRITE_LANE] += pages
    if t.words[kernels.WATCHED]:
        lanes.shared[s.TELL] = 1


@kernel()
def _acknowledged(t, c, i, row):
    """The lender has what was written. A streamed write is over with its last piece; if an earlier
    one was refused, once the disk has that."""
    _landed(t, c.lanes, row)
    lost_at = c.lanes.words[i, s.LOST_AT]
    if row[s.PART] == 0 and lost_at >= row[s.BEFORE]:
        s.item(c, s.LANDING, row[s.COOKIE], row[s.OFFSET], 0, 0, row[s.FIRST], 0)
        c.items[c.words[s.ITEMS] - 1, s.ITEM_DISK_BARRIER] = lost_at
    elif row[s.PART] == 0:
        c.words[s.OUT] = s.head(c, c.outward, c.words[s.OUT], nbd.WRITE, row[s.COOKIE], 0, 0, 0)
        _time(c, row, latency.WRITE)
    ends.over(c.lanes, i)


@inline_kernel()
def _small(t, c, i, row, at):
    """A small answer that is here wholly, its bytes at `at`: it is sent from there, and its head
    takes the place of the record's."""
    if not _still(t, row):
        _give_back(c.lanes, c, i, row, 0)
        return
    cookie, offset, length = row[s.COOKIE], row[s.OFFSET], row[s.LENGTH]
    begin = at - s.head_bytes(c)
    ends.put_head(c, begin, cookie, offset, length)
    s.part(c, begin, s.head_bytes(c) + length)
    _count(t, c, row)
    ends.over(c.lanes, i)


@inline_kernel()
def _answer(t, c, i):
    """The next answer in the buffer. True: look at the next one."""
    lanes, w = c.lanes, c.lanes.words[i]
    waiting = w[s.CAME] - w[s.PARSED]
    if waiting < wire.HEADER_BYTES:
        return False
    at = ends.base(lanes, i) + w[s.PARSED]
    kind, length = libc.get(at) & 0xFF, libc.get(at + 24)
    row = lanes.asked[i, w[s.HEAD] & (s.DEPTH - 1)]
    known = w[s.HEAD] < w[s.TAIL] and libc.get(at + 8) == w[s.HEAD] + 1
    if known and kind == wire.REFUSED and 0 <= length <= wire.REASON_BYTES_MAX:
        if waiting < wire.HEADER_BYTES + length:
            return False
        w[s.PARSED] += wire.HEADER_BYTES + length
        _give_back(lanes, c, i, row, 1)
    elif known and kind == wire.ACK and length == 0 and row[s.KIND] == wire.WRITE:
        w[s.PARSED] += wire.HEADER_BYTES
        _acknowledged(t, c, i, row)
    elif known and kind == wire.DATA and row[s.KIND] == wire.READ and length == row[s.LENGTH]:
        if length <= ends.SMALL_BYTES:
            if waiting < wire.HEADER_BYTES + length:
                return False
            w[s.PARSED] += wire.HEADER_BYTES + length
            _small(t, c, i, row, at + wire.HEADER_BYTES)
            return True
        staged = min(waiting - wire.HEADER_BYTES, length)
        large = ends.base(lanes, i) + s.LARGE_AT
        libc.copy(large, at + wire.HEADER_BYTES, staged)
        w[s.PARSED] += wire.HEADER_BYTES + staged
        w[s.REST] = length - staged
        w[s.WHOLE] = 1 if staged == length else 0
        return False
    else:
        w[s.STATE] = s.BROKEN
        w[s.VIOLATED] = 1
        return False
    return True


@inline_kernel()
def _settle_one(t, c, i):
    """True: there is more, once answers were sent and items taken."""
    lanes, w = c.lanes, c.lanes.words[i]
    more = True
    while more:
        full = (
            c.words[s.ITEMS] == s.ITEMS_MAX
            or c.words[s.OUT] > s.SEND_BYTES
            or c.words[s.PARTS] == s.PARTS_MAX
        )
        if w[s.STATE] == s.BROKEN:
            w[s.WHOLE] = 0
            if w[s.HEAD] == w[s.TAIL]:
                w[s.STATE] = s.GONE
                lanes.shared[s.SWEEP] = 1
                return False
            if full:
                return True
            _give_back(lanes, c, i, lanes.asked[i, w[s.HEAD] & (s.DEPTH - 1)], 0)
        elif w[s.WHOLE] == 1:
            if full:
                return True
            row = lanes.asked[i, w[s.HEAD] & (s.DEPTH - 1)]
            w[s.WHOLE] = 0
            if _still(t, row):
                w[s.WHOLE] = s.CHECKED
                _count(t, c, row)
                return True
            _give_back(lanes, c, i, row, 0)
        elif w[s.REST] or w[s.WHOLE]:
            return False
        elif full:
            return w[s.CAME] > w[s.PARSED]
        else:
            more = _answer(t, c, i) or w[s.WHOLE] == 1 or w[s.STATE] == s.BROKEN
    return False


@inline_kernel()
def settle(t, c):
    """Deal with every answer that is here, and with lanes that broke. True: there is more, once
    answers were sent and items taken."""
    again = False
    for i in range(c.lanes.shared[s.USED]):
        if c.lanes.words[i, s.STATE] in (s.UP, s.BROKEN) and _settle_one(t, c, i):
            again = True
    return again


# The end ------------------------------------------------------------------------------------------


@kernel()
def _writes(lanes, i):
    w = lanes.words[i]
    for number in range(w[s.HEAD], w[s.TAIL]):
        if lanes.asked[i, number & (s.DEPTH - 1), s.KIND] == wire.WRITE:
            return True
    return False


@kernel(cache=True)
def drain(t, c):
    """The client is gone: what it wrote is seen to all the same. True: there are items, call
    again."""
    lanes = c.lanes
    c.words[s.ITEMS] = c.words[s.OUT] = c.words[s.PARTS] = 0
    while lanes.shared[s.UNDER_WAY]:
        for i in range(lanes.shared[s.USED]):
            w = lanes.words[i]
            if w[s.HEAD] < w[s.TAIL] and not _writes(lanes, i):
                lanes.shared[s.UNDER_WAY] -= w[s.TAIL] - w[s.HEAD]
                w[s.HEAD] = w[s.TAIL]
                w[s.REST] = w[s.WHOLE] = 0
                w[s.STATE] = s.GONE
        ends.push(lanes)
        ends.wait(c, False, ends.LONG_NS)
        kernels.lock(t)
        settle(t, c)
        kernels.unlock(t)
        c.words[s.OUT] = c.words[s.PARTS] = 0
        for i in range(lanes.shared[s.USED]):
            if lanes.words[i, s.WHOLE] == s.CHECKED:
                lanes.words[i, s.WHOLE] = 0
                ends.over(lanes, i)
        if c.words[s.ITEMS]:
            return True
    return False
