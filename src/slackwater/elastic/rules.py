"""The rules that a table may have for what an update does to it (Lee 2020, section 3.3.2).

A host adds up what its tasks give a table, and an aggregator takes that as one step of the table's
rule. How often a host does so depends on its speed. A threshold or a decay is therefore counted
once for each update, however many make a step.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final

import numpy as np

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.rules import Floats, Hyper, scalars, step
from slackwater.schemas.tensors import UpdateRule

_NO_HYPER: Final[Mapping[str, float]] = MappingProxyType({})


class TableRule(ABC):
    """How a table takes the sum of some updates."""

    of_all: ClassVar[bool] = False
    """An update is of all of the table, as one that shrinks everything."""
    of_counts: ClassVar[bool] = False
    """Counts stay counts."""
    shows: ClassVar[bool] = True
    """A host can compute what its updates make of the values that it has: the rule has no state."""

    @property
    @abstractmethod
    def update(self) -> UpdateRule | None:
        """The rule of the table's tensor, to which the negative sum is pushed, and by which a step
        of nothing changes nothing; None: as the job adds."""

    def hyper(self, updates: int) -> Mapping[str, float]:
        """Return the hyper-parameters of a step of so many updates, where they depend on that."""
        return _NO_HYPER

    def after(self, values: Floats, added: Floats, updates: int) -> Floats:
        """Return the values after a step, to the bit as an aggregator computes it: `added` is the
        sum of so many updates. Of rules that show."""
        rule = self.update
        assert rule is not None
        assert self.shows
        k = scalars(Hyper.of(rule)._replace(**self.hyper(updates)), 1, 1)
        return step(rule.name, np.negative(added), values, (), k)[0]

    def check(self, at: str) -> None:  # noqa: B027
        """Raise Rejected for a field that cannot be, of the table `at`."""

    def check_first(self, at: str, values: Floats) -> None:  # noqa: B027
        """Raise Rejected for values that a table of this rule cannot begin with."""


@dataclass(frozen=True)
class Add(TableRule):
    """x + d."""

    of_counts = True

    @property
    def update(self) -> None:
        return None

    def after(self, values: Floats, added: Floats, updates: int) -> Floats:
        return values + added


ADD: Final = Add()


@dataclass(frozen=True)
class NonNegative(TableRule):
    """max(0, x + d): the projection of non-negative matrix factorization."""

    of_counts = True

    @property
    def update(self) -> UpdateRule:
        return UpdateRule(name="nonnegative", learning_rate=1.0)

    def check_first(self, at: str, values: Floats) -> None:
        if (values < 0.0).any():
            raise Rejected(f"{at}: an initial value is negative, which NonNegative() keeps out")


@dataclass(frozen=True)
class SoftThreshold(TableRule):
    """x + d, whose magnitude then shrinks by `by` for each update, to 0 at most: a step of
    proximal gradient descent, as for the Lasso."""

    by: float
    of_all = True

    @property
    def update(self) -> UpdateRule:
        return UpdateRule(name="soft_threshold", learning_rate=1.0)

    def hyper(self, updates: int) -> Mapping[str, float]:
        return {"threshold": self.by * updates}

    def check(self, at: str) -> None:
        _check_number(f"{at}.by", self.by, low=0.0)


@dataclass(frozen=True)
class Decay(TableRule):
    """x (1 - share)^n + d, where n updates make d: what was, is forgotten by and by."""

    share: float
    of_all = True

    @property
    def update(self) -> UpdateRule:
        return UpdateRule(name="sgd", learning_rate=1.0)

    def hyper(self, updates: int) -> Mapping[str, float]:
        return {"weight_decay": 1.0 - (1.0 - self.share) ** updates}

    def check(self, at: str) -> None:
        _check_number(f"{at}.share", self.share, low=0.0, high=1.0)


@dataclass(frozen=True)
class AdaGrad(TableRule):
    """x + rate d / (sqrt(h) + epsilon), where h is the sum of the squares of all steps, this one
    included. A task gives the direction, as -gradient (Duchi et al. 2011)."""

    rate: float
    epsilon: float = 1e-8
    shows = False

    @property
    def update(self) -> UpdateRule:
        return UpdateRule(name="adagrad", learning_rate=self.rate, epsilon=self.epsilon)

    def check(self, at: str) -> None:
        _check_number(f"{at}.rate", self.rate)
        _check_number(f"{at}.epsilon", self.epsilon, low=0.0)


def _check_number(at: str, value: object, low: float = -3e38, high: float = 3e38) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise Rejected(f"{at} is {value!r}; give a number from {low:g} to {high:g}")
