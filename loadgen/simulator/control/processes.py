"""The processes of a worker service in virtual time: a fake of services/worker/processes.py.

Each rank is a task that the simulation gives. Its files outlive the worker service, as on a disk.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slackwater.common.shell import ServiceDefinition
from slackwater.common.shell.definition import Port
from slackwater.common.shell.effect_runner import handlers, on
from slackwater.common.shell.world import World
from slackwater.loadgen.simulator.control.services import Services
from slackwater.schemas.base import JobId, Refused
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.hangs import RankLook, RankLooked
from slackwater.schemas.logs import LogPiece
from slackwater.schemas.terminals import no_terminal
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.effects import (
    AwaitEnd,
    FindProcesses,
    ForgetRank,
    LookAtProcesses,
    LookAtProgram,
    ReadRankLog,
    RunRank,
    SignalRank,
    TypeAtTerminal,
    WatchRank,
    WorkerAction,
)
from slackwater.services.worker.events import (
    AnswerReady,
    Found,
    ProcessesFound,
    ProcessExited,
    ProgramLooked,
)
from slackwater.services.worker.shell import definition as worker_definition


@dataclass(eq=False)
class Rank:
    """A process, as its files tell of it."""

    started: RunRank
    state: Any = "running"
    code: int = 0
    result: str = ""
    task: asyncio.Task[None] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def found(self) -> Found:
        asked = self.started
        return Found(
            asked.job, asked.rank, self.state, asked.workers, asked.program, self.code, self.result,
            asked.attempt, gpu_ids=asked.gpu_ids, rendezvous=asked.rendezvous,
        )  # fmt: skip


Ranks = dict[tuple[JobId, int], Rank]
"""(job, rank) -> its newest attempt on one node."""

Run = Callable[[Rank], Coroutine[Any, Any, None]]
"""Runs a rank until it ends or is cancelled (a signal), and writes its code and result."""


class Processes:
    """Handlers of one life of a node's worker service."""

    def __init__(self, services: Services, ranks: Ranks, run: Run) -> None:
        self._services, self._ranks, self._run = services, ranks, run
        self._port: Port | None = None

    def of(self, made: ServiceDefinition) -> ServiceDefinition:
        """Return the worker service with these processes in place of the machine's."""
        return dataclasses.replace(
            made,
            handlers=handlers(
                WorkerAction,
                on(FindProcesses, self.find),
                on(LookAtProgram, self.look_at_program),
                on(RunRank, self.run),
                on(WatchRank, self.watch),
                on(SignalRank, self.signal),
                on(ForgetRank, self.forget),
                on(AwaitEnd, self.await_end),
                on(ReadRankLog, self.read),
                on(LookAtProcesses, self.look_at),
                on(TypeAtTerminal, self.type),
            ),
            on_start=self.start,
            on_stop=self.stop,
            tasks=(),
        )

    async def start(self, port: Port) -> None:
        self._port = port

    async def stop(self) -> None:
        pass

    def find(self, _: FindProcesses) -> ProcessesFound:
        return ProcessesFound(tuple(rank.found() for _, rank in sorted(self._ranks.items())))

    def look_at_program(self, effect: LookAtProgram) -> ProgramLooked:
        return ProgramLooked(effect.token, effect.job, effect.attempt, "", "localhost", 29500)

    def run(self, effect: RunRank) -> None:
        assert not effect.folder, "a simulated program runs nowhere"
        rank = self._ranks[effect.job, effect.rank] = Rank(effect)
        rank.task = self._services.spawn(self._live(rank))
        self._services.spawn(self._follow(rank))

    async def _live(self, rank: Rank) -> None:
        try:
            await self._run(rank)
        finally:
            rank.state = "exited"
            rank.over.set()

    def watch(self, effect: WatchRank) -> None:
        self._services.spawn(self._follow(self._ranks[effect.job, effect.rank]))

    async def _follow(self, rank: Rank) -> None:
        await rank.over.wait()
        assert self._port is not None
        ran = rank.started
        self._port.post(ProcessExited(ran.job, ran.rank, rank.code, rank.result, ran.attempt))

    def signal(self, effect: SignalRank) -> None:
        task = self._ranks[effect.job, effect.rank].task
        assert task is not None
        task.cancel()

    async def await_end(self, _: AwaitEnd) -> None:
        pass

    def forget(self, effect: ForgetRank) -> None:
        rank = self._ranks[effect.job, effect.rank]
        if rank.started.attempt == effect.attempt:
            rank.state = "reported"

    def look_at(self, effect: LookAtProcesses) -> AnswerReady:
        looked = RankLooked(job=effect.job, rank=effect.rank, look=RankLook(state="S"))
        return AnswerReady(effect.token, looked)

    def read(self, effect: ReadRankLog) -> AnswerReady:
        """Return an empty log: a simulated program prints nothing."""
        asked = effect.asked
        empty = LogPiece(job=asked.job, rank=asked.rank, start=0, ended=True)
        return AnswerReady(effect.token, empty)

    def type(self, effect: TypeAtTerminal) -> AnswerReady:
        """Refuse: a simulated program has no terminal."""
        return AnswerReady(
            effect.token, Refused(reason=no_terminal("a simulated node", effect.asked))
        )


def node(
    services: Services, ranks: Ranks, run: Run, name: str, gpus: int
) -> Callable[[World], ServiceDefinition]:
    """Return how the worker service of a node with so many GPUs is made. `ranks` outlive it."""
    inventory = tuple(Gpu(index=n, id=f"{name}/{n}", type="fake") for n in range(gpus))

    def define(world: World) -> ServiceDefinition:
        made = worker_definition(WorkerConfig(id=name, keep_jobs=True), world)
        beat = made.heartbeat
        assert beat is not None

        def heartbeat(now_s: float) -> WorkerHeartbeat:
            told = beat(now_s)
            assert isinstance(told, WorkerHeartbeat)
            return msgspec.structs.replace(told, gpus=inventory)

        simulated = Processes(services, ranks, run).of(made)
        return dataclasses.replace(simulated, heartbeat=heartbeat, service_gauges=tuple)

    return define
