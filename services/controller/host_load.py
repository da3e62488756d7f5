"""How much of their time aggregators really have, beside other work on their machines (AutoPS
section 4.3.1: availability of CPU is measured, and assignments are adjusted to it).

Heartbeats tell how many cores of the machine are in use, and how many of these the aggregator
itself uses. What is left without all its aggregators is other work. A scheduler of an operating
system shares fairly: where both together want more than the machine has, an aggregator of whole
cores gets cores / (other work + all shares of the machine) of its own. One of less than a core is
not touched: fair sharing gives a small demand all of it.

Noise does not decide (docs/adr/0013). What counts is the median of the last `host_s` seconds, so
that other work which takes less than half of them counts for nothing, and what follows from it
stays until it is off by more than STEP.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from slackwater.common.base.limits import LOST_AFTER_S
from slackwater.schemas.base import NodeId
from slackwater.schemas.cluster import AggregatorHeartbeat

STEP: Final = 0.1
SAMPLE_S: Final = 1.0
SAMPLES_MAX: Final = 600


@dataclass(slots=True)
class _Host:
    said: dict[str, tuple[AggregatorHeartbeat, float]] = field(default_factory=dict)
    """Aggregator -> its last report, and when it came."""
    samples: deque[tuple[float, float]] = field(default_factory=deque)
    """(when, cores that other work used)"""
    usable: float = 1.0


def fair_part(cores: float, other: float, shares: float) -> float:
    """Return the part of their shares that aggregators get beside other work."""
    return min(1.0, cores / max(other + shares, 1e-9))


class Hosts:
    """Keeps what machines' other work leaves to aggregators. `host_s`: the seconds that count; 0:
    other work does not count."""

    def __init__(self, host_s: float) -> None:
        self._host_s = host_s
        self._sample_s = max(SAMPLE_S, host_s / SAMPLES_MAX)
        self._hosts: dict[NodeId, _Host] = {}

    def heard(self, said: AggregatorHeartbeat, now_s: float) -> float | None:
        """Return the part of its time that an aggregator of that machine has from now on, if that
        has changed."""
        if not self._host_s or not said.host_cores:
            return None
        host = self._hosts.setdefault(said.node, _Host())
        host.said[said.id] = (said, now_s)
        if host.samples and now_s - host.samples[-1][0] < self._sample_s:
            return None
        for id in [id for id, (_, at_s) in host.said.items() if now_s - at_s > LOST_AFTER_S]:
            del host.said[id]
        present = [each for each, _ in host.said.values()]
        other = max(0.0, said.host_cpu - sum(each.own_cpu for each in present))
        host.samples.append((now_s, other))
        while host.samples[0][0] < now_s - self._host_s:
            host.samples.popleft()
        if now_s - host.samples[0][0] < self._host_s / 2.0:
            return None  # Too early to tell.
        steady = median(other for _, other in host.samples)
        part = fair_part(said.host_cores, steady, sum(each.cpu_share for each in present))
        if part == host.usable or (part < 1.0 and abs(part - host.usable) <= STEP):
            return None
        host.usable = part
        return part

    def usable(self, said: AggregatorHeartbeat | None) -> float:
        """Return the part of its time that the aggregator has."""
        if said is None or said.cpu_share < 1.0 or said.node not in self._hosts:
            return 1.0
        return self._hosts[said.node].usable
