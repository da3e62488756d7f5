"""Prefetched pages, compiled: a few thousand, where every thread finds them, and none is stale.

A place is taken before its page is asked for, with a ticket that no other place ever has. Whatever
changes the page (a write, a discard) takes the ticket away, under the table's mutex and in the very
step that shows the change to readers. What was fetched is put in place only if the ticket is still
there. So what lies here is what the page is: nobody has changed it since before it was asked for.
Where it was read from may be gone meanwhile (a slab that was evicted, fenced off or suspended): its
bytes are those of the page all the same.

A copy that was read is let go at once (Leap, ATC'20, section 3.3). Notes tell the prefetcher what
was asked for; it may miss some, and then guesses worse, not wrong.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.native import libc
from slackwater.common.native.compiled import kernel
from slackwater.memory.pages import streams
from slackwater.memory.pages.states import FIRST, READY
from slackwater.memory.store import PAGE_BYTES

WAYS: Final = 8
"""Places that a page may lie in."""
NOTES: Final = 1024
NOTES_KEPT: Final = 64
NOTE_WORDS: Final = 3
DROPPED: Final = -1
"""In place of a stream: the page was prefetched and is gone, unused."""

# Words
PLACES: Final = 0  # 0: nothing is prefetched
TAKEN: Final = 1  # of them
TICKETS: Final = 2  # that were given out
NOTED: Final = 3
CALL: Final = 4  # somebody came to the first page of a window: the prefetcher is to be woken
BELL: Final = 5  # the eventfd that wakes the prefetcher
ONE: Final = 6  # what is written to it
FETCHED: Final = 7  # pages that were brought ahead
HITS: Final = 8  # pages brought ahead that a client read
CHANGED: Final = 9  # pages brought ahead that changed before they were read
CROWDED: Final = 10  # pages brought ahead that others pushed out
WORDS: Final = 16


class PrefetchCache(NamedTuple):
    words: NDArray[np.int64]
    page: NDArray[np.int64]  # by place
    ticket: NDArray[np.int64]  # by place; 0: it is free
    state: NDArray[np.uint8]
    data: NDArray[np.uint8]
    notes: NDArray[np.int64]  # (stream, first page, pages); no pages: it was noted as nobody's
    streams: streams.Streams


@kernel()
def places_of(s, page):
    """The first of the WAYS places of a page: strides of any power of two spread over all."""
    mixed = np.uint64(page) * np.uint64(0x9E37_79B9_7F4A_7C15)
    return np.int64(mixed >> np.uint64(32)) % (s.words[PLACES] // WAYS) * WAYS


@kernel()
def find(s, page):
    """The page's place, or -1."""
    if s.words[TAKEN] == 0:
        return -1
    first = places_of(s, page)
    for place in range(first, first + WAYS):
        if s.page[place] == page and s.ticket[place] != 0:
            return place
    return -1


@kernel()
def get(s, page, target):
    """Copy the page, if it is here."""
    place = find(s, page)
    if place < 0 or s.state[place] & READY == 0:
        return False
    libc.copy(target, s.data.ctypes.data + place * PAGE_BYTES, PAGE_BYTES)
    return True


@kernel()
def free(s, place):
    s.ticket[place] = 0
    s.words[TAKEN] -= 1


@kernel()
def consume(s, page):
    """The page was read by a client: its copy goes."""
    place = find(s, page)
    if place < 0 or s.state[place] & READY == 0:
        return
    s.words[HITS] += 1
    if s.state[place] & FIRST:
        s.words[CALL] = 1
    free(s, place)


@kernel()
def note(s, stream, page, count):
    at = s.words[NOTED]
    if at < NOTES:
        s.notes[at, 0] = stream
        s.notes[at, 1] = page
        s.notes[at, 2] = count
        s.words[NOTED] += 1


@kernel()
def trim_notes(s):
    """Drop old notes, which no stream takes while none follows a trend: the newest are enough."""
    at = s.words[NOTED]
    if at >= NOTES // 2:
        for i in range(NOTES_KEPT):
            for j in range(NOTE_WORDS):
                s.notes[i, j] = s.notes[at - NOTES_KEPT + i, j]
        s.words[NOTED] = NOTES_KEPT


@kernel()
def invalidate(s, page):
    """The page is changed in this step: what is here, or on its way here, is not it any more."""
    place = find(s, page)
    if place >= 0:
        free(s, place)
        s.words[CHANGED] += 1
        note(s, DROPPED, page, 1)


@kernel()
def invalidate_range(s, first, count, state):
    """Spoil the copies of these pages that are here, or on their way here; in this state alone, or
    (-1) in any."""
    if s.words[TAKEN] == 0:
        return
    for place in range(s.words[PLACES]):
        inside = first <= s.page[place] < first + count
        if s.ticket[place] != 0 and inside and state in (-1, s.state[place] & READY):
            free(s, place)
            s.words[CHANGED] += 1
            note(s, DROPPED, s.page[place], 1)


@kernel()
def take(s, page, state):
    """A place for a page that has none: (it, its ticket). A page that nobody has read for longest
    makes room; ticket 0: all are still on their way."""
    first = places_of(s, page)
    chosen, oldest = -1, s.words[TICKETS] + 1
    for place in range(first, first + WAYS):
        ticket = s.ticket[place]
        if ticket < oldest and (ticket == 0 or s.state[place] & READY):
            chosen, oldest = place, ticket
    if chosen < 0:
        return 0, 0
    if s.ticket[chosen] != 0:
        free(s, chosen)
        s.words[CROWDED] += 1
        note(s, DROPPED, s.page[chosen], 1)
    s.words[TICKETS] += 1
    s.words[TAKEN] += 1
    s.page[chosen] = page
    s.ticket[chosen] = s.words[TICKETS]
    s.state[chosen] = state
    return chosen, s.words[TICKETS]


@kernel()
def store(s, place, ticket, source, came):
    """Note that the page asked for under this ticket has come, or has not."""
    s.words[FETCHED] += came
    if s.ticket[place] != ticket:
        return
    if came:
        libc.copy(s.data.ctypes.data + place * PAGE_BYTES, source, PAGE_BYTES)
        s.state[place] |= np.uint8(READY)
    else:
        free(s, place)


@kernel()
def ring(s):
    """Wake the prefetcher; no mutex is needed."""
    libc.signal(s.words[BELL], s.words.ctypes.data + ONE * 8)
