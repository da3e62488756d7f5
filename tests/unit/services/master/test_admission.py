"""Jobs that may run now: dissertation 4.3.3.5, and what tenants may have."""

from dataclasses import replace

import msgspec
import pytest

from slackwater.schemas.base import JobId
from slackwater.schemas.jobs import JobSpec
from slackwater.services.master.admission import (
    Capacity,
    hold,
    limits_of,
    promised,
    refusal,
)
from slackwater.services.master.config import MasterConfig, Tenant

SPEC = JobSpec(id="a", servers=4, tenant="t")
IDLE = Capacity(free=10, pool_cpu=1.0, tenant_cpu=0.0)


def test_a_job_runs_once_a_cluster_can_be_given_as_many_aggregators_as_it_asks_servers_for() -> (
    None
):
    few = replace(IDLE, free=3)
    why = hold(SPEC, 0.4, few, Tenant(), "standalone")
    assert why is not None
    assert why.cause == "aggregators"
    assert "waits for 4 aggregators" in why.reason
    assert "could be given 3" in why.reason
    assert hold(SPEC, 0.4, replace(IDLE, free=4), Tenant(), "standalone") is None
    assert hold(SPEC, 0.4, few, Tenant(), "open") is None


def test_a_tenants_jobs_have_at_most_its_part_of_the_pool() -> None:
    quarter = Tenant(cpu_fraction=0.25)
    assert hold(SPEC, 0.25, IDLE, quarter, "open") is None
    why = hold(SPEC, 0.2, replace(IDLE, tenant_cpu=0.1), quarter, "open")
    assert why is not None
    assert why.cause == "tenant"
    assert "0.10 of 0.25" in why.reason
    assert "tenant t" in why.reason
    assert hold(SPEC, 9.0, replace(IDLE, tenant_cpu=9.0), Tenant(), "open") is None  # No limit.
    unheard = Capacity(free=0, pool_cpu=0.0, tenant_cpu=0.0)
    assert hold(SPEC, 0.4, unheard, quarter, "open") is None  # No pool to have a part of yet.


def test_what_can_never_run_is_refused_and_what_may_come_again_is_told_when() -> None:
    never = refusal(SPEC, 0, Tenant(), "standalone", aggregators_max=3)
    assert never is not None
    assert never.retry_after_s == 0.0
    assert "a cluster may have 3" in never.reason
    assert refusal(SPEC, 0, Tenant(), "open", aggregators_max=3) is None
    later = refusal(SPEC, 2, Tenant(queued_max=2), "open", aggregators_max=16)
    assert later is not None
    assert later.retry_after_s > 0
    assert "queued_max" in later.reason


def test_what_is_promised_are_the_servers_of_admitted_jobs_that_have_no_aggregators_yet() -> None:
    admitted = [(JobId("a"), SPEC), (JobId("b"), replace_servers(2))]
    assert promised(admitted, frozenset()) == 6
    assert promised(admitted, frozenset({JobId("a")})) == 2


def replace_servers(servers: int) -> JobSpec:
    return msgspec.structs.replace(SPEC, servers=servers)


def test_a_tenant_without_limits_of_its_own_has_the_default_ones() -> None:
    own, usual = Tenant(cpu_fraction=0.5), Tenant(cpu_fraction=0.1)
    assert limits_of({"t": own, "default": usual}, "t") is own
    assert limits_of({"t": own, "default": usual}, "other") is usual
    assert limits_of({"t": own}, "other") == Tenant()


def test_limits_come_from_tables_of_the_configuration_and_a_slip_is_an_error() -> None:
    config = msgspec.convert(
        {"id": "m1", "tenants": {"t": {"cpu_fraction": 0.25, "loss_limit": 0.05}}}, MasterConfig
    )
    assert config.tenants["t"].queued_max == Tenant().queued_max
    with pytest.raises(msgspec.ValidationError, match="cpu_fractoin"):
        msgspec.convert({"id": "m1", "tenants": {"t": {"cpu_fractoin": 0.25}}}, MasterConfig)
