"""Keep jobs from running, as people ask: pause those that run, hold back those that wait.

Pure. No policy sees a job that is held, and so none starts it. It keeps its number, so that it
stands where it stood in the order of submissions once it is resumed.
"""

from slackwater.schemas.base import CONFLICT, NOT_FOUND, Message, Refused
from slackwater.schemas.job_requests import JobInfo, PauseJob, ResumeJob
from slackwater.schemas.job_states import STATE_SAID, WAITING_STATES
from slackwater.schemas.jobs import JobRecord
from slackwater.services.master.jobs import Job, unknown
from slackwater.services.master.lifecycle import advance, leave
from slackwater.services.master.snapshot import shown_allocation
from slackwater.services.master.state import State

BY_ITS_USER = "its user paused it"


def why_held(record: JobRecord) -> str:
    """Say why it waits, to people who look at it."""
    id = record.spec.id
    if record.state == "paused":
        return f"it was paused; `slackwater resume {id}` lets it go on"
    return f"it is held back; `slackwater release {id}` lets it start"


def pause(state: State, message: PauseJob, now_s: float) -> Message:
    """Keep the job from running; repeated, the answer is the same. Refused: nothing changed."""
    job = _concerned(state, message.job)
    if isinstance(job, Refused):
        return job
    record, id = job.record, job.id
    if record.held:
        return JobInfo(job=record)
    if message.waiting and shown_allocation(record):
        reason = f"job {id} {STATE_SAID[record.state]}; `slackwater pause {id}` stops it"
        return Refused(reason=reason, code=CONFLICT)
    if record.state in WAITING_STATES:
        state.change(job, now_s, "held", held=True)
    elif record.state == "stopping":  # A policy stopped it a moment ago.
        state.change(job, now_s, "stopping", held=True, planned=(), reason=BY_ITS_USER)
    else:
        leave(state, job, (), now_s, held=True, reason=BY_ITS_USER)
        advance(state, job)
    return JobInfo(job=job.record)


def resume(state: State, message: ResumeJob, now_s: float) -> Message:
    """Show the job to the policy again; repeated, the answer is the same."""
    job = _concerned(state, message.job)
    if isinstance(job, Refused):
        return job
    if job.record.held or job.record.waits_for:
        state.change(job, now_s, "released", held=False, waits_for=(), reason="")
    return JobInfo(job=job.record)


def _concerned(state: State, id: str) -> Job | Refused:
    job = state.shown_job(id)
    if job is None:
        return Refused(reason=unknown(id), code=NOT_FOUND)
    if job.ended:
        reason = f"job {id} {STATE_SAID[job.record.state]}; `slackwater rerun {id}` runs it again"
        return Refused(reason=reason, code=CONFLICT)
    if job.by_hand:
        reason = f"job {id} was started by its user, who alone can stop its processes"
        return Refused(reason=reason, code=CONFLICT)
    return job
