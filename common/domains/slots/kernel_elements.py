"""What the kernels do with one element: widen it, sum it over slots, look whether it is finite.

Gradients' dtypes are told apart by what numba knows: float16 comes as uint16, bfloat16 as int16.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated,unreachable"
# mypy: disable-error-code="import-untyped,untyped-decorator"

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from slackwater.common.domains.slots.gradient_squares import EACH, MEAN, SECOND
from slackwater.common.native.compiled import njit

SUM_ELEMENTS: Final = 64 * 1024
"""256 KiB of float32: the sum of many slots is read again from the second-level cache."""
_PART_ELEMENTS: Final = 16 * 1024
"""What is added up in float32 before float64 takes over: with 64 Ki sums are off by 1.1e-6."""
_PART: Final = np.uint64(_PART_ELEMENTS)
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_RECIPROCAL: Final = np.uint32(0x7EF127EA)
_TWO: Final = np.float32(2)


@intrinsic
def _bits(typing: Any, x: Any) -> Any:
    def cast(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), cast


@intrinsic
def _float(typing: Any, x: Any) -> Any:
    def cast(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), cast


@njit
def _half(x):
    """A half's bits, without branches. A subnormal is the difference of two normal numbers: exact,
    and no operand is subnormal, which would be slow."""
    magnitude = np.uint32(np.uint32(x & np.uint16(0x7FFF)) << np.uint32(13))
    exponent = np.uint32(magnitude & np.uint32(0x0F800000))
    normal = np.uint32(magnitude + np.uint32(112 << 23))
    special = np.uint32(normal + np.uint32(112 << 23))
    tiny = _bits(_float(np.uint32(normal + np.uint32(1 << 23))) - _float(np.uint32(113 << 23)))
    value = tiny if exponent == 0 else (special if exponent == np.uint32(0x0F800000) else normal)
    return _float(np.uint32(value | np.uint32(np.uint32(x & np.uint16(0x8000)) << np.uint32(16))))


def _widen(x):
    """One gradient's value as float32."""
    return x


@overload(_widen)
def _widen_typed(x):
    if x == types.float32:
        return lambda x: x
    if x == types.int16:
        return lambda x: _float(np.uint32(np.uint32(np.uint16(x)) << np.uint32(16)))
    return lambda x: _half(x)


def gradient_mean(slots, i, inverse):
    """The mean of element i over a tuple of slots, summed in order; the sum of their squares. Of
    many slots both come in arrays, as ((means, squares),)."""
    return slots[0][i], slots[0][i]


@overload(gradient_mean)
def _mean_typed(slots, i, inverse):
    def summed(slots, i, inverse):
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
        return summed
    return (one, two, three, four)[slots.count - 1]


@njit(fastmath={"reassoc", "nsz"})
def plus(total, x):
    """An addition that may be reordered with others of its kind."""
    return total + x


@njit
def weight(x):
    """1 / x to .3 %, for a normal x > 0: one step of Newton's, for a division takes longer."""
    guess = _float(np.uint32(_RECIPROCAL - _bits(x)))
    return guess * (_TWO - x * guess)


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
def add_sums(sums, each, mean, second):
    sums[EACH] += each
    sums[MEAN] += mean
    sums[SECOND] += second


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy")(function)
    return compiled


@kernel
def sum_slots(slots, stride, workers, lo, inverse, g, squares):
    """The mean over many slots of one array, `stride` elements apart, from element `lo` on; and the
    sum of their squares, if it is wanted."""
    n = g.size
    first = slots[lo : lo + n]
    for i in range(n):
        g[i] = _widen(first[i])
    if squares is not None:
        for i in range(n):
            squares[i] = g[i] * g[i]
    for rank in range(1, workers):
        other = slots[rank * stride + lo : rank * stride + lo + n]
        if squares is None:
            for i in range(n):
                g[i] += _widen(other[i])
        else:
            for i in range(n):
                x = _widen(other[i])
                g[i] += x
                squares[i] += x * x
    for i in range(n):
        g[i] *= inverse


@njit
def larger(largest, x):
    return max(largest, np.uint32(_bits(x) & _MAGNITUDE))
