"""Step times as they were measured: a form of THROUGHPUT that fits nothing where it has numbers.

What lies between measured (machines, GPUs, per-GPU batch) is interpolated linearly, what lies
outside of them all is answered by theta_sys, fitted to the whole table. A policy that is given the
table instead of theta_sys makes no error of the model: the difference is what the seven parameters
cost.
"""

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import LinearNDInterpolator

from slackwater.common.domains.models.fitting import Observation, fit
from slackwater.common.domains.models.throughput import Floats, ThroughputParams


class ThroughputTable:
    """`rows` [n, 5]: machines, GPUs, per-GPU batch, seconds of a step without accumulation, and
    those of synchronising within it. No two rows are of one configuration."""

    def __init__(self, rows: Floats) -> None:
        self._points, self._times = rows[:, :3], rows[:, 3:]

    @cached_property
    def _interpolator(self) -> Any:
        return LinearNDInterpolator(self._points, self._times)

    @cached_property
    def fitted(self) -> ThroughputParams:
        """theta_sys of the whole table."""
        return fit(
            [
                Observation(int(n), int(k), int(m), 0, step, max(step - sync, 0.0))
                for (n, k, m), (step, sync) in zip(self._points, self._times, strict=True)
            ]
        )

    def step_times(
        self, nodes: ArrayLike, gpus: ArrayLike, per_gpu: ArrayLike
    ) -> tuple[Floats, Floats]:
        """(step, synchronising) seconds without accumulation."""
        found = self._interpolator(nodes, gpus, per_gpu)
        step_s, sync_s = found[..., 0], found[..., 1]
        outside = np.isnan(step_s)
        if outside.any():
            fitted_s = self.fitted.iteration_s(nodes, gpus, per_gpu)
            step_s = np.where(outside, fitted_s, step_s)
            sync_s = np.where(outside, fitted_s - self.fitted.grad_s(per_gpu), sync_s)
        return step_s, sync_s

    def iteration_s(
        self,
        nodes: ArrayLike,
        gpus: ArrayLike,
        per_gpu: ArrayLike,
        accumulation: ArrayLike = 0,
        gpu_speed: float = 1.0,
    ) -> Floats:
        """Seconds of an iteration (`Throughput`); a faster GPU synchronises alike."""
        step_s, sync_s = self.step_times(nodes, gpus, per_gpu)
        grad_s = (step_s - sync_s) / gpu_speed
        return np.asarray(accumulation) * grad_s + grad_s + sync_s
