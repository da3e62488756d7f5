"""How many aggregators a scaling period really needed (AutoPS section 3.3.3: "according to the
resource demand measured in the latest period")."""

from dataclasses import dataclass
from math import ceil


@dataclass(slots=True)
class Usage:
    """Counts aggregators in use since the period began."""

    since_s: float = -1.0
    last_s: float = 0.0
    in_use: int = 0
    area: float = 0.0
    """Aggregators in use times the seconds for which they were."""
    keep: int = 0
    """The number of aggregators that stay allocated, by the period before."""

    def note(self, in_use: int, now_s: float) -> None:
        if self.since_s < 0.0:
            self.since_s = self.last_s = now_s
        self.area += self.in_use * (now_s - self.last_s)
        self.last_s, self.in_use = now_s, in_use

    def end(self, part: float, now_s: float) -> float:
        """Return the period's mean, keep `part` of it, and begin the next period."""
        self.note(self.in_use, now_s)
        mean = self.area / max(now_s - self.since_s, 1e-9)
        self.keep, self.since_s, self.area = ceil(part * mean - 1e-9), now_s, 0.0
        return mean
