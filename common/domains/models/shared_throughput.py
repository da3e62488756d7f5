"""THROUGHPUT of a job that synchronises through shared aggregators: a form beside eq. 3.6.

Eq. 3.6 (Qiao, thesis, section 3.3.2) is of all-reduce, where the number of GPUs alone says how long
synchronising takes. Here each of K workers pushes its whole gradient, in parts, to A aggregators,
each of which gives the job a share of its link and of its slot (Gu et al., 2021, section 3.2):

    T_sync = alpha + max(2 B / link, K B / (A share)) + incast (K - 1)
    T_iter = s T_grad + (T_grad^gamma + T_sync^gamma)^(1/gamma)          (eq. 3.8)

with B bytes of gradient: a worker's own link carries them twice, there and back. `incast` is the
time lost where K workers send to one aggregator at once: every aggregator hears all of them. One
worker synchronises, too: its optimiser runs in the aggregators.

`aggregators_max` is how many the job could have. For each number of GPUs the best number is taken:
the fewest with which an iteration takes within 1 % of the shortest (section 3.3.2, "limits").
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from slackwater.common.domains.models.goodput import Ints
from slackwater.common.domains.models.throughput import (
    Floats,
    ThroughputParams,
    computing_s,
    overlap_s,
)

NEAR: Final = 0.01
"""An aggregator more pays if it saves this part of an iteration, all in all."""


class Carried(NamedTuple):
    """A job's gradient as its aggregators take it: known beforehand, not fitted."""

    nbytes: float = 1.0
    """B, of one worker; 1 where nobody says: shares are then in gradients a second."""
    link_bytes_s: float = 0.0
    """A worker's link; 0: shared memory, or not known."""


UNKNOWN: Final = Carried()


class SharedThroughput(NamedTuple):
    """theta of aggregation: seconds, seconds per example, bytes per second, seconds per worker."""

    alpha_grad_s: float
    beta_grad_s: float
    alpha_sync_s: float
    share_bytes_s: float
    """Bytes a second that one aggregator takes of the job; inf: it costs no time."""
    incast_s: float
    gamma: float
    carried: Carried = UNKNOWN
    aggregators: int = 1
    """Aggregators that have its tensors."""
    aggregators_max: int = 1
    """Aggregators that it could have."""

    def grad_s(self, per_gpu: ArrayLike, gpu_speed: float = 1.0) -> Floats:
        """T_grad of `per_gpu` examples (eq. 3.5)."""
        return computing_s(self.alpha_grad_s, self.beta_grad_s, per_gpu, gpu_speed)

    def sync_s(self, gpus: ArrayLike, aggregators: ArrayLike) -> Floats:
        """T_sync of `gpus` workers with so many aggregators."""
        workers, count = np.asarray(gpus, dtype=np.float64), np.asarray(aggregators)
        nbytes, link_bytes_s = self.carried
        link_s = 2.0 * nbytes / link_bytes_s if link_bytes_s else 0.0
        served_s = np.maximum(link_s, workers * nbytes / (count * self.share_bytes_s))
        found: Floats = self.alpha_sync_s + served_s + self.incast_s * np.maximum(workers - 1, 0)
        return found

    def iteration_with_s(
        self,
        aggregators: ArrayLike,
        gpus: ArrayLike,
        per_gpu: ArrayLike,
        accumulation: ArrayLike = 0,
        gpu_speed: float = 1.0,
    ) -> Floats:
        """T_iter with so many aggregators (eq. 3.8)."""
        grad_s = self.grad_s(per_gpu, gpu_speed)
        sync_s = self.sync_s(gpus, aggregators)
        return np.asarray(accumulation) * grad_s + overlap_s(*_alike(grad_s, sync_s), self.gamma)

    def iteration_s(
        self,
        nodes: ArrayLike,
        gpus: ArrayLike,
        per_gpu: ArrayLike,
        accumulation: ArrayLike = 0,
        gpu_speed: float = 1.0,
    ) -> Floats:
        """T_iter with the best number of aggregators (`Throughput`), wherever its workers are."""
        best = self.best_aggregators(gpus, per_gpu, accumulation, gpu_speed)
        return self.iteration_with_s(best, gpus, per_gpu, accumulation, gpu_speed)

    def best_aggregators(
        self,
        gpus: ArrayLike,
        per_gpu: ArrayLike,
        accumulation: ArrayLike = 0,
        gpu_speed: float = 1.0,
    ) -> Ints:
        """Return the fewest of the aggregators that it could have with which an iteration is within
        1 % of the shortest."""
        most = max(self.aggregators, self.aggregators_max)
        each = [
            self.iteration_with_s(count, gpus, per_gpu, accumulation, gpu_speed)
            for count in range(1, most + 1)
        ]
        near = np.stack(each) <= each[-1] * (1.0 + NEAR)
        return np.asarray(np.argmax(near, axis=0) + 1, dtype=np.int64)

    def as_all_reduce(self) -> ThroughputParams:
        """Return theta_sys that says the same of the aggregators that it has, from two GPUs on as
        far as the workers' links do not bound it: for readers that know eq. 3.6 alone."""
        two_s, three_s = map(float, self.sync_s([2, 3], self.aggregators))
        pair = two_s, max(0.0, three_s - two_s)
        return ThroughputParams(self.alpha_grad_s, self.beta_grad_s, *pair, *pair, self.gamma)


def _alike(grad_s: Floats, sync_s: Floats) -> tuple[Floats, Floats]:
    both = np.broadcast_arrays(grad_s, sync_s)
    return both[0], both[1]
