"""Decide which jobs may run now: room for their servers, and their tenant's part of the pool.

Section 4.3.3.5 of the dissertation: when the cluster manager cannot satisfy what a new job asks for
("a number of standalone parameter servers"), it should not schedule it, because the pool may have
to give it as many aggregators in the worst case. `admission = "standalone"` is that rule: a job is
started (one that its user started: registered) once some cluster can be given that many, those that
were promised to jobs admitted before not counted. `"open"` lets it in, and leaves it to its cluster
to find room, to share, and to undo what slows others.

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


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a job may not run yet. `aggregators` holds back those behind it too, or many small jobs
    would starve a large one; `tenant` holds back its tenant's only."""

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
    if admission == "standalone" and capacity.free < spec.servers:
        return Hold(
            "aggregators",
            f"waits for {spec.servers} aggregators, as many as it asks servers for: a cluster "
            f"could be given {max(0, capacity.free)}; runs when a job ends or `slackwater run "
            "aggregator` adds one",
        )
    return None


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
