"""Executors are shared out by how fast hosts are (Lee 2020, section 3.4.5)."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.packing import ARRAYS
from slackwater.elastic.driver_core import DriverCore
from slackwater.elastic.driver_effects import DriverAction, Send
from slackwater.elastic.driver_speeds import SET_TASKS, Speeds, next_host, pays
from slackwater.elastic.drivers import Bsp
from slackwater.schemas.elastic import (
    Completion,
    ExecutorGiven,
    ForgetExecutor,
    GiveExecutor,
    HostReady,
    Orders,
    TakeExecutor,
    Told,
)


class Hosts:
    """Hosts that run what they are sent, a task in `task_s` seconds of their own."""

    def __init__(self, executors: int, task_s: dict[int, float]) -> None:
        self.task_s = task_s
        self.held: dict[int, dict[int, int]] = {rank: {} for rank in task_s}
        self.numbers = Counter[int]()
        self.orders: dict[int, list[tuple[int, int]]] = {rank: [] for rank in task_s}
        self.core = DriverCore(Bsp(400), executors, "p", expected=len(task_s))
        self.take(self.core.begin("r"))
        for rank in task_s:
            self.take(self.core.joined(rank))
        for rank in task_s:
            self.take(self.core.ready(rank, HostReady()))

    def take(self, effects: list[DriverAction]) -> None:
        for effect in effects:
            if not isinstance(effect, Send):
                continue
            rank, message = effect.rank, effect.message
            if isinstance(message, TakeExecutor):
                self.held[rank][message.executor] = message.move
            elif isinstance(message, ForgetExecutor):
                self.held[rank].pop(message.executor, None)
            elif isinstance(message, GiveExecutor):
                move = self.held[rank].pop(message.executor)
                self.orders[rank] = [o for o in self.orders[rank] if o[1] != message.executor]
                given_ = ExecutorGiven(executor=message.executor, move=move, has_state=False)
                self.take(self.core.given(rank, given_))
            elif isinstance(message, Orders):
                self.orders[rank] += [(o.number, o.executor) for o in message.orders]

    def iterate(self, times: int) -> None:
        for _ in range(times):
            for rank, orders in self.orders.items():
                ran, self.orders[rank] = list(orders), []
                if not ran:
                    continue
                self.numbers[rank] += 1
                told = Told(
                    number=self.numbers[rank],
                    completions=tuple(
                        Completion(order=number, result=ARRAYS.pack(1.0)) for number, _ in ran
                    ),
                    computed_s=len(ran) * self.task_s[rank],
                )
                self.take(self.core.told(rank, told))

    @property
    def loads(self) -> list[int]:
        return [len(held) for held in self.held.values()]


def test_hosts_alike_keep_equal_parts() -> None:
    hosts = Hosts(16, {0: 0.1, 1: 0.11})
    hosts.iterate(50)
    assert hosts.loads == [8, 8]
    assert hosts.core.moves == 0


def test_a_host_that_is_twice_as_fast_has_twice_as_many() -> None:
    hosts = Hosts(24, {0: 0.1, 1: 0.2})
    hosts.iterate(50)
    assert hosts.loads == [16, 8]
    moves = hosts.core.moves
    hosts.iterate(50)
    assert hosts.core.moves == moves == 4


def test_parts_follow_a_host_that_becomes_slow_and_fast_again() -> None:
    hosts = Hosts(24, {0: 0.1, 1: 0.1, 2: 0.1})
    hosts.iterate(20)
    hosts.task_s[2] = 0.4
    hosts.iterate(60)
    assert hosts.loads[2] <= 3
    hosts.task_s[2] = 0.1
    hosts.iterate(120)
    assert max(hosts.loads) - min(hosts.loads) <= 1


def test_one_look_that_asks_changes_nothing() -> None:
    speeds = Speeds()
    for rank, task_s in ((0, 0.1), (1, 0.3)):
        for _ in range(2):
            speeds.heard(rank, SET_TASKS, SET_TASKS * task_s)
    loads = {0: 8, 1: 8}
    assert not speeds.looks(loads)
    assert not speeds.looks(loads)  # No set since.
    for rank, task_s in ((0, 0.1), (1, 0.3)):
        speeds.heard(rank, SET_TASKS, SET_TASKS * task_s)
    assert speeds.looks(loads)


def test_what_is_not_measured_counts_as_alike() -> None:
    speeds = Speeds()
    for _ in range(4):
        speeds.heard(0, 10, 1.0)
        speeds.heard(1, 10, 0.0)
    assert speeds.of((0, 1)) == {0: 1.0, 1: 1.0}
    speeds.heard(1, 10, 1.0)
    speeds.heard(1, 10, 2.0)
    assert speeds.of((0, 1)) == {0: 0.1, 1: 0.2}
    speeds.forget(0)
    assert speeds.of((0, 1)) == {0: 1.0, 1: 1.0}


@given(st.lists(st.floats(0.01, 10.0), min_size=2, max_size=6), st.integers(2, 60))
def test_moves_end_and_leave_the_slowest_host_as_good_as_any_other_share(
    task_s: list[float], executors: int
) -> None:
    """From all at one host: each move makes the slowest part shorter, so that they end; then no
    share of any other number is 5 % better for the slowest host."""
    times = dict(enumerate(task_s))
    loads = {rank: 0 for rank in times} | {0: executors}
    for _ in range(executors * len(loads)):
        source = max(loads, key=lambda rank: loads[rank] * times[rank])
        target = next_host(loads, times)
        if source == target or not pays(loads, times, source, target):
            break
        loads[source] -= 1
        loads[target] += 1
    else:
        raise AssertionError("moves did not end")
    slowest_s = max(loads[rank] * times[rank] for rank in loads)
    ideal = executors / sum(1.0 / each for each in times.values())
    one_more_s = max((loads[rank] + 1) * times[rank] for rank in loads if loads[rank])
    assert slowest_s <= max(ideal, one_more_s) / 0.95 + 1e-9
    assert sum(loads.values()) == executors
