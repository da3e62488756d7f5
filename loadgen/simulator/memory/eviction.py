"""How often batch eviction finds lightly active slabs: drawn, beside the formula.

Gu, dissertation, 2.5.2 and figure 2.7. Each of a lender's slabs is busy with probability p. The
daemon's own code (services/slabd/eviction.py) draws E + E' of them, hears their activity and takes
the E least active; a draw succeeds if none of these is busy.
"""

from math import sqrt
from random import Random
from typing import Final

import msgspec

from slackwater.schemas.memory import SlabId
from slackwater.services.slabd.eviction import Round, candidates, light_probability

NEED: Final = 10
"""E, in the figure."""
EXTRAS: Final = (0, 1, 2, 5, 10)
BUSY: Final = tuple(n / 10 for n in range(1, 10))
DRAWS: Final = 1000
_SLABS: Final = 40
_BUSY_IO: Final = 20.0


class Point(msgspec.Struct):
    """One point of the figure."""

    extra: int
    busy: float
    formula: float
    found: float

    @property
    def deviation(self) -> float:
        """In standard errors of the draws; where the formula leaves no room for chance, 0 or a
        great many."""
        error = sqrt(self.formula * (1.0 - self.formula) / DRAWS)
        return abs(self.found - self.formula) / max(error, 0.5 / DRAWS)


def found_light(need: int, extra: int, busy: float, draws: int, rng: Random) -> float:
    """The share of `draws` evictions that took no busy slab."""
    slabs = [SlabId(f"{n:012x}") for n in range(_SLABS)]
    light = 0
    for _ in range(draws):
        chosen = candidates(slabs, need, extra, rng)
        activity = {slab: rng.random() + (rng.random() < busy) * _BUSY_IO for slab in chosen}
        evicted = Round(need, tuple(chosen), activity).least_active()[:need]
        light += all(activity[slab] < _BUSY_IO for slab in evicted)
    return light / draws


def figure(seed: int) -> list[Point]:
    rng = Random(f"{seed} eviction")
    return [
        Point(
            extra,
            busy,
            light_probability(NEED, extra, busy),
            found_light(NEED, extra, busy, DRAWS, rng),
        )
        for extra in EXTRAS
        for busy in BUSY
    ]
