"""A rank inherits what is named, and nothing that the service was given for itself."""

import stat
from pathlib import Path

import pytest

from slackwater.schemas.base import JobId, NodeId
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.effects import RunRank
from slackwater.services.worker.environment import in_front, inherited, rank_environment
from slackwater.services.worker.processes import Intent, RankFiles
from slackwater.services.worker.stacks import FOLDER

SERVICE = {
    "PATH": "/usr/bin",
    "LC_ALL": "C.UTF-8",
    "CUDA_HOME": "/opt/cuda",
    "SLACKWATER_TRANSPORT": "tcp",
    "NATS_URL": "nats://op:s3cret@bus",
    "NATS_PASSWORD": "s3cret",
    "NATS_NKEY": "/etc/slackwater/worker.nk",
    "SLACKWATER_CLUSTER_TOKEN": "s3cret",
    "AWS_SECRET_ACCESS_KEY": "s3cret",
    "NOTIFY_SOCKET": "/run/systemd/notify",
}


def test_secrets_of_the_service_are_not_inherited() -> None:
    found = inherited(SERVICE)
    assert set(found) == {"PATH", "LC_ALL", "CUDA_HOME", "SLACKWATER_TRANSPORT", "PYTHONPATH"}
    assert found["PYTHONPATH"] == str(FOLDER), "our own, for stacks"


def test_the_operator_names_more_but_never_the_credentials_of_the_bus() -> None:
    assert set(inherited({"HF_HOME": "/data", "HF_TOKEN": "t", "X": "1"}, ("HF_*",))) == {
        "HF_HOME",
        "HF_TOKEN",
        "PYTHONPATH",
    }
    assert not {"NATS_PASSWORD", "NATS_NKEY"} & set(inherited(SERVICE, ("*",)))


def test_what_a_rank_is_given_counts_before_what_it_inherits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("SECRET_OF_THE_SERVICE", "s3cret")
    effect = RunRank(JobId("j"), 0, 0, 1, ("true",), "", (), env={"PATH": "/opt/bin"})
    found = rank_environment(effect, WorkerConfig(), NodeId("n1"), tmp_path / "result.json")
    assert found["PATH"] == "/opt/bin"
    assert "SECRET_OF_THE_SERVICE" not in found


@pytest.mark.parametrize("asked", [{}, {"PATH": "/opt/bin", "PYTHONPATH": "/opt/lib"}])
def test_a_rank_in_a_virtual_environment_finds_it_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: dict[str, str]
) -> None:
    """The service's own modules are none of its: they may be another Python's."""
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("PYTHONPATH", "/srv/modules")
    effect = RunRank(JobId("j"), 0, 0, 1, ("python",), "", (), env=asked)
    given = effect, WorkerConfig(), NodeId("n1"), tmp_path / "result.json"
    found = rank_environment(*given, venv="/venvs/a")
    assert found["VIRTUAL_ENV"] == "/venvs/a"
    assert found["PATH"] == f"/venvs/a/bin:{asked.get('PATH', '/usr/bin')}"
    assert found["PYTHONPATH"].split(":") == [str(FOLDER), *(["/opt/lib"] if asked else [])]
    assert "/srv/modules" in rank_environment(*given)["PYTHONPATH"] or asked


def test_python_is_the_environment_s_own(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho its own, $1\n")
    python.chmod(0o755)
    files = RankFiles(tmp_path, "j", 0)
    intent = Intent(job="j", rank=0, workers=1, program=("python", "train.py"), venv="a" * 64)
    path = in_front(str(tmp_path), "/usr/bin:/bin")
    assert files.launch(intent, {"PATH": path}, 2**23).wait(60) == 0
    while not files.logged():
        pass
    assert files.path("log").read_text() == "its own, train.py\n"


def test_a_program_has_no_variable_and_no_descriptor_of_the_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NATS_PASSWORD", "s3cret")
    shown = "tr '\\0' '\\n' < /proc/self/environ; ls -l /proc/self/fd"
    with (tmp_path / "secret").open("w") as secret:
        files = RankFiles(tmp_path, "j", 0)
        intent = Intent(job="j", rank=0, workers=1, program=("/bin/sh", "-c", shown))
        child = files.launch(intent, {"PATH": "/usr/bin:/bin"}, 2**23)
        assert child.wait(60) == 0
        assert secret.fileno() > 2
    while not files.logged():
        pass
    said = files.path("log").read_text()
    assert "PATH=/usr/bin:/bin" in said
    assert "s3cret" not in said
    assert str(tmp_path / "secret") not in said


def test_what_the_service_keeps_of_a_rank_is_its_own_account_s_alone(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, "j", 0)
    intent = Intent(job="j", rank=0, workers=1, program=("/bin/echo", "hello"))
    assert files.launch(intent, {}, 2**23).wait(60) == 0
    for what in ("intent.json", "log", "logger"):
        assert stat.S_IMODE(files.path(what).stat().st_mode) == 0o600, what
    assert stat.S_IMODE(files.folder.stat().st_mode) & 0o077 == 0
