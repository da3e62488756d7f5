"""Faults in a simulated pool: aggregators die, jobs' own machines slow down.

Drawn by the seed, at so many a day. A killed aggregator is away for half a second to a minute, so
that some come back before anybody noticed and the buckets of others begin anew elsewhere; one in
five comes back without its memory.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from slackwater.loadgen.simulator.pool.feedback import Feedback
from slackwater.loadgen.simulator.pool.world import World
from slackwater.schemas.base import ClusterId, JobId

DAY_S: Final = 86400.0
AWAY_S: Final = (0.5, 5.0, 60.0)
FORGETS: Final = 0.2
SLOWER: Final = (1.1, 2.0)
SLOW_S: Final = (60.0, 1800.0)


class Faults:
    """`running` names the cluster of each job that runs."""

    def __init__(
        self,
        seed: int,
        world: World,
        feedback: Feedback,
        running: Callable[[], Mapping[JobId, str]],
    ) -> None:
        self._rng = Random(f"faults of seed {seed}")
        self._world, self._feedback, self._running = world, feedback, running
        self.kills = 0
        self.stragglers = 0
        self.slowed: set[JobId] = set()
        """Jobs whose own machines were slow at some time."""

    def plan(self, first_s: float, last_s: float, kills: float, stragglers: float) -> None:
        """Plan that many kills and stragglers a day, at random times."""
        for daily, happen in ((kills, self._kill), (stragglers, self._straggle)):
            at_s = first_s
            while daily and (at_s := at_s + self._rng.expovariate(daily / DAY_S)) < last_s:
                self._world.at(at_s, happen)

    def _kill(self) -> None:
        busy = self._world.busy()
        if busy:
            self.kills += 1
            forget = self._rng.random() < FORGETS
            self._world.kill(self._rng.choice(busy), self._rng.choice(AWAY_S), forget=forget)

    def _straggle(self) -> None:
        running = self._running()
        free = sorted(running.keys() - self._feedback.slow.keys())
        if not free:
            return
        self.stragglers += 1
        job = self._rng.choice(free)
        cluster = ClusterId(running[job])
        self.slowed.add(job)
        self._feedback.slow[job] = self._rng.uniform(*SLOWER)
        self._feedback.changed(cluster)

        def over() -> None:
            del self._feedback.slow[job]
            self._feedback.changed(cluster)

        self._world.at(self._world.now_s + self._rng.uniform(*SLOW_S), over)
