"""What a core asks of its shell: imperative data, in one closed union.

A core is `step(event, now_s) -> list[Effect]`: pure, synchronous. Events are past tense, effects
imperative. The shell stores every `Persist` of a step before it carries out the step's other
effects; the order within the others is kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from slackwater.schemas.base import Message, Record


@dataclass(frozen=True, slots=True)
class Persist:
    """Write one record of this service's own bucket, or delete it (`record` None)."""

    bucket: str
    key: str
    record: Record | None


@dataclass(frozen=True, slots=True)
class Publish:
    """A fact or telemetry. Nobody answers."""

    subject: str
    message: Message


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the request that caused an event, by the request's token."""

    token: int
    message: Message


REFUSED: Final = "refused/"


@dataclass(frozen=True, slots=True)
class Request:
    """A command to another service. The shell retries it within the budget; the answer (or
    `Refused`, when the budget is spent) comes back as the event `Answered(key, message)`.

    Requests with one `lane` are sent one after the other, in order. With `hear_refusals` each
    refusal that is retried comes as `Answered(REFUSED + key, refused)`, too. Without
    `retry_refusals` a refusal is the answer; only where nobody answers the shell tries again.
    """

    subject: str
    message: Message
    key: str
    lane: str = ""
    timeout_s: float = 5.0
    budget_s: float = 60.0
    hear_refusals: bool = False
    retry_refusals: bool = True


@dataclass(frozen=True, slots=True)
class StartTimer:
    """The event `TimerFired(key)` comes at `at_s`; a later StartTimer of the key replaces it."""

    key: str
    at_s: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    key: str


@dataclass(frozen=True, slots=True)
class Do:
    """I/O of the service's own kind (start a process, copy a tensor): its shell knows `action`."""

    action: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Log:
    """One structured log line."""

    event: str
    fields: dict[str, Any] = field(default_factory=dict)
    level: str = "info"


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process: its records are no longer its own, or it was told to go."""

    reason: str
    code: int = 1


Effect = Persist | Publish | Reply | Request | StartTimer | CancelTimer | Do | Log | Stop


# Events that the shell itself makes ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Requested:
    """A command arrived on this service's endpoint; answer it with Reply(token, ...)."""

    token: int
    message: Message


@dataclass(frozen=True, slots=True)
class Observed:
    """A fact or telemetry arrived on a subscription."""

    subject: str
    message: Message


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to Request(key=key): the reply, or Refused if the budget ran out."""

    key: str
    message: Message


@dataclass(frozen=True, slots=True)
class TimerFired:
    key: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """First event of a core's life: its own buckets' records as they were found, and its epoch."""

    epoch: int
    records: dict[str, dict[str, Record]]
    """bucket -> key -> record"""
    damaged: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """bucket -> keys whose records are there and cannot be read. What they were about goes on
    elsewhere: nothing may be begun anew, given away or dropped under such a key."""


@dataclass(frozen=True, slots=True)
class Draining:
    """SIGTERM or `drain`: take nothing new, finish what is begun."""


ShellEvent = Requested | Observed | Answered | TimerFired | Recovered | Draining
