"""Pages as fragments into slabs, compiled: split, coded, headed, sealed and put where they belong.

One call does all of it for a batch, page by page, while a page's fragments are in the processor's
cache. Members that are mapped have theirs when it returns; those of the others lie in a row each,
as they are to be sent. The other way round is gather.py's.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.native import libc
from slackwater.common.native.compiled import njit
from slackwater.memory.resilience.coding import Bytes, Code, checksum
from slackwater.memory.resilience.fragments import HEADER_BYTES, seal, slot_bytes, tag_of
from slackwater.memory.store import PAGE_BYTES, Pages, RemoteMember


class Target(NamedTuple):
    """The members that a span's pages are written to, as compiled code sees them."""

    members: Sequence[RemoteMember | None]
    """The list that this was made of: for another list it does not hold."""
    bases: NDArray[np.int64]
    """By fragment: where the slab lies in this process, 0: elsewhere, -1: there is none."""
    tags: NDArray[np.int64]
    sums: int
    """The address of ISA-L's CRC-32; 0: it is not there."""


def target(code: Code, members: Sequence[RemoteMember | None]) -> Target:
    tags = np.array([tag_of(code, index) for index in range(code.width)], np.int64)
    return Target(members, np.array([_base(member) for member in members]), tags, checksum())


def holds(found: Target, members: Sequence[RemoteMember | None]) -> bool:
    """Tell whether it was made of these members, and those that were mapped still are."""
    bases = found.bases.tolist()
    return found.members is members and all(
        base <= 0 or (member is not None and member.mapped is not None)
        for base, member in zip(bases, members, strict=True)
    )


def _base(member: RemoteMember | None) -> int:
    if member is None:
        return -1
    return 0 if member.mapped is None else int(np.frombuffer(member.mapped, np.uint8).ctypes.data)


def write(
    code: Code, into: Target, span: int, pages: Pages, generation: int, source: memoryview
) -> Bytes:
    """(width, n, slot_bytes): fragment j of page i as it lies in the slab of member j."""
    slots = np.empty((code.width, len(pages), slot_bytes(code)), np.uint8)
    data = np.frombuffer(source, np.uint8)
    assert data.size == len(pages) * PAGE_BYTES, (data.size, len(pages))
    parities = code.parities()
    _write(
        data, slots, np.ascontiguousarray(pages), span, generation, into.bases, into.tags,
        code.needed, parities.tables, parities.multiply, into.sums,
    )  # fmt: skip
    return slots


@njit(nogil=True, cache=True)
def _write(data, slots, pages, span, generation, bases, tags, needed, tables, multiply, sums):
    width, _, length = slots.shape
    fragment = length - HEADER_BYTES
    plain = needed if multiply else width  # Fragments that are parts of the page, or all of it.
    sources = np.empty(needed, np.int64)
    targets = np.empty(width - plain, np.int64)
    for i in range(len(pages)):
        page = data.ctypes.data + i * PAGE_BYTES
        for j in range(needed):
            sources[j] = page + j * fragment
        for j in range(plain):
            body = slots[j, i].ctypes.data + HEADER_BYTES
            libc.copy(body, sources[j % needed], fragment)
        for j in range(plain, width):
            targets[j - plain] = slots[j, i].ctypes.data + HEADER_BYTES
        if multiply:
            libc.combine(
                multiply, fragment, needed, width - plain,
                tables.ctypes.data, sources.ctypes.data, targets.ctypes.data,
            )  # fmt: skip
        for j in range(width):
            if bases[j] >= 0:
                seal(slots[j, i], span, tags[j], pages[i], generation, sums)
            if bases[j] > 0:
                libc.copy(bases[j] + pages[i] * length, slots[j, i].ctypes.data, length)
