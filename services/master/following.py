"""Jobs that come after others: kept back until those have completed, or ended. Pure.

A job's record names the others that it still waits for, so that a new master knows. One of them
that fails, is cancelled or deleted ends the job, unless its spec says `after_any`.
"""

from typing import Final

from slackwater.common.base.words import number_of
from slackwater.schemas.base import CONFLICT, NOT_FOUND, JobId, Refused
from slackwater.schemas.job_states import STATE_SAID, TERMINAL_STATES, JobState
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.services.master.jobs import Job, unknown
from slackwater.services.master.lifecycle import end
from slackwater.services.master.state import State

NAMED: Final = 3
"""Jobs that a reason names; of more it gives the number."""


def refusal(state: State, spec: JobSpec) -> Refused | None:
    """Say why the job cannot come after those that its spec names; None: it can."""
    if not spec.after:
        return None
    id = spec.id
    if not spec.program:
        return Refused(reason=f"job {id}: after: its user starts its program, and may wait; it "
                              "needs a program that worker nodes start")  # fmt: skip
    for other in spec.after:
        if other == id:
            return Refused(reason=f"job {id}: after: it cannot come after itself")
        found = _state_of(state, other, spec.tenant)
        if found is None:
            return Refused(reason=f"job {id}: after: {unknown(other)}", code=NOT_FOUND)
        if _breaks(found, spec):
            why = f"job {other} {STATE_SAID[found]}, and {id} comes after its completion"
            return Refused(reason=f"{why}; --after-any takes any end", code=CONFLICT)
    return None


def first(state: State, spec: JobSpec) -> tuple[JobId, ...]:
    """Return the jobs that a new job waits for."""
    others = dict.fromkeys(JobId(other) for other in spec.after)
    return tuple(o for o in others if _state_of(state, o, spec.tenant) not in TERMINAL_STATES)


def look(state: State, job: Job, now_s: float) -> None:
    """Take note of those that it waits for and that ended."""
    record = job.record
    if not record.waits_for or job.ended:
        return
    left = []
    for other in record.waits_for:
        found = _state_of(state, other, record.spec.tenant)
        if found is None or _breaks(found, record.spec):
            what = "is gone" if found is None else STATE_SAID[found]
            end(state, job, "cancelled", f"job {other}, which it comes after, {what}", now_s)
            return
        if found not in TERMINAL_STATES:
            left.append(other)
    if len(left) < len(record.waits_for):
        state.change(job, now_s, "" if left else "released", waits_for=tuple(left))


def why(record: JobRecord) -> str:
    """Say what it waits for, to people who look at it."""
    others = record.waits_for
    named = ", ".join(others[:NAMED])
    more = f" and {number_of(len(others) - NAMED, 'more')}" if len(others) > NAMED else ""
    until = "end" if record.spec.after_any else "complete"
    plural = "jobs" if len(others) > 1 else "job"
    return (
        f"waits for {plural} {named}{more} to {until}; `slackwater release {record.spec.id}` "
        "does not let it wait"
    )


def _state_of(state: State, id: str, tenant: str) -> JobState | None:
    """Return the state of a job that this tenant may name; None: there is no such job."""
    job = state.shown_job(id)
    if job is not None:
        return job.record.state if not tenant or job.record.spec.tenant == tenant else None
    return state.ended.state_of(id) if not tenant else None


def _breaks(found: JobState, spec: JobSpec) -> bool:
    return found in TERMINAL_STATES and found != "completed" and not spec.after_any
