"""A bucket's stream made anew of the records that can be read.

A bus server may take a record into a damaged file, acknowledge it, and not have it. So a bucket
that is accepted with records missing gets new files. Its records are in a second bucket meanwhile:
an attempt that was cut short is ended by the next.
"""

from typing import Final

from slackwater.common.bus.nats import NatsBus
from slackwater.common.store.base import Bucket
from slackwater.common.store.jetstream import StreamInfo, ask, make_stream
from slackwater.common.store.nats import NatsStore
from slackwater.common.store.snapshots import remove, streams

_WHOLE: Final = "_whole"
"""A key of the second bucket: all records are there."""


async def rebuild(bus: NatsBus, name: str) -> None:
    """Make the stream anew. No service may write the bucket. Raises Retryable, Rejected."""
    stream, second = f"KV_{name}", f"rescued_{name}"
    there = await streams(bus)
    if stream not in there and f"KV_{second}" not in there:
        return
    store = NatsStore(bus)
    rescued = await store.bucket(second)
    if await rescued.get(_WHOLE) is None:
        records = await _read(await store.bucket(name))
        await _write(rescued, {**records, _WHOLE: b""})
    records = await _read(rescued)
    if stream in there:
        info = await ask(bus, f"STREAM.INFO.{stream}", None, StreamInfo)
        await remove(bus, stream)
        await make_stream(bus, info.config)
    await _write(await store.bucket(name, anew=True), records)
    await remove(bus, f"KV_{second}")


async def _read(bucket: Bucket) -> dict[str, bytes]:
    loaded = await bucket.load()
    return {
        key: entry.value
        for key, entry in loaded.entries.items()
        if entry.value is not None and key != _WHOLE
    }


async def _write(bucket: Bucket, records: dict[str, bytes]) -> None:
    last = await bucket.last_sequence()
    for key, value in records.items():
        last = await bucket.put(key, value, expected_last=last)
