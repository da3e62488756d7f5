"""The definition of a service: its core, its buckets, its endpoints, its handlers.

Everything else (connections, order, durability, fencing, drains) is the shell's, and the same for
all services.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from slackwater.common.base.effects import Effect
from slackwater.common.base.histogram import Histogram
from slackwater.common.shell.effect_runner import Handlers
from slackwater.common.shell.process import Process
from slackwater.schemas.base import Message, Record


class Core(Protocol):
    def step(self, event: Any, now_s: float) -> Sequence[Effect]: ...


class Port(Protocol):
    """The shell as a service's own I/O (handlers, tasks) sees it."""

    @property
    def epoch(self) -> int: ...

    @property
    def process(self) -> Process:
        """Host, pid, the supervisor's descriptor store (`notify.store`), what it gave back."""
        ...

    @property
    def stopping(self) -> asyncio.Event:
        """Set when the drain begins."""
        ...

    def now_s(self) -> float: ...

    def post(self, event: Any) -> None:
        """Put an event into the inbox. Events posted before the core recovered wait for that."""
        ...

    def stamp(self, message: Message) -> Message:
        """The message with this instance as sender, and its epoch."""
        ...

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of the counters that `stats` and the metrics show."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the process: it cannot go on."""
        ...


class Level(NamedTuple):
    """One sample that the metrics show (`metrics.FAMILIES` says what it is)."""

    name: str
    labels: Mapping[str, str]
    value: float | Histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDefinition:
    """One instance of a service.

    `id` is what it answers under; `instance` (default: `id`) tells the several that compete for
    one `lease` apart. `buckets` are the service's own: nobody else writes them; each holds one
    type of record. `endpoints` maps a verb to the type of its request, `subscriptions` a pattern
    to the type (or union of types) that arrives there. `concurrency`: requests of a verb that are
    worked on at once, where that is not ENDPOINT_CONCURRENCY; one more is told when to come again.

    `reads`: types of requests that change nothing: they are answered also while the store does not
    answer. `adds`: types of those that are refused first, while the store's disk has room for what
    must go on.

    `handlers` carry out the core's own effects, by their type (effect_runner.handlers).

    `heartbeat` gives the message that is published each HEARTBEAT_S (the shell fills in a
    Heartbeat's incarnation: the epoch); None: a plain Heartbeat.

    `needs_all_records`: its records are one whole, of which a part would mislead; without it a
    service starts with those that can be read (see recovery.py).

    `service_gauges` gives the service's own samples when somebody scrapes.

    `on_start` opens what the core's handlers need, before the core recovers; `tasks` run from
    then on until the drain is over; `on_stop` closes it.
    """

    service: str
    id: str
    core: Core
    description: str = ""
    instance: str = ""
    lease: str = ""
    buckets: Mapping[str, type[Record]] = field(default_factory=dict)
    endpoints: Mapping[str, Any] = field(default_factory=dict)
    concurrency: Mapping[str, int] = field(default_factory=dict)
    reads: frozenset[type[Message]] = frozenset()
    adds: frozenset[type[Message]] = frozenset()
    subscriptions: Mapping[str, Any] = field(default_factory=dict)
    handlers: Handlers = field(default_factory=dict)
    heartbeat: Callable[[float], Message] | None = None
    service_gauges: Callable[[], Iterable[Level]] = tuple[Level, ...]
    on_start: Callable[[Port], Awaitable[None]] | None = None
    on_stop: Callable[[], Awaitable[None]] | None = None
    needs_all_records: bool = False
    tasks: Sequence[Callable[[Port], Coroutine[Any, Any, None]]] = ()
