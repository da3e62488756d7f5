"""Gandiva's time sharing, as Tiresias compares against it (section 3.5.3): round-robin slices.

At each tick (a multiple of `quantum_s`) every running job goes to the end of the line, and the line
is walked from its head: whoever has waited longest runs first. Between ticks arrivals take only
what is idle. So nobody starves: at some tick every job is the head, with the whole cluster before
it. Gandiva's packing and migration are not part of this comparison.
"""

from math import floor, inf
from typing import Any

from slackwater.services.master.scheduling.policies.queues import Key, Level, QueuePolicy
from slackwater.services.master.scheduling.registry import Consolidate, Period, register
from slackwater.services.master.scheduling.view import JobView, View


@register("gandiva")
class Gandiva(QueuePolicy):
    """Jobs take turns: whoever has waited longest runs for `quantum_s`."""

    keys_move = True

    def __init__(self, quantum_s: Period = 60, consolidate: Consolidate = "prefer") -> None:
        self.quantum_s = quantum_s
        self.consolidate = consolidate

    def _tick_s(self, now_s: float) -> float:
        return floor(now_s / self.quantum_s) * self.quantum_s

    def place(self, job: JobView, now_s: float, notes: Any) -> tuple[Level, Key, float]:
        if job.allocation:
            # Its slice ended at the tick, so it joined the line then, behind those who waited.
            return (-job.priority,), (self._tick_s(now_s), 1), inf
        return (-job.priority,), (job.since_s, 0), inf

    def protects(self, view: View) -> bool:
        return True

    def protected_until_s(self, job: JobView, view: View) -> float:
        tick_s = self._tick_s(view.now_s)
        slice_end_s = tick_s if tick_s == view.now_s else tick_s + self.quantum_s
        return max(slice_end_s, job.since_s + view.rules.min_run_s)

    def next_round_s(self, view: View) -> float:
        return self._tick_s(view.now_s) + self.quantum_s
