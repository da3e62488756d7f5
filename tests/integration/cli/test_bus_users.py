"""Users of a running cluster's bus who are not its owner: what they do is about their own tenant's
jobs, and what strangers try fails."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pexpect
import pytest

from slackwater.common.base import codec
from slackwater.schemas.cluster import Heartbeat
from slackwater.schemas.job_requests import SubmitJob
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.service import Drain
from slackwater.schemas.workers import StartWorkers

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

NOBODY = 65534
CLOSED = "the server closed the connection"


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLACKWATER_", "NATS_"))},
            "XDG_STATE_HOME": str(folder),
        }

    def run(self, *words: str, user: str = "") -> tuple[int, str]:
        """Run a command as a user of the bus; its exit code, and what it printed."""
        environment = dict(self.environment)
        if user:
            environment["SLACKWATER_URL"] = self.url(user)
        done = subprocess.run(
            [sys.executable, "-m", "slackwater.cli.main", *words],
            env=environment, capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def json(self, *words: str, user: str = "") -> Any:
        code, said = self.run(*words, "--json", user=user)
        assert code == 0, said
        return json.loads(said)

    def url(self, user: str) -> str:
        base = self.folder / "slackwater" / "clusters" / "default"
        path = base / "url" if user == "owner" else base / "users" / user
        return path.read_text().strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with three more users; it takes seconds to start."""
    made = Cluster(tmp_path_factory.mktemp("users"))
    users = [word for name in ("red", "blue") for word in ("--user", f"tenant-{name}")]
    code, said = made.run("up", "--detach", "--aggregators", "1", *users, "--user", "operator-ann")
    assert code == 0, said
    yield made
    code, said = made.run("down", "--force")
    assert code == 0, said


def test_a_submission_belongs_to_the_tenant_of_its_user(cluster: Cluster) -> None:
    words = ("submit", "--id", "red1", "--tenant", "blue", "--wait", "--", "echo", "hello")
    code, said = cluster.run(*words, user="tenant-red")
    assert code == 0, said
    assert cluster.json("job", "red1", user="tenant-red")["spec"]["tenant"] == "red"
    code, said = cluster.run("logs", "red1", user="tenant-red")
    assert (code, "hello" in said) == (0, True), said


def test_a_terminal_is_of_the_tenant_of_its_user(cluster: Cluster) -> None:
    url = cluster.url("tenant-red")
    child = pexpect.spawn(
        sys.executable,
        ["-m", "slackwater.cli.main", "launch", "--pty", "--id", "red-at", "--", "sh"],
        env={**cluster.environment, "SLACKWATER_URL": url}, timeout=60, encoding="utf8",
    )  # fmt: skip
    child.expect("ends it")
    child.sendline("echo at-$SLACKWATER_JOB; exit 4")
    child.expect("at-red-at")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 4
    assert cluster.json("job", "red-at", user="tenant-red")["spec"]["tenant"] == "red"


def test_jobs_of_other_tenants_are_unknown(cluster: Cluster) -> None:
    code, said = cluster.run("submit", "--id", "red2", "--", "sleep", "100", user="tenant-red")
    assert code == 0, said
    names = {user: [job["spec"]["id"] for job in cluster.json("jobs", user=user)]
             for user in ("tenant-red", "tenant-blue", "operator-ann")}  # fmt: skip
    assert "red2" in names["tenant-red"]
    assert names["tenant-blue"] == []
    assert "red2" in names["operator-ann"]
    for words in (
        ("job", "red2"), ("cancel", "red2"), ("pause", "red2"), ("rerun", "red2"),
        ("delete", "red2"), ("logs", "red2"), ("scale", "red2", "--workers", "2"),
    ):  # fmt: skip
        code, said = cluster.run(*words, user="tenant-blue")
        assert code == 65, (words, said)
        assert "no job red2" in said, (words, said)
    code, said = cluster.run("submit", "--id", "red2", "--", "true", user="tenant-blue")
    assert code == 65, said
    assert "red2 exists" in said
    assert cluster.json("job", "red2", user="owner")["state"] == "running"
    assert cluster.run("cancel", "red2", user="tenant-red")[0] == 0
    code, said = cluster.run("rerun", "red2", user="tenant-red")
    assert code == 0, said
    assert cluster.run("cancel", "red2", user="tenant-red")[0] == 0


@pytest.mark.parametrize(
    "words", [("drain", "a1"), ("policy", "set", "srtf"), ("aggregators",), ("tenants",)]
)
def test_a_tenant_is_no_operator(cluster: Cluster, words: tuple[str, ...]) -> None:
    code, said = cluster.run(*words, user="tenant-red")
    assert code == 65, said
    assert "this user of the bus may not ask there" in said
    assert "bus.forbidden" not in said
    assert "Traceback" not in said


class Stranger:
    """A raw socket: what any account of the machine can open."""

    def __init__(self, url: str, user: str = "", password: str = "") -> None:
        host, port = url.partition("@")[2].split(":")
        self._socket = socket.create_connection((host, int(port)), 5.0)
        self._socket.settimeout(5.0)
        self._file = self._socket.makefile("rb")
        self._file.readline()
        who = {"user": user, "pass": password} if user else {}
        self.send(f"CONNECT {json.dumps({'verbose': False, **who})}\r\nPING\r\n".encode())

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def publish(self, subject: str, payload: bytes) -> str:
        """Publish, and return the server's next word: an error, or that all is well. A server that
        lets nobody in may close the connection before its word is read."""
        words = []
        while True:
            try:
                if not words:
                    message = f"PUB {subject} {len(payload)}\r\n".encode() + payload
                    self.send(message + b"\r\nPING\r\n")
                line = self._file.readline().decode()
            except (ConnectionResetError, BrokenPipeError):
                return " ".join([*words, CLOSED])
            words.append(line.strip())
            if not line or (line.startswith(("-ERR", "PONG")) and len(words) > 1):
                return " ".join(words)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def attacks() -> dict[str, bytes]:
    """One message each, any of which once made every account of the machine an operator."""
    spec = JobSpec(id="evil", program=("touch", "/tmp/evil"), tenant="blue")
    start = StartWorkers(job="evil", ranks=(0,), workers=1, program=("touch", "/tmp/evil"))
    drain = msgspec.msgpack.encode(Drain())
    forged = Heartbeat(
        service="aggregator", id="a1", incarnation=2**53, at_s=1.0, sender="aggregator.a1",
        epoch=2**53,
    )  # fmt: skip
    return {
        "sw.v1.cmd.master.main.submit": codec.encode(SubmitJob(spec=spec)),
        "sw.v1.own.blue.master.main.submit": codec.encode(SubmitJob(spec=spec)),
        "sw.v1.cmd.worker.w1.start": codec.encode(start),
        "$JS.API.STREAM.DELETE.KV_jobs": b"",
        "$KV.jobs.evil": b"garbage",
        "$KV.leases.master": b"garbage",
        "sw.v1.cmd.master.main.drain": drain,
        "sw.v1.cmd.worker.w1.drain": drain,
        "sw.v1.cmd.aggregator.a1.drain": drain,
        "sw.v1.cmd.controller.c1.locate": b"",
        "sw.v1.tel.aggregator.a1.heartbeat": codec.encode(forged),
    }


@pytest.mark.parametrize("subject", attacks())
def test_strangers_publish_nothing(cluster: Cluster, subject: str) -> None:
    stranger = Stranger(cluster.url("owner"))
    said = stranger.publish(subject, attacks()[subject])
    stranger.close()
    assert "Authorization Violation" in said or said.endswith(CLOSED)
    assert "PONG" not in said


@pytest.mark.parametrize("subject", attacks())
def test_a_tenant_publishes_nothing_beyond_its_own(cluster: Cluster, subject: str) -> None:
    who = cluster.url("tenant-red").removeprefix("nats://").partition("@")[0]
    user, _, password = who.partition(":")
    tenant = Stranger(cluster.url("owner"), user, password)
    said = tenant.publish(subject, attacks()[subject])
    tenant.close()
    assert "Permissions Violation" in said
    assert not Path("/tmp/evil").exists()
    assert {each["state"] for each in cluster.json("status")[0]["services"]} == {"ready"}
