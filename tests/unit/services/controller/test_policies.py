"""Every registered policy: complete plans, nothing moved that is not open, bounds kept."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base.errors import ConfigRejected
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.services.controller.policies import load_policy
from slackwater.services.controller.policies.scheme import place_tasks
from slackwater.services.controller.policies.view import (
    AggregatorView,
    ClusterView,
    JobView,
    Plan,
    PlanRefused,
    validate,
)

A0, A1, A2 = (AggregatorId(f"a{n}") for n in range(3))


def view(
    *aggregators: AggregatorId,
    jobs: tuple[JobView, ...] = (),
    new_max: int = 8,
    forced: bool = False,
) -> ClusterView:
    return ClusterView(
        aggregators=tuple(AggregatorView(a, 0.1) for a in aggregators),
        jobs=jobs,
        new_share=0.1,
        new_max=new_max,
        loss_limit=0.1,
        forced=forced,
    )


def job(
    name: str = "j",
    costs_s: tuple[float, ...] = (),
    buckets: int = 4,
    places: tuple[AggregatorId | None, ...] | None = None,
    current: tuple[AggregatorId | None, ...] = (),
    servers: int = 2,
) -> JobView:
    return JobView(
        id=JobId(name),
        servers=servers,
        iteration_s=1.0 if costs_s else 0.0,
        task_cpu_s=costs_s,
        places=places or (None,) * (len(costs_s) or buckets),
        current=current,
    )


@pytest.mark.parametrize("name", ["cyclic", "edf", "static"])
def test_a_new_job_gets_its_servers_round_robin(name: str) -> None:
    """ps-lite's arrangement; cyclic only profiles on it."""
    plan, _ = load_policy(name).assign(view(A0), job(), None)
    assert plan.places == ("new#0", "new#1", "new#0", "new#1")
    assert plan.new == 2
    assert plan.temporary == (name != "static")


@pytest.mark.parametrize("name", ["cyclic", "edf", "static"])
def test_one_lost_server_is_replaced_by_one_and_nothing_else_moves(name: str) -> None:
    where = (A0, None, A0, None)
    subject = job(costs_s=(0.01,) * 4, places=where, current=where)
    plan, _ = load_policy(name).assign(view(A0), subject, None)
    assert plan.places == (A0, "new#0", A0, "new#0")
    none_left, _ = load_policy(name).assign(view(A0, new_max=0), subject, None)
    assert "new#0" not in none_left.places


def test_the_control_packs_every_job_on_one_aggregator_fit_or_not() -> None:
    first, _ = load_policy("packed").assign(view(), job(), None)
    assert (first.places, first.new) == (("new#0",) * 4, 1)
    full = job("r", costs_s=(0.2,), places=(A1,))
    second, _ = load_policy("packed").assign(view(A1, A2, jobs=(full,)), job(), None)
    assert (second.places, second.new) == ((A1,) * 4, 0)
    none, _ = load_policy("packed").assign(view(new_max=0), job(), None)
    assert none.places == ()
    assert none.reason


def test_a_job_alone_keeps_its_temporary_aggregators_and_with_others_it_shares() -> None:
    where = (A0, A1, A0, A1)
    alone = job(costs_s=(0.01,) * 4, current=where)
    policy = load_policy("cyclic")
    assert policy.assign(view(), alone, None)[0].places == where
    other = job("other", costs_s=(0.02,), places=(A2,))
    assert policy.assign(view(A2, jobs=(other,)), alone, None)[0].places == (A2,) * 4


def test_a_job_that_gets_only_new_aggregators_is_dealt_as_when_it_was_alone() -> None:
    """Regression: AlexNet, sent off the shared ones, had fc6 and fc7 packed on the first of two."""
    crowd = job("r", costs_s=(0.05,), places=(A0,))
    subject = replace(job(costs_s=(0.066, 0.031, 0.007)), excluded=frozenset({A0}))
    plan, _ = load_policy("cyclic").assign(view(A0, jobs=(crowd,)), subject, None)
    assert plan.new == 2
    assert plan.places == ("new#0", "new#1", "new#0")


def test_a_plan_that_fits_the_cycles_but_not_the_time_gives_the_job_its_own() -> None:
    """Stretched to 0.75 on one aggregator, a job of 0.7 counts one execution in a cycle of 1.4
    elsewhere and runs 1.87: the slots there would be used to more than all of the time. It used to
    be refused and asked for again for ever."""
    residents = (
        replace(job("c", costs_s=(0.0199,), places=(A0,)), iteration_s=0.75),
        replace(job("long", costs_s=(0.04,), places=(A1,)), iteration_s=1.4),
    )
    subject = replace(job(costs_s=(0.055, 0.05, 0.045), servers=2), iteration_s=0.7)
    cluster = view(A0, A1, jobs=residents)
    placed, new = place_tasks(cluster, subject)
    assert placed == {0: A0, 1: A1, 2: A1}
    with pytest.raises(PlanRefused, match=r"a1 would be used to 1\.4"):
        validate(Plan(tuple(placed[t] for t in range(3)), new), cluster, subject)
    plan, _ = load_policy("cyclic").assign(cluster, subject, None)
    assert (plan.new, plan.places) == (2, ("new#0", "new#1", "new#0"))
    nothing, _ = load_policy("cyclic").assign(replace(cluster, new_max=0), subject, None)
    assert nothing.places == ()
    assert nothing.reason


def test_a_job_that_loses_though_alone_gets_all_it_asked_for() -> None:
    lone = job(costs_s=(0.03, 0.02, 0.01), current=(A0, A0, A0))
    plan, _ = load_policy("cyclic").assign(view(A0), replace(lone, standalone=True), None)
    assert plan.places == (A0, "new#0", A0)


def test_a_forced_job_goes_to_the_least_loaded_fit_or_not() -> None:
    full = job("full", costs_s=(0.07, 0.01), places=(A0, A1))
    plan, _ = load_policy("cyclic").assign(view(A0, A1, jobs=(full,), forced=True), job(), None)
    assert plan.new == 0
    assert plan.places.count(A1) == 3  # 0.1 + 3 x 0.25 is more than 0.7
    shy = replace(job(), excluded=frozenset({A1}))
    away, _ = load_policy("cyclic").assign(view(A0, A1, forced=True), shy, None)
    assert set(away.places) == {A0}
    nowhere, _ = load_policy("cyclic").assign(view(forced=True), job(), None)
    assert nowhere.places == ()
    assert nowhere.reason


@pytest.mark.parametrize("name", ["cyclic", "edf", "static"])
@settings(max_examples=60)
@given(data=st.data())
def test_every_plan_passes_validation_and_is_the_same_each_time(
    name: str, data: st.DataObject
) -> None:
    here = [A0, A1, A2][: data.draw(st.integers(0, 3))]
    residents = tuple(
        job(f"r{n}", costs_s=(data.draw(st.sampled_from([0.01, 0.03])),), places=(a,))
        for n, a in enumerate(here)
    )
    costs = tuple(data.draw(st.lists(st.sampled_from([0.002, 0.01, 0.05]), max_size=6)))
    subject = job(costs_s=costs, servers=data.draw(st.integers(1, 4)))
    if not subject.places:
        return
    subject = replace(subject, excluded=frozenset(data.draw(st.sets(st.sampled_from([A0, A1])))))
    cluster = view(*here, jobs=residents, new_max=data.draw(st.integers(0, 6)))
    plan, _ = load_policy(name).assign(cluster, subject, None)
    validate(plan, cluster, subject)
    assert plan == load_policy(name).assign(cluster, subject, None)[0]


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(), "needs a reason"),
        (Plan(places=(A0,)), "1 of 2 buckets"),
        (Plan(places=(A0, "new#0"), new=9), "9 new aggregators of 8"),
        (Plan(places=(A0, "new#1"), new=1), "there is no aggregator 'new#1'"),
        (Plan(places=(A0, "a9")), "there is no aggregator 'a9'"),
        (Plan(places=(A0, A1)), "may not return to a1"),
        (Plan(places=(A0, A0)), "used to"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused_whoever_made_it(plan: Plan, why: str) -> None:
    resident = job("r", costs_s=(0.05,), places=(A0,))
    subject = replace(job(costs_s=(0.05, 0.05)), excluded=frozenset({A1}))
    with pytest.raises(PlanRefused, match=why):
        validate(plan, view(A0, A1, jobs=(resident,)), subject)


def test_a_plan_may_not_move_what_is_not_open() -> None:
    subject = job(costs_s=(0.01, 0.01), places=(A0, None))
    with pytest.raises(PlanRefused, match="bucket 0 is not open"):
        validate(Plan(places=(A1, A1)), view(A0, A1), subject)


def test_an_unknown_policy_is_refused_naming_those_that_exist() -> None:
    with pytest.raises(ConfigRejected, match="cyclic, edf, packed, static"):
        load_policy("roundest-robin")
