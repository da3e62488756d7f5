"""Tell a client's streams of reads apart by their addresses. Compiled.

Leap (ATC'20, section 3.2) follows each process by itself. A block device does not know processes:
the kernel's swap, with all programs behind it, is one connection. So a stream here is what any
disk's read-ahead takes for one: pages that lie on a line. Three reads at equal distances, whatever
came between them, begin a stream; of several such distances the shortest counts, because scans that
began together far apart lie on long lines, too. A read belongs to the stream whose trend it
continues, else to the one whose last page is near.

Reads that belong to none are remembered a while, as the possible beginnings of streams; so are
those of a stream that is young, which may be such a long line by chance.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.native.compiled import kernel

STREAMS: Final = 64
"""The one that was used longest ago makes room."""
RECENT: Final = 64
"""So many of the last reads are looked at as possible beginnings."""
NEAR_PAGES: Final = 16
YOUNG: Final = 16
"""A stream of fewer reads leaves each of them as a beginning, too."""
_FILTER_BITS: Final = 12
FILTER: Final = 1 << _FILTER_BITS
"""Counters by a hash of the page, of those that are remembered: most lookups end there."""
KNOWN: Final = 5
"""So many reads on a line make a stream that is told: Leap sees no trend in fewer. Random reads are
never told, and cost nobody anything."""
NOBODY: Final = 0
"""The stream of a read that belongs to none that is told."""

# Words
CLOCK: Final = 0  # reads, so far
LIVE: Final = 1  # streams that there are
NEWEST: Final = 2  # place of the one that was used last
SERIALS: Final = 3  # streams that there ever were: their names
BEGUN: Final = 4  # this read makes its stream KNOWN: those before it were so far apart; or 0
FOLLOWS: Final = 5  # this read continues the trend of a stream that is told
WORDS: Final = 6

# A stream
NAME: Final = 0
LAST: Final = 1  # page
STEP: Final = 2
USED: Final = 3  # when
READS: Final = 4  # on its trend
STREAM_WORDS: Final = 5


class Streams(NamedTuple):
    words: NDArray[np.int64]
    stream: NDArray[np.int64]  # by place
    recent: NDArray[np.int64]  # a ring of pages; -1: nothing yet
    filter: NDArray[np.int64]


def make_streams() -> Streams:
    return Streams(
        np.zeros(WORDS, np.int64),
        np.zeros((STREAMS, STREAM_WORDS), np.int64),
        np.full(RECENT, -1, np.int64),
        np.zeros(FILTER, np.int64),
    )


@kernel()
def _bucket(page):
    mixed = np.uint64(page) * np.uint64(0x9E37_79B9_7F4A_7C15)
    return mixed >> np.uint64(64 - _FILTER_BITS)  # An unsigned index needs no look at its sign.


@kernel()
def _remember(s, page):
    """Remember a read that may begin a stream (-1: it does not). An older one is forgotten in any
    case: a walk by columns leaves lines across them."""
    at = s.words[CLOCK] % RECENT
    if s.recent[at] >= 0:
        s.filter[_bucket(s.recent[at])] -= 1
    s.recent[at] = page
    if page >= 0:
        s.filter[_bucket(page)] += 1


@kernel()
def _remembered(s, page):
    found = False
    for one in s.recent:
        found |= one == page
    return found and page >= 0


@kernel()
def _distance(s, page):
    """Return the shortest distance at which two remembered reads lead to this page; 0: none
    does."""
    best, shortest = np.int64(0), np.int64(1) << 62
    for i in range(np.uint64(RECENT)):
        one = s.recent[i]
        step = page - one
        if s.filter[_bucket(one - step)] == 0:
            continue
        if one >= 0 and step != 0 and abs(step) < shortest and _remembered(s, one - step):
            best, shortest = step, abs(step)
    return best


@kernel()
def _continued(s, page):
    """Return the place of the stream whose trend leads here; of several the shortest counts. -1:
    none."""
    found = -1
    for place in range(s.words[LIVE]):
        step = page - s.stream[place, LAST]
        shorter = found < 0 or abs(step) < abs(s.stream[found, STEP])
        if step != 0 and step == s.stream[place, STEP] and shorter:
            found = place
    return found


@kernel()
def _nearest(s, page):
    found, closest = -1, np.int64(NEAR_PAGES + 1)
    for place in range(s.words[LIVE]):
        distance = abs(page - s.stream[place, LAST])
        if distance < closest:
            found, closest = place, distance
    return found


@kernel()
def _new(s):
    """Find a place for a stream."""
    s.words[SERIALS] += 1
    if s.words[LIVE] < STREAMS:
        s.words[LIVE] += 1
        place = s.words[LIVE] - 1
    else:
        place = np.int64(0)
        for one in range(1, STREAMS):
            if s.stream[one, USED] < s.stream[place, USED]:
                place = np.int64(one)
    s.stream[place, NAME] = s.words[SERIALS]
    s.stream[place, READS] = 2
    return place


@kernel()
def _use(s, place, page, on):
    """Return its name, if it is told. `on`: the read is on its trend."""
    row = s.stream[place]
    row[LAST] = page
    row[USED] = s.words[CLOCK]
    row[READS] += on
    s.words[NEWEST] = place
    told = row[READS] >= KNOWN
    if on and told:
        s.words[FOLLOWS] = 1
        if row[READS] == KNOWN:
            s.words[BEGUN] = row[STEP]
    return row[NAME] if told else np.int64(NOBODY)


@kernel()
def assign(s, page):
    """Return the stream of a read that begins at this page, or NOBODY. BEGUN and FOLLOWS say
    more."""
    s.words[CLOCK] += 1
    s.words[BEGUN] = s.words[FOLLOWS] = 0
    place = s.words[NEWEST]  # One scan alone finds itself at once.
    row = s.stream[place]
    if s.words[LIVE] == 0 or row[STEP] != page - row[LAST] or row[READS] < YOUNG:
        place = _continued(s, page)
    if place >= 0 and s.stream[place, READS] >= YOUNG:
        _remember(s, np.int64(-1))
        return _use(s, place, page, 1)
    step = _distance(s, page)
    _remember(s, page)
    if place >= 0 and (step == 0 or abs(step) >= abs(s.stream[place, STEP])):
        return _use(s, place, page, 1)
    if step != 0:
        place = _new(s)
        s.stream[place, STEP] = step
        return _use(s, place, page, 1)
    place = _nearest(s, page)
    return np.int64(NOBODY) if place < 0 else _use(s, place, page, 0)
