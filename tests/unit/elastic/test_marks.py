"""Marks of a program: what is saved, in which order, and what follows where that fails."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.elastic.test_driver_server import begun

from slackwater.common.base import saved_program
from slackwater.common.base.checkpoint_folder import BUCKETS, CheckpointFolder
from slackwater.common.base.errors import Rejected, Unavailable
from slackwater.elastic import marks as marks_module
from slackwater.elastic.marks import Marks
from slackwater.elastic.server import DriverServer
from slackwater.schemas.base import JobId
from slackwater.schemas.checkpoints import CheckpointPhase, CheckpointProgress
from slackwater.schemas.jobs import SAVE_EVERY_VARIABLE, SAVE_TO_VARIABLE


def progress(phase: CheckpointPhase, reason: str = "") -> CheckpointProgress:
    return CheckpointProgress(
        job=JobId("j"), request="m", phase=phase, iteration=3, buckets=1, written=0, nbytes=0,
        took_s=0.0, reason=reason,
    )  # fmt: skip


class Aggregators:
    """Stand for an Agent: they save at the second time that they are asked."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked, self.kept = folder, list[str](), list[str]()
        self.fault: Exception | CheckpointProgress | None = None

    def save_mark(self, name: str) -> CheckpointProgress:
        self.asked.append(name)
        if isinstance(self.fault, Exception):
            raise self.fault
        if self.fault is not None:
            return self.fault
        if self.asked.count(name) < 2:
            return progress("copying")
        CheckpointFolder(self.folder / name, BUCKETS).write(
            3, 0, 1, BUCKETS, lambda path: path.write_bytes(b"x")
        )
        return progress("done")

    def keep_mark(self, name: str) -> None:
        made = self.folder / name
        assert saved_program.saved(made) is not None, "it is whole before it counts"
        self.kept.append(str(made))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DriverServer]:
    made = begun(tmp_path / "elastic")
    yield made
    made.close(within_s=0.0)


def marks(server: DriverServer, tmp_path: Path, every_s: float = 60.0) -> tuple[Marks, Aggregators]:
    agent: Any = Aggregators(tmp_path / "to")
    environment = {SAVE_TO_VARIABLE: str(tmp_path / "to"), SAVE_EVERY_VARIABLE: str(every_s)}
    made = Marks.wanted(agent, server, environment)
    assert made is not None
    return made, agent


def look_until(made: Marks, done: Callable[[], object]) -> None:
    until_s = time.monotonic() + 10.0
    while time.monotonic() < until_s:
        made.look(lambda: None)
        if done():
            return
        time.sleep(0.005)
    raise AssertionError("it does not come")


def test_the_first_one_is_taken_at_once_and_replaces_what_was_there(
    server: DriverServer, tmp_path: Path
) -> None:
    older = tmp_path / "to" / "mark-9-aa"
    older.mkdir(parents=True)
    made, agent = marks(server, tmp_path, every_s=0.05)
    look_until(made, lambda: len(agent.kept) == 1 and not made.due)
    (first,) = (tmp_path / "to").iterdir()
    assert agent.kept == [str(first)]
    assert first.name.startswith("mark-0-")
    assert saved_program.newest_mark(tmp_path / "to") == first
    look_until(made, lambda: len(agent.kept) == 2)
    assert [path for path in map(Path, agent.kept) if path.exists()] == [Path(agent.kept[1])]


def test_a_driver_that_goes_on_has_its_mark_already(server: DriverServer, tmp_path: Path) -> None:
    (tmp_path / "to" / "mark-5-aa").mkdir(parents=True)
    server.core.version = 5
    made, agent = marks(server, tmp_path)
    made.look(lambda: None)
    assert not server.held
    assert not agent.asked


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Unavailable("the bus is away", 1.0), "the bus is away"),
        (Rejected("no"), "no"),
        (TimeoutError("late"), "late"),
        (progress("failed", "the disk of a1 is full"), "the disk of a1 is full"),
    ],
)
def test_one_that_cannot_be_saved_is_left_out(
    server: DriverServer, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    fault: Exception | CheckpointProgress, said: str,
) -> None:  # fmt: skip
    older = tmp_path / "to" / "mark-0-aa"
    older.mkdir(parents=True)
    made, agent = marks(server, tmp_path)
    agent.fault = fault
    look_until(made, lambda: agent.asked)
    look_until(made, lambda: not server.held)
    assert not agent.kept
    assert older.is_dir(), "it is the newest that is whole"
    assert f"no mark in {tmp_path / 'to'}: " in (text := capsys.readouterr().err)
    assert said in text


def test_a_folder_that_cannot_be_made_is_named(
    server: DriverServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "to").write_text("a file")
    made, agent = marks(server, tmp_path)
    look_until(made, lambda: "File exists" in capsys.readouterr().err)
    assert not agent.asked
    look_until(made, lambda: not server.held)


def test_a_task_that_does_not_end_holds_nobody_up_for_long(
    server: DriverServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(DriverServer, "held", property(lambda self: False))
    monkeypatch.setattr(marks_module, "HOLD_S", 0.0)
    made, agent = marks(server, tmp_path)
    look_until(made, lambda: "not all tasks ended within 0 s" in capsys.readouterr().err)
    assert not agent.asked


def test_jobs_that_do_not_go_back_take_none(server: DriverServer) -> None:
    agent: Any = None
    assert Marks.wanted(agent, server, {}) is None
