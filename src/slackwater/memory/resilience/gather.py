"""Fragments out of mapped slabs, compiled: copied, checked, put where they belong and made up for.

While the members that are left are well a read of mapped memory needs no plan: the first k have
what it wants. Data fragments go straight to their places in the page; where one of them is a
parity, ISA-L makes what is missing of the page in the same call, so that a read with a lender lost
costs what one without costs. A member whose fragment is damaged or of another write is left out
from then on, as long as there are others. The rest is for late_binding.py, which asks everybody.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.native import libc
from slackwater.common.native.compiled import njit
from slackwater.memory.resilience.coding import Code, Recipe, checksum
from slackwater.memory.resilience.fragments import (
    HEADER_BYTES,
    Generations,
    first_word,
    slot_bytes,
    tag_of,
    whole_slot,
)
from slackwater.memory.store import PAGE_BYTES, Pages, RemoteMember

Members = Sequence[RemoteMember | None]


GOOD: Final = -1
GONE: Final = -2
"""A member was taken away or closed, or a page has no fragments."""


class Near(NamedTuple):
    """The members that a span's pages are read from, as compiled code sees them."""

    members: Members
    """The list that this was made of: for another list it does not hold."""
    chosen: tuple[int, ...]
    """The chosen ones' places in `members`, in order."""
    last: tuple[int, ...]
    """Members that lacked something: taken where the others are too few, the newest of them
    last."""
    base: NDArray[np.int64]
    """Where the slabs of `chosen` lie in this process."""
    tags: NDArray[np.int64]
    recipe: Recipe


def near(code: Code, members: Members, last: tuple[int, ...] = ()) -> Near | None:
    """k members; None: there are fewer, or one of them is not mapped."""
    able = [index for index, member in enumerate(members) if member is not None]
    first = [index for index in able if index not in last]
    chosen = sorted([*first, *(index for index in last if index in able)][: code.needed])
    views = [view for index in chosen if (view := _view(members[index])) is not None]
    if len(views) < code.needed:
        return None
    base = [np.frombuffer(view, np.uint8).ctypes.data for view in views]
    tags = [tag_of(code, index) for index in chosen]
    recipe = code.recipe(chosen)
    return Near(members, tuple(chosen), last, np.array(base), np.array(tags, np.int64), recipe)


def without(code: Code, found: Near, row: int) -> Near | None:
    """Others, where there are more: the member behind `row` of `chosen` lacks something. One that
    is new to the span lacks almost everything, until it is regenerated."""
    spare = sum(member is not None for member in found.members) - code.needed
    if not spare:
        return None
    index = found.chosen[row]
    before = tuple(one for one in found.last if one != index)
    return near(code, found.members, (*before, index)[-spare:])


def read(
    code: Code, found: Near, span: int, pages: Pages, expected: Generations, target: memoryview
) -> int:
    """The pages into `target`: GOOD; else nothing that counts is there. GONE, or the row of the
    member one of whose fragments is not whole, or not of the write that is expected."""
    used = [found.members[index] for index in found.chosen]
    if any(_view(member) is None for member in used):
        return GONE
    recipe = found.recipe
    into = np.frombuffer(target, np.uint8)
    failed: int = _read(
        found.base, found.tags, slot_bytes(code), span, pages, expected, into,
        recipe.places, recipe.lost, recipe.tables, recipe.multiply, checksum(),
    )  # fmt: skip
    intact = all(member is not None and member.intact() for member in used)
    return failed if intact else GONE


def _view(member: RemoteMember | None) -> memoryview | None:
    return None if member is None else member.mapped


@njit(nogil=True, cache=True)
def _read(
    base, tags, slot_length, span, pages, expected, into, places, lost, tables, multiply, sums
):  # fmt: skip
    needed, length = len(base), slot_length - HEADER_BYTES
    slots = np.empty((needed, slot_length), np.uint8)
    sources, targets = np.empty(needed, np.int64), np.empty(len(lost), np.int64)
    for row in range(needed):
        sources[row] = slots.ctypes.data + row * slot_length + HEADER_BYTES
    for i in range(len(pages)):
        page = into.ctypes.data + i * PAGE_BYTES
        if expected[i] <= 0:
            return GONE
        for row in range(needed):
            # It is checked where nobody can change it any more.
            slot = slots[row]
            libc.copy(slot.ctypes.data, base[row] + pages[i] * slot_length, slot_length)
            if first_word(slot) != expected[i]:
                return row
            if not whole_slot(slot, span, tags[row], pages[i], expected[i], sums):
                return row
            if places[row] >= 0:
                libc.copy(page + places[row] * length, sources[row], length)
        if len(lost):
            for j in range(len(lost)):
                targets[j] = page + lost[j] * length
            libc.combine(
                multiply, length, needed, len(lost),
                tables.ctypes.data, sources.ctypes.data, targets.ctypes.data,
            )  # fmt: skip
    return GOOD
