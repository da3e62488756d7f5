"""Requests that every service answers, whatever it does: health, info, stats, drain.

The subjects are sw.v1.cmd.<service>.<id>.{health,info,stats,drain}; a person asks by hand with
`nats req sw.v1.cmd.master.main.health '{}'`.
"""

from typing import Annotated, Final, Literal

import msgspec

from slackwater.schemas.base import (
    Count,
    Finite,
    IdText,
    Message,
    Name,
    Record,
    Seconds,
    Text,
    cut_texts,
)

Verbs = Annotated[tuple[Name, ...], msgspec.Meta(max_length=256)]
Words = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(max_length=256)
]


Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
"""The sum of the digests of a bucket's records."""


class EpochRecord(Record, kw_only=True, frozen=True):
    """The key `_epoch` of every bucket: who writes it now. Each start of a writer adds one, and
    every later write of the one before it is refused."""

    epoch: Count
    writer: Annotated[str, msgspec.Meta(max_length=256)]
    """Service, instance, host and process, for the person who reads it."""
    since_s: Seconds = 0.0


class AcceptedRecord(Record, kw_only=True, frozen=True):
    """A key of the bucket `accepted`, named like a bucket: an operator has accepted it in this very
    state, though records are missing."""

    last: Count
    """The sequence of the bucket's last write."""
    count: Count
    digest: Digest
    """The records that it holds (common/store/witness.py)."""
    by: Annotated[str, msgspec.Meta(max_length=256)] = ""
    at_s: Seconds = 0.0


class BucketMark(Record, kw_only=True, frozen=True):
    """A bucket after one write (common/store/witness.py)."""

    bucket: Name
    epoch: Count
    sequence: Count
    count: Count
    digest: Digest


BucketMarks = Annotated[tuple[BucketMark, ...], msgspec.Meta(max_length=1024)]


class Marks(Message, kw_only=True, frozen=True, tag="service.marks"):
    """sw.v1.tel.<service>.<id>.witness: the newest mark of a bucket of its own, before the write is
    acknowledged. sw.v1.tel.<service>.<id>.remembered: those that it heard of the buckets that
    somebody recovers."""

    marks: BucketMarks


class Recovering(Message, kw_only=True, frozen=True, tag="service.recovering"):
    """sw.v1.tel.<service>.<id>.recovering: it takes these buckets over, and asks what others
    remember of them."""

    buckets: Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)]


class LeaseRecord(Record, kw_only=True, frozen=True):
    """A key of the bucket `leases`: who leads, for as long as the key lives."""

    owner: Annotated[str, msgspec.Meta(max_length=256)]


BUS_RESERVE_BYTES: Final = 1024**3
"""Room on a bus server's disk, or a tenth of it if that is less, below which no job is taken in."""


class BusState(Message, kw_only=True, frozen=True, tag="bus.state"):
    """sw.v1.tel.bus.<server>.state, once a second: the disk of a bus server, and what it cannot
    write."""

    server: IdText
    free_bytes: Count
    total_bytes: Count
    reason: Text = ""
    """Says what it cannot write, and why; empty: it writes."""
    at_s: Seconds

    def __post_init__(self) -> None:
        cut_texts(self)

    @property
    def reserve_bytes(self) -> int:
        """The room that is kept for leases and for the jobs that are there: with less, nothing more
        is taken in."""
        return min(self.total_bytes // 10, BUS_RESERVE_BYTES)


class Breach(Record, kw_only=True, frozen=True):
    """An event from outside that broke a core."""

    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    """The digest of the event or message, without its sender."""
    origin: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Subject or key, and type, of what is not a request."""
    event: Name
    message: Name
    error: Text
    at_s: Seconds
    version: Name
    """The release that it broke."""
    content: Annotated[bytes, msgspec.Meta(max_length=2**16)]
    """The message as msgpack, as far as there was room."""


BREACHES_MAX: Final = 64
"""Breaches in one record."""


class BreachesRecord(Record, kw_only=True, frozen=True):
    """One key of the shared bucket `breaches`: those that an instance met last."""

    breaches: Annotated[tuple[Breach, ...], msgspec.Meta(max_length=BREACHES_MAX)] = ()


class GetHealth(Message, kw_only=True, frozen=True, tag="service.health"):
    pass


class Health(Message, kw_only=True, frozen=True, tag="service.health-reply"):
    """`degraded`: requests are answered, but the bus or the store does not answer at present."""

    state: Literal["ok", "degraded", "draining"]
    service: IdText
    id: IdText
    uptime_s: Seconds
    bus_connected: bool
    steps_waiting: Count
    """Steps whose records are not durable yet."""
    reason: Text = ""

    def __post_init__(self) -> None:
        cut_texts(self)


class GetInfo(Message, kw_only=True, frozen=True, tag="service.info"):
    pass


class Info(Message, kw_only=True, frozen=True, tag="service.info-reply"):
    """The answering service and its facts; its epoch is in the envelope."""

    service: IdText
    id: IdText
    version: Name
    schema_version: Count
    host: Annotated[str, msgspec.Meta(max_length=256)]
    pid: Count
    started_s: Seconds
    endpoints: Verbs
    subscriptions: Words
    buckets: Words


class GetStats(Message, kw_only=True, frozen=True, tag="service.stats"):
    pass


class Stats(Message, kw_only=True, frozen=True, tag="service.stats-reply"):
    """Counters since the process began."""

    service: IdText
    id: IdText
    uptime_s: Seconds
    counters: Annotated[dict[Name, Count], msgspec.Meta(max_length=256)]
    gauges: Annotated[dict[Name, Finite], msgspec.Meta(max_length=256)]


class Drain(Message, kw_only=True, frozen=True, tag="service.drain"):
    """Take nothing new, finish what is begun, end with code 0. Answered Ok at once."""
