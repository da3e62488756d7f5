"""Hold the kernels to the table of a page's states: a slow look at every word, after every step."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import prefetch_cache, states

NONE, COMING, READY = "none", "coming", "ready"
_COPY_AFTER = {
    "write": {NONE: {NONE}, COMING: {NONE}, READY: {NONE}},
    "discard": {NONE: {NONE}, COMING: {NONE}, READY: {NONE}},
    "left": {NONE: {NONE}, COMING: {NONE, COMING}, READY: {READY}},
    "reserve": {NONE: {NONE, COMING}, COMING: {COMING}, READY: {NONE, READY}},
    "arrive": {NONE: {NONE}, COMING: {COMING, READY, NONE}, READY: {READY}},
    "read": {NONE: {NONE}, COMING: {COMING}, READY: {NONE, READY}},
}
"""By cause and copy: what the copy may be afterwards. Other causes leave copies alone."""


class Look:
    """The state of every page, read word by word."""

    def __init__(self, table: k.Table) -> None:
        pages = range(int(table.words[k.PAGES]))
        self.state = [_state(table, page) for page in pages]
        self.copy = [_copy(table, page) for page in pages]
        self.stamp = table.stamp.copy()
        self.version = table.version.copy()


def _state(table: k.Table, page: int) -> states.State:
    entry = None
    if (pending := int(table.pending[page])) != 0:
        slot = pending - 1
        assert table.slot_page[slot] == page, (page, "its entry is another page's")
        flags = int(table.slot_flags[slot])
        assert not flags & states.DISCARD, (page, "its entry is a discard")
        entry = flags & (states.HELD | states.WRITTEN)
    found = int(table.mark[page]), entry
    assert found in states.STATES, (page, found, "is not a state of the table")
    return states.STATES[found]


def _copy(table: k.Table, page: int) -> str:
    cache = table.prefetched
    places = np.flatnonzero((cache.page == page) & (cache.ticket != 0))
    assert len(places) <= 1, (page, "has several copies")
    if not len(places):
        return NONE
    return READY if cache.state[places[0]] & states.READY else COMING


def check_invariants(table: k.Table) -> Look:
    """Every page's words are a state, and the table's counters fit them."""
    look = Look(table)
    words, slots = table.words, int(table.words[k.SLOTS])
    head, tail, taken = int(words[k.HEAD]), int(words[k.TAIL]), int(words[k.TAKEN])
    assert 0 <= tail <= taken <= head <= tail + slots
    newest: dict[int, int] = {}
    for entry in range(tail, head):
        slot = entry % slots
        flags = int(table.slot_flags[slot])
        assert bool(flags & states.WRITTEN) == (entry < taken), (entry, flags, taken)
        if not flags & states.DISCARD:
            newest[int(table.slot_page[slot])] = slot
    cache = table.prefetched
    assert cache.words[prefetch_cache.TAKEN] == np.count_nonzero(cache.ticket)
    for page, (state, copy) in enumerate(zip(look.state, look.copy, strict=True)):
        span = page // int(words[k.SPAN_PAGES])
        if (pending := int(table.pending[page])) != 0:
            assert newest.get(page) == pending - 1, (page, "its entry is not its newest")
            refilled = int(table.slot_flags[pending - 1]) & states.NO_BACKUP
            assert copy == NONE or refilled, (page, "was written, and its old copy is here")
        if state in ("filling", "filling_queued"):
            assert table.state[span] == states.MAPPED, (page, "is filled where no slab is")
    return look


@contextmanager
def one_step(table: k.Table, cause: str) -> Iterator[None]:
    """Run one kernel: every page's change must be one that the table lists for this cause."""
    before = check_invariants(table)
    yield
    after = check_invariants(table)
    listed = states.TRANSITIONS.get(cause, {})  # type: ignore[call-overload]
    for page in range(len(before.state)):
        old, new = before.state[page], after.state[page]
        assert new == old or new in listed.get(old, ()), (page, old, new, cause)
        copy, left = before.copy[page], after.copy[page]
        may = _COPY_AFTER.get(cause, {}).get(copy, {copy})
        changed = (after.stamp - before.stamp)[page & (k.STAMPS - 1)]
        if cause in ("write", "discard") and changed == 0:
            may = {copy}  # Another page was written.
            assert new == old, (page, "changed without its stamp", cause)
        assert left in may, (page, copy, left, cause)
        assert cause in ("write", "discard") or changed == 0, (page, cause)
    grown = after.version - before.version
    assert (grown >= 0).all()
    assert cause in ("write", "discard") or not grown.any()
