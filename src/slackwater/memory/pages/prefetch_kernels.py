"""Fill the prefetch cache, compiled: note what clients ask for, take places, put pages in."""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from typing import Final

from slackwater.common.native.compiled import kernel
from slackwater.memory.pages import kernels, prefetch_cache, states, streams
from slackwater.memory.store import PAGE_BYTES

FOLLOWED_PAGES: Final = 16
"""Requests of more are not followed: what they cost is their bytes, not the way there and back."""


@kernel()
def follow(t, offset, length):
    """A client asks for these bytes (under the mutex). Noted where only a channel leads to them:
    mapped memory and the disk need no prefetching. True: they continue a scan."""
    if t.prefetched.words[prefetch_cache.PLACES] == 0:
        return False
    first = offset // PAGE_BYTES
    count = (offset + length - 1) // PAGE_BYTES - first + 1
    span = first // t.words[kernels.SPAN_PAGES]
    if count > FOLLOWED_PAGES or t.state[span] != states.MAPPED or t.base[span] != 0:
        return False
    known = t.prefetched.streams
    name = streams.assign(known, first)
    step = known.words[streams.BEGUN]
    if step != 0:
        for before in range(streams.KNOWN - 1, 0, -1):
            prefetch_cache.note(t.prefetched, name, first - before * step, 0)
    if name != streams.NOBODY or prefetch_cache.find(t.prefetched, first) >= 0:
        prefetch_cache.note(t.prefetched, name, first, count)
    return known.words[streams.FOLLOWS] != 0


@kernel()
def only_lenders_have(t, first, count, follows):
    """Tell whether a read that must be waited for is asked of a lender by its connection: only a
    channel leads to all its pages, none is being fetched, and it continues no scan (`follows`),
    which is the prefetcher's business."""
    alone = not follows
    page = first
    while alone and page < first + count:
        alone = kernels.far(t, page) and prefetch_cache.find(t.prefetched, page) < 0
        page += 1
    prefetch_cache.trim_notes(t.prefetched)
    return alone


@kernel(cache=True)
def take_notes(t, into):
    """Take the notes since the last call; return how many."""
    s = t.prefetched
    kernels.lock(t)
    count = s.words[prefetch_cache.NOTED]
    for i in range(count):
        for j in range(prefetch_cache.NOTE_WORDS):
            into[i, j] = s.notes[i, j]
    s.words[prefetch_cache.NOTED] = 0
    s.words[prefetch_cache.CALL] = 0
    kernels.unlock(t)
    return count


@kernel(cache=True)
def reserve(t, pages, places, tickets):
    """Take a place for each page that only a channel leads to, and that nobody has; ticket 0: none
    was taken. They are one window, the first of it in front."""
    kernels.lock(t)
    state = states.COMING | states.FIRST
    for i in range(len(pages)):
        page = pages[i]
        tickets[i] = 0
        if kernels.far(t, page) and prefetch_cache.find(t.prefetched, page) < 0:
            places[i], tickets[i] = prefetch_cache.take(t.prefetched, page, state)
        if tickets[i] != 0:
            state = states.COMING
    kernels.unlock(t)


@kernel(cache=True)
def store(t, places, tickets, source, came):
    """The i-th page lies at source + i * PAGE_BYTES, if it came."""
    kernels.lock(t)
    for i in range(len(tickets)):
        if tickets[i] != 0:
            prefetch_cache.store(
                t.prefetched, places[i], tickets[i], source + i * PAGE_BYTES, came[i]
            )
    kernels.unlock(t)
