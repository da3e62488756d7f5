"""Job processes and the files that tell of them.

Each rank runs under a few lines of /bin/sh, the leader of a session of its own, which first writes
who it is (boot, pid and start time: a pid alone may be somebody else's by now), then runs the
program, then writes its exit code. So nothing about a rank is known to the service alone, and a
service that was killed finds the rest: `rank<k>.` followed by

    intent.json   what was asked for, written before anything is started
    process       boot id and the kernel's line about the leader; its creation is the lock that
                  keeps a rank from being started twice
    log           stdout and stderr, and log-<n> what came before it (see ranklog.py)
    logger        boot id and the kernel's line about the process that writes them
    token         digest of what the program shows to the relay (see tokens.py)
    stacks        where its program stood, written when asked (see stacks.py)
    result.json   written by the program (SLACKWATER_RESULT)
    terminal      socket of the program that keeps its terminal (see terminal_program.py)
    own           where the program has an account of its own: its home, result.json and terminal
    exit          the exit code; where the disk is full, an empty exit-<code> instead
    reported      the master has stored it

All but the intention and the log are of one attempt: of a rank that was started again n times they
are called `rank<k>.<n>.`, and those of the attempts before are removed once the intention of this
one is written. So an attempt is started once, whoever is killed in between.
"""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import msgspec

from slackwater.common.base import limits
from slackwater.common.base.private_files import write_private
from slackwater.schemas.base import JobId
from slackwater.schemas.gpus import NodeAllocation
from slackwater.schemas.jobs import MEMORY_VARIABLE
from slackwater.schemas.relay import RelayHello
from slackwater.services.worker import becoming
from slackwater.services.worker.effects import RunRank
from slackwater.services.worker.events import Found
from slackwater.services.worker.ranklog import RankLog

_LAUNCH: Final = f"""\
{{ echo {limits.OOM_SCORE_JOB} > /proc/$$/oom_score_adj; }} 2>/dev/null
[ -z "$SLACKWATER_CGROUP" ] || {{ echo 0 > "$SLACKWATER_CGROUP/cgroup.procs"; }} 2>/dev/null
unset SLACKWATER_CGROUP
stopped=
trap stopped=143 TERM INT
set -C
cat /proc/sys/kernel/random/boot_id /proc/$$/stat > "$0process" || exit ${{stopped:-75}}
if [ "$stopped" ]; then code=$stopped; else "$@"; code=$?; fi
set +C
{{ echo $code > "$0exit.new" && mv "$0exit.new" "$0exit"; }} 2>/dev/null || : > "$0exit-$code"
exit $code
"""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_OF_ALL_ATTEMPTS: Final = ("intent.json", "log")
_OF_AN_ATTEMPT: Final = (
    "process", "logger", "token", "stacks", "own", "result.json", "terminal", "exit",
    "exit-*", "reported",
)  # fmt: skip
_LOGGERS: Final[list[subprocess.Popen[bytes]]] = []
"""Children of this process that it must wait for."""


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    rank: int
    workers: int
    program: tuple[str, ...]
    attempt: int = 0
    folder: str = ""
    gpu_ids: tuple[str, ...] = ()
    allocation: NodeAllocation = ()
    env: dict[str, str] = msgspec.field(default_factory=dict)
    rendezvous: str = ""
    account: int = 0
    """The account that the program runs under; 0: the service's."""
    pack: str = ""
    venv: str = ""
    tenant: str = ""

    @classmethod
    def of(cls, effect: RunRank, folder: str) -> "Intent":
        """`folder`: where the program runs."""
        return cls(
            job=effect.job, rank=effect.rank, workers=effect.workers, program=effect.program,
            attempt=effect.attempt, folder=folder, gpu_ids=effect.gpu_ids,
            allocation=effect.allocation, env=effect.env, rendezvous=effect.rendezvous,
            pack=effect.pack, venv=effect.venv, tenant=effect.tenant,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Identity:
    """Identify a process: its pid together with what no later process of that pid shares."""

    boot_id: str
    pid: int
    start_ticks: int

    def alive(self) -> bool:
        if self.boot_id != _BOOT_ID.read_text().strip():
            return False
        try:
            line = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        fields = line.rpartition(")")[2].split()
        return fields[0] != "Z" and int(fields[19]) == self.start_ticks


class RankFiles:
    """The files of one rank under `state_dir`, of its process number `attempt`."""

    def __init__(self, state_dir: Path, job: str, rank: int, attempt: int = 0) -> None:
        self.job, self.rank, self.attempt = job, rank, attempt
        self.folder = state_dir / "jobs" / job
        self._prefix = f"rank{rank}.{attempt}." if attempt else f"rank{rank}."

    def path(self, what: str) -> Path:
        prefix = f"rank{self.rank}." if what in _OF_ALL_ATTEMPTS else self._prefix
        return self.folder / (prefix + what)

    @property
    def prefix(self) -> str:
        """Begin the names of the attempt's files."""
        return str(self.folder.absolute() / self._prefix)

    @property
    def log(self) -> RankLog:
        return RankLog(self.path("log"))

    def launch(
        self,
        intent: Intent,
        environment: Mapping[str, str],
        log_bytes_max: int,
        held: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Write the intention, then start the program, which has this environment alone and
        inherits the descriptors `held`. Raises OSError (no room, no processes)."""
        self.intend(intent)
        printing = self.open_log(log_bytes_max)
        try:
            return self.start(intent, environment, printing, held)
        finally:
            os.close(printing)

    def intend(self, intent: Intent) -> None:
        """Write what is to be started, before anything is. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self.path("intent.json"), msgspec.json.encode(intent).decode())
        self._remove_former()

    def open_log(self, bytes_max: int) -> int:
        """Start to log, and return the descriptor of what prints. Raises OSError."""
        reading, printing = os.pipe()
        try:
            logger = self.log.open_logger(bytes_max, reading)
            _LOGGERS.append(logger)
            stat = Path(f"/proc/{logger.pid}/stat").read_text()
            write_private(self.path("logger"), _BOOT_ID.read_text() + stat)
        except OSError:
            os.close(printing)
            raise
        finally:
            os.close(reading)
            _LOGGERS[:] = [each for each in _LOGGERS if each.poll() is None]
        return printing

    def start(
        self, intent: Intent, environment: Mapping[str, str], printing: int, held: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        """Start the program under /bin/sh. Raises OSError."""
        program = list(intent.program)
        if program[0] == "python" and not intent.venv:  # It is the first in its PATH.
            program[0] = sys.executable
        first, folder, given = ["/bin/sh", "-c", _LAUNCH, self.prefix], intent.folder, environment
        stdin: AbstractContextManager[int] = nullcontext(subprocess.DEVNULL)
        if intent.account:
            first += becoming.command(intent.account, folder)
            folder, given = "/", becoming.first_environment(environment)
            stdin = becoming.exported(environment)
        with stdin as read:
            return subprocess.Popen(
                [*first, *program],
                cwd=folder or None,
                env=given,
                stdin=read,
                stdout=printing,
                stderr=printing,
                start_new_session=True,
                pass_fds=held,
            )

    def logged(self) -> bool:
        """Tell whether all that was printed is in the log, because no process writes it any
        more."""
        logger = self._identity("logger")
        return logger is None or not logger.alive()

    def _remove_former(self) -> None:
        """Remove the files of all former attempts."""
        prefix = f"rank{self.rank}."
        for path in self.folder.glob(prefix + "*") if self.attempt else ():
            number, _, what = path.name.removeprefix(prefix).partition(".")
            attempt, what = (int(number), what) if number.isdecimal() else (0, f"{number}.{what}")
            of_attempt = any(fnmatchcase(what.rstrip("."), kind) for kind in _OF_AN_ATTEMPT)
            if attempt < self.attempt and of_attempt:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def identity(self) -> Identity | None:
        """Return the leader's identity; None while the leader has not written it (or never did)."""
        return self._identity("process")

    def lives(self) -> bool:
        """Say whether the rank's process runs."""
        identity = self.identity()
        return identity is not None and identity.alive() and self.code() is None

    def _identity(self, what: str) -> Identity | None:
        try:
            boot_id, _, line = self.path(what).read_text().partition("\n")
        except FileNotFoundError:
            return None
        fields = line.rpartition(")")[2].split()
        if len(fields) < 20 or not line.endswith("\n"):
            return None  # Being written just now.
        return Identity(boot_id.strip(), int(line.split(" ", 1)[0]), int(fields[19]))

    def outcome(self) -> tuple[int | None, str]:
        """The exit code, and the program's result or the reason of its failure. None: leader and
        program were killed together, or the disk did not take the code."""
        code = self.code()
        if code != 0:
            return code, self.log.last_line()
        return 0, self._result()

    def code(self) -> int | None:
        """Return the exit code, negative for a signal; None: it has not ended, or could not write
        it."""
        try:
            code = int(self.path("exit").read_text())
        except (FileNotFoundError, ValueError):
            name = self._prefix + "exit-"
            codes = [each.name.removeprefix(name) for each in self.folder.glob(name + "*")]
            if not codes:
                return None
            code = int(codes[0])
        return 128 - code if code > 128 else code  # The shell's way to say: by this signal.

    def ended_s(self) -> float:
        """Return when it wrote its exit code; 0: it did not."""
        for path in (self.path("exit"), *self.folder.glob(self._prefix + "exit-*")):
            if path.exists():
                return path.stat().st_mtime
        return 0.0

    def _result(self) -> str:
        try:
            payload = self._written()
        except FileNotFoundError:
            return ""
        except OSError as error:
            return msgspec.json.encode({"error": f"the result cannot be read: {error}"}).decode()
        if len(payload) > limits.RESULT_BYTES_MAX:
            return f'{{"error": "a result of over {limits.RESULT_BYTES_MAX} bytes"}}'
        if not payload.strip():  # The program is done, and has nothing to say.
            return ""
        try:
            msgspec.json.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return '{"error": "the result is not JSON"}'
        return payload.decode()

    def of_program(self, what: str) -> Path:
        """Return where the program itself leaves such a file."""
        own = self.path("own")
        return own / what if own.is_dir() else self.path(what)

    def _written(self) -> bytes:
        """Read what the program wrote there, not what a link of its leads to. Raises OSError."""
        path = self.of_program("result.json")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found, owner = os.fstat(descriptor), path.parent.stat().st_uid
            if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
                raise PermissionError("it is not a file of the program's account")
            return file.read(limits.RESULT_BYTES_MAX + 1)

    def intent(self) -> Intent:
        """Read what was asked for."""
        return msgspec.json.decode(self.path("intent.json").read_bytes(), type=Intent)

    def forget(self) -> None:
        """The master has stored the outcome: remember only that this rank was here."""
        write_private(self.path("reported"), "")

    def signal_group(self, identity: Identity, kill: bool) -> None:
        """The leader, the program and whatever it started."""
        try:
            os.killpg(identity.pid, signal.SIGKILL if kill else signal.SIGTERM)
        except ProcessLookupError:
            return  # Gone in the meantime, which is what was wanted.

    def found(self) -> Found:
        job = JobId(self.job)
        intent = self.intent()
        attempt = intent.attempt
        if attempt != self.attempt:
            return RankFiles(self.folder.parents[1], self.job, self.rank, attempt).found()
        if self.path("reported").exists():
            return Found(job, self.rank, "reported", attempt=attempt)
        identity = self.identity()
        if identity is None and self.code() is None:
            return Found(
                job, self.rank, "intended", intent.workers, intent.program, attempt=attempt,
                folder=intent.folder, gpu_ids=intent.gpu_ids, allocation=intent.allocation,
                env=intent.env, rendezvous=intent.rendezvous, pack=intent.pack, venv=intent.venv,
                tenant=intent.tenant,
            )  # fmt: skip
        if identity is not None and identity.alive():
            return Found(
                job, self.rank, "running", attempt=attempt, gpu_ids=intent.gpu_ids,
                rendezvous=intent.rendezvous, venv=intent.venv,
            )  # fmt: skip
        code, result = self.outcome()
        return Found(job, self.rank, "exited", code=code, result=result, attempt=attempt)


@dataclass(slots=True)
class Watched:
    """A rank that runs, until its end."""

    files: RankFiles
    identity: Identity
    child: subprocess.Popen[bytes] | None
    """None: started by a former life of this service."""


def find(state_dir: Path) -> tuple[Found, ...]:
    """List every rank that has files here, by job and rank."""
    return tuple(files.found() for files in _ranks(state_dir))


def _ranks(state_dir: Path) -> Iterator[RankFiles]:
    for intent in sorted((state_dir / "jobs").glob("*/rank*.intent.json")):
        rank = intent.name.removeprefix("rank").removesuffix(".intent.json")
        if rank.isdecimal():
            yield RankFiles(state_dir, intent.parent.name, int(rank))


def log_bytes(state_dir: Path) -> int:
    """Sum up the bytes of all ranks' logs."""
    total = 0
    for path in (state_dir / "jobs").glob("*/rank*.log*"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # Begun anew, or closed.
            total += path.stat().st_size
    return total


def asked_memory(state_dir: Path) -> Callable[[RelayHello], int]:
    """Return a function that returns the bytes that the job of a process asked for, for each of its
    processes; 0: it did not say. That raises OSError, ValueError."""

    def asked(hello: RelayHello) -> int:
        files = RankFiles(state_dir, hello.job, hello.rank, hello.attempt)
        return int(files.intent().env.get(MEMORY_VARIABLE, "0"))

    return asked
