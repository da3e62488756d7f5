"""The kernels: fold W gradient slots and apply an update rule, bit for bit as rules.py defines it.

One pass: an element's gradients are summed in worker-rank order, the rule reads the old parameters
and states and writes the other buffers. Up to FUSED_WORKERS_MAX slots go through the loop side by
side, one compiled kernel per number of workers; more are summed first, four side by side, a part
that stays in the second-level cache at a time. No fast-math and no fused multiply-add: see
rules.py.

A kernel that is given `sums` adds squares of gradients to them in the same pass
(gradient_squares.py). Only these additions may be reordered, so that the fold's bits stay as they
are; a part is added up in float32, the parts in float64.

The interpreter lock is released. A kernel returns the largest magnitude it met, as bits, of the new
parameters (and of a squared state, which can overflow alone: an infinite moment or gradient always
shows in the parameters). From INFINITY on it is infinite or not a number, and then the caller must
not flip the version.

Compiled code is kept on disk beside this file (or in NUMBA_CACHE_DIR): the first process to need
a rule compiles it once, the others load it.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated,unreachable"
# mypy: disable-error-code="import-untyped,untyped-decorator"

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slackwater.common.domains.slots.elements import (
    add,
    kernel,
    larger,
    mean,
    parts,
    plus,
    sum_packed,
    sum_slots,
    weight,
    within,
)
from slackwater.common.domains.slots.gradient_squares import (
    FLOOR,
    FoldSquares,
    Sums,
)
from slackwater.common.domains.slots.packed import slot_length
from slackwater.common.domains.slots.rules import (
    B1,
    B1C,
    B2,
    B2C,
    DECAY,
    EPS,
    GS,
    HALF,
    INVERSE,
    LR,
    MS,
    MU,
    RULES,
    SCALARS,
    STEP,
    WD,
    C,
    Floats,
    R,
)
from slackwater.schemas.tensors import DType

INFINITY: Final = 0x7F800000
FUSED_WORKERS_MAX: Final = 4
_SUM_ELEMENTS: Final = 64 * 1024
"""256 KiB of float32: the sum of many slots is read again from the second-level cache."""
KERNEL_DTYPES: Final[dict[DType, type[np.generic]]] = {
    "float32": np.float32,
    "float16": np.uint16,
    "bfloat16": np.int16,
}
SLOT_DTYPES: Final[dict[DType, type[np.generic]]] = {**KERNEL_DTYPES, "int8": np.uint8}
"""The latter is of whole slots (packed.py), the others are of elements."""


@kernel
def _sgd(slots, p, new_p, k, sums):
    lr, wd, inverse = k[LR], k[WD], k[INVERSE]
    largest = np.uint32(0)
    for part in range(parts(p.size)):
        each = large = np.float32(0)
        for i in within(part, p.size):
            average, squares = mean(slots, i, inverse)
            g = average + wd * p[i]
            value = p[i] - lr * g
            if sums is not None:
                each = plus(each, squares)
                large = plus(large, average * average)
            new_p[i] = value
            largest = larger(largest, value)
        if sums is not None:
            add(sums, each, large, 0.0)
    return largest


@kernel
def _momentum(slots, p, new_p, m, new_m, k, sums):
    lr, mu, wd, inverse = k[LR], k[MU], k[WD], k[INVERSE]
    largest = np.uint32(0)
    for part in range(parts(p.size)):
        each = large = np.float32(0)
        for i in within(part, p.size):
            average, squares = mean(slots, i, inverse)
            g = average + wd * p[i]
            moment = mu * m[i] + g
            value = p[i] - lr * moment
            if sums is not None:
                each = plus(each, squares)
                large = plus(large, average * average)
            new_m[i] = moment
            new_p[i] = value
            largest = larger(largest, value)
        if sums is not None:
            add(sums, each, large, 0.0)
    return largest


@kernel
def _nesterov(slots, p, new_p, m, new_m, k, sums):
    lr, mu, wd, inverse = k[LR], k[MU], k[WD], k[INVERSE]
    largest = np.uint32(0)
    for part in range(parts(p.size)):
        each = large = np.float32(0)
        for i in within(part, p.size):
            average, squares = mean(slots, i, inverse)
            g = average + wd * p[i]
            moment = mu * m[i] + g
            value = p[i] - lr * (g + mu * moment)
            if sums is not None:
                each = plus(each, squares)
                large = plus(large, average * average)
            new_m[i] = moment
            new_p[i] = value
            largest = larger(largest, value)
        if sums is not None:
            add(sums, each, large, 0.0)
    return largest


@kernel
def _adam(slots, p, new_p, m, new_m, v, new_v, k, sums):
    wd, inverse, step, r, eps = k[WD], k[INVERSE], k[STEP], k[R], k[EPS]
    b1, b1c, b2, b2c = k[B1], k[B1C], k[B2], k[B2C]
    largest = np.uint32(0)
    floor = np.float32(0) if sums is None else np.float32(sums[FLOOR])
    for part in range(parts(p.size)):
        each = large = second = np.float32(0)
        for i in within(part, p.size):
            average, squares = mean(slots, i, inverse)
            g = average + wd * p[i]
            moment = b1 * m[i] + b1c * g
            square = b2 * v[i] + b2c * (g * g)
            value = p[i] - step * (moment / (np.sqrt(square) * r + eps))
            if sums is not None:
                w = weight(v[i] + floor)
                each = plus(each, squares * w)
                large = plus(large, average * average * w)
                second = plus(second, square)
            new_m[i] = moment
            new_v[i] = square
            new_p[i] = value
            largest = larger(larger(largest, value), square)
        if sums is not None:
            add(sums, each, large, second)
    return largest


@kernel
def _adamw(slots, p, new_p, m, new_m, v, new_v, k, sums):
    decay, inverse, step, r, eps = k[DECAY], k[INVERSE], k[STEP], k[R], k[EPS]
    b1, b1c, b2, b2c = k[B1], k[B1C], k[B2], k[B2C]
    largest = np.uint32(0)
    floor = np.float32(0) if sums is None else np.float32(sums[FLOOR])
    for part in range(parts(p.size)):
        each = large = second = np.float32(0)
        for i in within(part, p.size):
            g, squares = mean(slots, i, inverse)
            moment = b1 * m[i] + b1c * g
            square = b2 * v[i] + b2c * (g * g)
            value = p[i] * decay - step * (moment / (np.sqrt(square) * r + eps))
            if sums is not None:
                w = weight(v[i] + floor)
                each = plus(each, squares * w)
                large = plus(large, g * g * w)
                second = plus(second, square)
            new_m[i] = moment
            new_v[i] = square
            new_p[i] = value
            largest = larger(larger(largest, value), square)
        if sums is not None:
            add(sums, each, large, second)
    return largest


@kernel
def _nadam(slots, p, new_p, m, new_m, v, new_v, k, sums):
    wd, inverse, gs, ms, r, eps = k[WD], k[INVERSE], k[GS], k[MS], k[R], k[EPS]
    b1, b1c, b2, b2c = k[B1], k[B1C], k[B2], k[B2C]
    largest = np.uint32(0)
    floor = np.float32(0) if sums is None else np.float32(sums[FLOOR])
    for part in range(parts(p.size)):
        each = large = second = np.float32(0)
        for i in within(part, p.size):
            average, squares = mean(slots, i, inverse)
            g = average + wd * p[i]
            moment = b1 * m[i] + b1c * g
            square = b2 * v[i] + b2c * (g * g)
            value = p[i] - (gs * g + ms * moment) / (np.sqrt(square) * r + eps)
            if sums is not None:
                w = weight(v[i] + floor)
                each = plus(each, squares * w)
                large = plus(large, average * average * w)
                second = plus(second, square)
            new_m[i] = moment
            new_v[i] = square
            new_p[i] = value
            largest = larger(larger(largest, value), square)
        if sums is not None:
            add(sums, each, large, second)
    return largest


@kernel
def _rmsprop(slots, p, new_p, v, new_v, k, sums):
    lr, wd, inverse, eps, b2, b2c = k[LR], k[WD], k[INVERSE], k[EPS], k[B2], k[B2C]
    largest = np.uint32(0)
    floor = np.float32(0) if sums is None else np.float32(sums[FLOOR])
    for part in range(parts(p.size)):
        each = large = second = np.float32(0)
        for i in within(part, p.size):
            average, squares = mean(slots, i, inverse)
            g = average + wd * p[i]
            square = b2 * v[i] + b2c * (g * g)
            value = p[i] - lr * (g / (np.sqrt(square) + eps))
            if sums is not None:
                w = weight(v[i] + floor)
                each = plus(each, squares * w)
                large = plus(large, average * average * w)
                second = plus(second, square)
            new_v[i] = square
            new_p[i] = value
            largest = larger(larger(largest, value), square)
        if sums is not None:
            add(sums, each, large, second)
    return largest


@kernel
def _rmsprop_momentum(slots, p, new_p, v, new_v, m, new_m, k, sums):
    lr, mu, wd, inverse = k[LR], k[MU], k[WD], k[INVERSE]
    eps, b2, b2c = k[EPS], k[B2], k[B2C]
    largest = np.uint32(0)
    floor = np.float32(0) if sums is None else np.float32(sums[FLOOR])
    for part in range(parts(p.size)):
        each = large = second = np.float32(0)
        for i in within(part, p.size):
            average, squares = mean(slots, i, inverse)
            g = average + wd * p[i]
            square = b2 * v[i] + b2c * (g * g)
            moment = mu * m[i] + g / (np.sqrt(square) + eps)
            value = p[i] - lr * moment
            if sums is not None:
                w = weight(v[i] + floor)
                each = plus(each, squares * w)
                large = plus(large, average * average * w)
                second = plus(second, square)
            new_v[i] = square
            new_m[i] = moment
            new_p[i] = value
            largest = larger(larger(largest, value), square)
        if sums is not None:
            add(sums, each, large, second)
    return largest


@kernel
def _rmsprop_centered(slots, p, new_p, v, new_v, m, new_m, a, new_a, k, sums):
    lr, mu, wd, inverse = k[LR], k[MU], k[WD], k[INVERSE]
    eps, b2, b2c = k[EPS], k[B2], k[B2C]
    largest = np.uint32(0)
    floor = np.float32(0) if sums is None else np.float32(sums[FLOOR])
    for part in range(parts(p.size)):
        each = large = second = np.float32(0)
        for i in within(part, p.size):
            average, squares = mean(slots, i, inverse)
            g = average + wd * p[i]
            square = b2 * v[i] + b2c * (g * g)
            first = b2 * a[i] + b2c * g
            moment = mu * m[i] + g / (np.sqrt(abs(square - first * first)) + eps)
            value = p[i] - lr * moment
            if sums is not None:
                w = weight(v[i] + floor)
                each = plus(each, squares * w)
                large = plus(large, average * average * w)
                second = plus(second, square)
            new_v[i] = square
            new_m[i] = moment
            new_a[i] = first
            new_p[i] = value
            largest = larger(larger(largest, value), square)
        if sums is not None:
            add(sums, each, large, second)
    return largest


@kernel
def _adagrad(slots, p, new_p, h, new_h, k, sums):
    lr, wd, inverse, eps = k[LR], k[WD], k[INVERSE], k[EPS]
    largest = np.uint32(0)
    floor = np.float32(0) if sums is None else np.float32(sums[FLOOR])
    for part in range(parts(p.size)):
        each = large = second = np.float32(0)
        for i in within(part, p.size):
            average, squares = mean(slots, i, inverse)
            g = average + wd * p[i]
            total = h[i] + g * g
            value = p[i] - lr * (g / (np.sqrt(total) + eps))
            if sums is not None:
                w = weight(h[i] + floor)
                each = plus(each, squares * w)
                large = plus(large, average * average * w)
                second = plus(second, total)
            new_h[i] = total
            new_p[i] = value
            largest = larger(larger(largest, value), total)
        if sums is not None:
            add(sums, each, large, second)
    return largest


@kernel
def _nonnegative(slots, p, new_p, k, sums):
    lr, wd, inverse, half = k[LR], k[WD], k[INVERSE], k[HALF]
    largest = np.uint32(0)
    for part in range(parts(p.size)):
        each = large = np.float32(0)
        for i in within(part, p.size):
            average, squares = mean(slots, i, inverse)
            g = average + wd * p[i]
            free = p[i] - lr * g
            value = half * (free + abs(free))
            if sums is not None:
                each = plus(each, squares)
                large = plus(large, average * average)
            new_p[i] = value
            largest = larger(largest, value)
        if sums is not None:
            add(sums, each, large, 0.0)
    return largest


@kernel
def _soft_threshold(slots, p, new_p, k, sums):
    lr, wd, inverse, c, half = k[LR], k[WD], k[INVERSE], k[C], k[HALF]
    largest = np.uint32(0)
    for part in range(parts(p.size)):
        each = large = np.float32(0)
        for i in within(part, p.size):
            average, squares = mean(slots, i, inverse)
            g = average + wd * p[i]
            free = p[i] - lr * g
            above, below = free - c, free + c
            value = half * (above + abs(above)) - half * (abs(below) - below)
            if sums is not None:
                each = plus(each, squares)
                large = plus(large, average * average)
            new_p[i] = value
            largest = larger(largest, value)
        if sums is not None:
            add(sums, each, large, 0.0)
    return largest


@kernel
def _total(slots, p, new_p, k, sums):
    inverse = k[INVERSE]
    for part in range(parts(p.size)):
        each = large = np.float32(0)
        for i in within(part, p.size):
            average, squares = mean(slots, i, inverse)
            new_p[i] = average
            if sums is not None:
                each = plus(each, squares)
                large = plus(large, average * average)
        if sums is not None:
            add(sums, each, large, 0.0)
    return np.uint32(0)  # Any value counts.


KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "nesterov": _nesterov,
    "adam": _adam,
    "adamw": _adamw,
    "nadam": _nadam,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
    "rmsprop_momentum": _rmsprop_momentum,
    "rmsprop_centered": _rmsprop_centered,
    "nonnegative": _nonnegative,
    "soft_threshold": _soft_threshold,
    "sum": _total,
}
assert KERNELS.keys() == RULES.keys()


class Fold:
    """The fold of some slots into some buffers, prepared: whoever does it again and again with the
    same memory pays for its views once. `slots` holds all gradient slots in one array of one of
    SLOT_DTYPES, `stride` elements apart; `parameters` and `states` are (old, new) pairs.
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
        self._kernel, self._weighted = KERNELS[rule], RULES[rule].second is not None
        self._buffers = [buffer for pair in (parameters, *states) for buffer in pair]
        self._size = size = parameters[0].size
        self._own: tuple[NDArray[np.generic], ...] = ()
        of, packed = (slots, stride, workers), slots.dtype == np.uint8
        self._sum = partial(sum_packed, *of, size) if packed else partial(sum_slots, *of)
        if workers <= FUSED_WORKERS_MAX and not packed:
            starts = range(0, workers * stride, stride)
            self._own = tuple(slots[first : first + size] for first in starts)

    def __call__(self, lo: int, hi: int, k: Floats, squares: FoldSquares | None = None) -> bool:
        """Fold elements [lo, hi). False when a value is not finite: the new buffers are then
        worthless. The sums of squares are added to `squares`."""
        sums = None if squares is None else squares.begin()
        if not self._own:
            largest = self._fold_many(lo, hi, k, sums)
        elif hi - lo == self._size:
            largest = int(self._kernel(self._own, *self._buffers, k, sums))
        else:
            own = tuple(slot[lo:hi] for slot in self._own)
            largest = int(self._kernel(own, *(buffer[lo:hi] for buffer in self._buffers), k, sums))
        if squares is not None and sums is not None:
            squares.add(sums)
        return largest < INFINITY

    def _fold_many(self, lo: int, hi: int, k: Floats, sums: Sums | None) -> int:
        g = np.empty(min(_SUM_ELEMENTS, hi - lo), np.float32)
        squares = np.empty_like(g) if sums is not None and self._weighted else None
        largest = 0
        for start in range(lo, hi, _SUM_ELEMENTS):
            n = min(_SUM_ELEMENTS, hi - start)
            part, of = g[:n], None if squares is None else squares[:n]
            self._sum(start, k[INVERSE], part, of, sums)
            slots = (part,) if sums is None else ((part,) if of is None else (part, of),)
            buffers = (buffer[start : start + n] for buffer in self._buffers)
            largest = max(largest, int(self._kernel(slots, *buffers, k, sums)))
        return largest


def fold_chunk(
    rule: str,
    slots: NDArray[np.generic],
    stride: int,
    workers: int,
    span: tuple[int, int],
    parameters: tuple[Floats, Floats],
    states: Sequence[tuple[Floats, Floats]],
    k: Floats,
    squares: FoldSquares | None = None,
) -> bool:
    """Fold elements [span[0], span[1]) of what `Fold` is given, once."""
    return Fold(rule, slots, stride, workers, parameters, states)(*span, k, squares)


def warm(rule: str, dtype: DType, workers: int = 1, *, noise: bool = False) -> None:
    """Compile, or load from disk, what such a job needs. Takes up to a few seconds the first time
    on a machine: call it off the event loop."""
    pairs = [
        (np.zeros(1, np.float32), np.zeros(1, np.float32)) for _ in range(1 + RULES[rule].states)
    ]
    states = pairs[1 : 1 + RULES[rule].states]
    stride = slot_length(1, dtype)
    slots = np.zeros(workers * stride, SLOT_DTYPES[dtype])
    k = np.zeros(SCALARS, np.float32)
    squares = FoldSquares(1.0) if noise and workers > 1 else None
    fold_chunk(rule, slots, stride, workers, (0, 1), pairs[0], states, k, squares)
