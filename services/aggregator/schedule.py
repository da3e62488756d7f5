"""The slot of an aggregator: which task runs next, from when, until when. Pure.

An aggregator is a slot of `cpu_share` cores (DESIGN.md section 1): one task at a time, each
occupying the slot for e_t / cpu_share. e_t is the task's profiled CPU time, never what it took just
now: a machine that is busy with other things would otherwise stretch the slot, and so be found even
busier. The slot's own time line is kept for the same reason: a task that ends late, because a
thread or a timer was late, does not move the slots after it.

Which task is next is its turn's matter (turns.py): not before its release, then by deadline, then
in the order in which the tasks became complete (the last worker's push arrived), which is the whole
order where nobody has a deadline. A task that has one gives way after each chunk: what is left of
its slot waits like any other task.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Generic, NamedTuple, TypeVar

from slackwater.common import limits

T = TypeVar("T")


@dataclass(slots=True)
class Profile:
    """The CPU time of one bucket's task, or the time between two of them: the lower quartile of the
    first ones, then kept."""

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


class Turn(NamedTuple):
    """When a task may run at the earliest, and when it should be done."""

    release_s: float
    deadline_s: float = inf


class Begun(NamedTuple, Generic[T]):
    """A task whose slot begins at `start_s`, which may have passed. `left_s` of its slot time is
    what an interrupted one still has; it was executed already."""

    task: T
    start_s: float
    left_s: float = 0.0


class Ended(NamedTuple):
    """When the slot is free again, and whether the task has had all of its time."""

    at_s: float
    done: bool


class SlotSchedule(Generic[T]):
    """Use: `arrived`, then `begin` and `end` in turn, as long as `begin` gives a task."""

    def __init__(self, cpu_share: float) -> None:
        self._cpu_share = cpu_share
        self._waiting: list[tuple[float, int, float, T, float]] = []
        """(deadline, number, release, task, left), those that are released."""
        self._later: list[tuple[float, int, float, T]] = []
        """(release, number, deadline, task)"""
        self._number = 0
        self._running: tuple[float, int, float, T, float] | None = None
        self._free_s = 0.0
        self._start_s = 0.0
        self.busy_s = 0.0
        """Slot time given out."""

    def __len__(self) -> int:
        """Tasks that wait."""
        return len(self._waiting) + len(self._later)

    @property
    def free_s(self) -> float:
        """When the slot is free, or was."""
        return self._free_s

    @property
    def deadline_s(self) -> float:
        """Of the task that began last; inf: it has none."""
        assert self._running is not None
        return self._running[0]

    def arrived(self, task: T, now_s: float, turn: Turn | None = None) -> None:
        release_s, deadline_s = turn or Turn(now_s)
        self._number += 1
        if release_s > now_s:
            heappush(self._later, (release_s, self._number, deadline_s, task))
        else:
            heappush(self._waiting, (deadline_s, self._number, now_s, task, 0.0))

    def next_release_s(self) -> float:
        """When `begin` has something again, if nothing arrives."""
        return self._later[0][0] if self._later else inf

    def begin(self, now_s: float = inf) -> Begun[T] | None:
        """The next task of those released by now."""
        while self._later and self._later[0][0] <= now_s:
            release_s, number, deadline_s, task = heappop(self._later)
            heappush(self._waiting, (deadline_s, number, release_s, task, 0.0))
        if not self._waiting:
            return None
        self._running = heappop(self._waiting)
        _, _, release_s, task, left_s = self._running
        self._start_s = max(release_s, self._free_s)
        return Begun(task, self._start_s, left_s)

    def end(self, cpu_s: float, now_s: float) -> Ended:
        """The task that began last used `cpu_s` (as charged). One with a deadline holds the slot
        for a chunk at most; then it is queued again with what is left."""
        assert self._running is not None
        deadline_s, number, release_s, task, left_s = self._running
        slot_s = left_s or cpu_s / self._cpu_share
        chunk_s = limits.CHUNK_SLOT_S
        rest_s = 0.0
        if deadline_s < inf and self._cpu_share < 1.0 and slot_s > chunk_s:
            slot_s, rest_s = chunk_s, slot_s - chunk_s
            heappush(self._waiting, (deadline_s, number, release_s, task, rest_s))
        self._running = None
        self.busy_s += slot_s
        self._free_s = now_s if self._cpu_share >= 1.0 else self._start_s + slot_s
        return Ended(self._free_s, rest_s == 0.0)
