"""Draw the nodes' failures: seeded, and the same under every policy."""

from collections.abc import Iterator
from random import Random

import msgspec


class Failures(msgspec.Struct, frozen=True):
    """Exponential times between failures of a node and of its repair; 0 turns failures off."""

    mtbf_s: float = 0.0
    repair_s: float = 3600.0
    checkpoint_s: float = 0.0
    """A job's progress is safe at each multiple of this since its (re)start; 0: at every instant
    (nothing is lost but the restart)."""
    seed: int = 0

    def outages(self, node: int) -> Iterator[tuple[float, float]]:
        """(lost at, back at) of one node, without end, in whole seconds."""
        rng = Random(f"node {node} of seed {self.seed}")
        now_s = 0
        while self.mtbf_s > 0:
            lost_s = now_s + max(1, round(rng.expovariate(1 / self.mtbf_s)))
            now_s = lost_s + max(1, round(rng.expovariate(1 / self.repair_s)))
            yield lost_s, now_s
