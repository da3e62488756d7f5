"""`slackwater up` on a machine that others use, too: who gets in, what it says, how it ends."""

import asyncio
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.waiting import eventually

from slackwater.cli import up
from slackwater.common.base.errors import Fatal
from slackwater.common.bus.server import NatsServer
from slackwater.common.bus.users import derived_password
from slackwater.common.embedded import ClusterOptions
from slackwater.common.embedded.orphans import alive

# A cluster takes seconds to start, on a busy machine many.
pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]
COMMAND = [sys.executable, "-m", "slackwater.cli.main"]
SMALL = ("--controllers", "1", "--aggregators", "1")
OWN = ("SLACKWATER_", "NATS_")
NOBODY = 65534


@dataclass
class Running:
    """One `slackwater up --json` and what it said."""

    process: subprocess.Popen[bytes]
    folder: Path
    environment: dict[str, str]
    said: dict[str, Any]

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    @property
    def token(self) -> str:
        return (self.state_dir / "nats" / "token").read_text().strip()

    @property
    def port(self) -> int:
        return int(self.said["url"].rsplit(":", 1)[1])

    def slackwater(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *words], capture_output=True, text=True, timeout=60, env=self.environment
        )

    def kill(self, unit: str) -> None:
        """kill -9 the process whose configuration has that name; return when another has it."""
        first = self._pid(unit)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: self._pid(unit) not in (0, first), f"{unit} comes back", 60.0)

    def _pid(self, unit: str) -> int:
        for child in psutil.Process(self.process.pid).children():
            try:
                if any(word.endswith(f"{unit}.toml") for word in child.cmdline()):
                    return child.pid
            except psutil.Error:
                continue
        return 0


def _start(folder: Path, *words: str, environment: dict[str, str] | None = None) -> Running:
    """Its stdout and stderr go to files of `folder`; returns once it has said where it is."""
    folder.mkdir(exist_ok=True)
    environment = environment or {k: v for k, v in os.environ.items() if not k.startswith(OWN)} | {
        "XDG_STATE_HOME": str(folder / "home"),
        "TMPDIR": str(folder),
    }
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(
            [*COMMAND, "up", *SMALL, "--json", "--state-dir", str(folder / "state"), *words],
            stdout=out, stderr=err, env=environment, start_new_session=True,
        )  # fmt: skip

    def said() -> bool:
        assert process.poll() is None, (folder / "err").read_text()
        return (folder / "out").read_text().endswith("}\n")

    eventually(said, "it is up", 100.0)
    return Running(process, folder, environment, json.loads((folder / "out").read_text()))


def _end(running: Running) -> int:
    running.process.send_signal(signal.SIGINT)
    return running.process.wait(60)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    folder = Path(tempfile.mkdtemp(prefix="up-"))  # Sockets' paths must be short.
    started = _start(folder)
    try:
        yield started
    finally:
        _end(started)
        shutil.rmtree(folder, ignore_errors=True)


def _raw(port: int, *lines: str) -> str:
    """Return the bus's answer to a client that only knows its port."""
    with socket.create_connection(("127.0.0.1", port), 5.0) as connection:
        connection.settimeout(5.0)
        assert connection.recv(4096).startswith(b"INFO ")
        connection.sendall("".join(f"{line}\r\n" for line in lines).encode())
        answer = b""
        while b"-ERR" not in answer and (more := connection.recv(4096)):
            answer += more
    return answer.decode()


def test_nobody_publishes_on_the_bus_of_up_without_its_token(running: Running) -> None:
    """Any account of the machine can connect to a loopback port: it may do nothing there."""
    publish = ("PUB sw.v1.cmd.master.main.drain 2", "{}")
    for greeting in ("{}", '{"auth_token": "wrong"}', '{"user": "a", "pass": "b"}'):
        said = _raw(running.port, f"CONNECT {greeting}", *publish)
        assert "Authorization Violation" in said
    assert "Authorization Violation" in _raw(running.port, *publish)
    assert running.slackwater("jobs").returncode == 0, "the master is there, not drained"


def test_the_token_is_in_files_of_this_account_alone(running: Running) -> None:
    """In the files, and in no command line, which /proc shows to everybody."""
    secrets = (
        running.token,
        *(derived_password(running.token, user) for user in ("owner", "master-m1", "worker-w1")),
    )
    assert len(secrets[0]) >= 64
    holding = []
    for base in (running.folder, Path(running.said["run_dir"])):
        for path in base.rglob("*"):
            if path.is_file() and any(each.encode() in path.read_bytes() for each in secrets):
                holding.append(path)
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    names = {path.name for path in holding}
    assert {"token", "url", "nats.conf", "master-m1.toml"} <= names
    assert stat.S_IMODE((running.state_dir / "nats").stat().st_mode) == 0o700
    assert stat.S_IMODE(running.state_dir.stat().st_mode) == 0o700
    up = psutil.Process(running.process.pid)
    for process in (up, *up.children(recursive=True)):
        assert not any(secret in " ".join(process.cmdline()) for secret in secrets)
    for name in ("out", "err"):
        assert not any(secret in (running.folder / name).read_text() for secret in secrets)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try as another account")
def test_another_account_cannot_read_the_token(running: Running) -> None:
    running.folder.chmod(0o755)  # The state folder is to hold by itself.
    files = [running.state_dir / "nats" / name for name in ("token", "url", "nats.conf")]
    files.append(Path(running.said["address_file"]))
    for path in files:
        own = derived_password(running.token, "owner")
        assert running.token in path.read_text() or own in path.read_text()
        done = subprocess.run(["/bin/cat", str(path)], user=NOBODY, group=NOBODY,
                              extra_groups=[], capture_output=True)  # fmt: skip
        assert done.returncode != 0, path
        assert b"denied" in done.stderr


def test_commands_find_the_cluster_and_its_token_by_themselves(running: Running) -> None:
    assert running.slackwater("jobs").returncode == 0
    assert running.slackwater("jobs", "--url", running.said["url"]).returncode == 0
    address = Path(running.said["address_file"]).read_text().strip()
    elsewhere = running.environment | {"XDG_STATE_HOME": str(running.folder / "none")}
    words = [*COMMAND, "jobs", "--url"]
    done = subprocess.run([*words, running.said["url"]], env=elsewhere, capture_output=True)
    assert done.returncode == 78
    assert b"refuses a client without credentials" in done.stderr
    assert b"none/slackwater/clusters/default/url" in done.stderr, (
        "it says where the token would be"
    )
    done = subprocess.run([*words[:-1]], env=elsewhere | {"SLACKWATER_URL": address})
    assert done.returncode == 0
    others = {"NATS_USER": "of", "NATS_PASSWORD": "another"}
    done = subprocess.run([*words[:-1]], env=running.environment | others)
    assert done.returncode == 0, "credentials for another cluster do not stand in the way"


def test_a_second_up_on_the_same_folder_is_refused_by_name(running: Running) -> None:
    done = running.slackwater(
        "up", *SMALL, "--name", "other", "--state-dir", str(running.state_dir)
    )
    assert done.returncode == 69
    (line,) = done.stderr.strip().splitlines()
    assert f"is in use by the cluster of process {running.process.pid}" in line
    assert "ports.json" not in line
    assert running.slackwater("jobs").returncode == 0


def test_a_second_up_of_one_name_is_refused_with_the_firsts_pid(running: Running) -> None:
    done = running.slackwater("up", *SMALL)
    assert done.returncode == 65
    (line,) = done.stderr.strip().splitlines()
    assert f"cluster default runs already: process {running.process.pid}, since 20" in line
    assert line.endswith(
        "end it with `slackwater down --name default`, or start another with `slackwater up --name "
        "OTHER`"
    )
    assert running.slackwater("jobs").returncode == 0


def test_a_port_in_use_is_refused_by_its_number(running: Running) -> None:
    done = running.slackwater("up", *SMALL, "--name", "other", "--port", str(running.port))
    assert done.returncode == 69
    (line,) = done.stderr.strip().splitlines()
    assert f"port {running.port} is in use by another process; choose another port" in line
    assert running.slackwater("status", "--name", "other").returncode == 65, "it left no entry"


def test_two_clusters_side_by_side(running: Running) -> None:
    """The second is detached, on a port of its own choice. Commands say which one they mean; `down`
    ends one, and the other goes on. One test: each cluster costs seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("--name", "blue", "--port", str(port), "--log-level", "warning")
    done = running.slackwater("up", "--detach", "--json", *SMALL, *words)
    assert done.returncode == 0, done.stderr
    blue = json.loads(done.stdout)
    assert blue["url"] == f"nats://127.0.0.1:{port}"
    assert "blue" in blue["address_file"]
    process = psutil.Process(blue["pid"])
    assert os.getsid(process.pid) == process.pid, "a closed terminal is nothing to it"
    listed = json.loads(running.slackwater("status", "--json").stdout)
    assert [(each["name"], each["state"], each["pid"]) for each in listed] == [
        ("blue", "ready", blue["pid"]),
        ("default", "ready", running.process.pid),
    ]
    ready = [service for service in listed[0]["services"] if service["state"] == "ready"]
    assert len(ready) == 6, "nats, master, controller, aggregator, profiler, worker"
    program = ("--", "sleep", "60")
    assert running.slackwater("--cluster", "blue", "submit", "--id", "j", *program).returncode == 0
    _until_running(running, "j")
    assert "no job j" in running.slackwater("job", "j").stderr, "`default` is meant"
    refused = running.slackwater("down", "--name", "blue")
    assert refused.returncode == 75
    assert "cluster blue: 1 job runs: j; wait for them" in refused.stderr
    assert "`slackwater down --force`" in refused.stderr
    ended = running.slackwater("down", "--name", "blue", "--force", "--json")
    assert (ended.returncode, json.loads(ended.stdout)) == (
        0,
        {"name": "blue", "pid": blue["pid"], "failed_jobs": ["j"]},
    )
    assert not alive(blue["pid"])
    assert not Path(blue["address_file"]).exists()
    assert not Path(blue["run_dir"]).exists()
    logs = Path(blue["log_dir"])
    assert "ready" not in (logs / "master-m1.log").read_text(), "--log-level is the services'"
    assert "1 job runs and fails with the cluster: j" in (logs / "up.log").read_text()
    gone = running.slackwater("jobs", "--cluster", "blue")
    assert gone.returncode == 65
    assert "no cluster 'blue' runs here; those that run: default" in gone.stderr
    assert running.slackwater("jobs").returncode == 0


def _until_running(running: Running, job: str) -> None:
    def state() -> str | None:
        done = running.slackwater("job", job, "--cluster", "blue", "--json")
        found: str | None = json.loads(done.stdout).get("state")
        return found

    eventually(lambda: state() == "running", f"{job} runs", 60.0)


def test_detached_it_ends_with_its_error_when_it_cannot_start(running: Running) -> None:
    words = ("--detach", "--name", "blue", "--state-dir", str(running.state_dir))
    done = running.slackwater("up", *SMALL, *words)
    assert done.returncode == 69
    assert f"is in use by the cluster of process {running.process.pid}" in done.stderr
    assert f"the whole log: {running.state_dir}/logs/up.log" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("--name", "a b"), 65, "error: --name 'a b': a cluster's name has letters, digits"),
        (("--log-level", "loud"), 78, "error: --log-level 'loud': choose one of debug, info"),
        (("--cpu-share", "0"), 78, "both must be positive"),
        (("--memory", "1K"), 78, "1024 bytes of memory for all aggregators: give 1048576 or more"),
        (("--port", "70000"), 2, "from 0 to 65,535"),
    ],
)
def test_what_up_cannot_use_is_one_line(
    tmp_path: Path, words: tuple[str, str], code: int, line: str
) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [*COMMAND, "up", *words], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == code
    assert line in done.stderr
    assert "Traceback" not in done.stderr


def test_a_hangup_leaves_nothing_and_a_kill_is_swept_up_by_the_next() -> None:
    """A closed ssh session ends `up` as SIGTERM does. After kill -9 the next `up` on the same state
    waits for the bus server that was left, opens its records and finds the job; the folder with the
    token goes."""
    folder = Path(tempfile.mkdtemp(prefix="up-"))
    try:
        first = _start(folder)
        done = first.slackwater("submit", "--id", "kept", "--workers", "64", "--", "true")
        assert done.returncode == 0, done.stderr
        port, left = first.port, Path(first.said["run_dir"])
        first.process.kill()
        first.process.wait(60)
        assert left.exists(), "nobody could remove it"
        second = _start(folder)
        assert second.port == port
        assert not left.exists(), "it held the token"
        assert json.loads(second.slackwater("job", "kept", "--json").stdout)["spec"]["id"] == "kept"
        second.process.send_signal(signal.SIGHUP)
        assert second.process.wait(60) == 0
        assert not Path(second.said["run_dir"]).exists()
        assert json.loads(second.slackwater("status", "--json").stdout) == []
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_json_of_up_stays_one_document_when_a_service_is_restarted(running: Running) -> None:
    running.kill("profiler-p1")
    assert json.loads((running.folder / "out").read_text()) == running.said
    assert "unit.restart" in (running.folder / "err").read_text()


def test_the_logs_of_services_are_kept_under_the_state_folder() -> None:
    folder = Path(tempfile.mkdtemp(prefix="up-"))
    try:
        started = _start(folder)
        assert _end(started) == 0
        logs = {path.name for path in (folder / "state" / "logs").iterdir()}
        assert {"master-m1.log", "aggregator-a1.log", "nats-server.log"} <= logs
        assert not Path(started.said["address_file"]).exists()
        assert not Path(started.said["run_dir"]).exists()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_state_folder_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [*COMMAND, "up", "--state-dir", str(tmp_path / "file")], capture_output=True, text=True
    )
    assert done.returncode == 65
    (line,) = done.stderr.strip().splitlines()
    assert line.endswith(f"{tmp_path}/file: a file, not a folder; name another")


async def _until_killed(
    keeping: "asyncio.Future[None]", found: Callable[[], bool], times: int
) -> None:
    """kill -9 of the cluster's bus server, so often, once the cluster can be found. Call it before
    the cluster starts: the bus servers that run by then are those of other tests."""
    others = _bus_servers()
    killed: set[int] = set()
    while len(killed) < times and not keeping.done():
        await asyncio.sleep(0.05)
        if not found():
            continue
        for pid, server in _bus_servers().items():
            if pid not in others and pid not in killed:
                killed.add(pid)
                server.kill()


def _bus_servers() -> dict[int, psutil.Process]:
    """This process's own bus servers, by id."""
    found = {}
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # It was reaped after it was listed.
            if child.name() == "nats-server":
                found[child.pid] = child
    return found


def test_up_that_is_cancelled_without_a_signal_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller's deadline is not Ctrl-C: it must not end the caller's process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    options = ClusterOptions(controllers=1, aggregators=1, log_dir=tmp_path / "logs")

    async def run() -> None:
        await asyncio.wait_for(up.keep(options, "default", json=False), 0.2)

    with pytest.raises(TimeoutError):
        asyncio.run(run())


def test_up_ends_with_the_reason_when_its_bus_is_gone_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_nats_server: NatsServer
) -> None:
    """Killed more often within a while than it is started anew: the unit, what it said last, and a
    log that outlives the cluster are named. A server of others, beside it, is left alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    options = ClusterOptions(
        controllers=1, aggregators=1, restarts_max=1, log_dir=tmp_path / "logs"
    )
    address = tmp_path / "slackwater" / "clusters" / "default" / "url"

    async def run() -> None:
        keeping = asyncio.ensure_future(up.keep(options, "default", json=False))
        await _until_killed(keeping, address.exists, 2)
        await asyncio.wait_for(keeping, 60)

    with pytest.raises(Fatal) as caught:
        asyncio.run(run())
    said = str(caught.value)
    assert "nats-server ended 2 times within 60 s, the last time with signal 9" in said
    kept = Path(said.rsplit("its log: ", 1)[1])
    assert kept.name == "nats-server.log"
    assert "Server is ready" in kept.read_text()
    assert not address.exists()
    assert own_nats_server.running


def _job(running: Running, id: str) -> dict[str, Any]:
    """The record of a job that ended."""

    def ended() -> dict[str, Any] | None:
        record: dict[str, Any] = json.loads(running.slackwater("job", id, "--json").stdout)
        return record if record.get("state") in ("completed", "failed") else None

    found = eventually(ended, f"{id} ends", 120.0)
    assert found is not None
    return found


def test_a_job_beyond_the_hosts_memory_is_refused_with_numbers() -> None:
    """Three aggregators share one budget. A job that needs more than all of it fails at once, by
    the reason, no process is killed, and the next job runs."""
    folder = Path(tempfile.mkdtemp(prefix="up-"))
    try:
        started = _start(folder, "--aggregators", "3", "--memory", "96M")
        words = ("--workers", "4", "--servers", "64", "--iterations", "3")
        assert started.slackwater("submit", "--id", "s4", "--model", "bert-large", *words)
        record = _job(started, "s4")
        assert record["state"] == "failed"
        assert (
            "job s4 needs 2.1 GB on its 3 aggregators, 100.7 MB are free of 100.7 MB"
            in (record["reason"])
        )
        small = ("--bytes-scale", "0.01", "--compute-s", "0.01", "--iterations", "3")
        assert started.slackwater("submit", "--id", "s5", "--model", "alexnet", *small)
        assert _job(started, "s5")["state"] == "completed"
        assert "unit.restart" not in (folder / "err").read_text()
        assert _end(started) == 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)
