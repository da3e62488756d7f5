"""A job's program has a say at a handful of subjects, about its own job and rank alone."""

from asyncio import StreamWriter
from collections import Counter
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base import codec
from slackwater.common.base.errors import AccessRefused, DecodeRejected
from slackwater.schemas import subjects
from slackwater.schemas.base import JobId, Message
from slackwater.schemas.job_requests import AskMissing, FinishJob, RegisterJob, SubmitJob
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import LocateJob
from slackwater.schemas.relay import ASKED, RelayAsk, RelayHello, RelayTell, may
from slackwater.schemas.telemetry import IterationsObserved
from slackwater.schemas.tensors import TensorSpec
from slackwater.services.worker.relay import Allowance, Greeting, allowed, first_to_go

HELLO = RelayHello(job="j", rank=1, attempt=3, token=bytes(32))
MASTER = subjects.command("master", subjects.MASTER, "finish")
REGISTER = subjects.command("master", subjects.MASTER, "register")
TENSORS = (TensorSpec(name="w", shape=(1,)),)
WORDS = st.sampled_from(
    ("master", "controller", "worker", "aggregator", "main", "j", "i", "c1", "register", "finish",
     "submit", "locate", "iterations", "goodput", "drain", "start", "job", "*", ">", "", "a b"),
)  # fmt: skip


def asked(subject: str, message: Message) -> Message:
    return allowed(HELLO, RelayAsk(number=1, subject=subject, timeout_s=1.0), codec.encode(message))


def observed(job: str, rank: int) -> bytes:
    return codec.encode(
        IterationsObserved(
            job=JobId(job), rank=rank, first_iteration=1, durations_s=(), location_epoch=0,
            bytes_pushed=0, bytes_pulled=0,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (REGISTER, RegisterJob(job="j", rank=1, tensors=TENSORS)),
        (MASTER, FinishJob(job="j", rank=1)),
        (
            subjects.command("master", "main", "missing"),
            AskMissing(job="j", rank=1, iteration=1, waited_s=1.0, behind=((0, 1),)),
        ),
        (subjects.command("controller", "c1", "locate"), LocateJob(job="j", rank=1, attempt=3)),
    ],
)  # fmt: skip
def test_a_rank_speaks_for_itself_and_for_no_other(subject: str, message: Message) -> None:
    said = asked(subject, msgspec.structs.replace(message, sender="master.m1", epoch=2**40))
    assert (said.sender, said.epoch) == ("agent.j.1", 0)
    for other in ({"job": "i"}, {"rank": 0}):
        with pytest.raises(AccessRefused, match="speaks for itself alone"):
            asked(subject, msgspec.structs.replace(message, **other))


def test_a_process_is_not_told_the_token_of_another() -> None:
    locate = subjects.command("controller", "c1", "locate")
    for attempt in (0, 2, 4):
        with pytest.raises(AccessRefused, match="speaks for itself alone"):
            asked(locate, LocateJob(job="j", rank=1, attempt=attempt))


def test_it_cannot_submit_a_job_by_registering_one() -> None:
    message = RegisterJob(job="j", rank=1, tensors=TENSORS, spec=JobSpec(id="j"))
    with pytest.raises(AccessRefused):
        asked(REGISTER, message)


def test_another_message_under_an_allowed_subject_is_refused() -> None:
    with pytest.raises(DecodeRejected):
        asked(MASTER, SubmitJob(spec=JobSpec(id="i")))


@pytest.mark.parametrize(
    "subject",
    [
        "sw.v1.cmd.master.main.submit", "sw.v1.cmd.master.m1.finish", "sw.v1.cmd.worker.w1.start",
        "sw.v1.cmd.controller.c1.empty", "sw.v1.evt.job.j.completed",
        "$JS.API.STREAM.DELETE.KV_jobs",
        "$KV.jobs.j", "sw.v1.cmd.controller.*.locate", "sw.v1.cmd.controller.>", "_INBOX.x.1", "",
        "sw.v1.tel.job.j.goodput.x", "x.sw.v1.cmd.master.main.finish",
        "sw.v1.cmd.master.main.finish\n",
    ],
)  # fmt: skip
def test_it_has_no_say_elsewhere(subject: str) -> None:
    assert may("j", "ask", subject) is None
    assert may("j", "tell", subject) is None


def test_it_tells_of_its_own_job_alone() -> None:
    own, other = (subjects.telemetry("job", job, "iterations") for job in ("j", "i"))
    tell = RelayTell(number=1, subject=own)
    assert allowed(HELLO, tell, observed("j", 1)).sender == "agent.j.1"
    for payload in (observed("i", 1), observed("j", 0)):
        with pytest.raises(AccessRefused):
            allowed(HELLO, tell, payload)
    with pytest.raises(AccessRefused):
        allowed(HELLO, RelayTell(number=1, subject=other), observed("j", 1))
    assert may("j", "ask", own) is None, "telemetry is not asked"


@given(st.lists(WORDS, min_size=1, max_size=5), st.sampled_from(("cmd", "evt", "tel", "$JS", "")))
def test_only_the_tables_open_a_subject(words: list[str], kind: str) -> None:
    subject = ".".join(("sw.v1", kind, *words))
    opened = {f"sw.v1.cmd.{noun}.{{}}.{verb}" for noun, verb in ASKED}
    pattern = ".".join(("sw.v1", kind, words[0], "{}", *words[2:]))
    if may("j", "ask", subject) is not None:
        assert pattern in opened
        assert words[0] != "master" or words[1] == "main"
    if may("j", "tell", subject) is not None:
        assert words[:2] == ["job", "j"]
        assert len(words) == 3


def test_a_rank_may_send_so_much_and_no_more() -> None:
    allowance = Allowance(left=2.0, at_s=0.0)
    assert [allowance.take(0.0) > 0.0 for _ in range(3)] == [False, False, True]
    assert allowance.take(1.0) == 0.0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 3))
def test_who_has_fewer_silent_connections_than_others_keeps_them(
    uids: list[int], processes: int
) -> None:
    writer = Mock(spec=StreamWriter)
    greetings = [Greeting(n % processes, uid, writer) for n, uid in enumerate(uids)]
    gone = first_to_go(greetings)
    most = Counter(uids)
    assert most[gone.uid] == max(most.values())
    of_uid = [each for each in greetings if each.uid == gone.uid]
    same = [each for each in of_uid if each.pid == gone.pid]
    assert gone is same[0], "the oldest of the process"
