"""Users who act for one tenant alone: what they ask for is about that tenant's jobs, whatever the
message says. The bus lets them ask under subjects that name their tenant, and no other."""

import msgspec

from slackwater.schemas.base import CONFLICT, NOT_FOUND, Message, Refused
from slackwater.schemas.job_requests import (
    CancelJob,
    DeleteJob,
    GetJob,
    ListJobs,
    PauseJob,
    RerunJob,
    ResumeJob,
    ScaleJob,
    SubmitJob,
)
from slackwater.schemas.usage import GetUsage
from slackwater.services.master.jobs import unknown
from slackwater.services.master.state import State

_OfJob = CancelJob | DeleteJob | GetJob | PauseJob | RerunJob | ResumeJob | ScaleJob


def held_to(state: State, tenant: str, message: Message) -> Message:
    """Return the request as a user of that tenant may make it, or `Refused`. A job of another
    tenant is as unknown as one that does not exist; only its id is taken."""
    match message:
        case SubmitJob(spec=spec):
            known = state.shown_job(spec.id)
            if known is not None and known.record.spec.tenant != tenant:
                reason = f"job {spec.id} exists with another spec; choose another id"
                return Refused(reason=reason, code=CONFLICT)
            return msgspec.structs.replace(
                message, spec=msgspec.structs.replace(spec, tenant=tenant)
            )
        case ListJobs() | GetUsage():
            return msgspec.structs.replace(message, tenant=tenant)
        case _ if isinstance(message, _OfJob):
            job = state.shown_job(message.job)
            if job is None or job.record.spec.tenant != tenant:
                return Refused(reason=unknown(message.job), code=NOT_FOUND)
    return message
