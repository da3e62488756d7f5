"""A fragment in its slab: sixteen bytes that say what it is, and the fragment.

    generation (8 bytes)   of the write; 0: nothing was ever written here
    CRC-32 (4)             of the fragment, begun with generation, place and tag
    tag (4)                version, k, k + r, index

Beside each fragment and not in a table: whoever maps the slab sees which write every fragment comes
from and whether it is whole. The CRC begins with what the fragment should be, so a fragment of
another page, span or member is as bad as a damaged one. An 8 + 2 page takes 10 * (512 + 16) bytes,
1.29 times its own.
"""

import zlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slackwater.memory.coding import Bytes, Code
from slackwater.memory.store import Pages

HEADER_BYTES: Final = 16
Generations = NDArray[np.int64]
_VERSION: Final = 1
_ODD: Final = (0x9E37_79B9_7F4A_7C15, 0xC2B2_AE3D_27D4_EB4F, 0x1656_67B1_9E37_79F9)
"""Odd multipliers: the products differ wherever the factors do."""


def slot_bytes(code: Code) -> int:
    return HEADER_BYTES + code.fragment_bytes


def pack(
    code: Code, index: int, span: int, pages: Pages, generations: Generations, fragments: Bytes
) -> Bytes:
    """(n, slot_bytes): fragment `index` of each page, as it lies in the slab."""
    slots = np.empty((len(pages), slot_bytes(code)), np.uint8)
    slots[:, HEADER_BYTES:] = fragments
    words = slots[:, :HEADER_BYTES].view(np.uint32)
    slots[:, :8].view(np.int64)[:, 0] = generations
    words[:, 3] = _tag(code, index)
    words[:, 2] = _checks(code, index, span, pages, generations, slots)
    return slots


def generations_of(code: Code, index: int, span: int, pages: Pages, slots: Bytes) -> Generations:
    """Of the write that each slot holds a whole fragment of; 0: it holds none."""
    generations = slots[:, :8].view(np.int64)[:, 0].copy()
    words = slots[:, :HEADER_BYTES].view(np.uint32)
    whole = (generations > 0) & (words[:, 3] == _tag(code, index))
    if whole.any():
        whole &= words[:, 2] == _checks(code, index, span, pages, generations, slots)
    generations[~whole] = 0
    return generations


def _tag(code: Code, index: int) -> int:
    return _VERSION | code.needed << 8 | code.width << 16 | index << 24


def _checks(
    code: Code, index: int, span: int, pages: Pages, generations: Generations, slots: Bytes
) -> NDArray[np.uint32]:
    """The CRC that each slot's fragment should have."""
    mixed = generations.astype(np.uint64) * np.uint64(_ODD[0])
    mixed ^= pages.astype(np.uint64) * np.uint64(_ODD[1])
    mixed ^= np.uint64((span << 32 | _tag(code, index)) * _ODD[2] % 2**64)
    begin = (mixed ^ mixed >> np.uint64(32)) & np.uint64(0xFFFF_FFFF)
    rows = zip(slots[:, HEADER_BYTES:], begin.tolist(), strict=True)
    return np.array([zlib.crc32(row, start) for row, start in rows], np.uint32)
