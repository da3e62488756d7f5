"""GPUs and aggregators of one job: given together or not at all, within the tenant's quotas."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.master.test_gpu_dispatch import GpuHarness
from tests.unit.services.master.test_master_core import TENSORS, heartbeat, pool_of, spec

from slackwater.schemas.base import JobId, Refused
from slackwater.schemas.job_requests import CancelJob, JobAccepted, RegisterJob, SubmitJob
from slackwater.schemas.job_states import HOLDING_STATES
from slackwater.services.master.config import Tenant


class Both(GpuHarness):
    """Two nodes with two GPUs each, a pool of aggregators, and one cluster that has none yet."""

    def __init__(self, aggregators: int, **config: Any) -> None:
        super().__init__(**config)
        pool_of(self, aggregators)
        self.report("c", 0.0)

    def gang(self, id: str, gpus: int, servers: int, **fields: Any) -> None:
        self.submit(id, gpus, servers=servers, aggregation="edf", **fields)

    def state_of(self, id: str) -> str:
        return self.job(id).state

    def end(self, id: str) -> None:
        self.ask(CancelJob(job=id))
        for node in ("n1", "n2"):
            self.confirm(f"stop@{node}/{id}")
        self.confirm(f"stop/{id}")
        self.tick()


def test_a_gang_that_finds_no_aggregators_holds_no_gpus_and_says_what_is_missing() -> None:
    harness = Both(aggregators=1)
    harness.gang("a", 2, servers=2)
    assert harness.state_of("a") == "pending"
    why = harness.why("a")
    assert "waits for aggregators beside its GPUs, which it is given together" in why
    assert "it asks for 2, a cluster could be given 1" in why
    harness.see(heartbeat("a9", harness.now_s))
    harness.hear()
    harness.report("c", 0.0)
    harness.tick()
    assert harness.state_of("a") == "starting"


def test_jobs_that_need_no_aggregators_pass_a_gang_that_waits_for_some() -> None:
    harness = Both(aggregators=0)
    harness.gang("a", 2, servers=1)
    harness.gang("b", 1, servers=1)
    harness.submit("plain", 4)
    assert [harness.state_of(id) for id in ("a", "b", "plain")] == [
        "pending",
        "pending",
        "starting",
    ]
    assert "job a, submitted earlier, waits for some too" in harness.why("b")
    for id in ("a", "plain"):
        harness.end(id)
    assert "it asks for 1, a cluster could be given 0" in harness.why("b")


def test_aggregators_that_are_promised_to_one_gang_are_not_to_the_next() -> None:
    harness = Both(aggregators=3)
    harness.gang("a", 1, servers=2)
    harness.gang("b", 1, servers=2)
    harness.gang("small", 1, servers=1)
    assert harness.state_of("a") == "starting"
    assert (harness.state_of("b"), harness.state_of("small")) == ("pending", "pending")
    harness.end("a")
    assert (harness.state_of("b"), harness.state_of("small")) == ("starting", "starting")


def test_a_gang_is_placed_where_others_leave_room_to_share() -> None:
    harness = Both(aggregators=0)
    harness.see(heartbeat("a1", harness.now_s))
    harness.core.state.pool.unallocated = lambda cluster: 0  # type: ignore[method-assign]
    harness.gang("a", 1, servers=1)
    assert harness.state_of("a") == "pending"
    harness.report("c", 1.0)
    harness.tick()
    assert harness.state_of("a") == "starting"


def test_nobody_is_paused_for_a_gang_that_may_not_start() -> None:
    harness = Both(aggregators=0, gpu_policy="sf")
    harness.submit("large", 4)
    harness.gang("short", 1, servers=1)
    assert (harness.state_of("large"), harness.state_of("short")) == ("starting", "pending")
    assert harness.job("large").preemptions == 0


def test_a_tenant_s_aggregators_are_a_quota_that_its_jobs_wait_for_and_others_pass() -> None:
    harness = Both(aggregators=9, tenants={"t": Tenant(aggregators=3)})
    harness.gang("a", 1, servers=2, tenant="t")
    harness.gang("b", 1, servers=2, tenant="t")
    harness.gang("c", 1, servers=2, tenant="other")
    assert [harness.state_of(id) for id in "abc"] == ["starting", "pending", "starting"]
    why = harness.why("b")
    assert "waits for tenant t's aggregators: it asks for 2, the tenant's jobs have 2 of 3" in why
    harness.end("a")
    assert harness.state_of("b") == "starting"
    refused = harness.answer(SubmitJob(spec=spec("huge", servers=4, tenant="t")))
    assert isinstance(refused, Refused)
    assert "may have 3 aggregators" in refused.reason


def test_a_job_that_had_not_said_that_it_aggregates_waits_once_it_registers() -> None:
    harness = Both(aggregators=9, tenants={"t": Tenant(aggregators=3)})
    harness.gang("a", 1, servers=2, tenant="t")
    harness.submit("b", 1, servers=2, tenant="t")
    assert harness.state_of("b") == "starting"
    refused = harness.answer(RegisterJob(job="b", rank=0, tensors=TENSORS))
    assert isinstance(refused, Refused)
    assert "tenant t's aggregators" in refused.reason
    assert refused.retry_after_s > 0.0
    assert harness.job("b").cluster is None


def test_a_reported_share_counts_for_less_than_what_was_promised() -> None:
    harness = Both(aggregators=9, tenants={"t": Tenant(aggregators=3)})
    harness.gang("a", 1, servers=2, tenant="t")
    state = harness.core.state
    for id in ("a", "else"):
        state.sharers.part(JobId(id), ("a1", "a2"))  # type: ignore[arg-type]
    harness.gang("b", 1, servers=2, tenant="t")
    assert harness.state_of("b") == "starting", "1 of a, which shares, and 2 of b"


@given(st.lists(st.tuples(st.sampled_from("ngpexa"), st.integers(1, 3), st.integers(1, 3)),
                max_size=25), st.sampled_from(["fifo", "sf", "tiresias-las"]))  # fmt: skip
def test_no_gang_ever_holds_gpus_without_aggregators_that_are_its_own(
    moves: list[tuple[str, int, int]], policy: str
) -> None:
    """`n`: a gang comes, `g`: a job without aggregation, `e`: one ends, `p`: time passes, `x`: the
    master is killed, `a`: an aggregator comes. The promises never exceed the pool."""
    harness, pool, gangs = Both(2, gpu_policy=policy), 2, dict[str, int]()
    for number, (move, gpus, servers) in enumerate(moves):
        id = f"j{number}"
        if move == "n":
            harness.gang(id, gpus, servers)
            gangs[id] = servers
        elif move == "g":
            assert isinstance(
                harness.answer(SubmitJob(spec=spec(id, gpus=gpus, workers=gpus))), JobAccepted
            )
        elif move == "e" and (running := [i for i in gangs if holding(harness, i)]):
            harness.end(running[servers % len(running)])
        elif move == "x":
            harness.restart()
            harness.now_s += 3.0
        elif move == "a":
            pool += 1
        for n in range(pool):
            harness.see(heartbeat(f"a{n}", harness.now_s))
        harness.hear()
        harness.report("c", 0.0)
        harness.tick()
        taken = sum(servers for id, servers in gangs.items() if holding(harness, id))
        assert taken <= pool


def holding(harness: Both, id: str) -> bool:
    return harness.job(id).state in HOLDING_STATES
