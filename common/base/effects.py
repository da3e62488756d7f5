"""Effects, the closed union of commands by which a core asks its shell to act.

A core is `step(event, now_s) -> list[Effect]`: pure, synchronous. Events are past tense, effects
imperative. The shell stores every `Persist` of a step before it carries out the step's other
effects; the order within the others is kept.

What a service alone can do (start a process, copy a tensor) is an `Action`: a frozen dataclass
beside its core. The shell finds the handler by the type (common/shell/effect_runner.py).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from slackwater.schemas.base import Message, Record, Refused


class EffectKey(msgspec.Struct, frozen=True):
    """Names a timer or a request. Each kind is a small frozen struct of the core that asks: the
    event that answers carries it back, and `match` tells the kinds apart. Structs are compared and
    hashed in C: a core that looks for a key a thousand times a second feels the difference."""


class Action:
    """I/O of the service's own kind; the base of frozen dataclasses."""

    __slots__ = ()


class Persist(msgspec.Struct, frozen=True):
    """Write one record of this service's own bucket, or delete it (`record` None)."""

    bucket: str
    key: str
    record: Record | None


class Publish(msgspec.Struct, frozen=True):
    """A fact or telemetry. Nobody answers."""

    subject: str
    message: Message


class Reply(msgspec.Struct, frozen=True):
    """The answer to the request that caused an event, by the request's token."""

    token: int
    message: Message


class Request(msgspec.Struct, frozen=True):
    """A command to another service. The shell retries it within the budget; the answer (or
    `Refused`, when the budget is spent) comes back as the event `Answered(key, message)`.

    Requests with one `lane` are sent one after the other, in order. With `hear_refusals` each
    refusal that is retried comes as `RefusedSoFar(key, refused)`, too. Without
    `retry_refusals` a refusal is the answer; only where nobody answers the shell tries again.
    """

    subject: str
    message: Message
    key: EffectKey
    lane: str = ""
    timeout_s: float = 5.0
    budget_s: float = 60.0
    hear_refusals: bool = False
    retry_refusals: bool = True


class StartTimer(msgspec.Struct, frozen=True):
    """The event `TimerFired(key)` comes at `at_s`; a later StartTimer of the key replaces it."""

    key: EffectKey
    at_s: float


class CancelTimer(msgspec.Struct, frozen=True):
    key: EffectKey


class Count(msgspec.Struct, frozen=True):
    """Add one to a counter that `stats` and the metrics show (`metrics.OWN` lists the names)."""

    name: str


class Log(msgspec.Struct, frozen=True):
    """One structured log line."""

    event: str
    fields: dict[str, Any] = msgspec.field(default_factory=dict)
    level: str = "info"


class Stop(msgspec.Struct, frozen=True):
    """End the process: its records are no longer its own, or it was told to go."""

    reason: str
    code: int = 1


Effect = (
    Persist | Publish | Reply | Request | StartTimer | CancelTimer | Count | Log | Stop | Action
)


# Events that the shell itself makes ---------------------------------------------------------------


class Requested(msgspec.Struct, frozen=True):
    """A command arrived on this service's endpoint; answer it with Reply(token, ...)."""

    token: int
    message: Message
    tenant: str = ""
    """The sender may act for this tenant alone; empty: for all."""


class Observed(msgspec.Struct, frozen=True):
    """A fact or telemetry arrived on a subscription."""

    subject: str
    message: Message


class Answered(msgspec.Struct, frozen=True):
    """The answer to Request(key=key): the reply, or Refused if the budget ran out."""

    key: EffectKey
    message: Message


class RefusedSoFar(msgspec.Struct, frozen=True):
    """The receiver of Request(key=key, hear_refusals=True) refused it for now; it is sent again."""

    key: EffectKey
    message: Refused


class TimerFired(msgspec.Struct, frozen=True):
    key: EffectKey


class Recovered(msgspec.Struct, frozen=True):
    """First event of a core's life: its own buckets' records as they were found, and its epoch."""

    epoch: int
    records: dict[str, dict[str, Record]]
    """bucket -> key -> record"""
    damaged: Mapping[str, frozenset[str]] = msgspec.field(default_factory=dict)
    """bucket -> keys whose records are there and cannot be read. What they were about goes on
    elsewhere: nothing may be begun anew, given away or dropped under such a key."""


class Draining(msgspec.Struct, frozen=True):
    """SIGTERM or `drain`: take nothing new, finish what is begun."""


ShellEvent = Requested | Observed | Answered | RefusedSoFar | TimerFired | Recovered | Draining
