"""A client's read of pages, compiled: from what is at hand, else from a lender, under the mutex.

One way down: local bytes, held buffers and prefetched pages (pages/kernels.py), and for pages that
remote memory alone has, a lane to their lender (lanes.py).
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from typing import Final

from slackwater.common.native.compiled import inline_kernel
from slackwater.memory.nbd import lanes
from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.nbd import state as s
from slackwater.memory.pages import kernels, prefetch_kernels
from slackwater.memory.store import PAGE_BYTES

# Results of `read`
ANSWERED: Final = 0  # or a lender was asked
SEND_FIRST: Final = 11  # the answers that wait must leave, then it goes on
DEFERRED: Final = 20  # the program is to do it

PIECE_BYTES: Final = 128 * 1024
"""Reads of more from mapped memory are answered in chunks of so much: each is sent while it is in
the processor's cache, and the client has something to receive while the next is copied."""


@inline_kernel()
def read(t, c, at, flags, offset, length):
    """Answer the read whose request is at `at`, or ask a lender. A large one is answered in pieces,
    each a chunk of its own: what is left is a request in its place, with the same cookie."""
    aligned = offset % PAGE_BYTES == 0 and length % PAGE_BYTES == 0
    if aligned and c.words[s.OUT] + length + 64 > len(c.outward):
        return SEND_FIRST
    follows = prefetch_kernels.follow(t, offset, length)
    if not aligned:
        return DEFERRED
    whole = flags & nbd.DONT_FRAGMENT or not c.words[s.CHUNKED]
    part = length if whole else min(length, PIECE_BYTES)
    chunk = c.words[s.OUT]
    begin = s.head_for(c, nbd.READ, at, 0, offset, part)
    first = offset // PAGE_BYTES
    missing = kernels.read_run(t, first, part // PAGE_BYTES, c.outward.ctypes.data + begin)
    if missing:
        alone = prefetch_kernels.only_lenders_have(t, first, length // PAGE_BYTES, follows)
        if alone and lanes.ask(t, c.lanes, s.cookie_of(c, at), offset, length):
            return ANSWERED
        return DEFERRED
    c.words[s.READS] += 1
    c.words[s.OUT] = begin + part
    if part == length:
        return ANSWERED
    s.put_number(c.outward, chunk + 4, 2, 0)  # There are more.
    s.put_number(c.inward, at + 16, 8, offset + part)
    s.put_number(c.inward, at + 24, 4, length - part)
    return SEND_FIRST
