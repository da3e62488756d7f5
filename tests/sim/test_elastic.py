"""Elastic programs as a whole, against what Litz's model promises (Qiao 2021, sections 4.3, 4.4):
every read is as fresh as its order's version demands, a process reads its own writes, and every
task counts exactly once, whoever is killed, moved, cut off or scaled away.

`Counting` checks each read: a task adds one to its executor's row of two tables, and its executor's
state counts its tasks. A third table shrinks by one with each update of three: that, too, counts
once, however many updates are flushed together.
"""

import os
from typing import Any

import numpy as np
import pytest
from tests.sim.elastic import World

from slackwater.elastic.app import App, Executor, Table
from slackwater.elastic.cache import TableCache, _Whole
from slackwater.elastic.drivers import Asp, Driver, Rotation, Run, Ssp
from slackwater.elastic.host import Host
from slackwater.elastic.rules import NonNegative, SoftThreshold
from slackwater.schemas.base import Message
from slackwater.schemas.elastic import TakeExecutor

SEEDS = int(os.environ.get("ELASTIC_SEEDS", "150"))


class Counting(App):
    executors = 7
    tables = {
        "n": Table(7, 1),
        "m": Table(3, 2, dtype="int32"),
        "shrinks": Table(1, 1, rule=SoftThreshold(1.0)),
    }

    class Executor(Executor):
        def load(self, part: int) -> None:
            self.part, self.runs = part, 0

        def run(self, ctx: Any, task: Any) -> int:
            least, seen = np.array(task), ctx.get("n")[:, 0]
            assert (seen >= least).all(), f"{seen}, where {least} were told before the dispatch"
            assert seen[self.part] == self.runs, f"{seen[self.part]} of its own {self.runs} writes"
            ctx.update("n", np.ones((1, 1)), rows=[self.part])
            assert ctx.get("n", rows=[self.part])[0, 0] == self.runs + 1
            ctx.update("m", [[1, 0], [2, 3]], rows=[0, 2])
            before = ctx.get("shrinks")[0, 0]
            ctx.update("shrinks", [[3.0]])
            assert ctx.get("shrinks")[0, 0] == before + 2
            self.runs += 1
            return self.runs

        def save(self) -> Any:
            return {"runs": self.runs, "some": np.arange(self.runs)}

        def restore(self, state: Any) -> None:
            assert (state["some"] == np.arange(state["runs"])).all()
            self.runs = state["runs"]


class CountingRows(Counting):
    tables = {
        "n": Table(7, 1, sparse=True),
        "m": Table(3, 2, dtype="int32", sparse=True, rule=NonNegative()),
        "shrinks": Table(1, 1, rule=SoftThreshold(1.0)),
    }


class Counts(Driver):
    """Each executor has two tasks at a time; a task is what was told of all before it."""

    tasks = 60

    def save(self) -> Any:
        return {"told": self.told, "results": self.results}

    def restore(self, state: Any) -> None:
        self.told, self.results = state["told"], state["results"]

    def start(self, run: Run) -> None:
        self.told, self.results = [0] * run.executors, list[list[int]]()
        self.results = [[] for _ in range(run.executors)]
        for executor in range(run.executors):
            for _ in range(2):
                run.dispatch(executor, list(self.told))

    def done(self, run: Run, executor: int, task: Any, result: Any) -> None:
        self.told[executor] += 1
        self.results[executor].append(result)
        if sum(self.told) >= self.tasks:
            run.end(list(self.told))
            return
        run.dispatch(executor, list(self.told))


def check(world: World) -> None:
    """Every completion that was told is in the tables exactly once, and at most what was out."""
    assert world.finished is not None
    assert not world.finished.reason
    told = np.array(world.finished.result)
    counted = world.store.values["n"][:, 0]
    assert (counted >= told).all()
    assert world.store.values["m"][0, 0] == counted.sum()
    assert world.store.values["m"].tolist()[2] == [2 * counted.sum(), 3 * counted.sum()]
    assert world.store.values["shrinks"][0, 0] == 2 * counted.sum()
    driver: Any = world.core._driver
    assert all(results == [*range(1, len(results) + 1)] for results in driver.results)


def test_undisturbed() -> None:
    for seed in range(20):
        check(World(Counting(), Counts, seed).play())
        check(World(CountingRows(), Counts, seed).play())


@pytest.mark.parametrize("part", range(5))
def test_killed_moved_and_scaled(part: int) -> None:
    """A few hundred whole runs; `ELASTIC_SEEDS=10000` for more."""
    deaths = driver_deaths = moves = shortened = overlapped = 0
    for seed in range(part, SEEDS, 5):
        app = CountingRows() if seed % 2 else Counting()
        world = World(app, Counts, seed, kill=0.01)
        check(world.play(scale=0.01, sever=0.005))
        deaths, moves = deaths + world.deaths, moves + world.moves
        driver_deaths += world.driver_deaths
        shortened += world.shortened
        overlapped += world.overlapped
    assert min(deaths, driver_deaths, moves, shortened, overlapped) > SEEDS // 5


@pytest.mark.parametrize("fitting", [1, 2])
def test_executors_that_do_not_all_fit(fitting: int) -> None:
    """The same, where a host has memory for one or two of seven executors."""
    reads = moves = 0
    for seed in range(SEEDS // 3):
        world = World(Counting(), Counts, seed, hosts=2, kill=0.005 * (seed % 2), fitting=fitting)
        check(world.play(scale=0.01, sever=0.005))
        reads, moves = reads + world.reads, moves + world.moves
    assert min(reads, moves) > SEEDS


class Thrifty(Counts):
    """Asks for fewer hosts as its work comes to an end."""

    def done(self, run: Run, executor: int, task: Any, result: Any) -> None:
        super().done(run, executor, task, result)
        if sum(self.told) in (20, 40):
            run.use(3 - sum(self.told) // 20)


def test_the_master_hears_how_many_hosts_a_program_asks_for() -> None:
    """Each number at least once, in their order, whoever is killed, unless a newer one is asked for
    meanwhile; one that it has acknowledged is not asked for again."""
    again = 0
    for seed in range(SEEDS // 3):
        world = World(Counting(), Thrifty, seed, kill=0.01)
        check(world.play(sever=0.005))
        assert world.asked == sorted(world.asked, reverse=True)
        assert set(world.asked) <= {2, 1}
        assert world.asked[-1:] == [1] or world.core.hosts_asked == 1
        again += len(world.asked) - len(set(world.asked))
    assert again < SEEDS // 10, "only where the driver was killed in between"


class Instants(World):
    """Checks that what is saved is of one instant: what was told is in the tables, and no more."""

    def _hold_or_go_on(self) -> None:
        if self.core.held:
            driver: Any = self.core._driver
            assert self.store.values["n"][:, 0].tolist() == driver.told
        super()._hold_or_go_on()


@pytest.mark.parametrize("part", range(3))
def test_a_program_that_is_saved_whole_while_it_runs_goes_back_to_that(part: int) -> None:
    """A mark is of one instant, and a run that goes on from it, with whatever hosts there are,
    repeats what came after and nothing else."""
    marked = gone_back = moves = 0
    for seed in range(part, SEEDS, 3):
        app = CountingRows() if seed % 2 else Counting()
        world = Instants(app, Counts, seed, kill=0.003)
        world.play(scale=0.01, sever=0.005, hold=0.02, back=0.002)
        check(world)
        marked, gone_back = marked + world.marked, gone_back + world.gone_back
        moves += world.core.moves
    assert min(marked, gone_back, moves) > SEEDS // 5


def test_executors_that_are_held_stay_loaded_where_they_are() -> None:
    loads = marked = moves = 0

    class Loading(Counting):
        class Executor(Counting.Executor):
            def load(self, part: int) -> None:
                nonlocal loads
                loads += 1
                super().load(part)

    for seed in range(10):
        world = Instants(Loading(), Counts, seed)
        check(world.play(hold=0.02))
        marked, moves = marked + world.marked, moves + world.core.moves
    assert marked >= 12
    assert loads == 10 * 7 + moves


def test_iterations_are_reported_once_and_in_order() -> None:
    class Adding(App):
        executors = 5
        tables = {"n": Table(1, 1)}

        class Executor(Executor):
            def run(self, ctx: Any, task: Any) -> float:
                ctx.update("n", [[1.0]])
                return float(task)

    for seed in range(10):
        for driver in (lambda: Ssp(6, 1), lambda: Asp(6)):
            world = World(Adding(), driver, seed, kill=0.003).play(scale=0.01)
            assert world.finished is not None
            assert world.finished.result == {"iterations": 6, "loss": 5.0}
            assert world.store.values["n"][0, 0] == 30
            if not world.driver_deaths:
                assert [report.iteration for report in world.reports] == [*range(1, 7)]


def test_a_rotation_runs_each_turn_once_whoever_is_killed() -> None:
    class Turning(App):
        executors = 4
        tables = {"n": Table(1, 1)}

        class Executor(Executor):
            def run(self, ctx: Any, task: Any) -> float:
                assert ctx.get("n")[0, 0] >= 4 * (task + 1), "a turn before it is not complete"
                ctx.update("n", [[1.0]])
                return float(task)

    deaths = shortened = 0
    for seed in range(20):
        world = World(Turning(), lambda: Rotation(2), seed, kill=0.01).play(scale=0.01)
        assert world.finished is not None
        assert world.finished.result == {"sweeps": 2, "loss": 5.5}
        assert world.store.values["n"][0, 0] == 4 * 9
        deaths, shortened = deaths + world.driver_deaths, shortened + world.shortened
    assert min(deaths, shortened) > 10


# Faults that the simulation must find -----------------------------------------------------------


@pytest.fixture(params=[Counting, CountingRows])
def app(request: pytest.FixtureRequest) -> type[App]:
    found: type[App] = request.param
    return found


def broken(app: type[App], **options: Any) -> None:
    def play_many() -> None:
        for seed in range(200):
            check(World(app(), Counts, seed, **options).play(scale=0.02))

    with pytest.raises(AssertionError):
        play_many()


def test_finds_completions_told_before_their_updates(
    monkeypatch: pytest.MonkeyPatch, app: type[App]
) -> None:
    flush = Host._flush

    def early(self: Any) -> None:
        apply = self._tables.apply
        later: list[Any] = []
        self._tables.apply = lambda number, *batch: later.append((number, *map(dict, batch)))
        flush(self)
        self._tables.apply = apply
        self.__dict__.setdefault("held_back", []).extend(later)
        if len(self.held_back) > 1:
            apply(*self.held_back.pop(0))

    monkeypatch.setattr(Host, "_flush", early)
    broken(app)


def test_finds_a_cache_that_serves_newer_orders(
    monkeypatch: pytest.MonkeyPatch, app: type[App]
) -> None:
    get = TableCache.get
    monkeypatch.setattr(
        TableCache, "get", lambda self, name, rows, version: get(self, name, rows, version // 8)
    )
    broken(app)


def test_finds_a_cache_that_forgets_what_was_flushed(
    monkeypatch: pytest.MonkeyPatch, app: type[App]
) -> None:
    def sent(self: Any) -> None:
        for cached in self._cached.values():
            if isinstance(cached, _Whole):
                cached.log, cached.count = None, 0
            else:
                cached._log.clear()

    monkeypatch.setattr(TableCache, "sent", sent)
    broken(app)


def test_finds_a_batch_whose_updates_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, app: type[App]
) -> None:
    monkeypatch.setattr(TableCache, "counts", {})
    broken(app)


def test_finds_executors_that_read_older_values_where_they_go(
    monkeypatch: pytest.MonkeyPatch, app: type[App]
) -> None:
    monkeypatch.setattr(TableCache, "clear", lambda self: None)
    broken(app)


def test_finds_a_batch_that_is_not_redone(monkeypatch: pytest.MonkeyPatch, app: type[App]) -> None:
    monkeypatch.setattr(Host, "_redo", lambda self: None)
    broken(app, kill=0.01)


def test_finds_an_empty_batch_that_takes_the_number_of_a_sealed_one(
    monkeypatch: pytest.MonkeyPatch, app: type[App]
) -> None:
    """Found by a run of 200 kills: rank 0 pushed one for a change of size before it had read what
    the process before it had sealed."""

    def at_once(self: Any) -> None:
        self._tables.apply(self._tables.number + 1, {})

    monkeypatch.setattr(Host, "push_nothing", at_once)
    broken(app, kill=0.01)


def test_finds_an_empty_batch_that_is_left_in_some_tables(
    monkeypatch: pytest.MonkeyPatch, app: type[App]
) -> None:
    def sealed_alone(self: Any) -> None:
        batch = self._files.sealed()
        if batch is not None and batch.number == self._tables.number + 1:
            self._tables.apply(batch.number, batch.deltas, batch.counts)
        self._files.settle(self._tables.number)
        self._unnoted = batch

    monkeypatch.setattr(Host, "_redo", sealed_alone)
    broken(app, kill=0.01)


def test_finds_a_driver_s_state_that_lacks_something(
    monkeypatch: pytest.MonkeyPatch, app: type[App]
) -> None:
    def forgetful(self: Any, state: Any) -> None:
        self.told, self.results = state["told"], [each[:-1] for each in state["results"]]

    monkeypatch.setattr(Counts, "restore", forgetful)
    broken(app, kill=0.01)


def test_finds_a_state_that_does_not_go_along(
    monkeypatch: pytest.MonkeyPatch, app: type[App]
) -> None:
    take = Host._take

    def fresh(self: Any, message: Message, payload: bytes) -> None:
        assert isinstance(message, TakeExecutor)
        take(self, TakeExecutor(executor=message.executor, move=message.move), b"")

    monkeypatch.setattr(Host, "_take", fresh)
    broken(app)
