"""The begin of an instance's life: its epoch, and its records as the last instance left them.

The first write into each own bucket is the epoch record, one higher than the one found: from then
on nobody else can write there (see persister.py), so what was read before it is the whole truth. A
service without buckets has its epoch under its name in the shared bucket `instances`.

What is read is compared with all that is known of it (common/store/witness.py): the marks in the
bucket, the file of this instance, what peers remember. Where records are missing the service does
not start: it names them, and goes on without them only once an operator has accepted that
(`slackwater bus accept`). A bucket that is rolled back under a writer that lives is written back
from its memory.

A record that cannot be read is set aside: its bytes go to the shared bucket `damaged`, and stay
where they are as well, so that every start finds them and says so until a person has restored or
deleted them. The service starts with the rest, and its core is told which keys are not free (see
Recovered). It does not start at all where records are a newer release's, where its epoch cannot be
read, where so many are damaged that the bucket is not what it should be, or where they are one
whole.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from slackwater.common.base import codec, limits
from slackwater.common.base.clock import Clock
from slackwater.common.base.errors import (
    DecodeRejected,
    Rejected,
    Unavailable,
    VersionRejected,
)
from slackwater.common.base.failpoints import failpoint
from slackwater.common.shell.known import Known, epoch_of
from slackwater.common.store.base import EPOCH_KEY, Bucket, Entry, Loaded, SequenceConflict, Store
from slackwater.common.store.witness import Content
from slackwater.schemas.base import Record
from slackwater.schemas.service import EpochRecord

INSTANCES = "instances"
DAMAGED = "damaged"
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Recovery:
    """`fences`: the sequence of this instance's epoch record in each bucket."""

    epoch: int
    records: dict[str, dict[str, Record]]
    buckets: dict[str, Bucket]
    fences: dict[str, int]
    damaged: dict[str, frozenset[str]]
    """Keys of damaged records, by bucket; buckets without such records are left out."""
    contents: dict[str, dict[str, bytes]]
    """Key -> record as it is stored, by bucket of its own."""


async def recover(
    store: Store,
    name: str,
    writer: str,
    kinds: Mapping[str, type[Record]],
    clock: Clock,
    rng: random.Random,
    known: Known,
    *,
    whole: bool = False,
) -> Recovery:
    """Take the buckets over for `name`; `known`: what is known of them beside what they hold.

    Raises:
        DecodeRejected: it must not start from what it finds (`whole`: a single damaged record is
            enough). Nothing was written.
        RecordsMissing: a bucket does not hold what a witness says. Nothing was written.
        Unavailable: others keep taking the buckets, too.
    """
    opened = {bucket: await store.bucket(bucket) for bucket in kinds or (INSTANCES,)}
    key = EPOCH_KEY if kinds else name.replace(".", "_")
    service = name.partition(".")[0]
    for _ in range(limits.EPOCH_ATTEMPTS_MAX):
        loaded = {bucket: await opened[bucket].load() for bucket in opened}
        records, damaged = await _records(store, kinds, loaded, whole)
        contents = {bucket: loaded[bucket].records for bucket in kinds}
        epochs = [epoch_of(bucket, each.entries.get(key)) for bucket, each in loaded.items()]
        await known.compare(store, loaded, contents, damaged)
        epoch = max(*epochs, known.epoch) + 1
        mine = EpochRecord(epoch=epoch, writer=writer, since_s=clock.now_s())
        value, fences = codec.encode_record(mine, epoch), dict[str, int]()
        failpoint(f"{service}.recover.mid")
        try:
            for bucket, each in loaded.items():
                own = contents.get(bucket)
                mark = None if own is None else Content(own).mark(epoch, each.last + 1)
                fences[bucket] = await opened[bucket].put(
                    key, value, expected_last=each.last, mark=mark
                )
                failpoint(f"{service}.recover.after")
        except SequenceConflict:
            await clock.sleep_until(clock.now_s() + rng.uniform(0.0, 0.05))
            continue
        return Recovery(epoch, records, opened, fences, damaged, contents)
    raise Unavailable(
        f"{name}: other instances keep taking its buckets ({', '.join(opened)}); is it started "
        "twice under one id?"
    )


async def _records(
    store: Store, kinds: Mapping[str, type[Record]], loaded: Mapping[str, Loaded], whole: bool
) -> tuple[dict[str, dict[str, Record]], dict[str, frozenset[str]]]:
    """Return the records by bucket, and the keys of those that cannot be read, which are set
    aside. Raises DecodeRejected, Retryable."""
    records: dict[str, dict[str, Record]] = {}
    damaged: dict[str, frozenset[str]] = {}
    for bucket, kind in kinds.items():
        entries = loaded[bucket].entries
        records[bucket], reasons = _decode(bucket, kind, entries)
        if reasons:
            _check_few(bucket, reasons, len(records[bucket]), whole)
            await _set_aside(store, bucket, [entries[key] for key in reasons])
            damaged[bucket] = frozenset(reasons)
    return records, damaged


async def raise_epoch(
    recovery: Recovery,
    name: str,
    epoch: int,
    clock: Clock,
    contents: Mapping[str, Mapping[str, bytes]],
) -> None:
    """Have the next start of `name` find this epoch as its last; `contents`: what its own buckets
    hold. Raises SequenceConflict where another instance has taken a bucket over, Retryable."""
    for bucket in recovery.buckets.values():
        own = bucket.name != INSTANCES
        key = EPOCH_KEY if own else name.replace(".", "_")
        told = EpochRecord(epoch=epoch, writer=f"{name}, to be higher", since_s=clock.now_s())
        last = await bucket.last_sequence()
        await bucket.put(
            key,
            codec.encode_record(told, epoch),
            expected_last=last,
            fence=recovery.fences[bucket.name] if own else 0,
            mark=Content(contents[bucket.name]).mark(epoch, last + 1) if own else None,
        )


def _decode(
    bucket: str, kind: type[Record], entries: Mapping[str, Entry]
) -> tuple[dict[str, Record], dict[str, str]]:
    """Return the records, and why others cannot be read."""
    records: dict[str, Record] = {}
    damaged: dict[str, str] = {}
    for key, entry in entries.items():
        if entry.value is None or key == EPOCH_KEY:
            continue
        try:
            records[key] = codec.decode_record(entry.value, kind, f"{bucket}/{key}")[0]
        except VersionRejected:
            raise  # It is sound, and this release too old for it.
        except DecodeRejected as error:
            damaged[key] = str(error)
    return records, damaged


def _check_few(bucket: str, damaged: Mapping[str, str], sound: int, whole: bool) -> None:
    """Log damaged records, and refuse a bucket that is mostly damaged: that is not an accident."""
    for key, reason in damaged.items():
        _log.error("record.damaged", bucket=bucket, key=key, reason=reason)
    most = max(limits.DAMAGED_FEW, limits.DAMAGED_SHARE_MAX * (sound + len(damaged)))
    if whole or len(damaged) > most:
        raise DecodeRejected(
            f"bucket {bucket}: {len(damaged)} of {sound + len(damaged)} records cannot be read "
            f"({next(iter(damaged.values()))[:120]}); restore the bucket, or give them up with "
            f"`nats kv del {bucket} KEY`, and start again"
        )


async def _set_aside(store: Store, bucket: str, entries: Sequence[Entry]) -> None:
    """Store a copy of each, which nothing will overwrite. Raises Retryable."""
    kept = await store.bucket(DAMAGED)
    for entry in entries:
        assert entry.value is not None
        key = f"{bucket}.{entry.key}.{entry.sequence}"
        for _ in range(limits.EPOCH_ATTEMPTS_MAX):
            if await kept.get(key) is not None:
                break
            try:
                await kept.put(key, entry.value, expected_last=await kept.last_sequence())
            except SequenceConflict:
                continue  # Another service sets its own aside.
            except Rejected as error:  # Larger than any record: it stays where it is.
                _log.error("record.not-copied", bucket=bucket, key=entry.key, reason=str(error))
            break
        _log.error("record.set-aside", bucket=bucket, key=entry.key, copy=f"{DAMAGED}/{key}")
