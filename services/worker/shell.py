"""The worker service's shell: carries out what its core decides about processes."""

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from slackwater.common.base import limits
from slackwater.common.base.background import Tasks
from slackwater.common.base.errors import Fatal
from slackwater.common.base.failpoints import failpoint
from slackwater.common.bus.base import Bus
from slackwater.common.bus.relay import TICKET
from slackwater.common.native import cgroup
from slackwater.common.native.cgroup import FOR_MEMORY, LOOK_S, MemoryKills
from slackwater.common.shell.definition import Port, ServiceDefinition
from slackwater.common.shell.effect_runner import handlers, on
from slackwater.common.shell.world import World
from slackwater.common.store.objects import Objects
from slackwater.schemas.base import RUN_ATTEMPTS, JobId, NodeId
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.hangs import LookAtRank, RankLooked
from slackwater.schemas.logs import ReadLog
from slackwater.schemas.relay import RelayHello
from slackwater.schemas.terminals import SOCKET, TypeIn, keeps_terminal
from slackwater.schemas.workers import (
    RESERVED_S,
    PrepareWorkers,
    StartWorkers,
    StopWorkers,
    room_s,
)
from slackwater.services.worker import stacks
from slackwater.services.worker.accounts import Accounts, at_home, give, make_room
from slackwater.services.worker.code import CodeMissing, CodeStore
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.containment import Containment
from slackwater.services.worker.core import WorkerCore
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
from slackwater.services.worker.environment import look, rank_environment, short_of_room
from slackwater.services.worker.events import (
    AnswerReady,
    JobsPruned,
    ProcessesFound,
    ProcessExited,
    ProgramLooked,
    RoomLooked,
)
from slackwater.services.worker.gauges import service_gauges
from slackwater.services.worker.gone import gone
from slackwater.services.worker.gpus import LOOK_S as GPU_LOOK_S
from slackwater.services.worker.gpus import GpuHeld, Inventory, nvidia
from slackwater.services.worker.logreader import LogReader, until_logged
from slackwater.services.worker.permit_server import permit_server
from slackwater.services.worker.ports import KeptPorts
from slackwater.services.worker.processes import (
    Identity,
    Intent,
    RankFiles,
    Watched,
    asked_memory,
    find,
)
from slackwater.services.worker.pruning import Pruner, Retention
from slackwater.services.worker.relay import Relay
from slackwater.services.worker.terminals import Terminals
from slackwater.services.worker.tokens import is_token, open_ticket
from slackwater.services.worker.traffic import TrafficWatch
from slackwater.services.worker.venvs import VenvStore
from slackwater.services.worker.warm import Warm, at_once

_log = structlog.get_logger()
_POLL_S = 0.005
LOOKS_MAX: Final = 4
RELAY: Final = "relay.sock"
"""The socket of programs, in the service's state folder."""
CODE_GPU_HELD = 126
"""A rank's exit code where another process holds its GPU: its program was not started."""
_LAUNCH_S = 10.0
"""From fork to the leader's first file: two milliseconds, on a very busy machine a second."""


class Processes:
    """Handlers of the core's effects that concern processes."""

    def __init__(
        self,
        config: WorkerConfig,
        inventory: Inventory,
        bus: Bus,
        memory_kills: MemoryKills | None = None,
        objects: Objects | None = None,
    ) -> None:
        self._config, self._inventory = config, inventory
        self._node = NodeId(config.node or config.id)
        self._memory_kills = memory_kills or MemoryKills()
        self._state_dir = Path(config.state_dir)
        keep = Retention(config.jobs_kept_max, config.jobs_kept_s, config.jobs_kept_bytes)
        self._pruner = Pruner(self._state_dir, keep)
        self._containment = Containment(self._state_dir, cgroup.own() if config.cgroups else None)
        self._accounts = Accounts(config.accounts)
        self._code = CodeStore(self._state_dir, objects)
        self._venvs = VenvStore(self._state_dir, objects, config.venvs_bytes_max)
        self._ports = KeptPorts()
        self._watched: dict[tuple[str, int], Watched] = {}
        self._tasks = Tasks(self._failed)
        self._looks = ThreadPoolExecutor(LOOKS_MAX, "look")
        """Looks at users' folders, which may be on a file server that does not answer."""
        self.warm = Warm(config, begins=at_once(config, inventory.watched))
        self._starting: dict[tuple[str, int], bool | None] = {}
        """Ranks whose first process is not known yet, with the signal that is due then; True: a
        kill."""
        self._port: Port | None = None
        relay, mode = self._state_dir.absolute() / RELAY, 0o666 if config.accounts else 0o600
        self.permits = permit_server(config)
        self._relay = Relay(
            relay, bus, self._known, self._count, self.permits, mode, asked_memory(self._state_dir)
        )
        self._traffic = TrafficWatch(config, bus, self._containment, self._relay, self._watched)

    async def start(self, port: Port) -> None:
        (self._state_dir / "jobs").mkdir(parents=True, exist_ok=True)
        self._port = port
        self._accounts.check(self._state_dir.absolute())
        await self._relay.start()

    async def stop(self) -> None:
        await self._tasks.close()
        self._looks.shutdown(wait=False, cancel_futures=True)
        self._ports.close()
        await self._relay.stop()

    @property
    def tasks(self) -> tuple[Callable[[Port], Coroutine[Any, Any, None]], ...]:
        """List what runs as long as the service lasts."""
        common = self.look_for_kills, self.look_for_room, self.look_at_gpus, self.prune
        always = (*common, self._traffic.keep)
        return always if self._config.warm == "off" else (*always, self.keep_warm)

    async def keep_warm(self, port: Port) -> None:
        """Keep a process from which ranks are forked."""
        await self.warm.keep()

    async def look_for_kills(self, port: Port) -> None:
        """Keep in mind how often the kernel killed for memory until a moment ago."""
        while True:
            self._memory_kills.look(time.monotonic())
            await asyncio.sleep(LOOK_S)

    async def prune(self, port: Port) -> None:
        """Remove the files of jobs that ended long ago, as long as the service lasts."""
        while True:
            await asyncio.sleep(limits.WORKER_PRUNE_S)
            jobs = await asyncio.to_thread(self._pruner.prune, port.now_s())
            if jobs:
                port.post(JobsPruned(jobs))

    async def look_for_room(self, port: Port) -> None:
        """Tell the core when the disk gets full, and when it has room again."""
        told = ""
        while True:
            found = short_of_room(self._state_dir)
            if found != told:
                told = found
                port.post(RoomLooked(found))
            await asyncio.sleep(limits.WORKER_ROOM_S)

    async def look_at_gpus(self, port: Port) -> None:
        """Ask the driver for the GPUs now and then, and log what became of them."""
        while self._inventory.watched:
            ours = await asyncio.to_thread(self._containment.processes)
            for gpu in await asyncio.to_thread(self._inventory.look, ours, port.now_s()):
                if gpu.fault:
                    _log.warning("gpu.fault", gpu=gpu.id, index=gpu.index, reason=gpu.fault)
                else:
                    _log.info("gpu.healthy", gpu=gpu.id, index=gpu.index, type=gpu.type)
            await asyncio.sleep(GPU_LOOK_S)

    # Handlers -------------------------------------------------------------------------------------

    def find(self, _: FindProcesses) -> ProcessesFound:
        assert self._port is not None
        now_s = self._port.now_s()
        self._pruner.prune(now_s)
        found = find(self._state_dir)
        lives = [each for each in found if each.state in ("intended", "running")]
        self._containment.end_strangers([(e.job, e.rank, e.attempt) for e in lives], now_s)
        self._accounts.adopt(self._state_dir, lives)
        self._venvs.clean()
        for each in lives:
            self._venvs.hold((each.job, each.rank, each.attempt), each.venv)
        return ProcessesFound(found)

    async def look_at_program(self, effect: LookAtProgram) -> ProgramLooked:
        folder = self._code.folder(effect.job, effect.pack, effect.folder)
        loop = asyncio.get_running_loop()
        try:
            await self._venvs.provide(effect.venv)
            await self._code.provide(effect.job, effect.pack)
            asked = effect.program, folder, effect.path, self._venvs.folder(effect.venv)
            why, digest = await loop.run_in_executor(self._looks, look, *asked)
        except CodeMissing as error:
            why, digest = str(error), ""
        host = self._config.address or socket.gethostname()
        kept_s = room_s(effect.pack, effect.venv)
        port = self._meeting_port(effect.job, effect.attempt, kept_s)
        return ProgramLooked(effect.token, effect.job, effect.attempt, why, host, port, digest)

    def run(self, effect: RunRank) -> None:
        job, rank, attempt = effect.job, effect.rank, effect.attempt
        if effect.together and not effect.rendezvous:
            port = self._meeting_port(job, attempt // RUN_ATTEMPTS, RESERVED_S)
            effect = dataclasses.replace(effect, rendezvous=f"127.0.0.1:{port}")
        files = RankFiles(self._state_dir, job, rank, attempt)
        intent = Intent.of(effect, self._code.folder(job, effect.pack, effect.folder))
        held: list[int] = []
        try:
            failpoint("worker.intend.before")
            held = self._inventory.claim(effect.gpu_ids)
            account = self._accounts.take(job, rank)
            intent = msgspec.structs.replace(intent, account=account)
            files.intend(intent)
            make_room(files, account)
            environment = self._environment(effect, files, account)
            held.append(open_ticket(files, self._relay.path, account, self._config.tls.ca))
            environment[TICKET] = str(held[-1])
            held.insert(0, files.open_log(self._config.log_bytes_max))
            if account:  # Else /dev/stdout is not its own to open.
                os.fchown(held[0], account, account)
        except (GpuHeld, OSError) as error:
            for descriptor in held:
                os.close(descriptor)
            self._not_started(intent, error)
            return
        self._starting[job, rank] = None
        self._venvs.hold((job, rank, attempt), effect.venv)
        self._tasks.spawn(self._start(files, intent, environment, held))

    def _meeting_port(self, job: JobId, attempt: int, kept_s: float) -> int:
        ranks = (*self._watched, *self._starting)
        return self._ports.take(job, attempt, ranks, time.monotonic(), kept_s)

    def _environment(self, effect: RunRank, files: RankFiles, account: int) -> dict[str, str]:
        venv = self._venvs.folder(effect.venv)
        result = files.of_program("result.json")
        made = rank_environment(effect, self._config, self._node, result, venv)
        if keeps_terminal(effect.program):
            made[SOCKET] = str(files.of_program("terminal").absolute())
        mark = self._containment.environment(effect.job, effect.rank, effect.attempt)
        made |= stacks.environment(files.path("stacks"), made)
        return at_home(made, effect.env, files.path("own"), account) | mark

    async def _start(
        self, files: RankFiles, intent: Intent, environment: dict[str, str], held: list[int]
    ) -> None:
        """Start the rank, warm if possible, and follow it. `held`: what it prints to, and the locks
        of its GPUs."""
        child: subprocess.Popen[bytes] | None = None
        try:
            await self._venvs.provide(intent.venv)
            await self._code.provide(files.job, intent.pack)
            if intent.pack:
                copy = Path(self._code.folder(files.job, intent.pack, ""))
                await asyncio.to_thread(give, copy, intent.account)
            failpoint("worker.start.before")
            if not await self._forked(files, intent, environment, held):
                child = files.start(intent, environment, held[0], held[1:])
            failpoint("worker.start.after")
        except (CodeMissing, OSError, ValueError) as error:  # An old intention's NUL.
            del self._starting[files.job, files.rank]
            self._not_started(intent, error)
            return
        finally:
            for descriptor in held:
                os.close(descriptor)
        assert self._port is not None
        self._port.count("ranks_started")
        if child is None:
            self._port.count("ranks_forked")
        if intent.attempt:
            self._port.count("ranks_restarted")
        await self._follow(files, child)

    async def _forked(
        self, files: RankFiles, intent: Intent, environment: dict[str, str], held: list[int]
    ) -> bool:
        mode = self._config.warm
        if mode == "off" or (mode == "auto" and not intent.gpu_ids):
            return False
        return await self.warm.fork(files, intent, environment, held)

    def _not_started(self, intent: Intent, error: Exception) -> None:
        self._accounts.free(RankFiles(self._state_dir, intent.job, intent.rank))
        self._venvs.release((intent.job, intent.rank, intent.attempt))
        self._containment.drop(intent.job, intent.rank, intent.attempt)
        code, reason = CODE_GPU_HELD, str(error)
        if isinstance(error, CodeMissing):
            code = 127
        elif not isinstance(error, GpuHeld):
            folder = intent.folder
            where = f" in {folder} (submit with --folder one that its node has)" if folder else ""
            code, reason = 127, f"cannot start {intent.program[0]}{where}: {error}"
        self._post(ProcessExited(JobId(intent.job), intent.rank, code, reason, intent.attempt))

    def watch(self, effect: WatchRank) -> None:
        files = RankFiles(self._state_dir, effect.job, effect.rank, effect.attempt)
        self._tasks.spawn(self._follow(files, None))

    def signal(self, effect: SignalRank) -> None:
        watched = self._watched.get((effect.job, effect.rank))
        if watched is None:
            key = effect.job, effect.rank
            if key in self._starting:
                self._starting[key] = effect.kill or self._starting[key] is True
            return
        watched.files.signal_group(watched.identity, effect.kill)
        if effect.kill:
            asked = effect.job, effect.rank, watched.files.attempt
            self._tasks.spawn(self._kill_all(*asked))

    async def _kill_all(self, job: str, rank: int, attempt: int) -> None:
        """Look for the rank's processes off the loop: that reads each environment in /proc."""
        await asyncio.to_thread(self._containment.kill, job, rank, attempt)

    async def look_at(self, effect: LookAtProcesses) -> AnswerReady:
        job, rank, attempt = effect.job, effect.rank, effect.attempt
        pids = await asyncio.to_thread(self._containment.processes_of, job, rank, attempt)
        files = RankFiles(self._state_dir, job, rank, attempt)
        look = await asyncio.to_thread(stacks.look, pids, files.path("stacks"))
        look = msgspec.structs.replace(look, log_bytes=await asyncio.to_thread(files.log.end))
        return AnswerReady(effect.token, RankLooked(job=job, rank=rank, look=look))

    async def await_end(self, _: AwaitEnd) -> None:
        await self._tasks.ended()

    def forget(self, effect: ForgetRank) -> None:
        failpoint("worker.forget.before")
        RankFiles(self._state_dir, effect.job, effect.rank, effect.attempt).forget()
        failpoint("worker.forget.after")

    # Owners of processes --------------------------------------------------------------------------

    def _known(self, hello: RelayHello, pid: int, uid: int) -> bool:
        who = hello.job, hello.rank, hello.attempt
        known = is_token(RankFiles(self._state_dir, *who), hello.token, uid)
        return known and self.holds(pid, *who)

    def holds(self, pid: int, job: str, rank: int, attempt: int) -> bool:
        """Tell whether the process is one of the rank's."""
        return self._containment.holds(pid, job, rank, attempt)

    # A process's life -----------------------------------------------------------------------------

    def _post(self, event: ProcessExited) -> None:
        assert self._port is not None
        self._port.post(event)

    def _count(self, name: str) -> None:
        assert self._port is not None
        self._port.count(name)

    def _failed(self, _: str, error: BaseException) -> None:
        assert self._port is not None
        self._port.fail(error)

    async def _follow(self, files: RankFiles, child: subprocess.Popen[bytes] | None) -> None:
        """Follow the process until it has ended; then report its outcome to the core."""
        identity = await self._identified(files, child)
        due = self._starting.pop((files.job, files.rank), None)
        if identity is not None:
            watched = Watched(files, identity, child)
            self._watched[files.job, files.rank] = watched
            if due is not None:
                self.signal(SignalRank(JobId(files.job), files.rank, kill=due))
            await gone(identity.pid, identity.alive)
            self._relay.ended((files.job, files.rank, files.attempt))
            await self._end_left_behind(files, identity)
            del self._watched[files.job, files.rank]
        self._accounts.free(files)
        self._venvs.release((files.job, files.rank, files.attempt))
        if child is not None:
            child.wait()
        await until_logged(files)
        code, result = files.outcome()
        if code in (None, -signal.SIGKILL) and self._memory_kills.rose():
            code = -signal.SIGKILL
            result = f"{FOR_MEMORY}; its log ends with: {files.log.last_line() or 'nothing'}"
        assert self._port is not None
        failed = code is None or code
        self._port.count("ranks_failed" if failed else "ranks_ok")
        failpoint("worker.exit.before")
        self._post(ProcessExited(JobId(files.job), files.rank, code, result, files.attempt))

    async def _end_left_behind(self, files: RankFiles, identity: Identity) -> None:
        """End the processes that the program left behind: its GPUs and its slot are free after."""
        files.signal_group(identity, kill=True)
        asked = files.job, files.rank, files.attempt
        while not await asyncio.to_thread(self._containment.end, *asked):
            _log.warning("processes.left", job=files.job, rank=files.rank)

    async def _identified(
        self, files: RankFiles, child: subprocess.Popen[bytes] | None
    ) -> Identity | None:
        """Wait for the identity of the rank's first process; None if its launch failed before that
        was known. A child that ended at once may have found another running, started by a service
        that was killed since."""
        deadline_s = asyncio.get_running_loop().time() + _LAUNCH_S
        while (identity := files.identity()) is None:
            if child is None or child.poll() is not None:
                written = files.path("process").exists() and files.code() is None
                if not written or asyncio.get_running_loop().time() > deadline_s:
                    return files.identity()
                await asyncio.sleep(_POLL_S)
                continue
            if asyncio.get_running_loop().time() > deadline_s:
                child.kill()
                raise Fatal(f"job {files.job}, rank {files.rank}: /bin/sh did not come up")
            await asyncio.sleep(_POLL_S)
        return identity


def definition(config: WorkerConfig, world: World) -> ServiceDefinition:
    node = NodeId(config.node or config.id)
    core = WorkerCore(node, config.slots, config.stop_grace_s, config.keep_jobs)
    inventory = Inventory(config, node, nvidia() if config.gpus == "auto" else None)
    inventory.look(frozenset(), world.clock.now_s())
    processes = Processes(config, inventory, world.bus, objects=world.objects)
    cores = config.cores or float(len(os.sched_getaffinity(0)))
    memory_bytes = config.memory_bytes or cgroup.memory_bytes()
    logs = LogReader(node, Path(config.state_dir))
    terminals = Terminals(node, Path(config.state_dir), processes.holds, logs.typed)

    async def opened(port: Port) -> None:
        logs.stopping = port.stopping
        await processes.start(port)

    def heartbeat(now_s: float) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            service="worker", id=config.id, incarnation=0, at_s=now_s, node=node,
            slots=config.slots, running=core.running(), gpus=inventory.gpus, cores=cores,
            memory_bytes=memory_bytes, rack=config.rack, cordoned=config.cordoned,
            turns=processes.permits.turns(node),
        )  # fmt: skip

    return ServiceDefinition(
        service="worker",
        id=config.id,
        core=core,
        description="Starts and stops the processes of jobs on one machine.",
        endpoints={
            "prepare": PrepareWorkers,
            "start": StartWorkers,
            "stop": StopWorkers,
            "log": ReadLog,
            "look": LookAtRank,
            "type": TypeIn,
        },
        concurrency={"log": limits.LOG_READERS_MAX},
        handlers=handlers(
            WorkerAction,
            on(FindProcesses, processes.find),
            on(LookAtProgram, processes.look_at_program),
            on(RunRank, processes.run),
            on(WatchRank, processes.watch),
            on(SignalRank, processes.signal),
            on(ForgetRank, processes.forget),
            on(AwaitEnd, processes.await_end),
            on(ReadRankLog, logs.read),
            on(LookAtProcesses, processes.look_at),
            on(TypeAtTerminal, terminals.type),
        ),
        heartbeat=heartbeat,
        service_gauges=partial(service_gauges, config, core, inventory, processes),
        on_start=opened,
        on_stop=processes.stop,
        tasks=processes.tasks,
    )
