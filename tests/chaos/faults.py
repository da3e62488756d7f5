"""Faults of a cluster that clients use, one after another, each drawn by a seed."""

import asyncio
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.chaos.load import Load

from slackwater.common.embedded import EmbeddedCluster

BACK_S: Final = 30.0
"""Seconds within which a submission must be taken again."""
PAUSE_S: Final = (0.2, 15.0)
POINT_S: Final = 15.0
"""Seconds within which a failpoint must be passed."""
SETTLE_S: Final = 2.0
"""Seconds in which a delay or an error at a failpoint shows what it does."""
GAP_S: Final = (0.2, 1.0)
"""Seconds between the end of one fault and the next."""


@dataclass
class Faults:
    """Brings them about, and measures for how long no submission was taken after each."""

    cluster: EmbeddedCluster
    load: Load
    rng: random.Random
    back_s: dict[str, list[float]] = field(default_factory=dict)
    """Fault -> seconds from it until a submission was taken that was called after it."""
    at_s: list[float] = field(default_factory=list)
    """When each kill was, and each end of a pause."""
    not_passed: list[str] = field(default_factory=list)
    """Failpoints that the unit did not come to: nothing is proved of them."""
    rates: list[float] = field(default_factory=list)
    """Submissions a second that were called between two faults."""

    async def run(self, kinds: Sequence[str], times: int) -> None:
        """Bring about `times` faults of the kinds in turns: `kill:UNIT`, `pause:UNIT`, or
        `point:UNIT:NAME=ACTION@N`, which arms a failpoint of the unit's next life."""
        for number in range(times):
            kind = kinds[number % len(kinds)]
            await self._calm()
            what, _, rest = kind.partition(":")
            unit, _, armed = rest.partition(":")
            if what == "point":
                await self._point(unit, armed)
                continue
            self.back_s.setdefault(kind, []).append(await self._fault(what, unit))

    async def _calm(self) -> None:
        began_s, before = time.monotonic(), self.load.sent
        await asyncio.sleep(self.rng.uniform(*GAP_S))
        self.rates.append((self.load.sent - before) / (time.monotonic() - began_s))

    async def _fault(self, what: str, unit: str) -> float:
        supervisor = self.cluster.supervisor
        await self._until(lambda: self._state(unit) == "ready", f"{unit} is not ready again")
        if what == "kill":
            supervisor.kill(unit, signal.SIGKILL)
        else:
            supervisor.kill(unit, signal.SIGSTOP)
            await asyncio.sleep(self.rng.uniform(*PAUSE_S))
            supervisor.kill(unit, signal.SIGCONT)
        at_s, seen = time.monotonic(), len(self.load.taken)
        self.at_s.append(at_s)
        later: list[float] = []

        def taken_again() -> bool:
            nonlocal seen
            fresh, seen = self.load.taken[seen:], len(self.load.taken)
            later.extend(call.returned_s for call in fresh if call.called_s > at_s)
            return bool(later)

        await self._until(taken_again, f"after {what}:{unit} no submission is taken")
        return min(later) - at_s

    async def _point(self, unit: str, armed: str) -> None:
        """Arm a failpoint and wait until it has been passed: the unit ends by it, or says so. One
        that is not passed in time is noted."""
        supervisor, name = self.cluster.supervisor, armed.partition("=")[0]
        await self._until(lambda: self._state(unit) == "ready", f"{unit} is not ready again")
        before = self._restarts(unit)
        supervisor.arm(unit, armed)
        supervisor.kill(unit, signal.SIGKILL)
        await self._until(lambda: self._restarts(unit) > before, f"{unit} is not started again")
        self.at_s.append(time.monotonic())
        if name.endswith(("drain.before", "release.before")):
            await self._until(lambda: self._state(unit) == "ready", f"{unit} is not ready again")
            supervisor.kill(unit, signal.SIGTERM)
        if "=kill@" not in armed:
            await asyncio.sleep(SETTLE_S)
        elif not await self._within(POINT_S, lambda: self._restarts(unit) >= before + 2):
            self.not_passed.append(armed)
        await self._until(lambda: self._state(unit) == "ready", f"{unit} is not ready again")

    def _restarts(self, unit: str) -> int:
        return {each.name: each.restarts for each in self.cluster.supervisor.status()}[unit]

    def _state(self, unit: str) -> str:
        return {each.name: each.state for each in self.cluster.supervisor.status()}[unit]

    async def _until(self, true: Callable[[], bool], otherwise: str) -> None:
        assert await self._within(BACK_S, true), f"{otherwise} within {BACK_S:g} s"

    async def _within(self, seconds: float, true: Callable[[], bool]) -> bool:
        until_s = time.monotonic() + seconds
        while not true():
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(0.01)
        return True
