"""A plan is checked before it is applied, whichever policy made it."""

import pytest

from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.registry import make, names, options_of
from slackwater.services.master.scheduling.validation import PlanRefused, validate
from slackwater.services.master.scheduling.view import Allocation, JobView, Plan, View


def job(name: str, gpus: int, allocation: Allocation = (), group: str = "") -> JobView:
    return JobView(
        id=JobId(name), number=0, submitted_s=0, gpus=gpus, gpus_min=gpus, gpus_max=gpus,
        allocation=allocation, group=group,
    )  # fmt: skip


def view(*jobs: JobView, nodes: str = "2x4") -> View:
    cluster = Cluster([(4, "a"), (4, "b")] if nodes == "mixed" else [(4, ""), (4, "")])
    counted: set[str] = set()
    for one in jobs:
        if one.allocation and (not one.group or one.group not in counted):
            counted.add(one.group)
            for node, gpus in one.allocation:
                cluster.free[node] -= gpus
    return View(0, cluster.view, {j.id: j for j in jobs}, cluster.free)


def plan(**allocations: Allocation) -> Plan:
    return Plan({JobId(name): allocation for name, allocation in allocations.items()})


def test_a_stop_makes_room_for_a_start() -> None:
    validate(plan(a=(), b=((0, 4),)), view(job("a", 4, ((0, 4),)), job("b", 4)))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (plan(b=((0, 4),)), "needs 4 more GPUs on node n0, which has 0 idle"),
        (plan(b=((1, 3),)), "3 GPUs breaks its gang of 4..4"),
        (plan(b=((1, 2), (0, 2))), "ascending order"),
        (plan(b=((2, 4),)), "existing nodes"),
        (plan(c=((1, 4),)), "job c, which is not active"),
    ],
)
def test_bad_plans_are_refused(bad: Plan, why: str) -> None:
    with pytest.raises(PlanRefused, match=why):
        validate(bad, view(job("a", 4, ((0, 4),)), job("b", 4)))


def test_types_are_respected() -> None:
    picky = JobView(
        id=JobId("p"), number=0, submitted_s=0, gpus=2, gpus_min=2, gpus_max=2, speeds={"b": 1.0}
    )
    validate(plan(p=((1, 2),)), view(picky, nodes="mixed"))
    with pytest.raises(PlanRefused, match="cannot run on GPUs of type 'a'"):
        validate(plan(p=((0, 2),)), view(picky, nodes="mixed"))


def test_shared_gpus_count_once() -> None:
    held = job("a", 4, ((0, 4),), "g"), job("b", 4, ((0, 4),), "g")
    third = job("c", 4)
    validate(Plan({JobId("c"): ((0, 4),)}, {JobId("c"): "g"}), view(*held, third))
    with pytest.raises(PlanRefused, match="different GPUs"):
        validate(Plan({JobId("c"): ((1, 4),)}, {JobId("c"): "g"}), view(*held, third))
    with pytest.raises(PlanRefused, match="more GPUs on node n0"):
        validate(plan(c=((0, 4),)), view(*held, third))
    with pytest.raises(PlanRefused, match="more GPUs on node n0"):
        validate(plan(a=(), c=((0, 4),)), view(*held, third))
    validate(plan(a=(), b=(), c=((0, 4),)), view(*held, third))


def test_every_policy_can_be_made_by_name_with_its_defaults() -> None:
    for name in names():
        assert make(name, {}) is not None
        assert isinstance(options_of(name), dict)
