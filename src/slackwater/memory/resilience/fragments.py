"""A fragment in its slab: sixteen bytes that say what it is, and the fragment.

    generation (8 bytes)   of the write; 0: nothing was ever written here
    CRC-32 (4)             of the fragment, begun with generation, place and tag
    tag (4)                version, k, k + r, index

Beside each fragment and not in a table: whoever maps the slab sees which write every fragment comes
from and whether it is whole. The CRC begins with what the fragment should be, so a fragment of
another page, span or member is as bad as a damaged one. An 8 + 2 page takes 10 * (512 + 16) bytes,
1.29 times its own.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from slackwater.common.native import libc
from slackwater.common.native.compiled import njit
from slackwater.memory.resilience.coding import Bytes, Code, checksum
from slackwater.memory.store import Pages

HEADER_BYTES: Final = 16
Generations = NDArray[np.int64]
_VERSION: Final = 1
_POLYNOMIAL: Final = 0xEDB8_8320
_LOW: Final = 0xFFFF_FFFF


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


# Odd multipliers: products modulo 2**64 differ wherever the factors do.
_ODD_GENERATION: Final = _signed(0x9E37_79B9_7F4A_7C15)
_ODD_PAGE: Final = _signed(0xC2B2_AE3D_27D4_EB4F)
_ODD_PLACE: Final = _signed(0x1656_67B1_9E37_79F9)


def _tables() -> NDArray[np.int64]:
    """Return the tables of CRC-32 for eight bytes at once: tables[j, b] is byte b with j zero bytes
    behind it."""
    tables = np.zeros((8, 256), np.int64)
    tables[0] = np.arange(256)
    for _ in range(8):
        tables[0] = tables[0] >> 1 ^ _POLYNOMIAL * (tables[0] & 1)
    for j in range(1, 8):
        tables[j] = tables[j - 1] >> 8 ^ tables[0][tables[j - 1] & 255]
    return tables


_T: Final = _tables()


def slot_bytes(code: Code) -> int:
    return HEADER_BYTES + code.fragment_bytes


def pack(
    code: Code, index: int, span: int, pages: Pages, generations: Generations, fragments: Bytes
) -> Bytes:
    """(n, slot_bytes): fragment `index` of each page, as it lies in the slab."""
    slots = np.empty((len(pages), slot_bytes(code)), np.uint8)
    slots[:, HEADER_BYTES:] = fragments
    numbers = np.ascontiguousarray(generations)
    _seal(slots, span, tag_of(code, index), np.ascontiguousarray(pages), numbers, checksum())
    return slots


def generations_of(code: Code, index: int, span: int, pages: Pages, slots: Bytes) -> Generations:
    """Return the generation of the write that each slot holds a whole fragment of; 0: it holds
    none."""
    found = np.empty(len(pages), np.int64)
    whole = np.ascontiguousarray(slots)
    _check(whole, span, tag_of(code, index), np.ascontiguousarray(pages), found, checksum())
    return found


def tag_of(code: Code, index: int) -> int:
    return _VERSION | code.needed << 8 | code.width << 16 | index << 24


@intrinsic
def _call_sum(_context: Any, function: Any, begin: Any, at: Any, nbytes: Any) -> Any:
    signature = types.uint32(types.uintp, types.uint32, types.uintp, types.uint64)

    def codegen(_ctx: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number, pointer, count = ir.IntType(32), ir.IntType(8).as_pointer(), ir.IntType(64)
        kind = ir.FunctionType(number, [number, pointer, count])
        function = builder.inttoptr(args[0], kind.as_pointer())
        return builder.call(function, [args[1], builder.inttoptr(args[2], pointer), args[3]])

    return signature, codegen


_sum: Any = _call_sum


@njit(nogil=True, cache=True)
def _crc(slot, begin, sums):
    """CRC-32 of a slot's fragment, as zlib.crc32(fragment, begin); its length divides by eight.
    `sums`: the address of a function that does it; 0: there is none."""
    if sums:
        body = libc.ADDRESS(slot.ctypes.data + HEADER_BYTES)
        length = types.uint64(len(slot) - HEADER_BYTES)
        return np.int64(_sum(libc.ADDRESS(sums), types.uint32(begin), body, length))
    crc = ~begin & _LOW
    for i in range(HEADER_BYTES, len(slot), 8):
        one = crc ^ (
            np.int64(slot[i])
            | np.int64(slot[i + 1]) << 8
            | np.int64(slot[i + 2]) << 16
            | np.int64(slot[i + 3]) << 24
        )
        crc = (
            _T[7, one & 255]
            ^ _T[6, one >> 8 & 255]
            ^ _T[5, one >> 16 & 255]
            ^ _T[4, one >> 24]
            ^ _T[3, slot[i + 4]]
            ^ _T[2, slot[i + 5]]
            ^ _T[1, slot[i + 6]]
            ^ _T[0, slot[i + 7]]
        )
    return ~crc & _LOW


@njit(nogil=True, cache=True)
def _begin(span, tag, page, generation):
    """Begin the CRC with the identity that the fragment should have."""
    mixed = generation * _ODD_GENERATION ^ page * _ODD_PAGE ^ (span << 32 | tag) * _ODD_PLACE
    return (mixed ^ mixed >> 32) & _LOW


@njit(nogil=True, cache=True)
def seal(slot, span, tag, page, generation, sums):
    """Write the header of a slot whose fragment is in place."""
    crc = _crc(slot, _begin(span, tag, page, generation), sums)
    at = slot.ctypes.data
    libc.put(at, generation)
    libc.put(at + 8, crc | tag << 32)


@njit(nogil=True, cache=True)
def _seal(slots, span, tag, pages, generations, sums):
    for i in range(len(pages)):
        seal(slots[i], span, tag, pages[i], generations[i], sums)


@njit(nogil=True, cache=True)
def first_word(slot):
    """The generation that a slot tells."""
    return libc.get(slot.ctypes.data)


@njit(nogil=True, cache=True)
def whole_slot(slot, span, tag, page, generation, sums):
    """It holds what a slot of this place and write must."""
    word = libc.get(slot.ctypes.data + 8)
    crc = _crc(slot, _begin(span, tag, page, generation), sums)
    return word >> 32 & _LOW == tag and word & _LOW == crc


@njit(nogil=True, cache=True)
def _check(slots, span, tag, pages, found, sums):
    for i in range(len(pages)):
        slot = slots[i]
        generation = first_word(slot)
        whole = generation > 0 and whole_slot(slot, span, tag, pages[i], generation, sums)
        found[i] = generation if whole else 0
