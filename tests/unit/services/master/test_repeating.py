"""Jobs that are run again or deleted: what is asked, what is stored, and what comes late."""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.services.master.test_master_core import (
    TENSORS,
    Harness,
    facts,
    only,
    orders,
    spec,
    submitted,
)

from slackwater.common.base.effects import Answered, EffectKey, Publish, Reply, Request
from slackwater.schemas.base import RUN_ATTEMPTS, RUNS_MAX, JobId, Message, NodeId, Ok, Refused
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_requests import (
    CancelJob,
    DeleteJob,
    FinishJob,
    GetJob,
    JobAccepted,
    JobInfo,
    JobList,
    JobRegistered,
    ListJobs,
    RegisterJob,
    RerunJob,
    SubmitJob,
)
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.placement import PlaceJob, ReleaseJob
from slackwater.schemas.workers import StartWorkers, StopWorkers, WorkerExited
from slackwater.services.master.keys import Order, OrderKey


def exited(id: str, rank: int, code: int = 0, run: int = 0) -> WorkerExited:
    node = NodeId("n1")
    return WorkerExited(job=id, rank=rank, node=node, code=code, attempt=RUN_ATTEMPTS * run)


def failed(harness: Harness, id: str = "a") -> None:
    """A job that ran, failed, and of which nothing is left."""
    submitted(harness, id)
    harness.node()
    harness.step(Answered(OrderKey(JobId(id), Order("start")), Ok()))
    harness.ask(exited(id, 1, code=3))
    harness.step(Answered(OrderKey(JobId(id), Order("stop")), Ok()))
    assert harness.job(id).released


def refused(answer: Message, *words: str) -> Refused:
    assert isinstance(answer, Refused), answer
    assert all(word in answer.reason for word in words), answer.reason
    return answer


def test_a_job_that_failed_runs_again_with_processes_of_its_own() -> None:
    harness = Harness()
    failed(harness)
    effects = harness.ask(RerunJob(job="a", run=1))
    info = only(effects, Reply).message
    assert isinstance(info, JobInfo)
    assert (info.job.run, info.job.state) == (1, "pending")
    assert "pending" in facts(effects)
    record = harness.job("a")
    assert (record.state, record.results, record.reason) == ("running", {}, "")
    (start,) = orders(effects)
    assert isinstance(start, StartWorkers)
    assert start.attempts == (RUN_ATTEMPTS, RUN_ATTEMPTS)


def test_a_rerun_that_is_repeated_starts_nothing_more() -> None:
    harness = Harness()
    failed(harness)
    harness.ask(RerunJob(job="a", run=1))
    harness.restart()
    before = harness.job("a")
    answer = harness.answer(RerunJob(job="a", run=1))
    assert isinstance(answer, JobInfo)
    assert harness.job("a") == before


def test_a_rerun_waits_until_nothing_of_the_former_run_is_left() -> None:
    harness = Harness()
    submitted(harness, "a")
    harness.node()
    harness.ask(exited("a", 1, code=3))
    waits = refused(harness.answer(RerunJob(job="a", run=1)), "worker node n1", "processes ended")
    assert waits.retry_after_s > 0
    harness.step(Answered(OrderKey(JobId("a"), Order("start")), Ok()))
    harness.step(Answered(OrderKey(JobId("a"), Order("stop")), Ok()))
    assert isinstance(harness.answer(RerunJob(job="a", run=1)), JobInfo)


def test_what_cannot_run_again_is_refused_with_the_remedy() -> None:
    harness = Harness()
    refused(harness.answer(RerunJob(job="a", run=1)), "there is no job a")
    submitted(harness, "a")
    refused(harness.answer(RerunJob(job="a", run=1)), "is pending", "slackwater cancel a")
    failed(harness, "b")
    refused(harness.answer(RerunJob(job="b", run=3)), "this is its run 1")
    harness.report("c0", 1.0)
    by_hand = spec("h", program=(), workers=1)
    harness.ask(RegisterJob(job="h", rank=0, tensors=TENSORS, spec=by_hand))
    harness.step(Answered(OrderKey(JobId("h"), Order("place")), Ok()))
    harness.ask(FinishJob(job="h", rank=0))
    refused(harness.answer(RerunJob(job="h", run=1)), "started by its user", "delete h")


def test_an_end_that_is_told_late_is_not_taken_for_one_of_this_run() -> None:
    harness = Harness()
    failed(harness)
    harness.ask(RerunJob(job="a", run=1))
    for late in (exited("a", 0), exited("a", 1, code=3), exited("a", 0, run=2)):
        assert harness.answer(late) == Ok()
    assert (harness.job("a").state, harness.job("a").results) == ("running", {})
    for rank in range(2):
        harness.ask(exited("a", rank, run=1))
    assert harness.job("a").state == "completed"


def test_all_orders_of_a_run_carry_its_number() -> None:
    harness = Harness()
    harness.report("c0", 1.0)
    failed(harness)
    harness.ask(RerunJob(job="a", run=1))
    place = orders(harness.ask(RegisterJob(job="a", rank=0, tensors=TENSORS)))
    assert [order.run for order in place if isinstance(order, PlaceJob)] == [1]
    harness.step(Answered(OrderKey(JobId("a"), Order("place")), Ok()))
    told = orders(harness.ask(CancelJob(job="a")))
    assert StopWorkers(job="a", run=1, attempt=1) in told
    assert ReleaseJob(job="a", run=1) in told


def test_a_deleted_job_is_shown_to_nobody_and_its_id_is_free() -> None:
    harness = Harness()
    failed(harness)
    assert harness.answer(DeleteJob(job="a")) == Ok()
    harness.restart()
    assert harness.answer(DeleteJob(job="a")) == Ok()  # Repeated, as if its answer was lost.
    listed = harness.answer(ListJobs())
    assert isinstance(listed, JobList)
    assert (listed.jobs, listed.total, listed.counts) == ((), 0, {})
    for asked in (GetJob(job="a"), CancelJob(job="a"), RerunJob(job="a", run=1)):
        refused(harness.answer(asked), "there is no job a")
    other = spec("a", workers=1, program=("other",))
    effects = harness.ask(SubmitJob(spec=other))
    assert only(effects, Reply).message == JobAccepted(job="a")
    told = [each.message for each in effects if isinstance(each, Publish)]
    events = [(each.fact, each.reason) for each in told if isinstance(each, JobEvent)]
    assert events[0] == ("pending", ""), "it is another job, and nothing runs again"
    assert harness.job("a").run == 1
    assert harness.job("a").spec == other


def test_a_job_that_runs_is_not_deleted() -> None:
    harness = Harness()
    submitted(harness, "a")
    refused(harness.answer(DeleteJob(job="a")), "cancel a", "--force a")
    refused(harness.answer(DeleteJob(job="nosuch")), "there is no job nosuch")


def test_a_deleted_job_still_ends_and_its_id_is_free_after_that() -> None:
    harness = Harness()
    submitted(harness, "a")
    harness.node()
    harness.ask(CancelJob(job="a"))
    assert harness.answer(DeleteJob(job="a")) == Ok()
    waits = refused(harness.answer(SubmitJob(spec=spec("a", workers=1))), "still ending")
    assert waits.retry_after_s > 0
    harness.step(Answered(OrderKey(JobId("a"), Order("start")), Ok()))
    harness.step(Answered(OrderKey(JobId("a"), Order("stop")), Ok()))
    assert isinstance(harness.answer(SubmitJob(spec=spec("a", workers=1))), JobAccepted)


def test_a_job_started_by_hand_is_registered_anew_after_it_was_deleted() -> None:
    harness = Harness()
    harness.report("c0", 1.0)
    by_hand = spec("h", program=(), workers=1)
    for run in range(2):
        effects = harness.ask(RegisterJob(job="h", rank=0, tensors=TENSORS, spec=by_hand))
        assert [order.run for order in orders(effects) if isinstance(order, PlaceJob)] == [run]
        answered = harness.step(Answered(OrderKey(JobId("h"), Order("place")), Ok()))
        assert isinstance(only(answered, Reply).message, JobRegistered)
        harness.ask(FinishJob(job="h", rank=0))
        harness.step(Answered(OrderKey(JobId("h"), Order("release")), Ok()))
        assert harness.answer(DeleteJob(job="h")) == Ok()


def test_a_submission_says_what_is_there_and_how_to_run_it_again() -> None:
    harness = Harness()
    failed(harness)
    same = harness.answer(SubmitJob(spec=spec("a")))
    assert isinstance(same, JobAccepted)
    assert same.known is not None
    assert same.known.state == "failed"
    refused(
        harness.answer(SubmitJob(spec=spec("a", workers=5))),
        "has failed", "slackwater rerun a", "slackwater delete a",
    )  # fmt: skip


def test_records_that_begin_anew_are_not_pruned_with_the_ended_ones() -> None:
    harness = Harness(jobs_kept_max=2)
    for id in ("a", "b"):
        failed(harness, id)
        harness.now_s += 1
    harness.ask(RerunJob(job="a", run=1))
    harness.now_s += 1
    for id in ("c", "d"):
        failed(harness, id)
        harness.now_s += 1
    assert set(harness.stored["jobs"]) == {"a", "c", "d"}


# Any order of everything --------------------------------------------------------------------------


class World:
    """A worker node and a controller that answer when the test says so; the master may be killed
    at any time, and anything that was said to it may be said again."""

    def __init__(self) -> None:
        self.harness = Harness()
        self.open: dict[EffectKey, Request] = {}
        self.said: list[WorkerExited] = []
        self.alive: dict[tuple[str, int], int] = {}
        """(job, rank) -> the attempt that runs."""
        self.highest: dict[str, int] = {}
        self.begun: set[tuple[str, int, int]] = set()
        """(job, rank, attempt): a worker service begins each once, however often it is told to."""
        self.take(self.harness.node(slots=64))

    def take(self, effects: list[object]) -> None:
        for effect in effects:
            if isinstance(effect, Request):
                self.open[effect.key] = effect

    def ask(self, message: Message) -> None:
        self.take(self.harness.ask(message))  # type: ignore[arg-type]

    def answer(self, which: int) -> None:
        """Answer one request that is on its way; those of one lane arrive in their order."""
        first = {request.lane or key: key for key, request in reversed(self.open.items())}
        if not first:
            return
        key = sorted(first.values(), key=repr)[which % len(first)]
        message = self.open.pop(key).message
        match message:
            case StartWorkers():
                for rank, attempt in zip(
                    message.ranks, message.attempts or (0,) * len(message.ranks), strict=True
                ):
                    running = self.alive.get((message.job, rank), attempt)
                    assert running == attempt, "two runs beside one another"
                    this = message.job, rank, attempt
                    if attempt >= self.highest.get(message.job, 0) and this not in self.begun:
                        self.begun.add(this)
                        self.alive[message.job, rank] = attempt
                        self.highest[message.job] = attempt
            case StopWorkers():
                for key_, attempt in list(self.alive.items()):
                    if key_[0] == message.job and attempt < RUN_ATTEMPTS * (message.run + 1):
                        self.end(*key_, code=-15)
        self.take(self.harness.step(Answered(key, Ok())))  # type: ignore[arg-type]

    def end(self, job: str, rank: int, code: int) -> None:
        attempt = self.alive.pop((job, rank))
        self.said.append(
            WorkerExited(job=job, rank=rank, node=NodeId("n1"), code=code, attempt=attempt)
        )
        self.ask(self.said[-1])

    def restart(self) -> None:
        """Orders that are on their way arrive or not: here they are lost."""
        self.open.clear()
        self.take(self.harness.restart())  # type: ignore[arg-type]
        self.take(self.harness.node(slots=64))  # type: ignore[arg-type]


STEPS: dict[str, Callable[[World, str, int], None]] = {
    "submit": lambda world, id, n: world.ask(SubmitJob(spec=spec(id, workers=1 + n % 2))),
    "rerun": lambda world, id, n: world.ask(RerunJob(job=id, run=1 + n % 4)),
    "delete": lambda world, id, n: world.ask(DeleteJob(job=id)),
    "cancel": lambda world, id, n: world.ask(CancelJob(job=id)),
    "answer": lambda world, id, n: world.answer(n),
    "ends": lambda world, id, n: (
        world.end(*sorted(world.alive)[n % len(world.alive)], code=n % 2) if world.alive else None
    ),
    "late": lambda world, id, n: world.ask(world.said[n % len(world.said)]) if world.said else None,
    "tick": lambda world, id, n: world.take(world.harness.tick()),  # type: ignore[arg-type]
    "restart": lambda world, id, n: world.restart(),
}
_NEXT = {
    None: {"pending", "running"},
    "pending": {"pending", "running", "cancelled", "failed"},
    "running": {"running", *TERMINAL_STATES},
}


@settings(max_examples=200)
@example(
    [
        ("submit", "a", 0),
        ("cancel", "a", 0),
        ("answer", "a", 1),
        ("answer", "a", 0),
        ("rerun", "a", 0),
    ]
)
@example(
    [
        ("submit", "a", 0),
        ("answer", "a", 0),
        ("restart", "a", 0),
        ("ends", "a", 0),
        ("answer", "a", 0),
        ("delete", "a", 0),
        ("submit", "a", 0),
    ]
)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from(["a", "b"]), st.integers(0, 7)),
        max_size=60,
    )
)
def test_no_order_of_events_mixes_two_runs_of_a_job(steps: list[tuple[str, str, int]]) -> None:
    """A record's run only grows, it begins anew only after the run before has ended everywhere,
    and no process of one run is started while one of another lives."""
    world, before = World(), dict[str, JobRecord]()
    for what, id, number in steps:
        STEPS[what](world, id, number)
        for key in world.harness.stored["jobs"]:
            record, old = world.harness.job(key), before.get(key)
            if old is not None and record.run == old.run:
                allowed = _NEXT.get(old.state, {old.state})
                assert record.state in allowed, (old.state, record.state)
                assert record.results.items() >= old.results.items() or record.deleted
                assert record.deleted >= old.deleted
            elif old is not None:
                assert record.run == old.run + 1
                assert old.released
                assert old.state in TERMINAL_STATES
                assert not any(job == key for job, _ in world.alive)
            before[key] = record
        for (job, _), attempt in world.alive.items():
            assert attempt // RUN_ATTEMPTS <= world.harness.job(job).run


@pytest.mark.parametrize("message", [RerunJob(job="a", run=1), DeleteJob(job="a")])
def test_what_was_stored_is_what_was_answered(message: Message) -> None:
    """One step stores the record and answers, so that a kill leaves either both or none."""
    harness = Harness()
    failed(harness)
    effects = harness.ask(message)
    assert only(effects, Reply)
    stored = msgspec.structs.asdict(harness.job("a"))
    assert stored["run"] == 1 or stored["deleted"]
    assert JobId("a") in harness.core.state.jobs


def test_an_id_is_free_once_the_controller_has_let_the_tensors_go() -> None:
    """The refusal names it as long as it has not, whatever else has ended."""
    harness = Harness()
    harness.report("c0", 1.0)
    harness.node()
    submitted(harness, "a")
    harness.step(Answered(OrderKey(JobId("a"), Order("start")), Ok()))
    harness.ask(RegisterJob(job="a", rank=0, tensors=TENSORS))
    assert harness.job("a").cluster == "c0"
    harness.step(Answered(OrderKey(JobId("a"), Order("place")), Ok()))
    harness.ask(CancelJob(job="a"))
    harness.ask(DeleteJob(job="a"))
    harness.step(Answered(OrderKey(JobId("a"), Order("stop")), Ok()))
    refused(
        harness.answer(SubmitJob(spec=spec("a"))),
        "it waits for controller c0 to let its tensors go", "or choose another id",
    )  # fmt: skip
    harness.step(Answered(OrderKey(JobId("a"), Order("release")), Ok()))
    assert isinstance(harness.answer(SubmitJob(spec=spec("a"))), JobAccepted)


def test_an_id_whose_runs_are_used_up_is_refused_for_good() -> None:
    harness = Harness()
    failed(harness)
    job = harness.core.state.jobs[JobId("a")]
    job.record = msgspec.structs.replace(job.record, placement=RUNS_MAX - 1)
    assert isinstance(harness.answer(RerunJob(job="a", run=1)), JobInfo)
    again = Harness()
    failed(again)
    job = again.core.state.jobs[JobId("a")]
    job.record = msgspec.structs.replace(job.record, placement=RUNS_MAX)
    told = refused(again.answer(RerunJob(job="a", run=1)), f"{RUNS_MAX} times", "another id")
    assert told.retry_after_s == 0.0
