"""The begin of an instance's life: its epoch, and its records as the last instance left them.

The first write into each own bucket is the epoch record, one higher than the one found: from then
on nobody else can write there (see persister.py), so what was read before it is the whole truth. A
service without buckets has its epoch under its name in the shared bucket `instances`.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from slackwater.common import codec, limits
from slackwater.common.clock import Clock
from slackwater.common.errors import DecodeRejected, Unavailable
from slackwater.common.store.base import EPOCH_KEY, Bucket, Entry, SequenceConflict, Store
from slackwater.schemas.base import Record
from slackwater.schemas.service import EpochRecord

INSTANCES = "instances"
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Recovery:
    """`fences`: the sequence of this instance's epoch record in each bucket."""

    epoch: int
    records: dict[str, dict[str, Record]]
    buckets: dict[str, Bucket]
    fences: dict[str, int]


async def recover(
    store: Store,
    name: str,
    writer: str,
    kinds: Mapping[str, type[Record]],
    clock: Clock,
    rng: random.Random,
) -> Recovery:
    """Take the buckets over for `name`. Raises DecodeRejected, and has written nothing, where a
    record is damaged; Unavailable when others keep taking them too."""
    opened = {bucket: await store.bucket(bucket) for bucket in kinds or (INSTANCES,)}
    key = EPOCH_KEY if kinds else name.replace(".", "_")
    for _ in range(limits.EPOCH_ATTEMPTS_MAX):
        loaded = {bucket: await opened[bucket].load() for bucket in opened}
        records = {bucket: _decode(bucket, kinds[bucket], loaded[bucket][0]) for bucket in kinds}
        found = [_epoch(bucket, entries.get(key)) for bucket, (entries, _) in loaded.items()]
        mine = EpochRecord(
            epoch=max(found) + 1,
            writer=writer,
            since_s=clock.now_s(),
        )
        value = codec.encode_record(mine, mine.epoch)
        try:
            fences = {
                bucket: await opened[bucket].put(key, value, expected_last=last)
                for bucket, (_, last) in loaded.items()
            }
        except SequenceConflict:
            await clock.sleep_until(clock.now_s() + rng.uniform(0.0, 0.05))
            continue
        return Recovery(mine.epoch, records, opened, fences)
    raise Unavailable(
        f"{name}: other instances keep taking its buckets ({', '.join(opened)}); is it started "
        "twice under one id?"
    )


def _epoch(bucket: str, entry: Entry | None) -> int:
    if entry is None or entry.value is None:
        return 0
    where = f"{bucket}/{entry.key}"
    return codec.decode_record(entry.value, EpochRecord, where)[0].epoch


def _decode(bucket: str, kind: type[Record], entries: Mapping[str, Entry]) -> dict[str, Record]:
    records: dict[str, Record] = {}
    damaged: list[str] = []
    for key, entry in entries.items():
        if entry.value is None or key == EPOCH_KEY:
            continue
        try:
            records[key] = codec.decode_record(entry.value, kind, f"{bucket}/{key}")[0]
        except DecodeRejected as error:
            _log.error("record.damaged", bucket=bucket, key=key, reason=str(error))
            damaged.append(str(error))
    if damaged:
        raise DecodeRejected(
            f"bucket {bucket}: {len(damaged)} of {len(entries)} records cannot be read "
            f"({damaged[0]}); restore the bucket, or give them up with "
            f"`nats kv del {bucket} KEY`, and start again"
        )
    return records
