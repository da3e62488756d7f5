"""Kernels that fold some rows of a table, by the rules' kernels for all elements (kernels.py).

Only rules that leave alone what has no gradient have one.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated,unreachable"
# mypy: disable-error-code="import-untyped,untyped-decorator"

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slackwater.common.domains.slots.elements import kernel
from slackwater.common.domains.slots.kernels import INFINITY, KERNEL_DTYPES, KERNELS
from slackwater.common.domains.slots.rows import Numbers
from slackwater.common.domains.slots.rules import RULES, SCALARS, Floats
from slackwater.schemas.tensors import DType

_sgd, _adagrad = KERNELS["sgd"], KERNELS["adagrad"]
_nonnegative = KERNELS["nonnegative"]


@kernel
def _sgd_rows(rows, width, values, p, new_p, k):
    largest = np.uint32(0)
    for i in range(rows.size):
        lo = np.int64(rows[i]) * width
        hi = lo + width
        slots = (values[i * width : (i + 1) * width],)
        largest = max(largest, _sgd(slots, p[lo:hi], new_p[lo:hi], k, None))
    return largest


@kernel
def _nonnegative_rows(rows, width, values, p, new_p, k):
    largest = np.uint32(0)
    for i in range(rows.size):
        lo = np.int64(rows[i]) * width
        hi = lo + width
        slots = (values[i * width : (i + 1) * width],)
        largest = max(largest, _nonnegative(slots, p[lo:hi], new_p[lo:hi], k, None))
    return largest


@kernel
def _adagrad_rows(rows, width, values, p, new_p, h, new_h, k):
    largest = np.uint32(0)
    for i in range(rows.size):
        lo = np.int64(rows[i]) * width
        hi = lo + width
        slots = (values[i * width : (i + 1) * width],)
        met = _adagrad(slots, p[lo:hi], new_p[lo:hi], h[lo:hi], new_h[lo:hi], k, None)
        largest = max(largest, met)
    return largest


@kernel
def _copy_rows(rows, width, source, target):
    for i in range(rows.size):
        lo = np.int64(rows[i]) * width
        a, b = source[lo : lo + width], target[lo : lo + width]
        for j in range(np.uint64(0), np.uint64(a.size)):  # See `within`.
            b[j] = a[j]


ROW_KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "sgd": _sgd_rows,
    "adagrad": _adagrad_rows,
    "nonnegative": _nonnegative_rows,
}


def fold_rows(
    rule: str,
    rows: Numbers,
    width: int,
    values: NDArray[np.generic],
    buffers: Sequence[tuple[Floats, Floats]],
    k: Floats,
) -> bool:
    """Fold rows of one push, which the buffers have, by a rule of ROW_KERNELS: they alone are
    written. `values`: theirs, flat, of a kernel dtype; `buffers`: (old, new) of the parameters and
    of each state. False when a value is not finite."""
    both = [buffer for pair in buffers for buffer in pair]
    return int(ROW_KERNELS[rule](rows, width, values, *both, k)) < INFINITY


def copy_rows(rows: Numbers, width: int, source: Floats, target: Floats) -> None:
    """Copy rows, which both have, to the same places."""
    _copy_rows(rows, width, source, target)


def warm(rule: str, dtype: DType) -> None:
    """Compile, or load from disk, what a job of this rule needs that pushes rows."""
    if rule not in ROW_KERNELS:
        return
    one = np.zeros(1, np.uint32)
    pairs = [
        (np.zeros(1, np.float32), np.zeros(1, np.float32)) for _ in range(1 + RULES[rule].states)
    ]
    fold_rows(rule, one, 1, np.zeros(1, KERNEL_DTYPES[dtype]), pairs, np.zeros(SCALARS, np.float32))
    copy_rows(one, 1, *pairs[0])
