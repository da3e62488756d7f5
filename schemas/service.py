"""What every service answers, whatever it does: health, info, stats, drain.

The subjects are sw.v1.cmd.<service>.<id>.{health,info,stats,drain}; a person asks by hand with
`nats req sw.v1.cmd.master.main.health '{}'`.
"""

from typing import Annotated, Literal

import msgspec

from slackwater.schemas.base import Count, Message, Record, Seconds, Text

Verbs = Annotated[tuple[str, ...], msgspec.Meta(max_length=256)]


class EpochRecord(Record, kw_only=True, frozen=True):
    """The key `_epoch` of every bucket: who writes it now. Each start of a writer adds one, and
    every later write of the one before it is refused."""

    epoch: Count
    writer: Annotated[str, msgspec.Meta(max_length=256)]
    """Service, instance, host and process, for the person who reads it."""
    since_s: Seconds = 0.0


class GetHealth(Message, kw_only=True, frozen=True, tag="service.health"):
    pass


class Health(Message, kw_only=True, frozen=True, tag="service.health-reply"):
    """`degraded`: requests are answered, but the bus or the store does not answer at present."""

    state: Literal["ok", "degraded", "draining"]
    service: str
    id: str
    uptime_s: Seconds
    bus_connected: bool
    steps_waiting: Count
    """Steps whose records are not durable yet."""
    reason: Text = ""


class GetInfo(Message, kw_only=True, frozen=True, tag="service.info"):
    pass


class Info(Message, kw_only=True, frozen=True, tag="service.info-reply"):
    """Who answers: the epoch is in the envelope."""

    service: str
    id: str
    version: str
    schema_version: Count
    host: str
    pid: Count
    started_s: Seconds
    endpoints: Verbs
    subscriptions: Annotated[tuple[str, ...], msgspec.Meta(max_length=256)]
    buckets: Annotated[tuple[str, ...], msgspec.Meta(max_length=256)]


class GetStats(Message, kw_only=True, frozen=True, tag="service.stats"):
    pass


class Stats(Message, kw_only=True, frozen=True, tag="service.stats-reply"):
    """Counters since the process began."""

    service: str
    id: str
    uptime_s: Seconds
    counters: Annotated[dict[str, Count], msgspec.Meta(max_length=256)]
    gauges: Annotated[dict[str, float], msgspec.Meta(max_length=256)]


class Drain(Message, kw_only=True, frozen=True, tag="service.drain"):
    """Take nothing new, finish what is begun, end with code 0. Answered Ok at once."""
