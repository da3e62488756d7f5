"""The sockets of a connection's lanes, compiled: what leaves, what comes, and waiting for it.

None of this needs the table's mutex; what the answers mean is lanes.py's.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from typing import Final

from slackwater.common.base import limits
from slackwater.common.native import libc
from slackwater.common.native.compiled import kernel
from slackwater.common.transport import wire
from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.nbd import state as s

SMALL_BYTES: Final = 32 * 1024
"""Longer answers are received where they are sent from."""
LONG_NS: Final = 200_000_000
BRIEF_NS: Final = 100_000
BUSY: Final = 16
"""With so many requests under way their answers are waited for alone, for BRIEF_NS: the client's
next requests are then taken together, and not each in a turn of its own."""
FEW: Final = 4
"""So many requests of one lane are under way before others wait for company."""
CLIENT: Final = 1
ANSWERS: Final = 2
_WAIT_NS: Final = int(limits.LANE_WAIT_S * 1e9)
_FAILED: Final = libc.POLL_ERROR | libc.POLL_HANGUP

assert SMALL_BYTES + wire.HEADER_BYTES <= s.LANE_STAGING_BYTES
assert wire.REASON_BYTES_MAX + wire.HEADER_BYTES <= s.LANE_STAGING_BYTES


@kernel()
def base(lanes, i):
    return lanes.words[i, s.BUFFER]


@kernel()
def over(lanes, i):
    """The oldest request has its answer."""
    lanes.words[i, s.HEAD] += 1
    lanes.shared[s.UNDER_WAY] -= 1


@kernel()
def _push(lanes, i):
    """Send what waits, as far as the socket takes it."""
    w = lanes.words[i]
    at = base(lanes, i) + s.REQUESTS_AT
    flags = libc.NO_WAIT | (libc.MORE_COMES if w[s.BULK_LEFT] else 0)
    while w[s.SENT] < w[s.WAITING] or w[s.BULK_LEFT]:
        bulk = w[s.SENT] == w[s.WAITING]
        if bulk:
            n = libc.send(w[s.LANE_FD], w[s.BULK_AT], w[s.BULK_LEFT], libc.NO_WAIT)
        else:
            n = libc.send(w[s.LANE_FD], at + w[s.SENT], w[s.WAITING] - w[s.SENT], flags)
        w[s.BLOCKED] = n == -libc.EAGAIN
        if w[s.BLOCKED]:
            return
        if n <= 0:
            w[s.STATE] = s.BROKEN
            return
        w[s.BULK_AT if bulk else s.SENT] += n
        w[s.BULK_LEFT] -= n if bulk else 0
    w[s.SENT] = w[s.WAITING] = w[s.QUEUED] = 0


@kernel()
def _gathers(w):
    """An answer is due, and the requests that wait are few beside those that have left: they are
    sent with the next ones, as both ends pay by the system call."""
    left = w[s.TAIL] - w[s.HEAD] - w[s.QUEUED]
    few = w[s.QUEUED] < left and w[s.WAITING] < s.REQUESTS_BYTES // 2
    return few and left >= FEW and w[s.SENT] == 0 and w[s.BULK_LEFT] == 0


@kernel()
def push(lanes):
    """Send the requests that wait."""
    for i in range(lanes.shared[s.USED]):
        w = lanes.words[i]
        if w[s.STATE] == s.UP and w[s.WAITING] and not _gathers(w):
            _push(lanes, i)


@kernel()
def put_head(c, at, cookie, offset, length):
    """The head of the answer to a read, which goes right before its data in a lane's buffer."""
    s.head(c, c.lanes.head, 0, nbd.READ, cookie, 0, offset, length)
    libc.copy(at, c.lanes.head.ctypes.data, s.head_bytes(c))


@kernel()
def send_large(c):
    """Send large answers that were checked. False: the client is gone."""
    for i in range(c.lanes.shared[s.USED]):
        w = c.lanes.words[i]
        if w[s.WHOLE] != s.CHECKED:
            continue
        row = c.lanes.asked[i, w[s.HEAD] & (s.DEPTH - 1)]
        length, cookie, offset = row[s.LENGTH], row[s.COOKIE], row[s.OFFSET]
        room = s.head_bytes(c)
        start = base(c.lanes, i) + s.LARGE_AT - room
        put_head(c, start, cookie, offset, length)
        libc.lock(c.sync.ctypes.data)
        sent = libc.send_all(c.words[s.FD], start, room + length)
        libc.unlock(c.sync.ctypes.data)
        w[s.WHOLE] = 0
        over(c.lanes, i)
        if not sent:
            return False
    return True


@kernel()
def _room(lanes, i):
    """Bytes that may be received into the buffer: not those that belong elsewhere."""
    w = lanes.words[i]
    had = w[s.CAME] - w[s.PARSED]
    start = base(lanes, i)
    if w[s.PARSED]:
        libc.move(start, start + w[s.PARSED], had)
        w[s.PARSED], w[s.CAME] = 0, had
    row = lanes.asked[i, w[s.HEAD] & (s.DEPTH - 1)]
    if row[s.KIND] == wire.READ and row[s.LENGTH] > SMALL_BYTES and had < wire.HEADER_BYTES:
        return wire.HEADER_BYTES - had
    return s.LANE_STAGING_BYTES - had


@kernel()
def _receive(lanes, i, now_ns):
    """Receive the bytes that are there; a large answer until it is whole."""
    w = lanes.words[i]
    while w[s.WHOLE] == 0:
        large = w[s.REST] > 0
        if large:
            length = lanes.asked[i, w[s.HEAD] & (s.DEPTH - 1), s.LENGTH]
            target = base(lanes, i) + s.LARGE_AT + length - w[s.REST]
            wanted = min(w[s.REST], wire.READ_BYTES)
        else:
            wanted = _room(lanes, i)
            target = base(lanes, i) + w[s.CAME]
        if wanted == 0:
            return
        n = libc.receive_now(w[s.LANE_FD], target, wanted)
        if n == -libc.EAGAIN:
            return
        if n <= 0:
            w[s.STATE] = s.BROKEN
            return
        w[s.SINCE_NS] = now_ns
        if not large:
            w[s.CAME] += n
            return
        w[s.REST] -= n
        w[s.WHOLE] = 1 if w[s.REST] == 0 else 0


@kernel()
def _listen(lanes, fds, count):
    """Lanes on which something is due, behind `count` descriptors; how many there are then, -1: one
    is broken, and there is no need to wait."""
    for i in range(lanes.shared[s.USED]):
        w = lanes.words[i]
        if w[s.HEAD] == w[s.TAIL]:
            continue
        if w[s.STATE] == s.BROKEN:
            return -1
        events = libc.POLL_IN | (libc.POLL_OUT if w[s.BLOCKED] else 0)
        libc.put(fds + count * 8, w[s.LANE_FD] | events << 32)
        count += 1
    return count


@kernel()
def wait(c, client, limit_ns):
    """Until an answer has come (ANSWERS), or (`client`) a request (CLIENT); 0 after `limit_ns`."""
    lanes = c.lanes
    fds = lanes.shared.ctypes.data + s.POLL * 8
    clock = lanes.shared.ctypes.data + s.CLOCK * 8
    if client:
        libc.put(fds, c.words[s.FD] | libc.POLL_IN << 32)
    at = 1 if client else 0
    count = _listen(lanes, fds, at)
    if count < 0:
        return ANSWERS
    if libc.await_any(fds, count, limit_ns, clock) == 0 and limit_ns < LONG_NS:
        return 0
    now_ns = libc.now_ns(clock)
    came = 0
    for i in range(lanes.shared[s.USED]):
        w = lanes.words[i]
        if w[s.HEAD] == w[s.TAIL]:
            continue
        found = libc.get(fds + at * 8) >> 48 & 0xFFFF
        at += 1
        if found & libc.POLL_OUT:
            _push(lanes, i)
        if found & (libc.POLL_IN | _FAILED):
            came = ANSWERS
            _receive(lanes, i, now_ns)
        elif now_ns - w[s.SINCE_NS] > _WAIT_NS:
            came = ANSWERS
            w[s.STATE] = s.BROKEN
    if client and libc.get(fds) >> 48 & 0xFFFF != 0:
        came |= CLIENT
    return came
