"""The worker core: a rank is started once, and its end is told until the master has stored it."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from slackwater.common.base import codec
from slackwater.common.base.effects import (
    Action,
    Answered,
    Draining,
    Effect,
    Recovered,
    Reply,
    Request,
    Requested,
    StartTimer,
    TimerFired,
)
from slackwater.schemas.base import CONFLICT, RUN_ATTEMPTS, JobId, NodeId, Ok, Refused
from slackwater.schemas.logs import LogPiece, ReadLog
from slackwater.schemas.terminals import TypeIn
from slackwater.schemas.workers import PrepareWorkers, StartWorkers, StopWorkers, WorkerExited
from slackwater.services.worker.core import WorkerCore
from slackwater.services.worker.effects import (
    FindProcesses,
    ForgetRank,
    KillDue,
    ReadRankLog,
    ReportKey,
    RunRank,
    SignalRank,
    TypeAtTerminal,
    WatchRank,
)
from slackwater.services.worker.events import (
    AnswerReady,
    Found,
    JobsPruned,
    ProcessesFound,
    ProcessExited,
    RoomLooked,
)

START = StartWorkers(job="j1", ranks=(0, 1), workers=2, program=("python", "train.py"))
J1 = JobId("j1")


def core(slots: int = 4, keep_jobs: bool = False, found: tuple[Found, ...] = ()) -> WorkerCore:
    worker = WorkerCore(NodeId("n1"), slots, stop_grace_s=5.0, keep_jobs=keep_jobs)
    assert worker.step(Recovered(epoch=1, records={}), 0.0) == [FindProcesses()]
    worker.step(ProcessesFound(found), 0.0)
    return worker


def run(rank: int, attempt: int = 0, *, found: bool = False) -> RunRank:
    together = not found
    program = ("python", "train.py")
    return RunRank(J1, rank, attempt, 2, program, "", (), together=together)


def signal(rank: int, kill: bool) -> SignalRank:
    return SignalRank(J1, rank, kill)


def the_request(effects: list[Effect]) -> Request:
    (request,) = [effect for effect in effects if isinstance(effect, Request)]
    return request


def replies(effects: Sequence[Effect]) -> list[Reply]:
    return [effect for effect in effects if isinstance(effect, Reply)]


def test_a_start_runs_each_rank_before_it_is_acknowledged_and_a_repeat_runs_none() -> None:
    worker = core()
    assert worker.step(Requested(7, START), 1.0) == [run(0), run(1), Reply(7, Ok())]
    assert worker.step(Requested(8, START), 1.1) == [Reply(8, Ok())]
    assert worker.running() == ((J1, 0), (J1, 1))


def test_a_start_before_the_files_are_read_is_put_off() -> None:
    worker = WorkerCore(NodeId("n1"), 4, 5.0, False)
    (reply,) = worker.step(Requested(1, START), 0.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Refused)
    assert reply.message.retry_after_s > 0


def test_more_ranks_than_slots_are_refused_whole() -> None:
    worker = core(slots=1)
    (reply,) = worker.step(Requested(1, START), 0.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Refused)
    assert "0 of 1 slots run, 2 more asked" in reply.message.reason
    assert worker.running() == ()


def test_an_exit_is_told_until_the_master_has_stored_it() -> None:
    worker = core()
    worker.step(Requested(1, START), 0.0)
    effects = worker.step(ProcessExited(J1, 1, 3, "ValueError: bad"), 2.0)
    request = the_request(list(effects))
    assert request.message == WorkerExited(
        job="j1", rank=1, node=NodeId("n1"), code=3, result="ValueError: bad"
    )
    later = worker.step(Answered(request.key, Refused(reason="no leader")), 3.0)
    assert StartTimer(request.key, 5.0) in later
    assert worker.step(TimerFired(request.key), 5.0) == [request]
    assert worker.step(Answered(request.key, Ok()), 6.0) == [ForgetRank(J1, 1, 0)]
    assert worker.step(Answered(request.key, Ok()), 6.1) == []
    assert worker.step(ProcessExited(J1, 1, 3, "again"), 7.0) == []
    assert worker.step(Requested(9, START), 8.0) == [Reply(9, Ok())]  # Ended ranks stay ended.


def test_after_a_kill_of_the_service_each_rank_goes_on_where_its_files_say() -> None:
    worker = WorkerCore(NodeId("n1"), 8, 5.0, False)
    worker.step(Recovered(epoch=2, records={}), 0.0)
    effects = worker.step(
        ProcessesFound(
            (
                Found(J1, 0, "running"),
                Found(J1, 1, "exited", code=0, result="{}"),
                Found(J1, 2, "reported"),
                Found(J1, 3, "intended", 2, ("python", "train.py")),
            )
        ),
        0.0,
    )
    assert WatchRank(J1, 0, 0) in effects
    assert the_request(list(effects)).key == ReportKey(J1, 1, 0)
    assert run(3, found=True) in effects
    assert worker.running() == ((J1, 0), (J1, 3))


def test_a_stop_asks_first_and_kills_what_is_left() -> None:
    worker = core()
    worker.step(Requested(1, START), 0.0)
    effects = worker.step(Requested(2, StopWorkers(job="j1")), 10.0)
    assert effects == [
        signal(0, kill=False),
        signal(1, kill=False),
        StartTimer(KillDue(J1, 0), 15.0),
    ]
    worker.step(ProcessExited(J1, 0, -15, ""), 11.0)
    kill, reply = worker.step(TimerFired(KillDue(J1, 0)), 15.0)
    assert kill == signal(1, kill=True)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Refused)
    assert reply.message.retry_after_s > 0, "ask again whether it helped"
    assert worker.step(Requested(3, StopWorkers(job="unknown")), 16.0) == [Reply(3, Ok())]


def test_a_stop_is_answered_once_no_process_is_left() -> None:
    """A caller that hears the answer may begin the next run, perhaps on another node."""
    worker = core()
    worker.step(Requested(1, START), 0.0)
    worker.step(Requested(2, StopWorkers(job="j1")), 1.0)
    assert worker.step(Requested(3, StopWorkers(job="j1")), 5.0) == []  # Asked again, as if lost.
    assert replies(worker.step(ProcessExited(J1, 0, -15, ""), 5.5)) == []
    assert replies(worker.step(ProcessExited(J1, 1, -9, ""), 6.0)) == [
        Reply(2, Ok()), Reply(3, Ok()),
    ]  # fmt: skip
    assert worker.step(Requested(4, StopWorkers(job="j1")), 7.0) == [Reply(4, Ok())]


def test_a_service_that_does_not_know_yet_what_runs_does_not_say_that_nothing_does() -> None:
    worker = WorkerCore(NodeId("n1"), 4, stop_grace_s=5.0, keep_jobs=False)
    worker.step(Recovered(epoch=1, records={}), 0.0)
    (reply,) = replies(worker.step(Requested(1, StopWorkers(job="j1")), 0.1))
    assert isinstance(reply.message, Refused)
    assert reply.message.retry_after_s > 0


def test_what_is_said_late_of_a_former_run_changes_nothing_of_this_one() -> None:
    """The job was run again: its start, its stop and the end of its grace come once more."""
    worker = core()
    worker.step(Requested(1, START), 0.0)
    worker.step(Requested(2, StopWorkers(job="j1")), 1.0)
    for rank in (0, 1):
        worker.step(ProcessExited(J1, rank, -15, ""), 1.5)
    again = msgspec.structs.replace(START, attempts=(RUN_ATTEMPTS, RUN_ATTEMPTS))
    started = worker.step(Requested(3, again), 2.0)
    assert started == [run(0, RUN_ATTEMPTS), run(1, RUN_ATTEMPTS), Reply(3, Ok())]
    assert worker.step(Requested(4, START), 3.0) == [Reply(4, Ok())]
    assert worker.step(Requested(5, StopWorkers(job="j1")), 3.5) == [Reply(5, Ok())]
    assert worker.step(TimerFired(KillDue(J1, 0)), 6.0) == []
    assert worker.step(ProcessExited(J1, 0, -15, ""), 6.5) == []
    assert worker.running() == ((J1, 0), (J1, 1))
    stop = worker.step(Requested(6, StopWorkers(job="j1", run=1)), 7.0)
    assert [effect for effect in stop if isinstance(effect, Action)] == [
        signal(0, kill=False), signal(1, kill=False),
    ]  # fmt: skip


def test_a_run_does_not_begin_beside_a_process_of_the_one_before() -> None:
    worker = core()
    worker.step(Requested(1, START), 0.0)
    again = msgspec.structs.replace(START, attempts=(RUN_ATTEMPTS, RUN_ATTEMPTS))
    (reply,) = replies(worker.step(Requested(2, again), 1.0))
    assert isinstance(reply.message, Refused)
    assert reply.message.retry_after_s > 0


def test_a_drain_stops_the_jobs_unless_told_to_keep_them() -> None:
    for keep, expected in ((False, 4), (True, 0)):
        worker = core(keep_jobs=keep)
        worker.step(Requested(1, START), 0.0)
        assert len(worker.step(Draining(), 1.0)) == expected
        (reply,) = worker.step(Requested(2, START), 1.1)
        assert isinstance(reply, Reply)
        assert isinstance(reply.message, Refused)


def test_a_log_is_read_of_ranks_that_ran_here_and_of_no_others() -> None:
    worker = core()
    worker.step(Requested(1, START), 1.0)
    asked = ReadLog(job="j1", rank=1, tail=10)
    (read,) = worker.step(Requested(2, asked), 1.0)
    assert read == ReadRankLog(2, asked, "", attempt=0, over=False, code=0)
    worker.step(ProcessExited(J1, 1, 3, "why"), 2.0)
    (read,) = worker.step(Requested(3, asked), 2.0)
    assert read == ReadRankLog(3, asked, "", attempt=0, over=True, code=3)
    piece = LogPiece(job="j1", rank=1, start=0, data=b"why\n", end=4, ended=True, code=3)
    assert worker.step(AnswerReady(3, piece), 2.0) == [Reply(3, piece)]
    refusal = worker.step(Requested(4, ReadLog(job="j2", rank=0)), 2.0)
    assert refusal == [Reply(4, Refused(reason="n1 has no log of job j2, rank 0"))]


def test_what_is_typed_goes_to_the_process_that_it_is_meant_for() -> None:
    worker = core()
    typed = TypeIn(job="j1", rank=1, seat="s", attempt=0, place=3, data=b"ls\n")
    refusal = worker.step(Requested(1, typed), 1.0)
    assert refusal == [Reply(1, Refused(reason="n1 runs no terminal of job j1, rank 1"))]
    worker.step(Requested(2, START), 1.0)
    (passed,) = worker.step(Requested(3, typed, "blue"), 1.0)
    assert passed == TypeAtTerminal(3, typed, "blue", attempt=0)
    worker.step(ProcessExited(J1, 1, 3, "why"), 2.0)
    again = StartWorkers(job="j1", ranks=(1,), workers=2, program=START.program, attempts=(1,))
    worker.step(Requested(4, again), 3.0)
    (reply,) = worker.step(Requested(5, typed), 3.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Refused)
    assert (reply.message.code, reply.message.reason) == (
        CONFLICT, "job j1, rank 1 was started again meanwhile",
    )  # fmt: skip
    (passed,) = worker.step(Requested(6, TypeIn(job="j1", rank=1, seat="s")), 3.0)
    assert passed == TypeAtTerminal(6, TypeIn(job="j1", rank=1, seat="s"), "", attempt=1)


def test_before_it_knows_what_runs_nothing_is_typed() -> None:
    worker = WorkerCore(NodeId("n1"), 4, 1.0, keep_jobs=False)
    (reply,) = worker.step(Requested(1, TypeIn(job="j1", rank=0, seat="s")), 1.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Refused)
    assert reply.message.retry_after_s > 0


def test_ranks_of_jobs_whose_files_are_gone_are_forgotten() -> None:
    """A service that lives for months does not grow with the jobs that it ever ran."""
    worker = core()
    worker.step(Requested(1, START), 1.0)
    worker.step(JobsPruned(frozenset({"j1"})), 2.0)
    assert worker.running() == ()
    (refused,) = worker.step(Requested(2, ReadLog(job="j1", rank=0)), 2.0)
    assert isinstance(refused, Reply)
    assert isinstance(refused.message, Refused)


def test_a_rank_that_died_is_started_again_once_for_each_attempt() -> None:
    worker = core()
    worker.step(Requested(1, START), 0.0)
    again = StartWorkers(job="j1", ranks=(1,), workers=2, program=START.program, attempts=(1,))
    assert worker.step(Requested(2, again), 1.0) == [Reply(2, Ok())], "it still runs"
    report = the_request(list(worker.step(ProcessExited(J1, 1, -9, ""), 2.0)))
    assert worker.step(Requested(3, again), 3.0) == [run(1, 1), Reply(3, Ok())]
    assert worker.step(Requested(4, again), 3.1) == [Reply(4, Ok())]
    assert worker.step(Requested(5, START), 3.2) == [Reply(5, Ok())], "a late order"
    assert worker.step(Answered(report.key, Ok()), 3.3) == [], "of the attempt before"
    assert worker.step(ProcessExited(J1, 1, -9, ""), 3.4) == [], "of the attempt before"
    second = the_request(list(worker.step(ProcessExited(J1, 1, 1, "bad", 1), 4.0)))
    assert isinstance(second.message, WorkerExited)
    assert (second.message.attempt, second.message.code) == (1, 1)
    assert worker.step(Answered(second.key, Ok()), 5.0) == [ForgetRank(J1, 1, 1)]
    third = StartWorkers(job="j1", ranks=(0, 1), workers=2, program=("x",), attempts=(0, 2))
    assert worker.step(Requested(6, third), 6.0)[:-1] == [
        RunRank(J1, 1, 2, 2, ("x",), "", (), together=True)
    ]


def test_a_restart_that_was_only_intended_is_carried_out_by_the_next_service() -> None:
    worker = WorkerCore(NodeId("n1"), 8, 5.0, False)
    worker.step(Recovered(epoch=2, records={}), 0.0)
    found = Found(J1, 1, "intended", 2, ("python", "train.py"), attempt=3)
    assert run(1, 3, found=True) in worker.step(ProcessesFound((found,)), 0.0)
    order = StartWorkers(job="j1", ranks=(1,), workers=2, program=("x",), attempts=(3,))
    assert worker.step(Requested(1, order), 0.1) == [Reply(1, Ok())]


def test_a_full_disk_puts_new_jobs_off_and_fails_none() -> None:
    """A worker that fails at once whatever it is sent would empty the queue."""
    worker = core()
    worker.step(RoomLooked("3 MB are free in /var"), 1.0)
    (refused,) = worker.step(Requested(1, START), 1.0)
    assert isinstance(refused, Reply)
    assert isinstance(refused.message, Refused)
    assert refused.message.retry_after_s > 0
    assert refused.message.reason == "n1: 3 MB are free in /var"
    worker.step(RoomLooked(""), 2.0)
    assert worker.step(Requested(2, START), 2.0) == [run(0), run(1), Reply(2, Ok())]
    worker.step(RoomLooked("3 MB are free in /var"), 3.0)
    assert worker.step(Requested(3, START), 3.0) == [Reply(3, Ok())], "it runs already"


def test_ranks_that_leave_end_alone_and_may_come_again_before_their_grace_is_over() -> None:
    worker = core()
    worker.step(Requested(1, START), 0.0)
    effects = worker.step(Requested(2, StopWorkers(job="j1", ranks=(1,))), 10.0)
    due = KillDue(J1, 0, (1,))
    assert effects == [signal(1, kill=False), StartTimer(due, 15.0)]
    assert worker.step(ProcessExited(J1, 1, -15, ""), 11.0)[-1] == Reply(2, Ok())
    again = msgspec.structs.replace(START, ranks=(1,), attempts=(1,))
    assert run(1, 1) in worker.step(Requested(3, again), 12.0)
    assert worker.step(TimerFired(due), 15.0) == []
    assert worker.running() == ((J1, 0), (J1, 1))


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (
            {"allocation": ((NodeId("other"), 2),), "gpu_ids": ("other/0", "other/1")},
            "job j1 has nothing here, but on other:2",
        ),
        ({"allocation": ((NodeId("n1"), 2),)}, "job j1 was given GPUs, and none of them is named"),
        ({"rendezvous": "host:a\n"}, "rendezvous: 'host:a\\n' is not host:port"),
        ({"program": ()}, "job j1 has no program"),
        ({"program": ("python", "a\0b")}, "program: a word of it holds a NUL"),
        ({"folder": "\0"}, "folder: it holds a NUL"),
        ({"env": {"A": "b", "C": "\0"}}, "env: C holds a NUL"),
    ],
)
def test_an_order_that_is_not_this_node_s_starts_nothing(odd: dict[str, Any], said: str) -> None:
    """It ended the service, and an intention on the disk ended each of its next lives."""
    worker = core()
    effects = worker.step(Requested(1, msgspec.structs.replace(START, **odd)), 1.0)
    (reply,) = effects
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Refused)
    assert said in reply.message.reason


def test_an_intention_with_a_damaged_meeting_place_ends_no_service() -> None:
    found = Found(J1, 0, "running", rendezvous="host:a\n")
    assert core(found=(found,)).step(Requested(1, START), 1.0)


def test_preparing_a_job_without_a_program_is_refused_whatever_ranks_are_named() -> None:
    message = PrepareWorkers(job="j1", attempt=0, ranks=(), program=())
    (reply,) = core().step(Requested(1, message), 1.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Refused)


def test_what_a_rank_ended_with_is_no_longer_than_the_master_takes() -> None:
    """Else its end would be reported again and again, and never taken."""
    worker = core()
    worker.step(Requested(1, START), 1.0)
    (_, report) = worker.step(ProcessExited(J1, 0, 127, "x" * 5000), 2.0)
    assert isinstance(report, Request)
    codec.decode(codec.encode(report.message), WorkerExited)
