"""A connection's loop, compiled: receive, parse, copy pages, answer; no interpreter lock.

Requests are taken as they come in the buffer, many at a time; their answers leave together. What
cannot be done at once becomes an item for the program: reads of pages that are on disk or behind a
channel, writes that count only once they are somewhere else, flushes, trims, unaligned requests.
Items are answered in any order, as the protocol allows; the loop goes on meanwhile.

The payload of a large write to mapped memory is received straight into the ring's slots and taken
in as it comes, so that the client fills its socket while pages are copied on.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common import abi
from slackwater.common.compiled import njit
from slackwater.memory import kernels, shelf, stocking
from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.store import PAGE_BYTES

# Words of a connection
FD: Final = 0
START: Final = 1  # of what was received and is not parsed yet
END: Final = 2
OUT: Final = 3  # bytes of answers that wait to be sent
CHUNKED: Final = 4
SIZE: Final = 5  # of the export, in bytes
LENGTH_MAX: Final = 6
ITEMS: Final = 7
NEED: Final = 8  # slots that a write waits for
REQUESTS: Final = 9
BATCHES: Final = 10
OVERSIZED: Final = 11
LEFT: Final = 12  # payload of a streamed write that is not taken in yet
AT: Final = 13  # ... and where on the device it belongs
LATE: Final = 14  # ... and its last entry that must reach the disk; -1: none
SCRATCH: Final = 15
STREAMED: Final = 16  # the last request was
STREAM_ID: Final = 17  # of what this client reads, to the prefetcher
WORDS: Final = 20

# An item
ITEM_KIND: Final = 0  # a command, or one of these two:
LANDING: Final = 100  # a write whose entries are to be sent, or to reach the disk
ITEM_COOKIE: Final = 1  # as it lies in memory
ITEM_OFFSET: Final = 2
ITEM_LENGTH: Final = 3
ITEM_FLAGS: Final = 4
ITEM_FIRST: Final = 5  # entry of the ring; -1: none was made
ITEM_AT: Final = 6  # of the payload in the receive buffer
ITEM_LATE: Final = 7  # the last entry, before these, that must reach the disk; -1: none
ITEM_WORDS: Final = 8
ITEMS_MAX: Final = 64

# What `serve` returns
CLOSED: Final = 0
DISCONNECTED: Final = 1
GARBAGE: Final = 2
HAS_ITEMS: Final = 3
# and what `parse` may say besides
MORE: Final = 10
SEND_FIRST: Final = 11
NO_ROOM: Final = 12
STREAM: Final = 13
CAME: Final = 14

STREAM_BYTES: Final = 64 * 1024
"""Writes from here on are streamed, where they go to mapped memory."""
STREAM_PAGES: Final = 64
"""... so many pages at a time: the table's mutex is held meanwhile."""
SLACK_BYTES: Final = 64 * 1024
RECEIVE_BYTES: Final = 256 * 1024
SEND_BYTES: Final = 256 * 1024


class Connection(NamedTuple):
    words: NDArray[np.int64]
    sync: NDArray[np.uint8]  # a mutex: whose turn it is to send
    inward: NDArray[np.uint8]
    outward: NDArray[np.uint8]
    items: NDArray[np.int64]


def make_connection(
    fd: int, size: int, length_max: int, *, chunked: bool, stream: int = 0
) -> Connection:
    """Buffers hold the largest request whole; their pages come into being as they are touched."""
    words = np.zeros(WORDS, np.int64)
    words[FD], words[SIZE], words[LENGTH_MAX], words[CHUNKED] = fd, size, length_max, chunked
    words[LATE], words[STREAM_ID] = -1, stream
    return Connection(
        words,
        np.zeros(abi.MUTEX_BYTES, np.uint8),
        np.zeros(length_max + SLACK_BYTES, np.uint8),
        np.zeros(length_max + SLACK_BYTES, np.uint8),
        np.zeros((ITEMS_MAX, ITEM_WORDS), np.int64),
    )


@njit(nogil=True)
def _number(buffer, at, nbytes):
    value = np.int64(0)
    for i in range(at, at + nbytes):
        value = value << 8 | np.int64(buffer[i])
    return value


@njit(nogil=True)
def _put(buffer, at, nbytes, value):
    for i in range(nbytes):
        buffer[at + nbytes - 1 - i] = value >> (8 * i) & 0xFF


@njit(nogil=True)
def _head(c, kind, at, error, offset, nbytes):
    """The head of an answer to the request at `at`; where the data belong."""
    out = c.words[OUT]
    if (kind == nbd.READ or kind == nbd.BLOCK_STATUS) and c.words[CHUNKED]:
        _put(c.outward, out, 4, nbd.CHUNK_MAGIC)
        _put(c.outward, out + 4, 2, nbd.CHUNK_DONE)
        c.outward[out + 8 : out + 16] = c.inward[at + 8 : at + 16]
        if error:
            _put(c.outward, out + 6, 2, nbd.CHUNK_ERROR)
            _put(c.outward, out + 16, 4, 6)
            _put(c.outward, out + 20, 4, error)
            _put(c.outward, out + 24, 2, 0)
            return out + 26
        _put(c.outward, out + 6, 2, nbd.CHUNK_DATA)
        _put(c.outward, out + 16, 4, nbytes + 8)
        _put(c.outward, out + 20, 8, offset)
        return out + 28
    _put(c.outward, out, 4, nbd.SIMPLE_MAGIC)
    _put(c.outward, out + 4, 4, error)
    c.outward[out + 8 : out + 16] = c.inward[at + 8 : at + 16]
    return out + 16


@njit(nogil=True)
def _item(c, kind, at, offset, length, flags, first):
    item = c.items[c.words[ITEMS]]
    item[ITEM_KIND] = kind
    cookie = np.int64(0)
    for i in range(8):
        cookie = cookie << 8 | np.int64(c.inward[at + 8 + i])
    item[ITEM_COOKIE] = cookie
    item[ITEM_OFFSET] = offset
    item[ITEM_LENGTH] = length
    item[ITEM_FLAGS] = flags
    item[ITEM_FIRST] = first
    item[ITEM_AT] = at + nbd.REQUEST_BYTES
    item[ITEM_LATE] = c.words[LATE]
    c.words[LATE] = -1
    c.words[ITEMS] += 1


@njit(nogil=True)
def _read(t, c, at, offset, length):
    """Answer a read of whole pages, if all of them are at hand."""
    begin = _head(c, nbd.READ, at, 0, offset, length)
    target = c.outward.ctypes.data + begin
    first = offset // PAGE_BYTES
    count = length // PAGE_BYTES
    for i in range(count):
        if kernels.read_page(t, first + i, target + i * PAGE_BYTES) != kernels.DONE:
            return False
    for i in range(count):
        t.activity[(first + i) // t.words[kernels.SPAN_PAGES]] += 1
        shelf.consume(t.shelf, first + i)
    t.words[kernels.READ] += count
    c.words[OUT] = begin + length
    return True


@njit(nogil=True)
def _write(t, c, at, offset, length):
    """Take whole pages in; DONE when remote memory has every one."""
    source = c.inward.ctypes.data + at + nbd.REQUEST_BYTES
    first = offset // PAGE_BYTES
    worst = kernels.DONE
    for i in range(length // PAGE_BYTES):
        kind = kernels.write_page(t, first + i, source + i * PAGE_BYTES)
        if kind != kernels.DONE:
            worst = kind
    return worst


@njit(nogil=True)
def _written(c, at, offset, length, flags, first, done):
    """Answer a write whose pages were taken in, or have somebody wait for what they wait for."""
    if done and c.words[LATE] < 0 and not flags & nbd.FUA:
        c.words[OUT] = _head(c, nbd.WRITE, at, 0, 0, 0)
    else:
        _item(c, LANDING, at, offset, length, flags, first)


@njit(nogil=True)
def _refusal(c, kind, offset, length):
    """The error of a request that no export of this size can serve; 0: none."""
    if kind == nbd.FLUSH:
        return 0
    if kind == nbd.READ and length > c.words[LENGTH_MAX]:
        c.words[OVERSIZED] += 1
        return nbd.EOVERFLOW
    if length == 0:
        return nbd.EINVAL
    if offset < 0 or offset + length > c.words[SIZE]:
        writes = kind in (nbd.WRITE, nbd.WRITE_ZEROES)
        return nbd.ENOSPC if writes else nbd.EINVAL
    return 0


@njit(nogil=True)
def _one(t, c, at, kind, flags, offset, length):
    """One whole request. 0: it is dealt with; else what must happen first."""
    error = _refusal(c, kind, offset, length)
    if error == 0 and t.words[kernels.FAILED] and kind == nbd.WRITE:
        error = t.words[kernels.FAILED]
        if error != nbd.ENOSPC:
            error = nbd.EIO
    if error:
        c.words[OUT] = _head(c, kind, at, error, 0, 0)
        c.words[LATE] = -1
        return 0
    aligned = offset % PAGE_BYTES == 0 and length % PAGE_BYTES == 0
    if kind == nbd.READ:
        if aligned and c.words[OUT] + length + 64 > len(c.outward):
            return SEND_FIRST
        stocking.follow(t, c.words[STREAM_ID], offset, length)
        if aligned and _read(t, c, at, offset, length):
            return 0
    elif kind == nbd.WRITE and aligned:
        if kernels.room(t) < length // PAGE_BYTES:
            c.words[NEED] = length // PAGE_BYTES
            return NO_ROOM
        first = t.words[kernels.HEAD]
        done = _write(t, c, at, offset, length) == kernels.DONE
        _written(c, at, offset, length, flags, first, done)
        return 0
    _item(c, kind, at, offset, length, flags, -1)
    return 0


@njit(nogil=True)
def _mapped(t, page):
    span = page // t.words[kernels.SPAN_PAGES]
    return t.state[span] == kernels.MAPPED and t.base[span] != 0


@njit(nogil=True)
def _streams(t, c, offset, length):
    """Whether this write can be taken in while it comes."""
    return (
        length >= STREAM_BYTES
        and offset % PAGE_BYTES == 0
        and length % PAGE_BYTES == 0
        and _refusal(c, nbd.WRITE, offset, length) == 0
        and not t.words[kernels.FAILED]
        and _mapped(t, offset // PAGE_BYTES)
    )


@njit(nogil=True)
def parse(t, c):
    """Deal with what was received, under the table's mutex. Returns what the loop must do next."""
    while True:
        at = c.words[START]
        waiting = c.words[END] - at
        if waiting < nbd.REQUEST_BYTES:
            return MORE
        if _number(c.inward, at, 4) != nbd.REQUEST_MAGIC:
            return GARBAGE
        if c.words[ITEMS] == ITEMS_MAX:
            return HAS_ITEMS
        if c.words[OUT] > SEND_BYTES:
            return SEND_FIRST
        flags = _number(c.inward, at + 4, 2)
        kind = _number(c.inward, at + 6, 2)
        offset = _number(c.inward, at + 16, 8)
        length = _number(c.inward, at + 24, 4)
        whole = nbd.REQUEST_BYTES
        if kind == nbd.DISCONNECT:
            return DISCONNECTED
        if kind == nbd.WRITE:
            if length > c.words[LENGTH_MAX]:
                c.words[OVERSIZED] += 1
                return GARBAGE  # Its payload cannot be taken in, and what follows not be found.
            whole += length
            if waiting < whole:
                return STREAM if _streams(t, c, offset, length) else MORE
        status = _one(t, c, at, kind, flags, offset, length)
        if status:
            return status
        c.words[START] = at + whole
        c.words[STREAMED] = 0
        c.words[REQUESTS] += 1


@njit(nogil=True)
def _flush(c):
    """Send the answers; False: the client is gone."""
    if c.words[OUT] == 0:
        return True
    abi.lock(c.sync.ctypes.data)
    sent = abi.send_all(c.words[FD], c.outward.ctypes.data, c.words[OUT])
    abi.unlock(c.sync.ctypes.data)
    c.words[OUT] = 0
    return sent


@njit(nogil=True)
def _await_room(t, c):
    """Block until the dispatch entries that a write needs are free, or the backup fails: then the
    write is refused (section 2.4.3)."""
    kernels.lock(t)
    t.words[kernels.FULL] += 1
    while (
        kernels.room(t) < c.words[NEED]
        and not t.words[kernels.FAILED]
        and not t.words[kernels.STOP]
    ):
        abi.wait(t.sync.ctypes.data + kernels.ROOM_AT, t.sync.ctypes.data)
    kernels.unlock(t)


@njit(nogil=True)
def _receive(c):
    """Make room in the buffer and take in what is there; False: the client is gone."""
    left = c.words[END] - c.words[START]
    # A buffer that begins anew as often as it can stays in the processor's cache.
    cheap = left == 0 or (left < 2 * PAGE_BYTES and c.words[START] >= RECEIVE_BYTES)
    if c.words[START] and (cheap or len(c.inward) - c.words[END] < RECEIVE_BYTES):
        base = c.inward.ctypes.data
        abi.move(base, base + c.words[START], left)
        c.words[START] = 0
        c.words[END] = left
    space = min(len(c.inward) - c.words[END], RECEIVE_BYTES)
    if c.words[STREAMED] and left < nbd.REQUEST_BYTES:
        space = nbd.REQUEST_BYTES - left  # Its payload shall not come here.
    came = abi.receive(c.words[FD], c.inward.ctypes.data + c.words[END], space)
    if came <= 0:
        return False
    c.words[END] += came
    return True


@njit(nogil=True)
def _begin_stream(c):
    """The write's head goes to the front of the buffer, what came of its payload behind it."""
    at, base = c.words[START], c.inward.ctypes.data
    c.words[AT] = _number(c.inward, at + 16, 8)
    c.words[LEFT] = _number(c.inward, at + 24, 4)
    c.words[END] -= at
    abi.move(base, base + at, c.words[END])
    c.words[START] = nbd.REQUEST_BYTES
    c.words[STREAMED] = 1


@njit(nogil=True)
def _end_stream(t, c):
    """All of it was taken in: it is answered. Or the rest cannot go to mapped memory: it becomes a
    request of its own, with the same cookie, that is taken in when it is whole."""
    if c.words[LEFT]:
        _put(c.inward, 16, 8, c.words[AT])
        _put(c.inward, 24, 4, c.words[LEFT])
        had = c.words[END] - c.words[START]
        base = c.inward.ctypes.data
        abi.move(base + nbd.REQUEST_BYTES, base + c.words[START], had)
        c.words[START] = 0
        c.words[END] = nbd.REQUEST_BYTES + had
        c.words[STREAMED] = 0
        return
    _written(c, 0, c.words[AT], 0, _number(c.inward, 4, 2), t.words[kernels.HEAD], True)
    c.words[REQUESTS] += 1


@njit(nogil=True)
def _take_in(t, c):
    """The next pages of a streamed write, under the table's mutex: what is in the buffer, and what
    the socket has. CAME: go on, if anything is left. MORE: it has nothing. NO_ROOM, CLOSED."""
    first = c.words[AT] // PAGE_BYTES
    span_end = (first // t.words[kernels.SPAN_PAGES] + 1) * t.words[kernels.SPAN_PAGES]
    slots = t.words[kernels.SLOTS]
    count = min(c.words[LEFT] // PAGE_BYTES, span_end - first, STREAM_PAGES)
    count = min(count, kernels.room(t), slots - t.words[kernels.HEAD] % slots)
    if count < 1:
        c.words[NEED] = 1
        return NO_ROOM
    wanted = count * PAGE_BYTES
    target = kernels.next_slot(t)
    had = min(c.words[END] - c.words[START], wanted)
    abi.copy(target, c.inward.ctypes.data + c.words[START], had)
    came = had
    if had < wanted:
        n = abi.receive_now(c.words[FD], target + had, wanted - had)
        if n == 0 or (n < 0 and n != -abi.EAGAIN):
            return CLOSED
        came += max(n, 0)
    whole = came // PAGE_BYTES
    rest = came % PAGE_BYTES
    if had < wanted:  # The buffer is empty but for a page that came in part.
        c.words[START] = nbd.REQUEST_BYTES
        c.words[END] = nbd.REQUEST_BYTES + rest
        base = c.inward.ctypes.data + nbd.REQUEST_BYTES
        abi.copy(base, target + whole * PAGE_BYTES, rest)
    else:
        c.words[START] += had
    for i in range(whole):
        if kernels.take_page(t, first + i) != kernels.DONE:
            c.words[LATE] = t.words[kernels.HEAD] - 1
    kernels.wake_writer(t)
    c.words[AT] += whole * PAGE_BYTES
    c.words[LEFT] -= whole * PAGE_BYTES
    return CAME if came > had or whole else MORE


@njit(nogil=True)
def _stream(t, c):
    """A large write, as it comes. False: the client is gone, or the device ends."""
    _begin_stream(c)
    while True:
        kernels.lock(t)
        status = CAME
        over = (
            c.words[LEFT] == 0
            or t.words[kernels.FAILED] != 0
            or not _mapped(t, c.words[AT] // PAGE_BYTES)
        )
        if over:
            _end_stream(t, c)
        else:
            status = _take_in(t, c)
        kernels.unlock(t)
        if over:
            return True
        if status == CLOSED or t.words[kernels.STOP]:
            return False
        if status == NO_ROOM:
            _await_room(t, c)
        elif status == MORE:
            abi.await_event(c.words[FD], abi.POLL_IN, c.words.ctypes.data + SCRATCH * 8)


@njit(nogil=True, cache=True)
def serve(t, c):
    """Until the connection ends or there are items. Their payloads lie in the buffer until the next
    call."""
    c.words[ITEMS] = 0
    while True:
        kernels.lock(t)
        status = parse(t, c)
        kernels.wake_writer(t)
        called = t.shelf.words[shelf.CALL]
        t.shelf.words[shelf.CALL] = 0
        kernels.unlock(t)
        c.words[BATCHES] += 1
        if not _flush(c):
            return CLOSED
        if called:
            shelf.ring(t.shelf)
        if status in (DISCONNECTED, GARBAGE):
            return status
        if c.words[ITEMS]:
            return HAS_ITEMS
        if status == NO_ROOM:
            _await_room(t, c)
            if t.words[kernels.STOP]:
                return CLOSED
        elif (status == MORE and not _receive(c)) or (status == STREAM and not _stream(t, c)):
            return CLOSED


@njit(nogil=True, cache=True)
def send(c, address, nbytes):
    """Send an answer that the program made; False: the client is gone."""
    abi.lock(c.sync.ctypes.data)
    sent = abi.send_all(c.words[FD], address, nbytes)
    abi.unlock(c.sync.ctypes.data)
    return sent
