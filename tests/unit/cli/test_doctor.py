"""Verdicts of the doctor on each thing it looks at, and when it calls a host bad."""

import json
from pathlib import Path

import pytest

import slackwater
from slackwater.cli import doctor
from slackwater.cli.commands import app
from slackwater.cli.doctor import Check
from slackwater.common.bus.server import NatsServer
from slackwater.console.program import answered

GIB = 2**30


def test_a_host_without_cgroups_is_poor_at_holding_processes() -> None:
    assert doctor.jobs(Path("/sys/fs/cgroup")).state == "good"
    found = doctor.jobs(None)
    assert found.state == "poor"
    assert "Delegate=yes" in found.why


def test_ways_to_watch_traffic_are_told_with_the_privilege_that_lacks() -> None:
    assert doctor.traffic(True, True).state == "good"
    assert "CAP_PERFMON is missing" in doctor.traffic(True, False).why
    assert "CAP_NET_RAW is missing" in doctor.traffic(False, True).why
    assert doctor.traffic(False, False).state == "absent"


def test_a_limit_of_descriptors_that_will_be_felt_is_told_with_the_remedy() -> None:
    assert doctor.descriptors(1024, 65_536).state == "good"
    assert doctor.descriptors(1024, -1).state == "good"
    poor = doctor.descriptors(256, 1024)
    assert (poor.state, "LimitNOFILE" in poor.why) == ("poor", True)


def test_memory_is_the_cgroups_and_kills_for_it_are_told() -> None:
    assert doctor.memory(8 * GIB, 0) == Check(
        "memory", "good", "8.0 GiB for this cgroup or machine"
    )
    assert doctor.memory(GIB, 0).state == "poor"
    assert "3 processes were killed" in doctor.memory(8 * GIB, 3).why


@pytest.mark.parametrize(("free", "state"), [(9 * GIB, "good"), (GIB // 2, "poor"), (2**20, "bad")])
def test_a_disk_by_what_is_free(
    free: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is not there yet is on the disk of the folder around it."""
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda at: _Usage(free) if at.is_dir() else 0)
    assert doctor.disk(tmp_path / "not" / "there", "state folder").state == state


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_kernels_are_looked_for_in_the_package_and_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "COMPILED", {"folds": "nowhere/kernels.*.nbi"})
    (poor,) = doctor.compiled(str(tmp_path))
    assert (poor.state, "`slackwater compile folds`" in poor.why) == ("poor", True)
    (tmp_path / "slots_x").mkdir()
    (tmp_path / "slots_x" / "kernels.fold-1.py311.nbi").write_bytes(b"")
    assert [check.state for check in doctor.compiled(str(tmp_path))] == ["good"]


@pytest.mark.live
def test_the_bus_is_asked_for_its_version_and_jetstream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*words: str) -> tuple[int, dict[str, str]]:
        code = answered(app, ["doctor", "--json", *words], "slackwater")
        checks = json.loads(capsys.readouterr().out)
        (bus,) = (check for check in checks if check["what"] == "bus")
        return code, bus

    for name in ("SLACKWATER_URL", "NATS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    code, bus = found()
    assert (code, bus["state"]) == (0, "absent")
    with NatsServer(tmp_path / "nats") as server:
        code, bus = found("--url", server.url)
        assert (code, bus["state"]) == (0, "good")
        assert "JetStream with 0 streams" in bus["why"]
    code, bus = found("--url", "nats://127.0.0.1:9")
    assert (code, bus["state"]) == (1, "bad")
    assert "no nats-server answers" in bus["why"]


def test_kernels_are_looked_for_where_they_are() -> None:
    """A module was renamed, and its kernels were said to be missing ever since."""
    package = Path(slackwater.__file__).parent
    for part, pattern in doctor.COMPILED.items():
        source = package / pattern.replace("__pycache__/", "").replace(".*.nbi", ".py")
        assert source.is_file(), part
