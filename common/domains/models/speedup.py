"""A job's throughput by the number of nodes it holds, and the sizes worth giving it.

X(w) is what a scheduler knows of an elastic job (Lin et al., 2018, section IV): S(w) = J / X(w) is
its service time for remaining work J. Which sizes KNEE and HELL choose does not depend on J, so a
curve keeps them, by the budget of nodes, for all jobs of its kind:

    KNEE  goes on from a size to the next while that saves at least the part alpha of S. It walks
          only sizes that beat every smaller one: with a charged server S(2) > S(1), and the
          hybrid model is not monotonic, so a walk over all sizes would stop there.
    HELL  the size with the least S(w) / E(w), E(w) = S(1) / (w S(w)): the least w / X(w)^2.

Of equal sizes the smaller one is taken.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.errors import Rejected

Floats = NDArray[np.float64]
STRICT: Final = 1e-9
"""A saving below this part is none: rounding must not buy a node."""


class Sizes:
    """For every budget of nodes: the size to take (0: none fits), and what it costs per unit of
    work (infinite for none)."""

    __slots__ = ("_cost", "_last", "_size")

    def __init__(self, size: list[int], cost: list[float]) -> None:
        self._size, self._cost, self._last = size, cost, len(size) - 1

    def at(self, budget: int) -> tuple[int, float]:
        budget = min(budget, self._last)
        return self._size[budget], self._cost[budget]


class SpeedupCurve:
    """X(0) = 0, X(1), ..., X(nodes): work per second. Sizes outside the bounds are not chosen; with
    `least` above `nodes` there is no size at all."""

    def __init__(
        self, throughput: Sequence[float], least: int = 1, most: int | None = None
    ) -> None:
        values = np.array(throughput, dtype=np.float64)
        if len(values) < 2 or values[0] != 0 or not np.isfinite(values).all():
            raise Rejected("a speed-up curve is X(0) = 0, X(1), ...: finite numbers")
        if (values[1:] <= 0).any():
            raise Rejected(f"X({int(np.argmin(values[1:])) + 1}) is not above 0; a node does work")
        self.nodes = len(values) - 1
        self.least = max(least, 1)
        self.most = self.nodes if most is None else min(most, self.nodes)
        self.x: list[float] = values.tolist()
        self._best: list[float] = list(accumulate(self.x, max))
        self._known: dict[tuple[str, float], Sizes] = {}
        self._bounded: dict[tuple[int, int], SpeedupCurve] = {}

    def bounded(self, least: int, most: int, nodes: int) -> "SpeedupCurve":
        """The same curve for a job that may hold `least` to `most` of at most `nodes` nodes. Sizes
        beyond the curve are of no use; if `least` lies there, its last value stands for them."""
        most = max(1, min(most, nodes, max(self.nodes, least)))
        key = (least, most)
        if key == (self.least, self.most):
            return self
        if key not in self._bounded:
            beyond = [self.x[-1]] * max(0, most - self.nodes)
            self._bounded[key] = SpeedupCurve([*self.x, *beyond][: most + 1], least, most)
        return self._bounded[key]

    def service_s(self, work: float, nodes: int) -> float:
        """S(w); S(0) is infinite."""
        if nodes <= 0:
            return float("inf")
        return work / self.x[min(nodes, self.nodes)]

    def hell(self) -> Sizes:
        """Sizes by budget; the cost is w / X(w)^2, to be multiplied by J X(1)."""
        return self._cached("hell", 0.0)

    def knee(self, alpha: float) -> Sizes:
        """Sizes by budget; the cost is 1 / X(w), to be multiplied by J."""
        return self._cached("knee", alpha)

    def fastest(self) -> Sizes:
        """For each budget, the size of the largest X; the cost is 1 / X(w)."""
        return self._cached("fastest", 0.0)

    def everything(self) -> Sizes:
        """For each budget, all of it; the cost is 1 / X(w)."""
        return self._cached("everything", 0.0)

    def _cached(self, kind: str, alpha: float) -> Sizes:
        found = self._known.get((kind, alpha))
        if found is None:
            if kind == "everything":
                size = [w if w >= self.least else 0 for w in range(self.most + 1)]
            else:
                size = self._hell() if kind == "hell" else self._walk(alpha)
            power = 2 if kind == "hell" else 1
            cost = [self._price(w, power) for w in size]
            found = self._known[kind, alpha] = Sizes(size, cost)
        return found

    def _price(self, w: int, power: int) -> float:
        if not w:
            return float("inf")
        return w / self.x[w] ** 2 if power == 2 else 1 / self.x[w]

    def _hell(self) -> list[int]:
        best, best_cost = 0, float("inf")
        sizes = [0] * (self.most + 1)
        for w in range(self.least, self.most + 1):
            cost = w / self.x[w] ** 2
            if cost < best_cost * (1 - STRICT):
                best, best_cost = w, cost
            sizes[w] = best
        return sizes

    def _walk(self, alpha: float) -> list[int]:
        """From the least size over those that beat all smaller ones, while a step saves alpha.

        A step over sizes that are slower counts whole: what it saves is not divided by its nodes.
        The paper's delta has steps of one node alone. A second node that is charged for the server
        slows the job, and divided, the third would often not pay for both, though those that follow
        do: mean response times were 5 to 8 % longer so (alpha .05, loads .3 and .7).
        """
        sizes = [0] * (self.most + 1)
        current, going = self.least, True
        for w in range(self.least, self.most + 1):
            if going and self.x[w] > self.x[current] * (1 + STRICT):
                saved = 1.0 - self.x[current] / self.x[w]
                going = saved >= alpha - STRICT
                if going:
                    current = w
            sizes[w] = current
        return sizes

    def more(self, held: int, beat: float) -> int:
        """The fewest nodes beyond `held` with X above `beat`; 0 if there are none."""
        first = max(held + 1, self.least)
        if first > self.most:
            return 0
        if self._best[first - 1] <= beat:
            first = max(first, bisect_right(self._best, beat))
        for w in range(first, self.most + 1):
            if self.x[w] > beat:
                return w - held
        return 0


class ElasticProfile(msgspec.Struct, frozen=True):
    """The facts that a policy may know of an elastic job (`JobView.profile`)."""

    curve: SpeedupCurve
    work: float
    """J at submission, in the curve's unit."""


def linear_curve(nodes: int, gpus: int) -> SpeedupCurve:
    """Seconds of running on `gpus` nodes done per second: what is assumed of a job of which
    nothing but its duration is known."""
    return SpeedupCurve([w / gpus for w in range(nodes + 1)])
