"""The asking end of a data stream, compiled: many requests leave in one call, many answers come in
one. Nothing here waits, save `settle`, and that not long.

The parts that are under way lie in a table of the channel, those to be sent in a ring of their
stream, by number. The bytes of a write are sent from where the caller has them, those of a read are
received there. State lies in one block of bytes a stream, as in target_kernels.py.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,import-untyped,untyped-decorator"

from typing import Final

from numba import types

from slackwater.common.base import limits
from slackwater.common.native import libc
from slackwater.common.native.compiled import njit
from slackwater.common.transport import wire

# Words of a stream
FD: Final = 0
START: Final = 8  # of what was received and is not parsed yet
END: Final = 16
HEAD: Final = 24  # of the ring: the next to be sent, counted from the beginning
TAIL: Final = 32
SENT: Final = 40  # bytes of the ring's head that have left
LEFT: Final = 48  # bytes of the present answer that are to come
TARGET: Final = 56  # where they belong; 0: they are dropped
ARRIVING: Final = 64  # the number of the present answer; 0: none
RECORDS: Final = 72
DONE: Final = 80  # numbers that were answered, in the list
NUMBER: Final = 88  # of a refusal
CODE: Final = 96
REASON: Final = 104  # address of its text
LENGTH: Final = 112
ERROR: Final = 120  # errno
KIND: Final = 128  # of a malformed record
LIMIT: Final = 136
INDEX: Final = 144  # of this stream
_POLL_AT: Final = 192
_MESSAGE_AT: Final = 256
RING_AT: Final = 512
RING: Final = 2 * limits.TRANSFERS_MAX
"""A power of two."""
DONE_AT: Final = RING_AT + 8 * RING
_BATCH: Final = 128
_VECTOR_AT: Final = DONE_AT + 8 * limits.TRANSFERS_MAX
_HEADS_AT: Final = _VECTOR_AT + _BATCH * 2 * 16
_HEAD_BYTES: Final = wire.HEADER_BYTES + 8
STAGING_AT: Final = _HEADS_AT + _BATCH * _HEAD_BYTES
STAGING_BYTES: Final = 256 * 1024
_SINK_AT: Final = STAGING_AT + STAGING_BYTES
_SINK_BYTES: Final = 64 * 1024
BLOCK_BYTES: Final = _SINK_AT + _SINK_BYTES

# A part that is under way, in the table of its channel at `number % PARTS`
PARTS: Final = limits.TRANSFERS_MAX
"""A power of two: the numbers of what is under way lie closer together."""
PART_BYTES: Final = 64
PART_NUMBER: Final = 0
PART_KIND: Final = 8
PART_HANDLE: Final = 16
PART_OFFSET: Final = 24
PART_ADDRESS: Final = 32
PART_LENGTH: Final = 40
PART_STREAM: Final = 48
PART_ABANDONED: Final = 56

# Results
IDLE: Final = 0  # nothing more is there, or all was sent
BUSY: Final = 1  # more may be there, or the socket is full
ENDED: Final = 2
FAILED: Final = 3
MALFORMED: Final = 4  # a record that may not be
UNASKED: Final = 5  # an answer to what was not asked
REFUSED: Final = 6
ANSWERED: Final = 7  # what was asked, and nothing else happened
_MORE: Final = 8

_BUDGET_BYTES: Final = 1024 * 1024
"""One stream receives so much before the others have their turn."""
_LARGE_BYTES: Final = 32 * 1024
_FEW_BYTES: Final = 4096

assert PARTS & (PARTS - 1) == 0
assert RING & (RING - 1) == 0


@njit(nogil=True)
def _part(parts, number):
    return parts + (number & (PARTS - 1)) * PART_BYTES


# Sending ------------------------------------------------------------------------------------------


@njit(nogil=True)
def _entry(vector, count, address, nbytes):
    libc.put(vector + count * 16, address)
    libc.put(vector + count * 16 + 8, nbytes)
    return count + 1


@njit(nogil=True)
def _gather(s, parts, first, last):
    """The records of the ring's entries [first, last) as a vector: (its entries, their bytes)."""
    vector = s + _VECTOR_AT
    count = 0
    total = 0
    for i in range(first, last):
        part = _part(parts, libc.get(s + RING_AT + (i & (RING - 1)) * 8))
        head = s + _HEADS_AT + (i - first) * _HEAD_BYTES
        length = libc.get(part + PART_LENGTH)
        writes = libc.get(part + PART_KIND) == wire.WRITE
        libc.put(head, libc.get(part + PART_KIND) | libc.get(part + PART_HANDLE) << 32)
        libc.put(head + 8, libc.get(part + PART_NUMBER))
        libc.put(head + 16, libc.get(part + PART_OFFSET))
        libc.put(head + 24, length if writes else 8)
        libc.put(head + 32, length)
        skip = libc.get(s + SENT) if i == first else 0
        size = wire.HEADER_BYTES if writes else _HEAD_BYTES
        if skip < size:
            count = _entry(vector, count, head + skip, size - skip)
            total += size - skip
        if writes:
            skip = max(skip - size, 0)
            count = _entry(vector, count, libc.get(part + PART_ADDRESS) + skip, length - skip)
            total += length - skip
    return count, total


@njit(nogil=True)
def _advance(s, parts, sent):
    """Take `sent` bytes off the ring's head."""
    head = libc.get(s + HEAD)
    sent += libc.get(s + SENT)
    while head < libc.get(s + TAIL):
        part = _part(parts, libc.get(s + RING_AT + (head & (RING - 1)) * 8))
        size = _HEAD_BYTES
        if libc.get(part + PART_KIND) == wire.WRITE:
            size = wire.HEADER_BYTES + libc.get(part + PART_LENGTH)
        if sent < size:
            break
        sent -= size
        head += 1
    libc.put(s + HEAD, head)
    libc.put(s + SENT, sent)


@njit(nogil=True)
def _flush(s, parts):
    message = s + _MESSAGE_AT  # struct msghdr; all but the vector and its length stay zero.
    while libc.get(s + HEAD) < libc.get(s + TAIL):
        first = libc.get(s + HEAD)
        count, total = _gather(s, parts, first, min(libc.get(s + TAIL), first + _BATCH))
        libc.put(message + 16, s + _VECTOR_AT)
        libc.put(message + 24, count)
        n = libc.send_message_now(libc.get(s + FD), message)
        if n == -libc.EAGAIN:
            return BUSY
        if n < 0:
            libc.put(s + ERROR, -n)
            return FAILED
        _advance(s, parts, n)
        if n < total:
            return BUSY
    return IDLE


# Receiving ----------------------------------------------------------------------------------------


@njit(nogil=True)
def _complete(s):
    """The present answer is whole."""
    libc.put(s + DONE_AT + libc.get(s + DONE) * 8, libc.get(s + ARRIVING))
    libc.put(s + DONE, libc.get(s + DONE) + 1)
    libc.put(s + ARRIVING, 0)


@njit(nogil=True)
def _staged_body(s):
    """Take the part of the present answer that the buffer holds."""
    start = libc.get(s + START)
    n = min(libc.get(s + END) - start, libc.get(s + LEFT))
    target = libc.get(s + TARGET)
    if target:
        libc.copy(target, s + STAGING_AT + start, n)
        libc.put(s + TARGET, target + n)
    libc.put(s + START, start + n)
    libc.put(s + LEFT, libc.get(s + LEFT) - n)
    if libc.get(s + LEFT) == 0:
        libc.put(s + LIMIT, STAGING_BYTES)
        _complete(s)


@njit(nogil=True)
def _refusal(s, length, waiting, at):
    """Report a refusal; its text stays in place until the next call."""
    if not 0 <= length <= wire.REASON_BYTES_MAX:
        return MALFORMED
    if waiting < wire.HEADER_BYTES + length:
        return _MORE
    libc.put(s + CODE, libc.get(at) >> 32 & 0xFFFFFFFF)
    libc.put(s + REASON, at + wire.HEADER_BYTES)
    libc.put(s + LENGTH, length)
    libc.put(s + START, libc.get(s + START) + wire.HEADER_BYTES + length)
    return REFUSED


@njit(nogil=True)
def _record(s, parts):
    """The next answer, if it is there (of DATA, its header). IDLE, _MORE, or what is wrong."""
    start = libc.get(s + START)
    waiting = libc.get(s + END) - start
    if waiting < wire.HEADER_BYTES:
        return _MORE
    at = s + STAGING_AT + start
    kind = libc.get(at) & 0xFF
    number = libc.get(at + 8)
    length = libc.get(at + 24)
    libc.put(s + KIND, kind)
    libc.put(s + NUMBER, number)
    libc.put(s + LENGTH, length)
    if kind != wire.ACK and kind != wire.DATA and kind != wire.REFUSED:
        return MALFORMED
    part = _part(parts, number)
    known = number != 0 and libc.get(part + PART_NUMBER) == number
    if not known or libc.get(part + PART_STREAM) != libc.get(s + INDEX):
        return UNASKED
    if kind == wire.REFUSED:
        status = _refusal(s, length, waiting, at)
        if status == REFUSED:
            libc.put(s + RECORDS, libc.get(s + RECORDS) + 1)
            libc.put(part + PART_NUMBER, 0)
        return status
    if kind == wire.ACK:
        if length != 0 or libc.get(part + PART_KIND) != wire.WRITE:
            return UNASKED
    elif length != libc.get(part + PART_LENGTH) or libc.get(part + PART_KIND) != wire.READ:
        return UNASKED
    libc.put(s + START, start + wire.HEADER_BYTES)
    libc.put(s + RECORDS, libc.get(s + RECORDS) + 1)
    libc.put(part + PART_NUMBER, 0)
    libc.put(s + ARRIVING, number)
    if kind == wire.ACK:
        _complete(s)
        return IDLE
    libc.put(s + LEFT, length)
    libc.put(s + TARGET, 0 if libc.get(part + PART_ABANDONED) else libc.get(part + PART_ADDRESS))
    _staged_body(s)
    return IDLE


@njit(nogil=True)
def _receive(s):
    """One call: the bytes that came, 0: the peer is gone, or minus errno."""
    fd = libc.get(s + FD)
    left = libc.get(s + LEFT)
    if left:
        target = libc.get(s + TARGET)
        if target:
            n = libc.receive_now(fd, target, min(left, wire.READ_BYTES))
        else:
            n = libc.receive_now(fd, s + _SINK_AT, min(left, _SINK_BYTES))
        if n > 0:
            libc.put(s + LEFT, left - n)
            if target:
                libc.put(s + TARGET, target + n)
            if n == left:
                libc.put(s + LIMIT, _FEW_BYTES if left > _LARGE_BYTES else STAGING_BYTES)
                _complete(s)
        return n
    start = libc.get(s + START)
    rest = libc.get(s + END) - start
    if start:
        libc.move(s + STAGING_AT, s + STAGING_AT + start, rest)
        libc.put(s + START, 0)
        libc.put(s + END, rest)
    room = min(STAGING_BYTES - rest, libc.get(s + LIMIT))
    n = libc.receive_now(fd, s + STAGING_AT + rest, room)
    if n > 0:
        libc.put(s + END, rest + n)
    return n


@njit(nogil=True)
def _take(s, parts):
    """All answers that are there: their numbers are in the list. IDLE, BUSY, or how it ended."""
    budget = _BUDGET_BYTES
    while True:
        while libc.get(s + LEFT) == 0:
            status = _record(s, parts)
            if status == _MORE:
                break
            if status != IDLE:
                return status
        if budget <= 0:
            return BUSY
        n = _receive(s)
        if n == -libc.EAGAIN:
            return IDLE
        if n == 0:
            return ENDED
        if n < 0:
            libc.put(s + ERROR, -n)
            return FAILED
        budget -= n


@njit(nogil=True)
def _enter(s, parts, number, kind, handle, offset, address, length):
    """A part into the table and the ring."""
    part = _part(parts, number)
    libc.put(part + PART_NUMBER, number)
    libc.put(part + PART_KIND, kind)
    libc.put(part + PART_HANDLE, handle)
    libc.put(part + PART_OFFSET, offset)
    libc.put(part + PART_ADDRESS, address)
    libc.put(part + PART_LENGTH, length)
    libc.put(part + PART_STREAM, libc.get(s + INDEX))
    libc.put(part + PART_ABANDONED, 0)
    tail = libc.get(s + TAIL)
    libc.put(s + RING_AT + (tail & (RING - 1)) * 8, number)
    libc.put(s + TAIL, tail + 1)


@njit("void(" + ", ".join(["int64"] * 9) + ")", nogil=True, cache=True)
def enter(s, parts, first, count, kind, handle, offsets, address, length):
    """`count` parts of `length` bytes, numbered from `first`, at the offsets (words) that lie at
    `offsets`; their bytes lie one behind the other at `address`."""
    for i in range(count):
        offset = libc.get(offsets + 8 * i)
        _enter(s, parts, first + i, kind, handle, offset, address + i * length, length)


@njit(nogil=True)
def _settle(s, parts, limit_ns):
    libc.put(s + DONE, 0)
    if _flush(s, parts) == FAILED:
        return FAILED
    waited = types.int64(0)
    while True:
        status = _take(s, parts)
        if status != IDLE or libc.get(s + DONE) or waited == 2:
            return status
        if not libc.await_readable(libc.get(s + FD), limit_ns, s + _POLL_AT):
            return IDLE
        waited += 1


@njit("int64(int64, int64)", nogil=True, cache=True)
def flush(s, parts):
    """Send what is in the ring. IDLE, BUSY: when the socket takes more, FAILED."""
    return _flush(s, parts)


@njit("int64(int64, int64)", nogil=True, cache=True)
def take(s, parts):
    libc.put(s + DONE, 0)
    return _take(s, parts)


@njit("int64(int64, int64, int64)", nogil=True, cache=True)
def settle(s, parts, limit_ns):
    """Send what is in the ring and wait until some answer is whole, for at most about `limit_ns`.
    As `take`; IDLE with an empty list: it takes longer."""
    return _settle(s, parts, limit_ns)


@njit("int64(" + ", ".join(["int64"] * 9) + ")", nogil=True, cache=True)
def exchange(s, parts, number, kind, handle, offset, address, length, limit_ns):
    """One part, where nothing else is under way: enter it, and settle. ANSWERED, or as `settle`."""
    _enter(s, parts, number, kind, handle, offset, address, length)
    status = _settle(s, parts, limit_ns)
    if status == IDLE and libc.get(s + DONE) == 1 and libc.get(s + HEAD) == libc.get(s + TAIL):
        return ANSWERED
    return status
