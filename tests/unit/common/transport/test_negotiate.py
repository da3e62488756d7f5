"""The best shared transport, and an honest account of what the host has."""

import socket
from pathlib import Path

import pytest

from slackwater.common.base.errors import ConfigRejected, Unavailable
from slackwater.common.transport.base import Fabric
from slackwater.common.transport.memory import MemoryFabric, MemoryNetwork
from slackwater.common.transport.negotiate import choose, live_fabrics, probe
from slackwater.common.transport.shm import ShmFabric
from slackwater.common.transport.tcp import TcpFabric
from slackwater.common.transport.verbs.library import why_not

HERE = "host-a"
MINE: dict[str, Fabric] = {"tcp": TcpFabric(), "shm": ShmFabric(host=HERE)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path / "a.sock"))
    sock.close()
    return tmp_path / "a.sock"


def test_shared_memory_on_one_host_tcp_between_hosts(path: Path) -> None:
    offers = [("tcp", "10.0.0.7:4700"), ("shm", f"{HERE}!{path}")]
    fabric, address = choose(MINE, offers, host=HERE)
    assert (fabric.kind, address) == ("shm", f"{HERE}!{path}")
    fabric, address = choose(MINE, offers, host="host-b")
    assert (fabric.kind, address) == ("tcp", "10.0.0.7:4700")


def test_a_path_that_is_not_there_or_no_socket_is_not_tried(tmp_path: Path) -> None:
    """Two containers of one kernel share its identity, not its files."""
    (tmp_path / "file").write_text("")
    for name in ("absent", "file"):
        offers = [("shm", f"{HERE}!{tmp_path / name}"), ("tcp", "10.0.0.7:4700")]
        assert choose(MINE, offers, host=HERE)[0].kind == "tcp"


def test_memory_is_best_and_an_unknown_kind_is_skipped(path: Path) -> None:
    mine = {**MINE, "memory": MemoryFabric(MemoryNetwork())}
    offers = [("carrier-pigeon", "roof"), ("shm", f"{HERE}!{path}"), ("memory", "m")]
    assert choose(mine, offers, host=HERE)[0].kind == "memory"
    assert choose(MINE, offers, host=HERE)[0].kind == "shm"


def test_forced_is_forced(path: Path) -> None:
    offers = [("shm", f"{HERE}!{path}"), ("tcp", "10.0.0.7:4700")]
    assert choose(MINE, offers, forced="tcp", host=HERE)[0].kind == "tcp"
    with pytest.raises(ConfigRejected, match="verbs is forced, and this side has tcp, shm"):
        choose(MINE, offers, forced="verbs", host=HERE)
    with pytest.raises(Unavailable, match=r"another host; tcp: shm is forced"):
        choose(MINE, offers, forced="shm", host="host-b")


def test_nothing_shared_names_each_offer_and_its_reason(path: Path) -> None:
    with pytest.raises(Unavailable, match=r"verbs: this side has tcp, shm") as caught:
        choose(MINE, [("verbs", "10.0.0.7:1"), ("shm", f"other!{path}")], host=HERE)
    assert "another host" in str(caught.value)
    with pytest.raises(Unavailable, match="offers none"):
        choose(MINE, [], host=HERE)


def test_live_fabrics_are_best_first_or_the_forced_one() -> None:
    assert list(live_fabrics("tcp")) == ["tcp"]
    if why_not():
        assert list(live_fabrics()) == ["shm", "tcp"]
        with pytest.raises(ConfigRejected, match="verbs cannot be used here: "):
            live_fabrics("verbs")
    else:
        assert list(live_fabrics()) == ["shm", "verbs", "tcp"]
    with pytest.raises(ConfigRejected, match="known are shm, tcp, verbs, gpu"):
        live_fabrics("avian")


def test_probe_tries_each_kind_and_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {each.kind: each for each in probe()}
    assert list(found) == ["shm", "tcp", "verbs", "gpu"]
    assert found["shm"].usable
    assert found["tcp"].usable
    assert all(each.why for each in found.values())
    if not Path("/sys/class/infiniband").is_dir():
        assert "no RDMA device" in found["verbs"].why

    def no_memfd(*_: object) -> int:
        raise OSError("forbidden here")

    monkeypatch.setattr("os.memfd_create", no_memfd)
    assert probe()[0].why == "no memfd: region probe: 4096 bytes: forbidden here"
