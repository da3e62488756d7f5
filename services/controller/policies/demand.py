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

The line is up to an iteration above the steps, which keeps short iterations and large first layers
apart that would fit. So where it says no and a new aggregator is at stake, h itself is looked at
(`holds`), at every step up to where U l has overtaken it for good.
"""

from collections.abc import Iterable, Sequence
from math import inf
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.limits import CHUNK_SLOT_S
from slackwater.services.controller.policies.view import EPSILON, JobView

Floats = NDArray[np.float64]
SPARES_MAX: Final = 1000
HALVINGS: Final = 12
STEPS_MAX: Final = 20_000
"""Steps of the exact test, some milliseconds; a utilisation of nearly 1 would need ever more."""


class Load(NamedTuple):
    """The demand of one job's tasks on one aggregator: at most `utilisation * l + excess_s` slot
    time is due within any `l` seconds, and nothing within less than `window_s`."""

    window_s: float
    utilisation: float
    excess_s: float
    chunk_s: float
    """The longest stretch without preemption, in seconds."""


def slack_s(iteration_s: float, loss_limit: float) -> float:
    """How much longer an iteration may last."""
    return iteration_s * loss_limit / (1.0 - loss_limit)


def positions(first_tensors: Sequence[int], tensors: int) -> tuple[float, ...]:
    """x of every task of a job that is not profiled for it: the part of the job's tensors that come
    before its first, in forward order. Buckets say less: where tensors are small, most of the
    layers share a few of them."""
    return tuple(first / tensors for first in first_tensors)


def window_s(position: float, slot_s: float, iteration_s: float, loss_limit: float) -> float:
    """W: from complete to needed."""
    return max(position * iteration_s, slot_s) + slack_s(iteration_s, loss_limit)


class Tasks:
    """All tasks of a job under one cpu_share, prepared so that the load of any part of them is a
    few array operations."""

    def __init__(self, job: JobView, cpu_share: float, loss_limit: float) -> None:
        self.iteration_s = job.iteration_s
        self.slots_s: Floats = np.array(job.task_cpu_s) / cpu_share
        slack = slack_s(job.iteration_s, loss_limit)
        tasks = len(job.places)
        at = np.array(job.positions or positions(range(tasks), tasks)) * job.iteration_s
        self.windows_s: Floats = np.maximum(at, self.slots_s) + slack
        windows_s = self.windows_s
        # h steps at W + k D. Beyond the longest W it repeats with every D, U D higher.
        last_s = float(windows_s.max())
        repeats = 1 + ((last_s - windows_s) / job.iteration_s).astype(np.intp)
        of = np.repeat(np.arange(tasks), repeats)
        turn = np.arange(len(of)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        steps_s = windows_s[of] + turn * job.iteration_s
        order = np.argsort(steps_s, kind="stable")
        self._steps_s: Floats = steps_s[order]
        self._of = of[order]

    def load(self, chosen: NDArray[np.bool_]) -> Load:
        """Return the load of the tasks that `chosen` marks, at least one."""
        slots_s = np.where(chosen, self.slots_s, 0.0)
        utilisation = float(slots_s.sum()) / self.iteration_s
        over_s = np.cumsum(slots_s[self._of]) - utilisation * self._steps_s
        here = chosen[self._of]
        return Load(
            window_s=float(self._steps_s[int(here.argmax())]),
            utilisation=utilisation,
            excess_s=float(over_s[here].max()),
            chunk_s=min(float(slots_s.max()), CHUNK_SLOT_S),
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


def spare_s(loads: Sequence[Load], longest_s: float) -> float:
    """Return by how many seconds all deadlines could be earlier, with the test still passing. All
    work is done that much earlier: deadlines that move together change no order. Below 0 by how
    much later they had to be; at most `longest_s`, or minus infinity where no delay suffices."""

    def passes(earlier_s: float) -> bool:
        # Every step of the demand moves with its window.
        moved = [
            load._replace(
                window_s=load.window_s - earlier_s,
                excess_s=load.excess_s + load.utilisation * earlier_s,
            )
            for load in loads
        ]
        return all(load.window_s > 0.0 for load in moved) and schedulable(moved)

    low_s, high_s = 0.0, longest_s
    while not passes(low_s):
        low_s, high_s = 2.0 * low_s - longest_s, low_s
        if low_s < -SPARES_MAX * longest_s:
            return -inf
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2.0
        low_s, high_s = (middle_s, high_s) if passes(middle_s) else (low_s, middle_s)
    return low_s


class Demand(NamedTuple):
    """Tasks as the exact test sees them, each an element of all three."""

    periods_s: Floats
    slots_s: Floats
    windows_s: Floats

    @classmethod
    def of(cls, tasks: Tasks, chosen: NDArray[np.bool_]) -> "Demand":
        periods_s = np.full(int(chosen.sum()), tasks.iteration_s)
        return cls(periods_s, tasks.slots_s[chosen], tasks.windows_s[chosen])


def holds(demands: Sequence[Demand]) -> bool:
    """The exact test: h(l) + chunk <= l at every step of h, up to the l beyond which that follows
    from the utilisation. Too many steps count as no."""
    periods_s, slots_s, windows_s = (np.concatenate(parts) for parts in zip(*demands, strict=True))
    spare = 1.0 - float((slots_s / periods_s).sum())
    if spare <= EPSILON:
        return False
    chunk_s = min(float(slots_s.max()), CHUNK_SLOT_S)
    # h(l) <= sum of (l - W + D) C / D for l >= every W.
    above_s = float((np.maximum(periods_s - windows_s, 0.0) * slots_s / periods_s).sum())
    last_s = max(float(windows_s.max()), (above_s + chunk_s) / spare)
    counts = np.maximum(((last_s - windows_s) / periods_s).astype(np.intp) + 1, 0)
    if int(counts.sum()) > STEPS_MAX:
        return False
    of = np.repeat(np.arange(len(counts)), counts)
    turn = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    steps_s = windows_s[of] + turn * periods_s[of]
    order = np.argsort(steps_s, kind="stable")
    demand = np.cumsum(slots_s[of][order]) + chunk_s
    return bool((demand <= steps_s[order] * (1.0 + EPSILON)).all())
