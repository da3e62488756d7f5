"""Goodput: throughput times statistical efficiency (Qiao, thesis, section 3.3).

    GOODPUT(a, m, s) = THROUGHPUT(a, m, s) EFFICIENCY(M),  M = K m (s + 1)      (eq. 3.1)

`GoodputModel` is a job's goodput function: THROUGHPUT in any of its forms, phi, and the limits of
the batch. `GoodputProfile` is what a policy knows of it. For an allocation of K GPUs over N
machines the model finds the best (m, s) by sampling total batch sizes geometrically between M0 and
the largest allowed, with the fewest accumulation steps that fit GPU memory (section 3.4.3):

    s = max(0, ceil(M / K / m_max) - 1),  m = ceil(M / (K (s + 1)))

A job with a fixed batch (section 3.4.2, "non-adaptive") has efficiency 1 and one candidate.
"""

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.efficiency import efficiency
from slackwater.common.domains.models.throughput import Floats, Throughput

Ints = NDArray[np.int64]

CANDIDATES = 50
"""Total batch sizes tried between M0 and the largest."""
_EPS = 1e-8
"""Slack of floor and ceil: 3.0000000001 GPUs' worth of batch is 3."""


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """In examples. Raises Rejected for bounds that contradict each other."""

    initial: int
    """M0: efficiency is relative to it, and no total batch is smaller."""
    total_max: int
    per_gpu_max: int
    """The largest batch that fits a GPU's memory."""
    per_gpu_min: int = 1
    fixed: int | None = None
    """A non-adaptive job's total batch."""
    accumulate_alone: bool = False
    """On one GPU a batch above M0 takes at least one accumulation step, so that noise can be told
    from signal within an iteration (otherwise consecutive gradients are differed)."""

    def __post_init__(self) -> None:
        for least, most in (("initial", "total_max"), ("per_gpu_min", "per_gpu_max")):
            if not 1 <= getattr(self, least) <= getattr(self, most):
                raise Rejected(
                    f"a batch of {least}={getattr(self, least)} and {most}={getattr(self, most)} "
                    "examples: give at least 1 for the first, and no less for the second"
                )

    @property
    def gpus_max(self) -> int:
        """More GPUs than this cannot each get their smallest batch."""
        return max(1, (self.fixed or self.total_max) // self.per_gpu_min)


class Tuning(NamedTuple):
    """The best configuration of a job on its allocation. Goodput 0: none is allowed."""

    goodput: float
    per_gpu: int
    """m."""
    accumulation: int
    """s."""


def split_batch(limits: BatchLimits, batch: ArrayLike, gpus: ArrayLike) -> tuple[Ints, Ints]:
    """(m, s) for a total batch on so many GPUs."""
    share = np.asarray(batch, dtype=np.float64) / np.asarray(gpus)
    steps = np.maximum(np.ceil(share / limits.per_gpu_max - _EPS) - 1, 0)
    if limits.accumulate_alone:
        alone = (np.asarray(gpus) == 1) & (share > limits.initial + _EPS)
        steps = np.where(alone, np.maximum(steps, 1), steps)
    per_gpu = np.ceil(share / (steps + 1) - _EPS)
    # Rounding up must not pass the largest batch, as long as a GPU keeps its smallest one.
    room = np.floor(limits.total_max / (np.asarray(gpus) * (steps + 1)) + _EPS)
    per_gpu = np.minimum(per_gpu, np.maximum(room, limits.per_gpu_min))
    return per_gpu.astype(np.int64), steps.astype(np.int64)


class GoodputModel(msgspec.Struct, frozen=True):
    """The triple (THROUGHPUT, phi, M0) with the batch's limits."""

    throughput: Throughput
    noise_scale: float
    """phi."""
    limits: BatchLimits

    def efficiency(self, batch: ArrayLike) -> Floats:
        if self.limits.fixed is not None:
            return np.ones_like(np.asarray(batch, dtype=np.float64))
        return efficiency(self.noise_scale, self.limits.initial, batch)

    def goodput(
        self,
        nodes: ArrayLike,
        gpus: ArrayLike,
        per_gpu: ArrayLike,
        accumulation: ArrayLike = 0,
        gpu_speed: float = 1.0,
    ) -> Floats:
        """Useful examples per second."""
        steps = np.asarray(accumulation)
        batch = np.asarray(gpus) * np.asarray(per_gpu) * (steps + 1)
        seconds = self.throughput.iteration_s(nodes, gpus, per_gpu, steps, gpu_speed)
        useful: Floats = batch / seconds * self.efficiency(batch)
        return useful

    def tune(self, nodes: int, gpus: int, gpu_speed: float = 1.0) -> Tuning:
        """argmax over (m, s) (eq. 3.10)."""
        values, per_gpu, steps = self._best(np.array([nodes]), np.array([gpus]), gpu_speed)
        return Tuning(float(values[0]), int(per_gpu[0]), int(steps[0]))

    def best_goodput(self, nodes: ArrayLike, gpus: ArrayLike, gpu_speed: float = 1.0) -> Floats:
        """max over (m, s) for each allocation, 0 where the job can't use so many GPUs."""
        return self._best(np.atleast_1d(nodes), np.atleast_1d(gpus), gpu_speed)[0]

    def goodput_table(self, gpus_max: int, gpu_speed: float = 1.0) -> Floats:
        """[0][K]: all K GPUs on one machine; [1][K]: on several. Column 0 is without GPUs, and
        one GPU is never on several machines."""
        gpus = np.arange(1, gpus_max + 1)
        table = np.zeros((2, gpus_max + 1))
        both = self.best_goodput(np.repeat([1, 2], gpus_max), np.tile(gpus, 2), gpu_speed)
        table[:, 1:] = both.reshape(2, gpus_max)
        table[1, 1] = 0.0
        return table

    def _best(
        self, nodes: NDArray[np.int64], gpus: NDArray[np.int64], gpu_speed: float
    ) -> tuple[Floats, Ints, Ints]:
        limits = self.limits
        if limits.fixed is not None:
            batch = np.full((1, gpus.size), float(limits.fixed))
        else:
            low = np.maximum(limits.initial, limits.per_gpu_min * gpus).astype(np.float64)
            high = np.maximum(low, limits.total_max)
            steps_of_size = np.linspace(0.0, 1.0, CANDIDATES)[:, None]
            batch = low * (high / low) ** steps_of_size
        per_gpu, steps = split_batch(limits, batch, gpus)
        values = self.goodput(nodes, gpus, per_gpu, steps, gpu_speed)
        fits = (per_gpu >= limits.per_gpu_min) & (per_gpu <= limits.per_gpu_max)
        values = np.where(fits & (gpus <= limits.gpus_max), values, 0.0)
        best = np.argmax(values, axis=0), np.arange(gpus.size)
        return values[best], per_gpu[best], steps[best]


class GoodputProfile(msgspec.Struct, frozen=True):
    """A job as its agent last told of it (section 3.4.1): `JobView.profile` of an adaptive job."""

    model: GoodputModel | None = None
    """The fitted model; None until the first iteration was measured."""
    gpus_seen: int = 0
    """The most GPUs that it was measured on."""

    def model_on(self, gpu_type: str) -> GoodputModel | None:
        """The same on every type: relative speeds tell them apart."""
        return self.model
