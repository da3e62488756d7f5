"""All that is known of an instance's buckets beside what they hold, and what follows from it.

Before they are taken over they are compared with the witness in their marks, with the instance's
own file and with what peers remember. What a store loses under an instance that lives is written
back from its memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from slackwater.common.base import codec
from slackwater.common.base.clock import Clock
from slackwater.common.base.errors import Deposed, RecordsMissing
from slackwater.common.store.accepted import is_accepted
from slackwater.common.store.base import EPOCH_KEY, Entry, Loaded, Store
from slackwater.common.store.witness import Content, Found, Mark, Told, compared, listed
from slackwater.common.store.witness_file import Witnesses
from slackwater.schemas.service import EpochRecord

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Known:
    """Bucket -> what the instance's own file says, and what its peers remember."""

    told: Mapping[str, Told] = field(default_factory=dict)
    peers: Mapping[str, Sequence[Mark]] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """Return the highest epoch that anybody knows of; 0: none."""
        marks = [each.mark for each in self.told.values() if each.mark is not None]
        marks += [mark for each in self.peers.values() for mark in each]
        return max((mark.epoch for mark in marks), default=0)

    async def compare(
        self,
        store: Store,
        loaded: Mapping[str, Loaded],
        contents: Mapping[str, Mapping[str, bytes]],
        damaged: Mapping[str, frozenset[str]],
    ) -> None:
        """Raises RecordsMissing, with all that is missing and was not accepted."""
        missing: dict[str, str] = {}
        for bucket, records in contents.items():
            each = loaded[bucket]
            found = Found(
                epoch_of(bucket, each.entries.get(EPOCH_KEY)),
                each.last,
                Content(records),
                each.mark,
                damaged.get(bucket, frozenset()),
            )
            verdict = compared(found, self.told.get(bucket, Told()), self.peers.get(bucket, ()))
            if verdict.note:
                _log.warning("bucket.unchecked", bucket=bucket, reason=verdict.note)
            if verdict.missing and await is_accepted(store, bucket, found):
                _log.warning("bucket.accepted", bucket=bucket, reason=verdict.missing)
            elif verdict.missing:
                missing[bucket] = verdict.missing
        if missing:
            named = "; ".join(f"bucket {bucket}: {why}" for bucket, why in missing.items())
            raise RecordsMissing(
                f"the bus has lost records: {named}. Restore a backup (`slackwater bus restore`), "
                f"or go on without them: `slackwater bus accept {' '.join(missing)}`"
            )


async def read_files(witnesses: Witnesses, buckets: Sequence[str]) -> dict[str, Told]:
    """Read what the instance's own files say of its buckets."""
    found = dict[str, Told]()
    for bucket in buckets:
        witness = witnesses.of(bucket)
        if witness is None:
            continue
        try:
            found[bucket] = await witness.read()
        except OSError as error:
            _log.error("witness.not-read", bucket=bucket, reason=str(error))
            continue
        if found[bucket].damaged:
            _log.warning("witness.damaged", bucket=bucket, lines=found[bucket].damaged)
    return found


def epoch_of(bucket: str, entry: Entry | None) -> int:
    """Return the epoch that a bucket's epoch record says; 0: there is none. Raises
    DecodeRejected."""
    record = _epoch_record(bucket, entry)
    return 0 if record is None else record.epoch


def _epoch_record(bucket: str, entry: Entry | None) -> EpochRecord | None:
    if entry is None or entry.value is None:
        return None
    return codec.decode_record(entry.value, EpochRecord, f"{bucket}/{entry.key}")[0]


async def write_back(
    store: Store,
    writer: str,
    epoch: int,
    fences: Mapping[str, int],
    clock: Clock,
    witnesses: Witnesses,
    contents: Mapping[str, Mapping[str, bytes]],
) -> int:
    """Write into each bucket what the store has lost of `contents`, which an instance of `epoch`
    knows, under an epoch one higher: the next start finds all. `writer` names that instance, as no
    other is; `fences`: the sequences of its epoch records. Returns the number of records.

    Raises:
        Deposed: another instance has taken the bucket over.
        RecordsMissing: the server acknowledges records and does not keep them.
        SequenceConflict: another instance takes the bucket over now.
        Retryable: the store does not answer.
    """
    count = 0
    for bucket, wanted in contents.items():
        ours = epoch, fences[bucket]
        lost, mark = await _write_back(store, writer, ours, clock, bucket, wanted)
        count += len(lost)
        if (witness := witnesses.of(bucket)) is not None:
            try:
                await witness.begin(Content(wanted).hexed(), mark)
            except OSError as error:  # It is behind then, and the records are there.
                _log.error("witness.not-written", bucket=bucket, reason=str(error))
        there = (await (await store.bucket(bucket)).load()).records
        if left := [key for key, value in wanted.items() if there.get(key) != value]:
            raise RecordsMissing(
                f"bucket {bucket}: the bus server acknowledges records and does not keep them "
                f"({listed(left)}): its files are damaged"
            )
    return count


async def _write_back(
    store: Store,
    writer: str,
    ours: tuple[int, int],
    clock: Clock,
    bucket_name: str,
    wanted: Mapping[str, bytes],
) -> tuple[Sequence[str], Mark]:
    """Return the keys that were written back, and the mark of the last write. `ours`: the epoch,
    and the sequence of its record."""
    bucket = await store.bucket(bucket_name, anew=True)
    loaded = await bucket.load()
    entry, (epoch, _) = loaded.entries.get(EPOCH_KEY), ours
    stored, mine = loaded.records, epoch + 1
    told = EpochRecord(epoch=mine, writer=f"{writer}, writing back"[:256], since_s=clock.now_s())
    found = _epoch_record(bucket_name, entry)
    if found is not None and found.epoch >= epoch and entry is not None:
        begun = (found.epoch, found.writer) == (mine, told.writer)  # By an attempt before.
        if not begun and (found.epoch, entry.sequence) != ours:
            raise Deposed(f"bucket {bucket_name}: another instance has taken it over")
    content = Content(stored)
    mark = content.mark(mine, loaded.last + 1)
    fence = last = await bucket.put(
        EPOCH_KEY, codec.encode_record(told, mine), expected_last=loaded.last, mark=mark
    )
    lost = {key: value for key, value in wanted.items() if stored.get(key) != value}
    for key, value in lost.items():
        content.write(key, value)
        mark = content.mark(mine, last + 1)
        last = await bucket.put(key, value, expected_last=last, fence=fence, mark=mark)
    for key in stored.keys() - wanted.keys():
        content.write(key, None)
        mark = content.mark(mine, last + 1)
        last = await bucket.delete(key, expected_last=last, fence=fence, mark=mark)
    return tuple(lost), mark
