"""GPUs that are given to others while the jobs that had them still save and leave.

A policy counts them as free, as the live master does: it gives idle GPUs first, and whoever is
given others waits until these are left.
"""

from bisect import insort
from collections.abc import Sequence

from slackwater.services.master.scheduling.view import Allocation

Awaited = tuple[tuple[int, float], ...]
"""The node of each GPU that others are leaving, and until when."""


class Vacating:
    """Knows when each free GPU that is not idle yet will be."""

    def __init__(self, nodes: int, stop_s: float) -> None:
        """`stop_s`: seconds that a job takes to save and leave; 0: it is gone at once."""
        self._stop_s = stop_s
        self._until_s: list[list[float]] = [[] for _ in range(nodes)]

    def leave(
        self, allocation: Allocation, awaited: Awaited, ready_s: float, now_s: float
    ) -> float:
        """Return when a job that is stopped now will have left its GPUs. Before it is ready it has
        nothing to save, and each of its GPUs is left as it was `awaited` from others."""
        if not self._stop_s:
            return now_s
        if now_s < ready_s:
            for node, until_s in awaited:
                insort(self._until_s[node], until_s)
            return now_s
        for node, gpus in allocation:
            for _ in range(gpus):
                insort(self._until_s[node], now_s + self._stop_s)
        return now_s + self._stop_s

    def take(self, allocation: Allocation, free: Sequence[int], now_s: float) -> Awaited:
        """Return the GPUs among these that others are leaving. `free`: free GPUs by node, before
        that."""
        found: list[tuple[int, float]] = []
        for node, gpus in allocation if self._stop_s else ():
            later = [until_s for until_s in self._until_s[node] if until_s > now_s]
            awaited = max(0, gpus - (free[node] - len(later)))
            found += [(node, until_s) for until_s in later[:awaited]]
            self._until_s[node] = later[awaited:]
        return tuple(found)
