"""Slots played out: when they are used, which the utilisation of a job's own servers is read from,
and that they follow the plans that live aggregators are told."""

from itertools import pairwise

import pytest

from slackwater.loadgen.simulator.pool.slots import SlotJob, SlotRun, SlotTask, losses
from slackwater.schemas.base import ClusterId, JobId
from slackwater.schemas.placement import JobSlotPlan, SlotPlan
from slackwater.services.controller.policies.view import Order

SHARES = {"s0": 0.5, "s1": 0.5}
SLACK = 0.1 / 0.9


def test_the_spans_of_a_job_alone_are_its_updates_and_no_two_overlap_on_a_server() -> None:
    """0.1 and 0.2 CPU seconds on half a core each, once an iteration."""
    job = SlotJob("j", 1.0, (SlotTask("s0", 0.1, 0.0), SlotTask("s1", 0.2, 0.5)))
    run = SlotRun([job], SHARES, "arrival", until_s=10.0)
    run.spans = []
    iterations = len(run.iterations_s()["j"])
    for server, slot_s in (("s0", 0.2), ("s1", 0.4)):
        spans = [(begin, end) for name, begin, end in run.spans if name == server]
        assert len(spans) >= iterations
        assert [end - begin for begin, end in spans] == pytest.approx([slot_s] * len(spans))
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_nothing_is_kept_unless_asked_for() -> None:
    run = SlotRun([SlotJob("j", 1.0, (SlotTask("s0", 0.1, 0.0),))], SHARES, "arrival", 5.0)
    run.iterations_s()
    assert run.spans is None


@pytest.mark.parametrize("cycle_s", [1.0, 0.0], ids=["cyclic", "deadline"])
def test_plans_hold_a_job_back_that_pushes_more_often_than_it_was_profiled_to(
    cycle_s: float,
) -> None:
    """The neighbour keeps its speed, as under an aggregator that was told them
    (test_tenant_isolation.py). Run as it comes, the neighbour loses more than the limit."""
    good = SlotJob("good", 0.8, (SlotTask("s0", 0.1, 0.0),), 1.0, SLACK)
    bad = SlotJob("bad", 1e-3, tuple(SlotTask("s0", 0.06, 0.0) for _ in range(4)), 1.0, SLACK)
    shares = {"s0": 0.5}
    plan = SlotPlan(
        cluster=ClusterId("c"),
        number=1,
        cycle_s=cycle_s,
        slack=SLACK,
        jobs=tuple(JobSlotPlan(job=JobId(each.id), every_s=1.0) for each in (good, bad)),
    )
    order: Order = "cyclic" if cycle_s else "deadline"
    held = losses([good, bad], shares, order, 120.0, {"s0": plan})
    assert held["good"] <= 0.1
    assert held["bad"] < 0.0, "it runs ahead on what nobody needs"
    assert losses([good, bad], shares, "arrival", 120.0)["good"] > 0.1
