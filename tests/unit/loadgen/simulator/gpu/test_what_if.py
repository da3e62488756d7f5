"""Play a live cluster's jobs under another policy: the snapshot, and both plays."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.simulator.gpu.outcome import Begun
from slackwater.loadgen.simulator.gpu.what_if import (
    Situation,
    compared,
    measured_restarts,
    play,
    situation,
)
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import NodeInfo, WorkerHeartbeat
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.job_states import JobState
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.progress import JobProgress
from slackwater.services.master.scheduling.view import NO_RULES, Plan, Rules, View

NOW_S = 1_700_000_000.25
ASSUME_S = 1000.0


def node(name: str, gpus: int, alive: bool = True, faults: int = 0, cores: float = 0.0) -> NodeInfo:
    told = tuple(
        Gpu(index=n, id=f"{name}-{n}", type="fake", fault="it fell" if n < faults else "")
        for n in range(gpus)
    )
    beat = WorkerHeartbeat(
        service="worker",
        id=name,
        incarnation=1,
        at_s=NOW_S,
        node=NodeId(name),
        slots=8,
        gpus=told,
        cores=cores,
    )
    return NodeInfo(alive=alive, heartbeat=beat)


def job(
    id: str,
    gpus: int,
    submitted_s: float,
    on: tuple[tuple[str, int], ...] = (),
    state: JobState = "pending",
    held: bool = False,
    gpu_s: float = 0.0,
    **spec: Any,
) -> JobRecord:
    allocation = tuple((NodeId(name), count) for name, count in on)
    return JobRecord(
        spec=JobSpec(id=id, gpus=gpus, workers=gpus, program=("train",), **spec),
        state="running" if on else state,
        submitted_s=NOW_S + submitted_s,
        started_s=NOW_S + submitted_s if on else 0.0,
        since_s=NOW_S + submitted_s,
        allocation=allocation,
        held=held,
        gpu_s=gpu_s,
    )


def left(eta_s: float) -> JobProgress:
    return JobProgress(iteration=1, iterations=10, speed=1.0, eta_s=eta_s)


def taken(*records: JobRecord, nodes: tuple[NodeInfo, ...] = (), **etas: float) -> Situation:
    progress = {JobId(id): left(eta_s) for id, eta_s in etas.items()}
    return situation(records, progress, nodes or (node("n1", 4),), NOW_S, ASSUME_S)


def test_a_running_job_goes_on_with_what_it_holds_and_has_had() -> None:
    now = taken(job("a", 2, -60.0, on=(("n1", 2),), gpu_s=500.0), a=30.0)
    (seen,) = now.begun.values()
    assert seen.allocation == ((0, 2),)
    assert (seen.since_s, seen.attained_gpu_s(0)) == (-60, 620)
    assert (now.live["a"].remaining_s, now.live["a"].assumed) == (30.0, False)
    assert play(now, "fifo", {}, NO_RULES) == {"a": 30}


def test_work_that_nobody_tells_is_assumed() -> None:
    now = taken(job("a", 2, -60.0, on=(("n1", 2),)), job("b", 4, -50.0))
    assert [(each.remaining_s, each.assumed) for each in now.live.values()] == [
        (ASSUME_S, True), (ASSUME_S, True),
    ]  # fmt: skip
    assert play(now, "fifo", {}, NO_RULES) == {"a": ASSUME_S, "b": 2 * ASSUME_S}


def test_an_eta_on_other_gpus_than_it_asks_for_is_converted() -> None:
    grown = job("a", 1, -60.0, on=(("n1", 4),), adaptive=True, gpus_max=4)
    now = taken(grown, a=30.0)
    assert now.live["a"].remaining_s == 120.0
    assert play(now, "fifo", {}, NO_RULES)["a"] in (30, 120)


def test_another_policy_pauses_a_large_job_for_small_ones() -> None:
    now = taken(job("big", 4, -60.0, on=(("n1", 4),)), job("small", 1, -5.0), big=500.0)
    endings, _ = compared(now, play(now, "fifo", {}, NO_RULES), play(now, "sf", {}, NO_RULES))
    assert [(each.job.id, each.ends_s, each.would_end_s) for each in endings] == [
        ("big", 500, 1500), ("small", 1500, 1000),
    ]  # fmt: skip
    assert [each.difference_s for each in endings] == [1000, -500]
    protected = play(now, "sf", {}, Rules(min_run_s=200))
    assert protected["small"] > 1000


def test_a_job_that_no_node_could_ever_hold_is_left_out_and_blocks_nobody() -> None:
    """The master hides it in the same way."""
    nodes = [node("n1", 2), node("n2", 2)]
    large = job("large", 4, -5.0, within="node")
    now = situation([large, job("small", 1, -1.0)], {}, nodes, NOW_S, ASSUME_S)
    assert now.left_out["large"].startswith("it asks for 4 GPUs of one type in one node, and")
    assert play(now, "fifo", {}, NO_RULES) == {"small": ASSUME_S}


def test_a_job_that_no_policy_ever_starts_is_left_out_and_hides_no_other() -> None:
    """Its tenant has no GPUs."""
    large, rules = job("large", 4, -5.0, tenant="poor"), Rules({"": 4, "poor": 0}, borrowing=False)
    now = taken(large, job("small", 1, -1.0))
    endings, left_out = compared(now, play(now, "fifo", {}, rules), play(now, "sf", {}, rules))
    assert [each.job.id for each in endings] == ["small"]
    assert "neither policy ever starts it" in left_out["large"]
    alone = taken(large)
    with pytest.raises(Rejected, match="job large: neither policy"):
        compared(alone, *[play(alone, "fifo", {}, rules)] * 2)


def test_starts_and_changes_cost_what_a_restart_is_said_to_cost() -> None:
    """The job that keeps its GPUs pays nothing; one that is paused pays when it goes on."""
    now = taken(job("big", 4, -60.0, on=(("n1", 4),)), job("small", 1, -5.0), big=500.0)
    assert play(now, "fifo", {}, NO_RULES, 30) == {"big": 500, "small": 1530}
    assert play(now, "sf", {}, NO_RULES, 30) == {"big": 1560, "small": 1030}


def test_a_job_that_is_not_adaptive_keeps_the_size_that_it_was_started_with() -> None:
    """The simulator shows it as the master does: waiting it may get 1 to 4 GPUs, then no others."""
    now = taken(job("a", 2, -5.0, gpus_min=1, gpus_max=4))
    seen = []

    def watch(view: View, memory: object) -> tuple[Plan, None]:
        seen.extend((each.gpus_min, each.gpus_max, each.held_gpus) for each in view.jobs.values())
        start = {id: ((0, 3),) for id, each in view.jobs.items() if not each.allocation}
        return Plan(start, next_decision_s=view.now_s + 100), None

    watcher = type("Watcher", (), {"allocate": staticmethod(watch)})()
    Engine(now.jobs, Cluster(now.nodes), watcher, FixedModel(), begun=Begun(0, now.begun)).run()
    assert (seen[0], seen[-1]) == ((1, 4, 0), (3, 3, 3))


def test_cores_that_jobs_need_beside_their_gpus_count() -> None:
    """Two jobs of six cores do not fit on a machine of eight, whatever GPUs it has."""
    machine = node("n1", 4, cores=8.0)
    now = taken(*(job(id, 1, -5.0, cores=6.0) for id in "ab"), nodes=(machine,))
    assert play(now, "fifo", {}, NO_RULES) == {"a": ASSUME_S, "b": 2 * ASSUME_S}
    with pytest.raises(ConfigRejected, match="counts neither cores nor main memory"):
        play(now, "tiresias-artifact", {}, NO_RULES)


def test_attained_service_decides_from_the_first_moment_on() -> None:
    """Least attained service: the job that has had an hour loses its GPUs at once."""
    old = job("old", 4, -4000.0, on=(("n1", 4),), gpu_s=0.0)
    now = taken(old, job("new", 4, -5.0), old=500.0)
    ends_s = play(now, "tiresias-las", {"limits": "3600"}, NO_RULES)
    assert ends_s == {"new": 1000, "old": 1500}


def test_nodes_that_are_silent_or_have_faults_give_nothing() -> None:
    nodes = (node("n1", 4, faults=1), node("n2", 4, alive=False))
    now = taken(job("a", 2, -9.0), job("b", 4, -8.0), nodes=nodes)
    assert now.nodes == ((3, "fake"), (0, "fake"))
    assert now.left_out == {"b": "it asks for 4 GPUs of one type, and there are 3 that it can use"}


def test_jobs_that_no_policy_may_move_are_named_and_left_out() -> None:
    now = taken(
        job("kept", 3, -9.0, on=(("n1", 3),), preemptible=False),
        job("paused", 1, -8.0, state="paused", held=True),
        job("over", 1, -8.0, state="completed"),
        JobRecord(spec=JobSpec(id="slots", program=("train",))),
        job("a", 1, -7.0),
    )
    assert (now.nodes, list(now.live)) == (((1, "fake"),), ["a"])
    assert now.left_out["paused"] == "somebody paused it"
    assert "may not be paused" in now.left_out["kept"]


def test_without_a_job_it_says_how_to_have_one() -> None:
    with pytest.raises(Rejected, match="no job with GPUs runs or waits"):
        taken()
    with pytest.raises(Rejected, match="job a: somebody paused it"):
        taken(job("a", 1, -8.0, state="paused", held=True))


def test_a_priority_that_the_policy_ignores_is_refused() -> None:
    now = taken(job("a", 1, -7.0, priority=3))
    with pytest.raises(ConfigRejected, match="knows no priorities"):
        play(now, "tiresias-artifact", {}, NO_RULES)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5000), st.integers(0, 1)), min_size=1),
    st.sampled_from(["fifo", "best-effort", "sf", "gandiva", "tiresias-las"]),
)
def test_every_job_ends_no_sooner_than_its_work_allows(
    drawn: list[tuple[int, int, int]], policy: str
) -> None:
    free = {"n1": 4, "n2": 4}
    records, etas = [], {}
    for number, (gpus, eta_s, node_number) in enumerate(drawn):
        name, id = f"n{node_number + 1}", f"j{number}"
        on = ((name, gpus),) if free[name] >= gpus else ()
        free[name] -= gpus if on else 0
        records.append(job(id, gpus, -float(len(drawn) - number), on=on))
        if on:
            etas[id] = float(eta_s)
    now = taken(*records, nodes=(node("n1", 4), node("n2", 4)), **etas)
    ends_s = play(now, policy, {}, NO_RULES)
    assert set(ends_s) == {each.spec.id for each in records}
    assert all(ends_s[id] >= now.live[id].remaining_s for id in ends_s)


def test_a_restart_costs_the_median_of_what_was_measured_of_jobs_that_ended_too() -> None:
    records = [
        replace(job(f"j{n}", 1, -60.0, state=state), reallocation_s=cost_s)
        for n, (state, cost_s) in enumerate(
            [("completed", 4.0), ("paused", 9.0), ("pending", 0.0), ("failed", 5.0)]
        )
    ]
    assert measured_restarts(records) == (5.0, 3)
    assert measured_restarts(records[2:3]) == (0.0, 0)
