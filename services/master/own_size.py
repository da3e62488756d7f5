"""Elastic programs that say themselves how many hosts they can make use of: fewer, as their model
becomes sparse or their work ends (Litz: Qiao 2021, section 4.5.2). Pure."""

from slackwater.schemas.base import CONFLICT, NOT_FOUND, Message, Ok, Refused
from slackwater.schemas.job_requests import ScaleJob, UseHosts
from slackwater.services.master.gangs import is_rank_0
from slackwater.services.master.jobs import unknown
from slackwater.services.master.scaling import scale
from slackwater.services.master.state import State


def use(state: State, message: UseHosts, now_s: float) -> Message:
    """Give the job the number of hosts that its program asks for, or the nearest within its
    bounds."""
    job = state.shown_job(message.job)
    if job is None:
        return Refused(reason=unknown(message.job), code=NOT_FOUND)
    if not is_rank_0(job.record, message.attempt):
        reason = f"job {job.id}: this process is not its rank 0 any more"
        return Refused(reason=reason, code=CONFLICT)
    least, most = job.record.spec.workers_bounds
    hosts = min(max(message.hosts, least), most)
    answer = scale(state, ScaleJob(job=message.job, workers=hosts), now_s, "program")
    return answer if isinstance(answer, Refused) else Ok()
