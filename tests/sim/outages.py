"""Partitions, outages, lost writes and set clocks: what befalls a simulated system beside kills.

A swarm: each seed has some of the kinds, so that what one of them hides another seed shows.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from tests.sim.invariants import Peace
from tests.sim.system import System

LASTS_S: Final = (1.0, 3.0, 8.0, 14.0)
"""The last two are longer than a service waits for its next heartbeat, or holds a lease."""
SETTLES_S: Final = 10.0
"""Seconds after an outage in which services come back to one another."""
LOST_WRITES: Final = 0.1
CLOCK_STEP_S: Final = 3600.0


class Outages:
    """Brings one about at each call of a kind, and returns once it is over."""

    def __init__(
        self,
        system: System,
        peace: Peace,
        rng: random.Random,
        others: Callable[[], Sequence[str]],
    ) -> None:
        """`others`: the clients of the bus, now, beside the system's services."""
        self._system, self._peace, self._rng, self._others = system, peace, rng, others
        self.seen: dict[str, int] = {}
        kinds: dict[str, Callable[[float], Awaitable[None]]] = {
            "isolated": self._isolate,
            "cut": self._cut,
            "bus": self._stop_bus,
            "store": self._stop_store,
            "lost": self._lose_writes,
            "clock": self._step_clock,
        }
        chosen = rng.sample(sorted(kinds), rng.randint(1, len(kinds)))
        self.kinds = {name: kinds[name] for name in chosen}

    async def one(self) -> None:
        """Bring about one of this seed's kinds."""
        name = self._rng.choice(sorted(self.kinds))
        for_s = self._rng.choice(LASTS_S)
        self._peace.disturb(for_s + SETTLES_S)
        self.seen[name] = self.seen.get(name, 0) + 1
        await self.kinds[name](for_s)

    def _clients(self) -> list[str]:
        aggregators = (f"aggregator-{id}" for id in self._system.lives.ids)
        return sorted({*self._system.definitions, *aggregators, *self._others()})

    async def _isolate(self, for_s: float) -> None:
        """One service hears nobody, and nobody hears it; the store does neither. The channels of an
        aggregator break, too, or not: they may take another way."""
        name = self._rng.choice(self._clients())
        address = name.removeprefix("aggregator-")
        cut = address in self._system.lives.ids and self._rng.random() < 0.5
        if cut:
            self._system.network.cut(address)
        self._system.faults.isolate(name)
        self._system.store_faults.isolated.add(name)
        await asyncio.sleep(for_s)
        self._system.faults.heal()
        self._system.store_faults.isolated.clear()
        if cut:
            self._system.network.heal(address)

    async def _cut(self, for_s: float) -> None:
        """Two services do not hear one another."""
        self._system.faults.cut(*self._rng.sample(self._clients(), 2))
        await asyncio.sleep(for_s)
        self._system.faults.heal()

    async def _stop_bus(self, for_s: float) -> None:
        self._system.sim.broker.stop()
        await asyncio.sleep(for_s)
        self._system.sim.broker.start()

    async def _stop_store(self, for_s: float) -> None:
        self._system.sim.storage.stop()
        await asyncio.sleep(for_s)
        self._system.sim.storage.start()

    async def _lose_writes(self, for_s: float) -> None:
        self._system.store_faults.lost = LOST_WRITES
        await asyncio.sleep(for_s)
        self._system.store_faults.lost = 0.0

    async def _step_clock(self, _: float) -> None:
        """A service is killed, and starts on a machine whose clock was set meanwhile."""
        name = self._rng.choice(sorted(self._system.definitions))
        await self._system.kill(name)
        steps = (-CLOCK_STEP_S, 0.0, CLOCK_STEP_S)
        self._system.sim.clock_offsets_s[name] = self._rng.choice(steps)
        await asyncio.sleep(0.2)
        self._system.start(name)
