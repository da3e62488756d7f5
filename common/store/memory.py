"""Durable records in one process: the same contract, on a clock that may be virtual.

`MemoryStorage` is the server with its disk: it outlives its clients, so that a simulated crash
loses nothing that was acknowledged. A `StoreFaults` hook may let a write time out before or after
it was applied, or slow it down: what a client must survive, and a unit test cannot wait for.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal, Protocol

from slackwater.common.base import limits
from slackwater.common.base.clock import Clock, LiveClock
from slackwater.common.base.errors import DeadlineExceeded, Rejected, Unavailable
from slackwater.common.store.base import (
    EPOCH_KEY,
    Bucket,
    Entry,
    Lease,
    Loaded,
    Over,
    SequenceConflict,
    lease_owner,
    lease_value,
    may_take,
)
from slackwater.common.store.witness import Mark

Fate = Literal["good", "lost", "unanswered"]
"""lost: the write timed out and was not applied; unanswered: it timed out, and it was."""


class StoreFaults(Protocol):
    def fate(self, client: str, bucket: str, key: str) -> tuple[Fate, float]:
        """Return the outcome of a client's write, and the seconds that its answer takes."""
        ...

    def reaches(self, client: str) -> bool:
        """Say whether anything that the client asks gets to the server."""
        ...


@dataclass
class SeededStoreFaults:
    """Random timeouts of either kind, and slow writes."""

    rng: Random
    lost: float = 0.0
    unanswered: float = 0.0
    delay_s_max: float = 0.0
    isolated: set[str] = field(default_factory=set)
    """Clients that do not reach the server."""

    def fate(self, client: str, bucket: str, key: str) -> tuple[Fate, float]:
        draw = self.rng.random()
        delay_s = self.rng.uniform(0.0, self.delay_s_max)
        if draw < self.lost:
            return "lost", delay_s
        return ("unanswered" if draw < self.lost + self.unanswered else "good"), delay_s

    def reaches(self, client: str) -> bool:
        return client not in self.isolated


@dataclass
class _Stream:
    """A bucket as the server has it: one entry per key, and the sequence of the last write."""

    name: str
    last: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)
    expires_s: dict[str, float] = field(default_factory=dict)
    mark: Mark | None = None
    """The newest that came with a write."""
    watchers: list[Callable[[], None]] = field(default_factory=list)

    def write(self, key: str, value: bytes | None, mark: Mark | None = None) -> int:
        self.last += 1
        self.mark = mark or self.mark
        # In the order of the sequence, as a stream is read.
        self.entries.pop(key, None)
        self.entries[key] = Entry(key, value, self.last)
        for wake in list(self.watchers):
            wake()
        return self.last

    def live(self, key: str) -> Entry | None:
        entry = self.entries.get(key)
        return None if entry is None or entry.value is None else entry

    def sequence_of(self, key: str) -> int:
        entry = self.entries.get(key)
        return 0 if entry is None else entry.sequence

    def expire(self, now_s: float) -> None:
        for key in [key for key, at_s in self.expires_s.items() if at_s <= now_s]:
            del self.expires_s[key]
            self.write(key, None)


class MemoryStorage:
    """The server. Every client's `MemoryStore` of one system shares it."""

    def __init__(self, *, clock: Clock | None = None, faults: StoreFaults | None = None) -> None:
        self.clock = clock or LiveClock()
        self.faults = faults
        self.running = True
        self._streams: dict[str, _Stream] = {}

    def connect(self, client: str) -> "MemoryStore":
        return MemoryStore(self, client)

    def stop(self) -> None:
        """The server is down; its disk stays."""
        self.running = False

    def start(self) -> None:
        self.running = True

    async def reached(self, client: str, bucket: str) -> _Stream:
        """Return the bucket as the client's request finds it. Raises Unavailable, DeadlineExceeded
        where the request gets nowhere."""
        await asyncio.sleep(0)
        if self.faults is not None and not self.faults.reaches(client):
            await asyncio.sleep(limits.STORE_TIMEOUT_S)
            raise DeadlineExceeded(
                f"bucket {bucket}: no answer within {limits.STORE_TIMEOUT_S:g} s",
                limits.RETRY_WAIT_S_MIN,
            )
        return self.stream(bucket)

    def stream(self, name: str) -> _Stream:
        if not self.running:
            raise Unavailable(
                f"bucket {name}: the server is down; nothing was sent", limits.RECONNECT_WAIT_S
            )
        found = self._streams.setdefault(name, _Stream(name))
        found.expire(self.clock.now_s())
        return found


class MemoryStore:
    replicas = 1

    """One client's handle. Made by `MemoryStorage.connect(name)`."""

    def __init__(self, storage: MemoryStorage, client: str) -> None:
        self._storage = storage
        self._client = client

    async def bucket(self, name: str, *, anew: bool = False) -> Bucket:
        self._storage.stream(name)
        return MemoryBucket(self._storage, self._client, name)

    async def lease(
        self, bucket: str, key: str, owner: str, ttl_s: float, over: Over | None = None
    ) -> "Lease | None":
        if ttl_s < limits.LEASE_TTL_S_MIN:
            raise Rejected(
                f"lease {key}: a time to live of {ttl_s:g} s is under the least of "
                f"{limits.LEASE_TTL_S_MIN:g} s"
            )
        lease = MemoryLease(self._storage, self._client, bucket, key, owner, ttl_s)
        return lease if await lease.take(over) else None


class MemoryBucket:
    def __init__(self, storage: MemoryStorage, client: str, name: str) -> None:
        self._storage = storage
        self._client = client
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    async def load(self) -> Loaded:
        stream = await self._storage.reached(self._client, self._name)
        live = {key: one for key, one in stream.entries.items() if one.value is not None}
        return Loaded(live, stream.last, stream.mark)

    async def get(self, key: str) -> Entry | None:
        return (await self._storage.reached(self._client, self._name)).live(key)

    async def last_sequence(self) -> int:
        return (await self._storage.reached(self._client, self._name)).last

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expected_last: int,
        fence: int = 0,
        mark: Mark | None = None,
    ) -> int:
        if len(value) > limits.RECORD_BYTES_MAX:
            raise Rejected(
                f"bucket {self._name}, key {key}: {len(value)} bytes are over the "
                f"{limits.RECORD_BYTES_MAX} of a record"
            )
        return await self._write(key, value, expected_last, fence, mark)

    async def delete(
        self, key: str, *, expected_last: int, fence: int = 0, mark: Mark | None = None
    ) -> int:
        return await self._write(key, None, expected_last, fence, mark)

    async def watch(self) -> AsyncIterator[Entry]:
        stream = self._stream()
        changed = asyncio.Event()
        stream.watchers.append(changed.set)
        try:
            place = 0
            begun_at = stream.last
            while True:
                changed.clear()
                for entry in [one for one in stream.entries.values() if one.sequence > place]:
                    place = entry.sequence
                    if entry.value is not None or entry.sequence > begun_at:
                        yield entry
                if not changed.is_set():
                    await changed.wait()
        finally:
            stream.watchers.remove(changed.set)

    async def _write(
        self, key: str, value: bytes | None, expected_last: int, fence: int, mark: Mark | None
    ) -> int:
        """Apply the write within the call, in the order of calls; answer later."""
        stream = self._stream()
        fate: Fate = "good"
        delay_s = 0.0
        faults = self._storage.faults
        if faults is not None and not faults.reaches(self._client):
            fate = "lost"
        elif faults is not None:
            fate, delay_s = faults.fate(self._client, self._name, key)
        refusal: SequenceConflict | None = None
        last = 0
        if fate != "lost":
            if stream.last != expected_last or (fence and stream.sequence_of(EPOCH_KEY) != fence):
                refusal = SequenceConflict(self._name, expected_last, stream.last)
            else:
                last = stream.write(key, value, mark)
        if fate != "good":
            await asyncio.sleep(limits.STORE_TIMEOUT_S)
            raise DeadlineExceeded(
                f"bucket {self._name}, key {key}: no acknowledgement within "
                f"{limits.STORE_TIMEOUT_S:g} s; read the key and the last sequence back: it may "
                "have been written",
                limits.RETRY_WAIT_S_MIN,
            )
        await asyncio.sleep(delay_s)
        if refusal is not None:
            raise refusal
        return last

    def _stream(self) -> _Stream:
        return self._storage.stream(self._name)


class MemoryLease:
    def __init__(
        self,
        storage: MemoryStorage,
        client: str,
        bucket: str,
        key: str,
        owner: str,
        ttl_s: float,
    ) -> None:
        self._storage = storage
        self._client = client
        self._bucket = bucket
        self._key = key
        self._owner = owner
        self._ttl_s = ttl_s

    @property
    def owner(self) -> str:
        return self._owner

    async def take(self, over: Over | None) -> bool:
        found = (await self._reached()).live(self._key)
        held = None if found is None else found.value
        if held is not None and not may_take(held, self._owner, over):
            return False
        return self._write()

    async def renew(self) -> bool:
        found = (await self._reached()).live(self._key)
        return found is not None and self._is_ours(found) and self._write()

    def _write(self) -> bool:
        stream = self._storage.stream(self._bucket)
        stream.write(self._key, lease_value(self._owner))
        stream.expires_s[self._key] = self._storage.clock.now_s() + self._ttl_s
        return True

    async def release(self) -> None:
        stream = await self._reached()
        found = stream.live(self._key)
        if found is not None and self._is_ours(found):
            del stream.expires_s[self._key]
            stream.write(self._key, None)

    async def _reached(self) -> _Stream:
        return await self._storage.reached(self._client, self._bucket)

    def _is_ours(self, found: Entry) -> bool:
        return found.value is not None and lease_owner(found.value) == self._owner
