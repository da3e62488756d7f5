"""Jobs with GPUs, event by event: intended first, then stops, then starts once all have left."""

from typing import Any

import msgspec
import pytest
from tests.unit.services.master.test_master_core import Harness, facts, only, orders, spec

from slackwater.common.base.effects import Answered, Effect, Log, Persist, Publish, Reply, Request
from slackwater.common.base.errors import ConfigRejected
from slackwater.schemas.base import RUN_ATTEMPTS, JobId, NodeId, Ok, Refused
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.job_requests import CancelJob, SubmitJob
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.scheduling import GetPolicy, PolicyEvent, PolicyInfo, SetPolicy
from slackwater.schemas.workers import (
    Prepared,
    PrepareWorkers,
    StartWorkers,
    StopWorkers,
    WorkerExited,
)
from slackwater.services.master.config import Tenant
from slackwater.services.master.gpu_policy import live_policies
from slackwater.services.master.keys import Order, OrderKey, Verb
from slackwater.services.master.state import _gpus_held


class GpuHarness(Harness):
    """Nodes n1 and n2 with `gpus` GPUs each, which keep room for whatever they are asked."""

    def __init__(self, gpus: int = 2, **config: object) -> None:
        self.gpus, self.prepares = gpus, True
        super().__init__(**config)
        self.hear()
        self.now_s += 3.0  # All nodes were heard by then.

    def step(self, event: Any) -> list[Effect]:
        effects = super().step(event)
        prepared = Prepared(host="node.example", port=29500)
        for asked in effects if self.prepares else ():
            if isinstance(asked, Request) and isinstance(asked.message, PrepareWorkers):
                effects = [*effects, *self.step(Answered(asked.key, prepared))]
        return effects

    def hear(self, *nodes: str) -> list[object]:
        effects: list[object] = []
        for node in nodes or ("n1", "n2"):
            gpus = tuple(Gpu(index=n, id=f"{node}/{n}", type="fake") for n in range(self.gpus))
            beat = WorkerHeartbeat(
                service="worker", id=node, incarnation=0, at_s=self.now_s, node=NodeId(node),
                slots=8, gpus=gpus,
            )  # fmt: skip
            effects += self.see(beat)
        return effects

    def submit(self, id: str, gpus: int, **fields: object) -> list[object]:
        self.now_s += 1.0
        asked = spec(id, workers=gpus, gpus=gpus, **fields)
        return list(self.ask(SubmitJob(spec=asked)))

    def confirm(self, what: str) -> list[object]:
        """`what`: order/job."""
        order, _, job = what.partition("/")
        verb, at, node = order.partition("@")
        key = OrderKey(JobId(job), Order(msgspec.convert(verb, Verb), at + node))
        return list(self.step(Answered(key, Ok())))


def started(effects: list[object]) -> dict[str, tuple[str, ...]]:
    """Node and job -> the GPUs that it is given."""
    return {
        f"{effect.subject.split('.')[4]} {effect.message.job}": effect.message.gpu_ids
        for effect in effects
        if isinstance(effect, Request) and isinstance(effect.message, StartWorkers)
    }


def test_a_gang_lies_on_several_nodes_and_runs_once_all_have_started_it() -> None:
    harness = GpuHarness()
    effects = harness.submit("a", 4)
    assert started(effects) == {"n1 a": ("n1/0", "n1/1"), "n2 a": ("n2/0", "n2/1")}
    record = harness.job("a")
    assert (record.state, record.allocation) == ("starting", (("n1", 2), ("n2", 2)))
    harness.confirm("start@n1/a")
    assert harness.job("a").state == "starting"
    assert facts(harness.confirm("start@n2/a")) == ["running"]  # type: ignore[arg-type]


def test_a_paused_job_leaves_its_gpus_before_the_next_one_is_started() -> None:
    """A shorter job comes: `a` is intended to stop in the step in which `b` is given its GPUs, and
    no order for `b` goes out before the exit of `a` is known."""
    harness = GpuHarness(gpus=1, gpu_policy="sf")
    harness.submit("a", 2)
    harness.confirm("start@n1/a")
    harness.confirm("start@n2/a")
    effects = harness.submit("b", 1)
    assert {e.key for e in effects if isinstance(e, Persist)} == {"a", "b"}
    assert (harness.job("a").state, harness.job("b").state) == ("stopping", "starting")
    assert started(effects) == {}
    stops = [m for m in orders(effects) if isinstance(m, StopWorkers)]  # type: ignore[arg-type]
    assert [(stop.job, stop.attempt) for stop in stops] == [("a", 0), ("a", 0)]
    harness.confirm("stop@n1/a")
    effects = harness.confirm("stop@n2/a")
    assert harness.job("a").state == "paused"
    assert harness.job("a").attempt == 1
    assert started(effects) == {"n1 b": ("n1/0",)}
    assert harness.job("a").gpu_s > 0.0
    assert harness.job("a").preemptions == 1


def test_a_late_exit_of_a_former_attempt_ends_nothing() -> None:
    harness = GpuHarness(gpus=1, gpu_policy="sf")
    harness.submit("a", 2)
    harness.submit("b", 1)
    for node in ("n1", "n2"):
        harness.confirm(f"stop@{node}/a")
    harness.confirm("start/b")
    exits = WorkerExited(job="b", rank=0, node=NodeId("n1"), code=0, result="{}")
    effects = harness.ask(exits)
    assert harness.job("b").state == "completed"
    again = [m for m in orders(effects) if isinstance(m, StartWorkers) and m.job == "a"]
    assert [m.attempts for m in again] == [(RUN_ATTEMPTS,), (RUN_ATTEMPTS,)]
    for rank, code in ((0, -15), (1, 0)):  # They come late, or once more.
        harness.ask(WorkerExited(job="a", rank=rank, node=NodeId("n1"), code=code, result="{}"))
    assert harness.job("a").state == "starting"
    assert harness.job("a").results == {}
    for rank in (0, 1):
        late = WorkerExited(
            job="a", rank=rank, node=NodeId("n1"), code=0, result="{}", attempt=RUN_ATTEMPTS
        )
        harness.ask(late)
    assert harness.job("a").state == "completed"


@pytest.mark.parametrize("code", [-15, 0])
def test_an_end_that_is_told_again_does_not_fail_a_paused_job(code: int) -> None:
    """Regression: a worker service repeats an end until it is acknowledged. The job had no
    processes by then, its attempt was the same, and it failed, or the master divided by 0."""
    harness = GpuHarness(gpus=1, gpu_policy="sf")
    harness.submit("a", 2)
    harness.submit("b", 1)
    for node in ("n1", "n2"):
        harness.confirm(f"stop@{node}/a")
    assert harness.job("a").state in ("paused", "pending")
    before = harness.job("a")
    harness.ask(WorkerExited(job="a", rank=0, node=NodeId("n1"), code=code, result="{}"))
    assert harness.job("a") == before


def test_a_master_that_is_killed_during_a_pause_goes_on_with_it() -> None:
    harness = GpuHarness(gpus=1, gpu_policy="sf")
    harness.submit("a", 2)
    harness.submit("b", 1)
    found = orders(harness.restart())
    assert {type(m).__name__ for m in found} == {"StopWorkers"}, "b waits for the exits of a"
    harness.hear()
    for node in ("n1", "n2"):
        effects = harness.confirm(f"stop@{node}/a")
    assert started(effects) == {"n1 b": ("n1/0",)}


@pytest.mark.parametrize("limit_s", [20.0, 40.0])
def test_a_job_whose_time_is_over_does_not_wait_for_other_gpus(limit_s: float) -> None:
    """Red before: a job over its time limit whose node was silent paused, and waited as long as
    there were no other GPUs; then it was started to be ended at once."""
    harness = GpuHarness(gpus=1, node_silent_s=30.0)
    harness.submit("b", 1)
    harness.confirm("start/b")
    harness.submit("a", 1, time_limit_s=limit_s)
    harness.confirm("start/a")
    node = harness.job("a").node
    other = "n1" if node == "n2" else "n2"
    for _ in range(3):
        harness.now_s += 15.0
        harness.hear(other)
    harness.tick(0.0)
    record = harness.job("a")
    assert record.state == "failed"
    assert record.reason == f"its time is over: it has run for {limit_s:g} s (time_limit_s)"


def test_a_job_that_is_paused_when_its_time_is_over_ends() -> None:
    harness = GpuHarness(gpus=1, gpu_policy="sf")
    harness.submit("a", 2, time_limit_s=20.0)
    for node in ("n1", "n2"):
        harness.confirm(f"start@{node}/a")
    harness.now_s += 20.5  # Between two ticks.
    harness.hear()
    harness.submit("b", 1)
    for node in ("n1", "n2"):
        harness.confirm(f"stop@{node}/a")
    assert harness.job("a").state == "paused"
    harness.tick(1.0)
    assert harness.job("a").state == "failed"


def test_a_job_with_gpus_goes_on_elsewhere_when_its_node_is_silent() -> None:
    """The node that comes back is told to end what it still runs of it."""
    harness = GpuHarness(node_silent_s=30.0)
    harness.submit("a", 2)
    harness.confirm("start/a")
    assert harness.job("a").node == "n1"
    harness.now_s += 20.0
    harness.hear("n2")
    harness.tick(15.0)
    assert harness.job("a").state in ("paused", "starting")
    harness.hear("n2")
    harness.tick(1.0)
    assert (harness.job("a").state, harness.job("a").node) == ("starting", "n2")
    back = WorkerHeartbeat(
        service="worker", id="n1", incarnation=0, at_s=harness.now_s, node=NodeId("n1"), slots=8,
        running=(("a", 0), ("a", 1)),  # type: ignore[arg-type]
    )  # fmt: skip
    assert StopWorkers(job="a", attempt=0) in orders(harness.see(back))


def test_a_policy_that_fails_changes_nothing_and_the_operator_is_told() -> None:
    harness = GpuHarness()
    harness.submit("a", 2)

    def fails(*_: object) -> object:
        raise ValueError("it cannot")

    harness.core.state.gpus.scheduler.policy.allocate = fails  # type: ignore[method-assign, assignment]
    effects = harness.submit("b", 2)
    assert only(effects, Log).event == "policy.failed"  # type: ignore[arg-type]
    assert "ValueError: it cannot" in harness.why("b")
    assert harness.job("a").state == "starting"
    assert harness.core.state.gpus.failures == 1


def test_a_job_that_waits_for_gpus_names_the_rule_the_resource_and_who_holds_it() -> None:
    harness = GpuHarness()
    harness.submit("a", 3)
    harness.submit("b", 2)
    harness.submit("c", 1)
    assert "waits for 2 GPUs, 1 idle; held by a (3)" in harness.why("b")
    assert "rule: " in harness.why("b")
    assert "job b" in harness.why("c")
    harness.submit("huge", 8)
    assert harness.why("huge") == (
        "waits for 8 GPUs: all nodes together have 4; start a worker node with more, or submit the "
        "job with fewer"
    )
    harness.ask(CancelJob(job="b"))
    assert harness.job("c").state == "starting"


def test_a_process_that_a_policy_would_split_over_nodes_is_explained() -> None:
    """Regression: such a start was left out without a word. Three GPUs a node, two a process."""
    harness = GpuHarness(gpus=3)
    asked = spec("a", workers=2, gpus=4)
    effects = harness.ask(SubmitJob(spec=asked))
    assert facts(effects) == ["pending", "waiting"]
    told = only(effects, Log)
    assert (told.event, told.level) == ("policy.splits-process", "warning")
    said = "the policy fifo gave it 3 on n1 and 1 on n2, which splits a process over nodes"
    assert said in harness.why("a")
    assert "each of its 2 processes has 2 GPUs of one node" in harness.why("a")
    assert harness.job("a").state == "pending"
    again = [*harness.tick(), *harness.submit("b", 6)]
    assert [fact for fact in facts(again) if fact == "waiting"] == []
    assert not any(isinstance(effect, Log) for effect in again), "said once"
    harness.ask(CancelJob(job="a"))
    assert harness.job("b").state == "starting"
    harness.tick()
    assert harness.core.state.gpus.split == {}


def test_jobs_that_wait_for_gpus_are_told_once_at_the_next_tick() -> None:
    """A policy explains all at once, so that a thousand submissions cost no thousand walks."""
    harness = GpuHarness()
    harness.submit("a", 4)
    for number in range(3):
        assert facts(harness.submit(f"b{number}", 1)) == ["pending"]  # type: ignore[arg-type]
    assert facts(harness.tick()) == ["waiting"] * 3
    assert facts(harness.tick()) == []


def test_a_job_that_asks_for_what_the_policy_ignores_is_refused_by_name() -> None:
    harness = GpuHarness(gpu_policy="tiresias-artifact")
    said = harness.answer(SubmitJob(spec=spec("a", workers=1, gpus=1, priority=3)))
    assert isinstance(said, Refused)
    assert "priority" in said.reason


def test_a_job_that_may_not_be_paused_keeps_its_gpus() -> None:
    harness = GpuHarness(gpus=1, gpu_policy="sf")
    harness.submit("a", 2, preemptible=False)
    harness.submit("b", 1)
    assert harness.job("a").state == "starting"
    assert harness.job("b").state == "pending"


def test_tenants_have_quotas_of_gpus() -> None:
    harness = GpuHarness(tenants={"t": Tenant(gpus=2), "u": Tenant(gpus=2)})
    assert harness.core.state.gpus.scheduler.rules.quotas == {"t": 2, "u": 2}


# The policy of a running cluster ------------------------------------------------------------------


def test_a_policy_that_is_set_is_stored_told_and_outlasts_the_master() -> None:
    harness = GpuHarness(gpus=1)
    harness.submit("a", 2)
    harness.submit("b", 1)
    assert harness.job("b").state == "pending"
    effects = harness.ask(SetPolicy(policy="sf"))
    assert next(e.key for e in effects if isinstance(e, Persist)) == "gpus"
    said = only(effects, Reply).message
    assert isinstance(said, PolicyInfo)
    assert (said.policy, said.chosen) == ("sf", True)
    told = [e.message for e in effects if isinstance(e, Publish)]
    assert any(isinstance(m, PolicyEvent) and m.before == "fifo" for m in told)
    assert harness.job("a").state == "stopping", "the new policy prefers the smaller job"
    harness.restart()
    found = harness.answer(GetPolicy())
    assert isinstance(found, PolicyInfo)
    assert (found.policy, found.chosen) == ("sf", True)


@pytest.mark.parametrize("policy", ["srsf", "optimus", "harmony"])
def test_a_policy_that_plans_with_what_only_a_simulator_knows_is_refused(policy: str) -> None:
    said = GpuHarness().answer(SetPolicy(policy=policy))
    assert isinstance(said, Refused)
    assert policy in said.reason
    with pytest.raises(ConfigRejected, match="does not know"):
        GpuHarness(gpu_policy=policy)


@pytest.mark.parametrize("policy", ["srsf", "nonsense"])
def test_a_refused_policy_is_told_with_those_that_a_running_cluster_takes(policy: str) -> None:
    """The remedy named policies of simulations, and left easy-backfill out."""
    said = GpuHarness().answer(SetPolicy(policy=policy))
    assert isinstance(said, Refused)
    named = said.reason.partition("choose one of ")[2].split(", ")
    assert named == live_policies()
    assert {"fifo", "easy-backfill", "pollux"} <= set(named)
    for each in named:
        assert GpuHarness(gpu_policy=each).core.state.gpus.policy == each


def test_a_policy_with_an_unknown_option_is_refused_and_the_old_one_stays() -> None:
    harness = GpuHarness()
    said = harness.answer(SetPolicy(policy="tiresias-las", settings={"limit": "3"}))
    assert isinstance(said, Refused)
    assert "limits" in said.reason
    assert harness.core.state.gpus.policy == "fifo"


def test_a_gpu_that_two_nodes_say_they_have_is_given_up_once() -> None:
    """Found by mutated messages: the job's end failed."""
    spec = JobSpec(id="a", gpus=2, workers=2, program=("p",))
    ids = {NodeId("n1"): ("g",), NodeId("n2"): ("g",)}
    record = JobRecord(spec=spec, state="running", gpu_ids=ids)
    assert list(_gpus_held(record)) == ["g"]
