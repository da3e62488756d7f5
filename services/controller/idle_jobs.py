"""Jobs that have aggregators for their profiling alone, and do not iterate.

A rank may be missing, or stand in a debugger, for as long as its user likes. What is profiled is
not shared, so others would wait for these aggregators as long. After `hung_after_s` without an
update, or half of it where others wait, the job goes to shared ones, or to one of its own that
others may use too, unprofiled; it is profiled there once it iterates. A bucket that was pushed to
by some ranks only cannot leave before the others push: where it is, others come too.

Whether a job iterates is seen by its buckets' versions, whenever its aggregators are compared with
the records.
"""

from collections.abc import Iterable
from dataclasses import replace

from slackwater.schemas.base import AggregatorId
from slackwater.schemas.placement import BucketHeld
from slackwater.services.controller import migrations
from slackwater.services.controller.feedback import planned
from slackwater.services.controller.snapshot import cluster_view, job_view
from slackwater.services.controller.state import Job, State


def compare(job: Job, aggregator: AggregatorId, held: Iterable[BucketHeld], now_s: float) -> None:
    """Compare the versions that the aggregator holds of the job with those before: they are higher
    if it iterates."""
    updates = sum(bucket.version for bucket in held)
    if updates > job.updates.get(aggregator, updates):
        job.iterated_s = now_s
    job.updates[aggregator] = updates


def tick(state: State, now_s: float) -> None:
    patience_s = state.config.hung_after_s
    if state.line:  # Others would have them.
        patience_s /= 2.0
    for job in list(state.living()):
        if job.record.phase != "profiling" or not job.record.temporary:
            continue
        looked_s = min(state.aggregators[home].checked_s for home in job.homes())
        idle_s = looked_s - max(job.iterated_s, job.settled_s)
        if job.pending is None and idle_s >= patience_s:
            _let_others_in(state, job, idle_s, now_s)


def _let_others_in(state: State, job: Job, idle_s: float, now_s: float) -> None:
    own = sorted(job.homes())
    because = "hung_after_s, others wait" if state.line else "hung_after_s"
    reason = f"no iteration for {idle_s:.0f} s ({because}): it shares aggregators, unprofiled"
    state.change(job, temporary=(), cause="unprofiled", reason=reason)
    state.tell(job, "unprofiled", now_s, aggregators=",".join(own), idle_s=f"{idle_s:.0f}")
    homes = _shared_homes(state, job) or [own[0]] * len(job.record.places)
    if homes != [place.aggregator for place in job.record.places]:
        migrations.begin(state, job, homes, "unprofiled", now_s)
        state.change(job, reason=reason)


def _shared_homes(state: State, job: Job) -> list[AggregatorId]:
    """Return other jobs' least loaded aggregators; empty: none."""
    view = cluster_view(state, job, forced=True, without=job.homes())
    usable = {id for id, entry in state.aggregators.items() if not entry.avoided}
    view = replace(view, aggregators=tuple(a for a in view.aggregators if a.id in usable))
    subject = job_view(state, job, frozenset(range(len(job.record.buckets))))
    return planned(state, job, view, subject)
