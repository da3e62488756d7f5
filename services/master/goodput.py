"""Reports of jobs' agents about their goodput: the last one of each job, for policies to plan with.

Pure. A report that cannot be true, or is not of the attempt that the job is in, is refused: logged
and counted, by its cause. Only the last one of a job is kept. A policy that must not forget reports
when its master ends declares them as its facts (scheduling/scheduler.py).
"""

from typing import Final

import msgspec

from slackwater.common.base import limits
from slackwater.common.base.effects import Count, Log
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.goodput import GoodputProfile
from slackwater.common.domains.models.goodput_report import profile_of
from slackwater.common.domains.models.shared_throughput import SharedThroughput
from slackwater.common.domains.models.throughput import ThroughputParams
from slackwater.schemas import subjects
from slackwater.schemas.base import COUNT_MAX
from slackwater.schemas.gpus import held
from slackwater.schemas.job_states import HOLDING_STATES
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.progress import TuningPoint
from slackwater.schemas.telemetry import GoodputReport
from slackwater.services.master.jobs import Job
from slackwater.services.master.state import State

ITERATION_S_MIN: Final = 1e-9
"""Seconds of computing that one example takes at least, on any machine."""


class _Refused(Exception):
    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


def take(state: State, report: GoodputReport, subject: str) -> None:
    """Show policies what the job's agent tells, or refuse it."""
    try:
        profile = _believed(state, report, subject)
    except _Refused as refused:
        _refuse(state, report, refused)
        return
    _note(state, report, profile)
    snapshot = state.gpus.snapshot
    if snapshot.profiles.get(report.job) != profile:  # The same object spares policies its tables.
        snapshot.profiled(report.job, profile)


def _believed(state: State, report: GoodputReport, subject: str) -> GoodputProfile:
    """Raises _Refused."""
    if subject != subjects.telemetry("job", report.job, "goodput"):
        raise _Refused("job", f"it came on {subject}, which is not of job {report.job}")
    job = state.jobs.get(report.job)
    if job is None:
        raise _Refused("job", f"there is no job {report.job}")
    record = job.record
    if not record.spec.gpus or record.state not in HOLDING_STATES:
        raise _Refused("job", f"job {report.job} is {record.state} and holds no GPUs")
    if report.attempt != record.attempt:
        reason = f"it is of attempt {report.attempt}; job {report.job} is in {record.attempt}"
        raise _Refused("attempt", reason)
    most = record.spec.gpu_bounds[1]
    if report.gpus_seen > most:
        reason = f"gpus_seen is {report.gpus_seen}; job {report.job} is given {most} at most"
        raise _Refused("figures", reason)
    try:
        profile = profile_of(report, _aggregators_max(state, job, report))
    except Rejected as error:
        raise _Refused("figures", str(error)) from error
    profile = _as_asked(profile, record.spec)
    assert profile.model is not None
    throughput = profile.model.throughput
    assert isinstance(throughput, ThroughputParams | SharedThroughput)
    if throughput.grad_s(1) < ITERATION_S_MIN:
        reason = (
            f"theta says that computing takes no time (alpha_grad_s {throughput.alpha_grad_s:g}, "
            f"beta_grad_s {throughput.beta_grad_s:g}); fit it to iterations that were measured"
        )
        raise _Refused("figures", reason)
    return profile


def _note(state: State, report: GoodputReport, profile: GoodputProfile) -> None:
    """Keep how far the job has learned, and how it is tuned."""
    job, model = state.jobs[report.job], profile.model
    gpus = held(job.record.allocation)
    batch = gpus * report.per_gpu * (report.accumulation + 1)
    point = TuningPoint(
        at_s=state.now_s,
        gpus=gpus,
        batch=min(batch, COUNT_MAX),
        accumulation=report.accumulation,
        rate_scale=report.rate_scale,
        efficiency=float(model.efficiency(batch)) if model is not None and batch else None,
        progress_epochs=report.progress_epochs,
    )
    job.learning.reported(point, report.attempt, report.target_epochs)


def _as_asked(profile: GoodputProfile, spec: JobSpec) -> GoodputProfile:
    """Keep the batch of a job whose user fixed it, whatever its program could do."""
    model = profile.model
    if model is None or spec.batch != "fixed":
        return profile
    size = spec.batch_size or model.limits.fixed or model.limits.initial
    limits = msgspec.structs.replace(model.limits, fixed=size)
    fixed = msgspec.structs.replace(model, limits=limits)
    return msgspec.structs.replace(profile, model=fixed)


def _aggregators_max(state: State, job: Job, report: GoodputReport) -> int:
    """Return how many aggregators the job can have: those that it has, and more that its cluster
    can be given, up to the servers that it asks for. Its controller gives them where it loses
    speed. Each job is shown all that are free."""
    cluster = job.record.cluster
    if report.aggregated is None or cluster is None:
        return 0
    most = report.aggregated.aggregators + max(0, state.pool.unallocated(cluster))
    return min(most, job.record.spec.servers)


def _refuse(state: State, report: GoodputReport, refused: _Refused) -> None:
    state.reports_refused[refused.cause] += 1
    state.out.append(Count(f"goodput_{refused.cause}"))
    if state.reports_refused[refused.cause] <= limits.UNDECODABLE_LOGGED_MAX:
        fields = {"job": report.job, "attempt": report.attempt, "reason": str(refused)}
        state.out.append(Log("goodput.refused", fields, "warning"))
