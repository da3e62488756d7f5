"""How many slabs a machine may lend. Pure.

Gu, dissertation, 2.5.1: U_current = beta U_measured + (1 - beta) U_old of the memory that all but
the slabs uses, once a second, and HeadRoom stays free. The average begins with the first sample
(from zero it would lend memory that is in use). What must go is reckoned with the instantaneous
value, what may come with the larger of both: a burst makes room at once, and is not forgotten at
once.
"""

from math import ceil
from typing import Final

from slackwater.common.domains.memory.ewma import Ewma
from slackwater.common.domains.memory.trailer import TRAILER_BYTES
from slackwater.services.slabd.config import SlabdConfig
from slackwater.services.slabd.events import MemorySampled

BETA: Final = 0.2
_SETTLE_SAMPLES: Final = 3
"""No slab is added within so many samples of giving one up."""


class Sizing:
    def __init__(self, config: SlabdConfig) -> None:
        self.average = Ewma(BETA)
        self.total_bytes = config.memory_bytes
        self.others_bytes = 0
        self.pressure = 0.0
        self._config = config
        self._quiet = _SETTLE_SAMPLES

    @property
    def headroom_bytes(self) -> int:
        return self._config.headroom_bytes or self.total_bytes // 8

    @property
    def slab_bytes(self) -> int:
        """Memory of the machine that one slab takes."""
        return self._config.slab_bytes + TRAILER_BYTES

    def used_share(self, lent: int) -> float:
        """Return the share of the machine's memory that everything else and so many slabs take."""
        return (self.others_bytes + lent * self.slab_bytes) / max(1, self.total_bytes)

    def sampled(self, event: MemorySampled, staying: int) -> int:
        """How many of `staying` slabs must go."""
        self.total_bytes = self._config.memory_bytes or event.total_bytes
        self.others_bytes, self.pressure = event.others_bytes, event.pressure
        self.average.add(float(event.others_bytes))
        excess = ceil(staying - self._room(event.others_bytes))
        if event.pressure > self._config.pressure_max:
            excess = max(excess, 1)
        excess = min(max(0, excess), staying)
        self._quiet = 0 if excess else self._quiet + 1
        return excess

    def may_add(self, slabs: int) -> bool:
        """One more beside `slabs`, those on their way out included."""
        if self.average.value is None or self._quiet < _SETTLE_SAMPLES:
            return False
        if self.pressure > self._config.pressure_max:
            return False
        return slabs + 1 <= self._room(max(self.others_bytes, self.average.value))

    def pause(self) -> None:
        """A slab could not be made: wait before the next."""
        self._quiet = 0

    def _room(self, others_bytes: float) -> float:
        """Slabs that fit beside `others_bytes` and HeadRoom; below zero: even that is used."""
        room = (self.total_bytes - self.headroom_bytes - others_bytes) / self.slab_bytes
        if self._config.lend_bytes_max:
            room = min(room, self._config.lend_bytes_max / self.slab_bytes)
        return room
