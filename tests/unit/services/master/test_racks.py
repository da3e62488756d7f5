"""Nodes and racks: GPUs of a job lie on one node, else in one rack, else anywhere; a job that must
lie together waits until it can, with the level that is missing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.master.test_gpu_dispatch import GpuHarness

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.embedded.cluster import ClusterOptions, _rack
from slackwater.loadgen.simulator.gpu.cluster import Cluster, racks_for
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.jobs import JobSpec
from slackwater.services.master.scheduling.policies.placement import Placer
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.scheduler import Scheduler
from slackwater.services.master.scheduling.shown import shown
from slackwater.services.master.scheduling.validation import PlanRefused, validate
from slackwater.services.master.scheduling.view import Plan, View


def view(free: list[int], racks: list[str]) -> View:
    """Machines with four GPUs each, so many of which are idle."""
    cluster = Cluster([(4, "")] * len(free), racks=racks)
    return View(0.0, cluster.view, {}, free)


@pytest.mark.parametrize(
    ("free", "gpus", "found"),
    [
        ([4, 2, 3, 4], 4, ((0, 4),)),  # One machine.
        ([2, 2, 1, 4], 4, ((3, 4),)),
        ([3, 1, 3, 3], 4, ((0, 3), (1, 1))),  # One rack, the tighter one.
        ([4, 1, 4, 4], 6, ((2, 4), (3, 2))),
        ([4, 4, 4, 4], 12, ((0, 4), (1, 4), (2, 4))),  # More than a rack has.
    ],
)
def test_a_gang_lies_on_one_machine_else_in_one_rack_else_anywhere(
    free: list[int], gpus: int, found: tuple[tuple[int, int], ...]
) -> None:
    seen = view(free, ["r1", "r1", "r2", "r2"])
    assert Placer(seen).place(gpus) == found


def test_a_job_that_must_lie_together_is_placed_nowhere_else() -> None:
    seen = view([3, 2, 3, 2], ["r1", "r1", "r2", "r2"])
    assert Placer(seen).place(4, within="node") == ()
    assert Placer(seen).place(5, within="rack") == ((0, 3), (1, 2))
    assert Placer(seen).place(6, within="rack") == ()
    assert Placer(seen).place(6) != ()
    assert Placer(seen).place(4, mode="no", within="rack") == ((0, 3), (1, 1))


@given(
    free=st.lists(st.integers(0, 4), min_size=2, max_size=8),
    gpus=st.integers(1, 16),
    mode=st.sampled_from(["prefer", "require", "no", "emptiest"]),
    within=st.sampled_from(["", "node", "rack"]),
    racks=st.integers(1, 4),
)
def test_a_placement_takes_idle_gpus_within_what_the_job_allows(
    free: list[int], gpus: int, mode: str, within: str, racks: int
) -> None:
    names = racks_for(len(free), min(racks, len(free)))
    found = Placer(view(free, names)).place(gpus, mode=mode, within=within)  # type: ignore[arg-type]
    assert all(count <= free[node] for node, count in found)
    assert sum(count for _, count in found) in (0, gpus)
    room = {"": sum(free), "node": max(free), "rack": max(
        sum(f for f, r in zip(free, names, strict=True) if r == name) for name in names
    )}  # fmt: skip
    if found:
        assert within != "node" or len(found) == 1
        assert within != "rack" or len({names[node] for node, _ in found}) == 1
    else:
        assert mode == "require" or gpus > room[within]


def test_machines_are_dealt_to_racks_as_they_stand() -> None:
    assert racks_for(5, 2) == ["r1", "r1", "r1", "r2", "r2"]
    options = ClusterOptions(nodes=4, racks=2)
    assert [_rack(options, n)["rack"] for n in range(4)] == ["r1", "r1", "r2", "r2"]
    assert _rack(ClusterOptions(nodes=4), 0) == {}


def test_policies_that_spread_refuse_a_job_that_must_lie_together() -> None:
    spec = JobSpec(id="a", gpus=2, workers=2, program=("train",), within="rack")
    job = shown(spec, 0, 0.0)
    Scheduler(make("tiresias-las")).admit(job)
    Scheduler(make("easy-backfill")).admit(job)
    with pytest.raises(ConfigRejected, match="must lie within one rack; leave `within` out"):
        Scheduler(make("pollux")).admit(job)
    with pytest.raises(ValueError, match="within: node without GPUs"):
        JobSpec(id="a", within="node")


def test_a_plan_that_spreads_such_a_job_is_refused() -> None:
    seen = view([4, 4, 4, 4], ["r1", "r1", "r2", "r2"])
    job = shown(JobSpec(id="a", gpus=2, workers=2, program=("t",), within="rack"), 0, 0.0)
    id = JobId("a")
    seen = View(0.0, seen.cluster, {id: job}, seen.free)
    validate(Plan({id: ((0, 1), (1, 1))}), seen)
    with pytest.raises(PlanRefused, match="not within one rack"):
        validate(Plan({id: ((1, 1), (2, 1))}), seen)


# Live ---------------------------------------------------------------------------------------------


class Racked(GpuHarness):
    """Nodes n1 and n2 in rack r1, n3 and n4 in r2, with two GPUs each."""

    def hear(self, *nodes: str) -> list[object]:
        effects: list[object] = []
        for node in nodes or ("n1", "n2", "n3", "n4"):
            gpus = tuple(Gpu(index=n, id=f"{node}/{n}", type="fake") for n in range(self.gpus))
            beat = WorkerHeartbeat(
                service="worker", id=node, incarnation=0, at_s=self.now_s, node=NodeId(node),
                slots=8, gpus=gpus, rack="r1" if node in ("n1", "n2") else "r2",
            )  # fmt: skip
            effects += self.see(beat)
        return effects

    def nodes_of(self, id: str) -> list[str]:
        return [node for node, _ in self.job(id).allocation]


def test_a_live_gang_is_kept_in_one_rack() -> None:
    harness = Racked()
    harness.submit("one", 1)
    harness.submit("two", 1)
    assert harness.nodes_of("one") == harness.nodes_of("two") == ["n1"]
    harness.submit("gang", 4)
    assert harness.nodes_of("gang") == ["n3", "n4"]


def test_why_names_the_level_that_is_missing() -> None:
    harness = Racked()
    harness.submit("one", 1)
    harness.submit("gang", 4)
    harness.submit("rack", 3, within="rack")
    assert harness.nodes_of("rack") == ["n1", "n2"]
    harness.submit("node", 2, within="node")
    assert harness.job("node").state == "pending"


def test_idle_gpus_of_two_racks_are_not_one_rack() -> None:
    harness = Racked()
    for id in "abcd":
        harness.submit(id, 1)
    harness.submit("e", 1)
    assert [harness.nodes_of(id)[0] for id in "abcde"] == ["n1", "n1", "n2", "n2", "n3"]
    harness.submit("gang", 3, within="rack")
    assert harness.nodes_of("gang") == ["n3", "n4"]
    other = Racked()
    other.submit("a", 3, within="rack")
    other.submit("b", 2, within="node")
    other.submit("c", 3, within="rack")
    assert other.job("c").state == "pending"
    assert "3 GPUs, 3 idle" in other.why("c")
    assert "enough GPUs are idle, but not in one rack (rule: fragmentation)" in other.why("c")


def test_a_job_that_no_rack_could_ever_hold_waits_and_blocks_nobody() -> None:
    harness = Racked()
    harness.submit("huge", 5, within="rack")
    harness.submit("wide", 3, within="node")
    harness.submit("plain", 1)
    assert harness.job("plain").state == "starting"
    assert "waits for 5 GPUs of one rack: the largest rack has 4" in harness.why("huge")
    assert "waits for 3 GPUs of one node: the largest node has 2" in harness.why("wide")
