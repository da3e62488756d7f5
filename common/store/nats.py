"""Durable records in JetStream key-value buckets, readable by `nats kv get`.

A bucket is the stream `KV_<bucket>` with one message per key. Every write carries the stream's
expected last sequence, not the key's: a deposed writer's next write fails whatever key it writes
(ADR 1). Writes are pipelined: the connection keeps their order, so that many may be
in flight with consecutive expectations while each waits for its own acknowledgement.

Leases live in a bucket of their own, because a key that expires puts a marker into its stream and
so moves the sequence. Deleted keys of ordinary buckets leave a tombstone that expires without one.
"""

import asyncio
import base64
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg

from slackwater.common.base import limits
from slackwater.common.base.errors import (
    DeadlineExceeded,
    Rejected,
)
from slackwater.common.bus.nats import NatsBus
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
from slackwater.common.store.jetstream import (
    EXPECTED_LAST,
    NEVER,
    NO_MESSAGE,
    ApiError,
    PubAck,
    StreamInfo,
    ask,
    make_stream,
    mapped,
    parse,
    sequence_in,
)
from slackwater.common.store.pull import StreamReader
from slackwater.common.store.witness import Mark

_OPERATION: Final = "KV-Operation"
_EXPECTED_LAST_OF_KEY: Final = "Nats-Expected-Last-Subject-Sequence"
_THAT_KEY: Final = "Nats-Expected-Last-Subject-Sequence-Subject"
_TTL: Final = "Nats-TTL"
_MARK: Final = "Sw-Mark"

_HEADER_BYTES_MAX: Final = 4096  # The server counts headers in a message's size.
_WRONG_LAST_SEQUENCE: Final = (10071, 10164)


class _Stored(msgspec.Struct):
    seq: int
    hdrs: str = ""
    data: str = ""


class _MessageFound(msgspec.Struct):
    message: _Stored | None = None
    error: ApiError | None = None


class NatsStore:
    """Buckets on the server of `bus`; in a cluster, on `replicas` of its servers."""

    def __init__(self, bus: NatsBus, *, replicas: int = 1) -> None:
        self._bus = bus
        self.replicas = replicas
        self._buckets: dict[str, NatsBucket] = {}
        self._lease_buckets: set[str] = set()

    async def bucket(self, name: str, *, anew: bool = False) -> Bucket:
        found = None if anew else self._buckets.get(name)
        if found is None:
            await self._make(name, {"allow_msg_ttl": True})
            found = self._buckets[name] = NatsBucket(self._bus, name)
        return found

    async def lease(
        self, bucket: str, key: str, owner: str, ttl_s: float, over: Over | None = None
    ) -> "Lease | None":
        if ttl_s < limits.LEASE_TTL_S_MIN:
            raise Rejected(
                f"lease {key}: a time to live of {ttl_s:g} s is under the server's least of "
                f"{limits.LEASE_TTL_S_MIN:g} s"
            )
        if bucket not in self._lease_buckets:
            marker_ns = int(limits.LEASE_S * 1e9)
            await self._make(
                bucket, {"allow_msg_ttl": True, "subject_delete_marker_ttl": marker_ns}
            )
            self._lease_buckets.add(bucket)
        lease = NatsLease(self._bus, bucket, key, owner, ttl_s)
        return lease if await lease.take(over) else None

    async def _make(self, name: str, options: dict[str, Any]) -> None:
        config = {
            "name": f"KV_{name}",
            "subjects": [f"$KV.{name}.>"],
            "max_msgs_per_subject": 1,
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            "num_replicas": self.replicas,
            "max_msg_size": limits.RECORD_BYTES_MAX + _HEADER_BYTES_MAX,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_direct": True,
            "max_bytes": -1,
            "max_msgs": -1,
            "max_consumers": -1,
            **options,
        }
        await make_stream(self._bus, config)


class NatsBucket:
    def __init__(self, bus: NatsBus, name: str) -> None:
        self._bus = bus
        self._name = name
        self._in_flight = asyncio.Semaphore(limits.STORE_IN_FLIGHT_MAX)

    @property
    def name(self) -> str:
        return self._name

    async def load(self) -> Loaded:
        """Reads until the last message read is the bucket's last.

        At that moment every key's value has been read, and none was overwritten since. The last
        message may be missing (a tombstone that expired); then the stream itself must say that it
        has nothing more: a reader that is told "nothing waits" may only not have been told yet.
        """
        entries: dict[str, Entry] = {}
        mark: Mark | None = None
        reader = StreamReader(self._bus, f"KV_{self._name}")
        try:
            async with asyncio.timeout(limits.RETRY_BUDGET_S):
                while True:
                    read_to = reader.place
                    async with aclosing(reader.waiting()) as messages:
                        async for message in messages:
                            entry = self._entry(message)
                            entries.pop(entry.key, None)  # Kept in the order of the sequence.
                            entries[entry.key] = entry
                            mark = Mark.parsed((message.headers or {}).get(_MARK, "")) or mark
                    last = await self.last_sequence()
                    idle = read_to == reader.place
                    if last == reader.place or (idle and not await self._has_after(reader.place)):
                        live = {key: one for key, one in entries.items() if one.value is not None}
                        return Loaded(live, last, mark)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"bucket {self._name}: it did not come to rest within {limits.RETRY_BUDGET_S:g} s"
            ) from error
        finally:
            await reader.close()

    async def get(self, key: str) -> Entry | None:
        found = await _get(self._bus, self._name, key)
        return None if found is None or found.value is None else found

    async def last_sequence(self) -> int:
        """Asked by a write that cannot succeed, so that the answer comes in the writes' order.

        A question to the server's API may overtake a write that is still on its way to the disk.
        After this answer every write that this connection sent before is applied or refused, and
        `get` tells the truth about it.
        """
        where = f"bucket {self._name}"
        headers = {EXPECTED_LAST: str(NEVER)}
        ack = await _publish(self._bus, f"$KV.{self._name}.{EPOCH_KEY}", b"", headers, where)
        assert ack.error is not None, "a write was taken that expected an impossible sequence"
        if ack.error.err_code not in _WRONG_LAST_SEQUENCE:
            raise mapped(where, ack.error)
        last = sequence_in(ack.error.description)
        if last is not None:
            return last
        info = await ask(self._bus, f"STREAM.INFO.KV_{self._name}", None, StreamInfo)
        if info.error is not None:
            raise mapped(where, info.error)
        return info.last_seq

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
        return await self._write(key, value, expected_last, fence, _marked(mark))

    async def delete(
        self, key: str, *, expected_last: int, fence: int = 0, mark: Mark | None = None
    ) -> int:
        headers = {_OPERATION: "DEL", _TTL: f"{limits.TOMBSTONE_S}s"}
        return await self._write(key, b"", expected_last, fence, headers | _marked(mark))

    async def watch(self) -> AsyncIterator[Entry]:
        begun_at = await self.last_sequence()
        reader = StreamReader(self._bus, f"KV_{self._name}")
        try:
            async with aclosing(reader.follow()) as messages:
                async for message in messages:
                    entry = self._entry(message)
                    if entry.value is not None or entry.sequence > begun_at:
                        yield entry
        finally:
            await reader.close()

    async def _write(
        self, key: str, value: bytes, expected_last: int, fence: int, headers: dict[str, str]
    ) -> int:
        headers[EXPECTED_LAST] = str(expected_last)
        if fence:
            headers[_EXPECTED_LAST_OF_KEY] = str(fence)
            headers[_THAT_KEY] = f"$KV.{self._name}.{EPOCH_KEY}"
        where = f"bucket {self._name}, key {key}"
        async with self._in_flight:  # First come, first served: the order of the calls is kept.
            ack = await _publish(self._bus, f"$KV.{self._name}.{key}", value, headers, where)
        if ack.error is None:
            return ack.seq
        if ack.error.err_code in _WRONG_LAST_SEQUENCE:
            # With a fence the number in the text may be the epoch record's: ask.
            last = None if fence else sequence_in(ack.error.description)
            if last is None:
                last = await self.last_sequence()
            raise SequenceConflict(self._name, expected_last, last)
        raise mapped(where, ack.error)

    async def _has_after(self, sequence: int) -> bool:
        question = {"seq": sequence + 1, "next_by_subj": f"$KV.{self._name}.>"}
        verb = f"STREAM.MSG.GET.KV_{self._name}"
        answer = await ask(self._bus, verb, question, _MessageFound)
        if answer.error is not None and answer.error.err_code != NO_MESSAGE:
            raise mapped(f"bucket {self._name}", answer.error)
        return answer.error is None

    def _entry(self, message: Msg) -> Entry:
        key = message.subject.removeprefix(f"$KV.{self._name}.")
        value = None if _is_deletion(message.headers) else message.data
        return Entry(key, value, message.metadata.sequence.stream)


class NatsLease:
    """A key whose value names its owner: `nats kv get BUCKET KEY` says who leads."""

    def __init__(self, bus: NatsBus, bucket: str, key: str, owner: str, ttl_s: float) -> None:
        self._bus = bus
        self._bucket = bucket
        self._key = key
        self._owner = owner
        self._value = lease_value(owner)
        self._ttl = f"{math.ceil(ttl_s)}s"  # The server counts whole seconds.
        self._sequence = 0

    @property
    def owner(self) -> str:
        return self._owner

    async def take(self, over: Over | None) -> bool:
        """Take the lease, if this owner may. True: it is ours."""
        found = await _get(self._bus, self._bucket, self._key)
        held = None if found is None else found.value
        if held is not None and not may_take(held, self._owner, over):
            return False
        self._sequence = 0 if found is None else found.sequence
        return await self._write(self._value, {_TTL: self._ttl})

    async def renew(self) -> bool:
        if await self._write(self._value, {_TTL: self._ttl}):
            return True
        # The sequence moved. It may have been a write of ours whose acknowledgement was lost.
        return await self._still_ours() and await self._write(self._value, {_TTL: self._ttl})

    async def release(self) -> None:
        headers = {_OPERATION: "DEL", _TTL: self._ttl}
        if not await self._write(b"", headers) and await self._still_ours():
            await self._write(b"", headers)

    def _is_ours(self, value: bytes) -> bool:
        return lease_owner(value) == self._owner

    async def _still_ours(self) -> bool:
        found = await _get(self._bus, self._bucket, self._key)
        if found is None or found.value is None or not self._is_ours(found.value):
            return False
        self._sequence = found.sequence
        return True

    async def _write(self, value: bytes, headers: dict[str, str]) -> bool:
        headers = headers | {_EXPECTED_LAST_OF_KEY: str(self._sequence)}
        where = f"lease {self._bucket}/{self._key}"
        ack = await _publish(self._bus, f"$KV.{self._bucket}.{self._key}", value, headers, where)
        if ack.error is None:
            self._sequence = ack.seq
            return True
        if ack.error.err_code in _WRONG_LAST_SEQUENCE:
            return False
        raise mapped(where, ack.error)


async def _get(bus: NatsBus, bucket: str, key: str) -> Entry | None:
    """Asked of the stream's leader, never of a replica: after a timeout this tells the truth."""
    subject = f"$KV.{bucket}.{key}"
    question = {"last_by_subj": subject}
    answer = await ask(bus, f"STREAM.MSG.GET.KV_{bucket}", question, _MessageFound)
    if answer.error is not None:
        if answer.error.err_code == NO_MESSAGE:
            return None
        raise mapped(f"bucket {bucket}, key {key}", answer.error)
    assert answer.message is not None, "the server answered without a message or an error"
    headers = base64.b64decode(answer.message.hdrs).decode("utf-8", "replace")
    deleted = _is_deletion(_parsed(headers))
    value = None if deleted else base64.b64decode(answer.message.data)
    return Entry(key, value, answer.message.seq)


async def _publish(
    bus: NatsBus, subject: str, value: bytes, headers: dict[str, str], where: str
) -> PubAck:
    try:
        answer = await bus.call(subject, value, timeout_s=limits.STORE_TIMEOUT_S, headers=headers)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"{where}: no acknowledgement within {limits.STORE_TIMEOUT_S:g} s; read the key and "
            "the last sequence back: it may have been written",
            error.retry_after_s,
        ) from error
    return parse(answer.data, PubAck, where)


def _marked(mark: Mark | None) -> dict[str, str]:
    return {} if mark is None else {_MARK: mark.text()}


def _is_deletion(headers: dict[str, str] | None) -> bool:
    """Say whether it is a DEL or PURGE, or the server's marker of an expiry."""
    return headers is not None and (_OPERATION in headers or "Nats-Marker-Reason" in headers)


def _parsed(headers: str) -> dict[str, str]:
    lines = (line.partition(":") for line in headers.split("\r\n")[1:])
    return {name.strip(): value.strip() for name, _, value in lines if name}
