"""Decide which jobs may run now: room for their servers, and their tenant's part of the pool.

Section 4.3.3.5 of the dissertation: when the cluster manager cannot satisfy what a new job asks for
("a number of standalone parameter servers"), it should not schedule it, because the pool may have
to give it as many aggregators in the worst case. `admission = "standalone"` is that rule: a job is
started (one that its user started: registered) once some cluster can be given that many, those that
were promised to jobs admitted before not counted. `"open"` lets it in, and leaves it to its cluster
to find room, to share, and to undo what slows others.

A job with GPUs that says how it shares aggregators is one gang with its servers (Tiresias, section
3.3.1): it is given GPUs only where a cluster can place it too, or waits for both and holds neither.
Jobs that need no aggregators pass it.

Tenants (section 6: isolation is open in the paper): what a tenant's admitted jobs ask for together
is at most its fraction of the pool's CPU, so that nobody can fill the pool; its waiting jobs are
bounded, so that nobody can fill the queue; and the loss that its jobs may suffer by sharing goes
with them to their controller. What a job asks for is what its model was profiled to use, else
its servers. A job that then uses more is held to its profile by the aggregators (task_scheduling.py
there).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from slackwater.common.base.limits import JOBS_MAX
from slackwater.common.base.words import number_of
from slackwater.schemas.base import TOO_MANY, JobId, Refused
from slackwater.schemas.jobs import JobSpec
from slackwater.services.master.config import Admission, Tenant

DEFAULT = "default"
"""The limits of tenants that have none of their own; each has its own account of them."""
RETRY_S = 5.0
EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Capacity:
    """The room for one more job of one tenant."""

    free: int
    """The most aggregators that one cluster could be given now, promised ones not counted."""
    pool_cpu: float
    """Cores of all aggregators that are alive."""
    tenant_cpu: float
    """Cores that the tenant's admitted jobs ask for."""
    tenant_aggregators: float = 0.0
    """Aggregators that its other jobs take, or were promised."""
    shared_cpu: float = 0.0
    """Cores of the cluster that has most for one more job: of aggregators that it could be given,
    and free ones of those that it has."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a job may not run yet. `aggregators` holds back those behind it that need some too, or
    many small jobs would starve a large one; `tenant` holds back its tenant's only."""

    cause: Literal["aggregators", "tenant"]
    reason: str


def hold(
    spec: JobSpec, demand_cpu: float, capacity: Capacity, tenant: Tenant, admission: Admission
) -> Hold | None:
    """None: it may run."""
    allowed_cpu = tenant.cpu_fraction * capacity.pool_cpu
    asked_cpu = capacity.tenant_cpu + demand_cpu
    if tenant.cpu_fraction < 1.0 and capacity.pool_cpu and asked_cpu > allowed_cpu + EPSILON:
        return Hold(
            "tenant",
            f"waits for {named(spec.tenant)}'s part of the pool: it asks for {demand_cpu:.2f} "
            f"cores, the tenant's jobs have {capacity.tenant_cpu:.2f} of {allowed_cpu:.2f} "
            f"(cpu_fraction {tenant.cpu_fraction:g}); runs when one of them ends",
        )
    over = beyond_quota(spec, capacity.tenant_aggregators, tenant) if aggregates(spec) else None
    if over is not None:
        return over
    if capacity.free >= spec.servers:
        return None
    shared = capacity.pool_cpu > 0.0 and demand_cpu <= capacity.shared_cpu + EPSILON
    if admission == "open" and gathers(spec) and not shared:
        return Hold(
            "aggregators",
            f"waits for aggregators beside its GPUs, which it is given together: it asks for "
            f"{spec.servers}, a cluster could be given {max(0, capacity.free)}, and has "
            f"{max(0.0, capacity.shared_cpu):.2f} cores to share of the {demand_cpu:.2f} that it "
            "needs; runs when a job ends or `slackwater run aggregator` adds one",
        )
    if admission == "standalone":
        return Hold(
            "aggregators",
            f"waits for {number_of(spec.servers, 'aggregator')}, as many as it asks servers for: a "
            f"cluster could be given {max(0, capacity.free)}; runs when a job ends or `slackwater "
            "run aggregator` adds one",
        )
    return None


def beyond_quota(spec: JobSpec, taken: float, tenant: Tenant) -> Hold | None:
    """None: the tenant may take as many aggregators more as the job asks for."""
    if not tenant.aggregators or taken + spec.servers <= tenant.aggregators + EPSILON:
        return None
    return Hold(
        "tenant",
        f"waits for {named(spec.tenant)}'s aggregators: it asks for {spec.servers}, the tenant's "
        f"jobs have {taken:.3g} of {tenant.aggregators} (quota aggregators); runs when one of "
        "them ends",
    )


def gathers(spec: JobSpec) -> bool:
    """Tell whether its GPUs and its aggregation are one gang: it says how it shares aggregators."""
    return bool(spec.gpus and spec.program) and spec.aggregation is not None


def aggregates(spec: JobSpec) -> bool:
    """Tell whether it is known to aggregate before its Agents register. A job with GPUs that does
    not say so may be a program that needs no aggregator."""
    return not spec.gpus or spec.aggregation is not None


def refusal(
    spec: JobSpec, pending: int, tenant: Tenant, admission: Admission, aggregators_max: int
) -> Refused | None:
    """Say why a submission is refused: it can never run, or would wait behind too many of its
    tenant's."""
    if pending >= tenant.queued_max:
        return Refused(
            reason=f"{pending} jobs of {named(spec.tenant)} wait already (queued_max); submit it "
            "when one of them runs",
            retry_after_s=RETRY_S,
            code=TOO_MANY,
        )
    if tenant.aggregators and spec.servers > tenant.aggregators and aggregates(spec):
        return Refused(
            reason=f"it asks for {spec.servers} servers, {named(spec.tenant)} may have "
            f"{number_of(tenant.aggregators, 'aggregator')} (quota aggregators of the master's "
            "tenants); ask for fewer"
        )
    if admission == "standalone" and spec.servers > aggregators_max:
        return Refused(
            reason=f"it asks for {spec.servers} servers, a cluster may have {aggregators_max} "
            "(aggregators_max of the master); ask for fewer"
        )
    return None


def promised(admitted: Iterable[tuple[JobId, JobSpec]], served: frozenset[JobId]) -> int:
    """Aggregators that admitted jobs are still to get: those that are not `served` yet."""
    return sum(spec.servers for id, spec in admitted if id not in served)


def limits_of(tenants: dict[str, Tenant], name: str) -> Tenant:
    return tenants.get(name) or tenants.get(DEFAULT) or _FREE


def named(tenant: str) -> str:
    return f"tenant {tenant}" if tenant else "the tenant without a name"


_FREE = Tenant()

assert Tenant().queued_max >= JOBS_MAX
