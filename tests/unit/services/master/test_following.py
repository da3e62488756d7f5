"""Jobs that come after others: when they start, when they never will, and through a new master."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.services.master.test_master_core import Harness, spec, submitted
from tests.unit.services.master.test_pausing import confirm

from slackwater.schemas.base import NodeId, Ok, Refused
from slackwater.schemas.job_requests import (
    CancelJob,
    DeleteJob,
    JobInfo,
    PauseJob,
    ResumeJob,
    SubmitJob,
)
from slackwater.schemas.workers import WorkerExited
from slackwater.services.master.keys import Order


def ends(harness: Harness, id: str, code: int = 0) -> None:
    """Let the job's processes end, and the job with them."""
    job = harness.job(id)
    attempt = job.attempt
    for rank in range(job.spec.workers):
        harness.ask(WorkerExited(job=id, rank=rank, node=NodeId("n1"), code=code, attempt=attempt))
    confirm(harness, id, Order("stop"))
    assert harness.job(id).state == ("completed" if code == 0 else "failed")


def harness() -> Harness:
    made = Harness()
    made.node(slots=8)
    return made


def started(made: Harness, id: str) -> None:
    confirm(made, id, Order("start"))
    assert made.job(id).state == "running"


def test_it_starts_once_those_before_it_have_completed() -> None:
    made = harness()
    for id in ("a", "b"):
        submitted(made, id)
        started(made, id)
    submitted(made, "c", after=("a", "b"))
    assert made.why("c").startswith("waits for jobs a, b to complete; `slackwater release c`")
    made.tick()
    assert made.job("c").state == "pending"
    ends(made, "a")
    made.tick()
    assert made.why("c").startswith("waits for job b to complete")
    made.restart()
    made.node(slots=8)
    ends(made, "b")
    made.tick()
    made.tick()
    assert made.job("c").state == "running", made.why("c")


@pytest.mark.parametrize("any_end", [False, True])
def test_one_that_does_not_complete_ends_those_after_it(any_end: bool) -> None:
    made = harness()
    submitted(made, "a")
    started(made, "a")
    submitted(made, "b", after=("a",), after_any=any_end)
    submitted(made, "c", after=("b",))
    ends(made, "a", code=3)
    for _ in range(3):
        made.tick()
    if any_end:
        assert made.job("b").state == "running"
        return
    assert made.job("b").state == "cancelled"
    assert made.job("b").reason == "job a, which it comes after, has failed"
    assert made.job("c").reason == "job b, which it comes after, was cancelled"


def test_one_that_is_deleted_ends_those_after_it() -> None:
    made = harness()
    submitted(made, "a", gpus=4)
    submitted(made, "b", after=("a",), after_any=True)
    made.ask(CancelJob(job="a"))
    assert isinstance(made.answer(DeleteJob(job="a")), Ok)
    made.tick()
    assert made.job("b").state in ("cancelled", "running")
    if made.job("b").state == "cancelled":
        assert "is gone" in made.job("b").reason


def test_its_user_may_release_or_hold_it() -> None:
    made = harness()
    submitted(made, "a")
    started(made, "a")
    for id in ("b", "c"):
        submitted(made, id, after=("a",))
    assert isinstance(made.answer(ResumeJob(job="b")), JobInfo)
    made.tick()
    assert made.job("b").state == "running", "it does not wait any more"
    assert isinstance(made.answer(PauseJob(job="c")), JobInfo)
    ends(made, "a")
    made.tick()
    assert made.job("c").state == "pending", "its turn has come, and its user holds it"
    assert "it is held back" in made.why("c")
    made.ask(ResumeJob(job="c"))
    made.tick()
    assert made.job("c").state == "running"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"after": ("nosuch",)}, "job b: after: there is no job nosuch"),
        ({"after": ("b",)}, "it cannot come after itself"),
        ({"after": ("a",), "program": ()}, "its user starts its program"),
        ({"after": ("failed",)}, "job failed has failed, and b comes after its completion"),
        ({"after": ("a",), "tenant": "t"}, "there is no job a"),
    ],
)
def test_what_it_cannot_come_after_is_said(fields: dict[str, object], says: str) -> None:
    made = harness()
    for id in ("a", "failed"):
        submitted(made, id)
        started(made, id)
    ends(made, "failed", code=1)
    refused = made.answer(SubmitJob(spec=spec("b", **fields)))
    assert isinstance(refused, Refused)
    assert says in refused.reason


def test_after_one_that_has_completed_it_starts_at_once() -> None:
    made = harness()
    submitted(made, "a")
    started(made, "a")
    ends(made, "a")
    submitted(made, "b", after=("a",))
    assert made.job("b").waits_for == ()
    made.tick()
    assert made.job("b").state == "running"


@settings(max_examples=60)
@given(st.data())
def test_whatever_ends_how_nobody_starts_early_or_waits_for_ever(data: st.DataObject) -> None:
    made = harness()
    count = data.draw(st.integers(2, 6))
    before: dict[str, tuple[str, ...]] = {}
    for number in range(count):
        id = f"j{number}"
        earlier = [f"j{other}" for other in range(number)]
        after = tuple(data.draw(st.lists(st.sampled_from(earlier), unique=True, max_size=3))
                      if earlier else ())  # fmt: skip
        before[id] = after
        submitted(made, id, after=after, after_any=data.draw(st.booleans()), workers=1)
    for _ in range(3 * count):
        made.tick()
        for id, after in before.items():
            record = made.job(id)
            if record.state == "running":
                states = [made.job(other).state for other in after]
                ended = {"completed", "failed", "cancelled"}
                assert set(states) <= ended, "it started early"
                assert record.spec.after_any or set(states) <= {"completed"}
        running = [id for id in before if made.job(id).state == "running"]
        if running:
            id = data.draw(st.sampled_from(running))
            confirm(made, id, Order("start"))
            ends(made, id, data.draw(st.sampled_from([0, 0, 1])))
        if data.draw(st.booleans()):
            made.restart()
            made.node(slots=8)
    made.tick()
    left = {id: made.job(id).state for id in before}
    assert set(left.values()) <= {"completed", "failed", "cancelled"}, left
