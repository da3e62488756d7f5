"""AdaptiveBatch: decides (m, s) and the learning rate of a training program, while it trains.

    core = AdaptiveBatch(limits, nodes=1, gpus=1)
    core.saw_iteration(per_gpu, accumulation, iteration_s)
    core.saw_squares(small_sqr, large_sqr, batch_small, batch_large)
    if (wanted := core.due_fit(now_s)) is not None:   # fitted elsewhere: observations, last theta
        ...
    core.fitted(theta)                                # re-tunes
    core.decision(progress)                           # of the next iterations

Pure: time is an argument, and the fit is done by whoever holds the core. Follows Qiao, thesis,
sections 3.4.1 (the job's agent) and 3.4.3 (choice of the batch); `PolluxAgent` smooths the moments
and holds the goodput function. Ours besides:

- An iteration time is the median of the last ones of its configuration, as machines are shared.
- Fits begin `fit_s` / 32 after the first iteration, and are twice as far apart each time.
- A batch at most doubles at a time: neither model is trusted far from what was seen.
- Another batch must promise 5 % more goodput (AdaptDL's threshold), or nothing changes.
- Before `SEEN_MIN` estimates of the noise were made, it is unknown: the batch stays, and an
  example of a batch above M0 counts as it would without noise, M0 / M.
"""

from collections import OrderedDict, deque
from math import inf
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.efficiency import efficiency
from slackwater.common.domains.models.fitting import Observation
from slackwater.common.domains.models.goodput import BatchLimits
from slackwater.common.domains.models.gradient_noise import GradientSquares, NoiseScale
from slackwater.common.domains.models.pollux_agent import BatchSplit, Learned, PolluxAgent
from slackwater.common.domains.models.throughput import ThroughputParams

CONFIGURATIONS_MAX: Final = 64
TIMES_MAX: Final = 51
"""Iterations of one configuration that its median is of."""
TIMES_MIN: Final = 3
"""Iterations of one configuration before it is fitted: the first one is often slow."""
SEEN_MIN: Final = 8
"""Estimates of the gradient's moments before phi is known."""
FIT_S: Final = 30.0
FIRST_FIT: Final = 1 / 32
"""Part of `fit_s` after which the first fit is due."""
GAIN_MIN: Final = 1.05
"""Goodput of another batch over that of the present one, at least."""
GROWTH_MAX: Final = 2

Configuration = tuple[int, int, int, int]
"""Nodes, GPUs, examples a GPU, accumulation steps."""


class Decision(NamedTuple):
    """How the next iterations train. All replicas have the same one."""

    per_gpu: int
    """m."""
    accumulation: int
    """s."""
    rate: float = 1.0
    """Factor on the learning rate of M0: SCALE_LR."""
    efficiency: float = 1.0
    """Progress per example, relative to M0 (eq. 3.3)."""

    def batch(self, gpus: int) -> int:
        """M."""
        return gpus * self.per_gpu * (self.accumulation + 1)


class Wanted(NamedTuple):
    """The input of a fit: at most CONFIGURATIONS_MAX observations, and the last fit."""

    observations: tuple[Observation, ...]
    guess: ThroughputParams | None


class AdaptiveChange(msgspec.Struct, frozen=True):
    """A line of a program's record: how it trains from some iteration on."""

    time_s: float
    """Since 1970."""
    iteration: int
    progress: float
    """Statistical epochs done."""
    batch: int
    """M."""
    per_gpu: int
    accumulation: int
    rate: float
    efficiency: float
    noise_scale: float | None = None
    """phi; None: unknown."""
    noise_low: float | None = None
    noise_high: float | None = None
    """Ends of phi's 90 % interval, by the last 20 measurements or so; None: they tell no signal, or
    none that is certain."""
    goodput: float | None = None
    """Useful examples a second by the last fit; None: there was none."""


class Remembered(msgspec.Struct, frozen=True):
    """Everything that a core has learned, for a job's checkpoint."""

    learned: Learned
    times: tuple[tuple[Configuration, tuple[float, ...]], ...]
    seen: int
    split: tuple[int, int]
    gpus: int
    """GPUs that `split` is for: it holds for that many alone."""


class AdaptiveBatch:
    """One job's core. `limits.fixed` keeps the batch. Raises ConfigRejected for a rule of the
    learning rate that nobody offers, Rejected for times that cannot be."""

    def __init__(
        self,
        limits: BatchLimits,
        nodes: int = 1,
        gpus: int = 1,
        *,
        lr_rule: str = "adascale",
        warmup_epochs: float = 0.0,
        fit_s: float = FIT_S,
    ) -> None:
        if not fit_s > 0.0:
            raise Rejected(f"fit_s is {fit_s}; give seconds above 0, 30 for instance")
        self.agent = PolluxAgent(limits, lr_rule=lr_rule, warmup_epochs=warmup_epochs)
        self.nodes, self.gpus, self.limits = nodes, gpus, limits
        self._times = IterationTimes()
        self._seen_lately = NoiseScale()
        self._theta: ThroughputParams | None = None
        self._seen = 0
        self._split = self.agent.batch_split(nodes, gpus)
        self._fit_s, self._next_fit_s, self._wait_s = fit_s, 0.0, fit_s * FIRST_FIT
        self._begun = self._unfitted = False

    # Measurements ---------------------------------------------------------------------------------

    def saw_iteration(self, per_gpu: int, accumulation: int, iteration_s: float) -> None:
        """Note how long an iteration took. Raises Rejected for a time that cannot be."""
        self._times.add((self.nodes, self.gpus, per_gpu, accumulation), iteration_s)
        self._unfitted = True

    def saw_squares(
        self, small_sqr: float, large_sqr: float, batch_small: float, batch_large: float
    ) -> None:
        """Note the mean squared length of gradients of `batch_small` examples, and that of their
        mean over `batch_large`; one that overflowed is left out."""
        self._seen += self.agent.saw_replicas(small_sqr, large_sqr, batch_small, batch_large)
        gradients = max(2, round(batch_large / batch_small))
        squares = GradientSquares(small_sqr, large_sqr, gradients)
        self._seen_lately.add(squares, batch_small)

    @property
    def noise_interval(self) -> tuple[float | None, float | None]:
        """Return the ends of phi's 90 % interval, by what was measured in this process."""
        estimate = self._seen_lately.estimate
        if estimate is None:
            return None, None
        return estimate.low, estimate.high if estimate.high < inf else None

    @property
    def noise_scale(self) -> float | None:
        """phi; None: unknown."""
        return self.agent.noise_scale if self._seen >= SEEN_MIN else None

    # Fits and choices -----------------------------------------------------------------------------

    def due_fit(self, now_s: float) -> Wanted | None:
        """Return what is to be fitted now; None: it is not time yet, or nothing is new."""
        if not self._begun:
            self._begun, self._next_fit_s = True, now_s + self._wait_s
        if now_s < self._next_fit_s or not self._unfitted:
            return None
        observations = self._times.observations()
        if not observations:
            return None
        self._wait_s = min(2 * self._wait_s, self._fit_s)
        self._next_fit_s, self._unfitted = now_s + self._wait_s, False
        return Wanted(observations, self._theta)

    def fitted(self, theta: ThroughputParams) -> None:
        """Take a fit of what `due_fit` returned, and re-tune (m, s)."""
        self._theta = theta
        self.agent.adopt(theta, self.gpus)
        if self.noise_scale is None or self.limits.fixed is not None:
            return
        model = self.agent.model
        assert model is not None  # It was renewed just now.
        limits, now = self.limits, self._split
        most = max(limits.initial, GROWTH_MAX * Decision(*now).batch(self.gpus))
        near = msgspec.structs.replace(limits, total_max=min(limits.total_max, most))
        best = msgspec.structs.replace(model, limits=near).tune(self.nodes, self.gpus)
        present = float(model.goodput(self.nodes, self.gpus, now.per_gpu, now.accumulation))
        if best.goodput >= GAIN_MIN * present:
            self._split = BatchSplit(best.per_gpu, best.accumulation)

    def decision(self, progress: float = 0.0) -> Decision:
        """Return how the next iterations train, `progress` statistical epochs after the start."""
        if self.limits.fixed is not None:
            return Decision(*self._split)
        batch = Decision(*self._split).batch(self.gpus)
        worth = float(efficiency(self.noise_scale or 0.0, self.limits.initial, batch))
        rate = self.agent.learning_rate_scale(batch, progress)
        return Decision(*self._split, rate, min(1.0, worth))

    def goodput(self) -> float | None:
        """Useful examples a second of the present batch; None: there was no fit yet."""
        model, split = self.agent.model, self._split
        if model is None:
            return None
        return float(model.goodput(self.nodes, self.gpus, split.per_gpu, split.accumulation))

    # A job that is paused begins in a new process -------------------------------------------------

    def remember(self) -> dict[str, Any]:
        """Return what a new process must know, as plain values."""
        kept = Remembered(
            self.agent.learned(), self._times.kept(), self._seen, self._split, self.gpus
        )
        found: dict[str, Any] = msgspec.to_builtins(kept)
        return found

    def recall(self, kept: dict[str, Any]) -> None:
        """Go on from what `remember` returned. On another number of GPUs the batch is chosen anew,
        as the fit says, without a wait. Raises Rejected."""
        try:
            before = msgspec.convert(kept, Remembered)
        except msgspec.ValidationError as error:
            raise Rejected(
                f"the checkpoint's adaptive state cannot be read ({error}); leave it out, and the "
                "batch is learned anew"
            ) from error
        self.agent.recall(before.learned)
        self._times.recall(before.times)
        self._seen, self._unfitted = before.seen, bool(before.times)
        self._theta = before.learned.theta
        if self._theta is not None:
            self.agent.adopt(self._theta, before.learned.gpus_seen)
        if before.gpus == self.gpus:
            self._split = BatchSplit(*before.split)
        elif self.noise_scale is not None:
            self._split = self.agent.batch_split(self.nodes, self.gpus)


class IterationTimes:
    """The last iteration times by configuration; the one longest unseen makes room."""

    def __init__(self) -> None:
        self._times: OrderedDict[Configuration, deque[float]] = OrderedDict()
        self._medians: dict[Configuration, float] = {}
        """Kept until another time is added: a fit must not hold training up."""

    def add(self, configuration: Configuration, iteration_s: float) -> None:
        """Raises Rejected for a time that cannot be."""
        if not 0.0 < iteration_s < float("inf"):
            raise Rejected(
                f"an iteration of {iteration_s} s was not measured: give finite seconds above 0"
            )
        if configuration not in self._times:
            if len(self._times) == CONFIGURATIONS_MAX:
                gone, _ = self._times.popitem(last=False)
                self._medians.pop(gone, None)
            self._times[configuration] = deque(maxlen=TIMES_MAX)
        self._times.move_to_end(configuration)
        self._times[configuration].append(iteration_s)
        self._medians.pop(configuration, None)

    def observations(self) -> tuple[Observation, ...]:
        """Return one median per configuration that was seen often enough."""
        for configuration, times in self._times.items():
            if configuration not in self._medians and len(times) >= TIMES_MIN:
                self._medians[configuration] = median(times)
        return tuple(Observation(*each, value) for each, value in self._medians.items())

    def kept(self) -> tuple[tuple[Configuration, tuple[float, ...]], ...]:
        return tuple((configuration, tuple(times)) for configuration, times in self._times.items())

    def recall(self, kept: tuple[tuple[Configuration, tuple[float, ...]], ...]) -> None:
        """Replace everything. A checkpoint has no more than CONFIGURATIONS_MAX."""
        self._medians.clear()
        self._times = OrderedDict(
            (configuration, deque(times, TIMES_MAX))
            for configuration, times in kept[-CONFIGURATIONS_MAX:]
        )
