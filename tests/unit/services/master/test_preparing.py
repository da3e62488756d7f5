"""Gangs start whole: every node keeps room before any rank is started."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.services.master.test_gpu_dispatch import GpuHarness
from tests.unit.services.master.test_master_core import orders

from slackwater.common.base.effects import Answered, Effect, Publish, RefusedSoFar, Request
from slackwater.schemas.base import JobId, Message, Ok, Refused
from slackwater.schemas.jobs import JobEvent
from slackwater.schemas.workers import Prepared, PrepareWorkers, StartWorkers, StopWorkers
from slackwater.services.master.keys import Order, OrderKey
from slackwater.services.master.lifecycle import PREPARE_S

BUSY = Refused(reason="n2: GPU n2/0 is held by job z, rank 0", retry_after_s=1.0)


class Asked(GpuHarness):
    """Answers to `prepare` are the test's."""

    def __init__(self, **config: object) -> None:
        super().__init__(**config)  # type: ignore[arg-type]
        self.prepares = False

    def answer_prepare(self, node: str, message: Message, attempt: str = "") -> list[Effect]:
        key = OrderKey(JobId("a"), Order("prepare", f"{attempt}@{node}"))
        return self.step(Answered(key, message))


def kinds(effects: list[Effect]) -> list[str]:
    return [type(message).__name__ for message in orders(effects)]


def test_nothing_starts_before_all_nodes_are_prepared() -> None:
    harness = Asked()
    assert kinds(harness.submit("a", 4)) == ["PrepareWorkers", "PrepareWorkers"]  # type: ignore[arg-type]
    assert kinds(harness.answer_prepare("n2", Prepared(host="n2.example", port=2))) == []
    effects = harness.answer_prepare("n1", Prepared(host="n1.example", port=1))
    starts = [message for message in orders(effects) if isinstance(message, StartWorkers)]
    assert [start.rendezvous for start in starts] == ["n1.example:1", "n1.example:1"]
    assert harness.job("a").state == "starting"


def test_ranks_of_one_node_meet_on_its_loopback() -> None:
    harness = Asked()
    harness.submit("a", 2)
    key = OrderKey(JobId("a"), Order("prepare"))
    (start,) = orders(harness.step(Answered(key, Prepared(host="n1.example", port=7))))
    assert isinstance(start, StartWorkers)
    assert start.rendezvous == "127.0.0.1:7"


def test_a_refusal_for_good_fails_the_job_and_nothing_was_started() -> None:
    harness = Asked()
    harness.submit("a", 4)
    harness.answer_prepare("n1", Prepared(host="n1.example", port=1))
    effects = harness.answer_prepare("n2", Refused(reason="n2: there is no script train.py"))
    assert kinds(effects) == ["StopWorkers", "StopWorkers"]
    assert harness.job("a").state == "failed"
    assert harness.job("a").reason == "it cannot be started: n2: there is no script train.py"


@pytest.mark.parametrize("silent", [False, True])
def test_a_gang_that_one_node_does_not_take_gives_its_gpus_up_in_time(silent: bool) -> None:
    """Regression of the design: a node that does not answer is not waited for, since nothing of
    the job can run there."""
    harness = Asked()
    harness.submit("a", 4)
    harness.answer_prepare("n1", Prepared(host="n1.example", port=1))
    if not silent:
        key = OrderKey(JobId("a"), Order("prepare", "@n2"))
        harness.step(RefusedSoFar(key, BUSY))
        assert "waits for worker node n2, which refused: n2: GPU n2/0" in harness.why("a")
    harness.tick(1.0)
    assert harness.job("a").state == "starting"
    harness.hear()
    effects = harness.tick(PREPARE_S)
    stops = [m for m in orders(effects) if isinstance(m, StopWorkers)]
    assert [stop.job for stop in stops] == ["a"], "the one node that had kept room"
    why = "does not take it: it does not answer" if silent else "n2/0 is held by job z"
    told = [e.message for e in effects if isinstance(e, Publish)]
    assert any(isinstance(fact, JobEvent) and why in fact.reason for fact in told)
    effects = harness.confirm("stop@n1/a")  # type: ignore[assignment]
    assert harness.job("a").attempt == 1
    assert set(kinds(effects)) == {"PrepareWorkers"}, "the policy chose the same GPUs once more"


def test_a_master_that_was_killed_asks_again_and_starts_nothing_twice() -> None:
    harness = Asked()
    harness.submit("a", 4)
    harness.answer_prepare("n1", Prepared(host="n1.example", port=1))
    assert kinds(harness.restart()) == ["PrepareWorkers", "PrepareWorkers"]
    harness.answer_prepare("n1", Prepared(host="n1.example", port=1))
    effects = harness.answer_prepare("n2", Prepared(host="n2.example", port=2))
    assert kinds(effects) == ["StartWorkers", "StartWorkers"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["prepared", "busy", "never", "started", "stopped", "tick", "restart"]),
            st.sampled_from(["n1", "n2"]),
        ),
        max_size=30,
    )
)
def test_no_order_of_answers_starts_half_a_gang(steps: list[tuple[str, str]]) -> None:
    """A start goes out only in the step in which both nodes have said, in this life of the master,
    that they keep room for this attempt."""
    harness = Asked()
    prepared: set[tuple[int, str]] = set()
    effects: list[Effect] = list(harness.submit("a", 4))  # type: ignore[arg-type]
    for what, node in [("", ""), *steps]:
        job = harness.core.state.jobs[JobId("a")]
        attempt, order = job.record.attempt, job.order("prepare", node)  # type: ignore[arg-type]
        asked = {str(each) for each in job.asked}
        match what:
            case "prepared" if str(order) in asked:
                prepared.add((attempt, node))
                answer = Prepared(host=node, port=1)
                effects = harness.step(Answered(OrderKey(job.id, order), answer))
            case "busy" if str(order) in asked:
                effects = harness.step(RefusedSoFar(OrderKey(job.id, order), BUSY))
            case "never" if str(order) in asked:
                final = Refused(reason="there is no script")
                effects = harness.step(Answered(OrderKey(job.id, order), final))
            case "started" | "stopped":
                verb = "start" if what == "started" else "stop"
                told = job.order(verb, node)  # type: ignore[arg-type]
                if str(told) in asked:
                    effects = harness.step(Answered(OrderKey(job.id, told), Ok()))
            case "tick":
                harness.hear()
                effects = harness.tick(2.0)
            case "restart":
                prepared.clear()
                effects = harness.restart()
                harness.hear()
        starts = [
            e.message
            for e in effects
            if isinstance(e, Request) and isinstance(e.message, StartWorkers)
        ]
        for start in starts:
            state = harness.job("a").state
            assert state == "running" or {(start.attempt, "n1"), (start.attempt, "n2")} <= prepared
        effects = []


def test_every_prepare_names_the_ranks_of_its_node() -> None:
    harness = Asked()
    effects = harness.submit("a", 4)
    found = [m for m in orders(effects) if isinstance(m, PrepareWorkers)]  # type: ignore[arg-type]
    assert [(m.ranks, m.gpu_ids) for m in found] == [
        ((0, 1), ("n1/0", "n1/1")),
        ((2, 3), ("n2/0", "n2/1")),
    ]
