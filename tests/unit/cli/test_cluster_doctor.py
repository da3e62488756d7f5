"""Verdicts on a cluster as a whole, from what was gathered about it."""

from typing import Any

from slackwater.cli.cluster_doctor import Seen, judge
from slackwater.common.store.jetstream import StreamInfo
from slackwater.schemas.base import AggregatorId, NodeId
from slackwater.schemas.cluster import (
    AggregatorInfo,
    AggregatorRecord,
    NodeInfo,
    WorkerHeartbeat,
)
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.service import BusState, Health

DAY_S = 86_400.0
MIB = 2**20


def health(state: Any = "ok", reason: str = "") -> Health:
    return Health(
        state=state, service="x", id="y", uptime_s=1, bus_connected=True, steps_waiting=0,
        reason=reason,
    )  # fmt: skip


def node(name: str, alive: bool = True, jobs: int = 0, **fields: Any) -> NodeInfo:
    beat = WorkerHeartbeat(
        service="worker", id=name, incarnation=1, at_s=0, node=NodeId(name), slots=4, **fields
    )
    return NodeInfo(alive=alive, heartbeat=beat, jobs=jobs)


def stream(copies: int = 3, kept: tuple[str, ...] = (), **cluster: Any) -> StreamInfo:
    return StreamInfo(
        config={"num_replicas": copies},
        state={"subjects": dict.fromkeys(kept, 1)},
        cluster={"leader": "n1"} | cluster,
    )


def whole(**changes: Any) -> Seen:
    """A cluster with which all is well, but for this."""
    services = {"master main": "0.3.0", "controller c1": "0.3.0"}
    seen = Seen(
        1000 * DAY_S,
        services=services,
        health={each: health() for each in services},
        nodes=(node("n1"),),
        aggregators=(AggregatorInfo(record=AggregatorRecord(id=AggregatorId("a1")), alive=True),),
        streams={"KV_jobs": stream()},
    )
    for name, value in changes.items():
        setattr(seen, name, value)
    return seen


def found(**changes: Any) -> list[tuple[str, str, str]]:
    """Say what is not good."""
    return [(c.what, c.state, c.why) for c in judge(whole(**changes)) if c.state != "good"]


def test_where_all_is_well_nothing_else_is_said() -> None:
    assert found() == []
    assert len(judge(whole())) == 3


def test_services_that_are_missing_or_not_well_are_named() -> None:
    (master, nobody) = found(services={}, health={})[:2]
    assert (master[:2], nobody[:2]) == (("master", "bad"), ("controller", "bad"))
    assert "systemctl start slackwater-master" in master[2]
    sick = {"master main": health("degraded", "bucket jobs: no leader"), "controller c1": health()}
    assert found(health=sick) == [("master main", "bad", "bucket jobs: no leader")]
    (silent,) = found(health={"master main": health()})
    assert silent[:2] == ("controller c1", "bad")
    leaving = {"master main": health(), "controller c1": health("draining")}
    assert found(health=leaving)[0][1] == "poor"
    ((what, state, why),) = found(unanswered={"master": "nodes: no answer within 5 s"})
    assert (what, state, why) == ("master", "bad", "nodes: no answer within 5 s")


def test_versions_that_differ_are_an_upgrade_that_was_not_ended() -> None:
    versions = {"master main": "0.4.0", "controller c1": "0.3.0"}
    assert found(services=versions) == [
        ("versions", "poor", "1 of 0.3.0, 1 of 0.4.0: end the upgrade that has begun")
    ]


def test_clocks_that_are_apart() -> None:
    skews = {"worker w1": 3600.0, "worker w2": -2.5, "worker w3": 0.4}
    assert [(what, state) for what, state, _ in found(skew_s=skews)] == [
        ("worker w1", "bad"), ("worker w2", "poor"),
    ]  # fmt: skip
    assert "3,600.0 s ahead of" in found(skew_s=skews)[0][2]


def test_nodes_and_aggregators_that_are_not_heard() -> None:
    assert found(nodes=(node("n1", alive=False), node("n2")))[0][:2] == ("node n1", "poor")
    assert found(nodes=(node("n1", alive=False, jobs=2), node("n2")))[0][:2] == ("node n1", "bad")
    gpus = (Gpu(index=3, id="g", type="V100", fault="ECC errors"),)
    assert found(nodes=(node("n1", gpus=gpus),)) == [("node n1", "poor", "GPU 3: ECC errors")]
    assert found(nodes=(node("n1", cordoned=True),))[0][:2] == ("nodes", "bad")
    assert found(nodes=())[0][:2] == ("nodes", "poor")
    lost = AggregatorInfo(record=AggregatorRecord(id=AggregatorId("a1")), alive=False)
    ((what, state, why),) = found(aggregators=(lost,))
    assert (what, state) == ("aggregator a1", "poor")
    assert "slackwater drain a1 --lost" in why
    assert found(aggregators=())[0][:2] == ("aggregators", "poor")


def test_disks_of_bus_servers() -> None:
    def disk(free: int, reason: str = "") -> dict[str, BusState]:
        return {"n1": BusState(
            server="n1", free_bytes=free * MIB, total_bytes=1000 * MIB, reason=reason, at_s=0
        )}  # fmt: skip

    assert found(disks=disk(900)) == []
    assert found(disks=disk(900, "it cannot write"))[0][:2] == ("bus server n1", "bad")
    reserve = disk(1)["n1"].reserve_bytes // MIB
    assert found(disks=disk(reserve - 1))[0][1] == "bad"
    assert found(disks=disk(reserve + 1))[0][1] == "poor"


def test_copies_of_streams() -> None:
    assert found(streams={"KV_jobs": stream(leader="")})[0][:2] == ("stream KV_jobs", "bad")
    behind = stream(replicas=[{"name": "n2", "current": True}, {"name": "n3", "current": False}])
    ((_, state, why),) = found(streams={"KV_jobs": behind})
    assert (state, "the copy at n3 is" in why) == ("poor", True)
    gone = stream(replicas=[{"name": "n2", "current": True, "offline": True}])
    assert found(streams={"KV_jobs": gone})[0][1] == "poor"
    fewer = {"KV_jobs": stream(), "facts": stream(1)}
    assert found(streams=fewer)[0][:2] == ("stream facts", "poor")
    kept = stream(kept=("$KV.damaged._epoch", "$KV.damaged.jobs.j1"))
    ((what, state, why),) = found(streams={"KV_damaged": kept})
    assert (what, state) == ("damaged", "poor")
    assert why.startswith("1 record could not be read")


def test_certificates_that_end() -> None:
    now_s = 1000 * DAY_S
    ends: dict[str, float | str] = {
        "tls://h1:4222": now_s + 100 * DAY_S,
        "tls://u:p@h2:4222": now_s + 5 * DAY_S,
        "tls://h3:4222": "certificate has expired",
    }
    assert found(expiries_s=ends) == [
        ("bus server h3:4222", "bad", "certificate has expired"),
        (
            "bus server h2:4222",
            "poor",
            "its certificate ends in 5 days: ansible-playbook rotate.yml",
        ),
    ]
