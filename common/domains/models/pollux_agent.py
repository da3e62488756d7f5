"""PolluxAgent: what a training job learns about itself, and tunes by itself (Qiao, thesis, 3.4.1).

    agent = PolluxAgent(BatchLimits(initial=128, total_max=4096, per_gpu_max=512))
    agent.saw_iteration(Observation(nodes, gpus, per_gpu, accumulation, iteration_s))
    agent.saw_replicas(small_sqr, large_sqr, batch_small, batch_large)
    agent.refit()                       # at every report
    agent.report(job)                   # to the scheduler
    agent.batch_split(nodes, gpus)      # (m, s) of the next iterations
    agent.learning_rate_scale(batch, epoch)

The simulator's jobs and training programs hold the same agent: it reads no clock, draws nothing at
random and does no I/O. Whoever holds it says what was seen and decides when to refit.

**Interval.** A squared length of the gradient that is smaller than its own standard error cannot be
told from 0: it counts as that error, so that phi is never larger than what could be resolved.

**Smoothing.** A configuration's iteration time is the mean of its last 100 iterations or so. Both
moments of the gradient are averaged with weights that fall by `smoothing` an iteration, never phi,
a quotient of noisy numbers. Replicas estimate better than differences of consecutive gradients do:
the first estimate by replicas forgets all that came from differences.
"""

from math import floor, inf, isfinite, sqrt
from typing import Final, NamedTuple

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.efficiency import (
    GradientMoments,
    moments_of_differences,
    moments_of_replicas,
)
from slackwater.common.domains.models.fitting import Observation, fit
from slackwater.common.domains.models.goodput import (
    BatchLimits,
    GoodputModel,
    GoodputProfile,
    split_batch,
)
from slackwater.common.domains.models.goodput_report import report_of
from slackwater.common.domains.models.lr_scaling import TrainingState, rule
from slackwater.common.domains.models.shared_fitting import fit_shared
from slackwater.common.domains.models.shared_throughput import (
    Carried,
    SharedThroughput,
)
from slackwater.common.domains.models.throughput import Throughput, ThroughputParams
from slackwater.schemas.base import JobId
from slackwater.schemas.telemetry import GoodputReport

SMOOTHING: Final = 0.95
"""Follows a falling loss within about 20 iterations; .99 lags behind it by half."""
MEAN_OVER: Final = 100
"""Iterations of one configuration that its mean remembers."""
CONFIGURATIONS_MAX: Final = 1024
"""Configurations that are fitted; the one seen first makes room."""


Configuration = tuple[int, int, int, int, int]
"""Machines, GPUs, examples a GPU, accumulation steps, aggregators."""


class BatchSplit(NamedTuple):
    """How an iteration's batch is divided."""

    per_gpu: int
    """m."""
    accumulation: int
    """s: steps before the one that synchronises."""


class PolluxAgent:
    """One job's agent. `known`: its throughput was fitted beforehand and stays as it is (section
    3.5.3). `carried`: it synchronises through shared aggregators, and its observations say through
    how many. `lr_rule`: see lr_scaling.py. `throughput_only`: all examples are equally useful
    (section 3.5.4). Raises ConfigRejected for a rule that nobody offers."""

    def __init__(
        self,
        limits: BatchLimits,
        *,
        known: Throughput | None = None,
        carried: Carried | None = None,
        lr_rule: str = "adascale",
        warmup_epochs: float = 0.0,
        throughput_only: bool = False,
        smoothing: float = SMOOTHING,
    ) -> None:
        self.limits = limits
        self.model: GoodputModel | None = None
        """The goodput function; a new object whenever a refit changed it."""
        self.gpus_seen = 0
        """The most GPUs that an iteration ran on."""
        self._known, self._throughput_only = known, throughput_only
        self._carried = carried
        self._scale_lr, self._warmup_epochs = rule(lr_rule), warmup_epochs
        self._seen: dict[Configuration, tuple[Observation, int]] = {}
        self._unfitted = False
        self._theta: ThroughputParams | None = None
        self._shared: SharedThroughput | None = None
        self._gradients = _Smoothed(smoothing)

    # Measurements ---------------------------------------------------------------------------------

    def has_seen(self, nodes: int, gpus: int, per_gpu: int, accumulation: int = 0) -> bool:
        return (nodes, gpus, per_gpu, accumulation, 0) in self._seen

    def saw_iteration(self, seen: Observation) -> None:
        """An iteration ended. Raises Rejected for a time that cannot be."""
        check_iteration(seen)
        self.gpus_seen = max(self.gpus_seen, seen.gpus)
        key = _configuration(seen)
        known, count = self._seen.get(key, (seen, 0))
        count = min(count + 1, MEAN_OVER)
        mean_s = known.iteration_s + (seen.iteration_s - known.iteration_s) / count
        grad_s = known.grad_s or seen.grad_s
        if seen.grad_s:
            grad_s += (seen.grad_s - grad_s) / count
        if key not in self._seen and len(self._seen) == CONFIGURATIONS_MAX:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = known._replace(iteration_s=mean_s, grad_s=grad_s), count
        self._unfitted = True

    def saw_gradients(self, moments: GradientMoments) -> bool:
        """An iteration's gradient had these moments, without error. False: they are not finite (the
        gradient overflowed) and are left out."""
        return self._gradients.add(moments)

    def saw_replicas(
        self, small_sqr: float, large_sqr: float, batch_small: float, batch_large: float
    ) -> bool:
        """Several gradients of one iteration were averaged, those of replicas or of accumulation
        steps: the mean of their squared lengths, and the squared length of their mean. Raises
        Rejected for a single gradient, which tells no noise from signal."""
        check_replicas(batch_small, batch_large)
        initial = self.limits.initial
        return self._gradients.add(
            moments_of_replicas(small_sqr, large_sqr, batch_small, batch_large, initial),
            estimated=True,
        )

    def saw_difference(self, mean_sqr: float, difference_sqr: float, batch: float) -> bool:
        """Note two consecutive iterations with one gradient each: the mean of their squared
        lengths, and the squared length of their difference."""
        initial = self.limits.initial
        return self._gradients.add(
            moments_of_differences(mean_sqr, difference_sqr, batch, initial),
            differenced=True,
            estimated=True,
        )

    @property
    def noise_scale(self) -> float:
        """phi. Before any gradient was seen it is 0: no larger batch than M0 is known to pay."""
        if self._throughput_only:
            return inf
        moments = self._gradients.mean
        return 0.0 if moments is None else moments.noise_scale(self.limits.initial)

    # The model and its choices --------------------------------------------------------------------

    def refit(self) -> bool:
        """Fit theta_sys to all configurations seen, from the last fit on, and renew the goodput
        function. False: it stays the same object, because nothing changed."""
        if not self._seen:
            return False
        throughput = self._known
        if throughput is None:
            if self._unfitted:
                seen = [observation for observation, _ in self._seen.values()]
                if self._carried is None:
                    self._theta = fit(seen, self._theta)
                else:
                    self._shared = fit_shared(seen, self._carried, self._shared)
                self._unfitted = False
            throughput = self._theta if self._carried is None else self._shared
        assert throughput is not None  # Something was seen, and a fit follows on it.
        return self._renew(throughput)

    def adopt(self, theta: ThroughputParams, gpus_seen: int) -> bool:
        """Take a fit that another process made of this job's iterations, on at most `gpus_seen`
        GPUs, and renew the goodput function as `refit` does."""
        self._theta, self.gpus_seen = theta, max(self.gpus_seen, gpus_seen)
        return self._renew(theta)

    def _renew(self, throughput: Throughput) -> bool:
        found = GoodputModel(throughput, self.noise_scale, self.limits)
        if found == self.model:
            return False
        self.model = found
        return True

    def batch_split(self, nodes: int, gpus: int, gpu_speed: float = 1.0) -> BatchSplit:
        """(m, s) for an allocation: the best of the goodput function (eq. 3.10), or the smallest
        batch that the limits allow before there is one; a fixed batch stays."""
        limits = self.limits
        if limits.fixed is None and self.model is not None:
            tuning = self.model.tune(nodes, gpus, gpu_speed)
            return BatchSplit(tuning.per_gpu, tuning.accumulation)
        batch = limits.fixed or max(limits.initial, limits.per_gpu_min * gpus)
        per_gpu, steps = split_batch(limits, batch, gpus)
        return BatchSplit(int(per_gpu), int(steps))

    def learning_rate_scale(self, batch: float, epoch: float = inf) -> float:
        """The factor on the learning rate of M0 for an iteration of `batch` examples, `epoch`
        epochs of examples after the start (SCALE_LR, section 3.3)."""
        state = TrainingState(self.noise_scale, epoch, self._warmup_epochs)
        return self._scale_lr(self.limits.initial, batch, state)

    def profile(self) -> GoodputProfile:
        return GoodputProfile(self.model, self.gpus_seen)

    def report(self, job: JobId, attempt: int = 0) -> GoodputReport:
        """The message that tells the scheduler. Raises Rejected before the first refit, and for a
        known throughput of another form than theta_sys."""
        model = self.model
        if model is None:
            raise Rejected(f"{job} has no goodput function yet: see an iteration, then refit")
        return report_of(job, attempt, model, self.gpus_seen)

    # A job that is paused begins in a new process ------------------------------------------------

    def learned(self) -> "Learned":
        """Return what a new process of the job must know; `recall` takes it."""
        gradients = self._gradients
        return Learned(
            self.gpus_seen,
            tuple(self._seen.values()),
            self._theta,
            (gradients.sqr, gradients.var, gradients.weight),
            gradients.differenced,
            (gradients.spread, gradients.weight_sqr),
        )

    def recall(self, learned: "Learned") -> None:
        """Go on from what a former process of the job had learned, before anything is seen."""
        self.gpus_seen, self._theta = learned.gpus_seen, learned.theta
        self._seen = {_configuration(seen): (seen, count) for seen, count in learned.seen}
        self._unfitted = learned.theta is None or self._carried is not None
        gradients = self._gradients
        gradients.sqr, gradients.var, gradients.weight = learned.moments
        gradients.spread, gradients.weight_sqr = learned.spread
        gradients.differenced = learned.differenced


class Learned(msgspec.Struct, frozen=True, array_like=True):
    """All that an agent has learned, as a job's checkpoint keeps it."""

    gpus_seen: int
    seen: tuple[tuple[Observation, int], ...]
    """Means by configuration, and the iterations that each is of."""
    theta: ThroughputParams | None
    moments: tuple[float, float, float]
    """Smoothed moments of the gradient: squared length, variance, weight of both."""
    differenced: bool
    spread: tuple[float, float] = (0.0, 0.0)
    """Smoothed squares of the squared length's deviations, and of the weights."""


class _Smoothed:
    """Moments averaged with weights that fall by `smoothing` with each that follows."""

    def __init__(self, smoothing: float) -> None:
        self._smoothing, self.differenced = smoothing, False
        self._forget()

    def _forget(self) -> None:
        self.sqr = self.var = self.weight = self.spread = self.weight_sqr = 0.0

    def add(
        self, moments: GradientMoments, *, differenced: bool = False, estimated: bool = False
    ) -> bool:
        if not (isfinite(moments.sqr) and isfinite(moments.var)):
            return False
        if self.differenced and not differenced:
            self._forget()
        self.differenced = differenced
        keep, take = self._smoothing, 1.0 - self._smoothing
        off = moments.sqr - self.sqr / self.weight if self.weight else 0.0
        self.spread = keep * self.spread + (take * off * off if estimated else 0.0)
        self.sqr = keep * self.sqr + take * moments.sqr
        self.var = keep * self.var + take * moments.var
        self.weight = keep * self.weight + take
        self.weight_sqr = keep * keep * self.weight_sqr + take * take
        return True

    @property
    def error(self) -> float:
        """Standard error of the mean squared length, of independent iterations."""
        if not self.weight:
            return 0.0
        return sqrt(self.spread / self.weight * self.weight_sqr) / self.weight

    @property
    def mean(self) -> GradientMoments | None:
        if not self.weight:
            return None
        return GradientMoments(max(self.sqr / self.weight, self.error), self.var / self.weight)


def _configuration(seen: Observation) -> Configuration:
    return (*seen[:4], seen.aggregators)


def check_iteration(seen: Observation) -> None:
    """Raise Rejected for a time that cannot be."""
    if not (0.0 < seen.iteration_s < inf and 0.0 <= seen.grad_s < inf):
        raise Rejected(
            f"an iteration of {seen.iteration_s} s with {seen.grad_s} s of computing was not "
            "measured: give iteration_s above 0 and grad_s of at least 0, both finite"
        )


def check_replicas(batch_small: float, batch_large: float) -> None:
    """Raise Rejected for a single gradient, which tells no noise from signal."""
    if not 0 < batch_small < batch_large:
        raise Rejected(
            f"gradients of {batch_small} examples averaged over {batch_large} are not several; "
            "tell one gradient an iteration to saw_difference"
        )


def next_report_s(after_s: float, period_s: float) -> float:
    """The first multiple of `period_s` after that second: all agents report in the same rhythm."""
    number = floor(after_s / period_s) + 1
    at_s = number * period_s
    return at_s if at_s > after_s else (number + 1) * period_s  # A fraction's quotient is rounded.
