"""A bus that wants to know who is there: services, commands, and the Agents of the jobs they start
are let in by the same credentials; nobody else is, and is told so in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nkeys
import pytest

from slackwater.common.bus.server import NatsServer
from slackwater.common.shell.config import write_config

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

TRAIN = """
import numpy as np
from slackwater import Agent
with Agent(tensors={"w": np.zeros(8, np.float32)}) as agent:
    agent.step({"w": np.ones(8, np.float32)})
    agent.close({"w": float(agent.pull("w")[0])})
"""


class GuardedServer(NatsServer):
    """A nats-server that lets in whom the configuration's text names."""

    def __init__(self, state_dir: Path, authorization: str) -> None:
        super().__init__(state_dir)
        self._authorization = authorization

    def _config(self) -> str:
        return super()._config() + f"authorization {{ {self._authorization} }}\n"


@pytest.fixture
def nkey(tmp_path: Path) -> tuple[Path, str]:
    """A seed file and its public key."""
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    path = tmp_path / "user.nk"
    path.write_bytes(seed)
    return path, nkeys.from_seed(bytearray(seed)).public_key.decode()


@pytest.fixture
def server(tmp_path: Path, nkey: tuple[Path, str]) -> Iterator[NatsServer]:
    users = f'users: [ {{ user: "op", password: "s3cret" }}, {{ nkey: "{nkey[1]}" }} ]'
    with GuardedServer(tmp_path / "nats", users) as started:
        yield started


def environment(**variables: str) -> dict[str, str]:
    own = ("SLACKWATER_", "NATS_USER", "NATS_PASSWORD", "NATS_TOKEN", "NATS_CREDS", "NATS_NKEY")
    return {k: v for k, v in os.environ.items() if not k.startswith(own)} | variables


def slackwater(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slackwater.cli.main", *words],
        capture_output=True, text=True, timeout=60, env=environment(**variables),
    )  # fmt: skip


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "s3cret" not in lines[0], "a secret is told"
    return lines[0]


class Services:
    """Processes of services against one server."""

    def __init__(self, folder: Path, url: str, credentials: dict[str, str]) -> None:
        self.folder, self._shared = folder, {"url": url, "credentials": credentials}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, service: str, **fields: Any) -> None:
        config = self.folder / f"{service}.toml"
        state_dir = self.folder / service
        state_dir.mkdir()
        write_config(config, {"state_dir": state_dir, **self._shared, **fields})
        with (self.folder / f"{service}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", f"slackwater.services.{service}", "--config", config],
                    stderr=log,
                    env=environment(),
                )
            )

    def stop(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            assert process.wait(20) == 0


@pytest.fixture
def services(tmp_path: Path, server: NatsServer) -> Iterator[Services]:
    made = Services(tmp_path, server.url, {"user": "op", "password": "s3cret"})
    yield made
    made.stop()


def test_a_job_trains_behind_a_password_and_nobody_else_gets_in(
    services: Services, server: NatsServer, nkey: tuple[Path, str]
) -> None:
    services.start("master")
    services.start("controller", id="c1")
    services.start("aggregator")
    services.start("worker")
    spec = services.folder / "spec.json"
    spec.write_text(json.dumps({"id": "j1", "program": ["python", "-c", TRAIN]}))
    wrong = slackwater("jobs", "--url", server.url, NATS_USER="op", NATS_PASSWORD="wrong")
    assert wrong.returncode == 78
    for part in (server.url, "user 'op' with this password", "NATS_USER and NATS_PASSWORD"):
        assert part in one_line(wrong)
    assert "wrong" not in wrong.stderr
    nobody = slackwater("jobs", "--url", server.url)
    assert nobody.returncode == 78
    assert "refuses a client without credentials" in one_line(nobody)
    by_key = ["--nkey", str(nkey[0])]
    _until_answered(lambda: slackwater(*by_key, "jobs", "--url", server.url, "--json"))
    _submit(spec, server.url)
    job = _ended("j1", server.url.replace("//", "//op:s3cret@"))
    assert job["state"] == "completed", job
    assert job["results"]["0"] == {"w": pytest.approx(-0.01)}


def _until_answered(ask: Any) -> None:
    """The master may take a moment to lead."""
    for _ in range(20):
        done = ask()
        if done.returncode == 0:
            return
        assert done.returncode in (69, 75), done.stderr
    raise AssertionError(done.stderr)


def _submit(spec: Path, url: str) -> None:
    words = ("--user", "op", "--password", "s3cret", "submit", "--id", "j1", "--file", str(spec))
    done = slackwater(*words, "--url", url)
    assert done.returncode == 0, done.stderr


def _ended(job: str, url: str) -> dict[str, Any]:
    """Asked with the password in the URL, as NATS has it, too."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        done = slackwater("job", job, "--url", url, "--json")
        assert done.returncode == 0, done.stderr
        record: dict[str, Any] = json.loads(done.stdout)
        if record["state"] in ("completed", "failed"):
            return record
    raise AssertionError(record)


def test_a_token_opens_and_a_service_without_it_ends_with_the_remedy(tmp_path: Path) -> None:
    with GuardedServer(tmp_path / "nats", 'token: "s3cret"') as server:
        answered = slackwater("--token", "s3cret", "jobs", "--url", server.url)
        assert answered.returncode in (69, 75)  # Let in; no master is there.
        assert "master" in one_line(answered)
        config = tmp_path / "profiler.toml"
        write_config(config, {"url": server.url, "credentials": {"token": "wrong"}})
        done = slackwater("run", "profiler", "--config", str(config))
        assert done.returncode == 78
        assert "refuses this token" in one_line(done)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NATS_USER": "op"}, "user (NATS_USER) is given without password (NATS_PASSWORD)"),
        ({"NATS_TOKEN": "a", "NATS_NKEY": "b"}, "token (NATS_TOKEN) and nkey (NATS_NKEY) are"),
        ({"NATS_CREDS": "/no/such"}, "creds (NATS_CREDS) = '/no/such' cannot be found"),
    ],
)
def test_credentials_that_cannot_be_used_are_named(variables: dict[str, str], said: str) -> None:
    done = slackwater("jobs", "--url", "nats://127.0.0.1:9", **variables)
    assert done.returncode == 78
    assert said in one_line(done)


def test_a_password_in_the_url_is_not_repeated() -> None:
    done = slackwater("jobs", "--url", "nats://op:s3cret@127.0.0.1:9")
    assert done.returncode == 69
    assert "nats://127.0.0.1:9" in one_line(done)


def test_memory_is_lent_and_borrowed_behind_a_password(
    services: Services, server: NatsServer, tmp_path: Path
) -> None:
    """The block device is a client of the bus, too: by the variables, or as the command says."""
    services.start("slabd", id="s1", node="m1", slab_bytes=1 << 20, lend_bytes_max=4 << 20)
    asked = ("memory", "export", "--size", "4M", "--socket", str(tmp_path / "nbd"), "--json")
    nobody = slackwater(*asked, "--url", server.url)
    assert nobody.returncode == 78
    assert "refuses a client without credentials" in one_line(nobody)
    command = [sys.executable, "-m", "slackwater.cli.main", "--user", "op", "--password", "s3cret"]
    with subprocess.Popen(
        [*command, *asked, "--url", server.url], env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as device:  # fmt: skip
        try:
            assert device.stdout is not None
            assert device.stdout.readline() == b"{\n"
            as_user = {"NATS_USER": "op", "NATS_PASSWORD": "s3cret"}
            seen: dict[str, Any] = {}
            for _ in range(10):
                done = slackwater("memory", "top", "--json", "--url", server.url, **as_user)
                seen = json.loads(done.stdout)
                if seen["lenders"] and seen["devices"]:
                    break
            assert [one["id"] for one in seen["lenders"]] == ["s1"]
            assert [one["id"] for one in seen["devices"]] == ["d1"]
        finally:
            device.send_signal(signal.SIGTERM)
