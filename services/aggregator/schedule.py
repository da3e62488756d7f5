"""The slot of an aggregator: which task runs next, from when, until when. Pure.

An aggregator is a slot of `cpu_share` cores (DESIGN.md section 1): one task at a time, in the order
in which the tasks became complete (the last worker's push arrived), each occupying the slot for
e_t / cpu_share. e_t is the task's profiled CPU time, never what it took just now: a machine that
is busy with other things would otherwise stretch the slot, and so be found even busier. The slot's
own time line is kept for the same reason: a task that ends late, because a thread or a timer was
late, does not move the slots after it.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from slackwater.common import limits

T = TypeVar("T")


@dataclass(slots=True)
class Profile:
    """The CPU time of one bucket's task: the lower quartile of its first executions, then kept."""

    samples_s: list[float] = field(default_factory=list)
    kept_s: float = 0.0
    """0: not known yet."""

    @property
    def cpu_s(self) -> float:
        """The lower quartile so far; 0 before the first execution."""
        if self.kept_s or not self.samples_s:
            return self.kept_s
        return sorted(self.samples_s)[len(self.samples_s) // 4]

    def charge(self, measured_s: float) -> float:
        """What an execution that took `measured_s` is charged."""
        if self.kept_s:
            return self.kept_s
        self.samples_s.append(measured_s)
        if len(self.samples_s) >= limits.PROFILE_EXECUTIONS:
            self.kept_s = self.cpu_s
            self.samples_s.clear()
        return measured_s


class SlotSchedule(Generic[T]):
    """Use: `arrived`, then `begin` and `end` in turn, as long as `begin` gives a task."""

    def __init__(self, cpu_share: float) -> None:
        self._cpu_share = cpu_share
        self._queue: deque[tuple[float, T]] = deque()
        self._free_s = 0.0
        self._start_s = 0.0
        self.busy_s = 0.0
        """Slot time given out."""

    def __len__(self) -> int:
        """Tasks that wait."""
        return len(self._queue)

    def arrived(self, task: T, now_s: float) -> None:
        self._queue.append((now_s, task))

    def begin(self) -> tuple[T, float] | None:
        """The next task and the instant at which its slot begins; it may have passed."""
        if not self._queue:
            return None
        arrived_s, task = self._queue.popleft()
        self._start_s = max(arrived_s, self._free_s)
        return task, self._start_s

    def end(self, cpu_s: float, now_s: float) -> float:
        """The task that began last used `cpu_s` (as charged): when its slot ends."""
        slot_s = cpu_s / self._cpu_share
        self.busy_s += slot_s
        self._free_s = now_s if self._cpu_share >= 1.0 else self._start_s + slot_s
        return self._free_s
