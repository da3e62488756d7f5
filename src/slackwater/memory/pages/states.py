"""The states of a page, and every transition between them, in one place.

What a page is at lies in three words of the table: its mark (by page), the flags of its newest
entry in the ring (`pending` names the slot, `slot_flags` has the flags), and the state of its copy
in the prefetch cache, if it has one there. The kernels change them under the table's mutex, one
cause at a time. `STATES` names each combination of mark and entry, `TRANSITIONS` lists what a cause
does to it; no other combination, and no other change, exists (tests/unit/memory/page_states.py
holds the kernels to that).

                     newest entry
    mark       none              waits for disk   held by a write on a channel   held, on disk
    ABSENT     stored            queued           -                              -
    PRESENT    remote            remote_queued    -                              -
    FLYING     -                 -                sending                        sending_stored
    STALE      overtaken_stored  overtaken        recalled                       recalled_stored
    FILLING    filling           filling_queued   -                              -

One page's life where a channel leads to its slab; entries reach the disk meanwhile (`stored`):

               written                landed
    stored -------------> sending -----------------> remote_queued --- stored ---> remote
      ^  ^                   |  |                                                    |
      |  |     written again |  | the slab is left, or the page is let go            |
      |  |                   v  v                                                    |
      |  +---- landed --- overtaken, recalled                                        |
      |                                                                              |
      +---------------- the slab is left, forgotten, the page is let go -------------+
      |                                                                              ^
      +--- refill marks it ---> filling --- its bytes came, in mapped memory --------+
                                   +------- ... over a channel ---> sending

A write to mapped memory goes from any state that is not on a channel to remote_queued at once, a
write to no slab to queued.

A copy in the prefetch cache is NONE, COMING (asked for) or READY. It begins at a page that is
remote behind a channel alone; a write or a discard ends it in the same step; a slab that is left
for good ends what is COMING; a read by a client consumes it. `stamp` and `version` are not states:
they count writes and discards, by page (several share one) and by span.
"""

from collections.abc import Mapping
from typing import Final, Literal

# A page's mark
ABSENT: Final = 0  # the newest bytes are not in remote memory
PRESENT: Final = 1  # they are
FLYING: Final = 2  # the newest write is on its way there over a channel
STALE: Final = 3  # an older write is on its way, a newer one was not sent after it
FILLING: Final = 4  # as ABSENT, and its bytes are being fetched from the file

# Flags of an entry of the ring
HELD: Final = 1  # a write over a channel reads this slot
WRITTEN: Final = 2  # it is on disk
DISCARD: Final = 4  # not a page: `slot_count` pages from `slot_page` are to be let go
NO_BACKUP: Final = 8  # it need not go to disk

# A span
UNMAPPED: Final = 0
MAPPED: Final = 1
SUSPENDED: Final = 2

# Flags of a copy in the prefetch cache
COMING: Final = 0
READY: Final = 1
FIRST: Final = 2  # it is the first of its window

State = Literal[
    "stored",
    "queued",
    "remote",
    "remote_queued",
    "sending",
    "sending_stored",
    "recalled",
    "recalled_stored",
    "overtaken",
    "overtaken_stored",
    "filling",
    "filling_queued",
]
Cause = Literal[
    "write", "discard", "stored", "let_go", "landed", "left", "forgotten", "refill", "refilled"
]

STATES: Final[Mapping[tuple[int, int | None], State]] = {
    (ABSENT, None): "stored",
    (ABSENT, 0): "queued",
    (PRESENT, None): "remote",
    (PRESENT, 0): "remote_queued",
    (FLYING, HELD): "sending",
    (FLYING, HELD | WRITTEN): "sending_stored",
    (STALE, HELD): "recalled",
    (STALE, HELD | WRITTEN): "recalled_stored",
    (STALE, 0): "overtaken",
    (STALE, None): "overtaken_stored",
    (FILLING, None): "filling",
    (FILLING, 0): "filling_queued",
}
"""By mark and the newest entry's HELD and WRITTEN flags; None: it has no entry."""

_WRITTEN_TO: Final = frozenset[State]({"remote_queued", "queued", "sending"})
"""In mapped memory; nowhere but the queue; over a channel."""
_OVERTAKEN: Final = frozenset[State]({"overtaken"})

TRANSITIONS: Final[Mapping[Cause, Mapping[State, frozenset[State]]]] = {
    "write": {
        "stored": _WRITTEN_TO,
        "queued": _WRITTEN_TO,
        "remote": _WRITTEN_TO,
        "remote_queued": _WRITTEN_TO,
        "filling": _WRITTEN_TO,
        "filling_queued": _WRITTEN_TO,
        "sending": _OVERTAKEN,
        "sending_stored": _OVERTAKEN,
        "recalled": _OVERTAKEN,
        "recalled_stored": _OVERTAKEN,
        "overtaken": _OVERTAKEN,
        "overtaken_stored": _OVERTAKEN,
    },
    "discard": {
        "remote": frozenset({"stored"}),
        "remote_queued": frozenset({"queued"}),
        "sending": frozenset({"recalled"}),
        "sending_stored": frozenset({"recalled_stored"}),
        "filling": frozenset({"stored"}),
        "filling_queued": frozenset({"queued"}),
    },
    # The newest entry is in the file.
    "stored": {
        "queued": frozenset({"stored"}),
        "remote_queued": frozenset({"remote"}),
        "sending": frozenset({"sending_stored"}),
        "recalled": frozenset({"recalled_stored"}),
        "overtaken": frozenset({"overtaken_stored"}),
        "filling_queued": frozenset({"filling"}),
    },
    # The file has let a discarded range go: older entries are not the page any more.
    "let_go": {
        "queued": frozenset({"stored"}),
        "recalled": frozenset({"overtaken_stored"}),
        "recalled_stored": frozenset({"overtaken_stored"}),
        "overtaken": frozenset({"overtaken_stored"}),
        "filling_queued": frozenset({"filling"}),
    },
    # A write over a channel has ended, well or not.
    "landed": {
        "sending": frozenset({"remote_queued", "queued"}),
        "sending_stored": frozenset({"remote", "stored"}),
        "recalled": frozenset({"queued"}),
        "recalled_stored": frozenset({"stored"}),
        "overtaken": frozenset({"queued"}),
        "overtaken_stored": frozenset({"stored"}),
    },
    # The span is unmapped; suspended, pages stay remote.
    "left": {
        "remote": frozenset({"stored"}),
        "remote_queued": frozenset({"queued"}),
        "sending": frozenset({"recalled"}),
        "sending_stored": frozenset({"recalled_stored"}),
        "filling": frozenset({"stored"}),
        "filling_queued": frozenset({"queued"}),
    },
    # Remote memory has lost the page.
    "forgotten": {
        "remote": frozenset({"stored"}),
        "remote_queued": frozenset({"queued"}),
    },
    "refill": {
        "stored": frozenset({"filling"}),
        "queued": frozenset({"filling_queued"}),
    },
    # Its bytes came from the file, or did not.
    "refilled": {
        "filling": frozenset({"remote", "sending", "stored"}),
        "filling_queued": frozenset({"queued"}),
    },
}
"""By cause and state: what may follow. A state that a cause does not list stays as it is."""
