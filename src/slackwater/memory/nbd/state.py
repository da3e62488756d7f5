"""The state of an NBD connection that its compiled loop and the program share; how answers begin.

Requests that the loop cannot finish become items, a row of numbers each, for the program.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base import limits
from slackwater.common.native import libc
from slackwater.common.native.compiled import inline_kernel, kernel
from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.pages import latency

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
AT: Final = 13  # offset on the device where the next byte of a streamed write belongs
DISK_BARRIER_ENTRY: Final = 14  # a streamed write's last entry that must reach the disk; -1: none
SCRATCH: Final = 15
STREAMED: Final = 16  # the last request was
PARTS: Final = 17  # answers that wait to be sent where they lie
LANE_INDEX: Final = 18  # of a streamed write: the lane that it leaves on; -1: mapped memory
BEGUN: Final = 19  # of a streamed write: how many entries the ring had before it
READS: Final = 20  # answered at once, and not timed yet
WRITES: Final = 21
WORDS: Final = 22

# An item
ITEM_KIND: Final = 0  # a command, or one of these:
LANDING: Final = 100  # a write whose entries are to be sent, or to reach the disk
LOST: Final = 101  # a write that was sent on a lane and not acknowledged
LOST_PART: Final = 102  # a piece of a lost write, not its last: nobody waits for it
ITEM_COOKIE: Final = 1
ITEM_OFFSET: Final = 2
ITEM_LENGTH: Final = 3
ITEM_FLAGS: Final = 4
ITEM_FIRST: Final = 5  # entry of the ring; -1: none was made
ITEM_AT: Final = 6  # of the payload in the receive buffer; of a LOST one, its channel's id
ITEM_DISK_BARRIER: Final = 7  # the last entry, before these, that must reach the disk; -1: none
ITEM_BEGAN: Final = 8  # when it was taken, or asked for on a lane: nanoseconds
ITEM_WORDS: Final = 9
ITEMS_MAX: Final = 64

SLACK_BYTES: Final = 64 * 1024
RECEIVE_BYTES: Final = 256 * 1024
SEND_BYTES: Final = 256 * 1024
PARTS_MAX: Final = 512
"""They leave in one system call, which takes 1,024."""
HEAD_BYTES: Final = 28
"""The head of an answer that carries data has no more."""

# A lane: a stream to a lender on which the loop itself asks (lanes.py)
LANES: Final = limits.NBD_LANES_MAX
DEPTH: Final = 256
"""Requests of one lane that are under way, at most; a power of two."""
CHANNEL_ID: Final = 0  # which channel it belongs to; 0: none
LANE_FD: Final = 1
STATE: Final = 2
HEAD: Final = 3  # the oldest request that is unanswered, counted from the beginning
TAIL: Final = 4
WAITING: Final = 5  # bytes of requests in the buffer
SENT: Final = 6  # bytes of requests that have left the buffer
CAME: Final = 7  # bytes of answers in the buffer
PARSED: Final = 8
REST: Final = 9  # of a large answer, bytes that are to come
WHOLE: Final = 10  # a large answer is; CHECKED: it may be sent
SINCE_NS: Final = 11  # nothing has come
VIOLATED: Final = 12  # the lender sent what may not be
QUEUED: Final = 13  # requests in the buffer
BLOCKED: Final = 14  # the socket takes no more at present
BULK_AT: Final = 15  # address of the body that follows the requests that wait
BULK_LEFT: Final = 16  # bytes of the body that have not left
LOST_AT: Final = 17  # the last entry of a piece that was not acknowledged
BUFFER: Final = 18  # address of its LANE_BYTES
LANE_WORDS: Final = 19

CHECKED: Final = 2

NONE: Final = 0
UP: Final = 1
BROKEN: Final = 2  # its requests are to be given back
GONE: Final = 3  # it is to be closed

# A request that was sent on it; the first has number 1
KIND: Final = 0
COOKIE: Final = 1
OFFSET: Final = 2
LENGTH: Final = 3
FIRST: Final = 4  # of a write, its first entry in the ring
STAMP: Final = 5  # of a read, how often its pages had been changed
BEFORE: Final = 5  # of a write, its first entry; of a streamed one's pieces, BEGUN
PART: Final = 6  # others come behind this piece
ASKED_NS: Final = 7
ASKED_WORDS: Final = 8

# Words of all lanes together
UNDER_WAY: Final = 0
WANTED: Final = 1  # id of a channel that leads to pages and has no lane yet
SWEEP: Final = 2  # some are to be closed
TELL: Final = 3  # entries came off the ring that somebody may wait for
CLOCK: Final = 4
USED: Final = 7  # all lanes that there ever were have lower numbers
TURN_NS: Final = 8  # when this turn began: what came before it was taken is as old
POLL: Final = 9
SHARED_WORDS: Final = POLL + 1 + LANES

LANE_STAGING_BYTES: Final = 256 * 1024
REQUESTS_BYTES: Final = 256 * 1024
LARGE_BYTES: Final = 1024 * 1024
"""The longest read that a lane is asked for."""
REQUESTS_AT: Final = LANE_STAGING_BYTES
LARGE_AT: Final = REQUESTS_AT + REQUESTS_BYTES + 4096
LANE_BYTES: Final = LARGE_AT + LARGE_BYTES
"""A lane's buffer: answers that came, requests that wait, a large answer."""


class Lanes(NamedTuple):
    words: NDArray[np.int64]  # by lane
    asked: NDArray[np.int64]  # by lane, number
    shared: NDArray[np.int64]
    head: NDArray[np.uint8]  # of an answer, until it is put before its data


class Connection(NamedTuple):
    words: NDArray[np.int64]
    sync: NDArray[np.uint8]  # a mutex: whose turn it is to send
    inward: NDArray[np.uint8]
    outward: NDArray[np.uint8]
    items: NDArray[np.int64]
    lanes: Lanes
    parts: NDArray[np.int64]  # (address, bytes); the first is what lies in `outward`
    message: NDArray[np.int64]  # struct msghdr
    times: latency.Histogram


def make_connection(
    fd: int, size: int, length_max: int, *, chunked: bool, counted: latency.Histogram | None = None
) -> Connection:
    """Buffers hold the largest request whole; their pages come into being as they are touched."""
    words = np.zeros(WORDS, np.int64)
    words[FD], words[SIZE], words[LENGTH_MAX], words[CHUNKED] = fd, size, length_max, chunked
    words[DISK_BARRIER_ENTRY] = -1
    return Connection(
        words,
        np.zeros(libc.MUTEX_BYTES, np.uint8),
        untouched(length_max + SLACK_BYTES),
        untouched(length_max + SLACK_BYTES),
        np.zeros((ITEMS_MAX, ITEM_WORDS), np.int64),
        Lanes(
            np.zeros((LANES, LANE_WORDS), np.int64),
            untouched(LANES * DEPTH * ASKED_WORDS * 8).view(np.int64).reshape(LANES, DEPTH, -1),
            np.zeros(SHARED_WORDS, np.int64),
            np.zeros(HEAD_BYTES, np.uint8),
        ),
        np.zeros((PARTS_MAX + 1, 2), np.int64),
        np.zeros(7, np.int64),
        latency.histogram() if counted is None else counted,
    )


def untouched(nbytes: int) -> NDArray[np.uint8]:
    """Return zeroed memory whose pages come into being as they are touched, and go with it."""
    return np.frombuffer(libc.allocate(nbytes)[0], np.uint8)


@kernel()
def number(buffer, at, nbytes):
    value = np.int64(0)
    for i in range(at, at + nbytes):
        value = value << 8 | np.int64(buffer[i])
    return value


@kernel()
def put_number(buffer, at, nbytes, value):
    for i in range(nbytes):
        buffer[at + nbytes - 1 - i] = value >> (8 * i) & 0xFF


@kernel()
def cookie_of(c, at):
    """Return the cookie of the request whose header starts at `at`."""
    return number(c.inward, at + 8, 8)


@inline_kernel()
def head(c, buffer, out, kind, cookie, error, offset, nbytes):
    """The head of an answer at buffer[out]; where the data belong."""
    if (kind == nbd.READ or kind == nbd.BLOCK_STATUS) and c.words[CHUNKED]:
        put_number(buffer, out, 4, nbd.CHUNK_MAGIC)
        put_number(buffer, out + 4, 2, nbd.CHUNK_DONE)
        put_number(buffer, out + 8, 8, cookie)
        if error:
            put_number(buffer, out + 6, 2, nbd.CHUNK_ERROR)
            put_number(buffer, out + 16, 4, 6)
            put_number(buffer, out + 20, 4, error)
            put_number(buffer, out + 24, 2, 0)
            return out + 26
        put_number(buffer, out + 6, 2, nbd.CHUNK_DATA)
        put_number(buffer, out + 16, 4, nbytes + 8)
        put_number(buffer, out + 20, 8, offset)
        return out + 28
    put_number(buffer, out, 4, nbd.SIMPLE_MAGIC)
    put_number(buffer, out + 4, 4, error)
    put_number(buffer, out + 8, 8, cookie)
    return out + 16


@kernel()
def head_bytes(c):
    """Return the length of the head of an answer that carries data."""
    return HEAD_BYTES if c.words[CHUNKED] else 16


@kernel()
def part(c, address, nbytes):
    """One more answer, to be sent where it lies; there must be room."""
    c.words[PARTS] += 1
    c.parts[c.words[PARTS], 0] = address
    c.parts[c.words[PARTS], 1] = nbytes


@kernel()
def item(c, kind, cookie, offset, length, flags, first, at):
    """One more; there must be room."""
    row = c.items[c.words[ITEMS]]
    row[ITEM_KIND] = kind
    row[ITEM_COOKIE] = cookie
    row[ITEM_OFFSET] = offset
    row[ITEM_LENGTH] = length
    row[ITEM_FLAGS] = flags
    row[ITEM_FIRST] = first
    row[ITEM_AT] = at
    row[ITEM_DISK_BARRIER] = -1
    row[ITEM_BEGAN] = c.lanes.shared[TURN_NS]
    c.words[ITEMS] += 1


@inline_kernel()
def head_for(c, kind, at, error, offset, nbytes):
    """The head of an answer to the request at `at`; where the data belong."""
    cookie = cookie_of(c, at)
    return head(c, c.outward, c.words[OUT], kind, cookie, error, offset, nbytes)


@kernel()
def defer(c, kind, at, offset, length, flags, first):
    late = c.words[DISK_BARRIER_ENTRY]
    item(c, kind, cookie_of(c, at), offset, length, flags, first, at + nbd.REQUEST_BYTES)
    c.items[c.words[ITEMS] - 1, ITEM_DISK_BARRIER] = late
    c.words[DISK_BARRIER_ENTRY] = -1


@kernel()
def written(c, at, offset, length, flags, first, done):
    """Answer a write whose pages were taken in, or have somebody wait for what they wait for."""
    if done and c.words[DISK_BARRIER_ENTRY] < 0 and not flags & nbd.FUA:
        c.words[OUT] = head_for(c, nbd.WRITE, at, 0, 0, 0)
        c.words[WRITES] += 1
    else:
        defer(c, LANDING, at, offset, length, flags, first)


@kernel()
def begin_turn(c):
    c.lanes.shared[TURN_NS] = libc.now_ns(c.lanes.shared.ctypes.data + CLOCK * 8)


@kernel()
def time_answered(c):
    """Time the requests that were answered at once in this turn, now that the answers have left."""
    if c.words[READS] or c.words[WRITES]:
        took_ns = libc.now_ns(c.lanes.shared.ctypes.data + CLOCK * 8) - c.lanes.shared[TURN_NS]
        latency.add(c.times, latency.HIT, took_ns, c.words[READS])
        latency.add(c.times, latency.WRITE, took_ns, c.words[WRITES])
        c.words[READS] = c.words[WRITES] = 0
