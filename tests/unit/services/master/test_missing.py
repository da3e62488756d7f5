"""Ranks that others wait for are named: ended, dead, silent, or not going on."""

import pytest
from tests.unit.services.master.test_master_core import TENSORS, Harness, only, spec, submitted

from slackwater.common.base.effects import Answered, Request
from slackwater.schemas.base import JobId, NodeId, Ok
from slackwater.schemas.job_requests import AskMissing, CancelJob, MissingRanks, RegisterJob
from slackwater.schemas.logs import LogPiece, ReadLog
from slackwater.schemas.telemetry import IterationsObserved
from slackwater.schemas.workers import WorkerExited
from slackwater.services.master.keys import Order, OrderKey


def observed(rank: int, iteration: int) -> IterationsObserved:
    return IterationsObserved(
        job=JobId("a"), rank=rank, first_iteration=iteration, durations_s=(0.1,),
        location_epoch=0, bytes_pushed=0, bytes_pulled=0,
    )  # fmt: skip


def running(**spec: int) -> Harness:
    harness = Harness()
    submitted(harness, "a", iterations=20, **spec)
    harness.node()
    harness.step(Answered(OrderKey(JobId("a"), Order("start")), Ok()))
    for rank in (0, 1):
        harness.see(observed(rank, 13))
    return harness


def ask(harness: Harness, waited_s: float, iteration: int = 14) -> MissingRanks:
    question = AskMissing(
        job="a", rank=0, iteration=iteration, waited_s=waited_s, behind=((1, 13),)
    )
    answer = harness.answer(question)
    assert isinstance(answer, MissingRanks)
    return answer


def exited(harness: Harness, rank: int, code: int) -> None:
    harness.ask(WorkerExited(job="a", rank=rank, node=NodeId("n1"), code=code))


def test_a_rank_that_ended_early_is_named_and_nobody_waits_for_it() -> None:
    harness = running()
    exited(harness, 1, 0)
    told = ask(harness, 2.0)
    assert told.final
    assert told.reason.startswith(
        "rank 1 ended after iteration 13 of 20; rank 0 waits at iteration 14; give every rank the "
        "same number of iterations"
    )
    assert harness.why("a").startswith("rank 1 ended after iteration 13 of 20")


def test_a_rank_that_is_busy_is_named_and_may_go_on() -> None:
    harness = running()
    told = ask(harness, 3.0)
    assert (told.final, told.restarting) == (False, False)
    assert told.reason.startswith(
        "rank 1 has not pushed for 3 s, though its process was heard 0 s ago (iteration 13)"
    )
    harness.now_s += 6.0
    assert harness.why("a") == "", "nobody waits for it any more"


def test_a_rank_that_went_on_is_not_named_any_more() -> None:
    harness = running()
    ask(harness, 3.0)
    harness.see(observed(1, 14))
    assert harness.why("a").startswith("rank 1 has not pushed"), "14 is what rank 0 waits for"
    harness.see(observed(1, 15))
    assert harness.why("a") == ""


def test_a_silent_rank_is_named_with_its_last_line() -> None:
    """No telemetry for 31 s while rank 0 waits: the record says so, and the job goes on."""
    harness = running()
    harness.now_s += 31.0
    harness.node(running=(("a", 0), ("a", 1)))
    effects = harness.ask(
        AskMissing(job="a", rank=0, iteration=14, waited_s=31.0, behind=((1, 13),))
    )
    request = only(effects, Request)
    assert request.message == ReadLog(job="a", rank=1, tail=1)
    line = LogPiece(job="a", rank=1, start=0, data=b"epoch 3: loss 0.12\n", end=19)
    harness.step(Answered(request.key, line))
    assert ask(harness, 32.0).reason == (
        "rank 1 is silent since 31 s (iteration 13, last line: epoch 3: loss 0.12); "
        "rank 0 waits at iteration 14"
    )
    assert harness.job("a").state == "running"
    assert harness.why("a").startswith("rank 1 is silent since 31 s")


def test_a_rank_that_died_by_hand_is_named_within_five_seconds() -> None:
    harness = running()
    harness.now_s += 5.0
    assert ask(harness, 4.0).reason.startswith("rank 1 is silent since 5 s (iteration 13)")


def test_a_rank_that_is_being_started_again_is_given_its_time() -> None:
    harness = running(restarts=3)
    exited(harness, 1, -9)
    told = ask(harness, 2.0)
    assert (told.final, told.restarting) == (False, True)
    assert told.reason.startswith("rank 1 died and is being started again (its attempt 2)")
    harness.step(Answered(OrderKey(JobId("a"), Order("again", "-1-1")), Ok()))
    harness.now_s += 8.0
    told = ask(harness, 10.0)
    assert not told.restarting
    assert told.reason.startswith(
        "rank 1 died 8 s ago, was started again (its attempt 2), and is not heard of yet; rank 0 "
    ), "regression: it was silent since then, as if nobody had started it"
    harness.see(observed(1, 13))
    assert ask(harness, 11.0).reason.startswith("rank 1 has not pushed for 11 s, though its ")


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_of_a_job_that_ended_nobody_waits_for_anything(end: str) -> None:
    harness = running()
    if end == "cancelled":
        harness.ask(CancelJob(job="a"))
    else:
        exited(harness, 1, 3)
    told = ask(harness, 2.0)
    assert told.final
    assert told.reason.startswith(f"job a is {end}: ")


def test_a_job_by_hand_of_which_nothing_is_heard_says_so_and_when_it_fails() -> None:
    """Regression: for five minutes it was shown as running, without a reason."""
    harness = Harness()
    harness.report("c0", 1.0)
    for rank in (0, 1):
        harness.ask(RegisterJob(job="h", rank=rank, tensors=TENSORS, spec=spec("h", program=())))
    harness.step(Answered(OrderKey(JobId("h"), Order("place")), Ok()))
    harness.now_s += 4.0
    harness.report("c0", 1.0)
    assert harness.why("h") == ""
    harness.now_s += 20.0
    harness.report("c0", 1.0)
    assert harness.job("h").state == "running"
    assert harness.why("h").startswith("none of its ranks was heard for 24 s: they ended with an ")
    assert harness.why("h").endswith("it fails after 300 s (agent_silent_s)")
