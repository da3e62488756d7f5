"""A run that moves through a fixed number of iterations at a rate: what the models of iterations
share. Progress is linear between events, so a run is advanced lazily."""

from abc import ABC, abstractmethod
from typing import Final

from slackwater.loadgen.simulator.gpu.jobmodels.base import Conditions
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.services.master.scheduling.view import Allocation

NEVER: Final = float("inf")


class IteratedRun(ABC):
    """Subclasses say the rate."""

    __slots__ = ("_at_s", "_end_s", "_marked", "_rate", "job", "work_done", "work_total")

    def __init__(self, job: Submission) -> None:
        self.job = job
        self.work_total = float(job.oracle.iterations)
        self.work_done = 0.0
        self._marked = 0.0
        self._rate = 0.0
        self._at_s = 0.0
        self._end_s = NEVER

    @abstractmethod
    def rate(self, gpus: int, conditions: Conditions) -> float:
        """Iterations per second on `gpus` GPUs (at least one)."""

    @property
    def done(self) -> bool:
        return self.work_done >= self.work_total

    def resume(self, now_s: float, allocation: Allocation, conditions: Conditions) -> None:
        gpus = sum(count for _, count in allocation)
        self._rate = self.rate(gpus, conditions) if gpus else 0.0
        self._at_s = now_s + conditions.delay_s
        left = self.work_total - self.work_done
        self._end_s = self._at_s + left / self._rate if self._rate else NEVER

    def advance(self, now_s: float) -> None:
        if now_s >= self._end_s:
            self.work_done = self.work_total
        elif now_s > self._at_s:
            moved = self.work_done + (now_s - self._at_s) * self._rate
            self.work_done = min(moved, self.work_total)
        self._at_s = max(self._at_s, now_s)

    def next_s(self) -> float:
        return self._end_s

    def mark(self) -> None:
        self._marked = self.work_done

    def restore(self) -> None:
        self.work_done = self._marked
