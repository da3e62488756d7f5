"""One element of several slots, as the kernels reckon with it: inlined into their loops.

Gradients' dtypes are told apart by what numba knows: float16 comes as uint16, bfloat16 as int16,
whole slots of int8 as uint8 (packed.py).
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated,unreachable"
# mypy: disable-error-code="import-untyped,untyped-decorator,attr-defined"

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import config
from numba.extending import intrinsic, overload

from slackwater.common.domains.slots.gradient_squares import EACH, MEAN, SECOND
from slackwater.common.domains.slots.packed import BLOCK, EXPONENT_MIN, LARGEST, NOT_FINITE
from slackwater.common.native.compiled import njit

_RECIPROCAL: Final = np.uint32(0x7EF127EA)
_NEARLY_TWO: Final = np.float32(2.00168)
"""Newton's step alone would err to one side only."""
_PART_ELEMENTS: Final = 8 * 1024
"""Squares that are added up in float32: of more, the sum would not be right to a millionth where
vectors are narrow."""
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_PART: Final = np.uint64(_PART_ELEMENTS)
_PART_BLOCKS: Final = _PART_ELEMENTS // BLOCK


@intrinsic
def bits(typing: Any, x: Any) -> Any:
    def cast(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), cast


@njit
def larger(largest, x):
    """Return the larger of a magnitude, as bits, and that of a number."""
    return max(largest, np.uint32(bits(x) & _MAGNITUDE))


@njit
def add(sums, each, mean, second):
    """Add a part's squares to those of a fold."""
    sums[EACH] += each
    sums[MEAN] += mean
    sums[SECOND] += second


@intrinsic
def as_float(typing: Any, x: Any) -> Any:
    def cast(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), cast


@intrinsic
def _converted(typing: Any, x: Any) -> Any:
    def convert(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half = builder.bitcast(arguments[0], ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.uint16), convert


def _converts() -> bool:
    """Say whether code is compiled for this processor as it is, and that converts halves itself."""
    as_it_is = config.CPU_NAME is None and config.CPU_FEATURES is None
    return as_it_is and bool(get_host_cpu_features().get("f16c"))


@njit
def _half(x):
    """A half's bits, without branches. A subnormal is the difference of two normal numbers: exact,
    and no operand is subnormal, which would be slow."""
    magnitude = np.uint32(np.uint32(x & np.uint16(0x7FFF)) << np.uint32(13))
    exponent = np.uint32(magnitude & np.uint32(0x0F800000))
    normal = np.uint32(magnitude + np.uint32(112 << 23))
    special = np.uint32(normal + np.uint32(112 << 23))
    tiny = bits(as_float(np.uint32(normal + np.uint32(1 << 23))) - as_float(np.uint32(113 << 23)))
    value = tiny if exponent == 0 else (special if exponent == np.uint32(0x0F800000) else normal)
    return as_float(np.uint32(value | np.uint32(np.uint32(x & np.uint16(0x8000)) << np.uint32(16))))


def _widen(x):
    """One gradient's value as float32."""
    return x


@overload(_widen)
def _widen_typed(x):
    if x == types.float32:
        return lambda x: x
    if x == types.int16:
        return lambda x: as_float(np.uint32(np.uint32(np.uint16(x)) << np.uint32(16)))
    return (lambda x: _converted(x)) if _converts() else (lambda x: _half(x))


def mean(slots, i, inverse):
    """The mean of element i over a tuple of slots, summed in order; the sum of their squares. Of
    many slots it comes as ((means,),), where their squares are summed already, or as
    ((means, squares),)."""
    return slots[0][i], slots[0][i]


@overload(mean)
def _typed_mean(slots, i, inverse):
    def summed(slots, i, inverse):
        return slots[0][0][i], np.float32(0)

    def squared(slots, i, inverse):
        return slots[0][0][i], slots[0][1][i]

    def one(slots, i, inverse):
        a = _widen(slots[0][i])
        return a, a * a

    def two(slots, i, inverse):
        a, b = _widen(slots[0][i]), _widen(slots[1][i])
        return (a + b) * inverse, a * a + b * b

    def three(slots, i, inverse):
        a, b, c = _widen(slots[0][i]), _widen(slots[1][i]), _widen(slots[2][i])
        return (a + b + c) * inverse, a * a + b * b + c * c

    def four(slots, i, inverse):
        a, b = _widen(slots[0][i]), _widen(slots[1][i])
        c, d = _widen(slots[2][i]), _widen(slots[3][i])
        return (a + b + c + d) * inverse, a * a + b * b + c * c + d * d

    if isinstance(slots.dtype, types.BaseTuple):
        return summed if len(slots.dtype) == 1 else squared
    return (one, two, three, four)[slots.count - 1]


def further(slots, i, total):
    """The total of element i and of a tuple of further slots, in order; the sum of their
    squares."""
    return total, total


@overload(further)
def _typed_further(slots, i, total):
    def one(slots, i, total):
        a = _widen(slots[0][i])
        return total + a, a * a

    def two(slots, i, total):
        a, b = _widen(slots[0][i]), _widen(slots[1][i])
        return total + a + b, a * a + b * b

    def three(slots, i, total):
        a, b, c = _widen(slots[0][i]), _widen(slots[1][i]), _widen(slots[2][i])
        return total + a + b + c, a * a + b * b + c * c

    def four(slots, i, total):
        a, b = _widen(slots[0][i]), _widen(slots[1][i])
        c, d = _widen(slots[2][i]), _widen(slots[3][i])
        return total + a + b + c + d, a * a + b * b + c * c + d * d

    return (one, two, three, four)[slots.count - 1]


@njit(fastmath={"reassoc", "nsz"})
def plus(total, x):
    """An addition that may be reordered with others of its kind."""
    return total + x


@njit
def weight(x):
    """1 / x to .2 %, for a normal x > 0: one step of Newton's, for a division takes longer."""
    guess = as_float(np.uint32(_RECIPROCAL - bits(x)))
    return guess * (_NEARLY_TWO - x * guess)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy")(function)
    return compiled


@njit
def parts(n):
    return (n + _PART_ELEMENTS - 1) // _PART_ELEMENTS


@njit
def within(part, n):
    """The elements of a part. Indices without a sign need no look whether they count from the
    end, which would forbid to do several elements side by side."""
    start = np.uint64(part) * _PART
    return range(start, min(np.uint64(n), start + _PART))


@njit
def _add_first(slots, inverse, g, squares, sums):
    for part in range(parts(g.size)):
        each = np.float32(0)
        for i in within(part, g.size):
            g[i], new = mean(slots, i, inverse)
            if squares is not None:
                squares[i] = new
            elif sums is not None:
                each = plus(each, new)
        if sums is not None:
            sums[EACH] += each


@njit
def _add_more(slots, inverse, g, squares, sums):
    for part in range(parts(g.size)):
        each = np.float32(0)
        for i in within(part, g.size):
            total, new = further(slots, i, g[i])
            g[i] = total * inverse
            if squares is not None:
                squares[i] += new
            elif sums is not None:
                each = plus(each, new)
        if sums is not None:
            sums[EACH] += each


@kernel
def sum_slots(slots, stride, workers, lo, inverse, g, squares, sums):
    """The mean over many slots of one array, `stride` elements apart, from element `lo` on, four at
    a time; and the sum of their squares, or each element's, where these are yet to be weighted."""
    n, one = g.size, np.float32(1)
    for rank in range(0, workers, 4):
        a, left = rank * stride + lo, workers - rank
        b, c, d = a + stride, a + 2 * stride, a + 3 * stride
        factor = inverse if left <= 4 else one
        if left >= 4:
            four = (slots[a : a + n], slots[b : b + n], slots[c : c + n], slots[d : d + n])
            if rank == 0:
                _add_first(four, factor, g, squares, sums)
            else:
                _add_more(four, factor, g, squares, sums)
        elif left == 3:
            _add_more(
                (slots[a : a + n], slots[b : b + n], slots[c : c + n]), factor, g, squares, sums
            )
        elif left == 2:
            _add_more((slots[a : a + n], slots[b : b + n]), factor, g, squares, sums)
        else:
            _add_more((slots[a : a + n],), factor, g, squares, sums)


@njit
def _unit(exponent):
    """Return the number in which the integers of a block count."""
    e = np.uint32(exponent)
    value = np.uint32(np.uint32(e - np.uint32(6)) << np.uint32(23))
    value = np.uint32(0x7F000000) if e == np.uint32(NOT_FINITE) else value
    return as_float(np.uint32(0) if e == np.uint32(0) else value)


@kernel
def sum_packed(slots, stride, workers, elements, lo, inverse, g, squares, sums):
    """Do what `sum_slots` does over slots of int8 that have `elements` each, one at a time."""
    hi = lo + g.size
    for rank in range(workers):
        base, factor = rank * stride, inverse if rank == workers - 1 else np.float32(1)
        each = np.float32(0)
        for block in range(lo // BLOCK, (hi + BLOCK - 1) // BLOCK):
            unit = _unit(slots[base + elements + block])
            first, end = max(block * BLOCK, lo), min(block * BLOCK + BLOCK, hi)
            own, out = slots[base + first : base + end], g[first - lo : end - lo]
            for i in range(own.size):
                x = np.float32(np.int8(own[i])) * unit
                out[i] = (x if rank == 0 else out[i] + x) * factor
                if squares is not None:
                    at = first - lo + i
                    squares[at] = x * x if rank == 0 else squares[at] + x * x
                elif sums is not None:
                    each = plus(each, x * x)
            if sums is not None and squares is None and block % _PART_BLOCKS == 0:
                sums[EACH] += each
                each = np.float32(0)
        if sums is not None:
            sums[EACH] += each


@kernel
def pack_blocks(values, packed):
    """Pack float32 `values` into a slot of int8."""
    n = values.size
    for block in range((n + BLOCK - 1) // BLOCK):
        first, end = block * BLOCK, min(block * BLOCK + BLOCK, n)
        own, out = values[first:end], packed[first:end]
        largest = np.uint32(0)
        for i in range(own.size):
            largest = larger(largest, own[i])
        e = np.uint32(largest >> np.uint32(23))
        e = np.uint32(0) if e < np.uint32(EXPONENT_MIN) else e
        packed[n + block] = np.uint8(e)
        usable = np.uint32(0) < e and e < np.uint32(NOT_FINITE)
        bits_of_scale = np.uint32(np.uint32(np.uint32(260) - e) << np.uint32(23))
        scale = as_float(bits_of_scale) if usable else np.float32(0)
        for i in range(own.size):
            x = np.rint(own[i] * scale) if usable else np.float32(0)
            bounded = max(np.float32(-LARGEST), min(np.float32(LARGEST), x))
            broken = larger(np.uint32(0), own[i]) >> np.uint32(23) == np.uint32(NOT_FINITE)
            out[i] = np.uint8(LARGEST) if broken else np.uint8(np.int8(bounded))
