"""Migrations (AutoPS section 3.2, appendix B): begun, followed, finished, whoever dies meanwhile.

The record says where each bucket is and where it goes before MIGRATE_INIT is sent. TENSOR_COPY_DONE
and WORKER_DONE tell of progress; since the bus may lose them, who holds what is also asked
periodically. A migration ends when every bucket was copied and every worker pushed to its new
place, or stopped pushing for good. Then the new places are the record's.
"""

from typing import Literal

import msgspec

from slackwater.common.base.effects import Publish
from slackwater.schemas import subjects
from slackwater.schemas.base import AggregatorId, Message, Refused
from slackwater.schemas.placement import (
    BucketPlace,
    ListBuckets,
    MigrateInit,
    MigrationEvent,
    TensorCopyDone,
    WorkerDone,
)
from slackwater.services.controller.hosting import settle
from slackwater.services.controller.keys import HeldAsked, MigrateAsked
from slackwater.services.controller.state import Job, State, numbered

MigrationCause = Literal[
    "profiled",
    "reverted",
    "expanded",
    "protected",
    "recycled",
    "interfered",
    "drained",
    "unprofiled",
]


def begin(
    state: State, job: Job, homes: list[AggregatorId], cause: MigrationCause, now_s: float
) -> None:
    """Move every bucket to its home of `homes`; at least one is elsewhere."""
    assert not job.moving
    places = job.record.places
    target = tuple(
        place
        if place.aggregator == home
        else BucketPlace(aggregator=home, location_epoch=place.location_epoch + 1)
        for place, home in zip(places, homes, strict=True)
    )
    state.change(
        job,
        phase="moving",
        target=target,
        migration=numbered(job.id, "m", job.record.moves + 1, job.record.run),
        moves=job.record.moves + 1,
        cause=cause,
        reason="",
        assigned_s=now_s,
    )
    _reset(job, now_s)
    settle(state, job, now_s)
    _tell(state, job, "started", now_s)
    pursue(state, job, now_s)


def _reset(job: Job, now_s: float) -> None:
    job.copied.clear()
    job.worker_done.clear()
    job.initiated.clear()
    job.stranded.clear()
    job.missing_s.clear()
    job.copied_all_s = 0.0
    job.synced_s = now_s


def pursue(state: State, job: Job, now_s: float) -> None:
    """Order what is not begun, ask who holds what when it takes long, finish when it is done."""
    if not job.moving or job.record.phase == "released":
        return
    record = job.record
    moved = job.moved()
    open_buckets = [bucket for bucket in moved if bucket not in job.copied]
    if not open_buckets:
        job.copied_all_s = job.copied_all_s or now_s
        late = now_s - job.copied_all_s >= state.config.worker_done_s
        if late or all(bucket in job.worker_done for bucket in moved):
            finish(state, job, now_s)
        return
    batches: dict[tuple[AggregatorId, AggregatorId], list[int]] = {}
    for bucket in open_buckets:
        pair = (record.places[bucket].aggregator, record.target[bucket].aggregator)
        batches.setdefault(pair, []).append(bucket)
    for (source, target), buckets in sorted(batches.items()):
        ready = state.alive(source) and state.alive(target)
        if (source, target) in job.initiated or not ready:
            continue
        message = MigrateInit(
            cluster=state.cluster,
            migration=record.migration,
            job=job.id,
            buckets=tuple(buckets),
            epochs=tuple(record.target[bucket].location_epoch for bucket in buckets),
            to=state.aggregators[target].endpoint(),
        )
        key = MigrateAsked(job.id, source, target)
        state.ask_aggregator(key, "migrate", source, message, now_s)
    if now_s - job.synced_s >= state.config.migration_s:
        sync(state, job, now_s)


def sync(state: State, job: Job, now_s: float) -> None:
    """Ask the old aggregators what they hold; the answers lead to the new ones (reconcile.py)."""
    job.synced_s = now_s
    for bucket in job.moved():
        if bucket in job.copied:
            continue
        for place in (job.record.places[bucket], job.record.target[bucket]):
            ask_held(state, place.aggregator, now_s)


def ask_held(state: State, aggregator: AggregatorId, now_s: float) -> None:
    if state.alive(aggregator):
        key = HeldAsked(aggregator)
        state.ask_aggregator(key, "held", aggregator, ListBuckets(), now_s)


def initiated(
    state: State, job: Job, pair: tuple[AggregatorId, AggregatorId], answer: Message, now_s: float
) -> None:
    if not job.moving:
        return
    if isinstance(answer, Refused):
        state.log("migrate.refused", "warning", job=job.id, at=pair[0], reason=answer.reason)
        sync(state, job, now_s)
        return
    job.initiated.add(pair)
    pursue(state, job, now_s)


def copied(state: State, job: Job, fact: TensorCopyDone, now_s: float) -> None:
    _progress(state, job, fact.bucket, fact.location_epoch, job.copied, now_s)


def worker_done(state: State, job: Job, fact: WorkerDone, now_s: float) -> None:
    """All workers pushed to the new aggregator: the bucket is there, whoever else said so."""
    if job.moving and fact.bucket < len(job.record.target):
        target = job.record.target[fact.bucket]
        if target.location_epoch == fact.location_epoch and fact.bucket in job.moved():
            job.copied.add(fact.bucket)
    _progress(state, job, fact.bucket, fact.location_epoch, job.worker_done, now_s)


def arrived(state: State, job: Job, bucket: int, now_s: float) -> None:
    """The new aggregator says that it holds the bucket."""
    _progress(state, job, bucket, job.target(bucket).location_epoch, job.copied, now_s)


def _progress(
    state: State, job: Job, bucket: int, location_epoch: int, done: set[int], now_s: float
) -> None:
    if not job.moving or bucket >= len(job.record.target) or bucket in done:
        return  # Belongs to an earlier migration, or is repeated.
    if job.record.target[bucket].location_epoch != location_epoch:
        return
    done.add(bucket)
    job.stranded.discard(bucket)
    job.missing_s.pop(bucket, None)
    pursue(state, job, now_s)


def finish(state: State, job: Job, now_s: float) -> None:
    record = job.record
    profiling = state.adapts(job) and record.profile is None
    _tell(state, job, "finished", now_s)
    settle(state, job, now_s)  # The old homes too.
    state.change(
        job,
        phase="profiling" if profiling else "steady",
        places=record.target,
        target=(),
        migration="",
        temporary=(),
    )
    _reset(job, now_s)
    state.moved = True
    if not profiling:
        state.tell(job, "steady", now_s, aggregators=",".join(sorted(job.homes())))


def abandon(state: State, job: Job, places: tuple[BucketPlace, ...], now_s: float) -> None:
    """End the job's moves after an aggregator's loss: copied buckets stay, the rest goes to
    `places`."""
    _tell(state, job, "cancelled", now_s)
    settle(state, job, now_s)
    state.change(job, phase="hosting", places=places, target=(), migration="")
    _reset(job, now_s)


def retarget(state: State, job: Job, bucket: int, place: BucketPlace) -> None:
    """A bucket that was lost on its way begins anew at `place`; the others go on."""
    record = job.record
    places, target = list(record.places), list(record.target)
    places[bucket] = place
    if target:
        target[bucket] = place
    job.copied.discard(bucket)
    job.worker_done.discard(bucket)
    job.stranded.discard(bucket)
    job.missing_s.pop(bucket, None)
    job.record = msgspec.structs.replace(record, places=tuple(places), target=tuple(target))


def _tell(
    state: State, job: Job, fact: Literal["started", "finished", "cancelled"], now_s: float
) -> None:
    record = job.record
    moved = job.moved()
    event = MigrationEvent(
        migration=record.migration,
        job=job.id,
        fact=fact,
        cause=record.cause or "asked",  # type: ignore[arg-type]  # written by `begin` alone
        buckets=tuple(moved),
        sources=tuple(sorted({record.places[b].aggregator for b in moved})),
        targets=tuple(sorted({record.target[b].aggregator for b in moved})),
        at_s=now_s,
    )
    state.out.append(Publish(subjects.event("migration", record.migration, fact), event))
