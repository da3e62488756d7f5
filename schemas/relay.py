"""Frames between an Agent and the worker service that started its program, and what a job may say.

A job's program is a stranger: it is not on the bus. Its worker service passes on what the tables
here name, if it speaks of the job and the rank that the program runs as, and nothing else.
"""

from typing import Annotated, Final, Literal

import msgspec

from slackwater.schemas.base import (
    RUN_ATTEMPTS,
    Count,
    IdText,
    Message,
    Rank,
    Seconds,
    Text,
    cut_texts,
)
from slackwater.schemas.checkpoints import MarkJob
from slackwater.schemas.job_requests import (
    AskMissing,
    AskSize,
    FinishJob,
    JoinJob,
    KeepMark,
    Meet,
    RegisterJob,
    UseHosts,
)
from slackwater.schemas.placement import LocateJob
from slackwater.schemas.subjects import MASTER, parsed
from slackwater.schemas.telemetry import GoodputReport, IterationsObserved

TOKEN_BYTES: Final = 32
Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
Kind = Literal["access", "rejected", "nobody", "late", "unavailable"]
"""The error of common/base/errors.py that a refusal stands for."""
Subject = Annotated[str, msgspec.Meta(max_length=256)]

OfJob = (
    RegisterJob
    | FinishJob
    | AskMissing
    | AskSize
    | JoinJob
    | Meet
    | KeepMark
    | UseHosts
    | LocateJob
    | MarkJob
    | IterationsObserved
    | GoodputReport
)

ASKED: Final[dict[tuple[str, str], type[OfJob]]] = {
    ("master", "register"): RegisterJob,
    ("master", "finish"): FinishJob,
    ("master", "missing"): AskMissing,
    ("master", "size"): AskSize,
    ("master", "join"): JoinJob,
    ("master", "meet"): Meet,
    ("master", "mark"): KeepMark,
    ("master", "use"): UseHosts,
    ("controller", "locate"): LocateJob,
    ("controller", "mark"): MarkJob,
}
"""Requests that a rank may make: service and verb. The master is the leading one; a job's
controller may be any, for the master chooses it."""
TOLD: Final[dict[str, type[OfJob]]] = {
    "iterations": IterationsObserved,
    "goodput": GoodputReport,
}
"""Telemetry that a rank may publish about its own job."""


def may(job: str, verb: Literal["ask", "tell"], subject: str) -> type[OfJob] | None:
    """Return the message that a rank of `job` may send there; None: it may not."""
    words = parsed(subject)
    if words is None:
        return None
    if verb == "ask" and words.kind == "cmd":
        if words.noun == "master" and words.id != MASTER:
            return None
        return ASKED.get((words.noun, words.what))
    if verb == "tell" and words.kind == "tel" and (words.noun, words.id) == ("job", job):
        return TOLD.get(words.what)
    return None


def is_own(message: OfJob, job: str, rank: int, attempt: int) -> bool:
    """Say whether the message speaks of this process of the rank, and of a job that was
    submitted."""
    if isinstance(message, RegisterJob) and message.spec is not None:
        return False  # It would be admitted as a new job.
    if isinstance(message, GoodputReport):  # It tells the job's attempt, not its process's number.
        return (message.job, message.attempt) == (job, attempt // RUN_ATTEMPTS)
    own = getattr(message, "rank", rank), getattr(message, "attempt", attempt)
    return message.job == job and own == (rank, attempt)


class RelayHello(Message, kw_only=True, frozen=True, tag="relay.hello"):
    """The first frame of an Agent. Answered by RelayAnswer 0, or RelayRefused 0 and the end."""

    job: IdText
    rank: Rank
    attempt: Count
    """The number of the rank's process."""
    token: Token


class RelayAsk(Message, kw_only=True, frozen=True, tag="relay.ask"):
    """Make a request on the bus with the bytes that follow. Answered under the same number."""

    number: Count
    subject: Subject
    timeout_s: Seconds


class RelayTell(Message, kw_only=True, frozen=True, tag="relay.tell"):
    """Publish the bytes that follow. Answered under the same number once the bus has them."""

    number: Count
    subject: Subject


class RelayAnswer(Message, kw_only=True, frozen=True, tag="relay.answer"):
    """It is done; the answer's bytes follow."""

    number: Count


class RelayRefused(Message, kw_only=True, frozen=True, tag="relay.refused"):
    """It is not done."""

    number: Count
    kind: Kind
    reason: Text
    retry_after_s: Seconds = 0.0

    def __post_init__(self) -> None:
        cut_texts(self)


PermitKind = Literal["compute", "move", "receive"]
"""The kinds of subtasks: one uses the node's processors, the others its link, to send and to
receive by: each way carries as much, whatever the other one does."""


class PermitAsk(Message, kw_only=True, frozen=True, tag="permit.ask"):
    """Ask to begin a subtask (Lee 2020, section 4.3.1). Answered by PermitGranted when its turn has
    come. A connection has one subtask at a time."""

    kind: PermitKind


class PermitEnd(Message, kw_only=True, frozen=True, tag="permit.end"):
    """The subtask is over, or not wanted any more. Not answered."""


class PermitGranted(Message, kw_only=True, frozen=True, tag="permit.granted"):
    """Begin; or, of a subtask that has begun as the secondary one: go on as the primary one."""

    secondary: bool = False
    """Another process's bytes go first: take what they leave of the link."""
    interface: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The link, if it is the secondary one."""
    budget_bytes_s: Count = 0
    """Bytes a second, each way, that are to be had of it."""


class MemoryAsk(Message, kw_only=True, frozen=True, tag="memory.ask"):
    """Ask how much memory this process may use, and say how it does with what it has (Lee 2020,
    section 4.3.3). Answered by MemoryShare at once."""

    used_bytes: Count = 0
    aside_bytes: Count = 0
    """Bytes of its data that are in files."""
    stalled_s: Seconds = 0.0
    """For how long it has waited for these in all, with nothing else to do."""


class MemoryShare(Message, kw_only=True, frozen=True, tag="memory.share"):
    """Use so much memory, and no more, from now on."""

    limit_bytes: Count


RelayFrame = (
    RelayHello
    | RelayAsk
    | RelayTell
    | RelayAnswer
    | RelayRefused
    | PermitAsk
    | PermitEnd
    | PermitGranted
    | MemoryAsk
    | MemoryShare
)
