"""Tenants: a loss limit instead of the cluster's, in both policies; what each used and lost."""

from dataclasses import replace

import pytest
from tests.unit.services.controller.harness import Harness, Pool, placed

from slackwater.common.base.effects import Publish
from slackwater.schemas.base import AggregatorId, JobId, Ok
from slackwater.schemas.cluster import ClusterReport
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import PlaceJob
from slackwater.services.controller.policies.edf import place_by_deadline
from slackwater.services.controller.policies.scheme import place_tasks
from slackwater.services.controller.policies.view import AggregatorView, ClusterView, JobView

A = AggregatorId("a")


def job(name: str, iteration_s: float, slot_s: float, limit: float, on_a: bool = False) -> JobView:
    return JobView(
        id=JobId(name),
        servers=1,
        iteration_s=iteration_s,
        task_cpu_s=(slot_s,),
        places=(A if on_a else None,),
        loss_limit=limit,
    )


def view(*jobs: JobView, limit: float) -> ClusterView:
    return ClusterView(
        aggregators=(AggregatorView(A, 1.0),),
        jobs=jobs,
        new_share=1.0,
        new_max=9,
        loss_limit=limit,
    )


@pytest.mark.parametrize(
    ("cluster", "tenant", "shares"),
    [(0.1, 0.0, False), (0.2, 0.0, True), (0.2, 0.1, False), (0.1, 0.2, True)],
)
def test_five_in_a_cycle_of_twelve_is_for_tenants_that_may_lose_a_sixth(
    cluster: float, tenant: float, shares: bool
) -> None:
    """The limit of the job that is stretched counts, in either order."""
    short, long = job("short", 5.0, 1.0, tenant), job("long", 12.0, 3.0, 0.0)
    settled = replace(long, places=(A,))
    assert (place_tasks(view(settled, limit=cluster), short)[0][0] == "a") == shares
    settled = replace(short, places=(A,))
    assert (place_tasks(view(settled, limit=cluster), long)[0][0] == "a") == shares


def test_by_deadline_a_tenant_that_may_lose_little_shares_with_less() -> None:
    """First layers, needed as soon as they are pushed: one of 0.2 and one of 0.3 are both in time
    if one of the two may wait for the other, not if neither may."""
    patient, strict = (job(name, 1.0, 0.2, limit) for name, limit in (("p", 0.5), ("s", 0.05)))
    resident = job("resident", 1.0, 0.3, 0.5, on_a=True)
    assert place_by_deadline(view(resident, limit=0.1), patient)[0][0] == "a"
    assert place_by_deadline(view(resident, limit=0.1), strict)[0][0] == "a"
    tight = job("resident", 1.0, 0.3, 0.05, on_a=True)
    assert place_by_deadline(view(tight, limit=0.1), strict)[0][0] == "new#0"
    assert place_by_deadline(view(tight, limit=0.5), patient)[0][0] == "a"


def test_the_report_says_what_each_tenants_jobs_used_and_lost_in_their_last_windows() -> None:
    """One job of `a` lost more than the tenant's limit; of `b` nothing was measured yet."""
    harness = Harness(Pool(8))
    for id, tenant, limit in (("j", "a", 0.05), ("k", "a", 0.05), ("l", "", 0.0), ("m", "b", 0.0)):
        spec = JobSpec(id=id, servers=2, workers=2, tenant=tenant)
        order = PlaceJob(spec=spec, tensors=placed(id, 2).tensors, loss_limit=limit)
        assert harness.ask(order) == Ok()
        harness.profile(id, [0.01, 0.01])
        harness.migrated(id)
    for id, iteration_s in (("j", 1.08), ("k", 1.01), ("l", 0.95)):
        harness.window(id, iteration_s, used_cpu=0.02, used_slots=0.2)
    (report,) = [
        effect.message
        for effect in harness.tick()
        if isinstance(effect, Publish) and isinstance(effect.message, ClusterReport)
    ]
    nameless, ours = report.tenants
    assert (nameless.tenant, nameless.jobs, nameless.beyond) == ("", 1, 0)
    assert nameless.loss == 0.0, "faster than when it was profiled: nobody gains by sharing"
    assert (ours.tenant, ours.jobs, ours.beyond) == ("a", 2, 1)
    assert (ours.cpu, ours.slots) == pytest.approx((0.04, 0.4))
    assert ours.loss == pytest.approx(1 - 1 / 1.08)
