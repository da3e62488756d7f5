"""Job processes and the files that tell of them.

Each rank runs under a few lines of /bin/sh, the leader of a session of its own, which first writes
who it is (boot, pid and start time: a pid alone may be somebody else's by now), then runs the
program, then writes its exit code. So nothing about a rank is known to the service alone, and a
service that was killed finds the rest: `rank<k>.` followed by

    intent.json   what was asked for, written before anything is started
    process       boot id and the kernel's line about the leader; its creation is the lock that
                  keeps a rank from being started twice
    log           stdout and stderr
    result.json   written by the program (SLACKWATER_RESULT)
    exit          the exit code
    reported      the master has stored it
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from slackwater.common import limits
from slackwater.schemas.base import JobId
from slackwater.services.worker.core import Found

_LAUNCH: Final = f"""\
{{ echo {limits.OOM_SCORE_JOB} > /proc/$$/oom_score_adj; }} 2>/dev/null
stopped=
trap stopped=143 TERM INT
set -C
cat /proc/sys/kernel/random/boot_id /proc/$$/stat > "$0process" || exit ${{stopped:-75}}
if [ "$stopped" ]; then code=$stopped; else "$@"; code=$?; fi
set +C
echo $code > "$0exit.new" && mv "$0exit.new" "$0exit"
exit $code
"""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_LOG_TAIL_BYTES: Final = 8192
CODE_UNKNOWN: Final = -9
"""Leader and program were killed together: nobody was left to write the code."""


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    rank: int
    workers: int
    program: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process: a pid together with what no later process of that pid shares."""

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
    """The files of one rank under `state_dir`."""

    def __init__(self, state_dir: Path, job: str, rank: int) -> None:
        self.job, self.rank = job, rank
        self.folder = state_dir / "jobs" / job
        self._prefix = f"rank{rank}."

    def path(self, what: str) -> Path:
        return self.folder / (self._prefix + what)

    def launch(self, intent: Intent, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Write the intention, then start the program. Raises OSError (no room, no processes)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.path("intent.json"), msgspec.json.encode(intent))
        program = list(intent.program)
        if program[0] == "python":
            program[0] = sys.executable
        with self.path("log").open("ab") as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", _LAUNCH, str(self.folder / self._prefix), *program],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def identity(self) -> Identity | None:
        """None while the leader has not written it (or never did)."""
        try:
            boot_id, _, line = self.path("process").read_text().partition("\n")
        except FileNotFoundError:
            return None
        fields = line.rpartition(")")[2].split()
        if len(fields) < 20 or not line.endswith("\n"):
            return None  # Being written just now.
        return Identity(boot_id.strip(), int(line.split(" ", 1)[0]), int(fields[19]))

    def outcome(self) -> tuple[int, str]:
        """The exit code, and the program's result or the reason of its failure."""
        try:
            code = int(self.path("exit").read_text())
        except (FileNotFoundError, ValueError):
            return CODE_UNKNOWN, self.last_line() or "killed together with its process group"
        if code > 128:
            code = 128 - code  # The shell's way to say: by this signal.
        if code != 0:
            return code, self.last_line() or f"exit code {code}, and nothing in the log"
        return 0, self._result()

    def _result(self) -> str:
        path = self.path("result.json")
        try:
            payload = path.read_bytes()
        except FileNotFoundError:
            return ""
        if len(payload) > limits.RESULT_BYTES_MAX:
            return (
                f'{{"error": "a result of {len(payload)} bytes, over {limits.RESULT_BYTES_MAX}"}}'
            )
        if not payload.strip():  # The program is done, and has nothing to say.
            return ""
        try:
            msgspec.json.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return '{"error": "the result is no JSON text"}'
        return payload.decode()

    def last_line(self) -> str:
        """Of its log that says something."""
        try:
            with self.path("log").open("rb") as log:
                log.seek(max(0, self.path("log").stat().st_size - _LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
        except FileNotFoundError:
            return ""
        return next((line.strip()[:1000] for line in reversed(lines) if line.strip()), "")

    def forget(self) -> None:
        """The master has stored the outcome: remember only that this rank was here."""
        _write(self.path("reported"), b"")

    def signal_group(self, identity: Identity, kill: bool) -> None:
        """The leader, the program and whatever it started."""
        try:
            os.killpg(identity.pid, signal.SIGKILL if kill else signal.SIGTERM)
        except ProcessLookupError:
            return  # Gone in the meantime, which is what was wanted.

    def found(self) -> Found:
        job = JobId(self.job)
        intent = msgspec.json.decode(self.path("intent.json").read_bytes(), type=Intent)
        if self.path("reported").exists():
            return Found(job, self.rank, "reported")
        identity = self.identity()
        if identity is None and not self.path("exit").exists():
            return Found(job, self.rank, "intended", intent.workers, intent.program)
        if identity is not None and identity.alive():
            return Found(job, self.rank, "running")
        code, result = self.outcome()
        return Found(job, self.rank, "exited", code=code, result=result)


def find(state_dir: Path) -> tuple[Found, ...]:
    """Every rank that has files here, by job and rank; prunes jobs that ended long ago."""
    _prune(state_dir)
    return tuple(files.found() for files in _ranks(state_dir))


def _ranks(state_dir: Path) -> Iterator[RankFiles]:
    for intent in sorted((state_dir / "jobs").glob("*/rank*.intent.json")):
        rank = intent.name.removeprefix("rank").removesuffix(".intent.json")
        if rank.isdecimal():
            yield RankFiles(state_dir, intent.parent.name, int(rank))


def _prune(state_dir: Path) -> None:
    """Keep the files of the JOBS_KEPT jobs that were active last, and of all that are not done."""
    folders = sorted(
        (state_dir / "jobs").glob("*/"), key=lambda folder: folder.stat().st_mtime, reverse=True
    )
    for folder in folders[limits.WORKER_JOBS_KEPT :]:
        intents = list(folder.glob("rank*.intent.json"))
        reported = list(folder.glob("rank*.reported"))
        if len(intents) == len(reported):
            shutil.rmtree(folder)


def _write(path: Path, payload: bytes) -> None:
    """The file is there whole or not at all."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(payload)
    fresh.replace(path)
