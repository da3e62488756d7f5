"""Gangs start whole: every node keeps room before any rank is started."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.services.master.test_gpu_dispatch import GpuHarness
from tests.unit.services.master.test_master_core import orders

from slackwater.common.base.effects import Answered, Effect, Publish, RefusedSoFar, Request
from slackwater.schemas.base import CONFLICT, JobId, Message, NodeId, Ok, Refused
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_requests import PauseJob, ResumeJob
from slackwater.schemas.workers import (
    FETCH_VENV_S,
    Prepared,
    PrepareWorkers,
    StartWorkers,
    StopWorkers,
    WorkerExited,
)
from slackwater.services.master.gang_starts import STEP_S
from slackwater.services.master.keys import Order, OrderKey, Verb
from slackwater.services.master.nodes import FIRST_AVOIDED_S

BUSY = Refused(reason="n2: GPU n2/0 is held by job z, rank 0", retry_after_s=1.0)


class Asked(GpuHarness):
    """Answers to `prepare` are the test's."""

    def __init__(self, **config: object) -> None:
        super().__init__(**config)  # type: ignore[arg-type]
        self.prepares = False

    def answer_prepare(self, node: str, message: Message, attempt: str = "") -> list[Effect]:
        key = OrderKey(JobId("a"), Order("prepare", f"{attempt}@{node}"))
        return self.step(Answered(key, message))

    def obey(self, verb: Verb, where: str) -> list[Effect]:
        return self.step(Answered(OrderKey(JobId("a"), Order(verb, where)), Ok()))


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
    effects = harness.tick(STEP_S)
    stops = [m for m in orders(effects) if isinstance(m, StopWorkers)]
    assert [stop.job for stop in stops] == ["a"], "the one node that had kept room"
    why = "does not take it: it does not answer" if silent else "n2/0 is held by job z"
    told = [e.message for e in effects if isinstance(e, Publish)]
    assert any(isinstance(fact, JobEvent) and why in fact.reason for fact in told)
    effects = harness.confirm("stop@n1/a")  # type: ignore[assignment]
    assert harness.job("a").attempt == 1
    assert "worker node n2 is left out for 5 s more: it did not take job a" in harness.why("a")
    harness.hear()
    assert not kinds(harness.tick(FIRST_AVOIDED_S - 1.0)), "n2 is left out"
    harness.hear()
    effects = harness.tick(2.0)
    assert set(kinds(effects)) == {"PrepareWorkers"}, "there are no other GPUs"


def test_nodes_get_the_virtual_environment_and_the_time_to_fetch_it() -> None:
    harness = Asked()
    asked = orders(harness.submit("a", 4, venv="e" * 64))  # type: ignore[arg-type]
    assert [m.venv for m in asked if isinstance(m, PrepareWorkers)] == ["e" * 64] * 2
    harness.tick(1.0)
    for _ in range(int(FETCH_VENV_S / 10.0)):
        harness.hear()
        harness.tick(10.0)
        assert harness.job("a").state == "starting"
    for node in ("n1", "n2"):
        effects = harness.answer_prepare(node, Prepared(host=node, port=1))
    starts = [m for m in orders(effects) if isinstance(m, StartWorkers)]
    assert [start.venv for start in starts] == ["e" * 64] * 2


def test_a_refusal_of_an_attempt_that_was_given_up_does_not_fail_the_job() -> None:
    """Red before: a node that answered too late, and then refused for good, failed a job that went
    on elsewhere by then, or waited for other GPUs."""
    harness = Asked()
    harness.submit("a", 4)
    harness.answer_prepare("n1", Prepared(host="n1.example", port=1))
    harness.tick(1.0)
    harness.hear()
    harness.tick(STEP_S)
    harness.confirm("stop@n1/a")
    gone = "n2: attempt 0 of job a was given up"
    for again in range(2):
        harness.answer_prepare("n2", Refused(reason=gone, code=CONFLICT))
        record = harness.job("a")
        assert (record.state, record.attempt) == (("paused", "starting")[again], 1)
        harness.hear()
        harness.tick(FIRST_AVOIDED_S + 1.0)
    harness.answer_prepare("n2", Refused(reason="n2: there is no script"), attempt="-1")
    assert harness.job("a").state == "failed"


def test_a_gang_whose_ranks_one_node_does_not_start_is_stopped_everywhere() -> None:
    """Regression: the node died after its answer. The others' ranks waited for its own for as long
    as a node may be silent, half a minute, and so did their GPUs."""
    harness = Asked(gpu_policy="sf")
    harness.submit("a", 4)
    for node in ("n1", "n2"):
        harness.answer_prepare(node, Prepared(host=node, port=1))
    harness.confirm("start@n1/a")
    harness.tick(1.0)
    harness.hear("n1")
    stops = [m for m in orders(harness.tick(STEP_S)) if isinstance(m, StopWorkers)]
    assert [stop.attempt for stop in stops] == [0, 0]
    assert "n2 does not start it: it does not answer" in harness.job("a").reason
    harness.confirm("stop@n1/a")
    harness.hear("n1")
    harness.tick(1.0)
    assert harness.job("a").state == "stopping", "n2 may still run its ranks"
    assert harness.job("a").gpu_ids == {"n2": ("n2/0", "n2/1")}
    harness.prepares = True
    harness.submit("b", 2)
    harness.confirm("start/b")
    assert (harness.job("b").state, harness.job("b").node) == ("running", "n1")


def test_a_node_that_takes_no_gang_is_left_out_for_longer_each_time_until_it_takes_one() -> None:
    harness = Asked()
    harness.submit("a", 4)
    lefts = []
    for attempt in range(6):
        at = f"-{attempt}" if attempt else ""
        harness.answer_prepare("n1", Prepared(host="n1", port=1), at)
        for _ in range(7):
            harness.hear()
            harness.tick(1.0)
        harness.obey("stop", f"{at}@n1")
        lefts.append(float(harness.why("a").partition("left out for ")[2].partition(" ")[0]))
        while harness.job("a").state != "starting":
            harness.hear()
            harness.tick(1.0)
    assert [round(left / 5) * 5 for left in lefts] == [5, 10, 20, 40, 60, 60]
    harness.prepares = True
    for node in ("n1", "n2"):
        harness.answer_prepare(node, Prepared(host=node, port=1), "-6")
        harness.obey("start", f"-6@{node}")
    assert harness.job("a").state == "running"
    assert harness.core.state.nodes.avoid(NodeId("n2"), "again", harness.now_s) == FIRST_AVOIDED_S


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


def test_ranks_that_meet_without_aggregators_all_start_again() -> None:
    """Regression: rank 0 had ended before its gang was paused, and was not started again: the
    others waited for it for ever."""
    harness = GpuHarness()
    harness.submit("a", 2)
    harness.confirm("start/a")
    harness.ask(WorkerExited(job="a", rank=0, node=NodeId("n1"), code=0, result="{}"))
    assert harness.job("a").results == {"0": "{}"}
    harness.ask(PauseJob(job="a"))
    harness.confirm("stop/a")
    effects = harness.ask(ResumeJob(job="a"))
    (start,) = [m for m in orders(effects) if isinstance(m, StartWorkers)]
    assert start.ranks == (0, 1)


def test_a_gang_that_another_master_may_have_started_is_stopped_on_every_node() -> None:
    """Regression: a master was restarted when ranks ran already, asked again, and took the node
    that did not answer in time for one on which nothing of the job was."""
    harness = Asked()
    harness.submit("a", 4)
    for node in ("n1", "n2"):
        harness.answer_prepare(node, Prepared(host=node, port=1))
    harness.restart()
    harness.hear()
    harness.tick(1.0)
    harness.hear()
    stops = [m for m in orders(harness.tick(STEP_S)) if isinstance(m, StopWorkers)]
    assert len(stops) == 2
    harness.obey("stop", "@n1")
    assert harness.job("a").state == "stopping"
    harness.obey("stop", "@n2")
    assert harness.job("a").state == "paused"


def test_ranks_that_end_before_their_start_is_confirmed_have_started() -> None:
    """Regression: no node was late any more, the job was still starting, and the master failed."""
    harness = GpuHarness()
    harness.submit("a", 4)
    harness.confirm("start@n1/a")
    for rank in (2, 3):
        harness.ask(WorkerExited(job="a", rank=rank, node=NodeId("n2"), code=0, result="{}"))
    assert harness.job("a").state == "running"
    harness.hear()
    harness.tick(STEP_S + 1.0)
    assert harness.job("a").state == "running"
