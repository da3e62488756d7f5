"""An operator's word that a bucket is to be used as it is, though records are missing."""

from typing import Final

from slackwater.common.base import codec
from slackwater.common.base.errors import DecodeRejected, Rejected
from slackwater.common.store.base import SequenceConflict, Store
from slackwater.common.store.witness import Content, Found
from slackwater.schemas.service import AcceptedRecord

BUCKET: Final = "accepted"
_ATTEMPTS_MAX: Final = 5


async def is_accepted(store: Store, bucket: str, found: Found) -> bool:
    """Say whether an operator accepted the bucket in this very state. Raises Retryable."""
    kept = await (await store.bucket(BUCKET)).get(bucket)
    if kept is None or kept.value is None:
        return False
    try:
        record, _ = codec.decode_record(kept.value, AcceptedRecord, f"{BUCKET}/{bucket}")
    except DecodeRejected:
        return False
    there = found.last, len(found.content), found.content.digest
    return there == (record.last, record.count, record.digest)


async def accept(store: Store, bucket: str, by: str, at_s: float) -> AcceptedRecord:
    """Accept a bucket as it is at this moment; its service must not run. Return what it holds.
    Raises Retryable, Rejected."""
    loaded = await (await store.bucket(bucket)).load()
    content = Content(loaded.records)
    record = AcceptedRecord(
        last=loaded.last, count=len(content), digest=content.digest, by=by, at_s=at_s
    )
    kept = await store.bucket(BUCKET)
    for _ in range(_ATTEMPTS_MAX):
        try:
            value = codec.encode_record(record, 0)
            await kept.put(bucket, value, expected_last=await kept.last_sequence())
        except SequenceConflict:
            continue  # Another operator accepts another bucket.
        return record
    raise Rejected(f"bucket {BUCKET}: others keep writing it; try again")
