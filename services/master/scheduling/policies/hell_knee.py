"""HELL and KNEE: how many nodes a job is worth (Lin et al., 2018, section IV).

Both walk the jobs by algorithms 1 and 2: whoever is cheapest with the best size within what is left
gets it. `knee`: least remaining time S at the knee of its speed-up; `hell`: least S / E. The size
rules are `common.models.speedup`'s.

**Malleable** jobs are sized anew at every decision, and `fill` gives idle nodes to whoever becomes
the shortest of all (eq. 5). **Moldable** jobs keep the size they were first given: it is chosen for
the whole cluster, jobs wait for it (nodes may stay idle), and jobs may still be preempted. Whether
those behind a job that waits may pass it is left open; they may, unless `strict`.

KNEE's threshold, moldable: alpha(x) = alpha_low + x (alpha_high - alpha_low), x the system load
lambda E[S(1)] / W. `load` below 0: measured from the arrivals so far. Malleable: `alpha`, which is
the published 0.01.

`gamma`: early termination (section VI): J counts as J (1 / (1 - progress))^gamma.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.domains.models.speedup import Sizes
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.elastic import (
    ElasticPolicy,
    Kind,
    Pool,
    fill,
    select,
)
from slackwater.services.master.scheduling.registry import AtLeast0, register
from slackwater.services.master.scheduling.view import View

Mode = Literal["malleable", "moldable"]


class SizedByRule(ElasticPolicy):
    """Algorithms 1 and 2 around a size rule."""

    def __init__(self, mode: Mode, filling: bool, gamma: float, strict: bool) -> None:
        self.moldable = mode == "moldable"
        self.filling = filling and not self.moldable
        self.progress_exponent = gamma
        self.skip = not (self.moldable and strict)

    @abstractmethod
    def table(self, kind: Kind, pool: Pool, now_s: float) -> Sizes:
        """The rule's size for every budget."""

    def weight(self, kind: Kind) -> float:
        """Return the weight of a unit of the table's cost, besides the job's work."""
        return 1.0

    @abstractmethod
    def fixed(self, size: int, kind: Kind) -> Sizes:
        """A table of one size."""

    def sizes(
        self, view: View, pool: Pool, budget: int, kept: Mapping[JobId, int]
    ) -> dict[JobId, int]:
        tables: dict[Kind, Sizes] = {}

        def table(kind: Kind) -> Sizes:
            if kind not in tables:
                found = self.table(kind, pool, view.now_s)
                if self.moldable:
                    # A size that the cluster lost the nodes for is chosen anew.
                    fits = 0 < kind.fixed <= view.cluster.gpus
                    size = kind.fixed if fits else found.at(view.cluster.gpus)[0]
                    found = self.fixed(size, kind)
                tables[kind] = found
            return tables[kind]

        kinds = pool.by_kind(view.now_s, self.progress_exponent, kept)
        sizes, choices = select(kinds, budget, table, self.weight, self.skip)
        if self.filling:
            fill(sizes, choices, budget - sum(sizes.values()))
        return sizes


@register("hell")
class Hell(SizedByRule):
    def __init__(
        self,
        mode: Mode = "malleable",
        filling: bool = True,
        gamma: AtLeast0 = 0.0,
        strict: bool = False,
    ) -> None:
        super().__init__(mode, filling, gamma, strict)

    def table(self, kind: Kind, pool: Pool, now_s: float) -> Sizes:
        return kind.curve.hell()

    def weight(self, kind: Kind) -> float:
        return kind.curve.x[1]

    def fixed(self, size: int, kind: Kind) -> Sizes:
        return Sizes([size], [size / kind.curve.x[size] ** 2 if size else float("inf")])


@register("knee")
class Knee(SizedByRule):
    def __init__(
        self,
        mode: Mode = "malleable",
        filling: bool = True,
        gamma: AtLeast0 = 0.0,
        strict: bool = False,
        alpha: float = 0.01,
        alpha_low: float = 0.01,
        alpha_high: float = 0.05,
        load: float = -1.0,
    ) -> None:
        super().__init__(mode, filling, gamma, strict)
        if not 0 < alpha < 1 or not 0 < alpha_low <= alpha_high < 1:
            raise ConfigRejected(
                f"alpha={alpha}, alpha_low={alpha_low}, alpha_high={alpha_high}; give parts "
                "between 0 and 1, the low one first"
            )
        self.alpha, self.load = alpha, load
        self.alpha_low, self.alpha_high = alpha_low, alpha_high

    def table(self, kind: Kind, pool: Pool, now_s: float) -> Sizes:
        if not self.moldable:
            return kind.curve.knee(self.alpha)
        load = self.load if self.load >= 0 else measured_load(pool, now_s)
        # In hundredths of the range: a curve keeps a table per threshold.
        steps = round(min(load, 1.0) * 100)
        alpha = self.alpha_low + steps / 100 * (self.alpha_high - self.alpha_low)
        return kind.curve.knee(alpha)

    def fixed(self, size: int, kind: Kind) -> Sizes:
        return Sizes([size], [1 / kind.curve.x[size] if size else float("inf")])


def measured_load(pool: Pool, now_s: float) -> float:
    """Node-seconds that arrived over node-seconds that there were; 1 while nothing is known."""
    elapsed_s = now_s - pool.first_s
    if elapsed_s <= 0 or pool.gpus <= 0:
        return 1.0
    return pool.work_s / (elapsed_s * pool.gpus)
