"""The kernels: fold W gradient slots and apply an update rule, bit for bit as rules.py defines it.

One pass over memory: a block of BLOCK elements at a time, its gradients are summed in worker-rank
order into a scratch array that stays in the innermost cache, then the rule reads old parameters and
states and writes the other buffers. Inside a block the rule runs as a few short loops, because a
loop that writes three arrays needs more alias checks than LLVM is willing to make and would not be
vectorised. No fast-math and no fused multiply-add: see rules.py.

The interpreter lock is released. A kernel returns the largest magnitude it met, as bits: gradients'
means, new parameters and new states alike. It is at least INFINITY exactly when one of them is
infinite or not a number, and then the caller must not flip the version.

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
from numba import njit, types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from slackwater.common.slots.rules import (
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
    STEP,
    WD,
    Floats,
    R,
)
from slackwater.schemas.jobs import DType

BLOCK: Final = 4096
"""16 KiB of float32: scratch, and what the loops of one rule reread, stay in a 32 KiB cache."""
INFINITY: Final = 0x7F800000
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


def _widen(x):
    """One gradient's value as float32."""
    return x


@overload(_widen)
def _widen_typed(x):
    if x == types.float32:
        return lambda x: x
    if x == types.int16:
        return lambda x: _float(np.uint32(np.uint16(x)) << np.uint32(16))
    return lambda x: _half(x)


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


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy")(function)
    return compiled


@_kernel
def _mean(slots, stride, workers, start, n, inverse, g):
    """The block's mean gradient into `g`; the largest magnitude as bits."""
    first = slots[start : start + n]
    if workers == 1:
        for i in range(n):
            g[i] = _widen(first[i])
    elif workers == 2:
        second = slots[stride + start : stride + start + n]
        for i in range(n):
            g[i] = (_widen(first[i]) + _widen(second[i])) * inverse
    elif workers == 4:
        second = slots[stride + start : stride + start + n]
        third = slots[2 * stride + start : 2 * stride + start + n]
        fourth = slots[3 * stride + start : 3 * stride + start + n]
        for i in range(n):
            total = _widen(first[i]) + _widen(second[i]) + _widen(third[i]) + _widen(fourth[i])
            g[i] = total * inverse
    else:
        for i in range(n):
            g[i] = _widen(first[i])
        for rank in range(1, workers):
            other = slots[rank * stride + start : rank * stride + start + n]
            for i in range(n):
                g[i] += _widen(other[i])
        for i in range(n):
            g[i] *= inverse
    return _largest(g, n)


@_kernel
def _largest(x, n):
    largest = np.uint32(0)
    for i in range(n):
        largest = max(largest, np.uint32(_bits(x[i]) & _MAGNITUDE))
    return largest


@_kernel
def _decay(g, p, n, wd):
    for i in range(n):
        g[i] += wd * p[i]


@_kernel
def _sgd(slots, stride, workers, lo, hi, p, new_p, k):
    g = np.empty(BLOCK, np.float32)
    largest = np.uint32(0)
    for start in range(lo, hi, BLOCK):
        n = min(BLOCK, hi - start)
        old = p[start : start + n]
        new = new_p[start : start + n]
        largest = max(largest, _mean(slots, stride, workers, start, n, k[INVERSE], g))
        wd, lr = k[WD], k[LR]
        for i in range(n):
            new[i] = old[i] - lr * (g[i] + wd * old[i])
        largest = max(largest, _largest(new, n))
    return largest


@_kernel
def _momentum(slots, stride, workers, lo, hi, p, new_p, m, new_m, k):
    g = np.empty(BLOCK, np.float32)
    largest = np.uint32(0)
    for start in range(lo, hi, BLOCK):
        n = min(BLOCK, hi - start)
        old, old_m = p[start : start + n], m[start : start + n]
        new, moment = new_p[start : start + n], new_m[start : start + n]
        largest = max(largest, _mean(slots, stride, workers, start, n, k[INVERSE], g))
        wd, lr, mu = k[WD], k[LR], k[MU]
        for i in range(n):
            moment[i] = mu * old_m[i] + (g[i] + wd * old[i])
        for i in range(n):
            new[i] = old[i] - lr * moment[i]
        largest = max(largest, max(_largest(new, n), _largest(moment, n)))
    return largest


@_kernel
def _nesterov(slots, stride, workers, lo, hi, p, new_p, m, new_m, k):
    g = np.empty(BLOCK, np.float32)
    largest = np.uint32(0)
    for start in range(lo, hi, BLOCK):
        n = min(BLOCK, hi - start)
        old, old_m = p[start : start + n], m[start : start + n]
        new, moment = new_p[start : start + n], new_m[start : start + n]
        largest = max(largest, _mean(slots, stride, workers, start, n, k[INVERSE], g))
        lr, mu = k[LR], k[MU]
        _decay(g, old, n, k[WD])
        for i in range(n):
            moment[i] = mu * old_m[i] + g[i]
        for i in range(n):
            new[i] = old[i] - lr * (g[i] + mu * moment[i])
        largest = max(largest, max(_largest(new, n), _largest(moment, n)))
    return largest


@_kernel
def _moments(g, old_m, moment, old_v, square, n, k):
    """Adam's two moments; the largest magnitude as bits."""
    b1, b1c, b2, b2c = k[B1], k[B1C], k[B2], k[B2C]
    for i in range(n):
        moment[i] = b1 * old_m[i] + b1c * g[i]
    for i in range(n):
        square[i] = b2 * old_v[i] + b2c * (g[i] * g[i])
    return max(_largest(moment, n), _largest(square, n))


@_kernel
def _adam(slots, stride, workers, lo, hi, p, new_p, m, new_m, v, new_v, k):
    g = np.empty(BLOCK, np.float32)
    largest = np.uint32(0)
    for start in range(lo, hi, BLOCK):
        n = min(BLOCK, hi - start)
        old, new = p[start : start + n], new_p[start : start + n]
        moment, square = new_m[start : start + n], new_v[start : start + n]
        largest = max(largest, _mean(slots, stride, workers, start, n, k[INVERSE], g))
        _decay(g, old, n, k[WD])
        bits = _moments(g, m[start : start + n], moment, v[start : start + n], square, n, k)
        step, r, eps = k[STEP], k[R], k[EPS]
        for i in range(n):
            new[i] = old[i] - step * (moment[i] / (np.sqrt(square[i]) * r + eps))
        largest = max(largest, max(bits, _largest(new, n)))
    return largest


@_kernel
def _adamw(slots, stride, workers, lo, hi, p, new_p, m, new_m, v, new_v, k):
    g = np.empty(BLOCK, np.float32)
    largest = np.uint32(0)
    for start in range(lo, hi, BLOCK):
        n = min(BLOCK, hi - start)
        old, new = p[start : start + n], new_p[start : start + n]
        moment, square = new_m[start : start + n], new_v[start : start + n]
        largest = max(largest, _mean(slots, stride, workers, start, n, k[INVERSE], g))
        bits = _moments(g, m[start : start + n], moment, v[start : start + n], square, n, k)
        step, r, eps, decay = k[STEP], k[R], k[EPS], k[DECAY]
        for i in range(n):
            new[i] = old[i] * decay - step * (moment[i] / (np.sqrt(square[i]) * r + eps))
        largest = max(largest, max(bits, _largest(new, n)))
    return largest


@_kernel
def _adagrad(slots, stride, workers, lo, hi, p, new_p, h, new_h, k):
    g = np.empty(BLOCK, np.float32)
    largest = np.uint32(0)
    for start in range(lo, hi, BLOCK):
        n = min(BLOCK, hi - start)
        old, old_h = p[start : start + n], h[start : start + n]
        new, total = new_p[start : start + n], new_h[start : start + n]
        largest = max(largest, _mean(slots, stride, workers, start, n, k[INVERSE], g))
        lr, eps = k[LR], k[EPS]
        _decay(g, old, n, k[WD])
        for i in range(n):
            total[i] = old_h[i] + g[i] * g[i]
        for i in range(n):
            new[i] = old[i] - lr * (g[i] / (np.sqrt(total[i]) + eps))
        largest = max(largest, max(_largest(new, n), _largest(total, n)))
    return largest


_KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "nesterov": _nesterov,
    "adam": _adam,
    "adamw": _adamw,
    "adagrad": _adagrad,
}
assert _KERNELS.keys() == RULES.keys()


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
    """Fold elements [span[0], span[1]). `slots` holds all gradient slots in one array of a kernel
    dtype, `stride` elements apart; `parameters` and `states` are (old, new) pairs. False when a
    value is not finite: the new buffers are then worthless.
    """
    buffers = [buffer for pair in (parameters, *states) for buffer in pair]
    return int(_KERNELS[rule](slots, stride, workers, span[0], span[1], *buffers, k)) < INFINITY


def warm(rule: str, dtype: DType) -> None:
    """Compile, or load from disk, what a job of this rule and dtype needs. Takes up to a few
    seconds the first time on a machine: call it off the event loop."""
    one = np.zeros(1, np.float32)
    states = [(one, np.zeros(1, np.float32)) for _ in range(RULES[rule].states)]
    k = np.zeros(16, np.float32)
    slots = np.zeros(1, KERNEL_DTYPES[dtype])
    fold_chunk(rule, slots, 1, 1, (0, 1), (one, np.zeros(1, np.float32)), states, k)
