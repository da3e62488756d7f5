"""Run an elastic program: as a host of its job, as its driver beside that in rank 0, or alone.

    if __name__ == "__main__":
        elastic.launch(Mlr())

Every rank of the job runs this. Where no job is named, the program runs in this process alone: the
same driver, host and tables, without a cluster.
"""

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, Final, NoReturn

from slackwater.agent.identity import plainly
from slackwater.agent.journal import default_folder
from slackwater.agent.local import JOB as LOCAL
from slackwater.agent.table_agent import TableAgent
from slackwater.agent.table_rows import RowNumbers
from slackwater.agent.worker_bucket import TableKind
from slackwater.common.base import codec, limits
from slackwater.common.base.errors import (
    DeadlineExceeded,
    Fatal,
    Rejected,
    Retryable,
    Unavailable,
)
from slackwater.common.base.saved_program import saved
from slackwater.common.base.words import number_of
from slackwater.common.domains.slots.rules import Floats
from slackwater.elastic.app import App, Table, checked, described
from slackwater.elastic.cache import Update, presented
from slackwater.elastic.driver_effects import Report
from slackwater.elastic.driver_hosts import HostsChooser
from slackwater.elastic.failures import last_words
from slackwater.elastic.files import HostFolder, NoFiles, RunJournal
from slackwater.elastic.host import Host
from slackwater.elastic.marks import Marks
from slackwater.elastic.memory import ExecutorMemory
from slackwater.elastic.server import DriverServer
from slackwater.elastic.wire import HEAD, framed, release, sizes
from slackwater.schemas.base import FINITE_MAX, NAME_CHARS_MAX, Message
from slackwater.schemas.elastic import FromDriver, HostHello, Over
from slackwater.schemas.jobs import CHOOSE_HOSTS_VARIABLE, FROM_VARIABLE, MEMORY_VARIABLE
from slackwater.schemas.progress import ProgramProgress
from slackwater.schemas.workers import USELESS_TO_RESTART

REPORT_S: Final = 1.0
"""Seconds between two lines that say how far the program is."""
LOOK_S: Final = 0.05
"""Seconds that an idle host waits for a frame before it looks whether anything else is due."""
SPEED_S: Final = 10.0
"""Seconds over which the speed is measured."""
MEET_S: Final = 2.0
"""Seconds after which rank 0 says again where its driver listens."""
DRIVER_GONE_S: Final = 300.0
"""Seconds without a driver after which a host gives up."""
TERMINATED: Final = 128 + signal.SIGTERM


def launch(app: App) -> Any:
    """Run the program until its driver says that it is over, and return what that said, in rank 0
    and alone; None in other ranks. A program that fails ends here, with the reason. Raises Rejected
    for one that cannot be run."""
    try:
        checked(app)
        tables = {name: table.first_values(name) for name, table in app.tables.items()}
    except Rejected as error:
        raise plainly(str(error)) from error
    kinds = {name: TableKind(table.sparse, table.rule.update) for name, table in app.tables.items()}
    return _Process(app, TableAgent(tables, kinds)).live()


class AgentTables:
    """The tables, in aggregators."""

    def __init__(self, agent: TableAgent, tables: Mapping[str, Table]) -> None:
        self._agent, self._tables = agent, tables

    @property
    def meanwhile(self) -> Callable[[Callable[[], bool]], None]:
        return self._agent.meanwhile

    @meanwhile.setter
    def meanwhile(self, call: Callable[[Callable[[], bool]], None]) -> None:
        self._agent.meanwhile = call

    @property
    def number(self) -> int:
        return self._agent.iteration

    def read(self, name: str) -> Floats:
        return self._agent.newest(name)

    def read_rows(self, name: str, rows: RowNumbers) -> Floats:
        return self._agent.rows(name, rows)

    def apply(
        self,
        number: int,
        deltas: Mapping[str, Update],
        counts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        assert number == self._agent.iteration + 1, (number, self._agent.iteration)
        hypers = {name: self._tables[name].rule.hyper(count) for name, count in counts.items()}
        self._agent.add(deltas, hypers)


class _Process:
    """One rank's process. All but `_hear` is in the program's own thread."""

    def __init__(self, app: App, agent: TableAgent) -> None:
        self._app, self._agent = app, agent
        self._alone = agent.job == LOCAL
        """In this process, without a cluster: nothing of it outlives the process."""
        self._folder = (
            Path(tempfile.mkdtemp(prefix="slackwater-elastic-"))
            if self._alone
            else default_folder(agent.job).absolute() / "elastic"
        )
        self._inbox: queue.SimpleQueue[tuple[int, Message | Exception, bytes]] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._connection = 0
        """Counts the connections: what an older one says last does not count."""
        self._asked_to_end = False
        self._server: DriverServer | None = None
        self._marks: Marks | None = None
        self._told_s = self._met_s = -1e9
        self._last: Report | None = None
        self._hosts = 0
        self._recent: deque[tuple[float, int]] = deque()
        """When the last iterations ended."""
        self.host = Host(
            app, AgentTables(agent, app.tables),
            lambda run: NoFiles() if self._alone else HostFolder(self._folder, run, agent.rank),
            self._send, memory=self._memory(), permit=agent.permit,
        )  # fmt: skip

    def _memory(self) -> ExecutorMemory | None:
        """Keep executors within the memory that the job asked for, if it did."""
        limit_bytes = int(os.environ.get(MEMORY_VARIABLE, "0"))
        if not limit_bytes:
            return None
        return ExecutorMemory(self._app, limit_bytes, self._folder, moved=self._wake)

    def _wake(self) -> None:
        """Let a host that waits for a frame look what has changed."""
        self._inbox.put((-1, Over(), b""))

    def live(self) -> Any:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            if self._agent.rank == 0:
                self._begin_driver()
            over = self._work()
        except Rejected as error:
            self._give_up(str(error))
        except Fatal as error:  # The next process may find room, or an aggregator.
            self._give_up(str(error), 1)
        finally:
            if self._alone:
                shutil.rmtree(self._folder, ignore_errors=True)
        return self._end(over)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_end = True

    # Rank 0 ---------------------------------------------------------------------------------------

    def _begin_driver(self) -> None:
        """Raises Rejected, and what the thread ended with."""
        agent = self._agent
        expected = 1 if self._alone else agent.workers
        journal, begun = RunJournal(self._folder), os.environ.get(FROM_VARIABLE)
        self._server = server = DriverServer(
            self._app, journal, agent.job, expected, self._tell, on_held=self._wake,
            say=_said, chooser=self._chooser(), begins=agent.begins, placement=agent.placement,
            saved=saved(Path(begun)) if begun else None,
        )  # fmt: skip
        server.start()
        self._marks = Marks.wanted(agent, server, os.environ)
        self._meet()

    def _chooser(self) -> HostsChooser | None:
        """Let the program choose its hosts, within the bounds that its job says, if it does."""
        if self._alone or not (bounds := os.environ.get(CHOOSE_HOSTS_VARIABLE)):
            return None
        least, _, most = bounds.partition(":")
        return HostsChooser(self._app.executors, int(least), int(most))

    def _meet(self) -> None:
        """Tell others where the driver is, now and then."""
        server, now_s = self._server, time.monotonic()
        if server is None or self._alone or now_s - self._met_s < MEET_S:
            return
        self._met_s = now_s
        address = f"{own_address()}:{server.port}"
        self._agent.meet_here(address, server.secret, self._progress(now_s))

    def _progress(self, now_s: float) -> ProgramProgress:
        server, report = self._server, self._last
        assert server is not None
        core, recent = server.core, self._recent
        took_s = recent[-1][0] - recent[0][0] if recent else 0.0
        return ProgramProgress(
            iteration=report.iteration if report else 0,
            iterations=report.of if report else 0,
            speed=(recent[-1][1] - recent[0][1]) / took_s if took_s > 0.0 else 0.0,
            measured=_sendable(report.measured) if report else {},
            executors=core.executors,
            hosts=self._hosts,
            version=core.version,
            moves=core.moves,
        )

    def _tell(self, report: Report, executors: int, hosts: int) -> None:
        """Print how far the program is: the last line always, others not too often."""
        now_s = time.monotonic()
        self._last, self._hosts = report, hosts
        self._recent.append((now_s, report.iteration))
        while self._recent[0][0] < now_s - SPEED_S:
            self._recent.popleft()
        if now_s - self._told_s < REPORT_S and report.iteration < report.of:
            return
        self._told_s = now_s
        measured = ", ".join(f"{name} {value:.6g}" for name, value in report.measured.items())
        on = f"{number_of(executors, 'executor')} on {number_of(hosts, 'host')}"
        where = "" if self._alone else f" ({on})"
        said = f"iteration {report.iteration} of {report.of}{': ' * bool(measured)}{measured}"
        _said(f"{said}{where}")

    # The connection to the driver -----------------------------------------------------------------

    def _connect(self) -> Over | None:
        """Connect to the driver, however often it takes. Return that all is over, if there is
        nobody to connect to any more. Raises DeadlineExceeded, Rejected."""
        until_s, wait_s = time.monotonic() + DRIVER_GONE_S, 0.02
        why = "it has not told where it listens"
        while time.monotonic() < until_s:
            self._look_after_rank_0()
            try:
                address, secret, over = self._where()
                if over:
                    return Over()
                if address:
                    self._open(address, secret)
                    return None
            except (OSError, Retryable, TimeoutError) as error:
                why = str(error)
            if self._asked_to_end:
                return Over()
            time.sleep(wait_s)
            wait_s = min(1.0, wait_s * 1.5)
        raise DeadlineExceeded(
            f"job {self._agent.job}: no driver within {DRIVER_GONE_S:g} s: {why}; `slackwater job "
            f"{self._agent.job}` says how rank 0 is"
        )

    def _where(self) -> tuple[str, str, bool]:
        if self._server is not None:
            return f"127.0.0.1:{self._server.port}", self._server.secret, False
        meeting = self._agent.meet()
        return meeting.address, meeting.secret, meeting.over

    def _open(self, address: str, secret: str) -> None:
        """Raises OSError."""
        self._drop()
        name, _, port = address.rpartition(":")
        where = name.removeprefix("[").removesuffix("]"), int(port)
        connected = socket.create_connection(where, timeout=limits.CONNECT_S)
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket, self._connection = connected, self._connection + 1
        threading.Thread(
            target=self._hear, args=(connected, self._connection), name="elastic-host", daemon=True
        ).start()
        hello = HostHello(
            job=self._agent.job, rank=self._agent.rank, secret=secret, release=release(),
            program=described(self._app),
        )  # fmt: skip
        self._send(hello)

    def _hear(self, connected: socket.socket, connection: int) -> None:
        """Put frames into the inbox until the connection ends."""
        try:
            with connected.makefile("rb") as file:
                while True:
                    message, payload = sizes(_exactly(file, HEAD.size))
                    decoded = codec.decode(_exactly(file, message), FromDriver)
                    self._inbox.put((connection, decoded, _exactly(file, payload)))
        except (OSError, Unavailable, Rejected) as error:
            self._inbox.put((connection, error, b""))

    def _send(self, message: Message, payload: bytes = b"") -> None:
        if self._socket is None:
            return  # It is said again, once the driver is there.
        try:
            for part in framed(message, payload):
                self._socket.sendall(part)
        except OSError:
            self._drop()
            self._inbox.put((self._connection, Unavailable("the driver is gone"), b""))

    def _drop(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # The driver may have closed it.
                self._socket.shutdown(socket.SHUT_RDWR)  # The thread that reads has it open, too.
            self._socket.close()
            self._socket = None
        self.host.cut_off()

    # The loop -------------------------------------------------------------------------------------

    def _work(self) -> Over:
        """Be a host until all is over. Raises Rejected, DeadlineExceeded."""
        host, looked_s = self.host, 0.0
        if (over := self._connect()) is not None:
            return over
        while host.over is None:
            if not self._take_frames(wait=host.idle or host.failed):
                if (over := self._connect()) is not None:
                    return over
                continue
            host.step()
            held = self._marks is not None and self._marks.due
            now_s = time.monotonic()
            if held or now_s - looked_s >= LOOK_S:
                looked_s = now_s
                self._look_after_rank_0()
                if self._asked_to_end:
                    host.leave()
        return host.over

    def _take_frames(self, wait: bool) -> bool:
        """Take what the driver sent. False: the connection is lost."""
        try:
            found = self._inbox.get(timeout=LOOK_S) if wait else self._inbox.get_nowait()
            while True:
                connection, message, payload = found
                if connection == self._connection:
                    if isinstance(message, Exception):
                        self._drop()
                        return False
                    self.host.heard(message, payload)
                found = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _look_after_rank_0(self) -> None:
        """Let the number of workers follow what is wanted, and say where the driver is."""
        server, agent = self._server, self._agent
        if server is None:
            return
        if server.error is not None:
            raise server.error
        self._meet()
        if self._marks is not None:
            self._marks.look(self._meet)
        server.servers = agent.servers
        asked = server.core.hosts_asked
        if asked is not None and not self._alone and agent.use(asked):
            server.used(asked)
        if (wanted := agent.wanted) is not None:
            server.want(wanted)
            agent.keep(server.least_hosts)
            if agent.size_is_due and agent.settled:
                self.host.push_nothing()

    # The end --------------------------------------------------------------------------------------

    def _end(self, over: Over) -> Any:
        if over.reason and (over.refused or self._agent.rank == 0):
            self._give_up(over.reason)
        if over.reason:
            self.host.remove_files()
            os._exit(0)  # Rank 0 says why.
        if self._asked_to_end and (self._server is None or self._server.finish is None):
            self._drop()
            if self._server is not None:
                self._server.close()
            sys.stdout.flush()
            os._exit(TERMINATED)  # The rank goes on another time, or was not needed any more.
        self._drop()
        result = None
        if self._server is not None:
            self._server.close()
            assert self._server.finish is not None
            result = self._finished(self._server.finish.result)
            self._say_at_the_end(result)
        self._agent.close(_told(result))
        if self._server is not None:
            self._server.remove_states()
        self.host.remove_files()
        return result

    def _say_at_the_end(self, result: Any) -> None:
        """Print the result, and tell the master how far the program came."""
        if result is not None:
            _said(f"result: {json.dumps(_told(result))}")
        if not self._alone:
            self._met_s = -1e9
            self._meet()

    def _finished(self, result: Any) -> Any:
        """Let the program see the tables as they are in the end."""
        tables = {
            name: presented(name, table, self._agent.newest(name))
            for name, table in self._app.tables.items()
        }
        try:
            return self._app.finish(tables, result)
        except Exception as error:  # The program's own code.
            self._give_up(f"{type(self._app).__name__}.finish() raised {last_words(error)}")

    def _give_up(self, reason: str, code: int = USELESS_TO_RESTART) -> NoReturn:
        """End the process: with it the job, unless another `code` lets it be started again."""
        self._drop()
        if self._server is not None:
            self._server.close()
            if code == USELESS_TO_RESTART:
                self._server.remove_states()
        if code == USELESS_TO_RESTART:
            self.host.remove_files()
        sys.stderr.write(f"slackwater: {reason}\n")
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


@cache
def own_address() -> str:
    """Return the address by which other hosts reach this machine, as its worker service has it; the
    loopback's, if that name means nothing even here."""
    name = os.environ.get("SLACKWATER_ADDRESS") or socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return f"[{name}]" if ":" in name else name


def _said(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _sendable(measured: Mapping[str, float]) -> dict[str, float]:
    """Return the first few that a message can carry."""
    fitting = [
        (name, float(value))
        for name, value in measured.items()
        if len(name) <= NAME_CHARS_MAX and abs(value) <= FINITE_MAX
    ]
    return dict(fitting[:8])


def _exactly(file: Any, count: int) -> bytes:
    """Raises Unavailable at the end."""
    data: bytes = file.read(count) if count else b""
    if len(data) < count:
        raise Unavailable("the driver closed the connection")
    return data


def _told(result: Any) -> Any:
    """Return the result as the job's record can have it; None: it cannot."""
    try:
        text = json.dumps(result, default=lambda value: value.tolist())
    except (TypeError, ValueError, AttributeError):
        return None
    return json.loads(text) if len(text.encode()) <= limits.RESULT_BYTES_MAX else None
