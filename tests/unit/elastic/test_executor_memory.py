"""Executors that are put aside and read again come back as they were."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slackwater.common.base.errors import Fatal, Rejected
from slackwater.elastic import Executor as Base
from slackwater.elastic.app import App, Table
from slackwater.elastic.drivers import Bsp
from slackwater.elastic.memory import ARRAY_BYTES, USED_PART, ExecutorMemory, private_bytes

EACH_BYTES = 1_000_000
ROWS = 2_000


class Some(App):
    executors = 8
    tables = {"w": Table(1, 1)}
    driver = Bsp(1)

    class Executor(Base):
        def load(self, part: int) -> None:
            rng = np.random.default_rng(part)
            self.x = rng.normal(size=(ROWS, 10)).astype(np.float32)
            self.frozen = rng.integers(0, 9, 30_000)
            self.frozen.flags.writeable = False
            self.by_word = {"a": [rng.normal(size=20_000), "text"], "b": np.arange(3)}
            self.rng = rng
            self.runs = 0

        def run(self, ctx: Any, task: Any) -> None:
            raise AssertionError


def executor(app: App, number: int) -> Any:
    made = app.executor(number)
    made.load(number)
    return made


class Lodging:
    """A host's memory with room for `fitting` executors, as many as `here` say."""

    def __init__(self, folder: Path, fitting: int = 2, count: int = 4) -> None:
        self.app = Some()
        limit_bytes = int((fitting + 0.05) * EACH_BYTES / USED_PART)
        self.moves = threading.Semaphore(0)
        self.memory = ExecutorMemory(
            self.app, limit_bytes, folder, lambda: self.memory.here * EACH_BYTES,
            moved=self.moves.release,
        )  # fmt: skip
        self.executors = {n: executor(self.app, n) for n in range(count)}
        for number, made in self.executors.items():
            self.memory.came(number, made, (), ())

    def here(self) -> list[int]:
        return [n for n in self.executors if self.memory.has(n)]

    def look(self, *waiting: int, busy: tuple[int, ...] = (), idle: bool = False) -> list[int]:
        """Look ahead, wait for what that begins, and return who is here then."""
        self.memory.look_ahead(waiting, busy, idle)
        if self.memory._moving is not None:
            assert self.moves.acquire(timeout=10.0)
            self.memory._settle()
        return self.here()


@pytest.fixture
def lodging(tmp_path: Path) -> Iterator[Lodging]:
    made = Lodging(tmp_path)
    yield made
    made.memory.close()


def same(a: Any, b: Any) -> bool:
    return (
        (a.x == b.x).all() and (a.frozen == b.frozen).all() and not a.frozen.flags.writeable
        and (a.by_word["a"][0] == b.by_word["a"][0]).all() and a.by_word["a"][1] == "text"
        and (a.by_word["b"] == b.by_word["b"]).all() and a.runs == b.runs
        and a.rng.bit_generator.state == b.rng.bit_generator.state
    )  # fmt: skip


def test_an_executor_comes_back_as_it_was(lodging: Lodging) -> None:
    assert lodging.here() == [0, 1]
    aside = lodging.executors[3]
    assert vars(aside) == {}
    lodging.memory.bring(3)
    assert same(aside, executor(lodging.app, 3))
    assert aside.app is lodging.app
    assert aside.number == 3
    aside.x += 1.0
    aside.runs = 7
    assert lodging.look(0, 1, 2) == [0, 1]
    lodging.memory.bring(3)
    changed = executor(lodging.app, 3)
    changed.x += 1.0
    changed.runs = 7
    assert same(aside, changed)


def test_arrays_that_did_not_change_are_written_once(lodging: Lodging) -> None:
    memory = lodging.memory
    lodging.look(2, idle=True)
    before = memory.written_bytes
    lodging.look(3, idle=True)
    assert memory.written_bytes - before < ARRAY_BYTES
    before = memory.written_bytes
    lodging.executors[3].x[5, 5] += 1.0
    lodging.look(2, idle=True)
    assert 0 <= memory.written_bytes - before - ROWS * 40 < ARRAY_BYTES
    lodging.executors[2].x = np.zeros((ROWS * 2, 10), np.float32)
    lodging.look(3, idle=True)
    lodging.look(2, idle=True)
    assert (lodging.executors[2].x == 0.0).all()
    assert lodging.executors[2].x.shape == (ROWS * 2, 10)


def test_executors_without_tasks_make_room_for_the_next_task(lodging: Lodging) -> None:
    assert lodging.look(0, 1, 2) == [0, 1]
    assert lodging.look(0, 2) == [0, 2]
    assert lodging.look(0, 2, 3, busy=(2,)) == [0, 2]
    assert lodging.look(3, 2, busy=(0,)) == [0, 2]
    assert lodging.look(3, 2) == [2, 3]


def test_a_task_that_waited_for_long_is_run(lodging: Lodging) -> None:
    """Where executors that are here always have another task, as with `Asp`."""
    for _ in range(30):
        if 3 in lodging.look(3, 3, 0, 0, 1, 1):
            break
    else:
        raise AssertionError
    assert lodging.here() == [0, 3]


def test_one_that_cannot_be_put_aside_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lodging = Lodging(tmp_path, count=2)
    odd = executor(lodging.app, 7)
    odd.lock = threading.Lock()
    lodging.executors[7] = odd
    lodging.memory.came(7, odd, (), ())
    assert lodging.here() == [0, 7]
    assert "executor 7 stays in memory" in capsys.readouterr().err
    assert lodging.look(1, idle=True) == [1, 7]
    assert odd.x.shape == (ROWS, 10)
    lodging.memory.close()


def test_what_its_folder_refuses_is_said(tmp_path: Path) -> None:
    file = tmp_path / "a-file"
    file.write_text("")
    with pytest.raises(Fatal, match=r"executor 2, which was put aside in .*a-file.*--memory"):
        Lodging(file)


def test_a_class_that_cannot_be_made_again_is_said(lodging: Lodging) -> None:
    lodging.look(0, 2)
    lodging.executors[2].odd = Odd()
    lodging.look(3, idle=True)
    with pytest.raises(Rejected, match="executor 2 was put aside, and cannot be taken up: no"):
        lodging.memory.bring(2)


class Odd:
    def __setstate__(self, state: Any) -> None:
        raise ValueError("no")

    def __getstate__(self) -> Any:
        return {"something": 1}


def test_memory_of_what_is_put_aside_is_free() -> None:
    """A reference that stays, as in a pickler's memo, would keep the arrays."""
    app = Some()
    held = [app.executor(n) for n in range(6)]
    limit_bytes = int((private_bytes() + 60_000_000) / USED_PART)
    memory = ExecutorMemory(app, limit_bytes, Path("/var/tmp"))
    for number, made in enumerate(held):
        vars(made)["x"] = np.ones((40_000_000 // 4,), np.float32)
        memory.came(number, made, (), ())
    assert memory.here >= 1
    assert private_bytes() < limit_bytes
    memory.bring(5)
    assert (vars(held[5])["x"] == 1.0).all()
    memory.close()


def test_a_limit_that_is_lowered_puts_executors_aside_though_none_is_to_be_read(
    tmp_path: Path,
) -> None:
    lodging = Lodging(tmp_path, fitting=4)
    assert lodging.look(0, 1) == [0, 1, 2, 3]
    assert lodging.memory.aside_bytes == 0
    lodging.memory.limit_bytes = int(2.05 * EACH_BYTES / USED_PART)
    assert lodging.look(0) == [0, 1], "the last that came are the last to be needed again"
    assert lodging.look(0, 1) == [0, 1]
    assert lodging.memory.aside_bytes == pytest.approx(2 * 480_000, rel=0.1)
    assert lodging.memory.used_bytes == 2 * EACH_BYTES
    lodging.memory.limit_bytes = int(4.05 * EACH_BYTES / USED_PART)
    assert lodging.look(0, 1, 2, 3) == [0, 1, 2]
    assert lodging.look(0, 1, 2, 3) == [0, 1, 2, 3]
    lodging.memory.close()


def test_what_nothing_can_be_run_for_is_counted(lodging: Lodging) -> None:
    memory = lodging.memory
    for now_s, stalled in ((0.0, False), (1.0, True), (1.5, True), (3.0, False), (9.0, False)):
        memory.waits(now_s, stalled)
    assert memory.stalled_s == 2.0
