"""Job processes on disk: what a service that was killed finds when it comes back."""

import asyncio
import os
import signal
import subprocess
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.waiting import eventually

from slackwater.common.bus.memory import MemoryBroker
from slackwater.schemas.base import JobId, NodeId
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.containment import Containment
from slackwater.services.worker.effects import LookAtProgram, RunRank
from slackwater.services.worker.events import Found
from slackwater.services.worker.gpus import Inventory
from slackwater.services.worker.processes import Intent, RankFiles, find
from slackwater.services.worker.shell import Processes

LOG_BYTES_MAX = 8 * 1024**2


def launch(
    state_dir: Path, *program: str, rank: int = 0, attempt: int = 0, folder: str = ""
) -> tuple[RankFiles, "subprocess.Popen[bytes]"]:
    files = RankFiles(state_dir, "j1", rank, attempt)
    intent = Intent(job="j1", rank=rank, workers=1, program=program, attempt=attempt, folder=folder)
    environment = {"SLACKWATER_RESULT": str(files.path("result.json"))}
    return files, files.launch(intent, environment, LOG_BYTES_MAX)


def ended(files: RankFiles, child: "subprocess.Popen[bytes]") -> int:
    """Its code, once all that it printed is in its log."""
    code = child.wait(30)
    eventually(files.logged, "what it printed is in its log")
    return code


def identified(files: RankFiles) -> None:
    eventually(files.identity, "the leader is up")


def stop(files: RankFiles, child: "subprocess.Popen[bytes]") -> None:
    """Again and again: one that comes while the shell forks for the program is lost."""
    identity = files.identity()
    assert identity is not None
    for _ in range(60):
        files.signal_group(identity, kill=False)
        try:
            child.wait(0.5)
        except subprocess.TimeoutExpired:
            continue
        return
    raise AssertionError("it does not end")


def test_a_program_that_ends_well_leaves_its_result(tmp_path: Path) -> None:
    files, child = launch(tmp_path, "/bin/sh", "-c", 'echo \'{"a": 1}\' > "$SLACKWATER_RESULT"')
    assert child.wait(30) == 0
    (found,) = find(tmp_path)
    assert (found.state, found.code, found.result) == ("exited", 0, '{"a": 1}\n')
    files.forget()
    assert find(tmp_path) == (Found(found.job, 0, "reported"),)


def test_a_program_runs_in_the_folder_that_was_asked_for(tmp_path: Path) -> None:
    """A service that was killed before it started the program runs it there, too."""
    folder = tmp_path / "my work"
    folder.mkdir()
    files, child = launch(tmp_path, "pwd", folder=str(folder))
    assert ended(files, child) == 0
    assert files.log.read(0, 1024).data.decode() == f"{folder}\n"
    for name in ("process", "exit"):
        files.path(name).unlink()
    (found,) = find(tmp_path)
    assert (found.state, found.folder) == ("intended", str(folder))


async def test_a_folder_that_does_not_answer_holds_up_nothing_but_its_own_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: a file server that was away stopped the whole service, heartbeats included, and
    with it every job of its node."""
    back = threading.Event()

    def is_folder(path: str) -> bool:
        return back.wait(30) if path.startswith("/away") else True

    monkeypatch.setattr(os.path, "isdir", is_folder)
    config = WorkerConfig(state_dir=str(tmp_path), warm="off", cgroups=False)
    inventory = Inventory(config, NodeId("w1"), None)
    processes = Processes(config, inventory, MemoryBroker(seed=1).connect("w1"))
    away = [LookAtProgram(n, JobId(f"j{n}"), 0, ("/bin/true",), "/away", None) for n in range(9)]
    looks = [asyncio.create_task(processes.look_at_program(each)) for each in away]
    async with asyncio.timeout(20):
        assert await asyncio.to_thread(lambda: True), "what others do off the loop goes on, too"
    assert not any(look.done() for look in looks)
    back.set()
    assert {look.token for look in await asyncio.gather(*looks)} == set(range(9))
    await processes.stop()


async def test_a_rank_that_is_not_started_leaves_no_cgroup(tmp_path: Path) -> None:
    """Red before: an empty one stayed until the service was started anew."""
    config = WorkerConfig(state_dir=str(tmp_path / "state"), warm="off", cgroups=False)
    inventory = Inventory(config, NodeId("w1"), None)
    processes = Processes(config, inventory, MemoryBroker(seed=1).connect("w1"))
    processes._port = port = Mock()
    parent = tmp_path / "cgroups"
    parent.mkdir()
    processes._containment = Containment(tmp_path / "state", parent)
    elsewhere = str(tmp_path / "elsewhere")
    processes.run(RunRank(JobId("j1"), 0, 3, 1, ("python", "train.py"), elsewhere, ()))
    assert [*parent.iterdir()]
    await processes._tasks.ended()
    assert "elsewhere" in port.post.call_args[0][0].result
    assert not [*parent.iterdir()]


def test_a_folder_that_the_node_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        launch(tmp_path, "pwd", folder=str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("written", ["", " ", "\\n"])
def test_an_empty_result_is_no_result(tmp_path: Path, written: str) -> None:
    """An Agent that is closed without a result leaves an empty file."""
    command = f"printf '{written}' > $SLACKWATER_RESULT"
    files, child = launch(tmp_path, "/bin/sh", "-c", command)
    ended(files, child)
    assert files.path("result.json").exists()
    assert files.outcome() == (0, "")


def test_a_failure_is_explained_by_the_last_line_of_the_log(tmp_path: Path) -> None:
    files, child = launch(tmp_path, "/bin/sh", "-c", "echo one; echo 'no such model' >&2; exit 64")
    ended(files, child)
    assert files.outcome() == (64, "no such model")


def test_a_program_that_does_not_exist_fails_with_its_name(tmp_path: Path) -> None:
    files, child = launch(tmp_path, "/nonexistent/trainer")
    ended(files, child)
    code, reason = files.outcome()
    assert code == 127
    assert "/nonexistent/trainer" in reason


@pytest.mark.parametrize(
    ("written", "said"),
    [("x" * 5000, "a result of over 4096 bytes"), ("{no json", "the result is not JSON")],
)
def test_an_unusable_result_is_said_to_be_so(tmp_path: Path, written: str, said: str) -> None:
    files, child = launch(tmp_path, "/bin/sh", "-c", f'printf %s "{written}" > $SLACKWATER_RESULT')
    ended(files, child)
    assert said in files.outcome()[1]


def test_a_running_rank_is_found_and_cannot_be_started_twice(tmp_path: Path) -> None:
    files, child = launch(tmp_path, "/bin/sleep", "60")
    identified(files)
    identity = files.identity()
    assert identity is not None
    assert identity.pid == child.pid
    try:
        assert [found.state for found in find(tmp_path)] == ["running"]
        _, second = launch(tmp_path, "/bin/sleep", "60")
        assert second.wait(30) == 75
        assert files.identity() == identity
    finally:
        stop(files, child)
    assert files.outcome()[0] == -signal.SIGTERM
    assert [found.state for found in find(tmp_path)] == ["exited"]


def test_a_group_that_was_killed_whole_has_no_code_but_an_end(tmp_path: Path) -> None:
    files, child = launch(tmp_path, "/bin/sleep", "60")
    identified(files)
    os.killpg(child.pid, signal.SIGKILL)
    ended(files, child)
    (found,) = find(tmp_path)
    assert (found.state, found.code, found.result) == ("exited", None, "")


def test_another_process_with_the_same_pid_is_not_ours(tmp_path: Path) -> None:
    files, child = launch(tmp_path, "/bin/sleep", "60")
    identified(files)
    identity = files.identity()
    assert identity is not None
    assert identity.alive()
    assert not type(identity)(identity.boot_id, identity.pid, identity.start_ticks - 1).alive()
    assert not type(identity)("another boot", identity.pid, identity.start_ticks).alive()
    files.signal_group(identity, kill=True)
    ended(files, child)
    assert not identity.alive()


def test_an_intention_without_a_process_is_found_as_such(tmp_path: Path) -> None:
    files, child = launch(tmp_path, "/bin/true")
    ended(files, child)
    files.path("process").unlink()
    files.path("exit").unlink()
    (found,) = find(tmp_path)
    assert (found.state, found.program) == ("intended", ("/bin/true",))


def test_each_attempt_has_files_of_its_own_and_the_log_of_all(tmp_path: Path) -> None:
    first, child = launch(tmp_path, "/bin/sh", "-c", "echo first; exit 3")
    ended(first, child)
    first.forget()
    second, child = launch(tmp_path, "/bin/sh", "-c", "echo second", attempt=1)
    ended(second, child)
    (found,) = find(tmp_path)
    assert (found.state, found.code, found.attempt) == ("exited", 0, 1)
    assert second.path("log").read_text() == "first\nsecond\n"
    assert not first.path("reported").exists()
    assert not first.path("process").exists()
    second.forget()
    (found,) = find(tmp_path)
    assert (found.state, found.attempt) == ("reported", 1)


def test_a_restart_that_was_only_intended_is_found_as_such(tmp_path: Path) -> None:
    """Killed between the intention and the removal of what the attempt before had left."""
    first, child = launch(tmp_path, "/bin/sh", "-c", "exit 3")
    child.wait(30)
    second, child = launch(tmp_path, "/bin/true", attempt=1)
    child.wait(30)
    for what in ("process", "exit"):
        second.path(what).rename(first.path(what))
    (found,) = find(tmp_path)
    assert (found.state, found.attempt) == ("intended", 1)
