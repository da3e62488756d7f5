"""How long one training iteration takes: Pollux's throughput model (Qiao, thesis, section 3.3.2).

    T_grad = alpha_grad + beta_grad m                            (eq. 3.5)
    T_sync = 0 | alpha_local + beta_local (K - 2) | alpha_node + beta_node (K - 2)   (eq. 3.6)
    T_iter = s T_grad + (T_grad^gamma + T_sync^gamma)^(1/gamma)  (eq. 3.8)

for K GPUs with m examples each and s accumulation steps; `local` while all GPUs share a machine,
`node` as soon as two of them don't. gamma = 1 means no overlap of computing and synchronising,
gamma towards infinity perfect overlap.

All functions take numbers or arrays alike. GPUs of another type than the one that was measured
compute `gpu_speed` times as fast and synchronise as before: the network stays the same.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


class Throughput(Protocol):
    """THROUGHPUT of eq. 3.1 in any of its forms: seconds of an iteration, by its configuration.

    The forms: theta_sys (`ThroughputParams`), and step times as they were measured
    (throughput_table.py). Goodput, the agent and the policies ask for nothing else.
    """

    def iteration_s(
        self,
        nodes: ArrayLike,
        gpus: ArrayLike,
        per_gpu: ArrayLike,
        accumulation: ArrayLike = 0,
        gpu_speed: float = 1.0,
    ) -> Floats:
        """Seconds of one iteration of `gpus` GPUs on `nodes` machines: `accumulation` steps of
        `per_gpu` examples a GPU without synchronisation, then one with it."""
        ...


class ThroughputParams(NamedTuple):
    """theta_sys (eq. 3.9): seconds, seconds per example, seconds per GPU beyond two."""

    alpha_grad_s: float
    beta_grad_s: float
    alpha_local_s: float
    beta_local_s: float
    alpha_node_s: float
    beta_node_s: float
    gamma: float

    def grad_s(self, per_gpu: ArrayLike, gpu_speed: float = 1.0) -> Floats:
        """T_grad of `per_gpu` examples (eq. 3.5)."""
        return computing_s(self.alpha_grad_s, self.beta_grad_s, per_gpu, gpu_speed)

    def sync_s(self, nodes: ArrayLike, gpus: ArrayLike) -> Floats:
        """T_sync of `gpus` GPUs over `nodes` machines (eq. 3.6)."""
        nodes, gpus = np.asarray(nodes), np.asarray(gpus, dtype=np.float64)
        beyond = np.maximum(gpus - 2, 0.0)
        local = self.alpha_local_s + self.beta_local_s * beyond
        node = self.alpha_node_s + self.beta_node_s * beyond
        return np.where(gpus <= 1, 0.0, np.where(nodes > 1, node, local))

    def iteration_s(
        self,
        nodes: ArrayLike,
        gpus: ArrayLike,
        per_gpu: ArrayLike,
        accumulation: ArrayLike = 0,
        gpu_speed: float = 1.0,
    ) -> Floats:
        """T_iter (eq. 3.8)."""
        grad_s = self.grad_s(per_gpu, gpu_speed)
        sync_s = self.sync_s(nodes, gpus)
        return np.asarray(accumulation) * grad_s + overlap_s(grad_s, sync_s, self.gamma)


def computing_s(alpha_s: float, beta_s: float, per_gpu: ArrayLike, gpu_speed: float) -> Floats:
    """T_grad of `per_gpu` examples on a GPU of that speed (eq. 3.5)."""
    per_gpu = np.asarray(per_gpu, dtype=np.float64)
    return (alpha_s + beta_s * per_gpu) / gpu_speed


def overlap_s(grad_s: Floats, sync_s: Floats, gamma: float) -> Floats:
    """(a^gamma + b^gamma)^(1/gamma) by the larger of the two, so that nothing overflows and an
    infinite gamma is the maximum."""
    longer, shorter = np.maximum(grad_s, sync_s), np.minimum(grad_s, sync_s)
    ratio = np.divide(shorter, longer, out=np.zeros_like(longer), where=longer > 0)
    combined: Floats = longer * (1.0 + ratio**gamma) ** (1.0 / gamma)
    return combined
