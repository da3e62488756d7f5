"""The serving end of a data stream, compiled: it answers WRITE and READ without the interpreter.

One thread runs `serve` on a blocking socket. A body is received straight into the region it names
and sent straight out of it. Both happen in windows: with the stream's mutex held, the handle looked
up anew, and no call that waits. Whoever clears a handle and then takes the mutex once knows that
nobody touches its memory any more, whatever the peer does in the middle of a record.

The thread returns to Python only for what is rare: a region on a device, a refusal with its reason,
the end. State lies in one block of bytes a stream, as 64-bit words and buffers at fixed places.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,import-untyped,untyped-decorator"

from typing import Final

from slackwater.common.base import limits
from slackwater.common.native import libc
from slackwater.common.native.compiled import njit
from slackwater.common.transport import wire

# Words of a stream
FD: Final = 0
START: Final = 8  # of what was received and is not parsed yet
END: Final = 16
OUT: Final = 24  # bytes of answers that wait to be sent
STOP: Final = 32
RECORDS: Final = 40  # complete ones
PARTIAL: Final = 48  # 1: a record was begun
SENDING: Final = 56  # 1: waits for a peer that does not read
KIND: Final = 64  # of the present record, as the four below
HANDLE: Final = 72
NUMBER: Final = 80
OFFSET: Final = 88
LENGTH: Final = 96  # of a READ: the bytes wanted
REFUSAL: Final = 104
PENDING: Final = 112  # what the program does at present: ARRIVED or FETCH
ERROR: Final = 120  # errno
LIMIT: Final = 128  # bytes to receive at once into the buffer
_POLL_AT: Final = 192
MUTEX_AT: Final = 256
STAGING_AT: Final = 512
STAGING_BYTES: Final = 256 * 1024
OUT_AT: Final = STAGING_AT + STAGING_BYTES
OUT_BYTES: Final = 256 * 1024
_SINK_AT: Final = OUT_AT + OUT_BYTES
_SINK_BYTES: Final = 64 * 1024
BLOCK_BYTES: Final = _SINK_AT + _SINK_BYTES

# A handle's entry in the table of its channel
ENTRIES: Final = limits.GRANTS_MAX
"""A power of two: the entry of a handle is `handle % ENTRIES`."""
ENTRY_BYTES: Final = 32
ENTRY_HANDLE: Final = 0  # 0: nothing is here
ENTRY_ADDRESS: Final = 8
ENTRY_NBYTES: Final = 16
ENTRY_STAGED: Final = 24  # 1: the program takes part in each access

REMEMBERED: Final = 2 * limits.TRANSFERS_MAX
"""Writes done lately, by their number; a power of two."""

# Results of `serve`
ENDED: Final = 1
FAILED: Final = 2
MALFORMED: Final = 3
STOPPED: Final = 4
REFUSE: Final = 5  # the present record
ARRIVED: Final = 6  # the present record's bytes are in the region's buffer
FETCH: Final = 7  # the present record's bytes are wanted in the buffer
MORE: Final = 8  # (not returned) the rest of a record must come first

# Refusals
GONE: Final = 1
OUTSIDE: Final = 2

_SMALL_BYTES: Final = 32 * 1024
"""Up to here an answer is copied, and leaves with its neighbours in one call."""
_FEW_BYTES: Final = 4096
"""Behind a large body another is likely: little of it is received where it does not belong."""

assert ENTRIES & (ENTRIES - 1) == 0
assert REMEMBERED & (REMEMBERED - 1) == 0
assert OUT_BYTES > _SMALL_BYTES + wire.HEADER_BYTES + wire.REASON_BYTES_MAX


@njit(nogil=True)
def _locate(s, table):
    """Where the present record's bytes belong; else 0, and REFUSAL says why."""
    handle = libc.get(s + HANDLE)
    entry = table + (handle & (ENTRIES - 1)) * ENTRY_BYTES
    if handle == 0 or libc.get(entry + ENTRY_HANDLE) != handle:
        libc.put(s + REFUSAL, GONE)
        return 0
    offset = libc.get(s + OFFSET)
    if offset < 0 or offset > libc.get(entry + ENTRY_NBYTES) - libc.get(s + LENGTH):
        libc.put(s + REFUSAL, OUTSIDE)
        return 0
    return libc.get(entry + ENTRY_ADDRESS) + offset


@njit(nogil=True)
def _staged(s, table):
    entry = table + (libc.get(s + HANDLE) & (ENTRIES - 1)) * ENTRY_BYTES
    return libc.get(entry + ENTRY_STAGED) != 0


@njit(nogil=True)
def _failed(s, error):
    libc.put(s + ERROR, error)
    return FAILED


@njit(nogil=True)
def _flush(s, flags):
    """Send the answers that wait. Blocks. 0, or FAILED."""
    nbytes = libc.get(s + OUT)
    sent = 0
    libc.put(s + SENDING, 1)
    while sent < nbytes:
        n = libc.send(libc.get(s + FD), s + OUT_AT + sent, nbytes - sent, flags)
        if n <= 0:
            return _failed(s, -n)
        sent += n
    libc.put(s + SENDING, 0)
    libc.put(s + OUT, 0)
    return 0


@njit(nogil=True)
def _head(s, kind, length):
    """The header of an answer, among those that wait."""
    at = s + OUT_AT + libc.get(s + OUT)
    libc.put(at, kind)
    libc.put(at + 8, libc.get(s + NUMBER))
    libc.put(at + 16, 0)
    libc.put(at + 24, length)
    libc.put(s + OUT, libc.get(s + OUT) + wire.HEADER_BYTES)


@njit(nogil=True)
def _room(s, nbytes):
    """Make room for an answer. 0, or FAILED."""
    if libc.get(s + OUT) + nbytes > OUT_BYTES:
        return _flush(s, 0)
    return 0


@njit(nogil=True)
def _await(s, events):
    libc.await_event(libc.get(s + FD), events, s + _POLL_AT)


@njit(nogil=True)
def _body_window(s, table, got, known):
    """One step of receiving a write's body: its bytes, 0: the peer is gone, or minus errno."""
    left = libc.get(s + LENGTH) - got
    target = 0
    if libc.get(s + REFUSAL) == 0:
        target = _locate(s, table)
    sinks = target == 0 or known
    start = libc.get(s + START)
    n = min(libc.get(s + END) - start, left)
    if n > 0:
        if not sinks:
            libc.copy(target + got, s + STAGING_AT + start, n)
        libc.put(s + START, start + n)
        return n
    if sinks:
        return libc.receive_now(libc.get(s + FD), s + _SINK_AT, min(left, _SINK_BYTES))
    return libc.receive_now(libc.get(s + FD), target + got, min(left, wire.READ_BYTES))


@njit(nogil=True)
def _take_body(s, table, done):
    """Receive a write's body. 0, ENDED, FAILED, STOPPED."""
    number = libc.get(s + NUMBER)
    mark = done + (number & (REMEMBERED - 1)) * 8
    mutex = s + MUTEX_AT
    got = 0
    known = libc.get(mark) == number
    if libc.get(s + LENGTH) == 0:
        _locate(s, table)
    while got < libc.get(s + LENGTH):
        libc.lock(mutex)
        if libc.get(s + STOP):
            libc.unlock(mutex)
            return STOPPED
        n = _body_window(s, table, got, known)
        libc.unlock(mutex)
        if n > 0:
            got += n
        elif n == 0:
            return ENDED
        elif n == -libc.EAGAIN:
            if _flush(s, 0):
                return FAILED
            _await(s, libc.POLL_IN)
        else:
            return _failed(s, -n)
    libc.put(s + PENDING, 0 if known else ARRIVED)
    return 0


@njit(nogil=True)
def _acknowledge(s, done):
    """The write is done: never again. 0, FAILED, STOPPED."""
    number = libc.get(s + NUMBER)
    libc.lock(s + MUTEX_AT)
    stopped = libc.get(s + STOP)
    if not stopped:
        libc.put(done + (number & (REMEMBERED - 1)) * 8, number)
    libc.unlock(s + MUTEX_AT)
    libc.put(s + PENDING, 0)
    if stopped:
        return STOPPED
    if _room(s, wire.HEADER_BYTES):
        return FAILED
    _head(s, wire.ACK, 0)
    return 0


@njit(nogil=True)
def _write(s, table, done):
    libc.put(s + PARTIAL, 1)
    length = libc.get(s + LENGTH)
    status = _take_body(s, table, done)
    if status:
        return status
    libc.put(s + PARTIAL, 0)
    libc.put(s + LIMIT, _FEW_BYTES if length > _SMALL_BYTES else STAGING_BYTES)
    libc.put(s + RECORDS, libc.get(s + RECORDS) + 1)
    if libc.get(s + REFUSAL):
        return REFUSE
    if _staged(s, table) and length and libc.get(s + PENDING) == ARRIVED:
        return ARRIVED
    return _acknowledge(s, done)


@njit(nogil=True)
def _send_body(s, table):
    """The bytes of a read, straight out of the region. 0, REFUSE, FAILED, STOPPED."""
    if _flush(s, libc.MORE_COMES):
        return FAILED
    mutex = s + MUTEX_AT
    length = libc.get(s + LENGTH)
    sent = 0
    while sent < length:
        n = -libc.EAGAIN
        libc.lock(mutex)
        stopped = libc.get(s + STOP)
        place = _locate(s, table)
        if place and not stopped:
            n = libc.send(libc.get(s + FD), place + sent, length - sent, libc.NO_WAIT)
        libc.unlock(mutex)
        if stopped:
            return STOPPED
        if place == 0:  # Revoked under way: what the peer has is not a whole answer. It asks again.
            return _failed(s, 0)
        if n > 0:
            sent += n
        elif n == -libc.EAGAIN:
            libc.put(s + SENDING, 1)
            _await(s, libc.POLL_OUT)
            libc.put(s + SENDING, 0)
        else:
            return _failed(s, -n)
    return 0


@njit(nogil=True)
def _answer(s, table):
    """DATA for the present record. 0, REFUSE, FETCH, FAILED, STOPPED."""
    length = libc.get(s + LENGTH)
    if _room(s, wire.HEADER_BYTES + (length if length <= _SMALL_BYTES else 0)):
        return FAILED
    mutex = s + MUTEX_AT
    libc.lock(mutex)
    if libc.get(s + STOP):
        libc.unlock(mutex)
        return STOPPED
    place = _locate(s, table)
    fetch = place != 0 and libc.get(s + PENDING) != FETCH and _staged(s, table)
    if place != 0 and not fetch:
        _head(s, wire.DATA, length)
        if length <= _SMALL_BYTES:
            libc.copy(s + OUT_AT + libc.get(s + OUT), place, length)
            libc.put(s + OUT, libc.get(s + OUT) + length)
    libc.unlock(mutex)
    libc.put(s + PENDING, FETCH if fetch else 0)
    if place == 0:
        return REFUSE
    if fetch:
        return FETCH
    if length > _SMALL_BYTES:
        return _send_body(s, table)
    return 0


@njit(nogil=True)
def _record(s, table, done):
    """The next record, if it is there (of a write, its header). 0, MORE, or what `serve` says."""
    start = libc.get(s + START)
    waiting = libc.get(s + END) - start
    if waiting < wire.HEADER_BYTES:
        return MORE
    at = s + STAGING_AT + start
    word = libc.get(at)
    kind = word & 0xFF
    length = libc.get(at + 24)
    libc.put(s + KIND, kind)
    libc.put(s + HANDLE, word >> 32 & 0xFFFFFFFF)
    libc.put(s + NUMBER, libc.get(at + 8))
    libc.put(s + OFFSET, libc.get(at + 16))
    libc.put(s + LENGTH, length)
    libc.put(s + REFUSAL, 0)
    if kind == wire.WRITE and 0 <= length <= limits.CHUNK_BYTES:
        libc.put(s + START, start + wire.HEADER_BYTES)
        return _write(s, table, done)
    if kind != wire.READ or length != 8:
        return MALFORMED
    if waiting < wire.HEADER_BYTES + 8:
        return MORE
    wanted = libc.get(at + wire.HEADER_BYTES)
    libc.put(s + LENGTH, wanted)
    if not 0 < wanted <= limits.CHUNK_BYTES:
        return MALFORMED
    libc.put(s + START, start + wire.HEADER_BYTES + 8)
    libc.put(s + RECORDS, libc.get(s + RECORDS) + 1)
    return _answer(s, table)


@njit(nogil=True)
def _receive(s):
    """Blocks until more is there. 0, ENDED, FAILED."""
    start = libc.get(s + START)
    left = libc.get(s + END) - start
    if start:
        libc.move(s + STAGING_AT, s + STAGING_AT + start, left)
        libc.put(s + START, 0)
        libc.put(s + END, left)
    libc.put(s + PARTIAL, 1 if left else 0)
    while True:
        n = libc.receive(
            libc.get(s + FD), s + STAGING_AT + left, min(STAGING_BYTES - left, libc.get(s + LIMIT))
        )
        if n >= 0:
            break
        error = libc.errno()
        if error != libc.EINTR:
            return _failed(s, error)
    libc.put(s + END, left + n)
    return 0 if n else ENDED


@njit("int64(int64, int64, int64)", nogil=True, cache=True)
def serve(s, table, done):
    """Addresses of the stream's block, its channel's table, and the channel's writes done lately.
    Until the connection ends, or the program is wanted, which calls again."""
    status = 0
    if libc.get(s + PENDING) == ARRIVED:
        status = _acknowledge(s, done)
    elif libc.get(s + PENDING) == FETCH:
        status = _answer(s, table)
    while status == 0:
        status = _record(s, table, done)
        if status == MORE:
            status = _flush(s, 0)
            if status == 0:
                status = _receive(s)
            if status == 0 and libc.get(s + STOP):
                status = STOPPED
    if status == REFUSE and _room(s, wire.HEADER_BYTES + wire.REASON_BYTES_MAX):
        return FAILED
    return status


@njit("void(int64)", nogil=True, cache=True)
def fence(s):
    """Returns when no window is open that began before."""
    libc.lock(s + MUTEX_AT)
    libc.unlock(s + MUTEX_AT)


@njit("void(int64)", nogil=True, cache=True)
def stop(s):
    """From now on the thread touches no region."""
    libc.lock(s + MUTEX_AT)
    libc.put(s + STOP, 1)
    libc.unlock(s + MUTEX_AT)
