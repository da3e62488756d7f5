"""When a ring of dispatch entries counts as stuck: its oldest entry does not get any further."""

import numpy as np

from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import states
from slackwater.memory.pages.stall import Stall
from slackwater.memory.pages.table import make_table

SPAN_PAGES = 64


def taken(table: k.Table, page: int, flags: int = 0) -> None:
    """An entry at the ring's end."""
    slot = table.words[k.HEAD] % table.words[k.SLOTS]
    table.slot_page[slot], table.slot_flags[slot] = page, flags
    table.words[k.HEAD] += 1


def test_an_entry_that_a_lender_holds_for_too_long_is_told() -> None:
    table = make_table(4 * SPAN_PAGES, SPAN_PAGES, slots=16)
    stall = Stall(table, stuck_s=10.0)
    assert stall.look(0.0) == ""
    taken(table, 70, states.HELD)
    assert stall.look(100.0) == ""
    taken(table, 3)
    table.words[k.DISK_OPERATIONS] += 1  # Others' progress is not its own.
    assert stall.look(109.9) == ""
    assert stall.look(110.0) == (
        "the write of page 70 has waited for lenders of span 1 for 10 s; 2 of 16 ring entries are "
        "taken"
    )
    table.slot_flags[0] = 0
    table.words[k.TAIL] = 1
    assert stall.look(111.0) == ""
    assert "page 3 has waited for the backup file" in stall.look(121.0)
    table.words[k.TAIL] = 2
    assert stall.look(122.0) == stall.look(1000.0) == ""


def test_a_slow_disk_that_moves_is_not_stuck() -> None:
    table = make_table(4 * SPAN_PAGES, SPAN_PAGES, slots=16)
    stall = Stall(table, stuck_s=10.0)
    taken(table, 5)
    for now_s in np.arange(0.0, 60.0, 5.0).tolist():
        table.words[k.DISK_OPERATIONS] += 1
        assert stall.look(now_s) == ""
    assert stall.look(65.0) != ""
