"""Whether the tasks on one aggregator all meet their deadlines if the earliest deadline runs first.

A job of iteration D repeats: forward, layer by layer, each layer needing its parameters; then
backward, each layer pushing its gradient. Between a layer's push and its next pull there passes
x D, where x is how far into the forward pass the layer lies: nothing for the first layer, almost an
iteration for the last. A task of slot time C that is done max(x D, C) + s after it became complete
delays its layer by at most s, and if all of a job's tasks keep that, its iteration lasts at most
D + s: forward and backward take no longer than in D alone, and each cycle of dependences holds one
update. With s = D L / (1 - L) the job loses at most L (LossLimit).

So a task is sporadic: at most every D, cost C, deadline W = max(x D, C) + s. A set of them is
schedulable by preemptive earliest deadline first if the demand h(l) = sum of max(0, floor((l - W) /
D) + 1) C is at most l for every l > 0 (Baruah, Rosier and Howell 1990), and if preemption waits for
the end of a chunk, if h(l) + chunk <= l. A job's demand here is bounded by its utilisation U and
one number: h(l) <= U l + excess for l >= its shortest W, where the excess is the largest h(l) - U l
of a period. The bound's sum is linear between the jobs' shortest windows, so it is tested there
only: a test costs as many steps as the aggregator has jobs, not a hyperperiod.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.limits import CHUNK_CPU_S
from slackwater.services.controller.policies.view import EPSILON, JobView

Floats = NDArray[np.float64]


class Load(NamedTuple):
    """What one job's tasks ask of one aggregator: at most `utilisation * l + excess_s` slot time is
    due within any `l` seconds, and nothing within less than `window_s`."""

    window_s: float
    utilisation: float
    excess_s: float
    chunk_s: float
    """Its longest stretch without preemption."""


def slack_s(iteration_s: float, loss_limit: float) -> float:
    """How much longer an iteration may last."""
    return iteration_s * loss_limit / (1.0 - loss_limit)


def positions(buckets: int) -> tuple[float, ...]:
    """x of every task of a job that is not profiled for it: its place in the forward order."""
    return tuple(bucket / buckets for bucket in range(buckets))


def window_s(position: float, slot_s: float, iteration_s: float, loss_limit: float) -> float:
    """W: from complete to needed."""
    return max(position * iteration_s, slot_s) + slack_s(iteration_s, loss_limit)


def chunk_s(slot_s: float, cpu_share: float) -> float:
    """How long a task of that slot time may hold the slot without looking up."""
    return min(slot_s, CHUNK_CPU_S / cpu_share)


class Tasks:
    """All tasks of a job under one cpu_share, prepared so that the load of any part of them is a
    few array operations."""

    def __init__(self, job: JobView, cpu_share: float, loss_limit: float) -> None:
        self.iteration_s = job.iteration_s
        self.slots_s: Floats = np.array(job.task_cpu_s) / cpu_share
        slack = slack_s(job.iteration_s, loss_limit)
        at = np.array(job.positions or positions(len(job.places))) * job.iteration_s
        windows_s = np.maximum(at, self.slots_s) + slack
        self._chunk_s = CHUNK_CPU_S / cpu_share
        # h steps at W + k D. Beyond the longest W it repeats with every D, U D higher.
        last_s = float(windows_s.max())
        tasks = np.arange(len(windows_s))
        repeats = 1 + ((last_s - windows_s) / job.iteration_s).astype(np.intp)
        of = np.repeat(tasks, repeats)
        turn = np.arange(len(of)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        steps_s = windows_s[of] + turn * job.iteration_s
        order = np.argsort(steps_s, kind="stable")
        self._steps_s: Floats = steps_s[order]
        self._of = of[order]

    def load(self, chosen: NDArray[np.bool_]) -> Load:
        """Of the tasks that `chosen` marks, at least one."""
        slots_s = np.where(chosen, self.slots_s, 0.0)
        utilisation = float(slots_s.sum()) / self.iteration_s
        over_s = np.cumsum(slots_s[self._of]) - utilisation * self._steps_s
        here = chosen[self._of]
        return Load(
            window_s=float(self._steps_s[int(here.argmax())]),
            utilisation=utilisation,
            excess_s=float(over_s[here].max()),
            chunk_s=min(float(slots_s.max()), self._chunk_s),
        )


def schedulable(loads: Iterable[Load], usable: float = 1.0) -> bool:
    """The test of the module's text: sufficient, for any phases of the jobs. `usable`: the
    fraction of the aggregator that may be filled."""
    ordered = sorted(loads)
    if sum(load.utilisation for load in ordered) > usable * (1.0 + EPSILON):
        return False
    blocking_s = max((load.chunk_s for load in ordered), default=0.0)
    utilisation = excess_s = 0.0
    for load in ordered:
        utilisation += load.utilisation
        excess_s += load.excess_s
        room_s = load.window_s * (1.0 + EPSILON)
        if utilisation * load.window_s + excess_s + blocking_s > room_s:
            return False
    return True


def demand_s(tasks: Sequence[tuple[float, float, float]], length_s: float) -> float:
    """h(l) of tasks (period, slot, window), by its definition."""
    return sum(
        slot_s * max(0, int((length_s - window) / period_s + EPSILON) + 1)
        for period_s, slot_s, window in tasks
        if length_s >= window * (1.0 - EPSILON)
    )
