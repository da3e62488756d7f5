"""The update rules, defined expression by expression in float32.

`step` is the definition, slow and plain; kernels.py computes the same bits in one pass. g is the
mean of the W gradients: summed in worker-rank order, then times float32(1/W) (W = 1: as it is).
Conventions are PyTorch's (momentum without dampening, decay as L2 except in AdamW). t counts the
updates of the optimiser's state, from 1; the bias corrections are computed from t in float64.

    all but adamw   g <- g + wd p
    sgd             p' = p - lr g
    momentum        m' = mu m + g                  p' = p - lr m'
    nesterov        m' = mu m + g                  p' = p - lr (g + mu m')
    adam            m' = b1 m + (1-b1) g           p' = p - step (m' / (sqrt(v') r + eps))
                    v' = b2 v + (1-b2) (g g)       step = lr / (1 - b1^t), r = 1 / sqrt(1 - b2^t)
    adamw           as adam, with p (1 - lr wd) in place of p
    nadam           m', v' as adam                 p' = p - (gs g + ms m') / (sqrt(v') r + eps)
                    gs = lr (1 - mu_t) / (1 - M_t), ms = lr mu_t+1 / (1 - M_t mu_t+1), where
                    mu_t = b1 (1 - 0.96^(t psi) / 2), psi = momentum_decay, M_t = mu_1 ... mu_t
    adagrad         h' = h + g g                   p' = p - lr (g / (sqrt(h') + eps))
    nonnegative     p' = max(0, q), where q = p - lr g
    soft_threshold  p' = max(0, q - c) - max(0, -q - c), where c = threshold
    rmsprop         v' = b2 v + (1-b2) (g g)       p' = p - lr (g / (sqrt(v') + eps))
    rmsprop_momentum   v' as rmsprop; m' = mu m + g / (sqrt(v') + eps), p' = p - lr m'
    rmsprop_centered   as that, with |v' - a' a'| in place of v' in m'; a' = b2 a + (1-b2) g
    sum             p' = W g: the sum of the gradients, which are not divided by W; any value counts

A job with the rule `sum` has its optimiser in its program: nothing of a version goes into the next.
Every operation rounds to float32 once: no fused multiply-add, no reordering. So the result depends
neither on the order of arrival nor on how the bucket is cut into chunks. (PyTorch has v' - a' a' as
it is: rounding can make it negative, and the step NaN.) max(0, x) is (x + |x|) / 2: exact, and NaN
where x is.
"""

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.domains.slots.packed import unpack
from slackwater.schemas.tensors import DType, UpdateRule

Floats = NDArray[np.float32]
STORED_DTYPES: Final[dict[DType, type[np.generic]]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.uint8,
}
"""A slot's numbers as numpy has them."""

_BLOCK: Final = struct.Struct("<8d")
_NOTHING: Final = 2.0**-60


class Hyper(NamedTuple):
    """The hyper-parameters of one push."""

    learning_rate: float
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 0.004
    threshold: float = 0.0

    @classmethod
    def of(cls, rule: UpdateRule) -> "Hyper":
        """Return the hyper-parameters of a push that carries none of its own."""
        return cls(*(getattr(rule, name) for name in cls._fields))

    def pack(self) -> bytes:
        """The 64 bytes of a rank's block."""
        return _BLOCK.pack(*self)

    @classmethod
    def unpack(cls, block: bytes) -> "Hyper":
        return cls(*_BLOCK.unpack(block))


@dataclass(frozen=True, slots=True)
class Rule:
    """`states`: optimiser state buffers; `uses`: the hyper-parameters that matter to it."""

    states: int
    uses: tuple[str, ...]
    sums: bool = False
    """The result is the sum of the gradients, whatever they are: infinities and NaN belong to the
    program, whose loss scaling looks for them."""

    second: int | None = None
    """The state that holds second moments, which a pre-conditioned gradient is weighted by."""

    @property
    def ages(self) -> bool:
        """Say whether a step depends on how many there were."""
        return "beta1" in self.uses

    def fault(self, hyper: Hyper) -> str:
        """Why these hyper-parameters cannot be used; empty: they can."""
        for name in self.uses:
            value: float = getattr(hyper, name)
            if not math.isfinite(value):
                return f"{name} is {value}: it must be a number"
            if name in ("beta1", "beta2") and not 0.0 <= value < 1.0:
                return f"{name} is {value}: it must be in [0, 1)"
            if name in ("momentum_decay", "threshold") and value < 0.0:
                return f"{name} is {value}: it must be at least 0"
        return ""

    def difference(self, hyper: Hyper, reference: Hyper) -> str:
        """How a rank's hyper-parameters differ from rank 0's; empty: they do not."""
        for name in self.uses:
            value, expected = getattr(hyper, name), getattr(reference, name)
            if value != expected:
                return f"{name} is {value}, rank 0 pushed {expected}: all workers must agree"
        return ""


_PLAIN: Final = ("learning_rate", "weight_decay")
_ADAM: Final = ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay")
_RMSPROP: Final = ("learning_rate", "beta2", "epsilon", "weight_decay")
RULES: Final[dict[str, Rule]] = {
    "sgd": Rule(0, _PLAIN),
    "momentum": Rule(1, (*_PLAIN, "momentum")),
    "nesterov": Rule(1, (*_PLAIN, "momentum")),
    "adam": Rule(2, _ADAM, second=1),
    "adamw": Rule(2, _ADAM, second=1),
    "nadam": Rule(2, (*_ADAM, "momentum_decay"), second=1),
    "adagrad": Rule(1, (*_PLAIN, "epsilon"), second=0),
    "rmsprop": Rule(1, _RMSPROP, second=0),
    "rmsprop_momentum": Rule(2, (*_RMSPROP, "momentum"), second=0),
    "rmsprop_centered": Rule(3, (*_RMSPROP, "momentum"), second=0),
    "nonnegative": Rule(0, _PLAIN),
    "soft_threshold": Rule(0, (*_PLAIN, "threshold")),
    "sum": Rule(0, (), sums=True),
}

# Places in the array of scalars that a step is given.
LR, MU, B1, B1C, B2, B2C, EPS, WD, STEP, R, DECAY, INVERSE, GS, MS, C, HALF, SCALARS = range(17)


def divisor(rule: str, workers: int) -> int:
    """Return what the sum of so many gradients is divided by."""
    return 1 if RULES[rule].sums else workers


def scalars(hyper: Hyper, t: int, workers: int) -> Floats:
    """Return the scalars of a step, computed in float64 and rounded once. `workers`: what the sum
    of the gradients is divided by."""
    k = np.zeros(SCALARS, np.float64)
    k[LR], k[MU], k[EPS], k[WD] = (
        hyper.learning_rate,
        hyper.momentum,
        hyper.epsilon,
        hyper.weight_decay,
    )
    k[C], k[HALF] = hyper.threshold, 0.5
    k[B1], k[B1C] = hyper.beta1, 1.0 - hyper.beta1
    k[B2], k[B2C] = hyper.beta2, 1.0 - hyper.beta2
    if 0.0 <= hyper.beta1 < 1.0 and 0.0 <= hyper.beta2 < 1.0:  # Else no rule uses them (`fault`).
        k[STEP] = hyper.learning_rate / (1.0 - hyper.beta1**t)
        k[R] = 1.0 / math.sqrt(1.0 - hyper.beta2**t)
        k[GS], k[MS] = _nesterov_steps(hyper, t)
    k[DECAY] = 1.0 - hyper.learning_rate * hyper.weight_decay
    k[INVERSE] = 1.0 / workers
    with np.errstate(over="ignore"):  # An infinity is found in the results and refused.
        return k.astype(np.float32)


def _nesterov_steps(hyper: Hyper, t: int) -> tuple[float, float]:
    """Return gs and ms of nadam's step t (Dozat 2016)."""
    beta1, decay = hyper.beta1, max(0.0, hyper.momentum_decay)
    now, ahead = nesterov_share(beta1, decay, t), nesterov_share(beta1, decay, t + 1)
    product = nesterov_product(beta1, decay, t)
    rate = hyper.learning_rate
    return rate * (1.0 - now) / (1.0 - product), rate * ahead / (1.0 - product * ahead)


def nesterov_share(beta1: float, momentum_decay: float, t: int) -> float:
    """Return mu_t."""
    return beta1 * (1.0 - 0.5 * math.pow(0.96, t * momentum_decay))


@functools.lru_cache(256)
def nesterov_product(beta1: float, momentum_decay: float, t: int) -> float:
    """Return M_t; 0 where it is too small to count beside 1."""
    if beta1**t < _NOTHING:
        return 0.0
    steps = np.arange(1, t + 1, dtype=np.float64)
    with np.errstate(over="ignore"):  # So much decay that nothing is left of the half.
        return float(np.prod(beta1 * (1.0 - 0.5 * 0.96 ** (steps * momentum_decay))))


def widen(gradient: NDArray[np.generic]) -> Floats:
    """A slot's values as float32: exact. bfloat16 comes as uint16, numpy does not know it; a whole
    slot of int8 as uint8 (packed.py)."""
    if gradient.dtype == np.float32:
        return gradient.view(np.float32)
    if gradient.dtype == np.float16:
        return gradient.astype(np.float32)
    if gradient.dtype == np.uint16:
        return (gradient.astype(np.uint32) << 16).view(np.float32)
    if gradient.dtype == np.uint8:
        return unpack(gradient.view(np.uint8))
    raise TypeError(f"gradients of dtype {gradient.dtype}: float32, float16, or bfloat16 as uint16")


def narrow(values: Floats) -> NDArray[np.uint16]:
    """Return the bits of bfloat16: each value rounded to the nearest, to the even one of two that
    are as near. What is finite stays so."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    cut = bits >> 16
    rounded = (bits + (0x7FFF + (cut & 1))) >> 16
    infinite = (rounded & 0x7FFF) == 0x7F80
    return np.where(infinite, cut, rounded).astype(np.uint16)


def mean(gradients: Sequence[NDArray[np.generic]], k: Floats) -> Floats:
    """In worker-rank order."""
    total = widen(gradients[0]).copy()
    for gradient in gradients[1:]:
        total = total + widen(gradient)
    return total * k[INVERSE] if len(gradients) > 1 else total


def step(
    rule: str, g: Floats, p: Floats, states: Sequence[Floats], k: Floats
) -> tuple[Floats, tuple[Floats, ...]]:
    """New parameters and new states."""
    with np.errstate(all="ignore"):
        if rule == "sum":
            return g, ()
        if rule != "adamw":
            g = g + k[WD] * p
        match rule:
            case "sgd":
                return p - k[LR] * g, ()
            case "momentum":
                m = k[MU] * states[0] + g
                return p - k[LR] * m, (m,)
            case "nesterov":
                m = k[MU] * states[0] + g
                return p - k[LR] * (g + k[MU] * m), (m,)
            case "adam" | "adamw":
                m = k[B1] * states[0] + k[B1C] * g
                v = k[B2] * states[1] + k[B2C] * (g * g)
                if rule == "adamw":
                    p = p * k[DECAY]
                return p - k[STEP] * (m / (np.sqrt(v) * k[R] + k[EPS])), (m, v)
            case "nadam":
                m = k[B1] * states[0] + k[B1C] * g
                v = k[B2] * states[1] + k[B2C] * (g * g)
                return p - (k[GS] * g + k[MS] * m) / (np.sqrt(v) * k[R] + k[EPS]), (m, v)
            case "rmsprop":
                v = k[B2] * states[0] + k[B2C] * (g * g)
                return p - k[LR] * (g / (np.sqrt(v) + k[EPS])), (v,)
            case "rmsprop_momentum":
                v = k[B2] * states[0] + k[B2C] * (g * g)
                m = k[MU] * states[1] + g / (np.sqrt(v) + k[EPS])
                return p - k[LR] * m, (v, m)
            case "rmsprop_centered":
                v = k[B2] * states[0] + k[B2C] * (g * g)
                a = k[B2] * states[2] + k[B2C] * g
                m = k[MU] * states[1] + g / (np.sqrt(np.abs(v - a * a)) + k[EPS])
                return p - k[LR] * m, (v, m, a)
            case "adagrad":
                h = states[0] + g * g
                return p - k[LR] * (g / (np.sqrt(h) + k[EPS])), (h,)
            case "nonnegative":
                q = p - k[LR] * g
                return k[HALF] * (q + np.abs(q)), ()
            case "soft_threshold":
                q = p - k[LR] * g
                above, below = q - k[C], q + k[C]
                positive = k[HALF] * (above + np.abs(above))
                return positive - k[HALF] * (np.abs(below) - below), ()
    raise ValueError(f"unknown update rule {rule}")
