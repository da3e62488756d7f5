"""Room that a node keeps for ranks of a gang, and what it looks at before they are started."""

import socket
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from slackwater.common.base.effects import Effect, Recovered, Reply, Requested, TimerFired
from slackwater.schemas.base import RUN_ATTEMPTS, JobId, Message, NodeId, Ok, Refused
from slackwater.schemas.workers import (
    RESERVED_S,
    Prepared,
    PrepareWorkers,
    StartWorkers,
    StopWorkers,
)
from slackwater.services.worker.core import STOPPED_S, WorkerCore
from slackwater.services.worker.effects import LookAtProgram, ReservationDue, RunRank
from slackwater.services.worker.environment import cannot_start, gang_environment
from slackwater.services.worker.events import Found, ProcessesFound, ProcessExited, ProgramLooked
from slackwater.services.worker.ports import KeptPorts

PROGRAM = ("python", "train.py")


class Node:
    """A worker core whose program can be started unless it says otherwise."""

    def __init__(self, slots: int = 4) -> None:
        self.core = WorkerCore(NodeId("n1"), slots, stop_grace_s=5.0, keep_jobs=False)
        self.core.step(Recovered(epoch=1, records={}), 0.0)
        self.core.step(ProcessesFound(()), 0.0)
        self.token, self.port, self.why, self.now_s = 0, 4000, "", 0.0
        self.started: list[int] = []

    def step(self, event: object) -> list[Effect]:
        effects = list(self.core.step(event, self.now_s))  # type: ignore[arg-type]
        self.started += [e.rank for e in effects if isinstance(e, RunRank)]
        for look in [e for e in effects if isinstance(e, LookAtProgram)]:
            self.port += 1
            looked = ProgramLooked(look.token, look.job, look.attempt, self.why, "host", self.port)
            effects += self.step(looked)
        return effects

    def ask(self, message: Message) -> Message:
        self.token += 1
        (reply,) = [e for e in self.step(Requested(self.token, message)) if isinstance(e, Reply)]
        return reply.message

    def prepare(
        self, job: str, *gpus: str, attempt: int = 0, ranks: tuple[int, ...] = ()
    ) -> Message:
        ranks = ranks or tuple(range(len(gpus)))
        return self.ask(
            PrepareWorkers(job=job, attempt=attempt, ranks=ranks, program=PROGRAM, gpu_ids=gpus)
        )

    def start(self, job: str, *gpus: str, attempt: int = 0) -> Message:
        ranks = tuple(range(len(gpus)))
        numbers = tuple(RUN_ATTEMPTS * attempt for _ in ranks) if attempt else ()
        return self.ask(
            StartWorkers(
                job=job, ranks=ranks, workers=len(ranks), program=PROGRAM, gpu_ids=gpus,
                attempt=attempt, attempts=numbers,
            )
        )  # fmt: skip


def refused(answer: Message, *words: str) -> Refused:
    assert isinstance(answer, Refused), answer
    assert all(word in answer.reason for word in words), answer.reason
    return answer


def test_what_is_prepared_is_nobody_else_s_until_it_starts() -> None:
    node = Node()
    assert node.prepare("a", "g0", "g1") == Prepared(host="host", port=4001)
    assert not node.started
    waits = refused(node.prepare("b", "g1"), "GPU g1 is held by job a, which starts")
    assert waits.retry_after_s > 0.0
    refused(node.start("b", "g1"), "GPU g1 is held by job a, which starts")
    assert node.start("a", "g0", "g1") == Ok()
    assert node.started == [0, 1]
    refused(node.prepare("b", "g1"), "GPU g1 is held by job a, rank 1")


def test_asked_again_it_gives_the_same_port() -> None:
    """The master was restarted, before the ranks were started or after."""
    node = Node()
    first = node.prepare("a", "g0")
    assert node.prepare("a", "g0") == first
    node.start("a", "g0")
    assert node.prepare("a", "g0") == first
    assert node.started == [0]


def test_a_rank_that_is_started_again_meets_the_others_whatever_its_master_remembers() -> None:
    """A master that was restarted does not know where the ranks of a running job meet."""
    node = Node()
    node.prepare("a", "g0", "g1")
    start = StartWorkers(
        job="a", ranks=(0, 1), workers=2, program=PROGRAM, gpu_ids=("g0", "g1"),
        rendezvous="127.0.0.1:4001",
    )  # fmt: skip
    assert node.ask(start) == Ok()
    node.step(TimerFired(ReservationDue(JobId("a"), 0)))
    node.step(ProcessExited(JobId("a"), 1, 1, "it died"))
    again = StartWorkers(
        job="a", ranks=(1,), workers=2, program=PROGRAM, gpu_ids=("g1",), attempts=(1,)
    )
    (run,) = [e for e in node.step(Requested(99, again)) if isinstance(e, RunRank)]
    assert (run.attempt, run.rendezvous) == (1, "127.0.0.1:4001")


def gang_start(number: int = 0, *ranks: int) -> StartWorkers:
    ranks = ranks or (0,)
    attempt = number // RUN_ATTEMPTS
    return StartWorkers(
        job="a", ranks=ranks, workers=2, program=PROGRAM, attempts=(number,) * len(ranks),
        gpu_ids=tuple(f"g{rank}" for rank in ranks), attempt=attempt, rendezvous="host:4001",
    )  # fmt: skip


def test_a_gang_is_not_started_where_no_room_is_kept_for_it_any_more() -> None:
    """The service was killed since, or was silent for so long that its master gave the gang up."""
    node = Node()
    refused(node.ask(gang_start()), "n1: no room is kept for attempt 0 of job a")
    node.prepare("a", "g0")
    node.now_s = RESERVED_S + 1.0
    refused(node.ask(gang_start()), "no room is kept")
    node.prepare("a", "g0")
    assert node.ask(gang_start()) == Ok()
    refused(node.ask(gang_start(RUN_ATTEMPTS)), "a former process of job a")
    node.step(ProcessExited(JobId("a"), 0, 1, "it died"))
    refused(node.ask(gang_start(RUN_ATTEMPTS)), "no room is kept for attempt 1")
    assert node.started == [0]


def test_room_is_kept_while_others_of_the_gang_fetch_what_this_node_has() -> None:
    """Regression: after 12 s it was given up, though the master gives nodes longer to fetch code.
    The first attempt of such a gang was lost."""
    node = Node()
    for job, fetched, more_s in (("a", {"pack": "c" * 64}, 90.0), ("b", {"venv": "e" * 64}, 600.0)):
        asked = PrepareWorkers(
            job=job, attempt=0, ranks=(0,), program=PROGRAM, gpu_ids=(f"g{job}",), **fetched
        )
        assert isinstance(node.ask(asked), Prepared)
        node.now_s += RESERVED_S + more_s
        start = msgspec.structs.replace(gang_start(), job=job, gpu_ids=(f"g{job}",), **fetched)
        assert node.ask(start) == Ok()


def test_a_service_that_was_killed_remembers_where_its_ranks_meet() -> None:
    node = Node()
    found = Found(JobId("a"), 0, "running", gpu_ids=("g0",), rendezvous="host:4001")
    node.core.step(ProcessesFound((found,)), 0.0)
    assert node.prepare("a", "g0") == Prepared(host="host", port=4001)
    assert node.ask(gang_start(0, 0, 1)) == Ok(), "rank 1 had no process yet when it was killed"
    node.step(ProcessExited(JobId("a"), 1, 1, "it died"))
    again = msgspec.structs.replace(gang_start(1, 1), rendezvous="")
    (run,) = [e for e in node.step(Requested(99, again)) if isinstance(e, RunRank)]
    assert run.rendezvous == "host:4001"


def test_slots_that_are_prepared_are_taken() -> None:
    node = Node(slots=2)
    assert isinstance(node.prepare("a", ranks=(0, 1)), Prepared)
    refused(node.prepare("b", ranks=(0,)), "2 of 2 slots run, 1 more asked")


def test_a_stop_gives_the_room_up_and_a_late_start_of_it_is_not_the_node_s_to_judge() -> None:
    node = Node()
    node.prepare("a", "g0", attempt=1)
    assert node.ask(StopWorkers(job="a", attempt=0)) == Ok()
    refused(node.prepare("b", "g0"), "job a, which starts")
    assert node.ask(StopWorkers(job="a", attempt=1)) == Ok()
    assert isinstance(node.prepare("b", "g0"), Prepared)


def test_an_attempt_that_was_told_to_stop_is_not_begun_by_orders_that_come_late() -> None:
    """Regression: copies of its prepare and its start, delivered after the stop, ran it again, and
    nobody stopped that."""
    node = Node()
    node.prepare("a", "g0")
    assert node.ask(StopWorkers(job="a", attempt=0)) == Ok()
    late = refused(node.prepare("a", "g0"), "n1: attempt 0 of job a was told to stop")
    assert late.retry_after_s > 0.0
    refused(node.start("a", "g0"), "attempt 0 of job a was told to stop")
    assert isinstance(node.prepare("a", "g0", attempt=1), Prepared)
    node.ask(StopWorkers(job="a", attempt=1))
    node.now_s = STOPPED_S
    assert isinstance(node.prepare("a", "g0"), Prepared), "another job, by now"


def test_room_that_nobody_uses_is_free_again_in_time() -> None:
    node = Node()
    node.prepare("a", "g0", attempt=1)
    node.step(TimerFired(ReservationDue(JobId("a"), 0)))
    refused(node.prepare("b", "g0"), "job a, which starts")
    node.step(TimerFired(ReservationDue(JobId("a"), 1)))
    assert isinstance(node.prepare("b", "g0"), Prepared)


def test_a_program_that_cannot_be_started_is_refused_for_good() -> None:
    node = Node()
    node.why = "there is no script train.py in /home/ann"
    answer = refused(node.prepare("a", "g0"), "n1: there is no script train.py")
    assert answer.retry_after_s == 0.0
    node.why = ""
    assert isinstance(node.prepare("b", "g0"), Prepared), "nothing is kept for it"


def test_an_older_attempt_does_not_take_the_room_of_a_newer_one() -> None:
    node = Node()
    node.prepare("a", "g0", attempt=2)
    refused(node.prepare("a", "g0", attempt=1), "attempt 2 of job a is prepared here already")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (("python", "train.py"), ""),
        (("python", "-m", "train"), ""),
        (("python", "absent.py"), "there is no script absent.py"),
        ((sys.executable, "absent.py"), "there is no script absent.py"),
        (("./run.sh",), ""),
        (("./not-executable.sh",), "there is no program ./not-executable.sh"),
        (("no-such-program-here",), "there is no program no-such-program-here"),
        (("sh", "-c", "true"), ""),
    ],
)
def test_what_is_not_there_is_told_before_anything_starts(
    program: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "not-executable.sh").write_text("")
    found = cannot_start(program, str(tmp_path))
    assert found.startswith(said) if said else found == ""
    assert "there is no folder /nowhere" in cannot_start(program, "/nowhere")


def test_a_program_is_looked_for_where_its_own_environment_says(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("#!/bin/sh\n")
    (tmp_path / "mine").chmod(0o755)
    assert cannot_start(("mine",), "")
    assert not cannot_start(("mine",), "", path=str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "mine").rename(tmp_path / "bin" / "mine")
    assert not cannot_start(("mine",), "", venv=str(tmp_path))


def test_a_rank_is_told_its_place_as_torchrun_does() -> None:
    allocation = ((NodeId("n1"), 4), (NodeId("n2"), 2))
    rank = RunRank(
        JobId("a"), 2, 0, 3, PROGRAM, "", ("g0", "g1"), allocation, {}, "n1.example:4001"
    )
    assert gang_environment(rank, NodeId("n2")) == {
        "MASTER_ADDR": "n1.example", "MASTER_PORT": "4001", "WORLD_SIZE": "3", "RANK": "2",
        "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "TORCHELASTIC_RUN_ID": "a",
    }  # fmt: skip


def test_a_port_is_kept_for_rank_0_alone_until_another_attempt() -> None:
    with closing(KeptPorts()) as ports:
        port = ports.take("a", 0, (), 0.0)
        assert ports.take("a", 0, (), RESERVED_S + 1.0) == port, "it is repeated"
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("", port))
        at = ("127.0.0.1", port)
        with socket.create_server(("", port)) as rank, socket.create_connection(at):
            rank.accept()[0].close()
        others = {ports.take(f"j{n}", 0, (), 0.0) for n in range(50)}
        assert port not in others
        assert len(others) == 50
        assert ports.take("a", 1, (), 0.0) != port


def test_ports_of_jobs_that_never_came_are_given_up() -> None:
    with closing(KeptPorts()) as ports:
        runs, gone = (ports.take(job, 0, (), 0.0) for job in ("runs", "gone"))
        ports.take("new", 0, [("runs", 0)], RESERVED_S + 1.0)
        with socket.socket() as other:
            other.bind(("", gone))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", runs))
