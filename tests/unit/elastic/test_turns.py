"""An elastic host whose job takes turns computes with a permit alone, and waits without one; and it
says how long its tasks computed."""

from pathlib import Path
from random import Random
from threading import Semaphore
from typing import Any, cast

import pytest
from tests.sim.elastic import Disk, Kills, MemoryFiles
from tests.unit.elastic.test_waiting_tasks import EXECUTORS, Hosted, Reading

from slackwater.agent.permits import ComputePermit, leave, lent, node_permits, on_boundary
from slackwater.common.base.packing import ARRAYS
from slackwater.elastic import Executor as Base
from slackwater.elastic.host import Host
from slackwater.elastic.memory import USED_PART, ExecutorMemory
from slackwater.schemas.elastic import HostWelcome, Noted, Order, Orders, TakeExecutor, Told
from slackwater.schemas.jobs import BY_TURNS_VARIABLE
from slackwater.schemas.relay import MemoryAsk

MB = 1_000_000


class Permit:
    """A permit that is had at once."""

    between_waits = False

    def __init__(self) -> None:
        self.held, self.taken, self.now_s = False, 0, 0.0

    def take(self) -> None:
        if not self.held:
            self.held = True
            self.taken += 1

    def give_back(self) -> None:
        self.held = False


class Computing(Reading):
    """Tasks that compute for a second, of a clock of their own."""

    permit: Permit
    seconds = 1.0

    class Executor(Base):
        app: "Computing"

        def run(self, ctx: Any, task: Any) -> Any:
            permit = self.app.permit
            ctx.get("w")
            assert permit.held
            permit.now_s += self.app.seconds
            ctx.update("w", [[1.0]], rows=[self.number])


class ByTurns(Hosted):
    def __init__(self, looks: int, seconds: float = 1.0) -> None:
        app = Computing()
        app.seconds, self.permit = seconds, Permit()
        app.permit = self.permit
        super().__init__(looks, app)
        tables = self.tables
        meanwhile = "meanwhile"

        def waiting(is_there: Any) -> None:
            """Lend the permit while the read waits, as TableAgent does."""
            held = self.permit.held
            self.permit.give_back()
            getattr(self, meanwhile)(is_there)
            if held:
                self.permit.take()

        self.host = Host(
            app, tables, lambda run: MemoryFiles(Disk(), Kills(Random(0), 0.0)),
            lambda message, payload: self.sent.append(message),
            now_s=lambda: self.permit.now_s, permit=cast(ComputePermit, self.permit),
        )  # fmt: skip
        self.meanwhile, tables.meanwhile = tables.meanwhile, waiting
        self.host.heard(HostWelcome(run="r"))
        for number in range(EXECUTORS):
            self.host.heard(TakeExecutor(executor=number, move=1, has_state=False))


@pytest.mark.parametrize("seconds", [0.01, 0.3, 1.0])
def test_tasks_follow_one_another_under_one_permit_until_they_are_flushed(seconds: float) -> None:
    """Task by task, jobs would compute alternately, and then wait for the network together."""
    hosted = ByTurns(1, seconds=seconds)
    hosted.tables.meanwhile = lambda is_there: None
    orders = tuple(Order(number=at, executor=at, version=0, task=ARRAYS.pack(0)) for at in range(4))
    hosted.host.heard(Orders(orders=orders))
    for _ in range(3):
        hosted.host.step()
        assert hosted.permit.held
    hosted.host.step()
    assert not hosted.permit.held  # Nothing more is to be computed.
    assert hosted.permit.taken == 1
    told = [each for each in hosted.sent if isinstance(each, Told)]
    assert [len(each.completions) for each in told] == [4]


def test_a_host_that_always_has_tasks_flushes_now_and_then() -> None:
    hosted = ByTurns(1, seconds=3.0)
    hosted.tables.meanwhile = lambda is_there: None
    orders = tuple(Order(number=at, executor=at, version=0, task=ARRAYS.pack(0)) for at in range(4))
    hosted.host.heard(Orders(orders=orders))
    for _ in range(4):
        hosted.host.step()
    told = [each for each in hosted.sent if isinstance(each, Told)]
    assert len(told[0].completions) == 3
    assert told[0].computed_s == 9.0


def test_a_task_reads_what_is_not_here_before_it_asks_for_a_permit() -> None:
    hosted = ByTurns(3)
    waits: list[bool] = []
    waiting = hosted.tables.meanwhile

    def noted(is_there: Any) -> None:
        waits.append(hosted.permit.held)
        waiting(is_there)

    hosted.tables.meanwhile = noted
    hosted.order(0)
    hosted.host.step()
    assert waits == [False]
    assert hosted.permit.taken == 1


def test_a_task_that_waited_for_a_table_goes_on_under_the_permit_of_the_next_one() -> None:
    """Regression: each task had a turn of its own, and jobs computed alternately."""
    hosted = ByTurns(1)
    hosted.order(0, 1, 2)
    for _ in range(4):
        hosted.host.step()
    told = [each for each in hosted.sent if isinstance(each, Told)]
    assert [len(each.completions) for each in told] == [3]
    assert hosted.permit.taken == 1
    assert not hosted.permit.held


def test_an_idle_host_holds_nothing_and_says_how_long_its_tasks_computed() -> None:
    hosted = ByTurns(1)
    hosted.order(0, 1)
    for _ in range(4):
        hosted.host.step()
    told = [each for each in hosted.sent if isinstance(each, Told)]
    assert sum(each.computed_s for each in told) == 2.0
    assert sum(len(each.completions) for each in told) == 2
    assert not hosted.permit.held
    hosted.host.heard(Noted(number=told[-1].number))
    hosted.order(3, task=1)
    hosted.host.step()
    assert [e.computed_s for e in hosted.sent if isinstance(e, Told)][-1] == 1.0


def test_without_turns_nothing_is_lent_or_left() -> None:
    assert node_permits({}) is None
    assert node_permits({BY_TURNS_VARIABLE: "1"}) is None  # No worker service started this.
    with lent(None):
        on_boundary(None)
    leave(None)


class Alone(Computing):
    """Tasks that read no table."""

    held: list[bool]

    class Executor(Base):
        app: "Alone"

        def run(self, ctx: Any, task: Any) -> Any:
            self.app.held.append(self.app.permit.held)
            ctx.update("w", [[1.0]], rows=[self.number])


def test_tasks_that_read_no_table_have_a_permit_from_the_second_one_on() -> None:
    """Regression: it was asked for after a read, and so by none of them ever."""
    hosted = Hosted(1, Reading())
    app, permit = Alone(), Permit()
    app.held, app.permit = [], permit
    host = Host(
        app, hosted.tables, lambda run: MemoryFiles(Disk(), Kills(Random(0), 0.0)),
        lambda message, payload: hosted.sent.append(message), permit=cast(ComputePermit, permit),
    )  # fmt: skip
    host.heard(HostWelcome(run="r"))
    for number in range(EXECUTORS):
        host.heard(TakeExecutor(executor=number, move=1, has_state=False))
    hosted.host = host
    hosted.order(0, 1, 2)
    for _ in range(4):
        host.step()
    assert app.held == [False, True, True]
    assert not permit.held


class Lodged(Hosted):
    """Executors of a megabyte each, three of which fit into what their job asked for."""

    def __init__(self, folder: Path, permit: Permit) -> None:
        super().__init__(0, Reading())
        self.now_s, self.told = 0.0, list[MemoryAsk]()
        self.limit_bytes: int | None = None
        self.moves = Semaphore(0)
        self.memory = ExecutorMemory(
            self.app, int(3.05 * MB / USED_PART), folder, lambda: self.memory.here * MB,
            moved=self.moves.release,
        )  # fmt: skip
        permit.share = self.share  # type: ignore[attr-defined]
        self.host = Host(
            self.app, self.tables, lambda run: MemoryFiles(Disk(), Kills(Random(0), 0.0)),
            lambda message, payload: self.sent.append(message), now_s=lambda: self.now_s,
            memory=self.memory, permit=cast(ComputePermit, permit),
        )  # fmt: skip
        self.host.heard(HostWelcome(run="r"))
        for number in range(EXECUTORS):
            self.host.heard(TakeExecutor(executor=number, move=1, has_state=False))

    def share(self, told: MemoryAsk) -> int | None:
        self.told.append(told)
        return self.limit_bytes


def test_a_host_asks_how_much_memory_it_may_use_and_says_how_it_does(tmp_path: Path) -> None:
    hosted = Lodged(tmp_path, Permit())
    hosted.host.step()
    assert [each.used_bytes for each in hosted.told] == [3 * MB]
    before = hosted.told[0].aside_bytes
    assert before > 0
    hosted.host.step()
    assert len(hosted.told) == 1, "not at each step"
    hosted.now_s, hosted.limit_bytes = 1.0, int(2.05 * MB / USED_PART)
    hosted.host.step()
    assert hosted.moves.acquire(timeout=10.0)
    hosted.now_s, hosted.limit_bytes = 2.0, None
    hosted.host.step()
    assert hosted.told[-1].used_bytes == 2 * MB
    assert hosted.told[-1].aside_bytes > before
    assert hosted.memory.limit_bytes == int(2.05 * MB / USED_PART), "nobody said another one"
    hosted.memory.close()


def test_a_host_says_for_how_long_it_could_run_nothing_as_data_were_read(tmp_path: Path) -> None:
    hosted = Lodged(tmp_path, Permit())
    aside = next(n for n in range(EXECUTORS) if not hosted.memory.has(n))
    hosted.host.step()
    hosted.order(aside)
    for now_s in (0.25, 0.5, 0.75):
        hosted.now_s = now_s
        hosted.host._look_at_memory(hosted.memory, stalled=True)
    hosted.host.step()  # It begins to read.
    assert hosted.moves.acquire(timeout=10.0)
    hosted.now_s = 1.25
    hosted.host.step()
    hosted.host.step()
    assert [each.stalled_s for each in hosted.told] == [0.0, 1.0]
    hosted.memory.close()
