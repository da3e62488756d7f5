"""The tensors of a job, and the rules by which they are updated."""

from math import prod
from typing import Annotated, Final, Literal

import msgspec

from slackwater.schemas.base import Count, Record

DType = Literal["float32", "float16", "bfloat16", "int8"]
"""The numbers that gradients travel as. int8: 8 bits each, and a power of two for 32 of them
(common/domains/slots/packed.py)."""
ELEMENTS_MAX: Final = 2**42
"""Elements of a tensor, and of a job: slots and states of 64 workers then fit 64 bits of bytes."""
Extent = Annotated[int, msgspec.Meta(ge=1, le=ELEMENTS_MAX)]
Single = Annotated[float, msgspec.Meta(ge=-3e38, le=3e38)]
"""A number that a float32 holds: kernels reckon with it."""
Decay = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]


class UpdateRule(Record, kw_only=True, frozen=True):
    """How a gradient changes the parameters. Unused hyper-parameters of a rule are ignored.

    These are the values of a push that carries none of its own (see slots.Hyper).
    """

    name: Literal[
        "sgd", "momentum", "nesterov", "adam", "adamw", "nadam", "adagrad", "rmsprop",
        "rmsprop_momentum", "rmsprop_centered", "nonnegative", "soft_threshold", "sum",
    ] = "sgd"  # fmt: skip
    """The rule. `nonnegative`: sgd, then what is negative becomes 0; `soft_threshold`: sgd, then
    magnitudes shrink (ISTA); `sum`: workers get the sum of their gradients, and take the step
    themselves."""
    learning_rate: Single = 0.01
    """The step, for every rule."""
    momentum: Single = 0.9
    """The share of the last update that goes into the next: momentum, nesterov, rmsprop_momentum
    and rmsprop_centered."""
    beta1: Decay = 0.9
    """Decay of the mean of gradients: adam, adamw and nadam."""
    beta2: Decay = 0.999
    """Decay of the mean of squared gradients: adam, adamw, nadam and rmsprop's (alpha)."""
    epsilon: Single = 1e-8
    """Added to divisors: adam, adamw, nadam, adagrad and rmsprop's."""
    weight_decay: Single = 0.0
    """The share of the parameters that is taken off, with the gradient or, by adamw, beside it."""
    momentum_decay: Annotated[float, msgspec.Meta(ge=0.0, le=3e38)] = 0.004
    """How fast nadam's momentum grows to beta1."""
    threshold: Annotated[float, msgspec.Meta(ge=0.0, le=3e38)] = 0.0
    """How much soft_threshold takes off each magnitude, after the step."""


class TensorSpec(Record, kw_only=True, frozen=True):
    """A trainable tensor: its name, its shape and the parameters' dtype (always float32).

    Tensors of different groups have different hyper-parameters; a push has one set a bucket, so
    they never share one. Nor do tensors of different update rules.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    shape: Annotated[tuple[Extent, ...], msgspec.Meta(max_length=8)]
    group: Count = 0
    sparse: bool = False
    """A table, [rows, width], of which pushes and reads name rows."""
    update: UpdateRule | None = None
    """Its own update rule; None: the job's."""

    def __post_init__(self) -> None:
        if self.sparse and len(self.shape) != 2:
            raise ValueError(f"tensor {self.name}: sparse, of shape {self.shape}; give rows, width")
        if self.update is not None and self.update.name == "sum":
            raise ValueError(f"tensor {self.name}: the rule sum is of all tensors of a job")


def check_elements(tensors: tuple[TensorSpec, ...]) -> None:
    """Raise ValueError where the tensors of one job have too many elements, one or together."""
    elements = sum(prod(tensor.shape) for tensor in tensors)
    if elements > ELEMENTS_MAX:
        raise ValueError(
            f"tensors: {elements} elements in all, at most {ELEMENTS_MAX} in one job; "
            "train them in several"
        )


def largest_share(tensors: tuple[TensorSpec, ...]) -> float:
    """Return the largest tensor's part of all elements: the skew of a model (Tiresias, section
    3.3.3); 0 of none."""
    elements = [prod(tensor.shape) for tensor in tensors]
    return max(elements, default=0) / max(1, sum(elements))


def first_difference(expected: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]) -> str:
    """Names the first tensor in which two ranks' lists differ; empty: they are equal."""
    if expected == found:
        return ""
    for index, (mine, other) in enumerate(zip(expected, found, strict=False)):
        if mine != other:
            if (mine.name, mine.shape) == (other.name, other.shape):
                return f"tensor {index}, {mine.name}, has {_unlike(mine, other)} in the job's list"
            return (
                f"tensor {index} is {other.name} {list(other.shape)}, but {mine.name} "
                f"{list(mine.shape)} in the job's list; all ranks must train the same tensors"
            )
    return (
        f"{len(found)} tensors, but {len(expected)} in the job's list; "
        "all ranks must train the same tensors"
    )


def _unlike(mine: TensorSpec, other: TensorSpec) -> str:
    """Say in what two specs of the same name and shape differ."""
    for field in ("group", "sparse", "update"):
        if getattr(mine, field) != getattr(other, field):
            return f"another {field}"
    raise AssertionError(mine)
