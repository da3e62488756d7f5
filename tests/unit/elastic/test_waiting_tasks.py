"""A task that waits for a table gives its slot to other executors' tasks."""

from random import Random
from typing import Any

import numpy as np
import pytest
from tests.sim.elastic import Disk, Kills, MemoryFiles, MemoryTables, Store

from slackwater.common.base.packing import ARRAYS
from slackwater.common.domains.slots.rules import Floats
from slackwater.elastic import App, Bsp, Table
from slackwater.elastic import Executor as Base
from slackwater.elastic.host import Host
from slackwater.schemas.base import Message
from slackwater.schemas.elastic import (
    HostWelcome,
    Order,
    Orders,
    TakeExecutor,
    TaskFailed,
    Told,
)

EXECUTORS = 6


class Afar(MemoryTables):
    """Tables whose reads are there after so many looks."""

    def __init__(self, looks: int, app: App) -> None:
        self.values = np.zeros((EXECUTORS, 1), np.float32)
        store = Store(app.tables, {"w": self.values})
        super().__init__(store, 0, Kills(Random(0), 0.0))
        self.looks, self.most = looks, 0

    def read(self, name: str) -> Floats:
        left = iter(range(self.looks))
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        self.meanwhile(lambda: next(left, None) is None)
        self.waiting -= 1
        return self.values.copy()


class Reading(App):
    executors = EXECUTORS
    tables = {"w": Table(EXECUTORS, 1)}
    driver = Bsp(1)
    said: list[str]
    result: Any = None
    fails = -1

    class Executor(Base):
        app: "Reading"

        def run(self, ctx: Any, task: Any) -> Any:
            self.app.said.append(f"{self.number} begins")
            ctx.update("w", [[1.0]], rows=[self.number])
            seen = ctx.get("w")[:, 0]
            assert seen[self.number] == 1.0 + task
            if self.number == self.app.fails:
                raise ValueError("no")
            self.app.said.append(f"{self.number} ends")
            return self.app.result


class Hosted:
    def __init__(self, looks: int, app: Reading) -> None:
        self.app, self.tables = app, Afar(looks, app)
        app.said = []
        self.sent: list[Message] = []
        self.host = Host(
            app, self.tables, lambda run: MemoryFiles(Disk(), Kills(Random(0), 0.0)),
            lambda message, payload: self.sent.append(message),
        )  # fmt: skip
        self.host.heard(HostWelcome(run="r"))
        for number in range(EXECUTORS):
            self.host.heard(TakeExecutor(executor=number, move=1, has_state=False))

    def order(self, *executors: int, task: int = 0) -> None:
        orders = tuple(
            Order(number=100 * task + at, executor=executor, version=at, task=ARRAYS.pack(task))
            for at, executor in enumerate(executors)
        )
        self.host.heard(Orders(orders=orders))


def test_others_run_while_a_read_is_on_its_way() -> None:
    hosted = Hosted(1, Reading())
    hosted.order(0, 1, 2)
    hosted.host.step()
    begun = [f"{n} begins" for n in (0, 1, 2)]
    assert hosted.app.said == [*begun, "2 ends", "1 ends", "0 ends"]
    assert hosted.tables.values[:, 0].tolist() == [1, 1, 1, 0, 0, 0]


def test_an_executor_s_next_task_waits_for_the_one_before() -> None:
    hosted = Hosted(5, Reading())
    hosted.order(0, task=0)
    hosted.order(0, task=1)
    hosted.host.step()
    assert hosted.app.said == ["0 begins", "0 ends"]
    hosted.host.step()
    assert hosted.app.said[2:] == ["0 begins", "0 ends"]


def test_as_many_wait_as_the_batch_has_room_for() -> None:
    app = Reading()
    app.result = "x" * 60_000
    hosted = Hosted(9, app)
    hosted.order(*range(EXECUTORS))
    for _ in range(9):
        hosted.host.step()
    assert hosted.tables.most == 4
    told = [message for message in hosted.sent if isinstance(message, Told)]
    assert all(sum(len(each.result) for each in one.completions) <= 5 * 65_536 for one in told)


@pytest.mark.parametrize("fails", [0, 2])
def test_one_that_raises_ends_the_program_for_its_own_reason(fails: int) -> None:
    app = Reading()
    app.fails = fails
    hosted = Hosted(1, app)
    hosted.order(0, 1, 2)
    hosted.host.step()
    (failed,) = [message for message in hosted.sent if isinstance(message, TaskFailed)]
    assert failed.executor == fails
    assert "ValueError: no" in failed.reason
    hosted.host.step()
    assert not [message for message in hosted.sent if isinstance(message, Told)]
