"""Fragments out of mapped slabs, compiled: copied, checked and put where they belong in one go.

While all is well a read of mapped memory needs no plan: the first k members have what it wants, and
data fragments go straight to their places in the page. What is damaged, of another write or gone is
for late_binding.py, which asks the others.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

import numpy as np

from slackwater.common.compiled import njit
from slackwater.memory.coding import Bytes, Code
from slackwater.memory.fragments import HEADER_BYTES, Generations, first_word, tag_of, whole_slot
from slackwater.memory.store import Pages


def take(
    code: Code,
    index: int,
    span: int,
    pages: Pages,
    expected: Generations,
    slots: Bytes,
    into: Bytes,
    row: int,
) -> bool:
    """Fragment `index` of each page to `into[i, row]`, out of the slab's `slots`; False: one of
    them is not whole, or not of the write that is expected."""
    good: bool = _take(slots, span, tag_of(code, index), pages, expected, into, row)
    return good


@njit(nogil=True, cache=True)
def _take(slots, span, tag, pages, expected, into, row):
    slot = np.empty(slots.shape[1], np.uint8)
    for i in range(len(pages)):
        slot[:] = slots[pages[i]]  # It is checked where nobody can change it any more.
        if expected[i] <= 0 or first_word(slot) != expected[i]:
            return False
        if not whole_slot(slot, span, tag, pages[i], expected[i]):
            return False
        into[i, row] = slot[HEADER_BYTES:]
    return True
