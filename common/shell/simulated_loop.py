"""Virtual time: an asyncio loop that never waits, but jumps to its next timer.

The same services run on it as live, in one thread, and a seed reproduces the run: callbacks are
called in the order they were scheduled, timers in the order they are due, and nothing comes from
outside. Hence no threads, executors or sockets here: each is refused where it would be used. When
nothing is left to do and nobody's timer runs, the program waits for something that cannot come,
and the loop says so instead of hanging.

Determinism is the caller's too: no iteration over sets of objects other than tasks, no clock and no
randomness but the world's (`world.py`).
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, Final, TypeVar, TypeVarTuple

from slackwater.common.base.errors import Fatal

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SIM_START_S: Final = 1_000_000.0
"""The time at which every simulation begins."""
_RESOLUTION_S: Final = 1e-9


class _JumpingSelector(selectors.BaseSelector):
    """Has nothing to select: to wait for t seconds is to add t to the time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        # The loop registers the pipe that wakes it from other threads; nobody ever writes to it.
        if self._keys:
            raise Fatal("a simulated program may not use sockets: use the world's bus and store")
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, descriptor, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Fatal(
                "the simulation is stuck: every task waits for something that no other will do"
            )
        self.now_s += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class _SimTask(asyncio.Task[Any]):
    """A task whose hash is its number. Tasks are kept in sets, and cancelled and waited for in a
    set's order (a task group's, too); by its address, which a hash is else, one run would differ
    from the next in the same process."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **named: Any) -> None:
        self._number = number  # First: the module keeps each task in a set of its own.
        super().__init__(coro, **named)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = _RESOLUTION_S
        self._tasks_made = 0
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]  # Typeshed's is of a future.

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T], **named: Any
    ) -> asyncio.Task[T]:
        self._tasks_made += 1
        return _SimTask(self._tasks_made, coro, loop=loop, **named)

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        raise Fatal(f"a simulated program may not use threads (it would run {func!r} in one)")


class SimClock:
    """The time of the running simulation."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return SIM_START_S + self._loop.time()

    async def sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self.now_s()))


class SetClock:
    """The clock of a host that somebody set: `offset_s` ahead of the others'."""

    def __init__(self, clock: SimClock, offset_s: float) -> None:
        self._clock, self._offset_s = clock, offset_s

    def now_s(self) -> float:
        return self._clock.now_s() + self._offset_s

    async def sleep_until(self, at_s: float) -> None:
        await self._clock.sleep_until(at_s - self._offset_s)


def run_simulated(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end under virtual time. What it takes in real time is the computation alone."""
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main)
