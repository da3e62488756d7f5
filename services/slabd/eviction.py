"""Batch eviction: to free E slabs, ask the owners of E + E' for their activity, take the E least
active (Gu, dissertation, 2.5.2, figure 2.8). The generalised power of choices: bounded talk, and
the chance of finding E lightly active slabs is `light_probability` instead of (1 - p)^E.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb
from random import Random

from slackwater.schemas.memory import SlabId


def candidates(lent: Sequence[SlabId], need: int, extra: int, rng: Random) -> list[SlabId]:
    """E + E' slabs, uniformly at random, E' <= E."""
    return rng.sample(lent, min(len(lent), need + min(extra, need)))


@dataclass(slots=True)
class Round:
    """`answers`: page I/O requests per second, as owners told."""

    need: int
    candidates: tuple[SlabId, ...]
    answers: dict[SlabId, float] = field(default_factory=dict)
    needed: set[SlabId] = field(default_factory=set)

    def least_active(self) -> list[SlabId]:
        """All candidates, least active first. An owner that does not answer is most likely dead:
        its slabs go first. Those that a coded span needs to be read go last."""
        return sorted(
            self.candidates, key=lambda slab: (slab in self.needed, self.answers.get(slab, -1.0))
        )


def light_probability(need: int, extra: int, busy: float) -> float:
    """Return the probability that at least E of E + E' slabs are lightly active, each being busy
    with probability `busy`: sum over i from E to E + E' of C(E + E', i) (1 - p)^i p^(E + E' -
    i)."""
    asked = need + extra
    return sum(
        comb(asked, light) * (1.0 - busy) ** light * busy ** (asked - light)
        for light in range(need, asked + 1)
    )
