"""The driver's shell: a thread of rank 0 that listens to hosts and carries out what the core says.

Whatever happens, happens in this thread, one step after another: a frame is heard, the core says
what follows, the journal is written, frames leave. The program's own driver runs here, too.
"""

import asyncio
import hmac
import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from slackwater.common.base import codec, limits, saved_program
from slackwater.common.base.errors import Fatal, Rejected, Unavailable
from slackwater.elastic.app import App, described
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
from slackwater.elastic.driver_hosts import HostsChooser
from slackwater.elastic.failures import last_words
from slackwater.elastic.files import RunJournal
from slackwater.elastic.wire import HEAD, PAYLOAD_BYTES_MAX, framed, release, sizes
from slackwater.schemas.base import WORKERS_MAX, Message
from slackwater.schemas.elastic import (
    ExecutorGiven,
    FromHost,
    HostHello,
    HostLeaving,
    HostReady,
    Over,
    RunBegun,
    RunStands,
    TaskFailed,
    Told,
)

_log = logging.getLogger("slackwater.elastic")
EXPECTED_S: Final = 10.0
"""Seconds that the first executors wait for all hosts that are to come."""
LEAVING_S: Final = 0.25
"""Seconds that a host which leaves keeps its executors: others may be about to leave, too."""
UNSENT_BYTES_MAX: Final = 2**28
"""Bytes that wait for one host; with more it is cut off, and gets what it lacks when it is back."""
SECRET_BYTES: Final = 24
HELLO_BYTES_MAX: Final = 16_384
"""Bytes that somebody may send who has not said who it is."""
JOURNAL_LINES: Final = 10_000
"""Lines of a journal that is worth shortening: they are read in a tenth of a second."""
LEAVE_S: Final = 20.0
"""Seconds that hosts have to hear that all is over."""


class DriverServer:
    """The driver of a run, which begins or goes on where its journal ends."""

    def __init__(
        self,
        app: App,
        journal: RunJournal,
        job: str,
        expected: int,
        tell: Callable[[Report, int, int], None],
        *,
        on_held: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
        begins: bool | None,
        placement: int = 0,
        saved: Path | None = None,
        chooser: HostsChooser | None = None,
    ) -> None:
        """`expected`: hosts that it begins with; `tell`: is given reports, with the numbers of
        executors and hosts; `on_held`: called while the program is held; `say`: is given what
        people should know; `begins`: the tables are as they begin (None: they are if no journal is
        of this `placement`); `saved`: files of a saved program, whose tables they then are;
        `chooser`: chooses the number of hosts. Raises Rejected."""
        self._app, self._journal, self._job, self._tell = app, journal, job, tell
        self.secret = secrets.token_hex(SECRET_BYTES)
        self.core = DriverCore(app.driver, app.executors, described(app), expected)
        self.port = 0
        self.finish: Finish | None = None
        self.error: BaseException | None = None
        """The error that ended the thread; None: it lives, or ended as it should."""
        self._begins, self._placement, self._saved = begins, placement, saved
        self._on_held, self._say, self._chooser = on_held, say, chooser
        self.servers = 1
        """Aggregators that hold the program's tables."""
        self._payload = b""
        self._long = JOURNAL_LINES
        """Lines of the journal from which on it is to be shortened; twice those that it keeps."""
        self._greetings = 0
        """Connections that have not said who they are."""
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._listening, self._no_hosts = threading.Event(), threading.Event()
        self._no_hosts.set()
        self._thread = threading.Thread(target=self._live, name="elastic-driver", daemon=True)

    # The program's thread -------------------------------------------------------------------------

    def start(self) -> None:
        """Return when hosts can connect. Raises what went wrong."""
        self._thread.start()
        self._listening.wait()
        if self.error is not None:
            raise self.error

    def want(self, hosts: int) -> None:
        """So many ranks are to have the executors."""
        self._call(lambda: self._do(self.core.want(hosts)))

    def hold(self) -> None:
        """Let all tasks end, and none begin."""
        self._call(lambda: self._do(self.core.hold()))

    def used(self, hosts: int) -> None:
        """Let the driver know that the master has what its program asked for."""
        self._call(lambda: self._do(self.core.used(hosts)))

    @property
    def held(self) -> bool:
        """Say whether no task runs, and all that ran is told."""
        return self.core.held

    def save_beside(self, tables: Path, within_s: float) -> None:
        """Save the program, which is held, beside its tables. Raises OSError, Rejected,
        TimeoutError, CancelledError."""
        saving: Future[None] = Future()
        if not self._thread.is_alive():
            raise CancelledError
        self._loop.call_soon_threadsafe(self._save_beside, tables, saving)
        saving.result(within_s)

    def release(self) -> None:
        """Let a program that is held go on."""
        self._call(lambda: self._do(self.core.release()))

    @property
    def least_hosts(self) -> int:
        """Return how many ranks must go on counting: those that have an executor, and those that
        may yet be given one, as the driver has not heard that they are to leave."""
        told = self.core.wanted
        return WORKERS_MAX if told is None else max(told, self.core.least_hosts)

    @property
    def connected(self) -> int:
        """Count the hosts that are connected."""
        return len(self._writers)

    def close(self, within_s: float = LEAVE_S) -> None:
        """Wait for the hosts to leave, at most so long, and end."""
        self._no_hosts.wait(within_s)
        self._call(self._closing_set)
        self._thread.join(limits.CLOSE_S)
        self._journal.close()

    def remove_states(self) -> None:
        """Leave nothing of executors behind: the run is over, and its result is told."""
        self._journal.remove_states(self.core.run)

    def _closing_set(self) -> None:
        self._closing.set()

    def _call(self, function: Callable[[], None]) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(function)

    # The driver's thread --------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main())
        except BaseException as error:  # The program's thread raises it.
            self.error = error
        finally:
            self._listening.set()
            self._no_hosts.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._first_steps()
        server = await asyncio.start_server(self._serve, None, 0, backlog=limits.GREETINGS_MAX)
        self.port = server.sockets[0].getsockname()[1]
        waiting = self._loop.call_later(EXPECTED_S, lambda: self._do(self.core.begin_anyway()))
        self._listening.set()
        await self._closing.wait()
        waiting.cancel()
        server.close()
        for writer in self._writers.values():
            writer.close()

    def _first_steps(self) -> None:
        entries = self._journal.entries()
        first = entries[0] if entries else None
        known = isinstance(first, RunBegun | RunStands) and first.placement == self._placement
        begins = self._begins if self._begins is not None else not known
        run = secrets.token_hex(8)
        if begins and self._saved is not None:
            self._go_on(self._saved, run)
        elif begins:
            self._do(self._guarded(lambda: self.core.begin(run, self._placement)))
        elif known:
            self._do(self._guarded(lambda: self.core.resume(entries)))
        else:
            raise Rejected(
                f"job {self._job} has begun, but its driver's journal is not in "
                f"{self._journal.folder}: it lies on another machine; give the job a folder that "
                "all its nodes share (--checkpoint), and run it again"
            )

    def _go_on(self, saved: Path, run: str) -> None:
        """Go on where a saved program was. Raises Rejected, and then nothing of it is here."""
        without = "without that folder its tables alone are taken"
        entries, mine = RunJournal(saved).entries(), described(self._app)
        first = entries[0] if entries else None
        if not isinstance(first, RunBegun | RunStands):
            raise Rejected(f"{saved} has no run; {without}")
        if first.program != mine:
            raise Rejected(f"{saved} is of [{first.program}], this program is [{mine}]; {without}")
        entries[0] = msgspec.structs.replace(first, run=run, placement=self._placement)
        effects = self._guarded(lambda: self.core.resume(entries))
        if away := self.core.placed:
            raise Rejected(
                f"{saved} was saved while {away} of its executors were at hosts: pause it first; "
                f"{without}"
            )
        self._journal.adopt(saved, run, entries)
        self._do(effects)

    def _save_beside(self, tables: Path, saving: "Future[None]") -> None:
        try:
            self._do(self._guarded(self.core.shorten))
            saved_program.save(self._journal.folder, tables)
        except Exception as error:  # It is raised where it is waited for.
            saving.set_exception(error)
        else:
            saving.set_result(None)

    def _guarded(self, step: Callable[[], list[DriverAction]]) -> list[DriverAction]:
        """Let the core take a step in which the program's driver may raise: that ends the run."""
        try:
            return step()
        except Exception as error:  # The program's own code.
            return self.core.fail(f"the driver {self._app.driver} raised {last_words(error)}")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = -1
        try:
            if self._greetings >= limits.GREETINGS_MAX:
                return
            self._greetings += 1
            try:
                async with asyncio.timeout(limits.CONNECT_S):
                    hello, _ = await _read(reader, HELLO_BYTES_MAX)
            finally:
                self._greetings -= 1
            if not isinstance(hello, HostHello) or not self._admits(hello, writer):
                return
            rank = hello.rank
            if (before := self._writers.get(rank)) is not None:
                before.close()
            self._writers[rank] = writer
            self._no_hosts.clear()
            self._hosts_changed()
            self._do(self.core.joined(rank))
            while self._writers.get(rank) is writer:
                message, payload = await _read(reader)
                self._hear(rank, message, payload)
        except (Unavailable, Rejected, TimeoutError) as error:
            _log.info("job %s, host %d: %s", self._job, rank, error)
        finally:
            if self._writers.get(rank) is writer:
                del self._writers[rank]
                if not self._writers:
                    self._no_hosts.set()
                self._hosts_changed()
                self._do(self.core.lost(rank))
            writer.close()

    def _admits(self, hello: HostHello, writer: asyncio.StreamWriter) -> bool:
        known = hmac.compare_digest(hello.secret.encode(), self.secret.encode())
        if not known or hello.job != self._job:
            return False
        mine = described(self._app)
        wrong = ""
        if hello.release != release():
            wrong = f"it has release {hello.release} of slackwater, the driver {release()}"
        elif hello.program != mine:
            wrong = f"its program is [{hello.program}], the driver's [{mine}]"
        if wrong:
            reason = f"host {hello.rank} cannot take part: {wrong}; let all nodes have the same"
            writer.writelines(framed(Over(reason=reason, refused=True)))
        return not wrong

    def _hear(self, rank: int, message: Message, payload: bytes) -> None:
        self._payload = payload
        match message:
            case HostReady():
                self._do(self._guarded(lambda: self.core.ready(rank, message)))
            case Told():
                self._do(self._guarded(lambda: self.core.told(rank, message)))
                self._choose_hosts(rank, message)
            case ExecutorGiven():
                self._do(self.core.given(rank, message))
            case HostLeaving():
                self.core.leaving(rank)
                self._loop.call_later(LEAVING_S, lambda: self._do(self.core.arrange()))
            case TaskFailed():
                self._do(self.core.failed(rank, message))

    def _choose_hosts(self, rank: int, told: Told) -> None:
        if self._chooser is None or self.core.ended is not None:
            return
        choice = self._chooser.heard(
            rank, len(told.completions), told.computed_s, self.core.loads(), self.servers,
            self._loop.time(),
        )  # fmt: skip
        if choice is not None:
            self.core.use(choice.hosts)
            self._say(str(choice))

    def _hosts_changed(self) -> None:
        if self._chooser is not None:
            self._chooser.forget()

    def _do(self, effects: list[DriverAction]) -> None:
        """Carry them out, in their order. What cannot be written into the journal must not be acted
        on, and the core knows it already: the thread ends, and another process reads what is
        there."""
        if self.error is not None:
            return
        try:
            self._carry_out(effects)
            if self.core.held:
                self._on_held()
            if self._journal.lines >= self._long:
                self._carry_out(self._guarded(self.core.shorten))
                self._long = max(JOURNAL_LINES, 2 * self._journal.lines)
        except Fatal as error:
            self.error = error
            self._closing.set()

    def _carry_out(self, effects: list[DriverAction]) -> None:
        """Raises Fatal."""
        for effect in effects:
            match effect:
                case Write():
                    self._journal.write(effect.entry)
                case Shorten():
                    self._journal.shorten(effect.entry)
                case KeepState():
                    self._journal.keep(self.core.run, effect.executor, effect.move, self._payload)
                case Send():
                    self._send(effect)
                case Report():
                    if self._chooser is not None:
                        self._chooser.iterations_left = effect.of - effect.iteration
                    self._tell(effect, self.core.executors, len(self.core.hosts))
                case Finish():
                    self.finish = effect

    def _send(self, send: Send) -> None:
        writer = self._writers.get(send.rank)
        if writer is None:
            return
        payload = self._journal.state(self.core.run, *send.state) if send.state else b""
        writer.writelines(framed(send.message, payload))
        if writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            writer.close()


async def _read(
    reader: asyncio.StreamReader, bytes_max: int = PAYLOAD_BYTES_MAX
) -> tuple[Message, bytes]:
    """Raises Unavailable at the end, DecodeRejected."""
    try:
        first, behind = sizes(await reader.readexactly(HEAD.size), bytes_max)
        message: Message = codec.decode(await reader.readexactly(first), FromHost)
        return message, await reader.readexactly(behind)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise Unavailable("the host closed the connection") from error
