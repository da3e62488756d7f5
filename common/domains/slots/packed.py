"""Gradients in 8 bits: blocks of 32 integers with a power of two for each, as OCP's MXINT8 has it
(OCP Microscaling Formats v1.0, sections 5.2 and 6.3).

A slot holds n integers of 8 bits, then one byte for each block of 32 of them, the last of which may
be shorter: 33 bytes for 32 elements. With x the largest magnitude of a block and
e = floor(log2 x) + 127, as a float32 has it, an element v is stored as the integer nearest to
v 2^(133 - e), the even one of two, at most 127 in magnitude; it stands for that times 2^(e - 133),
which a float32 has exactly. So the error is at most 2^-7 of the block's largest magnitude, and
half of that but for the largest ones. A block whose values are all below 2^-100 is zeros (e = 0).
In one with values that are not finite (e = 255) these are infinite, so that a fold finds them, and
the others are zeros.

This is the definition, slow and plain; `pack_blocks` and `sum_packed` of elements.py compute the
same bits.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from slackwater.schemas.tensors import DType

Floats = NDArray[np.float32]
Packed = NDArray[np.uint8]
BLOCK: Final = 32
"""Elements that share a power of two."""
EXPONENT_MIN: Final = 27
"""Blocks of smaller exponents are zeros: nothing here is ever a subnormal number."""
NOT_FINITE: Final = 255
LARGEST: Final = 127
_UNIT: Final = 133
"""2^(e - 133) is what an integer counts in."""
_HUGE: Final = 127
"""Times this power of two LARGEST is infinite, and 0 is 0."""


def packed_bytes(elements: int) -> int:
    """Return the bytes of a slot of so many elements."""
    return elements + -(-elements // BLOCK)


def slot_length(elements: int, dtype: DType) -> int:
    """Return how many numbers a slot of so many elements has, as numpy sees it."""
    return packed_bytes(elements) if dtype == "int8" else elements


def elements_of(nbytes: int) -> int:
    """Return how many elements a slot of so many bytes has."""
    return nbytes - -(-nbytes // (BLOCK + 1))


def pack(values: Floats) -> Packed:
    """Pack `values`, [n], float32, into [packed_bytes(n)]."""
    n = values.size
    blocks = np.zeros((-(-n // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[:n] = values.reshape(-1)
    exponents = (np.abs(blocks).view(np.uint32) >> 23).max(axis=1, initial=0)
    exponents[exponents < EXPONENT_MIN] = 0
    usable = (exponents > 0) & (exponents < NOT_FINITE)
    scales = np.where(usable, _UNIT - exponents.astype(np.int64), 0)[:, None]
    counted = np.rint(np.ldexp(np.where(usable[:, None], blocks, 0.0), scales))
    counted = np.where(np.isfinite(blocks), np.clip(counted, -LARGEST, LARGEST), LARGEST)
    integers = counted.astype(np.int8).view(np.uint8).reshape(-1)[:n]
    return np.concatenate([integers, exponents.astype(np.uint8)])


def unpack(packed: Packed) -> Floats:
    """Return the values of a whole slot, [n], float32."""
    n = elements_of(packed.size)
    exponents = packed[n:].astype(np.int64)
    powers = np.where(exponents == NOT_FINITE, _HUGE, exponents - _UNIT)
    units = np.where(exponents > 0, np.ldexp(np.float32(1.0), powers), np.float32(0.0))
    values = packed[:n].view(np.int8).astype(np.float32)
    with np.errstate(over="ignore"):
        found: Floats = values * np.repeat(units, BLOCK)[:n]
    return found
