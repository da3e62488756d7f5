"""The slot of an aggregator: which task runs next, from when, until when. Pure.

An aggregator is a slot of `cpu_share` cores (ADR 17): one task at a time, each
occupying the slot for e_t / cpu_share. e_t is the task's profiled CPU time, never what it took just
now: a machine that is busy with other things would otherwise stretch the slot, and so be found even
busier. The slot's own time line is kept for the same reason: a task that ends late, because a
thread or a timer was late, does not move the slots after it.

Which task is next is its turn's matter (task_scheduling.py): by deadline, then in the order in
which the tasks became complete (the last worker's push arrived), which is the whole order where
nobody has a deadline. A task gives way to one with a nearer deadline after a chunk: what is left of
its slot waits like any other task. At the end of a chunk nothing else is to be decided, so that
nobody is woken there.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, inf
from typing import Final, Generic, NamedTuple, TypeVar

from slackwater.common.base import limits

T = TypeVar("T")
CALIBRATED_FROM: Final = 0.2
"""A cost that moved by less than this part is the same: machines differ from minute to minute."""
_NOTHING_S: Final = 1e-9
"""Less than this is left of a slot by rounding only."""


@dataclass(slots=True)
class Profile:
    """The CPU time of one bucket's task, or the time between two of them: the lower quartile of the
    first ones, then kept, and calibrated as long as there are more.

    What tasks take while others use the machine, too, would make their slots longer and the machine
    look busier. So a calibration lengthens them only if not one of its executions took as little as
    was profiled; what is cheaper is learned by the same quartile as at first."""

    samples_s: list[float] = field(default_factory=list)
    """Since the profile was complete, or since it was last calibrated."""
    kept_s: float = 0.0
    """0: not known yet."""

    @property
    def cpu_s(self) -> float:
        """The lower quartile so far; 0 before the first execution."""
        if self.kept_s or not self.samples_s:
            return self.kept_s
        return _lower_quartile(self.samples_s)

    def charge(self, measured_s: float) -> float:
        """Return the charge of an execution that took `measured_s`."""
        charged_s = self.kept_s or measured_s
        self.samples_s.append(measured_s)
        if self.kept_s:
            self._calibrate()
        elif len(self.samples_s) >= limits.PROFILE_EXECUTIONS:
            self.kept_s = self.cpu_s
            self.samples_s.clear()
        return charged_s

    def _calibrate(self) -> None:
        if len(self.samples_s) < limits.CALIBRATION_EXECUTIONS:
            return
        quartile_s, least_s = _lower_quartile(self.samples_s), min(self.samples_s)
        if quartile_s < self.kept_s * (1.0 - CALIBRATED_FROM):
            self.kept_s = quartile_s
        elif least_s > self.kept_s * (1.0 + CALIBRATED_FROM):
            self.kept_s = least_s
        self.samples_s.clear()


def _lower_quartile(samples_s: list[float]) -> float:
    return sorted(samples_s)[len(samples_s) // 4]


class Begun(NamedTuple, Generic[T]):
    """A task whose slot begins at `start_s`, which may have passed. `left_s` of its slot time is
    what an interrupted one still has; it was executed already."""

    task: T
    start_s: float
    left_s: float = 0.0


class Ended(NamedTuple):
    """When the slot is free again, and whether the task has had all of its time by then."""

    at_s: float
    done: bool


class SlotSchedule(Generic[T]):
    """Use: `arrived`, then `begin` and `end` in turn, as long as `begin` gives a task; until that
    task's slot ends, `cut` once something is more `urgent`."""

    def __init__(self, cpu_share: float) -> None:
        self._cpu_share = cpu_share
        self._waiting: list[tuple[float, int, float, T, float]] = []
        """(deadline, number, when it came, task, left)"""
        self._number = 0
        self._running: tuple[float, int, float, T, float] | None = None
        self._free_s = 0.0
        self._start_s = 0.0
        self.busy_s = 0.0
        """Slot time given out."""

    def __len__(self) -> int:
        """Tasks that wait."""
        return len(self._waiting)

    @property
    def free_s(self) -> float:
        """When the slot is free, or was."""
        return self._free_s

    @property
    def deadline_s(self) -> float:
        """The deadline of the task that began last; inf: it has none."""
        assert self._running is not None
        return self._running[0]

    def arrived(self, task: T, now_s: float, deadline_s: float = inf) -> None:
        self._number += 1
        heappush(self._waiting, (deadline_s, self._number, now_s, task, 0.0))

    @property
    def urgent(self) -> bool:
        """Say whether a task that waits has a nearer deadline than the one that began last."""
        running = self._running
        return bool(self._waiting) and running is not None and self._waiting[0] < running

    def begin(self) -> Begun[T] | None:
        """The next task."""
        if not self._waiting:
            return None
        self._running = heappop(self._waiting)
        _, _, arrived_s, task, left_s = self._running
        self._start_s = max(arrived_s, self._free_s)
        return Begun(task, self._start_s, left_s)

    def end(self, cpu_s: float, now_s: float) -> Ended:
        """The task that began last used `cpu_s` (as charged): when its slot ends, unless it is
        `cut`."""
        assert self._running is not None
        slot_s = self._running[4] or cpu_s / self._cpu_share
        self.busy_s += slot_s
        self._free_s = now_s if self._cpu_share >= 1.0 else self._start_s + slot_s
        return Ended(self._free_s, True)

    def cut(self, now_s: float) -> Ended | None:
        """Where a task is more urgent: the slot of the task that `end` was called for ends with the
        chunk that it is in, where that is sooner, and it is queued again with the rest."""
        if not self.urgent or self._cpu_share >= 1.0:
            return None
        assert self._running is not None
        chunk_s = limits.CHUNK_SLOT_S
        chunks = max(1, ceil((now_s - self._start_s) / chunk_s))
        rest_s = self._free_s - (self._start_s + chunks * chunk_s)
        if rest_s <= _NOTHING_S:
            return None
        heappush(self._waiting, (*self._running[:4], rest_s))
        self._free_s -= rest_s
        self.busy_s -= rest_s
        self._running = None
        return Ended(self._free_s, False)
