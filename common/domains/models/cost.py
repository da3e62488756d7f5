"""How many workers and servers, and who holds what: Cruise (Lee, dissertation, section 3.2).

N machines are workers or servers. Worker i holds d_i training instances and computes c_i seconds
on each; server j holds m_j bytes of the model. For each mini-batch of B instances a worker fetches
the whole model, at the rate of the slower one: the busiest server, which serves all w workers,
or the worker's own link (eqs. 3.2 to 3.4):

    C_i = c_i d_i + (d_i / B) max(max_j m_j w / b_ij, sum_j m_j / b_ij),      C = max_i C_i

Mini-batches are rounded up to whole ones where `Training.whole_batches` says so, as in eq. 3.4; in
eq. 3.5 they are not. Beyond the paper's model each server may cost a worker `server_s` a mini-batch
(requests to more servers take longer to make and to answer), which its table 3.1 hints at.

Machines alike share evenly, and eq. 3.5 leaves w alone. With x = M / (b B c), the time for a
model's transfer over the time to compute a mini-batch, the epoch falls with w up to N/2, and beyond
it is D (c / w + M / (b B (N - w))), least at N / (1 + sqrt x): w* is the better neighbour of
max(N/2, N / (1 + sqrt x)). With whole mini-batches or a cost of servers all N - 1 are compared.
Different machines are for `cost_kinds`, and of more than two kinds for `cost_programme`.

A change must pay: Cruise keeps a configuration unless its estimate falls by 5 % (section 3.3.1).
"""

from collections.abc import Sequence
from math import ceil, floor, isfinite, sqrt
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected

GAIN_MIN: Final = 0.05
"""Below this estimated gain a configuration stays, so that noise does not make it oscillate."""

WHOLE: Final = 1e-9
"""A share that is so little above whole mini-batches is of these."""


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """The training run: its model, data and batch."""

    instances: float
    """D."""
    batch: float
    """B, instances of a worker's mini-batch."""
    model_bytes: float
    """M."""
    server_s: float = 0.0
    """Seconds that each server costs a worker in each mini-batch."""
    whole_batches: bool = False
    """A worker's last mini-batch takes as long as a full one."""

    def batches(self, instances: float) -> float:
        """Return a worker's mini-batches in an epoch."""
        exact = instances / self.batch
        return ceil(exact - WHOLE) if self.whole_batches else exact


class Machine(msgspec.Struct, frozen=True):
    """The measured properties of a machine."""

    instance_s: float
    """c: computing on one training instance."""
    bytes_per_s: float
    """b: its link. Between two machines the slower of their links counts."""


class Configuration(msgspec.Struct, frozen=True):
    """Roles and shares by machine; a worker has instances, a server has bytes of the model."""

    workers: tuple[bool, ...]
    instances: tuple[float, ...]
    model_bytes: tuple[float, ...]
    epoch_s: float
    """The epoch's estimate by the cost model, in seconds."""
    proven: bool = True
    """No better one exists in the model (with its grain of shares)."""

    @property
    def worker_count(self) -> int:
        return sum(self.workers)

    @property
    def server_count(self) -> int:
        return len(self.workers) - self.worker_count


def epoch_s(
    training: Training,
    machines: Sequence[Machine],
    workers: Sequence[bool],
    instances: Sequence[float],
    model_bytes: Sequence[float],
) -> float:
    """C of eq. 3.1 for any configuration."""
    held = np.array(model_bytes, dtype=np.float64)
    servers = [j for j in range(len(machines)) if not workers[j]]
    count = sum(bool(worker) for worker in workers)
    longest_s = 0.0
    for i, machine in enumerate(machines):
        if not workers[i] or instances[i] <= 0:
            continue
        links = np.array([min(machine.bytes_per_s, machines[j].bytes_per_s) for j in servers])
        each_s = held[servers] / links
        batch_s = max(float(each_s.max()) * count, float(each_s.sum()))
        batch_s += training.server_s * len(servers)
        batches = training.batches(instances[i])
        longest_s = max(longest_s, machine.instance_s * instances[i] + batches * batch_s)
    return longest_s


def even_epoch_s(training: Training, machine: Machine, machines: int, workers: int) -> float:
    """Eq. 3.5 for `workers` of `machines` alike."""
    transfer_s = training.model_bytes / machine.bytes_per_s
    crowding = max(1.0, workers / (machines - workers))
    batch_s = transfer_s * crowding + training.server_s * (machines - workers)
    instances = training.instances / workers
    return machine.instance_s * instances + training.batches(instances) * batch_s


def even_optimum(training: Training, machine: Machine, machines: int) -> Configuration:
    """The best configuration of machines alike, in closed form (module docstring)."""
    check(training, [machine])
    if not 2 <= machines <= limits.MODEL_MACHINES_MAX:
        raise Rejected(f"machines is {machines}; give 2 to {limits.MODEL_MACHINES_MAX}")
    if training.server_s or training.whole_batches:
        counts = list(range(1, machines))
    else:
        counts = _near_optimum(training, machine, machines)
    best = min(counts, key=lambda w: even_epoch_s(training, machine, machines, w))
    return even_configuration(training, machine, machines, best)


def _near_optimum(training: Training, machine: Machine, machines: int) -> list[int]:
    """Return the numbers of workers of which one is the best, by the closed form."""
    border = machines / 2
    if machine.instance_s > 0:
        compute_s = machine.instance_s * training.batch
        ratio = training.model_bytes / machine.bytes_per_s / compute_s
        border = max(border, machines / (1 + sqrt(ratio)))
    near = {floor(machines / 2), ceil(machines / 2), floor(border), ceil(border)}
    return sorted({min(max(w, 1), machines - 1) for w in near})


def even_configuration(
    training: Training, machine: Machine, machines: int, workers: int
) -> Configuration:
    servers = machines - workers
    if workers < 1 or servers < 1:
        raise Rejected(f"{workers} workers of {machines} machines; both roles need one at least")
    return Configuration(
        (True,) * workers + (False,) * servers,
        (training.instances / workers,) * workers + (0.0,) * servers,
        (0.0,) * workers + (training.model_bytes / servers,) * servers,
        even_epoch_s(training, machine, machines, workers),
    )


def pays(now_s: float, then_s: float, gain_min: float = GAIN_MIN) -> bool:
    """Is the estimated gain of a new configuration worth the change?"""
    return then_s <= now_s * (1.0 - gain_min)


def link_matrix(machines: Sequence[Machine]) -> NDArray[np.float64]:
    """b_ij: the slower of the two links."""
    links = np.array([machine.bytes_per_s for machine in machines])
    slower: NDArray[np.float64] = np.minimum(links[:, None], links[None, :])
    return slower


def check(training: Training, machines: Sequence[Machine]) -> None:
    for field in ("instances", "batch", "model_bytes"):
        value = getattr(training, field)
        if not isfinite(value) or value <= 0:
            raise Rejected(f"{field} is {value}; give a finite number above 0")
    if not isfinite(training.server_s) or training.server_s < 0:
        raise Rejected(f"server_s is {training.server_s}; give a time from 0")
    for i, machine in enumerate(machines):
        if not isfinite(machine.instance_s) or machine.instance_s < 0:
            raise Rejected(f"machine {i}: instance_s is {machine.instance_s}; give a time from 0")
        if not isfinite(machine.bytes_per_s) or machine.bytes_per_s <= 0:
            raise Rejected(
                f"machine {i}: bytes_per_s is {machine.bytes_per_s}; give a rate above 0"
            )
