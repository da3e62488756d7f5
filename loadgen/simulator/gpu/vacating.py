"""GPUs that are given to others while the jobs that had them still save and leave.

A policy counts them as free, as the live master does: it gives idle GPUs first, and whoever is
given others waits until these are left.
"""

from bisect import insort
from collections.abc import Sequence

from slackwater.services.master.scheduling.view import Allocation


class Vacating:
    """Knows when each free GPU that is not idle yet will be."""

    def __init__(self, nodes: int, stop_s: float) -> None:
        """`stop_s`: seconds that a job takes to save and leave; 0: it is gone at once."""
        self._stop_s = stop_s
        self._until_s: list[list[float]] = [[] for _ in range(nodes)]

    def leave(self, allocation: Allocation, begins_s: float, now_s: float) -> float:
        """Return when a job that is stopped now will have left its GPUs. `begins_s`: when they
        were, or will be, left by others: before it has begun, a job has nothing to save."""
        if not self._stop_s:
            return now_s
        begun = begins_s <= now_s
        until_s = now_s + self._stop_s if begun else begins_s
        for node, gpus in allocation:
            for _ in range(gpus):
                insort(self._until_s[node], until_s)
        return until_s if begun else now_s

    def take(self, allocation: Allocation, free: Sequence[int], now_s: float) -> float:
        """Return when the last of these GPUs is left. `free`: free GPUs by node, before that."""
        last_s = now_s
        if not self._stop_s:
            return last_s
        for node, gpus in allocation:
            later = [until_s for until_s in self._until_s[node] if until_s > now_s]
            awaited = gpus - (free[node] - len(later))
            if awaited > 0:
                last_s = max(last_s, later[awaited - 1])
                del later[:awaited]
            self._until_s[node] = later
        return last_s
