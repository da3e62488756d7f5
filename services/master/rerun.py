"""A job that ended and is run again, or is forgotten: who decides when nothing of it is left.

Pure. A run that ended must be over everywhere before the next one begins: its worker node has said
that no process of it is left, its controller that it drops its tensors (`released`). Then the
record begins anew with the next run's number, which all orders carry, so that what is said or
ordered late of a former run changes nothing: processes are numbered on from run to run, location
epochs and layout epochs too.

A deleted job's record stays, hidden, for as long as those of ended jobs are kept: a job that is
submitted under its id is the next run. An id without a record has never been here, or so long ago
that its record was pruned.
"""

from typing import Final

import msgspec

from slackwater.schemas.base import CONFLICT, NOT_FOUND, RUNS_MAX, JobId, Message, Ok, Refused
from slackwater.schemas.job_requests import DeleteJob, JobInfo, RerunJob
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.services.master.jobs import Job, unknown
from slackwater.services.master.keys import Order
from slackwater.services.master.state import State

ENDING_RETRY_S: Final = 0.5


def rerun(state: State, message: RerunJob, now_s: float) -> Message:
    """Run the job again. Refused: nothing was changed."""
    job = state.shown_job(message.job)
    if job is None:
        return Refused(reason=unknown(message.job), code=NOT_FOUND)
    record = job.record
    if record.run == message.run:
        return JobInfo(job=record)  # It was told before.
    id = record.spec.id
    if record.run != message.run - 1:
        reason = f"job {id} was run again meanwhile: this is its run {record.run + 1}; look again"
        return Refused(reason=reason, code=CONFLICT)
    if not job.ended:
        reason = f"job {id} is {record.state}; `slackwater cancel {id}` ends it"
        return Refused(reason=reason, code=CONFLICT)
    if job.by_hand:
        reason = (
            f"job {id} was started by its user, who can start its program again: under another "
            f"id, or under this one after `slackwater delete {id}`"
        )
        return Refused(reason=reason, code=CONFLICT)
    refused = ending(state, job) or state.no_room(record.spec)
    if refused is not None:
        return refused
    return JobInfo(job=begin_again(state, job, record.spec, now_s).record)


def delete(state: State, message: DeleteJob, now_s: float) -> Message:
    """Forget the job; repeated, the answer is the same."""
    job = state.jobs.get(JobId(message.job))
    if job is None:
        return Refused(reason=unknown(message.job), code=NOT_FOUND)
    id = job.record.spec.id
    if not job.ended:
        reason = (
            f"job {id} is {job.record.state}; `slackwater cancel {id}` ends it, "
            f"`slackwater delete --force {id}` does both"
        )
        return Refused(reason=reason, code=CONFLICT)
    if not job.record.deleted:
        state.change(job, now_s, "deleted", deleted=True, results={})
    return Ok()


def ending(state: State, job: Job) -> Refused | None:
    """Say why its id cannot be used for another run yet; None: it can."""
    record, id = job.record, job.record.spec.id
    if refused := forgetting(state, job.id):
        return refused
    if record.placement >= RUNS_MAX:
        return Refused(reason=f"job {id} was run {RUNS_MAX} times; choose another id")
    if record.released and not job.asked:
        return None
    waits = [f"worker node {node} to say that its processes ended" for node in job.unstopped]
    if record.cluster is not None and Order("release") not in job.told:
        waits.append(f"controller {record.cluster} to let its tensors go")
    for_whom = " and for ".join(waits) or "what it was asked for last"
    return Refused(
        reason=f"job {id} is still ending: it waits for {for_whom}; or choose another id",
        retry_after_s=ENDING_RETRY_S,
    )


def forgetting(state: State, id: JobId) -> Refused | None:
    """Say that the record of its id is about to be deleted; None: it is not."""
    if id not in state.usage.forgetting:
        return None
    return Refused(
        reason=f"job {id} is being forgotten (jobs_kept_max); then its id is free",
        retry_after_s=ENDING_RETRY_S,
    )


def begin_again(state: State, old: Job, spec: JobSpec, now_s: float) -> Job:
    """Make the record of the job's next run, which keeps only the number from the former one."""
    state.unsettle(old)
    job = Job(old.record, heard_s=now_s)
    state.jobs[job.id] = job
    former = old.record
    fresh = JobRecord(
        spec=spec,
        run=former.run + 1,
        placement=former.placement + 1,
        attempt=former.attempt + 1,
        submitted_s=now_s,
        usage=former.usage,
    )
    changes = msgspec.structs.asdict(fresh)
    del changes["epoch"]
    state.change(job, now_s, **changes)
    again = "" if old.record.deleted else f"runs again: this is its run {fresh.run + 1}"
    state.tell(job, "pending", now_s, again)
    return job
