"""Elastic programs that cannot be run are refused by the field that is wrong."""

import re
from typing import Any

import numpy as np
import pytest

from slackwater.common.base.errors import Rejected
from slackwater.common.base.packing import ARRAYS
from slackwater.elastic import App, Asp, Bsp, Executor, Rotation, Ssp, Table
from slackwater.elastic.app import checked, described
from slackwater.elastic.rules import AdaGrad, Decay, NonNegative, SoftThreshold


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
        ("tables", {"w": Table(2, 2, rule="add")}, "w'].rule is 'add'; give Add(), NonNegative()"),  # type: ignore[arg-type]
        ("tables", {"w": Table(2, 2, rule=SoftThreshold(-1.0))}, "w'].rule.by is -1.0; give a"),
        (
            "tables",
            {"w": Table(2, 2, rule=Decay(1.5))},
            "w'].rule.share is 1.5; give a number from 0 to 1",
        ),
        ("tables", {"w": Table(2, 2, rule=AdaGrad(np.nan))}, "w'].rule.rate is nan"),
        (
            "tables",
            {"w": Table(2, 2, dtype="int32", rule=AdaGrad(1.0))},
            "makes fractions of counts",
        ),
        ("tables", {"w": Table(2, 2, sparse=True, rule=Decay(0.1))}, "let it not be sparse"),
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
    shrinking = checked(app(tables={"w": Table(3, 2, rule=SoftThreshold(0.5))}))
    assert described(shrinking).split("; ")[1] == "tables w 3 x 2 float32 SoftThreshold(by=0.5)"


def test_first_values() -> None:
    assert Table(2, 2).first_values("w").tolist() == [[0, 0], [0, 0]]
    assert Table(1, 2, init=lambda: [[1, 2]]).first_values("w").tolist() == [[1, 2]]
    with pytest.raises(Rejected, match=r"table w: init has shape \(3,\), the table \(1, 3\)"):
        Table(1, 3, init=np.ones(3)).first_values("w")
    with pytest.raises(Rejected, match="not all finite"):
        Table(1, 1, init=[[np.inf]]).first_values("w")
    with pytest.raises(Rejected, match="its numbers are whole, its initial values are not"):
        Table(1, 1, dtype="int32", init=[[0.5]]).first_values("w")
    with pytest.raises(Rejected, match=r"table w: an initial value is negative, which NonNegative"):
        Table(1, 1, init=[[-1.0]], rule=NonNegative()).first_values("w")


@pytest.mark.parametrize("wrong", [0, -1, 1.0, None, True])
def test_drivers_refuse_wrong_numbers(wrong: Any) -> None:
    with pytest.raises(Rejected, match="iterations is"):
        Ssp(wrong)
    with pytest.raises(Rejected, match="staleness is"):
        Ssp(1, wrong if wrong else -1)
    with pytest.raises(Rejected, match="sweeps is"):
        Rotation(wrong)


class Recorded:
    """A run that notes what its driver does."""

    def __init__(self, executors: int) -> None:
        self.executors = executors
        self.sent: list[tuple[int, Any]] = []
        self.told: list[tuple[int, float | None]] = []
        self.result: Any = None

    def dispatch(self, executor: int, task: Any) -> None:
        self.sent.append((executor, task))

    def report(self, iteration: int, of: int, /, **measured: float) -> None:
        self.told.append((iteration, next(iter(measured.values()), None)))

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


def test_in_a_sweep_each_executor_has_each_part_and_no_two_have_one_at_once() -> None:
    run, driver = Recorded(3), Rotation(2, "likelihood")
    driver.start(run)
    held: list[set[tuple[int, int]]] = [set(), set()]
    for turn in range(-1, 6):
        tasks = run.sent[-3:]
        assert tasks == [(executor, turn) for executor in range(3)]
        parts = {(executor + turn) % 3 for executor, _ in tasks}
        assert parts == {0, 1, 2}
        for executor, _ in reversed(tasks):
            assert run.result is None
            if turn >= 0:
                held[turn // 3].add((executor, (executor + turn) % 3))
            driver.done(run, executor, turn, None if turn < 0 else (-4.0 * executor, 2 * executor))
    assert all(len(pairs) == 9 for pairs in held)
    assert len(run.sent) == 3 * 7
    assert run.told == [(1, -2.0), (2, -2.0)]
    assert run.result == {"sweeps": 2, "likelihood": -2.0}


def test_a_rotation_measures_means_of_numbers_and_nothing_of_text() -> None:
    run, driver = Recorded(1), Rotation(1, measured="of")
    driver.start(run)
    driver.done(run, 0, -1, None)
    driver.done(run, 0, 0, 7.0)
    assert run.result == {"sweeps": 1, "of": 7.0}, "any name will do"
    for results, value in (([1.0, 3.0], 2.0), (["a", None], None), ([5, "a"], 5.0)):
        run, driver = Recorded(2), Rotation(1)
        driver.start(run)
        for turn in (-1, 0, 1):
            for executor, result in enumerate(results):
                driver.done(run, executor, turn, result)
        assert run.told == [(1, value)]
        assert run.result == ({"sweeps": 1} if value is None else {"sweeps": 1, "loss": value})


@pytest.mark.parametrize("made", [lambda: Ssp(4, 1), lambda: Asp(4), lambda: Rotation(3)])
def test_a_driver_that_takes_up_a_saved_state_goes_on_alike(made: Any) -> None:
    """At any instant: what it dispatches, tells and ends with is that of the one that lives on."""
    whole, driver = Recorded(3), made()
    driver.start(whole)
    at = 0
    while whole.result is None:
        state = ARRAYS.unpack(ARRAYS.pack(driver.save()))
        other, heir = Recorded(3), made()
        heir.restore(state)
        done, told = len(whole.sent), len(whole.told)
        executor, task = whole.sent[at]
        driver.done(whole, executor, task, float(at))
        heir.done(other, executor, task, float(at))
        assert (other.sent, other.told) == (whole.sent[done:], whole.told[told:])
        assert other.result == whole.result
        at += 1
    assert at == len(whole.sent)
