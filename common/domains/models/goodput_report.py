"""A job's goodput function as a message, and back (Qiao, thesis, section 3.4.1).

Two forms of THROUGHPUT are reported: theta_sys, and that of aggregation (shared_throughput.py). A
report of the second says theta_sys, too, for readers that know no other.
"""

from math import inf

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.goodput import BatchLimits, GoodputModel, GoodputProfile
from slackwater.common.domains.models.shared_throughput import Carried, SharedThroughput
from slackwater.common.domains.models.throughput import Throughput, ThroughputParams
from slackwater.schemas.base import FINITE_MAX, JobId
from slackwater.schemas.telemetry import (
    AggregatedSync,
    BatchBounds,
    GoodputReport,
    ThroughputTheta,
)


def report_of(job: JobId, attempt: int, model: GoodputModel, gpus_seen: int) -> GoodputReport:
    """Return the message. Raises Rejected for a form of throughput that is not reported."""
    throughput, limits = model.throughput, model.limits
    aggregated = None
    if isinstance(throughput, SharedThroughput):
        aggregated, throughput = _aggregated(throughput), throughput.as_all_reduce()
    if not isinstance(throughput, ThroughputParams):
        raise Rejected(f"{job} knows its throughput as a table; only theta_sys is reported")
    return GoodputReport(
        job=job,
        attempt=attempt,
        theta=ThroughputTheta(**throughput._asdict()),
        noise_scale=None if model.noise_scale == inf else min(model.noise_scale, FINITE_MAX),
        batch=BatchBounds(
            initial=limits.initial, total_max=limits.total_max, fixed=limits.fixed,
            per_gpu_max=limits.per_gpu_max, per_gpu_min=limits.per_gpu_min,
            accumulate_alone=limits.accumulate_alone,
        ),
        gpus_seen=gpus_seen,
        aggregated=aggregated,
    )  # fmt: skip


def profile_of(report: GoodputReport, aggregators_max: int = 0) -> GoodputProfile:
    """Return the report as policies take it (`JobView.profile`); `aggregators_max`: how many
    aggregators the job could have. Raises Rejected for bounds of a batch that contradict each
    other."""
    theta, batch = report.theta, report.batch
    limits = BatchLimits(
        initial=batch.initial, total_max=batch.total_max, per_gpu_max=batch.per_gpu_max,
        per_gpu_min=batch.per_gpu_min, fixed=batch.fixed, accumulate_alone=batch.accumulate_alone,
    )  # fmt: skip
    params = ThroughputParams(**{name: getattr(theta, name) for name in ThroughputParams._fields})
    throughput: Throughput = params
    if (sync := report.aggregated) is not None:
        throughput = SharedThroughput(
            alpha_grad_s=params.alpha_grad_s, beta_grad_s=params.beta_grad_s,
            alpha_sync_s=sync.alpha_sync_s, incast_s=sync.incast_s, gamma=params.gamma,
            share_bytes_s=inf if sync.share_bytes_s is None else sync.share_bytes_s,
            carried=Carried(sync.nbytes, sync.link_bytes_s),
            aggregators=sync.aggregators,
            aggregators_max=max(sync.aggregators, aggregators_max),
        )  # fmt: skip
    scale = inf if report.noise_scale is None else report.noise_scale
    return GoodputProfile(GoodputModel(throughput, scale, limits), report.gpus_seen)


def _aggregated(form: SharedThroughput) -> AggregatedSync:
    share = form.share_bytes_s
    return AggregatedSync(
        alpha_sync_s=form.alpha_sync_s,
        share_bytes_s=None if share >= FINITE_MAX else share,
        incast_s=form.incast_s,
        nbytes=form.carried.nbytes,
        link_bytes_s=form.carried.link_bytes_s,
        aggregators=form.aggregators,
    )
