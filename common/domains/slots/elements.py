"""One element of several slots, as the kernels reckon with it: inlined into their loops.

Gradients' dtypes are told apart by what numba knows: float16 comes as uint16, bfloat16 as int16.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated,unreachable"
# mypy: disable-error-code="import-untyped,untyped-decorator"

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from slackwater.common.native.compiled import njit

_RECIPROCAL: Final = np.uint32(0x7EF127EA)
_TWO: Final = np.float32(2)


@intrinsic
def bits(typing: Any, x: Any) -> Any:
    def cast(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), cast


@intrinsic
def as_float(typing: Any, x: Any) -> Any:
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
    return lambda x: _half(x)


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
    """1 / x to .3 %, for a normal x > 0: one step of Newton's, for a division takes longer."""
    guess = as_float(np.uint32(_RECIPROCAL - bits(x)))
    return guess * (_TWO - x * guess)
