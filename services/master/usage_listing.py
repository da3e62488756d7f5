"""Tell people and metrics what tenants and jobs used; note what controllers tell of it."""

from slackwater.schemas.base import Message
from slackwater.schemas.job_states import HOLDING_STATES
from slackwater.schemas.usage import GetUsage, UsageList
from slackwater.schemas.usage import UsageSums as Sums
from slackwater.services.master.explain import fitting
from slackwater.services.master.jobs import Job
from slackwater.services.master.state import State
from slackwater.services.master.usage import NOTHING, rows, to_now


def placed(state: State, job: Job, now_s: float) -> None:
    """Note where a job is, which its controller has just told."""
    part = state.sharers.part(job.id, job.progress.aggregators)
    record = job.record
    if record.state not in HOLDING_STATES or record.state == "stopping":
        return
    began_s = record.since_s or record.started_s
    # A master that was started in the course of the attempt knows only what it heard.
    since_s = began_s if began_s >= state.begun_s else now_s
    job.aggregation.note(part, since_s, now_s)


def answer(state: State, ask: GetUsage, now_s: float) -> Message:
    """List the rows that were asked for, as many as a message holds."""
    share = state.pool.share()
    used = (
        (job.record, to_now(job.record, job.used(share, now_s), now_s))
        for id, job in state.jobs.items()
        if id not in state.usage.forgetting
    )
    found = rows(state.usage, used, ask)
    return UsageList(rows=tuple(fitting(found[ask.offset :])), total=len(found))


def totals(state: State, tenant: str, now_s: float) -> Sums:
    """Sum up all that the tenant's jobs used until now, without jobs that have not ended."""
    share, found = state.pool.share(), state.usage.totals.get(tenant, NOTHING)
    for job in state.admitted.get(tenant, {}).values():
        for each in job.used(share, now_s):
            found += each.sums
    return found
