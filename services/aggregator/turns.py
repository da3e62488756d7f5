"""Whose turn it is: the rules by which an aggregator orders and limits what its jobs ask. Pure.

    arrival    a request runs when it comes (what ps-lite does, and what profiling wants)
    cyclic     the paper's cyclic execution (AutoPS section 3.3.1): slots are reserved for the
               requests that are expected in the rest of the cycle; one that missed its own runs in
               this cycle only if enough are left, else in the next
    deadline   our own: the earliest deadline first, the deadlines those that demand.py of the
               controller admitted the job by (docs/adr/0010)

A rule sees requests and gives each its turn (schedule.py). It knows a request by its task's key.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from math import floor, inf
from typing import Generic, TypeVar

from slackwater.services.aggregator.schedule import Profile, Turn

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Reserved:
    slot_s: float
    every_s: float
    expected_s: float = inf
    """When its next request should be there; inf: it has not had a first one."""
    waiting: int = 0
    """Requests that were let in and have not run."""


class CyclicTurns(Generic[K]):
    """The slots of an execution cycle that begins at `begun_s` and repeats every `cycle_s`.

    A task is expected once every d_j = `every_s`, so that a faster job has k_jn = C_n / d_j
    executions in each cycle. A request is late when its slot, had it begun when the request was
    expected, would be over; its reservation has lapsed then, and the next is expected d_j after it.
    """

    def __init__(self, cycle_s: float, begun_s: float) -> None:
        self._cycle_s = cycle_s
        self._begun_s = begun_s
        self._reserved: dict[K, _Reserved] = {}

    def plan(self, key: K, slot_s: float, every_s: float) -> None:
        """The task's slots from now on."""
        known = self._reserved.get(key)
        if known is None:
            self._reserved[key] = _Reserved(slot_s, every_s)
        else:
            known.slot_s, known.every_s = slot_s, every_s

    def forget(self, key: K) -> None:
        self._reserved.pop(key, None)

    def change_cycle(self, cycle_s: float, now_s: float) -> None:
        """An assignment changed it: a new cycle begins."""
        self._cycle_s, self._begun_s = cycle_s, now_s

    def cycle_end_s(self, now_s: float) -> float:
        """Of the cycle in which `now_s` is."""
        turns = floor((now_s - self._begun_s) / self._cycle_s) + 1
        end_s = self._begun_s + turns * self._cycle_s
        return end_s if end_s > now_s else end_s + self._cycle_s

    def arrived(self, key: K, now_s: float, free_s: float) -> Turn:
        """`free_s`: when the slot is free of what runs in it now. A task that nobody planned is
        let in at once: the plan that has it is on its way."""
        task = self._reserved.get(key)
        if task is None:
            return Turn(now_s)
        release_s = now_s
        surplus = task.expected_s < inf and now_s < task.expected_s - task.every_s / 2
        if now_s > task.expected_s + task.slot_s or surplus:
            end_s = self.cycle_end_s(now_s)
            begin_s = max(now_s, free_s)
            task.expected_s = inf  # Its reservation lapsed: it must not compete with itself.
            if begin_s + self._waiting_s() + self.reserved_s(now_s) + task.slot_s > end_s:
                release_s = end_s
        task.expected_s = release_s + task.every_s
        task.waiting += 1
        return Turn(release_s)

    def ran(self, key: K) -> None:
        """One of its requests had its slot."""
        task = self._reserved.get(key)
        if task is not None and task.waiting:
            task.waiting -= 1

    def reserved_s(self, now_s: float) -> float:
        """Slot time of the requests that are still expected in this cycle."""
        end_s = self.cycle_end_s(now_s)
        total_s = 0.0
        for task in self._reserved.values():
            expected_s = task.expected_s
            if expected_s + task.slot_s < now_s:  # This one lapsed; the next may be in the cycle.
                expected_s += task.every_s
            if expected_s < end_s:
                count = floor((end_s - expected_s) / task.every_s)
                exact = expected_s + count * task.every_s >= end_s
                total_s += task.slot_s * (count if exact else count + 1)
        return total_s

    def _waiting_s(self) -> float:
        return sum(task.waiting * task.slot_s for task in self._reserved.values())


@dataclass(slots=True)
class _Paced:
    position: float
    slack: float
    period: Profile
    last_s: float = -inf
    """The release that its last deadline was counted from."""
    arrived_s: float = -inf


class DeadlineTurns(Generic[K]):
    """A task of position x on a job of iteration D is due max(x D, C) + slack D after it became
    complete. Its deadlines are at least D apart: a job that pushes more often than it was profiled
    to runs ahead only on time that nobody else needs.
    """

    def __init__(self) -> None:
        self._tasks: dict[K, _Paced] = {}

    def plan(self, key: K, position: float, slack: float, period_s: float = 0.0) -> None:
        """`period_s` 0: D is the lower quartile of the first times between two requests here."""
        known = self._tasks.get(key)
        if known is None:
            self._tasks[key] = _Paced(position, slack, Profile(kept_s=period_s))
        else:
            known.position, known.slack = position, slack
            known.period.kept_s = period_s or known.period.kept_s

    def forget(self, key: K) -> None:
        self._tasks.pop(key, None)

    def planned(self, key: K) -> bool:
        return key in self._tasks

    def arrived(self, key: K, now_s: float, slot_s: float) -> Turn:
        """`slot_s`: what it will be charged. A task whose D is not known is due as it comes: it is
        being profiled."""
        task = self._tasks[key]
        if task.arrived_s > -inf and not task.period.kept_s:
            task.period.charge(now_s - task.arrived_s)
        task.arrived_s = now_s
        period_s = task.period.cpu_s
        if not period_s:
            return Turn(now_s, now_s + slot_s)
        task.last_s = max(now_s, task.last_s + period_s)
        window_s = max(task.position * period_s, slot_s) + task.slack * period_s
        return Turn(now_s, task.last_s + window_s)
