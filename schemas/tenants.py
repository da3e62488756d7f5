"""Tenants: what each may have of the pool, and what its jobs have of it now."""

from typing import Annotated

import msgspec

from slackwater.schemas.base import (
    COUNT_MAX,
    NAME_CHARS_MAX,
    Count,
    Finite,
    LossLimit,
    Message,
    Record,
    bound,
)

Tenant = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
"""A tenant's name; empty: the tenant without a name."""


class ListTenants(Message, kw_only=True, frozen=True, tag="tenant.list"):
    """Tenants that have limits or jobs."""


class TenantInfo(Record, kw_only=True, frozen=True):
    """Limits of a tenant (from the master's configuration), and its present use."""

    tenant: Tenant
    cpu_fraction: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    """Part of the pool's CPU that its jobs may ask for together."""
    loss_limit: LossLimit
    """0: that of the job's cluster."""
    queued_max: Count
    waiting: Count
    """Jobs that were not started yet."""
    running: Count
    cpu: Finite
    """Cores that the running ones ask for: as profiled, else their servers."""
    pool_cpu: Finite
    """Cores of the pool."""
    used_cpu: Finite = 0.0
    """Cores that their tasks took of aggregators, in each job's last monitor window."""
    used_slots: Finite = 0.0
    """Aggregators that they kept busy."""
    measured: Count = 0
    """Jobs of which such a window is known."""
    loss: Finite = 0.0
    """Loss of the job that lost most, as a share of its profiled speed; below 0: all are faster."""
    beyond: Count = 0
    """Jobs that lost more than their limit."""

    def __post_init__(self) -> None:
        bound(self, "cpu", "pool_cpu", "used_cpu", "used_slots", "loss")
        bound(self, "measured", "beyond", most=COUNT_MAX)


class TenantList(Message, kw_only=True, frozen=True, tag="tenant.list-reply"):
    tenants: Annotated[tuple[TenantInfo, ...], msgspec.Meta(max_length=10_000)]
