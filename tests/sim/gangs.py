"""Jobs whose processes hold GPUs of simulated nodes: what they do, and that no GPU has two."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from tests.sim.elastic import World

from slackwater.loadgen.simulator.control.processes import Rank
from slackwater.loadgen.simulator.control.services import Services
from slackwater.services.worker.effects import RunRank

STOPPED: Final = -15
TURN_S: Final = 0.05
"""Seconds between two turns of an elastic program."""


class Work(Protocol):
    """Work of a job, over all its attempts."""

    async def go_on(self, services: Any, rank: RunRank) -> None:
        """Be this rank's process: return at its end. Cancelled where it is told to stop."""
        ...


class Lasting:
    """It runs for so long. Its first rank notes what a stop has left."""

    def __init__(self, duration_s: float) -> None:
        self.left_s = duration_s

    async def go_on(self, services: Services, rank: RunRank) -> None:
        began_s = services.now_s()
        try:
            await asyncio.sleep(self.left_s)
            if rank.rank == 0:
                self.left_s = 0.0
        except asyncio.CancelledError:
            if rank.rank == 0:
                self.left_s -= services.now_s() - began_s
            raise


class Elastic:
    """An elastic program (elastic.py) whose hosts live and die with the job's processes; its driver
    is in rank 0's."""

    def __init__(self, program: World) -> None:
        self.program = program
        self.sizes: set[int] = set()
        """Numbers of hosts that it had."""

    async def go_on(self, services: Services, rank: RunRank) -> None:
        program, number = self.program, rank.rank
        if program.finished is not None:
            return
        try:
            if number == 0:
                program.driver_begins(rank.workers)
            program.host_begins(number)
            while program.finished is None:
                await asyncio.sleep(TURN_S)
                if number == 0 and program.processes:
                    self.sizes.add(len(program.processes))
                    program.turn()
        finally:
            if program.finished is None:
                program.host_dies(number)


class Gangs:
    """The works of jobs by id, and the GPUs that their processes hold."""

    def __init__(self, services: Services, works: Mapping[str, Work]) -> None:
        self.works = works
        self.holders: dict[str, str] = {}
        """GPU -> the job whose process runs on it."""
        self._services = services

    async def run(self, rank: Rank) -> None:
        """Hold its GPUs and do its part of the job's work, until that ends or is stopped."""
        job = rank.started.job
        self._take(job, rank.started.gpu_ids)
        try:
            await self.works[job].go_on(self._services, rank.started)
        except asyncio.CancelledError:
            rank.code = STOPPED
        finally:
            self._leave(job, rank.started.gpu_ids)

    def _take(self, job: str, gpu_ids: Sequence[str]) -> None:
        assert gpu_ids, f"{job} was started without GPUs"
        for id in gpu_ids:
            assert id not in self.holders, f"{id} is held by {self.holders[id]}, given to {job}"
            self.holders[id] = job

    def _leave(self, job: str, gpu_ids: Sequence[str]) -> None:
        for id in gpu_ids:
            assert self.holders.pop(id) == job
