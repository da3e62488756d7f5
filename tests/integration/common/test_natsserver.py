"""The embedded server: ports, durability, versions, and whom it dies with."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from tests.waiting import eventually, gone

from slackwater.common.base.errors import ConfigRejected, Fatal, Unavailable
from slackwater.common.bus.nats import NatsBus
from slackwater.common.bus.server import NatsServer, check_version, find_server, parse_version

pytestmark = pytest.mark.live


def test_it_starts_stops_and_leaves_nothing() -> None:
    server = NatsServer()
    url = server.start()
    assert url.startswith("nats://127.0.0.1:")
    assert server.running
    pid = server.pid
    server.stop()
    assert not server.running
    assert not psutil.pid_exists(pid)
    assert not server.state_dir.exists()


def test_a_later_start_keeps_the_port(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, monitoring=True)
    url, monitoring = server.start(), server.monitoring_url
    assert server.restart() == url
    server.kill()
    assert server.start() == url
    server.stop()
    again = NatsServer(tmp_path, monitoring=True)
    assert again.start() == url
    assert again.monitoring_url == monitoring
    again.stop()
    assert tmp_path.exists(), "a folder that was given is kept"


def test_two_servers_do_not_meet() -> None:
    with NatsServer() as one, NatsServer() as two:
        assert one.url != two.url
        assert one.start() == one.url, "starting a running server changes nothing"


async def test_starting_does_not_block_the_loop(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    bus = await NatsBus.connect(await server.start_async(), "test")
    assert bus.connected
    await bus.close()
    server.stop()


def test_it_listens_on_loopback_only_and_syncs_every_write() -> None:
    with NatsServer(monitoring=True) as server:
        with urllib.request.urlopen(f"{server.monitoring_url}/varz") as answer:
            facts = json.load(answer)
        assert facts["host"] == "127.0.0.1"
        assert facts["http_host"] == "127.0.0.1"
        assert facts["jetstream"]["config"]["sync_always"] is True
        assert facts["jetstream"]["config"]["store_dir"].startswith(str(server.state_dir))


def test_a_taken_port_is_named_with_its_remedy(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    server.start()
    server.stop()
    port = json.loads((tmp_path / "ports.json").read_text())["nats"]
    with socket.create_server(("127.0.0.1", port)), pytest.raises(Unavailable) as caught:
        server.start()
    assert "address already in use" in str(caught.value)
    assert "ports.json" in str(caught.value)
    server.stop()


def test_a_damaged_ports_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "ports.json").write_text("{")
    with pytest.raises(ConfigRejected, match=r"ports\.json is damaged .* remove it"):
        NatsServer(tmp_path).start()


def test_a_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("a file where the server wants a folder")
    with pytest.raises(Fatal, match=r"ended at once: .*nats-server\.log") as caught:
        NatsServer(tmp_path).start()
    assert "[FTL]" in str(caught.value)


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "from slackwater.common.bus.server import NatsServer; import pathlib, time\n"
        f"s = NatsServer(pathlib.Path({str(tmp_path)!r})); s.start()\n"
        "print(s.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    eventually(lambda: gone(pid), "the server ends with its parent")


# The binary and its version -----------------------------------------------------------------------


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_an_old_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _script(tmp_path / "old", "echo 'nats-server: v2.9.10'")
    monkeypatch.setenv("NATS_SERVER", old)
    with pytest.raises(ConfigRejected, match=r"version 2\.9\.10; 2\.11 or newer is needed"):
        NatsServer().start()


def test_something_else_is_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_SERVER", _script(tmp_path / "other", "echo hello"))
    with pytest.raises(ConfigRejected, match=r"'hello.*' is not the version of a nats-server"):
        NatsServer().start()
    monkeypatch.setenv("NATS_SERVER", _script(tmp_path / "broken", "exit 3"))
    with pytest.raises(ConfigRejected, match="does not run as a nats-server"):
        NatsServer().start()
    monkeypatch.setenv("NATS_SERVER", str(tmp_path / "absent"))
    with pytest.raises(ConfigRejected, match="is not an executable file"):
        find_server()


@pytest.mark.parametrize(
    ("text", "version"),
    [("nats-server: v2.15.1\n", (2, 15, 1)), ("2.12.0-RC.3", (2, 12, 0)), ("v3.0.0", (3, 0, 0))],
)
def test_versions_are_read(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version
    check_version(text, "here")


def test_signals_of_the_terminal_do_not_reach_it() -> None:
    """Ctrl-C goes to a whole process group: the services drain first, the server ends last."""
    with NatsServer() as server:
        assert os.getpgid(server.pid) != os.getpgid(0)
        os.kill(server.pid, signal.SIGCONT)
        assert server.running
