"""The seam of durable state: buckets of small values under keys, each bucket one ordered stream.

All writes of a bucket carry the sequence that their writer believes to be its last: a deposed one's
next write fails, whatever the key (ADR 1). Two implementations:
JetStream (`nats.py`) and in memory (`memory.py`); one conformance suite.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from slackwater.common.base import codec
from slackwater.common.base.errors import DecodeRejected, Rejected
from slackwater.common.store.witness import Mark
from slackwater.schemas.service import LeaseRecord

EPOCH_KEY: Final = "_epoch"
"""The record that fences a bucket: each new writing instance begins by writing it."""


class SequenceConflict(Rejected):
    """Somebody else wrote the bucket: `last` is its real last sequence."""

    def __init__(self, bucket: str, expected: int, last: int) -> None:
        super().__init__(
            f"bucket {bucket}: expected last sequence {expected}, found {last}: another instance "
            "writes it; read the bucket again"
        )
        self.expected, self.last = expected, last


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    value: bytes | None  # None: deleted
    sequence: int


Over = Callable[[str], bool]
"""Says whether the owner of a lease has ended for good."""


class Loaded(NamedTuple):
    """A bucket as it was read."""

    entries: dict[str, Entry]
    """Its live entries."""
    last: int
    """The sequence of the stream: deleted keys count in it."""
    mark: Mark | None
    """The newest mark that was found (witness.py)."""

    @property
    def records(self) -> dict[str, bytes]:
        """Return the records as they are stored, that of the epoch left out."""
        return {
            key: entry.value
            for key, entry in self.entries.items()
            if entry.value is not None and key != EPOCH_KEY
        }


class Bucket(Protocol):
    """Raises Unavailable, DeadlineExceeded (the write may have happened), SequenceConflict."""

    @property
    def name(self) -> str: ...

    async def load(self) -> Loaded: ...

    async def get(self, key: str) -> Entry | None: ...

    async def last_sequence(self) -> int:
        """Comes after every write that this client began before: after a timeout ask this first,
        then `get` tells whether the write was applied."""
        ...

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expected_last: int,
        fence: int = 0,
        mark: Mark | None = None,
    ) -> int:
        """Durable when it returns; the new last sequence. Several puts may be in flight with
        consecutive `expected_last`: they are applied in the order they were started.

        `fence` (0: none) is the sequence of the writer's own record under EPOCH_KEY: the write is
        refused with SequenceConflict when another record is there. Without it a deposed writer
        with several writes in flight could slip one in: the new writer's first record moves the
        sequence to what the second of them expects. (NATS: the headers Nats-Expected-Last-Sequence
        and Nats-Expected-Last-Subject-Sequence with ...-Subject = the epoch key's subject.)

        `mark`: what the bucket holds after it; stored beside the value, and found by `load`."""
        ...

    async def delete(
        self, key: str, *, expected_last: int, fence: int = 0, mark: Mark | None = None
    ) -> int: ...

    def watch(self) -> AsyncIterator[Entry]:
        """Every live entry, then every change, until the iterator is closed."""
        ...


class Store(Protocol):
    @property
    def replicas(self) -> int:
        """Servers that keep each record; most of them are enough."""
        ...

    async def bucket(self, name: str, *, anew: bool = False) -> Bucket:
        """Open the bucket, making it if need be; `anew`: also if it was removed since."""
        ...

    async def lease(
        self, bucket: str, key: str, owner: str, ttl_s: float, over: "Over | None" = None
    ) -> "Lease | None":
        """Take a key with a time to live if it is free, already `owner`'s, or its owner's life is
        `over`; None: someone else holds it."""
        ...


class Lease(Protocol):
    @property
    def owner(self) -> str: ...

    async def renew(self) -> bool:
        """False: the lease is lost."""
        ...

    async def release(self) -> None: ...


def lease_value(owner: str) -> bytes:
    return codec.encode_record(LeaseRecord(owner=owner), epoch=0)


def may_take(value: bytes, owner: str, over: Over | None) -> bool:
    """Say whether `owner` may take a lease whose key holds `value`."""
    holder = lease_owner(value)
    return holder == owner or bool(holder and over is not None and over(holder))


def lease_owner(value: bytes) -> str:
    """Return the lease's owner. Empty: the value is damaged, and the lease is free once it expires.
    Release 0.1.0 wrote the bare name, and a msgpack map never begins like one."""
    if value[:1] < b"\x80":
        return value.decode()
    try:
        return codec.decode_record(value, LeaseRecord, "lease")[0].owner
    except DecodeRejected:
        return ""
