"""Rules that scale the learning rate with the batch size, as plug-ins (Qiao, thesis, section 3.3).

    SCALE_LR(M0, M) -> lambda

A rule is called before every model update and may use what training measured so far. AdaScale
(Johnson et al.) for SGD, square root (Krizhevsky) for Adam and its like, linear (Goyal et al.),
LEGW (You et al.: square root, with a warm-up that lasts proportionally more epochs). Third parties
add theirs by the entry point group `slackwater.lr_scaling`.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from math import inf, sqrt
from typing import Final

import msgspec

from slackwater.common.base.errors import ConfigRejected

ENTRY_POINTS: Final = "slackwater.lr_scaling"


class TrainingState(msgspec.Struct, frozen=True):
    """Quantities that a rule may use."""

    noise_scale: float = 0.0
    """phi as last estimated."""
    epoch: float = inf
    """Epochs of examples seen so far, fractions included."""
    warmup_epochs: float = 0.0
    """Length of the warm-up that belongs to M0 (LEGW)."""


ScaleLr = Callable[[float, float, TrainingState], float]


def linear(batch_initial: float, batch: float, state: TrainingState) -> float:
    return batch / batch_initial


def square_root(batch_initial: float, batch: float, state: TrainingState) -> float:
    return sqrt(batch / batch_initial)


def adascale(batch_initial: float, batch: float, state: TrainingState) -> float:
    """The gain: how many iterations of M0 one iteration of M replaces, between 1 and M / M0."""
    if state.noise_scale == inf:
        return batch / batch_initial
    return (1.0 + state.noise_scale / batch_initial) / (1.0 + state.noise_scale / batch)


def legw(batch_initial: float, batch: float, state: TrainingState) -> float:
    scale = batch / batch_initial
    warmup = state.warmup_epochs * scale
    return sqrt(scale) * (min(1.0, state.epoch / warmup) if warmup > 0 else 1.0)


RULES: Final[dict[str, ScaleLr]] = {
    "adascale": adascale,
    "legw": legw,
    "linear": linear,
    "square-root": square_root,
}


def rule(name: str) -> ScaleLr:
    """The rule of that name, of ours or of a plug-in."""
    if name in RULES:
        return RULES[name]
    plugged = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in plugged:
        known = ", ".join(sorted({*RULES, *plugged}))
        raise ConfigRejected(f"there is no learning-rate rule {name!r}; choose one of {known}")
    found: ScaleLr = plugged[name].load()
    return found
