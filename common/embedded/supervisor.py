"""Plays systemd for the embedded cluster: a bus server and services, in order, to the last one.

Whatever happens (an error during the start, Ctrl-C, Ctrl-C again), the end is the same: no process,
no socket and no temporary file is left. `stop` ends everything in order; `abandon` is its last
step, synchronous and quick, and all that is left to do when somebody is in a hurry.

Two locks say that it lives: one in its temporary folder, one in its state folder. The bus server
holds both with it, so that after a kill -9 of the supervisor neither is free before the server has
gone: nobody opens its records a second time, and nobody removes the folder under it.
"""

import asyncio
import atexit
import contextlib
import os
import secrets
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from slackwater.common.base import limits
from slackwater.common.base.background import Tasks
from slackwater.common.base.clock import LiveClock
from slackwater.common.base.errors import (
    ConfigRejected,
    Fatal,
    Rejected,
    Retryable,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.base.file_lock import FileLock
from slackwater.common.bus.access import shown
from slackwater.common.bus.disk_watch import DiskWatch
from slackwater.common.bus.nats import NatsBus
from slackwater.common.bus.server import NatsServer
from slackwater.common.bus.users import BUS_WATCH
from slackwater.common.embedded.leftovers import own_folder, sweep
from slackwater.common.embedded.logs import rotate
from slackwater.common.embedded.orphans import MARKER, Reaper, alive
from slackwater.common.embedded.restarts import RecentEnds, described, too_often
from slackwater.common.embedded.unit import State, Unit, UnitSpec, UnitStatus
from slackwater.common.native.cgroup import MemoryKills

NATS = "nats"
_LOOK_S = 0.05
_log = structlog.get_logger()


class Supervisor:
    """`state_dir` (None: a temporary one) keeps the bus server's records between runs, `log_dir`
    (None: the temporary folder) all logs. `port`: the bus server's, 0: any free one. `users` of the
    bus (common/bus/users.py); none: whoever has its token."""

    def __init__(
        self,
        state_dir: Path | None = None,
        log_dir: Path | None = None,
        restarts_max: int = limits.RESTARTS_MAX,
        port: int = 0,
        users: Sequence[str] = (),
    ) -> None:
        self._users = users
        self._restarts_max = restarts_max
        self._port = port
        sweep()
        self._living = own_folder()
        self.run_dir = self._living.path.parent
        self.state_dir = state_dir if state_dir is not None else self.run_dir / "state"
        self.log_dir = log_dir or self.run_dir
        self._marker = secrets.token_hex(8)
        self._reaper = Reaper(self._marker)
        self._nats: NatsServer | None = None
        self._disk_watch: asyncio.Task[None] | None = None
        self._nats_pid = 0
        self._nats_restarts = 0
        self._holding: FileLock | None = None
        self._stages: list[list[Unit]] = []
        self._memory_kills = MemoryKills()
        self._tasks = Tasks(self._broke)
        self.spawn = self._tasks.spawn
        self._closed = False
        self.failed: asyncio.Event = asyncio.Event()
        """Set when a unit, or the bus server, will not be started again."""
        self.failure: SlackwaterError | None = None
        self.failed_log: Path | None = None
        """The log of a failed service; it may go with the supervisor."""
        self._reaper.open()
        atexit.register(self.abandon)

    @property
    def url(self) -> str:
        return self._nats.url if self._nats is not None else ""

    def url_of(self, user: str) -> str:
        """Return the bus's URL for one of its users."""
        return self._nats.url_of(user) if self._nats is not None else ""

    @property
    def address_file(self) -> Path:
        """Holds the URL, token and all."""
        assert self._nats is not None, "the bus server is not started"
        return self._nats.address_file

    @property
    def units(self) -> dict[str, Unit]:
        return {unit.spec.name: unit for stage in self._stages for unit in stage}

    def status(self) -> list[UnitStatus]:
        """The bus server first, then the units in the order they were started."""
        if self._nats is None:
            return []
        nats, running = self._nats, self._nats.running
        state: State = "ready" if running else "restarting"
        pid = nats.pid if running else 0
        own = UnitStatus(NATS, state, pid, self._nats_restarts, 0, shown(nats.url))
        return [own, *(unit.status for unit in self.units.values())]

    def orphans(self) -> list[int]:
        """Processes whose service was killed and did not take them up again (yet)."""
        return self._reaper.orphans(self._own_pids())

    # Start ----------------------------------------------------------------------------------------

    async def start_nats(self) -> str:
        """The URL, with the token that the server asks for. The server is started anew, on the
        same port, whenever it ends."""
        self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._holding = await _hold(self.state_dir)
        self._nats = NatsServer(
            self.state_dir / NATS,
            guarded=True,
            users=self._users,
            monitoring=True,
            port=self._port,
            log_dir=self.log_dir,
            inherits=(self._living.fd, self._holding.fd),
        )
        await self._nats.start_async()
        self._nats_pid = self._nats.pid
        self.spawn(self._watch_nats(self._nats))
        self._disk_watch = self.spawn(self._watch_disk(self._nats))
        self.spawn(self._reap())
        return self._nats.url

    async def start_units(self, specs: Sequence[UnitSpec]) -> None:
        """Start all at once, as one stage (ended together, before the stages that came earlier),
        and return when all are ready. Raises Fatal or ConfigRejected for the first that fails."""
        marker = {MARKER: self._marker}
        stage = [
            Unit(spec, self.run_dir, marker, self._memory_kills, self.log_dir) for spec in specs
        ]
        self._stages.append(stage)
        for unit in stage:
            unit.start()
        waits = [asyncio.ensure_future(unit.until_ready()) for unit in stage]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
        for unit in stage:
            self.spawn(self._follow(unit))

    # Fault tests ----------------------------------------------------------------------------------

    def kill(self, name: str, signum: int) -> None:
        """Send a signal to a unit, or to the bus server under the name `nats`."""
        if name == NATS:
            if self._nats is not None and self._nats.running:
                os.kill(self._nats.pid, signum)
            return
        self._unit(name).kill(signum)

    def arm(self, name: str, failpoints: str) -> None:
        """Set failpoints for the unit's next life, and only that one."""
        self._unit(name).arm(failpoints)

    def drop_fds(self, name: str) -> None:
        """Forget the unit's stored descriptors, so that only its process keeps them alive."""
        self._unit(name).drop_fds()

    async def until_ready(self, name: str, timeout_s: float = limits.START_S) -> None:
        """Return when the unit is ready (again). Raises DeadlineExceeded via asyncio.timeout."""
        async with asyncio.timeout(timeout_s):
            await self._unit(name).until_ready()

    def _unit(self, name: str) -> Unit:
        unit = self.units.get(name)
        if unit is None:
            raise Rejected(f"there is no unit {name!r}; all: {NATS}, {', '.join(self.units)}")
        return unit

    # Stop -----------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End everything in the reverse order of its start. A second call, or a cancellation,
        ends at once what is left."""
        try:
            while self._stages and not self._closed:
                stage = self._stages[-1]
                await asyncio.gather(*(unit.stop() for unit in stage))
                self._stages.pop()
            if self._disk_watch is not None:
                self._disk_watch.cancel()
                await asyncio.wait((self._disk_watch,), timeout=limits.ABORT_S)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Kill and remove whatever is left. Synchronous: nothing can come between."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # The loop may be closed already.
            self._tasks.cancel()
        sessions = {pid for unit in self.units.values() for pid in unit.sessions}
        for stage in reversed(self._stages):
            for unit in stage:
                unit.abandon()
        self._stages.clear()
        left = self._reaper.sweep(sessions)
        if left:
            _log.info("orphans.ended", pids=left)
        if self._nats is not None:
            self._nats.stop()
            self._nats = None
        if self._holding is not None:
            self._holding.release()
        self._reaper.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self._living.release()
        atexit.unregister(self.abandon)

    # While it runs --------------------------------------------------------------------------------

    def _own_pids(self) -> set[int]:
        pids = {pid for unit in self.units.values() for pid in unit.sessions}
        return pids | {self._nats_pid}

    async def _reap(self) -> None:
        while True:
            self._reaper.orphans(self._own_pids())
            self._reaper.reap({pid for unit in self.units.values() for pid in unit.sessions})
            for unit in self.units.values():
                rotate(unit.log_path)
            await asyncio.sleep(limits.HEARTBEAT_S)

    async def _follow(self, unit: Unit) -> None:
        await unit.ended.wait()
        if unit.state == "failed":
            self._fail(unit.failure(), unit.log_path)

    def _broke(self, name: str, error: BaseException) -> None:
        """Nothing of its kind is watched any more: a unit that ends would stay away."""
        _log.error("supervisor.broke", task=name, exc_info=error)
        self._fail(Fatal(f"{name} failed: {error!r}"), None)

    def _fail(self, error: SlackwaterError, log: Path | None) -> None:
        if self.failure is None:
            self.failure, self.failed_log = error, log
            self.failed.set()

    async def _watch_nats(self, nats: NatsServer) -> None:
        """Start the bus server again whenever it ends, also when it ends while it starts, as often
        within a while as any other unit."""
        ends, why = RecentEnds(), ""
        while True:
            if nats.running:
                await _gone(nats.pid)
                await asyncio.sleep(0.001)  # Until it is reaped: `running` asks for that.
                continue
            self._nats_restarts += 1
            killed = nats.code == -signal.SIGKILL
            how = described(nats.code, killed and self._memory_kills.rose())
            recent = ends.add(time.monotonic())
            if recent > self._restarts_max:
                said = why or f"its log ends with: {nats.last_words()}"
                self._fail(Fatal(f"{NATS}-server {too_often(recent, how)}; {said}"), nats.log_path)
                return
            _log.warning("unit.restart", unit=NATS, ended=how, wait_s=limits.RESTART_WAIT_S)
            await asyncio.sleep(limits.RESTART_WAIT_S)
            try:
                await nats.start_async()
            except ConfigRejected as error:
                self._fail(error, nats.log_path)
                return
            except (Fatal, Unavailable) as error:
                why = str(error)
                _log.warning("unit.restart", unit=NATS, reason=why)
                continue
            why = ""
            self._nats_pid = nats.pid
            _log.warning("unit.restarted", unit=NATS, url=shown(nats.url))

    async def _watch_disk(self, nats: NatsServer) -> None:
        """Say on the bus what its server cannot write, and start it anew once its disk is well."""
        bus = None
        while bus is None:
            try:
                bus = await NatsBus.connect(nats.url_of(BUS_WATCH), "disk-watch")
            except Retryable:
                await asyncio.sleep(limits.RETRY_WAIT_S_MAX)  # The server is being started anew.
        try:
            watch = DiskWatch(
                NATS, nats.state_dir, nats.monitoring_url, bus, LiveClock(), self._restart_nats
            )
            await watch.run()
        finally:
            await bus.close()

    def _restart_nats(self) -> None:
        if self._nats is not None and self._nats.running:
            os.kill(self._nats.pid, signal.SIGTERM)


async def _hold(state_dir: Path) -> FileLock:
    """The folder, once what a killed supervisor left has gone. Raises Unavailable."""
    holding = FileLock(state_dir / "lock")
    give_up_s = time.monotonic() + limits.LEFT_BEHIND_S
    while holder := holding.take():
        if holder.isdigit() and alive(int(holder)):
            raise Unavailable(
                f"{state_dir} is in use by the cluster of process {holder}: end that one, or name "
                "another folder"
            )
        if time.monotonic() > give_up_s:
            raise Unavailable(
                f"{state_dir} is still in use by the nats-server of a cluster that was killed "
                f"(process {holder}): end that server, or name another folder"
            )
        await asyncio.sleep(_LOOK_S)
    return holding


async def _gone(pid: int) -> None:
    """Return when the process has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
