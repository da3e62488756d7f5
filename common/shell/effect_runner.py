"""Carries out what cores ask for: timers, log lines, tasks, and handlers found by an effect's type.

Services (service.py), the Agent's session and the device's lenders each run a core; what differs
is the handlers that they register. A handler is called with the effect, in the order of the
effects. What it returns (unless None), or what its coroutine returns later, is the next event.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar, get_args

import structlog

from slackwater.common.base import limits
from slackwater.common.base.background import Tasks
from slackwater.common.base.clock import Clock
from slackwater.common.base.effects import CancelTimer, Effect, Log, StartTimer
from slackwater.common.base.errors import Fatal
from slackwater.common.shell.timers import Timers

E = TypeVar("E")
Handler = Callable[[Any], Any]
Handlers = Mapping[type[Any], Handler]
_log = structlog.get_logger()


def on(kind: type[E], handler: Callable[[E], Any]) -> tuple[type[Any], Handler]:
    """Return an entry of `handlers`; the type checker compares the handler with the effect."""
    return kind, handler


def handlers(union: Any, *entries: tuple[type[Any], Handler]) -> Handlers:
    """Return the handlers of all effects in `union` (one type, or several joined by `|`).

    Raises Fatal when an effect has none or two, or when a handler's effect is not in the union.
    """
    wanted = get_args(union) or (union,)
    found = [kind for kind, _ in entries]
    missing = [kind.__name__ for kind in wanted if kind not in found]
    strange = [kind.__name__ for kind in found if kind not in wanted]
    doubled = sorted({kind.__name__ for kind in found if found.count(kind) > 1})
    for names, what in (
        (missing, "have no handler"),
        (strange, "have a handler and are not effects of this core"),
        (doubled, "have two handlers"),
    ):
        if names:
            raise Fatal(f"{', '.join(names)} {what}; register one handler for each type")
    return dict(entries)


class EffectRunner:
    """Carries out the effects of one core on this loop. Events go to `post`; `fail` is told the
    name and the exception of a task that raised."""

    def __init__(
        self,
        clock: Clock,
        post: Callable[[Any], None],
        fail: Callable[[str, BaseException], None],
        handlers: Handlers,
    ) -> None:
        self.timers = Timers(clock, post)
        self.tasks = Tasks(fail)
        self._post = post
        self._doing: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(limits.ACTIONS_IN_FLIGHT_MAX)
        self._handlers: dict[type[Any], Handler] = {
            StartTimer: self._start_timer,
            CancelTimer: self._cancel_timer,
            Log: write_log,
        }
        self.register(handlers)

    def register(self, handlers: Handlers) -> None:
        """Add handlers. Raises Fatal when an effect has one already."""
        for kind, handler in handlers.items():
            if kind in self._handlers:
                raise Fatal(f"the effect {kind.__name__} has a handler already; remove one of them")
            self._handlers[kind] = handler

    @property
    def running(self) -> int:
        """Return how many handlers' coroutines have not ended yet."""
        return len(self._doing)

    def perform(self, effect: Effect) -> None:
        """Carry out one effect. Raises Fatal when its type has no handler."""
        handler = self._handlers.get(type(effect))
        if handler is None:
            raise Fatal(f"nothing here carries out the effect {type(effect).__name__}")
        result = handler(effect)
        if result is None:
            return
        if inspect.isawaitable(result):
            task = self.tasks.spawn(self._finish(result), type(effect).__name__)
            self._doing.add(task)
            task.add_done_callback(partial(self._ended, result))
        else:
            self._post(result)

    async def _finish(self, result: Awaitable[Any]) -> None:
        async with self._slots:
            event = await result
        if event is not None:
            self._post(event)

    def _ended(self, result: Awaitable[Any], task: asyncio.Task[None]) -> None:
        self._doing.discard(task)
        if inspect.iscoroutine(result):
            result.close()  # A task that is cancelled before it begins leaves it unawaited.

    def _start_timer(self, effect: StartTimer) -> None:
        self.timers.start(effect.key, effect.at_s)

    def _cancel_timer(self, effect: CancelTimer) -> None:
        self.timers.cancel(effect.key)

    async def close(self) -> None:
        """Leave no timer and no task."""
        self.timers.close()
        await self.tasks.close()


def write_log(effect: Log) -> None:
    getattr(_log, effect.level)(effect.event, **effect.fields)
