"""Quotas under policies that know none: each tenant's part of the cluster, and whole runs."""

from collections.abc import Sequence
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.decisions.inputs import write_inputs
from tests.sim.submissions import changed, submission

from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.loadgen.simulator.gpu.audit import audit
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Costs, Engine, Result, Settings
from slackwater.loadgen.simulator.gpu.eventlog import event_log
from slackwater.loadgen.simulator.gpu.failures import Failures
from slackwater.loadgen.simulator.gpu.jobmodels.applications import Application, read_applications
from slackwater.loadgen.simulator.gpu.jobmodels.base import JobModel
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.simulator.gpu.jobmodels.profiles import Options, ProfilesModel
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.scheduling import POLICY_FACTS_BYTES_MAX
from slackwater.services.master.scheduling.policies.colocation import Colocated
from slackwater.services.master.scheduling.policies.tiresias_artifact import Lists
from slackwater.services.master.scheduling.registry import make, names
from slackwater.services.master.scheduling.rules import honours_of
from slackwater.services.master.scheduling.scheduler import Scheduler
from slackwater.services.master.scheduling.tenants import Divided, Kept, Sizing, divide, share_out
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

DIVISIBLE = [
    ("equal-share", {}), ("hell", {}), ("hell", {"mode": "moldable"}), ("jsq-chunk", {}),
    ("knee", {}), ("knee", {"mode": "moldable"}), ("optimus", {}), ("pollux", {"steps": "5"}),
    ("srpt", {}), ("tiresias-artifact", {}), ("waterfill", {}),
]  # fmt: skip
NODES = [(4, ""), (2, ""), (2, "")]
CLUSTER = Cluster(NODES).view
"""Eight GPUs."""


def job(name: str, least: int, most: int, tenant: str, on: Allocation = (), **more: Any) -> JobView:
    return JobView(
        id=JobId(name), number=ord(name), submitted_s=0.0, gpus=least, gpus_min=least,
        gpus_max=most, tenant=tenant, allocation=on, remaining_s_then=1000.0, **more,
    )  # fmt: skip


def view(rules: Rules, *jobs: JobView, now_s: float = 60.0) -> View:
    free = [node.gpus for node in CLUSTER.nodes]
    for each in jobs:
        for node, gpus in each.allocation:
            free[node] -= gpus
    return View(now_s, CLUSTER, {each.id: each for each in jobs}, free, None, rules)


# Parts --------------------------------------------------------------------------------------------

QUOTAS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 8), min_size=1)


@st.composite
def situations(draw: st.DrawFn) -> View:
    """Jobs of three tenants, some of them running anywhere, some of these protected."""
    free = [node.gpus for node in CLUSTER.nodes]
    jobs = []
    for number in range(draw(st.integers(0, 7))):
        least = draw(st.integers(1, 5))
        most = least + draw(st.integers(0, 4))
        on: dict[int, int] = {}
        for node in draw(st.lists(st.integers(0, 2), max_size=most)):
            on[node] = on.get(node, 0) + (free[node] > 0)
            free[node] -= free[node] > 0
        held = tuple(sorted((node, gpus) for node, gpus in on.items() if gpus))
        if sum(on.values()) < least:
            for node, gpus in held:
                free[node] += gpus
            held = ()
        jobs.append(
            job(
                chr(97 + number), least, most, draw(st.sampled_from("abc")), held,
                since_s=draw(st.sampled_from([0.0, 50.0])), priority=draw(st.integers(0, 1)),
            )
        )  # fmt: skip
    rules = Rules(draw(QUOTAS), draw(st.booleans()), draw(st.sampled_from([0, 30])))
    return View(60.0, CLUSTER, {each.id: each for each in jobs}, free, None, rules)


def held_of(jobs: Sequence[JobView]) -> int:
    return sum(each.held_gpus for each in jobs)


@given(situation=situations())
def test_the_parts_keep_the_quotas(situation: View) -> None:
    """None beyond the cluster; where nobody is protected, none beyond its quota without borrowing,
    and each owner has its own where the quotas fit the cluster."""
    rules, jobs = situation.rules, situation.jobs.values()
    of = {tenant: [each for each in jobs if each.tenant == tenant] for tenant in "abc"}
    protected = [each for each in jobs if rules.protects(each, 60.0)]
    gpus, short = share_out(situation, of)
    assert sum(gpus.values()) <= 8
    for tenant, mine in of.items():
        quota = rules.quotas.get(tenant, 0)
        could_use = sum(each.gpus_max for each in mine if each.gpus_min <= quota)
        if not protected and sum(rules.quotas.values()) <= 8:
            assert gpus[tenant] >= min(quota, could_use)
            assert not short
        if not rules.borrowing and not protected:
            assert gpus[tenant] <= quota
        assert gpus[tenant] >= held_of([each for each in mine if each in protected])


@given(situation=situations(), sizing=st.sampled_from(["rigid", "moldable", "malleable"]))
def test_parts_lie_side_by_side_on_the_machines(situation: View, sizing: Sizing) -> None:
    parts = divide(situation, sizing)
    used = [0] * len(CLUSTER.nodes)
    for tenant, part in parts.views.items():
        mine = list(part.jobs.values())
        assert {each.tenant for each in mine} == {tenant}
        assert part.cluster.gpus == sum(part.free) + held_of(mine) <= parts.gpus[tenant]
        for index, node in enumerate(part.cluster.nodes):
            held = sum(dict(each.allocation).get(index, 0) for each in mine)
            assert node.gpus == part.free[index] + held
            used[index] += node.gpus
    assert all(gpus <= node.gpus for gpus, node in zip(used, CLUSTER.nodes, strict=True))
    for id, shown in parts.cleared.items():
        before = situation.jobs[id]
        assert not situation.rules.protects(before, 60.0)
        assert shown.held_gpus < before.held_gpus
        assert not shown.allocation or (
            sizing == "malleable" and shown.held_gpus >= before.gpus_min
        )
        assert shown.remaining_s(60.0) == before.remaining_s(60.0)


def test_a_part_prefers_machines_that_its_jobs_run_on_and_gpus_that_they_can_use() -> None:
    nodes = (NodeView(0, NodeId("n0"), 4, "t4"), NodeView(1, NodeId("n1"), 4, "v100"))
    cluster = ClusterView(nodes, 8, ("t4", "v100"), 4)
    jobs = [
        job("a", 2, 2, "x", ((1, 2),)),
        job("b", 2, 2, "x"),
        job("c", 4, 4, "y", speeds={"t4": 1.0}),
    ]
    rules = Rules({"x": 4, "y": 4}, borrowing=False)
    asked = View(0.0, cluster, {each.id: each for each in jobs}, [4, 2], None, rules)
    parts = divide(asked)
    assert [node.gpus for node in parts.views["x"].cluster.nodes] == [0, 4]
    assert [node.gpus for node in parts.views["y"].cluster.nodes] == [4, 0]


def test_quotas_beyond_the_cluster_leave_room_for_a_whole_gang() -> None:
    """Eight GPUs dealt evenly among three owners would hold none of their gangs of six."""
    waiting = {tenant: [job(tenant, 6, 6, tenant)] for tenant in "abc"}
    asked = view(Rules(dict.fromkeys("abc", 6)), *(jobs[0] for jobs in waiting.values()))
    assert share_out(asked, waiting) == ({"a": 6, "b": 1, "c": 1}, True)


# Decisions ----------------------------------------------------------------------------------------

HALVES = Rules({"a": 4, "b": 4})


def test_an_owner_takes_back_what_it_lent_and_elastic_jobs_shrink() -> None:
    """The first job has borrowed everything; the other tenant's arrival leaves it its own half."""
    scheduler = Scheduler(make("waterfill"), HALVES)
    alone = job("p", 1, 8, "a")
    assert sum(gpus for _, gpus in scheduler.decide(view(HALVES, alone)).start["p"]) == 8
    runs = job("p", 1, 8, "a", ((0, 4), (1, 2), (2, 2)))
    decision = scheduler.decide(view(HALVES, runs, job("q", 4, 4, "b")))
    assert sum(gpus for _, gpus in decision.resize["p"]) == 4
    assert sum(gpus for _, gpus in decision.start["q"]) == 4
    assert not decision.pause


def test_a_whole_gang_stops_for_the_owner_and_one_in_its_protected_minute_does_not() -> None:
    rules = Rules({"a": 4, "b": 4}, min_run_s=30)
    borrowed = [job("p", 4, 4, "a", ((0, 4),)), job("q", 4, 4, "a", ((1, 2), (2, 2)), since_s=40.0)]
    owner = job("r", 4, 4, "b")
    scheduler = Scheduler(make("tiresias-artifact"), rules)
    decision = scheduler.decide(view(rules, *borrowed, owner))
    assert (decision.pause, set(decision.start)) == (("p",), {"r"})
    both = [msgspec.structs.replace(each, since_s=40.0) for each in borrowed]
    later = Scheduler(make("srpt"), rules).decide(view(rules, *both, owner))
    assert (later.pause, later.start, later.wake_s) == ((), {}, 70.0)


def test_a_policy_that_gives_each_job_what_it_asks_for_has_room_for_all_of_it() -> None:
    """Its bounds mean nothing there: in a part between them the job would wait for ever."""
    scheduler = Scheduler(make("tiresias-artifact"), Rules({"a": 2, "b": 6}))
    wide = msgspec.structs.replace(job("p", 1, 8, "a"), gpus=4)
    assert sum(n for _, n in scheduler.decide(view(HALVES, wide)).start["p"]) == 4


def test_between_rounds_nobody_is_cleared() -> None:
    """The GPUs would idle until the policy decides."""
    scheduler = Scheduler(make("tiresias-artifact"), HALVES)
    jobs = [job("p", 4, 4, "a", ((0, 4),)), job("q", 4, 4, "a", ((1, 2), (2, 2)))]
    decision = scheduler.decide(view(HALVES, *jobs, job("r", 4, 4, "b"), now_s=90.0))
    assert (decision.pause, decision.start, decision.wake_s) == ((), {}, 120.0)


def test_a_job_beyond_a_quota_is_told_so() -> None:
    """Four GPUs idle, which its tenant may not have; one of a tenant without any waits for ever."""
    strict = Rules({"a": 4, "b": 4}, borrowing=False)
    jobs = [job("p", 4, 4, "a", ((0, 4),)), job("q", 2, 2, "a"), job("r", 1, 1, "c")]
    scheduler = Scheduler(make("hell"), strict)
    scheduler.decide(view(strict, *jobs))
    own, none = scheduler.explain(view(strict, *jobs))
    assert (own.job, own.rule) == ("q", "quota")
    assert own.text.startswith("tenant a has 4 GPUs now, 4 of its own; ")
    assert (none.job, none.rule, none.text) == (
        "r",
        "quota",
        "tenant c has 0 GPUs now, 0 of its own",
    )


def test_each_tenants_facts_outlast_the_scheduler() -> None:
    """Moldable sizes: the job goes on with the size that it was given before the restart."""
    moldable = make("knee", {"mode": "moldable"})
    first = Scheduler(moldable, HALVES)
    started = first.decide(view(HALVES, job("p", 1, 8, "a"), job("q", 1, 8, "b")))
    assert set(started.start) == {"p", "q"}
    second = Scheduler(moldable, HALVES)
    second.restore(first.durable())
    assert second.durable() == first.durable() != b""
    with pytest.raises(Rejected, match="are not durable facts of knee"):
        Scheduler(moldable).restore(first.durable())
    with pytest.raises(Rejected, match="the facts of tenant 'a' are not those of jsq-chunk"):
        Scheduler(make("jsq-chunk"), HALVES).restore(first.durable())
    with pytest.raises(Rejected, match="optimus keeps no durable facts"):
        Scheduler(make("optimus"), HALVES).restore(first.durable())


def test_facts_of_many_tenants_stay_within_what_a_record_holds() -> None:
    """Three tenants whose policy keeps nearly half of it each: the last one's are left out."""
    tenants = Divided(make("tiresias-artifact"))
    ids = [JobId(f"job-{number:06}") for number in range(10_000)]
    memory = {name: Kept(Lists(first=ids)) for name in "abc"}
    facts = tenants.durable(memory)
    assert facts is not None
    assert sorted(facts.tenants) == ["a", "b"]
    assert len(msgspec.msgpack.encode(facts)) <= POLICY_FACTS_BYTES_MAX
    assert tenants.restored(facts)["b"].memory.first == ids


class Sharer:
    """A policy that claims to be divisible, and lets jobs share."""

    divisible = True

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
        places: Allocation = ((0, 4),)
        return Plan(dict.fromkeys(view.jobs, places), dict.fromkeys(view.jobs, "g")), memory

    def explain(self, view: View, memory: Any) -> list[Pending]:
        return []


def test_a_policy_whose_jobs_share_gpus_is_not_divisible() -> None:
    with pytest.raises(PlanRefused, match="Sharer lets jobs share GPUs"):
        Scheduler(Sharer(), HALVES).decide(view(HALVES, job("p", 4, 4, "a"), job("q", 4, 4, "a")))


def test_policies_that_keep_no_quotas_say_so_by_name() -> None:
    """Two let jobs share GPUs, and one scales the cluster."""
    refused = {name for name in names() if "quotas" not in honours_of(make(name))}
    assert refused == {"harmony", "naive-colocation"}
    others = [make(name) for name in refused]
    for policy in (*others, Colocated(make("fifo")), make("pollux", {"scale": "true"})):
        with pytest.raises(ConfigRejected, match="does not keep tenants' quotas"):
            Scheduler(policy, HALVES)


# Whole runs ---------------------------------------------------------------------------------------

WORLDS = {
    "strict": Settings(rules=Rules({"a": 4, "b": 4}, borrowing=False)),
    "borrowed": Settings(rules=Rules({"a": 5, "b": 2}), costs=Costs(restart_s=10)),
    "protected": Settings(rules=Rules({"a": 4, "b": 4}, min_run_s=100)),
    "failing": Settings(
        rules=Rules({"a": 4, "b": 4}), failures=Failures(8000, 300, 60, 1),
        costs=Costs(restart_s=10),
    ),
}  # fmt: skip
SHAPES = st.lists(
    st.tuples(
        st.integers(0, 200), st.integers(1, 4), st.integers(1, 1500), st.sampled_from("ab"),
        st.booleans(),
    ),
    min_size=1, max_size=10,
)  # fmt: skip


Profiles = dict[str, Application]


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Profiles:
    folder = tmp_path_factory.mktemp("profiles")
    write_inputs(folder)
    return read_applications(folder / "profiles")


def run(
    name: str,
    options: dict[str, str],
    jobs: Sequence[Submission],
    world: Settings,
    profiles: Profiles,
) -> Result:
    policy = make(name, options)
    model: JobModel = FixedModel()
    if name in ("optimus", "pollux"):
        model = ProfilesModel.of(profiles, Options(adaptive=name == "pollux"))
    return Engine(jobs, Cluster(NODES), policy, model, world).run()


@pytest.mark.parametrize("world", sorted(WORLDS))
@pytest.mark.parametrize(("name", "options"), DIVISIBLE)
@settings(max_examples=10)
@given(shapes=SHAPES)
def test_quotas_hold_in_whole_runs(
    name: str, options: dict[str, str], world: str, profiles: Profiles, shapes: list[Any]
) -> None:
    """The auditor, who shares no code, finds nothing; every job ends; a rerun is the same.

    Pollux takes some seconds: goodput functions are fitted, and a round is a search."""
    if name == "jsq-chunk":
        options = {"chunk": "4"}
    jobs, at_s = [], 0
    for number, (gap_s, gpus, duration_s, tenant, elastic) in enumerate(shapes):
        at_s += gap_s
        jobs.append(
            submission(
                number, submit_s=at_s, gpus=gpus, duration_s=duration_s,
                gpus_min=1 if elastic else gpus, gpus_max=8 if elastic else gpus, tenant=tenant,
                model="small", batch_size=100,
            )
        )  # fmt: skip
    if world == "borrowed" or name == "optimus":
        jobs = [changed(each, gpus_min=1) for each in jobs]
    result = run(name, options, jobs, WORLDS[world], profiles)
    log = event_log(result, name, "fixed", NODES, exact=False, rules=WORLDS[world].rules)
    assert audit(log) == []
    assert all(outcome.end_s < inf for outcome in result.outcomes)
    assert run(name, options, jobs, WORLDS[world], profiles).segments == result.segments
