"""Reconciliation of what an aggregator holds with what the records say: the cure for every lost
message.

Asked after an aggregator's or the controller's restart, while a migration takes long, and now and
then. The highest location epoch that is held is where a bucket is; what nobody holds is lost and
begins anew at a higher epoch, seeded from the workers' parameters; what is held and should not be
is dropped. A moving bucket is lost only if its old aggregator did not hold it *before* the new one
was asked: between two answers in the other order it may have travelled.
"""

from slackwater.schemas.base import AggregatorId, JobId, Message
from slackwater.schemas.placement import BucketHeld, BucketPlace, BucketsHeld, DropJob
from slackwater.services.controller import hosting, idle_jobs, losses, migrations
from slackwater.services.controller.keys import StrayDropAsked
from slackwater.services.controller.state import Aggregator, Asked, Job, State


def compare(
    state: State, aggregator: AggregatorId, asked: Asked, answer: Message, now_s: float
) -> None:
    entry = state.aggregator(aggregator, now_s)
    if not isinstance(answer, BucketsHeld) or answer.incarnation != entry.incarnation:
        return  # It is asked again.
    first = entry.checked != entry.incarnation
    entry.checked, entry.checked_s = entry.incarnation, now_s
    if not answer.held:
        entry.empty_s = asked.at_s
    held: dict[JobId, dict[int, BucketHeld]] = {}
    for each in answer.held:
        held.setdefault(each.job, {})[each.bucket] = each
    entry.guarded = not state.unreadable.isdisjoint(held)
    for job in list(state.jobs.values()):
        if job.record.phase == "released":
            held.pop(job.id, None)  # let_go drops it.
        elif aggregator in job.involved():
            idle_jobs.compare(job, aggregator, held.get(job.id, {}).values(), now_s)
            _compare_job(state, job, entry, asked, held.pop(job.id, {}), first, now_s)
    if entry.ours and state.pool_known:
        _drop_strays(state, aggregator, held, now_s)


def _drop_strays(
    state: State, aggregator: AggregatorId, strays: dict[JobId, dict[int, BucketHeld]], now_s: float
) -> None:
    """Drop what belongs to jobs that are not here, or no longer: an older life's leftovers."""
    for id in sorted(strays.keys() - state.unreadable):
        _drop(state, id, aggregator, list(strays[id].values()), now_s)


def _drop(
    state: State, job: JobId, aggregator: AggregatorId, stale: list[BucketHeld], now_s: float
) -> None:
    if not stale:
        return
    stale.sort(key=lambda held: held.bucket)
    message = DropJob(
        job=job,
        buckets=tuple(held.bucket for held in stale),
        up_to_epochs=tuple(held.location_epoch for held in stale),
    )
    state.log("stray.dropped", "warning", job=job, at=aggregator, buckets=len(stale))
    state.ask_aggregator(StrayDropAsked(job, aggregator), "drop", aggregator, message, now_s)


def _compare_job(
    state: State,
    job: Job,
    entry: Aggregator,
    asked: Asked,
    held: dict[int, BucketHeld],
    first: bool,
    now_s: float,
) -> None:
    record = job.record
    moved = set(job.moved())
    lost: list[int] = []
    stale = [h for bucket, h in held.items() if bucket >= len(record.places)]
    if first:  # It forgot its orders, if it was restarted.
        job.initiated = {pair for pair in job.initiated if pair[0] != entry.id}
        job.stranded |= {
            bucket
            for bucket in moved & held.keys()
            if record.places[bucket].aggregator == entry.id and bucket not in job.copied
        }
    expected = record.phase != "hosting" and (
        first or job.hosted_by(entry.id, entry.incarnation, asked.at_s)
    )
    for bucket, place in enumerate(record.places):
        here = held.get(bucket)
        if bucket in moved:
            if _compare_moving(state, job, bucket, entry.id, asked, here, now_s):
                lost.append(bucket)
        elif place.aggregator == entry.id:
            if here is None and expected and job.settled_s < asked.at_s:
                lost.append(bucket)
        elif here is not None and here.location_epoch < place.location_epoch:
            stale.append(here)  # Even if it wants to move: its workers are elsewhere.
    _drop(state, job.id, entry.id, stale, now_s)
    if lost:
        _begin_anew(state, job, entry.id, lost, now_s)
    hosting.host(state, job, now_s)
    migrations.pursue(state, job, now_s)


def _compare_moving(
    state: State,
    job: Job,
    bucket: int,
    aggregator: AggregatorId,
    asked: Asked,
    here: BucketHeld | None,
    now_s: float,
) -> bool:
    """Compare a moving bucket; return True if it is lost."""
    if not job.moving:  # It finished while the others of this answer were looked at.
        return False
    old, new = job.record.places[bucket], job.record.target[bucket]
    if aggregator == new.aggregator:
        if here is not None and here.location_epoch >= new.location_epoch and not here.moving:
            migrations.arrived(state, job, bucket, now_s)
            return False
        missing_s = job.missing_s.get(bucket)
        return here is None and missing_s is not None and missing_s <= asked.at_s
    if aggregator == old.aggregator and bucket not in job.copied:
        if here is None:
            job.missing_s.setdefault(bucket, now_s)
            migrations.ask_held(state, new.aggregator, now_s)
        else:
            job.missing_s.pop(bucket, None)
            if not here.moving:  # The order was lost, or is not begun: say it again.
                job.initiated.discard((old.aggregator, new.aggregator))
    return False


def _begin_anew(
    state: State, job: Job, aggregator: AggregatorId, lost: list[int], now_s: float
) -> None:
    """The aggregator is there, the bytes are not: host again, one location epoch up."""
    if losses.goes_back(job, (aggregator,)):
        return
    for bucket in lost:
        epoch = job.target(bucket).location_epoch + 1
        migrations.retarget(
            state, job, bucket, BucketPlace(aggregator=aggregator, location_epoch=epoch)
        )
    job.confirmed.pop(aggregator, None)
    job.saving.interval.losses += 1
    state.change(job, places=job.record.places)
    hosting.settle(state, job, now_s)
    state.tell(
        job,
        "rehosted",
        now_s,
        buckets=str(len(lost)),
        lost=aggregator,
        aggregators=aggregator,
    )
