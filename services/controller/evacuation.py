"""Buckets that leave an aggregator which is still there: for its congested link, or by an order.

Both ask the job's policy where they may go, as if they were lost; nothing goes to an aggregator
that is itself to be avoided.
"""

from dataclasses import replace
from typing import Final

from slackwater.schemas.base import AggregatorId
from slackwater.services.controller.policies.view import (
    ClusterView,
    JobView,
    Plan,
    PlanRefused,
    validate,
)
from slackwater.services.controller.snapshot import cluster_view, job_view
from slackwater.services.controller.state import Cause, Job, PendingAssignment, State

CAUSES: Final[frozenset[Cause]] = frozenset({"interfered", "drained"})
WORTH: Final = 0.9
"""A move onto fewer aggregators must promise iterations shorter than this part of the present."""


def buckets(state: State, job: Job, cause: Cause) -> frozenset[int]:
    """Return the job's buckets that leave."""
    entries = state.aggregators
    left = {
        id
        for id in job.homes()
        if (entries[id].congested_s is not None if cause == "interfered" else entries[id].leaving)
    }
    return frozenset(b for b, place in enumerate(job.record.places) if place.aggregator in left)


def avoided(state: State) -> frozenset[AggregatorId]:
    return frozenset(id for id, entry in state.aggregators.items() if entry.avoided)


def case(state: State, job: Job, pending: PendingAssignment) -> tuple[ClusterView, JobView]:
    """The snapshot and the buckets that leave. Once the master has refused more aggregators, those
    that there are take them, fit or not."""
    forced = pending.refused and state.adapts(job)
    view = cluster_view(state, job, forced=forced, without=avoided(state) | pending.full)
    away = buckets(state, job, pending.cause)
    return view, job_view(state, job, away, away)


def not_worthwhile(view: ClusterView, job: JobView, plan: Plan, endured_s: float) -> str:
    """Why aggregations do not leave a congested link for aggregators that have no room by the
    policy; empty: they do. Other jobs must have their time there, and this one's iterations become
    shorter by it."""
    try:
        validate(plan, replace(view, forced=False), job)
    except PlanRefused as error:
        return str(error)
    shares = {aggregator.id: aggregator.cpu_share for aggregator in view.aggregators}
    busy_s: dict[str, float] = {}
    for place, cpu_s in zip(plan.places, job.task_cpu_s, strict=True):
        share = shares.get(AggregatorId(place), view.new_share)
        busy_s[place] = busy_s.get(place, 0.0) + cpu_s / share
    expected_s = max(job.iteration_s, *busy_s.values())
    if expected_s > WORTH * endured_s:
        return (
            f"elsewhere an iteration would take {expected_s:.3g} s, on the congested link it takes "
            f"{endured_s:.3g} s"
        )
    return ""
