"""The kernels: fold W gradient slots and apply an update rule, bit for bit as rules.py defines it.

One pass: an element's gradients are summed in worker-rank order, the rule reads the old parameters
and states and writes the other buffers. Up to FUSED_WORKERS_MAX slots go through the loop side by
side, one compiled kernel per number of workers; more are summed first, a part that stays in the
second-level cache at a time. No fast-math and no fused multiply-add: see rules.py.

The interpreter lock is released. A kernel returns the largest magnitude it met, as bits, of the new
parameters (and of a squared state, which can overflow alone: an infinite moment or gradient always
shows in the parameters). From INFINITY on it is infinite or not a number, and then the caller must
not flip the version.

Gradients' dtypes are told apart by what numba knows: float16 comes as uint16, bfloat16 as int16.
Compiled code is kept on disk beside this file (or in NUMBA_CACHE_DIR): the first process to need
a rule compiles it once, the others load it.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated,unreachable"
# mypy: disable-error-code="import-untyped,untyped-decorator"

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from slackwater.common.domains.slots.rules import (
    B1,
    B1C,
    B2,
    B2C,
    DECAY,
    EPS,
    INVERSE,
    LR,
    MU,
    RULES,
    SCALARS,
    STEP,
    WD,
    Floats,
    R,
)
from slackwater.common.native.compiled import njit
from slackwater.schemas.jobs import DType

INFINITY: Final = 0x7F800000
FUSED_WORKERS_MAX: Final = 4
_SUM_ELEMENTS: Final = 64 * 1024
"""256 KiB of float32: the sum of many slots is read again from the second-level cache."""
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
KERNEL_DTYPES: Final[dict[DType, type[np.generic]]] = {
    "float32": np.float32,
    "float16": np.uint16,
    "bfloat16": np.int16,
}


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


def _mean(slots, i, inverse):
    """The mean of element i over a tuple of slots, summed in order."""
    return slots[0][i]


@overload(_mean)
def _mean_typed(slots, i, inverse):
    match slots.count:
        case 1:
            return lambda slots, i, inverse: _widen(slots[0][i])
        case 2:
            return lambda slots, i, inverse: (_widen(slots[0][i]) + _widen(slots[1][i])) * inverse
        case 3:
            return lambda slots, i, inverse: (
                (_widen(slots[0][i]) + _widen(slots[1][i]) + _widen(slots[2][i])) * inverse
            )
        case _:
            return lambda slots, i, inverse: (
                (
                    _widen(slots[0][i])
                    + _widen(slots[1][i])
                    + _widen(slots[2][i])
                    + _widen(slots[3][i])
                )
                * inverse
            )


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy")(function)
    return compiled


@_kernel
def _sum(slots, stride, workers, lo, inverse, g):
    """The mean over many slots of one array, `stride` elements apart, from element `lo` on."""
    n = g.size
    first = slots[lo : lo + n]
    for i in range(n):
        g[i] = _widen(first[i])
    for rank in range(1, workers):
        other = slots[rank * stride + lo : rank * stride + lo + n]
        for i in range(n):
            g[i] += _widen(other[i])
    for i in range(n):
        g[i] *= inverse


@njit
def _larger(largest, x):
    return max(largest, np.uint32(_bits(x) & _MAGNITUDE))


@_kernel
def _sgd(slots, p, new_p, k):
    lr, wd, inverse = k[LR], k[WD], k[INVERSE]
    largest = np.uint32(0)
    for i in range(p.size):
        g = _mean(slots, i, inverse) + wd * p[i]
        value = p[i] - lr * g
        new_p[i] = value
        largest = _larger(largest, value)
    return largest


@_kernel
def _momentum(slots, p, new_p, m, new_m, k):
    lr, mu, wd, inverse = k[LR], k[MU], k[WD], k[INVERSE]
    largest = np.uint32(0)
    for i in range(p.size):
        g = _mean(slots, i, inverse) + wd * p[i]
        moment = mu * m[i] + g
        value = p[i] - lr * moment
        new_m[i] = moment
        new_p[i] = value
        largest = _larger(largest, value)
    return largest


@_kernel
def _nesterov(slots, p, new_p, m, new_m, k):
    lr, mu, wd, inverse = k[LR], k[MU], k[WD], k[INVERSE]
    largest = np.uint32(0)
    for i in range(p.size):
        g = _mean(slots, i, inverse) + wd * p[i]
        moment = mu * m[i] + g
        value = p[i] - lr * (g + mu * moment)
        new_m[i] = moment
        new_p[i] = value
        largest = _larger(largest, value)
    return largest


@_kernel
def _adam(slots, p, new_p, m, new_m, v, new_v, k):
    wd, inverse, step, r, eps = k[WD], k[INVERSE], k[STEP], k[R], k[EPS]
    b1, b1c, b2, b2c = k[B1], k[B1C], k[B2], k[B2C]
    largest = np.uint32(0)
    for i in range(p.size):
        g = _mean(slots, i, inverse) + wd * p[i]
        moment = b1 * m[i] + b1c * g
        square = b2 * v[i] + b2c * (g * g)
        value = p[i] - step * (moment / (np.sqrt(square) * r + eps))
        new_m[i] = moment
        new_v[i] = square
        new_p[i] = value
        largest = _larger(_larger(largest, value), square)
    return largest


@_kernel
def _adamw(slots, p, new_p, m, new_m, v, new_v, k):
    decay, inverse, step, r, eps = k[DECAY], k[INVERSE], k[STEP], k[R], k[EPS]
    b1, b1c, b2, b2c = k[B1], k[B1C], k[B2], k[B2C]
    largest = np.uint32(0)
    for i in range(p.size):
        g = _mean(slots, i, inverse)
        moment = b1 * m[i] + b1c * g
        square = b2 * v[i] + b2c * (g * g)
        value = p[i] * decay - step * (moment / (np.sqrt(square) * r + eps))
        new_m[i] = moment
        new_v[i] = square
        new_p[i] = value
        largest = _larger(_larger(largest, value), square)
    return largest


@_kernel
def _adagrad(slots, p, new_p, h, new_h, k):
    lr, wd, inverse, eps = k[LR], k[WD], k[INVERSE], k[EPS]
    largest = np.uint32(0)
    for i in range(p.size):
        g = _mean(slots, i, inverse) + wd * p[i]
        total = h[i] + g * g
        value = p[i] - lr * (g / (np.sqrt(total) + eps))
        new_h[i] = total
        new_p[i] = value
        largest = _larger(_larger(largest, value), total)
    return largest


@_kernel
def _total(slots, p, new_p, k):
    inverse = k[INVERSE]
    for i in range(p.size):
        new_p[i] = _mean(slots, i, inverse)
    return np.uint32(0)  # Any value counts.


_KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "nesterov": _nesterov,
    "adam": _adam,
    "adamw": _adamw,
    "adagrad": _adagrad,
    "sum": _total,
}
assert _KERNELS.keys() == RULES.keys()


class Fold:
    """The fold of some slots into some buffers, prepared: whoever does it again and again with the
    same memory pays for its views once. `slots` holds all gradient slots in one array of a kernel
    dtype, `stride` elements apart; `parameters` and `states` are (old, new) pairs.
    """

    def __init__(
        self,
        rule: str,
        slots: NDArray[np.generic],
        stride: int,
        workers: int,
        parameters: tuple[Floats, Floats],
        states: Sequence[tuple[Floats, Floats]],
    ) -> None:
        self._kernel = _KERNELS[rule]
        self._buffers = [buffer for pair in (parameters, *states) for buffer in pair]
        self._slots, self._stride, self._workers = slots, stride, workers
        self._size = size = parameters[0].size
        self._own: tuple[NDArray[np.generic], ...] = ()
        if workers <= FUSED_WORKERS_MAX:
            starts = range(0, workers * stride, stride)
            self._own = tuple(slots[first : first + size] for first in starts)

    def __call__(self, lo: int, hi: int, k: Floats) -> bool:
        """Fold elements [lo, hi). False when a value is not finite: the new buffers are then
        worthless."""
        if not self._own:
            return self._fold_many(lo, hi, k)
        if hi - lo == self._size:
            return int(self._kernel(self._own, *self._buffers, k)) < INFINITY
        own = tuple(slot[lo:hi] for slot in self._own)
        return int(self._kernel(own, *(buffer[lo:hi] for buffer in self._buffers), k)) < INFINITY

    def _fold_many(self, lo: int, hi: int, k: Floats) -> bool:
        g = np.empty(min(_SUM_ELEMENTS, hi - lo), np.float32)
        largest = 0
        for start in range(lo, hi, _SUM_ELEMENTS):
            end = min(start + _SUM_ELEMENTS, hi)
            part = g[: end - start]
            _sum(self._slots, self._stride, self._workers, start, k[INVERSE], part)
            buffers = (buffer[start:end] for buffer in self._buffers)
            largest = max(largest, int(self._kernel((part,), *buffers, k)))
        return largest < INFINITY


def fold_chunk(
    rule: str,
    slots: NDArray[np.generic],
    stride: int,
    workers: int,
    span: tuple[int, int],
    parameters: tuple[Floats, Floats],
    states: Sequence[tuple[Floats, Floats]],
    k: Floats,
) -> bool:
    """Fold elements [span[0], span[1]) of what `Fold` is given, once."""
    return Fold(rule, slots, stride, workers, parameters, states)(*span, k)


def warm(rule: str, dtype: DType, workers: int = 1) -> None:
    """Compile, or load from disk, what such a job needs. Takes up to a few seconds the first time
    on a machine: call it off the event loop."""
    pairs = [(np.zeros(1, np.float32), np.zeros(1, np.float32)) for _ in range(3)]
    states = pairs[1 : 1 + RULES[rule].states]
    slots = np.zeros(workers, KERNEL_DTYPES[dtype])
    k = np.zeros(SCALARS, np.float32)
    fold_chunk(rule, slots, 1, workers, (0, 1), pairs[0], states, k)
