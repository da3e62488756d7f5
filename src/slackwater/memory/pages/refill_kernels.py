"""Pages on their way back from the file into remote memory, compiled: marked, and put in.

A page is marked FILLING under the table's mutex; once all that was queued before is in the file,
that has its newest bytes. A write, a discard or the loss of the slab takes the mark away: a page
that still has it when its bytes are here has not changed. One refill at a time, so that no page is
marked for two.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from slackwater.common.native import libc
from slackwater.common.native.compiled import kernel
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import states
from slackwater.memory.store import PAGE_BYTES


@kernel(cache=True)
def mark(t, first, count):
    """Mark those of these pages, all of one span, that the file alone has; (how many, the entries
    that must be in the file before it is read)."""
    found = 0
    k.lock(t)
    if t.state[first // t.words[k.SPAN_PAGES]] == states.MAPPED and t.words[k.BACKED]:
        for page in range(first, first + count):
            if t.mark[page] == states.ABSENT:
                t.mark[page] = states.FILLING
                found += 1
    entries = t.words[k.HEAD]
    k.unlock(t)
    return found, entries


@kernel(cache=True)
def store(t, first, count, source, came):
    """Page first + i lies at source + i * PAGE_BYTES, if they came. (Pages that remote memory has
    now, first entry, entries to be sent): over a channel they go as writes do, and need no backup.
    Afterwards none of them is marked."""
    done = 0
    k.lock(t)
    head = t.words[k.HEAD]
    for i in range(count):
        page = first + i
        if t.mark[page] == states.FILLING:
            t.mark[page] = states.ABSENT
            if came:
                done += _put_page(t, page, source + i * PAGE_BYTES)
    sent = t.words[k.HEAD] - head
    if sent:
        k.wake_writer(t)
    k.unlock(t)
    return done, head, sent


@kernel()
def _put_page(t, page, source):
    """1: it is in mapped memory. A page for which a crowded ring has no slot stays where it is."""
    span = page // t.words[k.SPAN_PAGES]
    if t.state[span] != states.MAPPED:
        return 0
    if t.base[span] != 0:
        at = (page - span * t.words[k.SPAN_PAGES]) * PAGE_BYTES
        libc.copy(t.base[span] + at, source, PAGE_BYTES)
        if not k.intact(t, span):
            t.words[k.FENCED] += 1
            return 0
        t.mark[page] = states.PRESENT
        return 1
    if k.room(t) > t.words[k.SLOTS] // 2:
        libc.copy(k.next_slot(t), source, PAGE_BYTES)
        slot = k.append(t, page, 1, states.HELD | states.NO_BACKUP)
        t.pending[page] = slot + 1
        t.mark[page] = states.FLYING
    return 0
