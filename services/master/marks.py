"""Jobs that go back, whole, to a mark of theirs once a part of their tables is lost (Qiao 2021,
chapter 5, where that is what partial recovery is compared with).

Pure. The newest mark is in the job's record before its program removes the one before. A loss is
told by the controller in each report until the job is placed anew, under the next number: what
processes of the former placement do or say late changes nothing.
"""

from slackwater.schemas.base import (
    CONFLICT,
    NOT_FOUND,
    RUNS_MAX,
    TEXT_CHARS_MAX,
    Message,
    Ok,
    Refused,
)
from slackwater.schemas.cluster import LostTables
from slackwater.schemas.job_requests import KeepMark
from slackwater.services.master.gangs import is_rank_0
from slackwater.services.master.jobs import Job, unknown
from slackwater.services.master.lifecycle import advance, end, leave, next_placement
from slackwater.services.master.state import State


def keep(state: State, message: KeepMark, now_s: float) -> Message:
    """Let the job go back to this mark from now on."""
    job = state.shown_job(message.job)
    if job is None:
        return Refused(reason=unknown(message.job), code=NOT_FOUND)
    record = job.record
    if job.ended or record.rolls_back or not is_rank_0(record, message.attempt):
        reason = f"job {job.id}: this process is not its rank 0 any more"
        return Refused(reason=reason, code=CONFLICT)
    folder = f"{record.spec.save_to}/{message.mark}"
    if not record.spec.save_to:
        return Refused(reason=f"job {job.id} has no folder for marks (save_to)")
    if len(folder) > TEXT_CHARS_MAX:
        return Refused(reason=f"job {job.id}: its folder for marks (save_to) has too long a name")
    if record.mark != folder:
        state.change(job, now_s, mark=folder)
    return Ok()


def look(state: State, job: Job, lost: LostTables, now_s: float) -> None:
    """Hear that tables of the job are lost, and let it go back."""
    record = job.record
    if lost.run != record.placement or record.rolls_back or job.ended:
        return
    if record.spec.recover != "rollback" or "0" in record.results:
        return
    to = f"mark {record.mark.rpartition('/')[2]}" if record.mark else "where it began"
    why = f"{lost.what}: it goes back to {to}"
    if record.placement >= RUNS_MAX:
        end(state, job, "failed", f"{why}, which it did {RUNS_MAX} times", now_s)
    elif record.state in ("starting", "running", "stopping"):
        planned = record.planned if record.state == "stopping" else record.allocation
        leave(state, job, planned, now_s, "rolled-back", reason=why, rolls_back=True)
        advance(state, job)
    elif record.state == "paused":
        state.change(
            job, now_s, "rolled-back", reason=why, **next_placement(state, job, goes_back=True)
        )
