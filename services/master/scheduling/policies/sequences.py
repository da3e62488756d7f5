"""Policies that are nothing but an order of jobs.

`fifo`         strict head of line, as YARN's capacity scheduler (Tiresias section 3.2.1)
`best-effort`  FIFO that skips what does not fit (section 3.5.3)
`sf`           fewest GPUs first
`srtf`, `srsf` shortest remaining time, and remaining time x GPUs: they know durations (table 3.1)

With the default knobs the first two never preempt, the others always may.
"""

from math import inf
from typing import Any

from slackwater.services.master.scheduling.policies.queues import Key, Level, QueuePolicy
from slackwater.services.master.scheduling.registry import Consolidate, register
from slackwater.services.master.scheduling.view import JobView


@register("fifo")
class Fifo(QueuePolicy):
    """Jobs start in order of submission; one that does not fit blocks all behind it."""

    strict = True
    preemptive = False

    def __init__(self, consolidate: Consolidate = "prefer") -> None:
        self.consolidate = consolidate

    def place(self, job: JobView, now_s: float, notes: Any) -> tuple[Level, Key, float]:
        return (-job.priority,), (0,), inf


@register("best-effort")
class BestEffort(Fifo):
    """Jobs start in order of submission; those that do not fit are passed."""

    strict = False


@register("sf")
class SmallestFirst(QueuePolicy):
    """Jobs of the fewest GPUs first."""

    def __init__(self, preemptive: bool = True, consolidate: Consolidate = "prefer") -> None:
        self.preemptive = preemptive
        self.consolidate = consolidate

    def place(self, job: JobView, now_s: float, notes: Any) -> tuple[Level, Key, float]:
        return (-job.priority,), (job.gpus,), inf


@register("srtf")
class ShortestRemainingTime(QueuePolicy):
    keys_move = True

    def __init__(self, preemptive: bool = True, consolidate: Consolidate = "prefer") -> None:
        self.preemptive = preemptive
        self.consolidate = consolidate

    def place(self, job: JobView, now_s: float, notes: Any) -> tuple[Level, Key, float]:
        return (-job.priority,), (job.remaining_s(now_s),), inf

    def key_now(self, job: JobView, now_s: float, notes: Any) -> Key:
        return (job.remaining_s(now_s),)


@register("srsf")
class ShortestRemainingService(QueuePolicy):
    keys_move = True

    def __init__(self, preemptive: bool = True, consolidate: Consolidate = "prefer") -> None:
        self.preemptive = preemptive
        self.consolidate = consolidate

    def place(self, job: JobView, now_s: float, notes: Any) -> tuple[Level, Key, float]:
        return (-job.priority,), (job.remaining_s(now_s) * job.gpus,), inf

    def key_now(self, job: JobView, now_s: float, notes: Any) -> Key:
        return (job.remaining_s(now_s) * job.gpus,)
