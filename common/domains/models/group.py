"""How fast jobs run that share machines subtask by subtask: Harmony (Lee, dissertation, 4.3.2).

A job's iteration is a CPU subtask (COMP) and a network subtask (PULL and PUSH). On a group's
machines one CPU and one network subtask run at a time, of different jobs, so that all jobs of a
group iterate together:

    T(g) = max(sum Tcpu, sum Tnet, max (Tcpu + Tnet))       (eq. 4.1)
    U(g) = (sum Tcpu / T(g), sum Tnet / T(g))               (eq. 4.3)
    U    = sum m_g U(g) / sum m_g                           (eq. 4.4)

Tcpu falls with the machines, Tcpu(m) = Tcpu(profiled) * profiled / m, and Tnet does not (eq. 4.2).
The paper compares vectors U without saying how and holds the CPU to be more important ("CPU
resources directly contribute to the job progress"): the scalar is .7 CPU + .3 network here.

Jobs that share machines without any order (naive co-location) meet at random at the two resources:
the queueing model with a class per job and both stations shared equally says how fast they run.
Each job that one finds at a resource also costs it a part of its rate (caches, switches, packets
that are sent again), its `contention`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models import queueing_classes
from slackwater.common.domains.models.queueing_stations import (
    DOWNLINK,
    STATIONS,
    UPLINK,
    equal_share,
)

CPU_WEIGHT: Final = 0.7
NETWORK_WEIGHT: Final = 0.3
NAIVE: Final = "naive-"
"""Labels of groups in which nobody orders the subtasks start so."""


class Subtasks(msgspec.Struct, frozen=True):
    """A job's profile: mean times of its subtasks, and the machines they were measured on."""

    cpu_s: float
    network_s: float
    machines: int
    nbytes: float = 0.0
    """Main memory that its data and its model take, on all its machines together."""

    def cpu_on_s(self, machines: float) -> float:
        return self.cpu_s * self.machines / machines

    def iteration_s(self, machines: float) -> float:
        """Alone on so many machines."""
        return self.cpu_on_s(machines) + self.network_s


def check(job: Subtasks, name: str) -> None:
    if not (job.cpu_s >= 0 and job.network_s >= 0 and job.cpu_s + job.network_s > 0):
        raise Rejected(
            f"{name}: subtasks take {job.cpu_s} s (CPU) and {job.network_s} s (network); neither "
            "may be below 0 nor both 0"
        )
    if job.machines < 1:
        raise Rejected(f"{name}: profiled on {job.machines} machines; at least 1 is needed")


def group_iteration_s(jobs: Sequence[Subtasks], machines: float) -> float:
    """Eq. 4.1."""
    cpu_s = sum(job.cpu_on_s(machines) for job in jobs)
    network_s = sum(job.network_s for job in jobs)
    return max(cpu_s, network_s, max(job.iteration_s(machines) for job in jobs))


def utilization(jobs: Sequence[Subtasks], machines: float) -> tuple[float, float]:
    """Eq. 4.3: (CPU, network); nothing runs in an empty group."""
    if not jobs:
        return 0.0, 0.0
    iteration_s = group_iteration_s(jobs, machines)
    cpu_s = sum(job.cpu_on_s(machines) for job in jobs)
    return cpu_s / iteration_s, sum(job.network_s for job in jobs) / iteration_s


def weighted(
    used: tuple[float, float],
    weights: tuple[float, float] = (CPU_WEIGHT, NETWORK_WEIGHT),
) -> float:
    return used[0] * weights[0] + used[1] * weights[1]


@lru_cache(maxsize=65536)
def uncoordinated_s(
    jobs: tuple[Subtasks, ...], machines: int, contention: float = 0.0
) -> tuple[float, ...]:
    """Seconds of an iteration of each job when nobody orders their subtasks: mean value analysis
    of a closed network with a task per job and two stations, both shared equally. Up to 16 jobs."""
    if len(jobs) > 16:
        raise Rejected(f"{len(jobs)} jobs share machines without an order; at most 16 may")
    visits_s = np.zeros((len(jobs), STATIONS))
    for row, job in zip(visits_s, jobs, strict=True):
        row[UPLINK], row[DOWNLINK] = job.cpu_on_s(machines), job.network_s
    rates = queueing_classes.by_subsets(np.zeros(len(jobs)), visits_s, equal_share, contention)
    return tuple(float(1.0 / rate) for rate in rates)
