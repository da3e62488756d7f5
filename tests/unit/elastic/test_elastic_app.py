"""Elastic programs that cannot be run are refused by the field that is wrong."""

import re
from typing import Any

import numpy as np
import pytest

from slackwater.common.base.errors import Rejected
from slackwater.elastic import App, Asp, Bsp, Executor, Ssp, Table
from slackwater.elastic.app import checked, described


class Work(Executor):
    def run(self, ctx: Any, task: Any) -> None:
        """Do nothing."""


def app(**fields: Any) -> App:
    usual = {"executors": 2, "tables": {"w": Table(3, 2)}, "driver": Ssp(1), "Executor": Work}
    return type("Mine", (App,), {**usual, **fields})()


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("executors", 0, "Mine.executors is 0; give a whole number from 1"),
        ("executors", 5000, "executors is 5000"),
        ("executors", 2.0, "executors is 2.0"),
        ("tables", {}, "tables is empty"),
        ("tables", {"": Table(1, 1)}, "a table's name"),
        ("tables", {"w": (3, 2)}, "tables['w'] is a tuple, not a Table"),
        ("tables", {"w": Table(0, 2)}, "tables['w'].rows is 0"),
        ("tables", {"w": Table(2, 1.5)}, "width is 1.5"),  # type: ignore[arg-type]
        ("tables", {"w": Table(2, 2, sparse="all")}, "sparse is 'all'; give True"),  # type: ignore[arg-type]
        ("tables", {"w": Table(2, 2, dtype="int64")}, "dtype is 'int64'; choose float32 or int32"),
        ("driver", None, "driver is not a Driver"),
        ("Executor", object, "Executor is not a class of Executors"),
        ("Executor", Executor, "Executor has no run()"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any, named: str) -> None:
    with pytest.raises(Rejected, match=re.escape(named)):
        checked(app(**{field: value}))


def test_a_right_program_is_described_in_a_line() -> None:
    whole = checked(app(tables={"w": Table(3, 2), "n": Table(1, 4, dtype="int32")}))
    assert described(whole) == (
        "Mine: 2 executors; tables w 3 x 2 float32, n 1 x 4 int32; Ssp(1, 0)"
    )
    assert whole.executor(1).number == 1


def test_first_values() -> None:
    assert Table(2, 2).first_values("w").tolist() == [[0, 0], [0, 0]]
    assert Table(1, 2, init=lambda: [[1, 2]]).first_values("w").tolist() == [[1, 2]]
    with pytest.raises(Rejected, match=r"table w: init has shape \(3,\), the table \(1, 3\)"):
        Table(1, 3, init=np.ones(3)).first_values("w")
    with pytest.raises(Rejected, match="not all finite"):
        Table(1, 1, init=[[np.inf]]).first_values("w")


@pytest.mark.parametrize("wrong", [0, -1, 1.0, None, True])
def test_drivers_refuse_wrong_numbers(wrong: Any) -> None:
    with pytest.raises(Rejected, match="iterations is"):
        Ssp(wrong)
    with pytest.raises(Rejected, match="staleness is"):
        Ssp(1, wrong if wrong else -1)


class Recorded:
    """A run that notes what its driver does."""

    def __init__(self, executors: int) -> None:
        self.executors = executors
        self.sent: list[tuple[int, Any]] = []
        self.told: list[tuple[int, float | None]] = []
        self.result: Any = None

    def dispatch(self, executor: int, task: Any) -> None:
        self.sent.append((executor, task))

    def report(self, iteration: int, of: int, **measured: float) -> None:
        self.told.append((iteration, measured.get("loss")))

    def end(self, result: Any = None) -> None:
        self.result = result


def test_ssp_lets_nobody_run_further_ahead_than_its_bound() -> None:
    run, driver = Recorded(2), Ssp(4, staleness=1)
    driver.start(run)
    assert run.sent == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for task in (0, 1):
        driver.done(run, 0, task, 2.0)
    assert len(run.sent) == 4, "executor 1 has completed none"
    driver.done(run, 1, 0, 4.0)
    assert run.sent[4:] == [(0, 2), (1, 2)]
    assert run.told == [(1, 3.0)]


def test_bsp_and_asp() -> None:
    run = Recorded(3)
    Bsp(5).start(run)
    assert run.sent == [(0, 0), (1, 0), (2, 0)]
    run, driver = Recorded(2), Asp(3)
    driver.start(run)
    for task in range(3):
        driver.done(run, 0, task, "no loss")
    assert [task for executor, task in run.sent if executor == 0] == [0, 1, 2]
    assert [task for executor, task in run.sent if executor == 1] == [0, 1]
    for task in range(3):
        driver.done(run, 1, task, None)
    assert run.result == {"iterations": 3}
    assert run.told == [(1, None), (2, None), (3, None)]
