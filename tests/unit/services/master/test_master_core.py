"""The master's core, event by event: what it stores before it answers, and what it orders."""

from typing import Any, TypeVar

import msgspec
import pytest

from slackwater.common.base import codec, limits
from slackwater.common.base.effects import (
    Answered,
    Effect,
    Log,
    Observed,
    Persist,
    Publish,
    Recovered,
    Reply,
    Request,
    Requested,
    StartTimer,
    TimerFired,
)
from slackwater.common.base.transitions import InvalidTransition
from slackwater.common.shell import metrics
from slackwater.schemas.base import (
    AggregatorId,
    ClusterId,
    JobId,
    Message,
    NodeId,
    Ok,
    Record,
    Refused,
)
from slackwater.schemas.cluster import (
    AggregatorHeartbeat,
    AggregatorList,
    AggregatorsAllocated,
    AllocateAggregators,
    ClusterReport,
    ListAggregators,
    PlacedJob,
    TenantUse,
    WorkerHeartbeat,
)
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_requests import (
    CancelJob,
    FinishJob,
    GetJob,
    JobAccepted,
    JobInfo,
    JobList,
    JobRegistered,
    ListJobs,
    RegisterJob,
    SubmitJob,
)
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.placement import PlaceJob, Profile, ReleaseJob
from slackwater.schemas.telemetry import IterationsObserved, JobProfiled
from slackwater.schemas.tenants import ListTenants, TenantInfo, TenantList
from slackwater.schemas.tensors import TensorSpec
from slackwater.schemas.usage import UsageSums
from slackwater.schemas.workers import StartWorkers, StopWorkers, WorkerExited
from slackwater.services.master.config import MasterConfig, Tenant
from slackwater.services.master.core import Master
from slackwater.services.master.keys import (
    JobForgotten,
    Order,
    OrderKey,
    TickDue,
    UsageStored,
)
from slackwater.services.master.shell import tenant_gauges, usage_gauges

MOST = MasterConfig().aggregators_max
TENSORS = (TensorSpec(name="w", shape=(8, 4)), TensorSpec(name="b", shape=(4,)))
T = TypeVar("T")


class Harness:
    """Feeds events, keeps what was stored, and answers nothing by itself."""

    def __init__(self, **config: Any) -> None:
        self.config = MasterConfig(**config)
        self.stored: dict[str, dict[str, Record]] = {
            "jobs": {}, "nodes": {}, "policies": {}, "usage": {}, "scaling": {}, "ended": {},
        }  # fmt: skip
        self.now_s = 100.0
        self.epoch = 0
        self.token = 0
        self.forgets = True
        self.restart()

    def restart(self) -> list[Effect]:
        """A new instance that knows what was stored and nothing else."""
        self.epoch += 1
        self.core = Master(self.config)
        records = {bucket: dict(kept) for bucket, kept in self.stored.items()}
        return self.step(Recovered(self.epoch, records))

    def step(self, event: Any) -> list[Effect]:
        effects = self.core.step(event, self.now_s)
        for effect in effects:
            if isinstance(effect, Persist) and effect.record is None:
                self.stored[effect.bucket].pop(effect.key, None)
            elif isinstance(effect, Persist) and effect.record is not None:
                self.stored[effect.bucket][effect.key] = effect.record
        self.core.state.check_invariants()
        for due in [e for e in effects if isinstance(e, StartTimer)]:
            if self.forgets and isinstance(due.key, UsageStored | JobForgotten):
                effects = [*effects, *self.step(TimerFired(due.key))]
        return effects

    def ask(self, message: Message) -> list[Effect]:
        self.token += 1
        return self.step(Requested(self.token, message))

    def answer(self, message: Message) -> Message:
        return only(self.ask(message), Reply).message

    def see(self, message: Message) -> list[Effect]:
        return self.step(Observed("", message))

    def tick(self, after_s: float = 1.0) -> list[Effect]:
        self.now_s += after_s
        return self.step(TimerFired(TickDue()))

    def job(self, id: str) -> JobRecord:
        record = self.stored["jobs"][id]
        assert isinstance(record, JobRecord)
        return record

    def node(self, slots: int = 8, running: tuple[tuple[str, int], ...] = ()) -> list[Effect]:
        pairs = tuple((JobId(job), rank) for job, rank in running)
        return self.see(
            WorkerHeartbeat(
                service="worker",
                id="w1",
                incarnation=0,
                at_s=self.now_s,
                node=NodeId("n1"),
                slots=slots,
                running=pairs,
            )
        )

    def why(self, id: str) -> str:
        """The reason that `slackwater job ID` shows, which is the one of `slackwater jobs`, too."""
        info, listed = self.answer(GetJob(job=id)), self.answer(ListJobs())
        assert isinstance(info, JobInfo)
        assert isinstance(listed, JobList)
        brief = {record.spec.id: record.reason for record in listed.jobs}
        assert brief[id] == info.job.reason[:200]
        return info.job.reason

    def report(
        self,
        cluster: str,
        free_cpu: float,
        jobs: tuple[str, ...] = (),
        waiting: dict[str, str] | None = None,
    ) -> None:
        self.see(
            ClusterReport(
                cluster=ClusterId(cluster),
                free_cpu=free_cpu,
                aggregators=(),
                jobs=tuple(map(JobId, jobs)),
                waiting={JobId(job): why for job, why in (waiting or {}).items()},
                at_s=self.now_s,
            )
        )


def only(effects: list[Effect], kind: type[T]) -> T:
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


def orders(effects: list[Effect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Request)]


def facts(effects: list[Effect]) -> list[str]:
    return [
        effect.message.fact
        for effect in effects
        if isinstance(effect, Publish) and isinstance(effect.message, JobEvent)
    ]


def spec(id: str, **fields: Any) -> JobSpec:
    fields = {"workers": 2, "servers": 2, "program": ("train",), "iterations": 10} | fields
    return JobSpec(id=id, **{"fractional_share": True} | fields)  # The same as in `heartbeat`.


def submitted(harness: Harness, id: str, **fields: Any) -> None:
    assert isinstance(harness.answer(SubmitJob(spec=spec(id, **fields))), JobAccepted)


def test_a_submission_is_in_one_step_with_its_record() -> None:
    """The shell stores a step's records before it answers, so one step is what durability needs."""
    effects = Harness().ask(SubmitJob(spec=spec("a")))
    assert only(effects, Persist).key == "a"
    assert only(effects, Reply).message == JobAccepted(job="a")
    assert facts(effects) == ["pending", "waiting"]  # For a worker node.


def test_the_same_submission_twice_is_accepted_and_another_one_is_refused_by_name() -> None:
    harness = Harness()
    submitted(harness, "a")
    again = harness.ask(SubmitJob(spec=spec("a")))
    said = only(again, Reply).message
    assert isinstance(said, JobAccepted)
    assert said.known is not None, "nothing new was started"
    assert said.known.state == harness.job("a").state
    assert not [e for e in again if isinstance(e, Persist)]
    harness.restart()
    other = harness.answer(SubmitJob(spec=spec("a", workers=3)))
    assert isinstance(other, Refused)
    assert "job a" in other.reason
    assert "another id" in other.reason


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"program": ("python", "a\0b")}, "job a: program: a word of it holds a NUL"),
        ({"folder": "/tmp/\0"}, "job a: folder: it holds a NUL"),
        ({"env": {"A": "\0"}}, "job a: env: A holds a NUL"),
    ],
)
def test_what_no_program_can_be_started_with_is_refused(odd: dict[str, Any], said: str) -> None:
    """A worker service ended by it, and again at each of its starts."""
    harness = Harness()
    answer = harness.answer(SubmitJob(spec=msgspec.structs.replace(spec("a"), **odd)))
    assert isinstance(answer, Refused)
    assert said in answer.reason
    assert harness.stored["jobs"] == {}


def test_a_job_runs_on_a_node_with_room_and_is_completed_when_all_ranks_ended_well() -> None:
    harness = Harness()
    submitted(harness, "a")
    start = orders(harness.node())
    assert start == [StartWorkers(job="a", ranks=(0, 1), workers=2, program=("train",))]
    exit0 = WorkerExited(job="a", rank=0, node=NodeId("n1"), code=0, result='{"x": 1}')
    assert harness.answer(exit0) == Ok()
    assert harness.answer(exit0) == Ok()  # Repeated by the bus.
    assert harness.job("a").state == "running"
    effects = harness.ask(WorkerExited(job="a", rank=1, node=NodeId("n1"), code=0, result="{}"))
    assert facts(effects) == ["completed"]
    assert harness.job("a").results == {"0": '{"x": 1}', "1": "{}"}
    assert harness.job("a").released  # It was never placed: no controller knows of it.


def test_the_first_failure_fails_the_job_stops_the_others_and_keeps_the_reason() -> None:
    harness = Harness()
    submitted(harness, "a")
    harness.node()
    harness.step(Answered(OrderKey(JobId("a"), Order("start")), Ok()))
    effects = harness.ask(
        WorkerExited(job="a", rank=1, node=NodeId("n1"), code=3, result="ValueError: bad")
    )
    assert orders(effects) == [StopWorkers(job="a")]
    assert harness.job("a").reason == "rank 1 on n1 ended with exit code 3: ValueError: bad"
    harness.ask(WorkerExited(job="a", rank=0, node=NodeId("n1"), code=-15))
    assert harness.job("a").state == "failed"
    harness.step(Answered(OrderKey(JobId("a"), Order("stop")), Ok()))
    assert harness.job("a").released


def test_slots_are_given_in_order_of_submission_and_counted_from_the_records() -> None:
    harness = Harness()
    for id, workers in (("a", 2), ("b", 3), ("c", 1), ("huge", 64)):
        harness.now_s += 1
        submitted(harness, id, workers=workers)
    started = orders(harness.node(slots=4))
    assert [order.job for order in started if isinstance(order, StartWorkers)] == ["a"]
    harness.ask(WorkerExited(job="a", rank=0, node=NodeId("n1"), code=0))
    assert harness.job("b").state == "running"
    assert harness.job("c").state == "pending"
    harness.ask(WorkerExited(job="a", rank=1, node=NodeId("n1"), code=0))
    assert harness.job("c").state == "running"


def test_a_job_that_waits_for_slots_says_how_many_are_free_and_what_helps() -> None:
    harness = Harness()
    submitted(harness, "a", workers=6)
    assert harness.why("a") == (
        "waits for 6 worker slots: no worker node is heard that takes jobs; start one with "
        "`slackwater run worker`"
    )
    harness.node(slots=8)
    for id, workers in (("b", 4), ("c", 1), ("huge", 64)):
        harness.now_s += 1
        submitted(harness, id, workers=workers)
    assert harness.why("b") == (
        "waits for 4 worker slots: 2 of 8 free; runs when a job ends or `slackwater run worker` "
        "adds a node"
    )
    assert harness.why("c") == (
        "waits for 1 worker slot: 2 of 8 free, but job b, submitted earlier, waits for slots too; "
        "runs after it, or cancel that one"
    )
    assert harness.why("huge") == (
        "waits for 64 worker slots on one node: the largest has 8; start a worker node with "
        "`slots` of 64 or more, or submit the job with fewer workers"
    )
    assert harness.why("a") == ""  # It runs.
    harness.ask(WorkerExited(job="a", rank=0, node=NodeId("n1"), code=0))
    assert "3 of 8 free" in harness.why("b")
    assert harness.job("b").reason == ""  # Nothing of it is stored, so nothing of it gets stale.


def test_a_wait_is_told_once_and_a_node_that_suffices_ends_it() -> None:
    harness = Harness()
    harness.node(slots=4)
    effects = harness.ask(SubmitJob(spec=spec("huge", workers=8)))
    told = [e.message for e in effects if isinstance(e, Publish) if isinstance(e.message, JobEvent)]
    assert [event.fact for event in told] == ["pending", "waiting"]
    assert "the largest has 4" in told[-1].reason
    assert facts(harness.tick()) == []
    assert facts(harness.node(slots=8)) == ["running"]
    assert harness.why("huge") == ""


def test_a_job_says_which_cluster_it_waits_for_and_what_its_controller_refused() -> None:
    harness = Harness()
    harness.node()
    submitted(harness, "a")
    harness.step(
        Answered(
            OrderKey(JobId("a"), Order("start")), Refused(reason="n1 drains", retry_after_s=1.0)
        )
    )
    assert harness.why("a") == "waits for worker node n1, which refused: n1 drains"
    harness.tick()
    harness.step(Answered(OrderKey(JobId("a"), Order("start")), Ok()))
    assert harness.why("a") == ""
    refused = harness.answer(RegisterJob(job="a", rank=0, tensors=TENSORS))
    assert isinstance(refused, Refused)
    assert harness.why("a").startswith("waits for a cluster of aggregators: no controller is heard")
    harness.report("c0", 1.0)
    harness.ask(RegisterJob(job="a", rank=0, tensors=TENSORS))
    harness.step(
        Answered(
            OrderKey(JobId("a"), Order("place")),
            Refused(reason="c0 has 10000 jobs", retry_after_s=5.0),
        )
    )
    assert harness.why("a") == "controller c0 refused it: c0 has 10000 jobs"
    harness.ask(RegisterJob(job="a", rank=0, tensors=TENSORS))
    harness.step(Answered(OrderKey(JobId("a"), Order("place")), Ok()))
    harness.report("c0", 1.0, waiting={"a": "waits for aggregators: 1 free"})
    assert harness.why("a") == "waits for aggregators: 1 free"
    harness.report("c0", 1.0)
    assert harness.why("a") == ""
    harness.tick(7.0)
    assert harness.why("a").startswith("its controller c0 is not heard")
    harness.ask(CancelJob(job="a"))
    assert harness.why("a") == "cancelled by its user"


def test_a_master_that_was_killed_orders_again_what_nobody_confirmed() -> None:
    harness = Harness()
    submitted(harness, "a")
    harness.node()
    first = orders(harness.restart())
    assert first == [StartWorkers(job="a", ranks=(0, 1), workers=2, program=("train",))]
    assert harness.answer(CancelJob(job="a")) == Ok()
    assert orders(harness.restart()) == [StopWorkers(job="a")]
    harness.step(Answered(OrderKey(JobId("a"), Order("stop")), Ok()))
    assert orders(harness.restart()) == []


def test_a_start_that_can_never_be_carried_out_fails_the_job() -> None:
    harness = Harness()
    submitted(harness, "a")
    harness.node()
    harness.step(
        Answered(OrderKey(JobId("a"), Order("start")), Refused(reason="busy", retry_after_s=1.0))
    )
    assert harness.job("a").state == "running"
    assert orders(harness.tick()) != []
    harness.step(Answered(OrderKey(JobId("a"), Order("start")), Refused(reason="no such program")))
    assert harness.job("a").state == "failed"
    assert "no such program" in harness.job("a").reason


def test_an_end_that_could_not_be_told_during_a_partition_is_waited_for() -> None:
    """A rank ended as its node was cut off; the first heartbeat after it failed the job, before the
    node's report of the end was there."""
    harness = Harness(rank_missing_s=15.0, node_silent_s=30.0)
    submitted(harness, "a", workers=1)
    harness.node()
    harness.step(Answered(OrderKey(JobId("a"), Order("start")), Ok()))
    harness.node()  # The rank has ended, and its report is lost.
    for _ in range(17):
        harness.tick()
    for _ in range(14):
        harness.node()
        harness.tick()
        assert harness.job("a").state == "running", harness.job("a").reason
    harness.ask(WorkerExited(job="a", rank=0, node="n1", code=0, result=""))
    assert harness.job("a").state == "completed"


def test_ranks_and_nodes_that_vanish_fail_the_job_in_bounded_time() -> None:
    harness = Harness(rank_missing_s=5.0, node_silent_s=30.0)
    submitted(harness, "a")
    submitted(harness, "b")
    harness.node()
    harness.step(Answered(OrderKey(JobId("a"), Order("start")), Ok()))
    harness.step(Answered(OrderKey(JobId("b"), Order("start")), Ok()))
    for _ in range(8):
        harness.node(running=(("a", 0), ("b", 0), ("b", 1)))
        harness.tick()
    assert harness.job("a").reason == "rank 1 vanished from n1 and reported no end"
    assert harness.job("b").state == "running"
    harness.tick(31.0)
    assert harness.job("b").reason == "worker node n1 was not heard for 30 s"


# Registration and placement -----------------------------------------------------------------------


def heartbeat(id: str, at_s: float, incarnation: int = 1, buckets: int = 0) -> AggregatorHeartbeat:
    return AggregatorHeartbeat(
        service="aggregator",
        id=id,
        incarnation=incarnation,
        at_s=at_s,
        node=NodeId("n1"),
        cpu_share=0.1,
        addresses=(("shm", f"/run/{id}"),),
        buckets=buckets,
        jobs=0,
        held_bytes=0,
        busy_s=0.0,
        bytes_in=0,
        bytes_out=0,
    )


def test_ranks_wait_for_the_controller_and_learn_the_cluster() -> None:
    harness = Harness()
    submitted(harness, "a")
    refused = harness.answer(RegisterJob(job="a", rank=0, tensors=TENSORS))
    assert isinstance(refused, Refused)
    assert refused.retry_after_s > 0  # No controller has reported yet.
    harness.report("c1", 0.5)
    harness.report("c0", 0.5)
    first = harness.ask(RegisterJob(job="a", rank=0, tensors=TENSORS))
    assert orders(first) == [PlaceJob(spec=spec("a"), tensors=TENSORS, aggregators_max=MOST)]
    assert harness.job("a").cluster == "c0"  # Ties go to the lowest id.
    second = harness.ask(RegisterJob(job="a", rank=1, tensors=TENSORS))
    assert second == []
    placed = harness.step(Answered(OrderKey(JobId("a"), Order("place")), Ok()))
    answers = [effect.message for effect in placed if isinstance(effect, Reply)]
    assert answers == [JobRegistered(job="a", cluster=ClusterId("c0"), workers=2)] * 2
    assert harness.answer(RegisterJob(job="a", rank=0, tensors=TENSORS)) == answers[0]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_program_that_trains_is_refused_on_fractions_of_a_core(by_hand: bool) -> None:
    """It would take ten times as long and nobody would know why. Nothing is placed or stored; one
    that asked for it is let in."""
    harness = Harness()
    fields: dict[str, Any] = {"fractional_share": False, "program": () if by_hand else ("train",)}
    if not by_hand:
        submitted(harness, "a", **fields)
    harness.report("c0", 1.0)
    harness.see(heartbeat("a1", harness.now_s))
    given = spec("a", **fields) if by_hand else None
    register = RegisterJob(job="a", rank=0, tensors=TENSORS, spec=given)
    refused = harness.answer(register)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == 0.0
    assert "job a: the aggregators of this cluster have 0.1 of a core each" in refused.reason
    assert "takes 10.0 times as long as on a whole core" in refused.reason
    assert "`slackwater up` without --cpu-share" in refused.reason
    assert "`slackwater submit --allow-fractional-share`" in refused.reason
    assert "Agent(fractional_share=True)" in refused.reason
    assert by_hand == isinstance(harness.answer(GetJob(job="a")), Refused)
    asked = spec("b", program=())
    allowed = harness.ask(RegisterJob(job="b", rank=0, tensors=TENSORS, spec=asked))
    assert [each.spec.id for each in orders(allowed) if isinstance(each, PlaceJob)] == ["b"]


def test_on_whole_cores_a_program_registers_without_asking() -> None:
    harness = Harness()
    submitted(harness, "a", fractional_share=False)
    harness.report("c0", 1.0)
    whole = msgspec.structs.replace(heartbeat("a1", harness.now_s), cpu_share=1.0)
    harness.see(whole)
    effects = harness.ask(RegisterJob(job="a", rank=0, tensors=TENSORS))
    assert [type(each) for each in orders(effects)] == [PlaceJob]
    harness.step(Answered(OrderKey(JobId("a"), Order("place")), Ok()))
    harness.see(heartbeat("a2", harness.now_s))  # A slow one joins: it is placed by now.
    again = harness.answer(RegisterJob(job="a", rank=1, tensors=TENSORS))
    assert isinstance(again, JobRegistered)


def test_a_rank_with_other_tensors_is_refused_naming_rank_and_tensor() -> None:
    harness = Harness()
    submitted(harness, "a")
    harness.report("c0", 1.0)
    harness.ask(RegisterJob(job="a", rank=0, tensors=TENSORS))
    other = (TENSORS[0], TensorSpec(name="b", shape=(5,)))
    answer = harness.answer(RegisterJob(job="a", rank=1, tensors=other))
    assert isinstance(answer, Refused)
    assert "rank 1" in answer.reason
    assert "b [5]" in answer.reason
    answer = harness.answer(RegisterJob(job="a", rank=2, tensors=TENSORS))
    assert isinstance(answer, Refused)
    assert "rank 2 of 2 workers" in answer.reason


def test_a_program_started_by_hand_is_admitted_with_its_spec_and_finishes_by_itself() -> None:
    harness = Harness()
    assert isinstance(harness.answer(RegisterJob(job="h", rank=0, tensors=TENSORS)), Refused)
    harness.report("c0", 1.0)
    by_hand = spec("h", program=())
    effects = harness.ask(RegisterJob(job="h", rank=0, tensors=TENSORS, spec=by_hand))
    assert orders(effects) == [PlaceJob(spec=by_hand, tensors=TENSORS, aggregators_max=MOST)]
    harness.step(Answered(OrderKey(JobId("h"), Order("place")), Ok()))
    assert harness.answer(FinishJob(job="h", rank=0, result="1")) == Ok()
    done = harness.ask(FinishJob(job="h", rank=1))
    assert harness.job("h").state == "completed"
    assert orders(done) == [ReleaseJob(job="h")]
    assert not harness.job("h").released
    harness.step(Answered(OrderKey(JobId("h"), Order("release")), Ok()))
    assert harness.job("h").released


def test_a_silent_job_started_by_hand_fails_with_the_reason() -> None:
    harness = Harness(agent_silent_s=10.0)
    harness.report("c0", 1.0)
    harness.ask(RegisterJob(job="h", rank=0, tensors=TENSORS, spec=spec("h", program=())))
    harness.tick(9.0)
    assert harness.job("h").state == "running"
    harness.tick(2.0)
    assert harness.job("h").state == "failed"
    assert "agent_silent_s" in harness.job("h").reason


def test_the_profiled_demand_of_a_model_decides_where_its_next_job_fits() -> None:
    """Unprofiled: 2 servers x 0.1 need c1's 0.3 cores. Profiled at 0.04 cores, c0 fits better."""
    harness = Harness(aggregators_max=1)
    harness.see(heartbeat("a1", harness.now_s))
    harness.tick(7.0)  # a1 is lost: nothing can be allocated, its share is known.
    harness.report("c0", 0.05)
    harness.report("c1", 0.3)
    for id in ("x", "y"):
        submitted(harness, id, model="vgg19")
    harness.ask(RegisterJob(job="x", rank=0, tensors=TENSORS))
    assert harness.job("x").cluster == "c1"
    profile = Profile(iteration_s=1.0, task_cpu_s=(0.03, 0.01))
    harness.see(JobProfiled(job=JobId("x"), location_epoch=0, profile=profile))
    harness.ask(RegisterJob(job="y", rank=0, tensors=TENSORS))
    assert harness.job("y").cluster == "c0"


def test_a_job_goes_where_its_profiling_need_not_wait_for_aggregators() -> None:
    """c0 fits best by its free slots, but has all the aggregators that a cluster may have."""
    harness = Harness(aggregators_max=2)
    for n in range(4):
        harness.see(heartbeat(f"a{n}", harness.now_s))
    given = harness.answer(AllocateAggregators(request="r", cluster=ClusterId("c0"), count=1))
    assert isinstance(given, AggregatorsAllocated)
    harness.report("c0", 0.15)  # And 0.1 that it could still be given.
    harness.report("c1", 0.5)  # And 0.2.
    submitted(harness, "x")
    harness.ask(RegisterJob(job="x", rank=0, tensors=TENSORS))
    assert harness.job("x").cluster == "c1"
    submitted(harness, "y", servers=1)
    harness.ask(RegisterJob(job="y", rank=0, tensors=TENSORS))
    assert harness.job("y").cluster == "c0"


# Bounds ------------------------------------------------------------------------------------------


def test_a_list_is_paged_without_results_newest_first() -> None:
    harness = Harness()
    for index in range(limits.LIST_JOBS_MAX + 3):
        harness.now_s += 1
        submitted(harness, f"j{index}")
    page = harness.answer(ListJobs())
    assert isinstance(page, JobList)
    assert (len(page.jobs), page.total) == (limits.LIST_JOBS_MAX, limits.LIST_JOBS_MAX + 3)
    assert page.jobs[0].spec.id == f"j{limits.LIST_JOBS_MAX + 2}"
    rest = harness.answer(ListJobs(offset=limits.LIST_JOBS_MAX))
    assert isinstance(rest, JobList)
    assert [record.spec.id for record in rest.jobs] == ["j2", "j1", "j0"]
    assert isinstance(harness.answer(GetJob(job="none")), Refused)
    assert isinstance(harness.answer(GetJob(job="j0")), JobInfo)


def test_ended_jobs_are_forgotten_oldest_first_and_only_when_settled() -> None:
    harness = Harness(jobs_kept_max=2)
    for index in range(4):
        harness.now_s += 1
        submitted(harness, f"j{index}")
        harness.ask(CancelJob(job=f"j{index}"))
    assert sorted(harness.stored["jobs"]) == ["j2", "j3"]


@pytest.mark.parametrize("workers", [1, 64])
def test_results_never_outgrow_a_record(workers: int) -> None:
    harness = Harness()
    submitted(harness, "a", workers=workers)
    harness.node(slots=64)
    text = "\N{BEER MUG}" * 4096
    for rank in range(workers):
        harness.ask(WorkerExited(job="a", rank=rank, node=NodeId("n1"), code=0, result=text))
    kept = harness.job("a").results
    assert len(kept) == workers
    assert sum(len(text.encode()) for text in kept.values()) < limits.RECORD_BYTES_MAX * 0.8


def test_a_thousand_waiting_jobs_are_told_once_each_whatever_ends() -> None:
    """Slots that come and go start the next in line; nobody else is told anything."""
    harness = Harness()
    harness.node(slots=1)
    told = 0
    for number in range(200):
        told += facts(harness.ask(SubmitJob(spec=spec(f"j{number}", workers=1)))).count("waiting")
    assert told == 199  # The first runs.
    effects = harness.ask(WorkerExited(job="j0", rank=0, node=NodeId("n1"), code=0))
    assert facts(effects) == ["completed", "running"]
    assert harness.job("j1").state == "running"
    assert facts(harness.tick()) == []
    assert harness.core.state.nodes.taken[NodeId("n1")] == 1
    harness.restart()
    assert harness.core.state.nodes.taken[NodeId("n1")] == 1
    assert harness.core.state.slots.queued == 198


def test_the_oldest_ended_jobs_are_forgotten() -> None:
    harness = Harness(jobs_kept_max=2)
    for number in range(4):
        harness.now_s += 1
        submitted(harness, f"j{number}")
        harness.ask(CancelJob(job=f"j{number}"))
    assert sorted(harness.stored["jobs"]) == ["j2", "j3"]
    harness.restart()
    submitted(harness, "new")
    harness.ask(CancelJob(job="new"))
    assert sorted(harness.stored["jobs"]) == ["j3", "new"]


# Tenants and admission ----------------------------------------------------------------------------


def pool_of(harness: Harness, count: int) -> None:
    for number in range(count):
        harness.see(heartbeat(f"a{number}", harness.now_s))


def test_a_tenant_that_has_its_part_waits_and_the_others_pass() -> None:
    """Ten aggregators: half of their CPU is five servers, so a third job of two has to wait."""
    harness = Harness(tenants={"bad": Tenant(cpu_fraction=0.5, queued_max=3)})
    pool_of(harness, 10)
    harness.node(slots=8)
    for id in ("b1", "b2", "b3", "b4"):
        harness.now_s += 1
        submitted(harness, id, tenant="bad", workers=1)
    assert [harness.job(id).state for id in ("b1", "b2", "b3")] == ["running", "running", "pending"]
    assert "waits for tenant bad's part of the pool" in harness.why("b3")
    assert "waits until tenant bad's jobs, submitted earlier" in harness.why("b4")
    effects = harness.ask(SubmitJob(spec=spec("good", workers=1, tenant="good")))
    assert facts(effects) == ["pending", "running"]  # No job of `bad` is told again.
    submitted(harness, "b5", tenant="bad", workers=1)
    refused = harness.answer(SubmitJob(spec=spec("b6", workers=1, tenant="bad")))
    assert isinstance(refused, Refused)
    assert refused.retry_after_s > 0
    (listed,) = [e for e in tenants_of(harness) if e.tenant == "bad"]
    assert (listed.running, listed.waiting, listed.queued_max) == (2, 3, 3)
    assert listed.cpu == pytest.approx(0.5 * listed.pool_cpu * 0.8)
    harness.restart()
    pool_of(harness, 10)
    harness.node(slots=8)
    assert harness.job("b3").state == "pending"  # Counted from the records.
    harness.ask(WorkerExited(job="b1", rank=0, node=NodeId("n1"), code=0))
    assert harness.job("b3").state == "running"
    assert harness.job("b4").state == "pending"


def tenants_of(harness: Harness) -> tuple[TenantInfo, ...]:
    answer = harness.answer(ListTenants())
    assert isinstance(answer, TenantList)
    return answer.tenants


def test_what_a_tenant_uses_and_loses_is_summed_over_the_clusters_that_live() -> None:
    harness = Harness(tenants={"t": Tenant(cpu_fraction=0.5)})
    pool_of(harness, 10)
    loser = TenantUse(tenant="t", jobs=1, cpu=0.25, slots=2.0, loss=0.12, beyond=1)
    calm = TenantUse(tenant="t", jobs=2, cpu=0.5, slots=4.0, loss=-0.1)
    for cluster, use in (("c0", loser), ("c1", calm)):
        report = ClusterReport(
            cluster=ClusterId(cluster), free_cpu=1.0, aggregators=(), jobs=(), tenants=(use,),
            at_s=harness.now_s,
        )  # fmt: skip
        harness.see(report)
    (found,) = tenants_of(harness)
    assert (found.measured, found.used_cpu, found.used_slots) == (3, 0.75, 6.0)
    assert (found.loss, found.beyond) == (0.12, 1)
    both = (*tenant_gauges(found), *usage_gauges("t", UsageSums()))
    levels = {level.name: level.value for level in both}
    assert set(levels) == {name for name in metrics.FAMILIES if name.startswith("tenant_")}
    assert levels["tenant_used_cores"] == 0.75
    assert levels["tenant_allowed_cores"] == pytest.approx(0.5 * found.pool_cpu)
    harness.now_s += limits.LOST_AFTER_S + 1.0
    (found,) = tenants_of(harness)
    assert (found.measured, found.loss) == (0, 0.0)


def test_standalone_admission_starts_a_job_when_its_servers_could_be_had() -> None:
    harness = Harness(admission="standalone", aggregators_max=4)
    pool_of(harness, 3)
    harness.node(slots=8)
    harness.report("c0", 0.0)
    submitted(harness, "a", workers=1, servers=2)
    assert harness.job("a").state == "running"
    harness.now_s += 1
    submitted(harness, "b", workers=1, servers=2)  # One is left: two are promised to `a`.
    assert harness.why("b").startswith("waits for 2 aggregators, as many as it asks servers for")
    harness.now_s += 1
    submitted(harness, "c", workers=1, servers=1)
    assert "job b, submitted earlier, waits for aggregators too" in harness.why("c")
    refused = harness.answer(SubmitJob(spec=spec("d", servers=5)))
    assert isinstance(refused, Refused)
    assert "aggregators_max" in refused.reason
    harness.see(heartbeat("a3", harness.now_s))
    harness.tick()
    assert harness.job("b").state == "running"


def test_agents_of_a_job_that_is_held_back_are_told_to_come_again() -> None:
    harness = Harness(admission="standalone")
    pool_of(harness, 1)
    harness.report("c0", 0.0)
    by_hand = spec("hand", program=(), servers=2)
    ask = RegisterJob(job="hand", rank=0, tensors=TENSORS, spec=by_hand)
    first = harness.ask(ask)
    refused = only(first, Reply).message
    assert isinstance(refused, Refused)
    assert refused.retry_after_s > 0
    assert facts(first) == ["pending", "running", "waiting"]
    assert harness.why("hand").startswith("waits for 2 aggregators")
    assert facts(harness.ask(ask)) == []  # Told once.
    harness.see(heartbeat("a1", harness.now_s))
    assert orders(harness.ask(ask)) == [
        PlaceJob(spec=by_hand, tensors=TENSORS, aggregators_max=MOST)
    ]


def test_a_tenants_loss_limit_goes_with_its_jobs_to_their_controller() -> None:
    harness = Harness(tenants={"default": Tenant(loss_limit=0.05)})
    harness.node()
    submitted(harness, "a", tenant="t")
    harness.report("c0", 1.0)
    (order,) = orders(harness.ask(RegisterJob(job="a", rank=0, tensors=TENSORS)))
    assert isinstance(order, PlaceJob)
    assert order.loss_limit == 0.05


def test_a_loss_limit_of_a_jobs_own_comes_before_its_tenants() -> None:
    harness = Harness(tenants={"default": Tenant(loss_limit=0.05)})
    harness.node()
    submitted(harness, "a", tenant="t", loss_limit=0.02)
    harness.report("c0", 1.0)
    (order,) = orders(harness.ask(RegisterJob(job="a", rank=0, tensors=TENSORS)))
    assert isinstance(order, PlaceJob)
    assert order.loss_limit == 0.02


def test_the_number_of_clusters_that_take_jobs_is_logged_when_it_changes() -> None:
    harness = Harness(cluster_scaling_s=600.0)
    pool_of(harness, 4)
    for cluster in ("c0", "c1"):
        harness.report(cluster, 1.0)
    harness.node()
    logged = []
    for id in ("a", "b"):
        submitted(harness, id)
        effects = harness.ask(RegisterJob(job=id, rank=0, tensors=TENSORS))
        logged += [e.fields["open"] for e in effects if isinstance(e, Log)]
    assert logged == [["c0"]]  # One is enough, and stays enough.


def test_a_worker_s_longest_refusal_becomes_a_record_that_can_be_read_back() -> None:
    """The reason is put before it; a longer one than readers take ended every later start."""
    harness = Harness()
    submitted(harness, "a")
    harness.node()
    harness.step(Answered(OrderKey(JobId("a"), Order("start")), Refused(reason="x" * 4096)))
    record = harness.job("a")
    assert record.reason.startswith("it cannot be started: xxx")
    assert codec.decode_record(codec.encode_record(record, 1), JobRecord, "a")[0] == record


def test_a_job_whose_record_is_damaged_keeps_its_id_and_its_aggregators() -> None:
    harness = Harness()
    found = {"jobs": frozenset({"a"}), "nodes": frozenset({"a1"})}
    harness.step(Recovered(9, {"jobs": {}, "nodes": {}, "policies": {}}, found))
    answer = harness.answer(SubmitJob(spec=spec("a")))
    assert isinstance(answer, Refused)
    assert "the record of job a is damaged; restore key a of bucket jobs" in answer.reason
    for id in ("a1", "a2"):
        harness.see(heartbeat(id, harness.now_s))
        assert orders(harness.see(heartbeat(id, harness.now_s, buckets=2 * (id == "a1")))) == []
    given = harness.answer(AllocateAggregators(request="r", cluster=ClusterId("c1"), count=1))
    assert isinstance(given, AggregatorsAllocated)
    assert given.aggregators == ("a2",)


# How far jobs are ---------------------------------------------------------------------------------


def iterated(harness: Harness, id: str, first: int = 1, ended: int = 10) -> None:
    """Both ranks of a job report that so many iterations ended."""
    for rank in range(2):
        harness.see(
            IterationsObserved(
                job=JobId(id), rank=rank, first_iteration=first, durations_s=(0.1,) * ended,
                location_epoch=0, bytes_pushed=0, bytes_pulled=0,
            )
        )  # fmt: skip


def running_job(harness: Harness, id: str = "j1", iterations: int = 300) -> None:
    harness.node()
    harness.ask(SubmitJob(spec=JobSpec(id=id, workers=2, program=("x",), iterations=iterations)))
    harness.ask(RegisterJob(job=id, rank=0, tensors=TENSORS))


def test_progress_is_given_beside_the_record_and_never_stored() -> None:
    harness = Harness()
    harness.report("c0", 1.0)
    running_job(harness)
    before = dict(harness.stored["jobs"])
    iterated(harness, "j1")
    assert harness.stored["jobs"] == before
    info, listed = harness.answer(GetJob(job="j1")), harness.answer(ListJobs())
    assert isinstance(info, JobInfo)
    assert isinstance(listed, JobList)
    assert info.progress is not None
    assert (info.progress.iteration, info.progress.iterations) == (10, 300)
    assert [rank.iteration for rank in info.progress.ranks] == [10, 10]
    assert listed.progress[JobId("j1")] == msgspec.structs.replace(info.progress, ranks=())


def test_a_new_master_learns_progress_with_the_next_reports() -> None:
    harness = Harness()
    harness.report("c0", 1.0)
    running_job(harness)
    iterated(harness, "j1")
    harness.restart()
    info = harness.answer(GetJob(job="j1"))
    assert isinstance(info, JobInfo)
    assert info.progress is None
    iterated(harness, "j1", first=11)
    info = harness.answer(GetJob(job="j1"))
    assert isinstance(info, JobInfo)
    assert info.progress is not None
    assert info.progress.iteration == 20


def test_only_a_jobs_own_controller_says_where_it_is() -> None:
    harness = Harness()
    harness.report("c0", 1.0)
    running_job(harness)
    for cluster, loss in (("c0", 0.03), ("c1", 0.9)):
        harness.see(
            ClusterReport(
                cluster=ClusterId(cluster), free_cpu=1.0, jobs=(), at_s=harness.now_s,
                aggregators=(AggregatorId("a1"), AggregatorId("a2")),
                placed={JobId("j1"): PlacedJob(at=(1,), phase="steady", loss=loss)},
            )
        )  # fmt: skip
    info = harness.answer(GetJob(job="j1"))
    assert isinstance(info, JobInfo)
    assert info.progress is not None
    assert (info.progress.aggregators, info.progress.loss) == (("a2",), 0.03)


def test_reports_of_ranks_that_a_job_does_not_have_are_not_kept() -> None:
    harness = Harness()
    running_job(harness)
    for rank in range(2, 1000):
        harness.see(
            IterationsObserved(
                job=JobId("j1"), rank=rank, first_iteration=1, durations_s=(0.1,),
                location_epoch=0, bytes_pushed=0, bytes_pulled=0,
            )
        )  # fmt: skip
    assert not harness.core.state.jobs[JobId("j1")].progress.ranks


def test_a_list_in_the_order_that_people_want() -> None:
    """Running jobs come first, then waiting ones, then ended ones, the latest first; each state is
    counted."""
    harness = Harness()
    harness.node(slots=2)
    for number, id in enumerate(("old", "older", "runs", "waits", "waits2")):
        harness.now_s += number
        spec = JobSpec(id=id, workers=1, program=("x",), tenant="t" if "waits" in id else "")
        harness.ask(SubmitJob(spec=spec))
        if id == "older":
            harness.ask(CancelJob(job="older"))
            harness.now_s += 1
            harness.ask(CancelJob(job="old"))
        if id == "runs":
            harness.ask(SubmitJob(spec=JobSpec(id="runs2", workers=1, program=("x",))))
    found = harness.answer(ListJobs(order="active"))
    assert isinstance(found, JobList)
    assert [job.spec.id for job in found.jobs] == [
        "runs", "runs2", "waits", "waits2", "old", "older",
    ]  # fmt: skip
    assert found.counts == {"running": 2, "pending": 2, "cancelled": 2}
    of_tenant = harness.answer(ListJobs(order="active", tenant="t", state="running"))
    assert isinstance(of_tenant, JobList)
    assert (of_tenant.jobs, of_tenant.counts) == ((), {"pending": 2})


def test_a_draining_aggregator_is_told_as_such() -> None:
    harness = Harness()
    harness.see(
        ClusterReport(
            cluster=ClusterId("c0"), free_cpu=1.0, jobs=(), at_s=harness.now_s,
            aggregators=(AggregatorId("a1"),), drains={AggregatorId("a1"): "late"},
        )
    )  # fmt: skip
    beat = AggregatorHeartbeat(
        service="aggregator", id="a1", incarnation=1, at_s=0.0, node=NodeId("n1"), cpu_share=0.1,
        addresses=(), buckets=0, jobs=0, held_bytes=0, busy_s=0.0, bytes_in=0, bytes_out=0,
    )  # fmt: skip
    harness.see(beat)
    listed = harness.answer(ListAggregators())
    assert isinstance(listed, AggregatorList)
    assert [info.drain for info in listed.aggregators] == ["late"]


def test_an_impossible_transition_of_a_job_tells_its_story_and_changes_nothing() -> None:
    harness = Harness()
    harness.ask(SubmitJob(spec=spec("a")))
    job = harness.core.state.jobs[JobId("a")]
    record, out = job.record, list(harness.core.state.out)
    with pytest.raises(InvalidTransition) as caught:
        harness.core.state.change(job, 1.0, "stopping", state="stopping")
    assert str(caught.value) == (
        "job a: pending -> stopping (stopping) is impossible; before: pending (it is submitted or "
        "found)"
    )
    assert job.record is record
    assert harness.core.state.out == out, "nothing is stored or told"


def test_an_index_that_is_not_what_the_records_say_is_found() -> None:
    harness = Harness()
    harness.ask(SubmitJob(spec=spec("a")))
    harness.core.state.live += 1
    with pytest.raises(AssertionError, match=r"'live': \(2, 1\)"):
        harness.core.state.check_invariants()


def test_a_job_that_lost_its_optimizer_s_state_keeps_that_in_its_record() -> None:
    harness = Harness()
    harness.report("c0", 1.0)
    running_job(harness)
    lost = JobEvent(job=JobId("j1"), fact="optimizer-state-lost", at_s=harness.now_s)
    harness.see(JobEvent(job=JobId("another"), fact="optimizer-state-lost", at_s=harness.now_s))
    assert not harness.stored["jobs"]["j1"].optimizer_state_lost
    harness.see(lost)
    assert harness.stored["jobs"]["j1"].optimizer_state_lost
