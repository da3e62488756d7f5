"""Buckets whose aggregator lost them, or is gone.

They begin anew elsewhere, with the newest copy of what was in them (SCAR: Qiao 2021, section 5.4),
unless the job's user wants all of it to go back to a mark. Then nothing is hosted and nobody finds
the buckets until the master, which learns it from the reports, has placed the job anew.
"""

from collections.abc import Iterable

from slackwater.schemas.base import AggregatorId
from slackwater.schemas.placement import BucketPlace
from slackwater.services.controller import assignment, hosting, migrations
from slackwater.services.controller.state import Job, State


def goes_back(job: Job, gone: Iterable[AggregatorId]) -> bool:
    """Say whether the job is to go back to a mark, and let nothing of it be hosted any more. A job
    that has not begun has nothing to go back from."""
    record = job.record
    if record.spec.recover != "rollback" or record.phase in ("waiting", "hosting"):
        return False
    job.lost = f"tables of it are lost with {', '.join(sorted(gone))}"
    return True


def lose(state: State, job: Job, now_s: float) -> None:
    """Let buckets of an aggregator that stays away begin anew elsewhere."""
    if job.lost or job.record.phase in ("waiting", "released"):
        return
    if not any(state.is_gone(aggregator, now_s) for aggregator in job.homes() | _sources(job)):
        return
    if job.moving:
        migrations.abandon(state, job, _resting_places(state, job, now_s), now_s)
        job.confirmed.clear()
        hosting.host(state, job, now_s)
    gone = {place.aggregator for place in job.record.places}
    gone = {aggregator for aggregator in gone if state.is_gone(aggregator, now_s)}
    if gone and not goes_back(job, gone):
        if job.pending is not None and job.pending.cause != "lost":
            job.pending = None
        assignment.request_assignment(state, job, "lost", now_s)


def _sources(job: Job) -> set[AggregatorId] | frozenset[AggregatorId]:
    if not job.moving:
        return job.homes()
    return {
        place.aggregator
        for bucket, place in enumerate(job.record.places)
        if bucket not in job.copied
    }


def _resting_places(state: State, job: Job, now_s: float) -> tuple[BucketPlace, ...]:
    """Where each bucket of a migration that cannot finish is to stay. The epoch rises above all
    that was promised, so that Agents which were sent on already follow."""
    moved = set(job.moved())
    resting = []
    for bucket, (old, new) in enumerate(zip(job.record.places, job.record.target, strict=True)):
        if bucket not in moved or bucket in job.copied:
            resting.append(new)
            continue
        stay = new if state.is_gone(old.aggregator, now_s) else old
        resting.append(
            BucketPlace(aggregator=stay.aggregator, location_epoch=new.location_epoch + 1)
        )
    return tuple(resting)
