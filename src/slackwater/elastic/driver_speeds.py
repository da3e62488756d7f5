"""How fast hosts are, and which of them should have an executor (Lee 2020, sections 3.2.3, 3.3.1).

A host is as fast as the seconds that it computes for a task say, as a moving average. Executors are
shared out so that all hosts end an iteration together: in equal parts as long as nothing is known,
else in proportion. Measurements of a new set of hosts count once all of them have completed a set
of tasks; and they lead to a change only where two sets in a row ask for it, as it makes the slowest
host's part of an iteration shorter by 5 % or more. Pure, and forgotten with its process: whoever
comes after it measures anew.
"""

from collections.abc import Collection, Mapping
from typing import Final

from slackwater.common.domains.models.cost import GAIN_MIN

SET_TASKS: Final = 8
"""Tasks that each host completes between two looks."""
WEIGHT: Final = 0.3
"""Weight of a batch's tasks in the moving average."""
SETS: Final = 2
"""Looks in a row that must ask for a change."""


class Speeds:
    def __init__(self) -> None:
        self._task_s: dict[int, float] = {}
        self._since: dict[int, int] = {}
        """Tasks of each host since the last look."""
        self._asking = 0

    def forget(self, rank: int) -> None:
        """Another process is there, or none: on another machine perhaps."""
        self._task_s.pop(rank, None)
        self._since.pop(rank, None)
        self._asking = 0

    def heard(self, rank: int, tasks: int, computed_s: float) -> None:
        """Take note of so many tasks, which the host computed for so long in all. A host's first
        batch does not count: what it read was new to it."""
        if not tasks or computed_s <= 0.0:
            return
        if rank not in self._since:
            self._since[rank] = 0
            return
        task_s, before_s = computed_s / tasks, self._task_s.get(rank)
        self._task_s[rank] = task_s if before_s is None else before_s + WEIGHT * (task_s - before_s)
        self._since[rank] += tasks

    def looks(self, loads: Mapping[int, int]) -> bool:
        """Say whether executors are to be arranged anew, of which each host has so many."""
        if len(loads) < 2 or any(self._since.get(rank, 0) < SET_TASKS for rank in loads):
            return False
        for rank in loads:
            self._since[rank] = 0
        task_s = self.of(loads)
        slowest = max(loads, key=lambda rank: loads[rank] * task_s[rank])
        target = next_host(loads, task_s)
        asks = target != slowest and pays(loads, task_s, slowest, target)
        self._asking = self._asking + 1 if asks else 0
        if self._asking < SETS:
            return False
        self._asking = 0
        return True

    def of(self, ranks: Collection[int]) -> dict[int, float]:
        """Return the seconds of a task on each: 1.0 on all where those of any are not known."""
        if any(rank not in self._task_s for rank in ranks):
            return dict.fromkeys(ranks, 1.0)
        return {rank: self._task_s[rank] for rank in ranks}


def next_host(loads: Mapping[int, int], task_s: Mapping[int, float]) -> int:
    """Return the host that one more executor is best at."""
    return min(loads, key=lambda rank: ((loads[rank] + 1) * task_s[rank], rank))


def pays(loads: Mapping[int, int], task_s: Mapping[int, float], source: int, target: int) -> bool:
    """Say whether an executor is to go from one host to another: each then has a shorter part of
    an iteration than the first one has now, by 5 % where speeds differ."""
    gain_min = 0.0 if task_s[source] == task_s[target] else GAIN_MIN
    then_s = (loads[target] + 1) * task_s[target]
    return then_s < loads[source] * task_s[source] * (1.0 - gain_min)
