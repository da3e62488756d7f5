"""The driver's side of a program: which executor is where, which orders are out, what completed.

Pure: events come as calls, and what is to be done goes out as effects, in their order. All that
counts is in the journal before anybody acts on it, so that a process which comes after this one
reads the journal, tells the program's driver the same completions in the same order, and has the
same orders under the same numbers. Then hosts say what they hold, and get what they lack.

The version counts completions told (Qiao 2021, section 4.3.2): an order carries that of its
dispatch. An executor is at one place, or on its way: given back by its host after its task and the
updates of it, then placed, in the journal, then taken by another. Whatever is repeated after a loss
is known by its number: a batch by its host's, an executor by its move.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

from slackwater.common.base.packing import ARRAYS
from slackwater.elastic.driver_effects import (
    DriverAction,
    Finish,
    KeepState,
    Report,
    Send,
    Shorten,
    Write,
)
from slackwater.elastic.driver_places import KnownHost, Place
from slackwater.elastic.driver_speeds import Speeds, next_host, pays
from slackwater.elastic.drivers import Driver
from slackwater.elastic.wire import framefuls
from slackwater.schemas.base import WORKERS_MAX, Message
from slackwater.schemas.elastic import (
    DRIVER_BYTES_MAX,
    OUT_MAX,
    PACKED_BYTES_MAX,
    BatchTold,
    Entry,
    ExecutorGiven,
    ExecutorPlaced,
    ForgetExecutor,
    GiveExecutor,
    HostReady,
    HostsUsed,
    HostWelcome,
    Noted,
    Order,
    Orders,
    Over,
    RunBegun,
    RunEnded,
    RunStands,
    TakeExecutor,
    TaskFailed,
    Told,
)

SENT_MAX: Final = 8192
"""Orders that are at hosts, all together."""


class DriverCore:
    """`expected`: hosts that are waited for before the first executors are placed."""

    def __init__(self, driver: Driver, executors: int, program: str, expected: int = 1) -> None:
        self.executors = executors
        self._driver, self._program, self._expected = driver, program, expected
        self._places = [Place() for _ in range(executors)]
        self._hosts: dict[int, KnownHost] = {}
        self._told: Counter[int] = Counter()
        """The newest batch of each rank."""
        self._orders: dict[int, Order] = {}
        self._number = self.version = self.moves = 0
        self._out: list[DriverAction] = []
        self._new: dict[int, dict[int, Order]] = {}
        """Orders that leave with the effects of this step."""
        self._window = max(2, SENT_MAX // executors)
        """Orders of one executor that are at its host; more wait here."""
        self._replaying = False
        self._begun = self._holding = False
        self._speeds = Speeds()
        self.run = ""
        self._placement = 0
        self.ended: Finish | None = None
        self._end_said = False
        self.hosts_asked: int | None = None
        """Hosts that the program asked for, until the master knows; None: none that are news."""
        self.wanted: int | None = None
        """Ranks from this one on are to give their executors away; None: none is."""

    # The program's driver calls these ------------------------------------------------------------

    def dispatch(self, executor: int, task: Any) -> None:
        """Raises ValueError, TypeError for what cannot be dispatched."""
        if type(executor) is not int or not 0 <= executor < self.executors:
            raise ValueError(f"executor {executor!r}; there are {self.executors}, from 0 on")
        packed = ARRAYS.pack(task)
        if len(packed) > PACKED_BYTES_MAX:
            raise ValueError(
                f"a task of {len(packed)} bytes, at most {PACKED_BYTES_MAX}: put what is large "
                "into a table"
            )
        order = Order(number=self._number, executor=executor, version=self.version, task=packed)
        self._number += 1
        self._orders[order.number] = order
        place = self._places[executor]
        place.out[order.number] = order
        if len(place.out) <= self._window:
            self._goes_out(place, order)

    def _goes_out(self, place: Place, order: Order) -> None:
        if not self._replaying and self._reachable(place):
            assert place.rank is not None
            self._new.setdefault(place.rank, {})[order.number] = order

    def _in_window(self, place: Place) -> dict[int, Order]:
        return dict(islice(place.out.items(), self._window))

    def report(self, iteration: int, of: int, /, **measured: float) -> None:
        if not self._replaying:
            self._out.append(Report(iteration, of, measured))

    def use(self, hosts: int) -> None:
        """Raises ValueError."""
        if type(hosts) is not int or not 1 <= hosts <= WORKERS_MAX:
            raise ValueError(f"use({hosts!r}): give a number of hosts, from 1 to {WORKERS_MAX}")
        self.hosts_asked = hosts

    def end(self, result: Any = None) -> None:
        if self.ended is None:
            self.ended = Finish("", result)

    # Beginning ------------------------------------------------------------------------------------

    def begin(self, run: str, placement: int = 0) -> list[DriverAction]:
        """Begin a run of this id, of tables that are placed under this number. Raises what the
        program's driver raises."""
        self.run, self._placement = run, placement
        self._out.append(Write(RunBegun(run=run, program=self._program, placement=placement)))
        self._start()
        return self._effects()

    def resume(self, entries: Iterable[Entry]) -> list[DriverAction]:
        """Take a run up where its journal ends. Raises what the program's driver raises."""
        self._replaying = True
        for entry in entries:
            match entry:
                case RunBegun():
                    self.run, self._placement = entry.run, entry.placement
                    self._start()
                case RunStands():
                    self._stand(entry)
                case BatchTold():
                    self._count(entry.rank, entry.number, entry)
                case ExecutorPlaced():
                    self._placed(entry)
                case HostsUsed() if self.hosts_asked == entry.hosts:
                    self.hosts_asked = None
                case RunEnded():
                    self.ended = Finish(entry.reason, self.ended.result if self.ended else None)
        self._replaying = False
        return self._effects()

    def _start(self) -> None:
        self._driver.start(self)

    def shorten(self) -> list[DriverAction]:
        """Put the run as it stands, after a step whose effects are carried out, into the journal's
        place, unless it has ended, its driver does not say a state, or that is too large. Raises
        what the program's driver raises."""
        if self.ended is not None or len(self._orders) > OUT_MAX:
            return []
        state = self._driver.save()
        if state is None or len(packed := ARRAYS.pack(state)) > DRIVER_BYTES_MAX:
            return []
        entry = RunStands(
            run=self.run, program=self._program, placement=self._placement, version=self.version,
            next_order=self._number, moves=self.moves, told=tuple(sorted(self._told.items())),
            places=tuple(
                ExecutorPlaced(executor=e, move=place.move, rank=place.rank, state=place.state)
                for e, place in enumerate(self._places) if place.move
            ),
            orders=tuple(self._orders.values()), driver=packed, hosts_asked=self.hosts_asked,
        )  # fmt: skip
        return [Shorten(entry)]

    def _stand(self, entry: RunStands) -> None:
        """Go on where a run stood."""
        self.run, self._placement = entry.run, entry.placement
        self._told.update(dict(entry.told))
        for place in entry.places:
            self._placed(place)
        for order in entry.orders:
            self._orders[order.number] = self._places[order.executor].out[order.number] = order
        self.hosts_asked = entry.hosts_asked
        self._number, self.version, self.moves = entry.next_order, entry.version, entry.moves
        self._driver.restore(ARRAYS.unpack(entry.driver))

    @property
    def pending(self) -> int:
        """Count the orders that are out."""
        return len(self._orders)

    @property
    def hosts(self) -> tuple[int, ...]:
        """Return the ranks that are ready."""
        return tuple(sorted(rank for rank, host in self._hosts.items() if host.ready))

    @property
    def placed(self) -> int:
        """Count the executors that are at hosts, or on their way."""
        return sum(place.rank is not None for place in self._places)

    def held_by(self, rank: int) -> int:
        """Count the executors that are at the rank, or on their way from there."""
        return sum(place.rank == rank for place in self._places)

    @property
    def least_hosts(self) -> int:
        """Return how many ranks, from 0 on, must go on counting: all that have an executor."""
        return 1 + max((p.rank for p in self._places if p.rank is not None), default=0)

    # Hosts ----------------------------------------------------------------------------------------

    def joined(self, rank: int) -> list[DriverAction]:
        """A process of the rank has connected; it may be another one than before."""
        self._hosts[rank] = KnownHost()
        self._speeds.forget(rank)
        for place in self._places:
            if place.rank == rank:
                place.asked, place.target = False, None
            if place.parked is not None and place.parked[0] == rank:
                place.parked = None
        self._out.append(Send(rank, HostWelcome(run=self.run)))
        return self._effects()

    def ready(self, rank: int, ready: HostReady) -> list[DriverAction]:
        """Hear what a host holds, and send what it lacks."""
        host = self._hosts.get(rank)
        if host is None:
            return []
        host.ready = True
        if ready.number:
            self._batch(rank, ready.number, ready.completions)
        here = {e: p for e, p in enumerate(self._places) if p.rank == rank}
        held = dict(ready.executors)
        for executor, move in (*ready.executors, *ready.parked):
            if executor not in here or here[executor].move != move:
                self._out.append(Send(rank, ForgetExecutor(executor=executor)))
        waiting = set(ready.orders)
        for executor, place in here.items():
            if held.get(executor) != place.move:
                self._take(executor)
            window = self._in_window(place).items()
            lacking = {number: order for number, order in window if number not in waiting}
            self._new.setdefault(rank, {}).update(lacking)
        return self.arrange()

    def lost(self, rank: int) -> list[DriverAction]:
        """The connection to the rank is gone: it, or another process of it, comes back."""
        self._hosts.pop(rank, None)
        return self._effects()

    def told(self, rank: int, told: Told) -> list[DriverAction]:
        """A batch of the rank's updates was applied."""
        self._batch(rank, told.number, told.completions)
        self._speeds.heard(rank, len(told.completions), told.computed_s)
        return self.arrange() if self._speeds.looks(self.loads()) else self._effects()

    def _batch(self, rank: int, number: int, completions: tuple[Any, ...]) -> None:
        entry = BatchTold(rank=rank, number=number, completions=completions)
        if number > self._told[rank]:
            self._out.append(Write(entry))
            self._count(rank, number, entry)
        self._out.append(Send(rank, Noted(number=number)))

    def _count(self, rank: int, number: int, entry: BatchTold) -> None:
        """Tell the program's driver of each completion that it does not know yet."""
        self._told[rank] = number
        for completion in entry.completions:
            order = self._orders.pop(completion.order, None)
            if order is None:
                continue
            place = self._places[order.executor]
            del place.out[order.number]
            if (
                next_ := next(islice(place.out.values(), self._window - 1, None), None)
            ) is not None:
                self._goes_out(place, next_)
            self.version += 1
            if self.ended is None:
                task, result = ARRAYS.unpack(order.task), ARRAYS.unpack(completion.result)
                self._driver.done(self, order.executor, task, result)

    def failed(self, rank: int, failed: TaskFailed) -> list[DriverAction]:
        """The program raised in a task."""
        return self.fail(f"executor {failed.executor}, on host {rank}: {failed.reason}")

    def fail(self, reason: str) -> list[DriverAction]:
        """End the run for this reason, unless it has ended."""
        if self.ended is None:
            self.ended = Finish(reason)
        return self._effects()

    # Places ---------------------------------------------------------------------------------------

    def given(self, rank: int, given: ExecutorGiven) -> list[DriverAction]:
        """A host let an executor go; its state, if any, came with the frame."""
        place = self._places[given.executor] if given.executor < self.executors else None
        if place is None or place.rank != rank or place.move != given.move:
            self._out.append(Send(rank, ForgetExecutor(executor=given.executor)))
            return self._effects()
        target, move = place.target, place.move + 1
        if self._holding or (target is not None and not self._may_have(target)):
            target = None
        if given.has_state:
            self._out.append(KeepState(given.executor, move))
        state = move if given.has_state else 0
        entry = ExecutorPlaced(executor=given.executor, move=move, rank=target, state=state)
        self._out.append(Write(entry))
        self._placed(entry)
        if target is None:
            place.parked = rank, given.move
        else:
            self._out.append(Send(rank, ForgetExecutor(executor=given.executor)))
            self._sent_to(given.executor)
        return self.arrange()

    def leaving(self, rank: int) -> None:
        """The host was asked to end. Its executors go with the next `arrange`: where all hosts
        leave, as in a pause, none is to load what another had."""
        if rank in self._hosts:
            self._hosts[rank].leaving = True

    def want(self, hosts: int) -> list[DriverAction]:
        """So many ranks, from 0 on, are to have the executors."""
        if hosts == self.wanted:
            return []
        self.wanted = hosts
        return self.arrange()

    def hold(self) -> list[DriverAction]:
        """Take all executors back, each after its task. They stay loaded where they are."""
        self._holding = True
        return self.arrange()

    @property
    def held(self) -> bool:
        """Say whether nothing runs and all that ran is told: tables, journal and executors' states
        are of one instant."""
        return self._holding and self.ended is None and not self.placed

    def release(self) -> list[DriverAction]:
        """Let a program that is held go on."""
        self._holding = False
        return self.arrange()

    def used(self, hosts: int) -> list[DriverAction]:
        """Hear that the master knows how many hosts the program asked for."""
        if self.hosts_asked == hosts:
            self.hosts_asked = None
            self._out.append(Write(HostsUsed(hosts=hosts)))
        return self._effects()

    def begin_anyway(self) -> list[DriverAction]:
        """Wait for no more hosts before the first executors are placed."""
        self._begun = True
        return self.arrange()

    def _placed(self, entry: ExecutorPlaced) -> None:
        place = self._places[entry.executor]
        self.moves += place.comes_to(entry.rank)
        place.rank, place.move, place.state = entry.rank, entry.move, entry.state
        place.asked, place.target, place.parked = False, None, None

    def _take(self, executor: int, parked: int = 0) -> None:
        """Let the place's host have the executor; `parked`: the move by which it has it still."""
        place = self._places[executor]
        assert place.rank is not None
        state = (executor, place.state) if place.state and not parked else None
        take = TakeExecutor(
            executor=executor, move=place.move, has_state=state is not None, parked=parked
        )
        self._out.append(Send(place.rank, take, state))

    def _sent_to(self, executor: int, parked: int = 0) -> None:
        """Send a placed executor to its host, and its orders after it."""
        place = self._places[executor]
        assert place.rank is not None
        self._take(executor, parked)
        self._new.setdefault(place.rank, {}).update(self._in_window(place))

    def _reachable(self, place: Place) -> bool:
        host = None if place.rank is None else self._hosts.get(place.rank)
        return host is not None and host.ready and not place.asked

    def _may_have(self, rank: int) -> bool:
        host = self._hosts.get(rank)
        kept = self.wanted is None or rank < self.wanted
        return host is not None and host.ready and not host.leaving and kept

    def arrange(self) -> list[DriverAction]:
        """Place executors that are nowhere, and ask for those that are to go elsewhere, so that
        all hosts end an iteration together (driver_speeds.py)."""
        loads = self.loads()
        self._begun = self._begun or len(loads) >= self._expected
        if self.ended is not None or not self._begun:
            return self._effects()
        if self._holding:
            for executor, place in enumerate(self._places):
                if self._reachable(place):
                    self._ask_for(executor, None)
            return self._effects()
        task_s = self._speeds.of(loads)
        for executor, place in enumerate(self._places):
            if place.rank is None and loads:
                at = place.parked[0] if place.parked else -1
                self._place_at(executor, at if at in loads else next_host(loads, task_s), loads)
        for executor, place in enumerate(self._places):
            self._move_off(executor, place, loads, task_s)
        return self._effects()

    def loads(self) -> dict[int, int]:
        """Count the executors that are at each host that may have some, or go there."""
        loads = {rank: 0 for rank in sorted(self._hosts) if self._may_have(rank)}
        for place in self._places:
            where = place.target if place.asked else place.rank
            if where in loads:
                loads[where] += 1
        return loads

    def _place_at(self, executor: int, rank: int, loads: dict[int, int]) -> None:
        place = self._places[executor]
        loads[rank] += 1
        at, parked = place.parked or (rank, 0)
        if at != rank:
            self._out.append(Send(at, ForgetExecutor(executor=executor)))
            parked = 0
        entry = ExecutorPlaced(executor=executor, move=place.move + 1, rank=rank, state=place.state)
        self._out.append(Write(entry))
        self._placed(entry)
        self._sent_to(executor, parked)

    def _move_off(
        self, executor: int, place: Place, loads: dict[int, int], task_s: dict[int, float]
    ) -> None:
        """Ask the executor's host for it where another one should have it."""
        if place.rank is None or place.asked or not self._reachable(place):
            return
        target = next_host(loads, task_s) if loads else None
        must = not self._may_have(place.rank)
        if target is None:
            if not self._hosts[place.rank].leaving:
                return
        elif not must and not pays(loads, task_s, place.rank, target):
            return
        if target is not None:
            loads[target] += 1
        if place.rank in loads:
            loads[place.rank] -= 1
        self._ask_for(executor, target)

    def _ask_for(self, executor: int, target: int | None) -> None:
        place = self._places[executor]
        assert place.rank is not None
        place.asked, place.target = True, target
        self._out.append(Send(place.rank, GiveExecutor(executor=executor)))

    # Effects --------------------------------------------------------------------------------------

    def _effects(self) -> list[DriverAction]:
        effects, self._out = self._out, []
        new, self._new = self._new, {}
        for rank, orders in new.items():
            ordered = [orders[number] for number in sorted(orders)]
            effects += [Send(rank, Orders(orders=some)) for some in framefuls(ordered)]
        if self.ended is not None:
            effects = [e for e in effects if not isinstance(e, Send) or _still_said(e.message)]
            if not self._end_said:
                effects += [Write(RunEnded(reason=self.ended.reason)), self.ended]
                self._end_said = True
        if not self._replaying:
            effects += self._let_go()
        return effects

    def _let_go(self) -> list[DriverAction]:
        """Tell hosts to end, once: all after the end; before it those that were to leave, and have
        no executor any more."""
        found: list[DriverAction] = []
        for rank, host in self._hosts.items():
            may = host.leaving and host.ready and not self.held_by(rank)
            if (may or self.ended is not None) and not host.over:
                host.over = True
                found.append(Send(rank, Over(reason=self.ended.reason if self.ended else "")))
        return found


def _still_said(message: Message) -> bool:
    return isinstance(message, Noted | HostWelcome)
