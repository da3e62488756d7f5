"""Takes in what a controller tells of the jobs that it places."""

from slackwater.schemas.base import JobId
from slackwater.schemas.cluster import ClusterReport
from slackwater.services.master import marks, usage_listing
from slackwater.services.master.jobs import Job
from slackwater.services.master.state import State


def take(state: State, report: ClusterReport, now_s: float) -> None:
    """Take in where jobs are placed, and which of their tables are lost."""
    for id, placed in report.placed.items():
        if (job := _its_own(state, report, id)) is not None:
            job.progress.take_report(placed, report.aggregators)
            usage_listing.placed(state, job, now_s)
    for id, lost in report.lost.items():
        if (job := _its_own(state, report, id)) is not None:
            marks.look(state, job, lost, now_s)


def _its_own(state: State, report: ClusterReport, id: JobId) -> Job | None:
    job = state.jobs.get(id)
    return job if job is not None and job.record.cluster == report.cluster else None
