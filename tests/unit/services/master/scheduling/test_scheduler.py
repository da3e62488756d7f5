"""The decision protocol: changes, memory, wake-ups, refusals, explanations, what is not forgotten.

Policies here are written for one test each; `test_every_policy` holds the registered ones to it.
"""

from collections.abc import Callable, Mapping
from math import inf, nan
from typing import Any

import msgspec
import pytest

from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.schemas.base import JobId, NodeId
from slackwater.services.master.scheduling.registry import make, names, register
from slackwater.services.master.scheduling.rules import EVERY_RULE, honours_of
from slackwater.services.master.scheduling.scheduler import Decision, Scheduler
from slackwater.services.master.scheduling.validation import PlanRefused
from slackwater.services.master.scheduling.view import (
    Allocation,
    ClusterView,
    JobView,
    NodeView,
    Pending,
    Plan,
    Rules,
    View,
)

Answer = Callable[[View, Any], Plan]


class Facts(msgspec.Struct, frozen=True):
    asked: int


class Scripted:
    """A policy that answers by a function, counts what it was asked, and keeps the views."""

    honours = EVERY_RULE
    facts = Facts

    def __init__(self, answer: Answer = lambda view, memory: Plan()) -> None:
        self.answer = answer
        self.views: list[View] = []
        self.memories: list[Any] = []

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
        self.views.append(view)
        self.memories.append(memory)
        return self.answer(view, memory), (memory or 0) + 1

    def explain(self, view: View, memory: Any) -> list[Pending]:
        return [Pending(i, "order", f"asked {memory} times", inf, "it waits") for i in view.jobs]

    def durable(self, memory: int) -> Facts | None:
        return Facts(memory)

    def restored(self, facts: Facts) -> int:
        return facts.asked


class Ignorant(Scripted):
    """A policy that declares nothing."""

    honours = frozenset()


NODES = tuple(NodeView(i, NodeId(f"n{i}"), 4) for i in range(2))
CLUSTER = ClusterView(NODES, 8, node_gpus_max=4)


def job(name: str, gpus: int = 4, allocation: Allocation = (), **more: Any) -> JobView:
    return JobView(
        id=JobId(name), number=ord(name), submitted_s=0, gpus=gpus, gpus_min=gpus, gpus_max=gpus,
        allocation=allocation, **more,
    )  # fmt: skip


def view(*jobs: JobView, now_s: float = 10, changed: Any = None, cluster: Any = CLUSTER) -> View:
    free = [node.gpus for node in cluster.nodes]
    shared: set[str] = set()
    for each in jobs:
        if each.group not in shared:
            for node, gpus in each.allocation:
                free[node] -= gpus
        if each.group:
            shared.add(each.group)
    return View(now_s, cluster, {each.id: each for each in jobs}, free, changed)


def plan(groups: Mapping[str, str] | None = None, **allocations: Allocation) -> Plan:
    labels = {JobId(i): label for i, label in (groups or {}).items()}
    return Plan({JobId(i): places for i, places in allocations.items()}, labels)


def ids(changed: Any) -> list[str] | None:
    return None if changed is None else sorted(changed)


def test_a_plan_becomes_starts_resizes_and_pauses_in_its_order() -> None:
    """A job that keeps what it has is left out."""
    policy = Scripted(
        lambda view, _: Plan(
            {
                JobId("b"): ((0, 2),),
                JobId("a"): (),
                JobId("d"): ((0, 2),),
                JobId("c"): ((1, 4),),
                JobId("e"): (),
            },
            next_decision_s=60,
            desired_nodes=3,
        )
    )
    jobs = [
        job("a", 4, ((0, 4),)), job("b", 2), job("d", 2), job("c", 4, ((1, 4),)), job("e", 4),
    ]  # fmt: skip
    assert Scheduler(policy).decide(view(*jobs)) == Decision(
        start={JobId("b"): ((0, 2),), JobId("d"): ((0, 2),)}, pause=(JobId("a"),), wake_s=60,
        desired_nodes=3,
    )  # fmt: skip
    shrink = Scripted(lambda view, _: plan(a=((0, 2),)))
    elastic = msgspec.structs.replace(job("a", 4, ((0, 4),)), gpus_min=1)
    assert Scheduler(shrink).decide(view(elastic)).resize == {JobId("a"): ((0, 2),)}


def test_a_job_that_changes_its_group_alone_is_resized() -> None:
    held = [job("a", 4, ((0, 4),), group="g"), job("b", 4)]
    policy = Scripted(lambda view, _: plan({"a": "h", "b": "h"}, a=((0, 4),), b=((0, 4),)))
    decision = Scheduler(policy).decide(view(*held))
    assert decision.resize == {JobId("a"): ((0, 4),)}
    assert decision.start == {JobId("b"): ((0, 4),)}
    assert decision.groups == {JobId("a"): "h", JobId("b"): "h"}


def test_changes_are_the_drivers_or_found_by_comparison() -> None:
    policy = Scripted()
    noting = Scheduler(policy)
    noting.decide(view(job("a"), changed=[JobId("a")]))
    noting.decide(view(job("a"), job("b"), changed=[JobId("b")]))
    noting.decide(view(job("a"), job("b"), changed=[]))
    assert [ids(v.changed) for v in policy.views] == [None, ["b"], []]
    policy = Scripted()
    comparing = Scheduler(policy)
    comparing.decide(view(job("a"), job("b")))
    comparing.decide(view(job("a"), job("b", 2), job("c")))
    comparing.decide(view(job("a"), job("b", 2)))
    assert [ids(v.changed) for v in policy.views] == [None, ["b", "c"], ["c"]]


def test_a_job_that_a_decision_touches_has_changed_even_if_it_was_not_carried_out() -> None:
    """The policy believes that the job runs; a view that says otherwise must reach it."""
    policy = Scripted(lambda view, memory: Plan() if memory else plan(a=((0, 4),)))
    scheduler = Scheduler(policy)
    assert scheduler.decide(view(job("a"), job("b"))).start
    scheduler.decide(view(job("a"), job("b")))
    scheduler.decide(view(job("b")))
    assert [ids(v.changed) for v in policy.views] == [None, ["a"], ["a"]]


@pytest.mark.parametrize("wake_s", [10, 9, -inf, nan])
def test_an_instant_that_does_not_come_is_refused(wake_s: float) -> None:
    policy = Scripted(lambda view, _: Plan(next_decision_s=wake_s))
    with pytest.raises(PlanRefused, match="which is not after 10 s"):
        Scheduler(policy).decide(view(job("a")))


def test_after_a_refused_plan_the_policy_compares_everything() -> None:
    """Its memory counts on a plan that nobody carried out; what is durable stays."""
    bad = iter([Plan(), plan(a=((0, 9),)), Plan(), Plan()])
    policy = Scripted(lambda view, _: next(bad))
    scheduler = Scheduler(policy)
    scheduler.decide(view(job("a"), changed=[]))
    with pytest.raises(PlanRefused, match="9 GPUs breaks its gang"):
        scheduler.decide(view(job("a"), changed=[]))
    for _ in range(2):
        scheduler.decide(view(job("a"), changed=[]))
    assert [ids(v.changed) for v in policy.views] == [None, [], None, []]
    assert policy.memories == [None, 1, 2, 3], "the count is durable here"


def test_rules_are_the_schedulers_whatever_the_view_says() -> None:
    policy = Scripted()
    Scheduler(policy, Rules(min_run_s=60)).decide(view(job("a")))
    assert policy.views[0].rules.min_run_s == 60


def test_explain_asks_with_the_memory_of_the_last_decision() -> None:
    scheduler = Scheduler(Scripted())
    scheduler.decide(view(job("a")))
    assert [(p.job, p.resource) for p in scheduler.explain(view(job("a")))] == [
        ("a", "asked 1 times")
    ]


def test_protected_jobs_are_left_as_they_are() -> None:
    runs = job("a", 4, ((0, 4),), since_s=5)
    stops = Scripted(lambda view, _: plan(a=()))
    with pytest.raises(PlanRefused, match="job a runs since 5 s and is protected for 60 s"):
        Scheduler(stops, Rules(min_run_s=60)).decide(view(runs, now_s=64))
    assert Scheduler(stops, Rules(min_run_s=60)).decide(view(runs, now_s=65)).pause == ("a",)
    moves = Scripted(lambda view, _: plan(a=((1, 4),)))
    with pytest.raises(PlanRefused, match="protected"):
        Scheduler(moves, Rules(min_run_s=60)).decide(view(runs, now_s=64))
    joins = Scripted(lambda view, _: plan({"a": "g", "b": "g"}, a=((0, 4),), b=((0, 4),)))
    assert Scheduler(joins, Rules(min_run_s=60)).decide(view(runs, job("b"), now_s=64)).start


def test_quotas_hold_whatever_the_policy_plans() -> None:
    starts = Scripted(lambda view, _: plan(b=((1, 4),)))
    held = [job("a", 4, ((0, 4),), tenant="x"), job("b", 4, tenant="x")]
    strict = Rules(quotas={"x": 4, "y": 4}, borrowing=False)
    with pytest.raises(PlanRefused, match="gives tenant 'x' 8 GPUs of its 4"):
        Scheduler(starts, strict).decide(view(*held))
    assert Scheduler(starts, Rules(quotas={"x": 4, "y": 4})).decide(view(*held)).start
    swap = Scripted(lambda view, _: plan(a=(), b=((1, 4),)))
    assert Scheduler(swap, strict).decide(view(*held)).start == {JobId("b"): ((1, 4),)}


def test_a_job_lies_on_one_gpu_type() -> None:
    nodes = (NodeView(0, NodeId("n0"), 4, "a"), NodeView(1, NodeId("n1"), 4, "b"))
    mixed = ClusterView(nodes, 8, ("a", "b"), 4)
    policy = Scripted(lambda view, _: plan(a=((0, 2), (1, 2))))
    with pytest.raises(PlanRefused, match="lies on GPUs of several types"):
        Scheduler(policy).decide(view(job("a"), cluster=mixed))


HOSTS = ClusterView(
    tuple(NodeView(i, NodeId(f"n{i}"), 4, "", 8.0, 64 * 2**30) for i in range(2)),
    8, node_gpus_max=4,
)  # fmt: skip


def test_a_machine_has_the_cores_and_memory_that_its_jobs_need() -> None:
    starts = Scripted(lambda view, _: plan(b=((0, 2),)))
    held = job("a", 2, ((0, 2),), cores=3.0)
    with pytest.raises(PlanRefused, match=r"puts job b on node n0, whose .* need 9\.0 cores of 8"):
        Scheduler(starts).decide(view(held, job("b", 2, cores=1.5), cluster=HOSTS))
    assert Scheduler(starts).decide(view(held, job("b", 2, cores=1.0), cluster=HOSTS)).start
    fat = job("b", 2, memory_bytes=40 * 2**30)
    with pytest.raises(PlanRefused, match=r"need 85899345920 bytes of memory of 68719476736"):
        Scheduler(starts).decide(view(fat, cluster=HOSTS))


@pytest.mark.parametrize("name", ["fifo", "best-effort", "srsf", "sf"])
def test_gpus_without_cores_beside_them_are_passed_by(name: str) -> None:
    """Six cores of eight are taken on the first machine: the job goes to the second, or waits."""
    held = job("a", 2, ((0, 2),), cores=3.0, remaining_s_then=1.0)
    asks = job("b", 2, cores=2.0, remaining_s_then=9.0)
    decision = Scheduler(make(name)).decide(view(held, asks, cluster=HOSTS))
    assert decision.start == {JobId("b"): ((1, 2),)}
    wide = job("b", 4, cores=2.0, remaining_s_then=9.0)
    assert Scheduler(make(name)).decide(view(held, wide, cluster=HOSTS)).start == {
        JobId("b"): ((1, 4),)
    }
    scheduler = Scheduler(make(name))
    large = view(held, job("b", 4, cores=2.5, remaining_s_then=9.0), cluster=HOSTS)
    assert scheduler.decide(large).start == {}
    (why,) = scheduler.explain(large)
    assert why.rule == "fragmentation"
    assert "beside the cores and the memory" in why.text


@pytest.mark.parametrize("name", names())
def test_every_policy_declares_its_rules_and_refuses_the_others(name: str) -> None:
    """By name and with a remedy, before anything is decided."""
    policy = make(name)
    honoured = honours_of(policy)
    nodes = (NodeView(0, NodeId("n0"), 4, "a"), NodeView(1, NodeId("n1"), 4, "b"))
    mixed = View(0, ClusterView(nodes, 8, ("a", "b"), 4), {}, [4, 4])
    asked: dict[str, Callable[[], object]] = {
        "quotas": lambda: Scheduler(policy, Rules(quotas={"a": 4})),
        "min_run_s": lambda: Scheduler(policy, Rules(min_run_s=60)),
        "priorities": lambda: Scheduler(policy).admit(job("a", priority=1)),
        "gpu_types": lambda: Scheduler(policy).decide(mixed),
        "cores_and_memory": lambda: Scheduler(policy).admit(job("a", cores=2.0)),
        "within": lambda: Scheduler(policy).admit(job("a", within="rack")),
    }
    assert asked.keys() == EVERY_RULE
    for rule, ask in asked.items():
        if rule in honoured:
            ask()
        else:
            with pytest.raises((Rejected, ConfigRejected), match=rf"^{name} .*; .*use a policy"):
                ask()


def test_a_policy_that_declares_nothing_honours_nothing() -> None:
    assert honours_of(Ignorant()) == frozenset()
    with pytest.raises(Rejected, match="does not keep tenants' quotas"):
        Scheduler(Ignorant(), Rules(quotas={"a": 1}))


def test_a_declaration_that_names_no_rule_is_refused() -> None:
    class Boaster(Scripted):
        honours = frozenset({"deadlines"})  # type: ignore[assignment]

    with pytest.raises(ConfigRejected, match="honours 'deadlines', which names no rule"):
        register("boaster")(Boaster)
    assert "boaster" not in names()


def test_what_is_durable_outlasts_the_scheduler() -> None:
    first = Scheduler(Scripted())
    assert first.durable() == b""
    first.decide(view(job("a")))
    first.decide(view(job("a")))
    policy = Scripted()
    second = Scheduler(policy)
    second.restore(first.durable())
    second.decide(view(job("a"), changed=[JobId("a")]))
    assert policy.memories == [2]
    assert policy.views[0].changed is None
    second.restore(b"")


def test_facts_of_another_policy_are_refused() -> None:
    with pytest.raises(Rejected, match=r"are not durable facts of Scripted .*; start without"):
        Scheduler(Scripted()).restore(msgspec.msgpack.encode({"lists": 1}))
    with pytest.raises(Rejected, match="fifo keeps no durable facts; start without them"):
        Scheduler(make("fifo")).restore(b"\x80")
