"""One supervised service: started, watched, started anew.

It plays the part of a systemd unit with Type=notify, WatchdogSec, Restart=on-failure,
RestartPreventExitStatus=78 and FileDescriptorStoreMax, so that a service cannot tell the embedded
supervisor from systemd.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Literal

import structlog

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected, Fatal, SlackwaterError
from slackwater.common.base.failpoints import VARIABLE
from slackwater.common.embedded import launch
from slackwater.common.embedded.notify import FdStore, NotifySocket
from slackwater.common.embedded.restarts import RecentEnds, described, quick_ends, too_often
from slackwater.common.native.cgroup import MemoryKills

State = Literal["stopped", "starting", "ready", "restarting", "stopping", "failed"]
EX_BREACHED: Final = 70
"""An event from outside broke it, and will be refused: that counts toward no limit."""
EX_CONFIG: Final = 78
_LOG_TAIL_BYTES: Final = 4096
_CHECK_S: Final = 0.2
_SYSTEMD: Final = frozenset(
    ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
)
"""Variables that systemd set for the supervisor and that its services must not see."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """The command of a unit: `command[0]` is an absolute path; `environment` adds to the
    supervisor's."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    watchdog_s: float = limits.WATCHDOG_S
    start_s: float = limits.START_S
    stop_s: float = limits.DRAIN_S
    restarts_max: int = limits.RESTARTS_MAX
    restart_wait_s: float = limits.RESTART_WAIT_S
    """Seconds before the first restart, and after a kill; doubled by every further end of its own
    in quick succession."""
    restart_wait_s_max: float = limits.RESTART_WAIT_S_MAX
    """Where the doubling stops."""
    oom_score_adj: int = 0
    """How gladly the kernel kills it when memory runs out; 0: as it kills the supervisor."""


@dataclass(frozen=True, slots=True)
class UnitStatus:
    """A line of the supervisor's listing."""

    name: str
    state: State
    pid: int
    """0: not running."""
    restarts: int
    descriptors: int
    """Held in the store."""
    text: str
    """The service's last status line, or why it failed."""


class Unit:
    """Use from the loop's thread only; `start` from the main thread (see launch.py)."""

    def __init__(
        self,
        spec: UnitSpec,
        run_dir: Path,
        marker: Mapping[str, str],
        memory_kills: MemoryKills | None = None,
        log_dir: Path | None = None,
    ) -> None:
        self.spec = spec
        self.log_path = (log_dir or run_dir) / f"{spec.name}.log"
        self.state: State = "stopped"
        self.restarts = 0
        self.reason = ""
        self.ready = asyncio.Event()
        """Set while the service is ready."""
        self.ended = asyncio.Event()
        """Set once the unit is stopped or failed: nothing will start it again."""
        self._marker = marker
        self._memory_kills = memory_kills or MemoryKills()
        self._store = FdStore()
        self._notify = NotifySocket(run_dir / f"{spec.name}.sock", self._store, self._told)
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._text = ""
        self._told_s = 0.0
        self._ready_s = 0.0
        self._ends = RecentEnds()
        self._quick_ends = 0
        self._stopping = False
        self._was_ready = False
        self._armed = ""
        self.sessions: set[int] = set()
        """The pid of every life: each led a session of its own."""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def recent_ends(self) -> int:
        """Within RESTART_WINDOW_S before the last one."""
        return len(self._ends)

    @property
    def status(self) -> UnitStatus:
        text = self.reason if self.state == "failed" else self._text
        return UnitStatus(
            self.spec.name, self.state, self.pid, self.restarts, len(self._store), text
        )

    def start(self) -> None:
        """Begin. `ready` is set when the service says so; `failed()` tells why it never did."""
        assert self._task is None, f"{self.spec.name} is started already"
        self._task = asyncio.get_running_loop().create_task(self._supervise(), name=self.spec.name)

    async def until_ready(self) -> None:
        """Raises Fatal, with the end of the log, when the unit failed or was stopped instead."""
        while not self.ready.is_set():  # It may have been, and died before this went on.
            if self.ended.is_set():
                raise self.failure()
            waits = [asyncio.ensure_future(event.wait()) for event in (self.ready, self.ended)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    def failure(self) -> SlackwaterError:
        text = f"{self.spec.name}: {self.reason or 'it was stopped'}"
        said = self.last_words()
        kind = ConfigRejected if f"code {EX_CONFIG}" in self.reason else Fatal
        return kind(f"{text}; its log ends with: {said}" if said else text)

    def last_words(self) -> str:
        """The last line of the log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except FileNotFoundError:
            return ""
        return lines[-1] if lines else ""

    def kill(self, signum: int) -> None:
        """Send a signal to the running service (fault tests)."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signum)

    def arm(self, failpoints: str) -> None:
        """Set failpoints (see common.failpoints) for the next life, and only that one."""
        self._armed = failpoints

    def drop_fds(self) -> None:
        """Forget the stored descriptors: what only they kept alive is lost (fault tests)."""
        self._notify.read()
        self._store.clear()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL when that was not enough. Its descriptors are let go."""
        self._stopping = True
        if self._task is not None and not self._task.done():
            self.state = "stopping"
            self.kill(signal.SIGTERM)
            self.kill(signal.SIGCONT)  # A service that a test has stopped must hear it.
            done, _ = await asyncio.wait({self._task}, timeout=self.spec.stop_s)
            if not done:
                _log.warning("unit.killed", unit=self.spec.name, after_s=self.spec.stop_s)
                self.kill(signal.SIGKILL)
                await asyncio.wait({self._task}, timeout=limits.ABORT_S)
        self.abandon()

    def abandon(self) -> None:
        """Release process, socket and descriptors at once, in any state. Does not wait long."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._notify.close()
        self._store.clear()
        if self.state != "failed":
            self.state = "stopped"
        self.ended.set()

    # The life of the unit -------------------------------------------------------------------------

    async def _supervise(self) -> None:
        try:
            while True:
                with self.log_path.open("ab") as log:
                    self._spawn(log)
                code = await self._watch()
                how = described(code, code == -signal.SIGKILL and self._memory_kills.rose())
                if not self._may_restart(code, how):
                    break
                self.restarts += 1
                self.state = "restarting"
                wait_s = min(
                    self.spec.restart_wait_s_max,
                    self.spec.restart_wait_s * 2.0**self._quick_ends,
                )
                _log.warning("unit.restart", unit=self.spec.name, ended=how, wait_s=wait_s)
                await asyncio.sleep(wait_s)
                if self._stopping:
                    break
        except Exception as error:  # A bug or a broken system: the cluster is told, and ends.
            _log.error("unit.lost", unit=self.spec.name, exc_info=error)
            self._fail(f"cannot be started or watched: {error!r}")
        finally:
            if self.state != "failed":
                self.state = "stopped"
            self.ready.clear()
            self.ended.set()

    def _spawn(self, log: IO[bytes]) -> None:
        spec = self.spec
        # launch.py moves them in this order.
        held = sorted(self._store.held, key=lambda entry: entry[1])
        fds = [fd for _, fd in held]
        own = {key: value for key, value in os.environ.items() if key not in _SYSTEMD}
        environment = own | dict(spec.environment) | dict(self._marker)
        environment["NOTIFY_SOCKET"] = str(self._notify.path)
        environment["LISTEN_FDNAMES"] = ":".join(name for name, _ in held)
        if self._armed:
            environment[VARIABLE] = self._armed
            self._armed = ""
        if spec.watchdog_s > 0:
            environment["WATCHDOG_USEC"] = str(int(spec.watchdog_s * 1e6))
        adjust = str(spec.oom_score_adj)
        inner = [str(os.getpid()), ",".join(map(str, fds)), adjust, "--", *spec.command]
        self.state, self._text, self._told_s = "starting", "", time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", launch.__file__, *inner],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=fds,
            start_new_session=True,
        )
        self.sessions.add(self._process.pid)

    async def _watch(self) -> int:
        """Watch until the process has ended; return its exit code, negative for a signal."""
        process = self._process
        assert process is not None
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, gone.set)
        aborted_s = 0.0
        try:
            while not gone.is_set():
                try:
                    async with asyncio.timeout(_CHECK_S):
                        await gone.wait()
                except TimeoutError:
                    self._memory_kills.look(time.monotonic())
                    aborted_s = self._check_silence(aborted_s)
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._notify.read()  # Its last words must not count for the next life.
        code = process.wait()
        self._process = None
        self.ready.clear()
        return code

    def _check_silence(self, aborted_s: float) -> float:
        """End a service that does not get ready, or whose loop hangs. Returns when it was told."""
        now_s = time.monotonic()
        if aborted_s:
            if now_s - aborted_s > limits.ABORT_S:
                self.kill(signal.SIGKILL)
            return aborted_s
        allowed_s = self.spec.watchdog_s if self.ready.is_set() else self.spec.start_s
        if self._stopping or allowed_s <= 0 or now_s - self._told_s <= allowed_s:
            return 0.0
        why = "watchdog" if self.ready.is_set() else "start"
        _log.warning("unit.silent", unit=self.spec.name, why=why, allowed_s=allowed_s)
        self.kill(signal.SIGABRT)
        return now_s

    def _told(self, field: str, value: str) -> None:
        match field, value:
            case "READY", "1":
                if not self.ready.is_set() and self.state == "starting":
                    self.state = "ready"
                    self._ready_s = self._told_s = time.monotonic()
                    self.ready.set()
            case "WATCHDOG", "1":
                if self.ready.is_set():
                    self._told_s = time.monotonic()
            case "STATUS", _:
                self._text = value
            case "STOPPING", "1":
                self.state = "stopping"

    def _may_restart(self, code: int, how: str) -> bool:
        """Apply Restart=on-failure, within bounds; return why not."""
        now_s = time.monotonic()
        self._was_ready = self._was_ready or self._ready_s > 0
        settled = self._ready_s > 0 and now_s - self._ready_s >= limits.SETTLED_S
        self._quick_ends = quick_ends(self._quick_ends, code, settled)
        self._ready_s = 0.0
        if code == 0 or self._stopping:
            return False
        if code == EX_CONFIG:
            self._fail(f"ended with {how}: starting it again would not help")
            return False
        if code == EX_BREACHED:
            self._quick_ends = 0
            return True
        ends = self._ends.add(now_s)
        most = self.spec.restarts_max if self._was_ready else limits.FIRST_STARTS_MAX - 1
        if ends > most:
            self._fail(too_often(ends, how))
            return False
        return True

    def _fail(self, reason: str) -> None:
        self.state, self.reason = "failed", reason
        _log.error("unit.failed", unit=self.spec.name, reason=reason)
