"""How far a job has learned, and how it was tuned on the way: from its reports of goodput.

Pure. With a batch that changes, iterations say little: an iteration of a large batch teaches less
than its examples promise. **Statistical epochs** count examples by the efficiency that they had
(Qiao, thesis, section 3.3.1): they pass as they would with the smallest batch. A job that reports
them gets its progress and its ETA by them, with an interval: the mean rate over the last reports,
give or take two standard errors of it. Reports of another attempt begin a new rate: the time in
which a job had no GPUs is not its speed.

**History.** Each report is a point of figure 3.11: batch, accumulation, rate and efficiency. A job
keeps `POINTS_MAX` of them at most, thinned so that they cover its whole life.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from statistics import stdev
from typing import Final, NamedTuple

import msgspec

from slackwater.common.base.thinned import Thinned
from slackwater.schemas.base import SECONDS_MAX
from slackwater.schemas.progress import JobProgress, TuningPoint

RATED: Final = 16
"""Reports over which a rate is measured."""
RATES_MIN: Final = 3
"""The fewest rates that have an interval."""
POINTS_MAX: Final = 128


class _Sample(NamedTuple):
    at_s: float
    epochs: float


@dataclass(slots=True)
class Learning:
    """Follows one job."""

    target: float | None = None
    points: Thinned[TuningPoint] = field(default_factory=lambda: Thinned(POINTS_MAX))
    _samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=RATED + 1))
    _attempt: int = -1

    def reported(self, point: TuningPoint, attempt: int, target: float | None) -> None:
        """Take a report. One that goes back (the job lost iterations) begins a new rate."""
        self.target = target
        samples = self._samples
        if point.progress_epochs is not None:
            back = bool(samples) and point.progress_epochs < samples[-1].epochs
            if attempt != self._attempt or back:
                samples.clear()
            if not samples or point.at_s > samples[-1].at_s:
                samples.append(_Sample(point.at_s, point.progress_epochs))
        self._attempt = attempt
        self.points.add(point)

    def shown(self, progress: JobProgress | None, runs: bool) -> JobProgress | None:
        """Show the progress by statistical epochs, where the job reports them."""
        if not self._samples:
            return progress
        last = self._samples[-1]
        found = progress or JobProgress()
        found = msgspec.structs.replace(
            found,
            epochs=last.epochs,
            epochs_target=self.target,
            updated_s=max(found.updated_s, last.at_s),
            eta_s=None,
        )
        rate, error = self._rate()
        if self.target is None or not runs or rate <= 0.0:
            return found
        left, age_s = max(0.0, self.target - last.epochs), found.updated_s - last.at_s
        slowest = rate - 2.0 * error if error is not None else 0.0
        return msgspec.structs.replace(
            found,
            eta_s=_after(left / rate - age_s),
            eta_s_min=None if error is None else _after(left / (rate + 2.0 * error) - age_s),
            eta_s_max=_after(left / slowest - age_s) if slowest > 0.0 else None,
        )

    def _rate(self) -> tuple[float, float | None]:
        """Return epochs a second, and the standard error; None: there are too few reports."""
        samples = list(self._samples)
        if len(samples) < 2:
            return 0.0, None
        rates = [
            (after.epochs - before.epochs) / (after.at_s - before.at_s)
            for before, after in pairwise(samples)
        ]
        mean = (samples[-1].epochs - samples[0].epochs) / (samples[-1].at_s - samples[0].at_s)
        return mean, stdev(rates) / sqrt(len(rates)) if len(rates) >= RATES_MIN else None


def _after(seconds: float) -> float:
    return min(max(0.0, seconds), SECONDS_MAX)
