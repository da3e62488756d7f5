"""A whole elastic program in one thread: driver, hosts, tables and files as memory, killed at any
call, moved and scaled at any time, all drawn from a seed."""

import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor as Pool
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, Final

import msgspec

from slackwater.agent.table_rows import RowNumbers, RowUpdates
from slackwater.common.base import codec
from slackwater.common.domains.slots.rules import Floats
from slackwater.elastic.app import App, Table
from slackwater.elastic.cache import Update
from slackwater.elastic.driver_core import DriverCore
from slackwater.elastic.driver_effects import (
    DriverAction,
    Finish,
    KeepState,
    Report,
    Send,
    Shorten,
    Write,
)
from slackwater.elastic.host import Batch, Host
from slackwater.elastic.memory import USED_PART, ExecutorMemory
from slackwater.schemas.base import Message
from slackwater.schemas.elastic import (
    Entry,
    ExecutorGiven,
    FromDriver,
    FromHost,
    HostLeaving,
    HostReady,
    RunBegun,
    RunStands,
    TaskFailed,
    Told,
)

EXECUTOR_BYTES: Final = 10_000
"""An executor is taken to need so much."""


class KilledError(BaseException):
    """A process ends here, at once."""


class Kills:
    """Kills the process that runs at a call, now and then."""

    def __init__(self, rng: Random, chance: float) -> None:
        self.rng, self.chance = rng, chance

    def maybe(self) -> None:
        if self.rng.random() < self.chance:
            raise KilledError


@dataclass
class Store:
    """The tables, as aggregators keep them: of each rank the newest batch, table by table."""

    tables: Mapping[str, Table]
    values: dict[str, Floats]
    applied: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, name: str, delta: Update, count: int) -> None:
        rule, values = self.tables[name].rule, self.values[name]
        if isinstance(delta, RowUpdates):
            values[delta.rows] = rule.after(values[delta.rows], delta.values, count)
        else:
            values[:] = rule.after(values, delta, count)


class MemoryTables:
    """Tables as one rank uses them; each table is applied by itself, as aggregators do."""

    def __init__(self, store: Store, rank: int, kills: Kills) -> None:
        self._store, self._rank, self._kills = store, rank, kills
        self.meanwhile: Callable[[Callable[[], bool]], None] = lambda _: None
        self.waiting = self.overlapped = 0
        """Reads that are not there yet, and those that began while another one was not."""

    @property
    def number(self) -> int:
        return min(self._store.applied[self._rank, name] for name in self._store.values)

    def read(self, name: str) -> Floats:
        self._kills.maybe()
        rng = self._kills.rng
        if rng.random() < 0.2:  # It is afar: an empty batch's answer has it.
            self.apply(self.number + 1, {})
        elif rng.random() < 0.4:
            return self._read_afar(name)
        return self._store.values[name].copy()

    def _read_afar(self, name: str) -> Floats:
        """Read what is there as it begins, or as it ends."""
        rng, looks = self._kills.rng, iter(range(self._kills.rng.randrange(4)))
        before = self._store.values[name].copy()
        self.overlapped += bool(self.waiting)
        self.waiting += 1
        self.meanwhile(lambda: next(looks, None) is None)
        self.waiting -= 1
        self._kills.maybe()
        return before if rng.random() < 0.5 else self._store.values[name].copy()

    def read_rows(self, name: str, rows: RowNumbers) -> Floats:
        return self.read(name)[rows]

    def apply(
        self,
        number: int,
        deltas: Mapping[str, Update],
        counts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        for name in self._store.values:
            self._kills.maybe()
            if self._store.applied[self._rank, name] < number:
                if (delta := deltas.get(name)) is not None:
                    self._store.add(name, delta, counts.get(name, 1))
                self._store.applied[self._rank, name] = number
        self._kills.maybe()


@dataclass
class Disk:
    """The part of a host that outlives its processes."""

    batch: Batch | None = None
    states: dict[tuple[int, int, int], bytes] = field(default_factory=dict)


class MemoryFiles:
    durable = True

    def __init__(self, disk: Disk, kills: Kills) -> None:
        self._disk, self._kills = disk, kills

    def seal(self, batch: Batch) -> None:
        self._kills.maybe()
        self._disk.batch = batch._replace(deltas=deepcopy(dict(batch.deltas)))
        self._kills.maybe()

    def sealed(self) -> Batch | None:
        return self._disk.batch

    def keep(self, executor: int, move: int, number: int, state: bytes) -> None:
        self._kills.maybe()
        self._disk.states[executor, move, number] = state

    def kept(self, executor: int, move: int, number: int) -> bytes | None:
        fitting = [
            key for key in self._disk.states if key[:2] == (executor, move) and key[2] <= number
        ]
        return self._disk.states[max(fitting)] if fitting else None

    def settle(self, number: int) -> None:
        self._disk.states = {k: v for k, v in self._disk.states.items() if k[2] <= number}

    def forget(self, executor: int) -> None:
        self._disk.states = {k: v for k, v in self._disk.states.items() if k[0] != executor}

    def remove(self) -> None:
        self._disk.batch, self._disk.states = None, {}


@dataclass
class Process:
    """A host's process, and its connection to the driver."""

    host: Host
    tables: MemoryTables
    up: deque[tuple[Message, bytes]] = field(default_factory=deque)
    down: deque[tuple[Message, bytes]] = field(default_factory=deque)
    connected: bool = False


class SomeTime(Future[None]):
    """A call that is carried out when it is waited for, or at some look whether it is done."""

    def __init__(self, rng: Random, call: Callable[[], None]) -> None:
        super().__init__()
        self._rng, self._call = rng, call

    def done(self) -> bool:
        if not super().done() and self._rng.random() < 0.4:
            self.result()
        return super().done()

    def result(self, timeout: float | None = None) -> None:
        if not super().done():
            self.set_result(self._call())


class OneThread(Pool):
    """Stands for a pool of another thread."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return SomeTime(self._rng, lambda: fn(*args, **kwargs))


@dataclass(frozen=True)
class Mark:
    """All of a program at one instant, to go back to."""

    values: dict[str, Floats]
    applied: dict[tuple[int, str], int]
    journal: list[Entry]
    states: dict[tuple[int, int], bytes]


class World:
    """`driver`: makes the program's driver, anew for each process of it. `fitting`: executors that
    a host has memory for; 0: all."""

    host_kind = Host

    def __init__(
        self, app: App, driver: Any, seed: int, hosts: int = 3, kill: float = 0.0, fitting: int = 0
    ) -> None:
        self._fitting, self.reads = fitting, 0
        self.rng = Random(seed)
        self.app, self._driver, self._most = app, driver, 5
        self.kills = Kills(self.rng, kill)
        self.shortened = self.marked = self.gone_back = 0
        self._mark: Mark | None = None
        self.asked: list[int] = []
        """Hosts that the master was asked for."""
        self.store = Store(app.tables, {n: t.first_values(n) for n, t in app.tables.items()})
        self.disks: dict[int, Disk] = defaultdict(Disk)
        self.journal: list[Entry] = []
        self.states: dict[tuple[int, int], bytes] = {}
        self.processes: dict[int, Process] = {}
        self.finished: Finish | None = None
        self.reports: list[Report] = []
        self.deaths = self.driver_deaths = self.moves = self.fetches = self.gets = 0
        self.overlapped = 0
        self._payload = b""
        self.wanted = hosts
        self.core = self._core()
        self.kills.chance = 0.0
        self._do(self.core.begin(f"run-{seed}"))
        self.kills.chance = kill
        for rank in range(hosts):
            self._start(rank)

    def _core(self) -> DriverCore:
        return DriverCore(self._driver(), self.app.executors, "a program", min(2, self.wanted))

    # The driver -----------------------------------------------------------------------------------

    def _do(self, effects: list[DriverAction]) -> None:
        for effect in effects:
            self.kills.maybe()
            match effect:
                case Write():
                    self.journal.append(effect.entry)
                case KeepState():
                    self.states[effect.executor, effect.move] = self._payload
                case Send():
                    process = self.processes.get(effect.rank)
                    if process is not None and process.connected:
                        payload = self.states[effect.state] if effect.state else b""
                        message = codec.decode(codec.encode(effect.message), FromDriver)
                        process.down.append((message, payload))
                case Report():
                    self.reports.append(effect)
                case Finish():
                    self.finished = effect
                case Shorten():
                    self.journal = [effect.entry]
                    self.shortened += 1

    def _ask_the_master(self) -> None:
        """Let the master hear how many hosts the program asks for, and the driver that it has."""
        if (asked := self.core.hosts_asked) is not None and self.rng.random() < 0.3:
            self.asked.append(asked)
            self._do_alive(lambda: self.core.used(asked))

    def _shorten(self) -> None:
        """Let the journal be shortened now and then, between two steps."""
        if self.rng.random() < 0.05:
            self._do_alive(self.core.shorten)

    def _driver_dies(self) -> None:
        self.driver_deaths += 1
        for process in self.processes.values():
            process.connected = False
            process.up.clear()
            process.down.clear()
        self._resume()

    def _resume(self) -> None:
        self.core = self._core()
        chance, self.kills.chance = self.kills.chance, 0.0
        self._do(self.core.resume(self.journal))
        self._do(self.core.begin_anyway())
        self.kills.chance = chance

    def _to_driver(self, rank: int, message: Message, payload: bytes) -> None:
        self._payload = payload
        match codec.decode(codec.encode(message), FromHost):
            case HostReady() as ready:
                effects = self.core.ready(rank, ready)
            case Told() as told:
                effects = self.core.told(rank, told)
            case ExecutorGiven() as given:
                self.moves += 1
                effects = self.core.given(rank, given)
            case HostLeaving():
                self.core.leaving(rank)
                effects = self.core.arrange() if self.rng.random() < 0.5 else []
            case TaskFailed() as failed:
                raise AssertionError(failed.reason)
        self._do(effects)

    # Hosts ----------------------------------------------------------------------------------------

    def _start(self, rank: int) -> None:
        process: Process

        def send(message: Message, payload: bytes) -> None:
            self.kills.maybe()
            process.up.append((message, payload))

        tables = MemoryTables(self.store, rank, self.kills)
        host = self.host_kind(
            self.app,
            tables,
            lambda run: MemoryFiles(self.disks[rank], self.kills),
            send,
            now_s=lambda: float(self.rng.randrange(2)),
            memory=self._memory() if self._fitting else None,
        )
        process = self.processes[rank] = Process(host, tables)

    def _memory(self) -> ExecutorMemory:
        limit_bytes = int((self._fitting + 0.5) * EXECUTOR_BYTES / USED_PART)
        memory = ExecutorMemory(
            self.app, limit_bytes, Path(tempfile.gettempdir()),
            used_bytes=lambda: memory.here * EXECUTOR_BYTES, pool=OneThread(self.rng),
        )  # fmt: skip
        return memory

    def _gone(self, rank: int) -> None:
        self.overlapped += self.processes[rank].tables.overlapped
        memory = self.processes[rank].host.memory
        if memory is not None:
            self.reads += memory.reads
            memory.close()

    def _dies(self, rank: int) -> None:
        self.deaths += 1
        cache = self.processes[rank].host.cache
        self._gone(rank)
        self.gets, self.fetches = self.gets + cache.gets, self.fetches + cache.fetches
        self._start(rank)
        self._do_alive(lambda: self.core.lost(rank))

    def _do_alive(self, call: Any) -> None:
        try:
            self._do(call())
        except KilledError:
            self._driver_dies()

    def turn(self) -> None:
        """Let one thing happen."""
        if self.rng.random() < 0.05:  # A timer.
            self._do_alive(self.core.arrange)
        self._shorten()
        self._ask_the_master()
        rank = self.rng.choice(sorted(self.processes))
        process = self.processes[rank]
        if self.rng.random() < 0.05:  # The number of workers changes.
            try:
                process.host.push_nothing()
            except KilledError:
                self._dies(rank)
                return
        if not process.connected:
            process.connected = True
            process.host.cut_off()
            process.up.clear()
            process.down.clear()
            self._do_alive(lambda: self.core.joined(rank))
            return
        if process.up and self.rng.random() < 0.5:
            message, payload = process.up.popleft()
            try:
                self._to_driver(rank, message, payload)
            except KilledError:
                self._driver_dies()
            return
        try:
            if process.down and self.rng.random() < 0.6:
                process.host.heard(*process.down.popleft())
            else:
                process.host.step()
        except KilledError:
            self._dies(rank)
            return
        if process.host.over is not None and self.core.ended is None:
            self._gone(rank)
            del self.processes[rank]
            self._do_alive(lambda: self.core.lost(rank))

    def _hold_or_go_on(self) -> None:
        """Hold the program now and then; once it is held, take a mark, mostly, and let it go on."""
        if not self.core.held:
            self._do_alive(self.core.hold if self.rng.random() < 0.9 else self.core.release)
            return
        if self.rng.random() < 0.8:
            self.marked += 1
            self._mark = Mark(
                deepcopy(self.store.values), dict(self.store.applied), list(self.journal),
                dict(self.states),
            )  # fmt: skip
        self._do_alive(self.core.release)

    def _go_back(self) -> None:
        """Lose all that came after the mark, as if tables were lost: another run goes on there."""
        if (mark := self._mark) is None or self.finished is not None:
            return
        self.gone_back += 1
        self.store.values = deepcopy(mark.values)
        self.store.applied = defaultdict(int, mark.applied)
        first, self.states = mark.journal[0], dict(mark.states)
        assert isinstance(first, RunBegun | RunStands)
        first = msgspec.structs.replace(first, run=f"{first.run}-{self.gone_back}")
        self.journal = [first, *mark.journal[1:]]
        self.disks.clear()
        for rank in list(self.processes):
            self._gone(rank)
            self._start(rank)
        self._resume()

    # For a simulated cluster (gangs.py) -----------------------------------------------------------

    def driver_begins(self, hosts: int) -> None:
        """A process of rank 0 began: its driver goes on from the journal, with so many hosts."""
        self.wanted = hosts
        self._driver_dies()
        self._do_alive(lambda: self.core.want(hosts))

    def stop_hosts(self) -> None:
        """Let there be none until processes begin."""
        for rank in sorted(self.processes):
            self.host_dies(rank)

    def host_begins(self, rank: int) -> None:
        self._start(rank)

    def host_dies(self, rank: int) -> None:
        if rank in self.processes:
            self._gone(rank)
            del self.processes[rank]
            self._do_alive(lambda: self.core.lost(rank))

    # The end --------------------------------------------------------------------------------------

    def end(self) -> None:
        """Complete what any host had sealed, dead ones too, and close them."""
        self.kills.chance = 0.0
        for rank in sorted(self.disks.keys() - self.processes.keys()):
            self._start(rank)
        self._settle()
        for rank in self.processes:
            self._gone(rank)

    def _settle(self) -> None:
        """Let processes that came after a kill complete what was sealed, as they do before they
        hear that all is over."""
        for rank, process in self.processes.items():
            process.connected = True
            process.down.clear()
            self._do(self.core.joined(rank))
            process.host.heard(*process.down.popleft())

    def scale(self) -> None:
        """Want another number of hosts, or let one be asked to end."""
        self.wanted = self.rng.randint(1, self._most)
        for rank in range(self.wanted):
            if rank not in self.processes:
                self._start(rank)
        self._do_alive(lambda: self.core.want(self.wanted))
        for rank in list(self.processes):
            if rank >= self.wanted:
                try:
                    self.processes[rank].host.leave()
                except KilledError:
                    self._dies(rank)

    def play(
        self,
        turns: int = 200_000,
        scale: float = 0.0,
        sever: float = 0.0,
        hold: float = 0.0,
        back: float = 0.0,
    ) -> "World":
        """Until the program has ended. Raises AssertionError where it does not."""
        for _ in range(turns):
            if self.finished is not None:
                self.end()
                return self
            self.turn()
            if self.rng.random() < scale:
                self.scale()
            if self.core.held or self.rng.random() < hold:
                self._hold_or_go_on()
            if self.rng.random() < back:
                self._go_back()
            if self.rng.random() < sever:
                rank = self.rng.choice(sorted(self.processes))
                self.processes[rank].connected = False
                self._do_alive(lambda r=rank: self.core.lost(r))
        raise AssertionError(
            f"not ended after {turns} turns: {self.core.pending} orders are out, hosts "
            f"{self.core.hosts}, wanted {self.wanted}"
        )
