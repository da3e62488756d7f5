"""The load of the machine that a service shares with others: cores in use, and the link."""

import time
from dataclasses import dataclass

import psutil

from slackwater.common.native.link import Link


@dataclass(frozen=True, slots=True)
class Seen:
    """Means since the look before."""

    cores: int = 0
    """The machine's; 0: nothing was measured yet."""
    used: float = 0.0
    """Cores in use, by whomever."""
    own: float = 0.0
    """Cores of `used` that this process used itself."""
    network_bytes_s: float = 0.0
    """Bytes a second that the link carried, the busier way."""


class Machine:
    """Measures it. `seen` is what the last look found."""

    def __init__(self, link: Link | None) -> None:
        self.link, self.seen = link, Seen()
        self._before = (0.0, 0.0, (0, 0))

    @property
    def network_budget_bytes_s(self) -> int:
        """Return the budget of its link, each way; 0: not known."""
        return self.link.budget_bytes_s if self.link is not None else 0

    def begin(self) -> None:
        """The first span begins now."""
        psutil.cpu_percent()
        self._before = self._counters()

    def look(self) -> float:
        """Measure since the look before. Return how much of the machine was in use, in percent."""
        percent: float = psutil.cpu_percent()
        before, self._before = self._before, self._counters()
        span_s = max(self._before[0] - before[0], 1e-3)
        cores = psutil.cpu_count() or 1
        carried = max(new - old for new, old in zip(self._before[2], before[2], strict=True))
        self.seen = Seen(
            cores=cores,
            used=percent / 100.0 * cores,
            own=max(0.0, self._before[1] - before[1]) / span_s,
            network_bytes_s=max(0, carried) / span_s,
        )
        return percent

    def _counters(self) -> tuple[float, float, tuple[int, int]]:
        carried = self.link.interface.carried_bytes() if self.link is not None else (0, 0)
        return time.monotonic(), time.process_time(), carried
