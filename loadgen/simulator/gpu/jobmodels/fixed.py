"""The fixed model: a job is a known amount of running time (Tiresias section 3.5.3).

Work is counted in whole milliseconds of undisturbed running and speed in whole thousandths, so
that instants are whole seconds and GPU-seconds, progress and losses add up exactly. A job on other
GPUs than it asks for is taken to scale linearly; slower GPUs, a bad placement and interference
divide its speed. With `whole_seconds` off, durations and submissions are taken as they are, to the
millisecond: for short jobs, whose start and stop cost fractions of a second.
"""

from typing import Any, Final

from slackwater.loadgen.simulator.gpu.jobmodels.base import Conditions
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.services.master.scheduling.view import Allocation, ClusterView

_NEVER: Final = float("inf")
_MILLI: Final = 1000
_ROUNDING: Final = 1e-6
"""Added to thousandths of a millisecond: instants between whole seconds are rounded."""


class FixedRun:
    __slots__ = ("_asked", "_at_s", "_marked", "_rate", "_whole", "_work", "job", "total")

    def __init__(self, job: Submission, whole_seconds: bool = True) -> None:
        self.job, self._asked, self._whole = job, job.spec.gpus, whole_seconds
        self.total = max(1, round(job.oracle.duration_s)) * _MILLI
        if not whole_seconds:
            self.total = max(1, round(job.oracle.duration_s * _MILLI))
        self._work = 0
        self._marked = 0
        self._rate = 0
        self._at_s: float = 0
        """Up to when progress is counted; while it restarts, when that will be over."""

    @property
    def work_done(self) -> float:
        return self._work / _MILLI

    @property
    def work_total(self) -> float:
        return self.total / _MILLI

    @property
    def done(self) -> bool:
        return self._work >= self.total

    @property
    def speed(self) -> float:
        return 1 if self._rate == _MILLI else self._rate / _MILLI

    @property
    def profile(self) -> Any:
        return None

    @property
    def useful_gpu_s(self) -> float:
        return self._work * self._asked / _MILLI

    def resume(self, now_s: float, allocation: Allocation, conditions: Conditions) -> None:
        gpus = sum(count for _, count in allocation)
        rate = self.relative_speed(conditions) * gpus / self._asked
        self._rate = max(1, round(_MILLI * rate)) if gpus else 0
        self._at_s = now_s + conditions.delay_s

    def relative_speed(self, conditions: Conditions) -> float:
        return conditions.gpu_speed / conditions.slowdown

    def advance(self, now_s: float) -> None:
        if now_s > self._at_s:
            work = (now_s - self._at_s) * self._rate
            self._work = min(
                self.total, self._work + int(work if self._whole else work + _ROUNDING)
            )
            self._at_s = now_s

    def next_s(self) -> float:
        if not self._rate:
            return _NEVER
        if not self._whole:
            return self._at_s + (self.total - self._work) / self._rate
        return self._at_s - (self._work - self.total) // self._rate

    def remaining_s(self) -> float:
        left, rest = divmod(self.total - self._work, _MILLI)
        return left if not rest else left + rest / _MILLI

    def alone_s(self, gpus: int) -> float:
        return self.total / _MILLI * self._asked / min(gpus, self._asked)

    def mark(self) -> None:
        self._marked = self._work

    def restore(self) -> None:
        self._work = self._marked


class FixedModel:
    name = "fixed"

    def __init__(self, whole_seconds: bool = True) -> None:
        self.integer_times = whole_seconds

    def run(self, job: Submission, cluster: ClusterView) -> FixedRun:
        return FixedRun(job, self.integer_times)
