"""Members that nobody hears any more make room; a clock that was set back holds nothing up; one
tenant cannot have the whole queue."""

import msgspec
import pytest
from tests.unit.services.master.test_master_core import Harness, heartbeat, spec, submitted

from slackwater.common.base.limits import LOST_AFTER_S
from slackwater.schemas.base import AggregatorId, ClusterId, JobId, NodeId, Refused
from slackwater.schemas.cluster import (
    AggregatorList,
    AggregatorRecord,
    ClusterReport,
    ListAggregators,
    WorkerHeartbeat,
)
from slackwater.schemas.job_requests import CancelJob, JobAccepted, SubmitJob
from slackwater.services.master import clusters, nodes, pool, state
from slackwater.services.master.jobs import silent_node
from slackwater.services.master.members import KEPT_S, longest_silent, outdated


def test_the_one_that_was_silent_for_longest_makes_room() -> None:
    seen_s = [("a", 5.0), ("b", 1.0), ("c", 9.0)]
    assert longest_silent(seen_s, 10.0, 3.0) == "b"
    assert longest_silent(seen_s, 10.0, 9.0) is None
    assert longest_silent([], 10.0, 3.0) is None
    assert outdated(seen_s, KEPT_S + 5.5) == ["a", "b"]


def aggregators(harness: Harness) -> set[str]:
    answer = harness.answer(ListAggregators())
    assert isinstance(answer, AggregatorList)
    return {str(info.record.id) for info in answer.aggregators}


def test_a_new_aggregator_is_taken_in_where_a_thousand_dead_ones_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "AGGREGATORS_MAX", 3)
    harness = Harness()
    for id in ("a", "b", "c"):
        harness.see(heartbeat(id, harness.now_s))
        harness.now_s += 0.1
    harness.see(heartbeat("d", harness.now_s))
    assert aggregators(harness) == {"a", "b", "c"}  # All of them live.
    harness.tick(after_s=LOST_AFTER_S + 1.0)
    harness.see(heartbeat("c", harness.now_s))
    harness.see(heartbeat("d", harness.now_s))
    assert aggregators(harness) == {"b", "c", "d"}
    harness.tick(after_s=KEPT_S)
    harness.see(heartbeat("d", harness.now_s))
    harness.tick(after_s=KEPT_S - 1.0)
    assert aggregators(harness) == {"d"}


def test_an_aggregator_that_a_cluster_has_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "AGGREGATORS_MAX", 1)
    harness = Harness()
    harness.see(heartbeat("a", harness.now_s))
    members = harness.core.state.pool
    members._records[AggregatorId("a")] = AggregatorRecord(
        id=AggregatorId("a"), cluster=ClusterId("c1")
    )
    harness.tick(after_s=2 * KEPT_S)
    harness.see(heartbeat("b", harness.now_s))
    assert aggregators(harness) == {"a"}


def worker(id: str, at_s: float) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        service="worker", id=id, incarnation=0, at_s=at_s, node=NodeId(id), slots=1, running=()
    )


def test_a_new_node_is_taken_in_where_thousands_of_dead_ones_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "WORKER_NODES_MAX", 2)
    harness = Harness(node_silent_s=30.0)
    known = harness.core.state.nodes
    for id in ("n1", "n2", "n3"):
        harness.see(worker(id, harness.now_s))
        harness.now_s += 1.0
    assert known.seen_s(NodeId("n3")) is None
    harness.tick(after_s=31.0)
    harness.see(worker("n3", harness.now_s))
    assert known.seen_s(NodeId("n1")) is None
    assert known.seen_s(NodeId("n2")) is not None
    harness.tick(after_s=KEPT_S)
    assert [known.seen_s(NodeId(id)) is None for id in ("n1", "n2", "n3")] == [True, True, False]


def test_a_new_cluster_is_taken_in_where_dead_ones_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clusters, "CLUSTERS_MAX", 1)
    harness = Harness()
    found = harness.core.state.clusters

    def report(id: str) -> None:
        harness.see(
            ClusterReport(
                cluster=ClusterId(id), free_cpu=1.0, aggregators=(), jobs=(), at_s=harness.now_s
            )
        )

    report("c1")
    report("c2")
    assert not found.alive(ClusterId("c2"), harness.now_s)
    harness.tick(after_s=LOST_AFTER_S + 1.0)
    report("c2")
    assert found.alive(ClusterId("c2"), harness.now_s)
    harness.tick(after_s=KEPT_S + 1.0)
    assert found.rooms({}, [], harness.now_s) == []


def test_a_node_that_is_lost_while_the_clock_is_set_back_loses_its_jobs_in_time() -> None:
    """The job began at an hour which, after the master's restart, is still to come."""
    harness = Harness(node_silent_s=8.0)
    harness.now_s += 3600.0
    harness.node()
    submitted(harness, "a", workers=1)
    assert harness.job("a").state == "running"
    harness.now_s -= 3600.0
    harness.restart()
    for _ in range(9):
        harness.tick()
    assert harness.job("a").state == "failed"
    assert "was not heard for 8 s" in harness.job("a").reason


def test_a_time_limit_counts_from_the_restart_where_the_clock_was_set_back() -> None:
    harness = Harness()
    harness.now_s += 3600.0
    harness.node()
    limited = msgspec.structs.replace(spec("a", workers=1), time_limit_s=5.0)
    harness.ask(SubmitJob(spec=limited))
    harness.now_s -= 3600.0
    harness.restart()
    for _ in range(7):
        harness.node(running=(("a", 0),))
        harness.tick()
    assert "its time is over" in harness.job("a").reason


def test_one_tenant_leaves_room_in_the_queue_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "JOBS_MAX", 100)
    harness = Harness()

    def submit(tenant: str, most: int) -> int:
        """Submit until it is refused; returns how many were taken."""
        for number in range(most):
            asked = SubmitJob(spec=spec(f"{tenant}{number}", tenant=tenant))
            answer = harness.answer(asked)
            if not isinstance(answer, JobAccepted):
                assert isinstance(answer, Refused)
                assert f"{number} jobs of tenant {tenant} wait" in answer.reason
                assert answer.retry_after_s > 0.0
                return number
        return most

    assert submit("greedy", 100) == 91
    assert submit("honest", 3) == 3
    assert submit("third", 3) == 3
    harness.ask(CancelJob(job="greedy0"))
    assert submit("new", 4) == 4


def test_a_node_is_silent_beyond_its_seconds_and_not_at_them() -> None:
    harness = Harness(node_silent_s=8.0)
    harness.node()
    submitted(harness, "a", workers=1)
    assert harness.job("a").state in ("starting", "running")
    job, config = harness.core.state.jobs[JobId("a")], harness.core.state.config
    nodes, began_s = harness.core.state.nodes, harness.now_s
    assert silent_node(job, nodes, config, began_s, began_s + 8.0) is None
    assert silent_node(job, nodes, config, began_s, began_s + 8.001) == "n1"
