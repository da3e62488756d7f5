"""Jobs with GPUs beside all else that a simulated system does: gangs that run for a time, and
elastic programs whose number of hosts is changed and whose processes are killed."""

import asyncio
import random
from typing import Final

from tests.sim.elastic import World
from tests.sim.gangs import Elastic, Lasting
from tests.sim.system import GPUS, NODES, System
from tests.sim.test_elastic import Counting, Counts, check

from slackwater.common.base.errors import Rejected
from slackwater.schemas.jobs import JobSpec

POLICIES: Final = ("", "fifo", "tiresias-las", "gandiva", "easy-backfill")
"""Empty: the seed has no GPUs."""
LASTS_S: Final = (5.0, 60.0)
RESTARTS: Final = 100
"""Enough for whatever befalls a job: none may fail."""
ENDS_S: Final = 300.0
"""The last of them is over so long after the faults have ended."""


class LongCounts(Counts):
    """Some minutes of turns."""

    tasks = 250


class GangStory:
    def __init__(self, system: System, rng: random.Random, seed: int) -> None:
        self._system, self._rng, self._seed = system, rng, seed
        self._specs: list[JobSpec] = []
        self._elastic: dict[str, Elastic] = {}

    @property
    def resized(self) -> int:
        """Count the elastic programs that had more than one number of hosts."""
        return sum(len(work.sizes) > 1 for work in self._elastic.values())

    def begin(self) -> None:
        for number in range(self._rng.randint(4, 8)):
            self._system.spawn(self._live(self._gang(number)))
        for number in range(2):
            self._system.spawn(self._live_elastic(self._program(number)))

    def _gang(self, number: int) -> JobSpec:
        gpus = self._rng.choice((1, 1, 2, 4))
        spec = JobSpec(
            id=f"gang{number}", workers=gpus, gpus=gpus, program=("gang",), checkpoint="/gang",
            restarts=RESTARTS,
        )  # fmt: skip
        self._system.works[spec.id] = Lasting(self._rng.uniform(*LASTS_S))
        return spec

    def _program(self, number: int) -> JobSpec:
        spec = JobSpec(
            id=f"elastic{number}", workers=2, gpus=2, gpus_min=1, gpus_max=NODES * GPUS - 2,
            program=("elastic",), checkpoint="/elastic", restarts=RESTARTS,
        )  # fmt: skip
        program = World(Counting(), LongCounts, self._seed + number, hosts=2)
        program.stop_hosts()
        self._elastic[spec.id] = self._system.works[spec.id] = Elastic(program)
        return spec

    async def _live(self, spec: JobSpec) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 300.0))
        self._specs.append(spec)
        await self._system.submit_spec(spec)

    async def _live_elastic(self, spec: JobSpec) -> None:
        await self._live(spec)
        work = self._elastic[spec.id]
        while work.program.finished is None:
            await asyncio.sleep(self._rng.uniform(5.0, 40.0))
            try:
                await self._system.user().scale(spec.id, self._rng.randint(1, spec.gpus_max))
            except Rejected as error:  # It has ended meanwhile, and nothing else may be wrong.
                if self._system.state_of(spec.id) != "completed":
                    raise AssertionError(f"{spec.id}: {error}") from error

    async def kill_process(self) -> None:
        """Kill one process of a gang."""
        alive = [
            rank
            for ranks in self._system.gang_ranks
            for rank in ranks.values()
            if rank.state == "running" and rank.started.job in self._system.works
        ]
        if alive:
            task = self._rng.choice(alive).task
            assert task is not None
            task.cancel()

    async def over(self) -> None:
        """Return once all have ended, as they should."""
        for _ in range(int(ENDS_S)):
            if all(self._system.state_of(spec.id) == "completed" for spec in self._specs):
                break
            await asyncio.sleep(1.0)
        states = {spec.id: self._system.state_of(spec.id) for spec in self._specs}
        assert set(states.values()) <= {"completed"}, states
        assert not self._system.gangs.holders
        for spec in self._specs:
            work = self._system.works[spec.id]
            if isinstance(work, Lasting):
                assert work.left_s == 0.0, f"{spec.id} is over, and has {work.left_s:.1f} s left"
            elif isinstance(work, Elastic):
                work.program.end()
                check(work.program)
